"""Estimate memory and traffic of a training step before it runs (docs/planning.rst).

Two traces with two and three layers (`step_trace.py`) give the growth with depth, one with twice the batch the growth
of activations. Models with different layers are traced whole. `Rank` derives the costs of one of several ranks.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch

from ...comm.two_shot import BLOCK
from ...compute import registry
from ...compute.fields import check_known, parsed, whole_number
from ...errors import FP8BackendError, RecipeError
from ...recipes.handlers import Recipe, resolve
from ...states.levels import WEIGHT
from ...words import shown
from ..terminal import FEATURES
from .model_shapes import SHORT, ModelShape
from .step_trace import PARTS, Bytes, StepSettings, StepTrace, trace_step

WEIGHTS, MASTER, GRADIENTS, STATES, BUFFERS, COPIES, CODES, ACTIVATIONS = PARTS

BASELINES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}
"""Dtypes of autocast by name. As a backend, a name means training without FP8."""

WEIGHT_DTYPES = ("fp32", "bf16")

SHARDINGS = ("none", "ddp", "fsdp2", "zero1", "zero2", "zero3")
DEEPSPEED = ("zero1", "zero2", "zero3")

USABLE = 0.92
"""Share of a device's memory for tensors; the CUDA context, workspaces and fragmentation take the rest."""


@dataclass(kw_only=True)
class Workload:
    model: ModelShape
    batch: int = 1
    sequence: int = 1024
    checkpointing: bool = False
    weights: str = "fp32"
    """"fp32", under autocast, or "bf16" throughout."""
    devices: int = 1
    memory: float | None = None
    """Bytes of one device."""

    def __post_init__(self) -> None:
        for name in ("batch", "sequence", "devices"):
            setattr(self, name, parsed(name, whole_number(1), getattr(self, name)))


@dataclass
class Estimate:
    """Costs of one backend under one sharding: bytes of one device, in one step."""

    backend: str
    sharding: str
    devices: int
    weights: float = 0.0
    master: float = 0.0
    gradients: float = 0.0
    states: float = 0.0
    buffers: float = 0.0
    """Buffers of the model, including FP8 scaling states, and DDP's buckets."""
    copies: float = 0.0
    """Copies of weights from forward to backward: autocast's, FP8 codes."""
    activations: float = 0.0
    """Other tensors saved for backward."""
    peak: float = 0.0
    peak_at: str = ""
    """Region of the step with the highest moment."""
    sent: float = 0.0
    flops_share: float = 0.0
    """FP8 share, 0 to 1, of the FLOPs of weight products."""
    parameters: float = 0.0
    fits: bool | None = None
    largest_parameters: float | None = None
    """Parameters of the largest model of this shape, deeper or less deep, that fits."""
    largest_layers: int | None = None
    largest_batch: int | None = None
    """Sequences of one device that fit; 0: not one."""
    refused: str = ""
    """Reason why this backend cannot train under this sharding; nothing else is then set."""
    notes: list[str] = field(default_factory=list)

    @property
    def static(self) -> float:
        """Bytes of weights, masters, gradients and states, as `audit` reports at the optimizer's step."""
        return self.weights + self.master + self.gradients + self.states

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "static": self.static}


def estimate(
    workload: Workload,
    backends: Collection[str | Recipe],
    shardings: Collection[str] = ("none",),
    on_backend: Callable[[str], object] = lambda name: None,
) -> list[Estimate]:
    """Estimate each backend under each sharding, in this order.

    A backend that cannot train this model has the reason in `refused`.

    Args:
        backends: backend strings and recipes, and "bf16", "fp16" or "fp32" for training without FP8.
        shardings: names from `SHARDINGS`.
        on_backend: called with the name of each backend before the trace of its steps, which takes seconds.

    Raises:
        RecipeError: an unknown backend, sharding or dtype of weights.
        FP8BackendError: no backend can train this model, or its memory depends on values.
    """
    for name, names in (("backends", backends), ("shardings", shardings)):
        if not isinstance(names, Collection) or isinstance(names, str):
            raise RecipeError(f"{name}={shown(names)}: {name} must be a list of names")
    for sharding in shardings:
        check_known("sharding", sharding, SHARDINGS)
    check_known("dtype of weights", workload.weights, WEIGHT_DTYPES)
    longest = workload.model.longest
    if longest is not None and longest < workload.sequence:
        raise FP8BackendError(f"a sequence of {workload.sequence} tokens exceeds the model's {longest} positions")
    recipes = []
    for name in backends:
        baseline = str(name).lower()
        recipe = None if baseline in BASELINES else resolve(name)
        recipes.append((baseline if recipe is None else recipe.name, recipe))
    traced: dict[tuple, Growth] = {}
    estimates = []
    for sharding in shardings:
        for name, recipe in recipes:
            on_backend(name)
            estimates.append(_estimate(workload, name, recipe, sharding, traced))
    if estimates and all(each.refused for each in estimates):
        raise FP8BackendError("; ".join(dict.fromkeys(each.refused for each in estimates)))
    return estimates


def _estimate(workload: Workload, backend: str, recipe: Recipe | None, sharding: str, traced: dict) -> Estimate:
    """Estimate one backend under one sharding. `traced` holds the traces so far, which shardings share."""
    result = Estimate(backend, sharding, workload.devices)
    if sharding in DEEPSPEED and recipe is not None and recipe.level != "O0":
        if sharding == "zero3":
            result.refused = f"level {recipe.level} goes with ZeRO-1, ZeRO-2, DDP and FSDP2, not with ZeRO-3"
            return result
        sharding, recipe = "ddp", recipe.replace(shard_states=True)
    is_te, releases = getattr(recipe, "compute", "") == "te", getattr(recipe, "gradient_release", False)
    kind = sharding in DEEPSPEED, is_te and sharding == "fsdp2", releases and sharding == "ddp"
    key = (backend, id(recipe), *kind)
    try:
        growth = traced[key] = traced.get(key) or Growth.traced(workload, recipe, sharding, backend)
    except FP8BackendError as error:
        result.refused = str(error).split("\n")[0]
        return result

    def on_one_rank(layers: int, batch: int) -> tuple[Rank, StepTrace]:
        rank = Rank(growth.at(layers, batch), sharding, workload.devices, recipe)
        return rank, rank.step()

    def fits(layers: int, batch: int) -> bool:
        return highest(on_one_rank(layers, batch)[1])[1] <= USABLE * workload.memory

    for name, setting in FEATURES.items() if recipe is not None else ():
        if (value := getattr(recipe, name)) != setting.default:
            result.notes.append(f"{name}={value!r}, of the backends in FP8")
    if is_te:
        result.notes.append("te: as its native equivalent, with the second copy of the weights' codes that it keeps")
    if workload.devices > 1:
        note = "figures are those without tensor parallelism: each device has whole layers, or gathers them"
        result.notes.append(note)
    layers, batch = workload.model.layers, workload.batch
    rank, trace = on_one_rank(layers, batch)
    for part in (WEIGHTS, MASTER, STATES, BUFFERS):
        setattr(result, part, trace.resting[part])
    result.gradients, result.sent = trace.saved[GRADIENTS], rank.sent_bytes()
    result.copies, result.activations = trace.saved[COPIES] + trace.saved[CODES], trace.saved[ACTIVATIONS]
    result.peak_at, result.peak = highest(trace)
    result.flops_share = trace.sizes["flops_fp8"] / (trace.sizes["flops"] or 1)
    result.parameters = trace.sizes["parameters"]
    if workload.memory is not None:
        result.fits, result.largest_batch = fits(layers, batch), _largest(lambda count: fits(layers, count))
        if growth.deeper is not growth.first:
            result.largest_layers = _largest(lambda count: fits(count, batch))
            result.largest_parameters = growth.at(result.largest_layers, batch).sizes["parameters"]
    return result


def highest(trace: StepTrace) -> tuple[str, float]:
    """Return the (region, bytes) of the highest moment."""
    return max(((region, sum(parts.values())) for region, parts in trace.peaks.items()), key=lambda peak: peak[1])


def _largest(holds: Callable[[int], bool]) -> int:
    """Return the largest number, from 0 to 2**24, up to which `holds` is true."""
    return bisect.bisect_left(range(1, 2**24), True, key=lambda count: not holds(count))


@dataclass
class Growth:
    """Extrapolate a step's trace to other depths and batches."""

    first: StepTrace
    deeper: StepTrace
    """With one more layer; `first` for a model that is traced whole."""
    wider: StepTrace
    """With twice the batch; `first` if no other batch is of interest."""
    layers: int
    batch: int

    def at(self, layers: float, batch: float) -> StepTrace:
        """Return the trace for this depth and batch.

        Numbers that grow with depth do not depend on the batch, except activations, which are proportional to it.
        """

        def grown(first: Bytes, deeper: Bytes, wider: Bytes) -> Bytes:
            numbers = {}
            for part, value in first.items():
                by_layer = (deeper[part] - value) * (batch / self.batch if part == ACTIVATIONS else 1)
                by_sample = (wider[part] - value) / self.batch
                numbers[part] = value + (layers - self.layers) * by_layer + (batch - self.batch) * by_sample
            return numbers

        traces = (self.first, self.deeper, self.wider)
        parts = {name: grown(*(getattr(trace, name) for trace in traces)) for name in ("resting", "sizes", "saved")}
        peaks = {region: grown(*(trace.peaks[region] for trace in traces)) for region in self.first.peaks}
        return StepTrace(**parts, peaks=peaks)

    @classmethod
    def traced(cls, workload: Workload, recipe: Recipe | None, sharding: str, backend: str) -> Growth:
        """Trace a model with few layers if its layers are alike, and with twice the batch if a memory is given."""
        batch, model = workload.batch, workload.model
        trace = partial(trace_model, workload, recipe, sharding, backend)
        short = model.with_layers(SHORT) if model.grows_evenly else model
        first = trace(short, batch)
        deeper = trace(model.with_layers(SHORT + 1), batch) if model.grows_evenly else first
        wider = trace(short, 2 * batch) if workload.memory is not None else first
        return cls(first, deeper, wider, short.layers, batch)


def trace_model(
    workload: Workload, recipe: Recipe | None, sharding: str, backend: str, model: ModelShape, batch: int
) -> StepTrace:
    """Trace a step of this model and batch, trained as the workload says."""
    autocast = BASELINES[backend if recipe is None else recipe.autocast_dtype]
    dtype = torch.float32 if workload.weights == "fp32" else torch.bfloat16
    if sharding in DEEPSPEED:  # holds the model in bf16
        dtype, autocast = torch.bfloat16, None
    settings = StepSettings(
        recipe=recipe,
        autocast=autocast,
        checkpointing=workload.checkpointing,
        releases=("scaled" if sharding == "ddp" else "all") if getattr(recipe, "gradient_release", False) else "none",
    )

    def make_batch() -> dict[str, torch.Tensor]:
        tensors = model.make_batch(batch, workload.sequence)
        return {name: each.to(dtype) if each.is_floating_point() else each for name, each in tensors.items()}

    trace = trace_step(lambda: model.make_model(dtype), make_batch, settings, model.stacks)
    if getattr(recipe, "compute", "") == "te":
        _add_te_codes(trace, recipe, sharding)
    return trace


def _add_te_codes(trace: StepTrace, recipe: Recipe, sharding: str) -> None:
    """Add the weight codes that TransformerEngine keeps beyond its native equivalent: two copies before Blackwell, for
    fprop and dgrad, of which from O3 on the first is the weight; none of plain weights gathered by FSDP2."""
    in_fp8 = WEIGHT.get(recipe.level) == torch.float8_e4m3fn
    copies = 1 if in_fp8 and recipe.scaling in ("delayed", "dynamic") else 2
    if sharding == "fsdp2" and recipe.level == "O0":
        copies = 0
    more = copies * trace.sizes["converted"] - trace.saved[CODES]
    trace.saved[CODES] += more
    in_backward = "backward of the head", "backward of the last block"
    for region in trace.peaks.keys() & {"forward", "forward of the last block", "loss", *in_backward}:  # all are live
        trace.peaks[region][CODES] += more


# One of several ranks

FP8_MESSAGE = (BLOCK + 1) / BLOCK
"""Bytes of an element in an E4M3 message, including its share of a scale."""
DDP_BUCKET = 25 * 2**20
"""DDP's `bucket_cap_mb`, in bytes."""
ZERO_BUCKET = 5e8
"""DeepSpeed's `reduce_bucket_size` and `allgather_bucket_size`, in elements."""
HALF, SINGLE = 2, 4
"""Bytes of an element."""
GATHERED = 2
"""Blocks with whole parameters on a rank at a time: the current one and the next."""


class Rank:
    """One of `ranks` ranks, each with the traced batch (for DeepSpeed with bf16 weights and no autocast)."""

    def __init__(self, trace: StepTrace, sharding: str, ranks: int, recipe: Recipe | None) -> None:
        self.trace, self.sharding, self.ranks = trace, sharding, ranks
        self.shares_states = recipe is not None and recipe.shares_states
        self.sends_fp8 = recipe is not None and recipe.comm == "fp8"
        self.scaled_width = 0 if recipe is None or recipe.level == "O0" else WEIGHT[recipe.level].itemsize
        """Bytes of an element of a scaled weight in products; 0 without scaled weights."""
        self.gathers_codes = recipe is not None and registry.get_compute(recipe.compute).gathers_codes(recipe)

    def step(self) -> StepTrace:
        trace = self.trace
        peaks = {region: self._holds_in(region, parts) for region, parts in trace.peaks.items()}
        return replace(trace, resting=self._holds(trace.resting), saved=self._holds(trace.saved), peaks=peaks)

    def _holds(self, parts: Bytes) -> Bytes:
        parts, sizes, ranks = dict(parts), self.trace.sizes, self.ranks
        if self.sharding == "ddp":
            if ranks > 1 and BUFFERS in parts:
                parts[BUFFERS] += sizes["plain_gradients"]  # DDP's buckets
            if self.shares_states and STATES in parts:
                parts[MASTER] /= ranks
                parts[STATES] -= (1 - 1 / ranks) * sizes["scaled_states"]
        elif self.sharding == "fsdp2":
            for part in parts.keys() & {WEIGHTS, MASTER, GRADIENTS, STATES}:
                parts[part] /= ranks
            if COPIES in parts:
                parts[COPIES] = 0.0  # gathered weights are in bf16 already: autocast copies nothing
        elif self.sharding in DEEPSPEED:
            if WEIGHTS in parts:
                parts[WEIGHTS] /= ranks if self.sharding == "zero3" else 1
                parts[MASTER] = SINGLE * sizes["trained"] / ranks
                parts[STATES] = 2 * parts[MASTER]
            if GRADIENTS in parts:
                parts[GRADIENTS] /= 1 if self.sharding == "zero1" else ranks
        return parts

    def _holds_in(self, region: str, parts: Bytes) -> Bytes:
        """Return this rank's bytes at a moment of the step, including temporary ones."""
        sizes, held = self.trace.sizes, self._holds(parts)
        if region == "step":
            if self.sharding in DEEPSPEED:
                held[GRADIENTS] += held[MASTER]  # the gradient of this rank's part, in FP32
            return held
        goes_back = region.startswith("backward")
        if self.sharding in ("fsdp2", "zero3"):
            width = 1 if self.gathers_codes else self.scaled_width
            block = width * sizes["block_scaled"] + HALF * (sizes["block"] - sizes["block_scaled"])  # as gathered
            held[WEIGHTS] += HALF * sizes["outside"] + GATHERED * block
            held[GRADIENTS] += GATHERED * HALF * sizes["block"] if goes_back else 0
        elif self.sharding == "ddp" and self.ranks > 1 and goes_back:
            held[GRADIENTS] += self._in_flight(region)
        elif self.sharding == "zero2" and goes_back:
            held[GRADIENTS] += 2 * HALF * min(ZERO_BUCKET, sizes["trained"])
        return held

    def _in_flight(self, region: str) -> float:
        """Return the bytes of scaled weights' gradients in flight under DDP: they wait in high precision for a full
        bucket (at the latest after the first blocks), and go into messages, or are copied for a plain sum."""
        sizes = self.trace.sizes
        bucket = min(SINGLE * sizes["scaled"], max(DDP_BUCKET, SINGLE * sizes["largest_scaled"]))
        is_full = region not in ("backward of the head", "backward of the last block")
        if not is_full and bucket >= SINGLE * sizes["block_scaled"]:
            return 0.0
        if not self.sends_fp8:
            return 2 * bucket
        messages = 2 * FP8_MESSAGE + SINGLE / self.ranks  # sent, received, and this rank's part in FP32
        return bucket * (1 + messages / SINGLE)

    def sent_bytes(self) -> float:
        """Return the bytes that the rank sends to others in one step without accumulation."""
        if self.ranks == 1 or self.sharding == "none":
            return 0.0
        sizes, share = self.trace.sizes, (self.ranks - 1) / self.ranks
        scaled, trained = sizes["scaled"], sizes["trained"]
        states = 2 * share * SINGLE * sizes["scaling_states"]
        if self.sharding == "ddp":
            if self.sends_fp8 and not scaled:  # DDP's communication hook takes all
                return states + 2 * share * FP8_MESSAGE * trained
            gradients = sizes["plain_gradients"] + scaled * (FP8_MESSAGE if self.sends_fp8 else SINGLE)
            owned = scaled if self.shares_states else 0
            return states + 2 * share * gradients + share * owned * self.scaled_width
        if self.sharding == "fsdp2":
            narrow, width = (sizes["converted"], 1) if self.gathers_codes else (scaled, self.scaled_width)
            weights = width * narrow + HALF * (sizes["parameters"] - narrow)
            again = weights - HALF * sizes["outside"]  # in backward; parameters outside the blocks stay gathered
            return states + share * (weights + again + trained * (FP8_MESSAGE if self.sends_fp8 else HALF))
        passes = 3 if self.sharding == "zero3" else 2  # gradients; weights, with ZeRO-3 in forward and in backward
        return states + passes * share * HALF * trained
