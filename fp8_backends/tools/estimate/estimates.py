"""Estimate memory, traffic and time of a training step before it runs (docs/planning.rst,
docs/speed.rst).

Two traces with two and three layers (`step_trace.py`) give the growth with depth, one with twice
the batch the growth of activations. Models with different layers are traced whole. `Rank` derives
the costs of one of several ranks.
"""

from __future__ import annotations

import bisect
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch

from ...comm.two_shot import MESSAGE_BLOCK
from ...compute import chips
from ...compute.chips import Rates
from ...compute.fields import check_known, parsed, whole_number
from ...compute.rates import constant
from ...compute.registry import compute_of
from ...errors import FP8BackendError, RecipeError
from ...recipes.handlers import Recipe, resolve
from ...recipes.strings import names_file
from ...rules import Machine, Setup, refuse
from ...rules.engines import ENGINE_RULES, RELEASE_RULES
from ...states.levels import STORED_WEIGHTS
from ...words import counted, readable_bytes, shown
from ..terminal import FEATURES
from .model_shapes import FEWEST_LAYERS, ModelShape
from .step_time import DEVICES_OF_A_MACHINE, StepTime, StepWork, host_seconds, step_time
from .step_trace import (
    ACTIVATIONS,
    BUFFERS,
    CODES,
    COPIES,
    GRADIENTS,
    MASTER,
    STATES,
    WEIGHTS,
    Bytes,
    StepSettings,
    StepTrace,
    trace_step,
)

BASELINE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}
"""Dtypes of autocast by name. As a backend, a name means training without FP8."""

WEIGHT_DTYPES = ("fp32", "bf16")

SHARDINGS = ("none", "ddp", "fsdp2", "hsdp", "zero1", "zero2", "zero3")
"""`hsdp` is FSDP2 inside a machine of 8 devices and DDP between machines. `+tp:N` after any but
ZeRO's splits each layer between N devices; `tp:N` alone is none or DDP with it."""
DEEPSPEED = ("zero1", "zero2", "zero3")

LAYOUT_RULES = (*ENGINE_RULES, *RELEASE_RULES)
"""Limits of shardings, of tensor parallelism and of gradient release."""

SHARE_OF_MEMORY = 0.92
"""Share of a device's memory for tensors; the CUDA context, workspaces and fragmentation take the
rest."""


@dataclass(kw_only=True)
class Workload:
    model: ModelShape
    batch: int = 1
    """Sequences of one device at a time; 0: the most that fit."""
    sequence: int = 1024
    checkpointing: bool = False
    weights: str = "fp32"
    """"fp32", under autocast, or "bf16" throughout."""
    devices: int = 1
    memory: float | None = None
    """Bytes of one device."""
    chip: str | None = None
    """A name in `chips.CARDS`, for seconds."""
    compiled: bool = False
    """`torch.compile` of each layer."""
    microbatches: int = 1
    """Accumulated before a step."""
    cores: int = field(default_factory=lambda: os.cpu_count() or 1)
    """Of the host for each device, for steps there with offload."""

    def __post_init__(self) -> None:
        for name in ("batch", "sequence", "devices", "microbatches", "cores"):
            setattr(self, name, parsed(name, whole_number(name != "batch"), getattr(self, name)))
        if not self.batch and self.memory is None:
            raise RecipeError("batch=0 (the most that fit) needs the memory of a device")

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.weights == "fp32" else torch.bfloat16


@dataclass
class Estimate:
    """Costs of one backend under one sharding: bytes of one device, in one step."""

    backend: str
    sharding: str
    devices: int
    batch: int = 0
    """Sequences of one device at a time."""
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
    host: float = 0.0
    """Bytes in the host's memory, with offload."""
    linked: float = 0.0
    """Bytes over PCIe in a step, both ways together, with offload."""
    time: StepTime | None = None
    """Seconds with their parts and interval; None without public rates of the chip, and in FP32."""
    speedup: tuple[float, ...] | None = None
    """Tokens a second over bf16 under the same sharding and batch: low, predicted, high."""
    tokens_per_second: float | None = None
    """Of one device."""
    flops_share: float = 0.0
    """FP8 share, 0 to 1, of the FLOPs of weight products."""
    parameters: float = 0.0
    fits: bool | None = None
    largest_parameters: float | None = None
    """Parameters of the largest model of this shape, deeper or less deep, that fits."""
    largest_layers: int | None = None
    largest_batch: int | None = None
    """Sequences of one device that fit; 0: not one."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Fields of the recipe besides those in its string or file."""
    refused: str = ""
    """Reason why this backend cannot train under this sharding; nothing else is then set."""
    notes: list[str] = field(default_factory=list)

    @property
    def static(self) -> float:
        """Bytes of weights, masters, gradients and states, as `audit` reports at the optimizer's
        step."""
        return self.weights + self.master + self.gradients + self.states

    def to_dict(self) -> dict[str, Any]:
        plain = {**asdict(self), "static": self.static}
        return plain | ({"seconds": self.time.seconds} if self.time else {})


def estimate(
    workload: Workload,
    backends: Collection[str | Recipe],
    shardings: Collection[str] = ("none",),
    on_backend: Callable[[str], object] = lambda name: None,
    traced: dict[tuple, Growth] | None = None,
) -> list[Estimate]:
    """Estimate each backend under each sharding, in this order.

    A backend that cannot train this model has the reason in `refused`.

    Args:
        backends: backend strings and recipes, and "bf16", "fp16" or "fp32" for training without
            FP8.
        shardings: names from `SHARDINGS`.
        on_backend: called with the name of each backend before the trace of its steps, which takes
            seconds.
        traced: keeps the traces for a later call that differs in `devices`, `memory`, `chip` or
        `compiled` only.

    Raises:
        RecipeError: an unknown backend, sharding or dtype of weights.
        FP8BackendError: no backend can train this model, or its memory depends on values.
    """
    for name, names in (("backends", backends), ("shardings", shardings)):
        if not isinstance(names, Collection) or isinstance(names, str):
            raise RecipeError(f"{name}={shown(names)}: {name} must be a list of names")
    layouts = {sharding: Layout.parsed(sharding, workload.devices) for sharding in shardings}
    check_known("dtype of weights", workload.weights, WEIGHT_DTYPES)
    workload.model.check_sequence(workload.sequence)
    recipes = [named(backend) for backend in backends]
    traced = {} if traced is None else traced
    estimates = []
    for sharding in shardings:
        for name, recipe, fields in recipes:
            on_backend(name)
            estimates.append(_estimate(workload, name, recipe, layouts[sharding], traced))
            estimates[-1].fields = fields
    if estimates and all(each.refused for each in estimates):
        raise FP8BackendError("; ".join(dict.fromkeys(each.refused for each in estimates)))
    return estimates


def named(backend: Any) -> tuple[str, Recipe | None, dict[str, Any]]:
    """Return a backend's name, its recipe (None without FP8), and the fields not in this name. A
    recipe file has its path as a name."""
    baseline = str(backend).lower()
    if baseline in BASELINE_DTYPES:
        return baseline, None, {}
    recipe = resolve(backend)
    given = backend if isinstance(backend, Mapping) else {"backend": backend}
    if names_file(file := given.get("backend")):
        return file, recipe, {name: value for name, value in given.items() if name != "backend"}
    return recipe.name, recipe, recipe.given_settings


@dataclass
class _Case:
    """One backend under one layout, for models of any depth and batch."""

    workload: Workload
    layout: Layout
    recipe: Recipe | None
    growth: Growth

    def rank(self, layers: int, batch: int) -> Rank:
        return Rank(self.layout.split(self.growth, layers, batch), self.layout, self.recipe)

    def fits(self, layers: int, batch: int) -> bool:
        return highest(self.rank(layers, batch).step())[1] <= SHARE_OF_MEMORY * self.workload.memory

    @classmethod
    def traced(
        cls, workload: Workload, layout: Layout, backend: str, recipe: Recipe | None, traced: dict
    ) -> _Case:
        """Trace a backend's steps, or take them from `traced`: shardings share them."""
        is_te = recipe is not None and recipe.compute == "te"
        releases = recipe is not None and recipe.gradient_release
        key = (
            backend,
            repr(recipe),
            layout.kind in DEEPSPEED,
            is_te and layout.kind == "fsdp2",
            releases and layout.kind == "ddp",
        )
        if key not in traced:
            traced[key] = Growth.traced(workload, recipe, layout.kind, backend)
        return cls(workload, layout, recipe, traced[key])


def _estimate(
    workload: Workload, backend: str, recipe: Recipe | None, layout: Layout, traced: dict
) -> Estimate:
    result = Estimate(backend, layout.sharding, workload.devices)
    try:
        if recipe is not None:
            refuse(layout.setup(recipe, workload.microbatches), LAYOUT_RULES)
            if layout.kind in DEEPSPEED and recipe.level != "O0":
                layout = replace(layout, kind="ddp")
                recipe = recipe.replace(shard_states=True)
        case = _Case.traced(workload, layout, backend, recipe, traced)
        layout.check(case.growth)
    except FP8BackendError as error:
        result.refused = str(error).split("\n")[0]
        return result
    if recipe is not None:
        for name, setting in FEATURES.items():
            if (value := getattr(recipe, name)) != setting.default:
                result.notes.append(f"{name}={value!r}, of the backends in FP8")
        if recipe.compute == "te":
            result.notes.append(
                "te: as its native equivalent, with the second copy of the weights' codes that it "
                "keeps"
            )
    if workload.devices > 1:
        result.notes.append(layout.note)
    layers = workload.model.layers
    batch = workload.batch or max(1, _largest(lambda count: case.fits(layers, count)))
    rank = case.rank(layers, batch)
    trace = rank.step()
    result.batch = batch
    for part in (WEIGHTS, MASTER, STATES, BUFFERS):
        setattr(result, part, trace.resting[part])
    result.gradients = trace.saved[GRADIENTS]
    result.sent = rank.sent_bytes()
    if rank.offloads:
        result.host, result.linked = rank.offloaded_bytes()
    result.copies = trace.saved[COPIES] + trace.saved[CODES]
    result.activations = trace.saved[ACTIVATIONS]
    result.peak_at, result.peak = highest(trace)
    result.flops_share = trace.sizes["flops_fp8"] / (trace.sizes["flops"] or 1)
    result.parameters = case.growth.at(layers, batch).sizes["parameters"]
    rates, obstacle = _rates_of(workload, recipe)
    if obstacle:
        result.notes.append(f"{backend}: {obstacle}")
    elif rates is not None and backend not in ("fp16", "fp32"):
        plain = _Case.traced(workload, layout, "bf16", None, traced).rank(layers, batch)
        waits = layout.waiting_bytes(workload, layers, batch)
        works = [each.work(plain.trace.sizes, batch, waits, workload) for each in (rank, plain)]
        result.time, result.speedup = step_time(*works, recipe, rates, workload.compiled)
        tokens = workload.microbatches * batch * workload.sequence
        result.tokens_per_second = tokens / result.time.seconds / layout.tensor
    if rank.offloads:
        result.notes.append(_offload_note(result, rank.work({}, batch, 0.0, workload), recipe))
    if workload.memory is not None:
        result.fits = case.fits(layers, batch)
        result.largest_batch = _largest(lambda count: case.fits(layers, count))
        if case.growth.deeper is not case.growth.first:
            result.largest_layers = _largest(lambda count: case.fits(count, batch))
            largest = case.growth.at(result.largest_layers, batch)
            result.largest_parameters = largest.sizes["parameters"]
    return result


def _offload_note(result: Estimate, work: StepWork, recipe: Recipe) -> str:
    """Describe the copies and the step in the host, and how much of them backward hides."""
    link = work.linked / constant("PCIe")
    step = host_seconds(work, recipe.level)
    text = (
        f"{result.backend} with offload: {readable_bytes(result.host)} in the host; "
        f"{readable_bytes(result.linked)} over PCIe a step, {link:.2g} s each way at "
        f"{constant('PCIe') / 1e9:.0f} GB/s; steps there {step:.2g} s on {counted(work.cores, 'core')}"
    )
    if result.time is None:
        return text
    wait = f"the device waits {result.time.parts['offload']:.2g} s"
    if recipe.gradient_release:
        return f"{text}, while backward goes on: {wait}"
    return f"{text}, after backward: {wait}"


def _rates_of(workload: Workload, recipe: Recipe | None) -> tuple[Rates | None, str]:
    """Return the rates of the chip, if known, and the reason for no time of this recipe."""
    product = chips.CARDS.get(workload.chip)
    if product is None:
        return None, ""
    if recipe is not None and product.rates is not None:
        cell = chips.cell_of(f"{recipe.compute}:{recipe.scaling}", product.chip)
        if cell is not None and cell.state != chips.RUNS:
            return None, f"its FP8 products are {cell.state} on this chip, so it has no time"
    if recipe is not None and (recipe.gradient_formats or len(recipe.recipes) > 1):
        reason = "several scaling rules or gradient formats in one model have no time"
        return None, reason
    return product.rates, ""


@dataclass(frozen=True)
class Layout:
    """A sharding of a number of devices."""

    sharding: str
    """As given."""
    kind: str
    """One of SHARDINGS, with FSDP2 for `hsdp`."""
    tensor: int
    """Devices that share each layer."""
    ranks: int
    """Groups of them, with different data."""
    shards: int
    """Groups that FSDP2 shards a parameter over."""

    @classmethod
    def parsed(cls, sharding: str, devices: int) -> Layout:
        """Read a name of SHARDINGS, `tp:N` or `NAME+tp:N`. Raises `RecipeError`."""
        kind, _, ways = sharding.rpartition("tp:") if "tp:" in sharding else (sharding, "", "1")
        tensor = parsed("tp", whole_number(1), int(ways) if ways.isdecimal() else ways)
        kind = kind.removesuffix("+") or ("none" if devices == tensor else "ddp")
        check_known("sharding", kind, SHARDINGS)
        if devices % tensor or (tensor > 1 and kind in DEEPSPEED):
            raise RecipeError(
                f"sharding {sharding!r} of {devices} devices: tp:N divides them, and not with ZeRO"
            )
        ranks = devices // tensor
        shards = ranks
        if kind == "hsdp":
            shards = min(ranks, max(1, DEVICES_OF_A_MACHINE // tensor))
            kind = "fsdp2"
        if ranks % shards:
            raise RecipeError(
                f"sharding {sharding!r} of {devices} devices: machines have {DEVICES_OF_A_MACHINE} "
                "each, and hsdp takes whole ones"
            )
        return cls(sharding, kind, tensor, ranks, shards)

    def setup(self, recipe: Recipe, microbatches: int) -> Setup:
        """Return what the rules read of a training under this sharding."""
        stage = int(self.kind[-1]) if self.kind in DEEPSPEED else None
        return Setup(
            recipe,
            Machine.this(),
            parallel="deepspeed" if stage else self.kind,
            zero_stage=stage,
            tensor_parallel=self.tensor,
            accumulation_steps=microbatches,
        )

    @property
    def note(self) -> str:
        if self.tensor > 1:
            return (
                f"tp:{self.tensor}: blocks split between devices; embedding, head and residual "
                "stream are whole on each"
            )
        return "figures are those without tensor parallelism: each device has whole layers, or gathers them"

    def check(self, growth: Growth) -> None:
        """Raise `FP8BackendError` if tensor parallelism has no blocks to split."""
        if self.tensor > 1 and growth.deeper is growth.first:
            raise FP8BackendError("tensor parallelism is estimated for models of equal layers")

    def split(self, growth: Growth, layers: int, batch: int) -> StepTrace:
        """Return the trace of a device that has 1 / N of each block: of its weights, products, and
        the activations between a pair of Linears."""
        whole = growth.at(layers, batch)
        if self.tensor == 1:
            return whole
        outside = growth.at(0, batch)
        ways = self.tensor
        sides = [
            (count * min(k, n), count * (k + n))
            for (_, _, k, n, _), count in whole.products.items()
        ]
        # the residual stream's side
        kept = sum(each for each, _ in sides) / sum(each for _, each in sides)
        shares = dict.fromkeys((ACTIVATIONS, "moved", "packed"), kept + (1 - kept) / ways)
        shares |= dict.fromkeys(("calls", "weight_width", "trained_width"), 1.0)

        def divided(name: Any, all_blocks: float, rest: float) -> float:
            return rest + (all_blocks - rest) * shares.get(name, 1 / ways)

        trace = whole.combined(divided, outside)
        trace.sizes |= {name: whole.sizes[name] / ways for name in ("block", "block_scaled")}
        trace.products = defaultdict(float)
        for key, count in whole.products.items():
            kind, rows, k, n, in_fp8 = key
            rest = outside.products[key]
            trace.products[key] += rest
            # the longer side of a weight is the divided one
            narrow = (kind, rows, k, n / ways, in_fp8)
            if k > n:
                narrow = (kind, rows, k / ways, n, in_fp8)
            trace.products[narrow] += count - rest
        trace.products = {key: count for key, count in trace.products.items() if count > 1e-9}
        return trace

    def waiting_bytes(self, workload: Workload, layers: int, batch: int) -> float:
        """Return the bytes of sums over tensor-parallel devices: two a layer forward, and two
        backward."""
        width = getattr(workload.model.config, "hidden_size", 0)
        sums = (
            (6 if workload.checkpointing else 4) * layers * batch * workload.sequence * width * HALF
        )
        return 2 * (self.tensor - 1) / self.tensor * sums


def highest(trace: StepTrace) -> tuple[str, float]:
    """Return the (region, bytes) of the highest moment."""
    return max(
        ((region, sum(parts.values())) for region, parts in trace.peaks.items()),
        key=lambda peak: peak[1],
    )


def _largest(holds: Callable[[int], bool]) -> int:
    """Return the largest number, from 0 to 2**24, up to which `holds` is true."""
    return bisect.bisect_left(range(1, 2**24), True, key=lambda count: not holds(count))


@dataclass
class Growth:
    """Extrapolate a step's trace to other depths and batches."""

    first: StepTrace
    deeper: StepTrace
    """With one more layer; `first` for a model that is traced whole."""
    wider: Callable[[], StepTrace]
    """With twice the batch."""
    layers: int
    batch: int

    def at(self, layers: float, batch: float) -> StepTrace:
        """Return the trace for this depth and batch.

        Numbers that grow with depth do not depend on the batch, except activations, which are
        proportional to it. The bytes that kernels move are of a sample: its share of a batch's
        weights falls.
        """

        def grown(name: Any, first: float, deeper: float, wider: float) -> float:
            by_layer = deeper - first
            if name == ACTIVATIONS:
                by_layer *= batch / self.batch
            more = (batch - self.batch) * (wider - first) / self.batch
            if name in ("moved", "moved_outside"):
                more *= 2 * self.batch / batch
            return first + (layers - self.layers) * by_layer + more

        wider = self.first if batch == self.batch else self.wider()
        return self.first.combined(grown, self.deeper, wider)

    @classmethod
    def traced(
        cls, workload: Workload, recipe: Recipe | None, sharding: str, backend: str
    ) -> Growth:
        """Trace a model with few layers if its layers are alike, and with twice the batch once
        another one is asked."""
        batch = workload.batch or 1
        model = workload.model
        trace = partial(trace_model, workload, recipe, sharding, backend)
        short = model.with_layers(FEWEST_LAYERS) if model.grows_evenly else model
        first = trace(short, batch)
        deeper = trace(model.with_layers(FEWEST_LAYERS + 1), batch) if model.grows_evenly else first
        return cls(first, deeper, cache(partial(trace, short, 2 * batch)), short.layers, batch)


def trace_model(
    workload: Workload,
    recipe: Recipe | None,
    sharding: str,
    backend: str,
    model: ModelShape,
    batch: int,
) -> StepTrace:
    """Trace a step of this model and batch, trained as the workload says."""
    autocast = BASELINE_DTYPES[backend if recipe is None else recipe.autocast_dtype]
    dtype = workload.dtype
    if sharding in DEEPSPEED:  # holds the model in bf16
        dtype = torch.bfloat16
        autocast = None
    settings = StepSettings(
        # `Rank` moves its bytes to the host
        recipe=None if recipe is None else recipe.replace(offload="off"),
        autocast=autocast,
        checkpointing=workload.checkpointing,
        releases=("scaled" if sharding == "ddp" else "all")
        if getattr(recipe, "gradient_release", False)
        else "none",
        accumulates=workload.microbatches > 1,
    )

    make_batch = partial(model.make_batch, batch, workload.sequence, dtype)
    trace = trace_step(lambda: model.make_model(dtype), make_batch, settings, model.stacks)
    if getattr(recipe, "compute", "") == "te":
        _add_te_codes(trace, recipe, sharding)
    is_wide = dtype == torch.float32
    trace.sizes["weight_width"] = SINGLE if is_wide and not model.lora else HALF
    trace.sizes["trained_width"] = (
        SINGLE if is_wide or model.lora or sharding in DEEPSPEED else HALF
    )
    packs = getattr(recipe, "saved_activations", "off") != "off"
    trace.sizes["packed"] = trace.saved[ACTIVATIONS] / batch if packs else 0.0
    return trace


def _add_te_codes(trace: StepTrace, recipe: Recipe, sharding: str) -> None:
    """Add the weight codes that TransformerEngine keeps beyond its native equivalent: two copies
    before Blackwell, for fprop and dgrad, of which the first is the weight from O3 on, and with
    `fp8_params`; none of plain weights gathered by FSDP2."""
    in_fp8 = STORED_WEIGHTS.get(recipe.level) == torch.float8_e4m3fn
    is_first = in_fp8 and recipe.scaling in ("delayed", "dynamic") or recipe.fp8_params
    copies = 1 if is_first else 2
    if sharding == "fsdp2" and recipe.level == "O0":
        copies = 0
    more = copies * trace.sizes["converted"] - trace.saved[CODES]
    trace.saved[CODES] += more
    in_backward = "backward of the head", "backward of the last block"
    # all are live
    for region in trace.peaks.keys() & {
        "forward",
        "forward of the last block",
        "loss",
        *in_backward,
    }:
        trace.peaks[region][CODES] += more


# One of several ranks

FP8_MESSAGE = (MESSAGE_BLOCK + 1) / MESSAGE_BLOCK
"""Bytes of an element in an E4M3 message, including its share of a scale."""
DDP_BUCKET = 25 * 2**20
"""DDP's `bucket_cap_mb`, in bytes."""
ZERO_BUCKET = 5e8
"""DeepSpeed's `reduce_bucket_size` and `allgather_bucket_size`, in elements."""
HALF = 2
SINGLE = 4
"""Bytes of an element."""
GATHERED_LAYERS = 2
"""Blocks with whole parameters on a rank at a time: the current one and the next."""


class Rank:
    """One of `ranks` ranks, each with the traced batch (for DeepSpeed with bf16 weights and no
    autocast)."""

    def __init__(self, trace: StepTrace, layout: Layout, recipe: Recipe | None) -> None:
        self.trace = trace
        self.sharding = layout.kind
        self.ranks = layout.ranks
        self.shards = layout.shards
        self.shares_states = recipe is not None and recipe.shares_states
        self.sends_fp8 = recipe is not None and recipe.comm == "fp8"
        self.scaled_width = (
            0 if recipe is None or recipe.level == "O0" else STORED_WEIGHTS[recipe.level].itemsize
        )
        """Bytes of an element of a scaled weight in products; 0 without scaled weights."""
        self.offloads = recipe is not None and recipe.offload != "off"
        self.gathers_codes = recipe is not None and (
            recipe.fp8_params or compute_of(recipe).gathers_codes(recipe)
        )

    def step(self) -> StepTrace:
        trace = self.trace
        peaks = {region: self._holds_in(region, parts) for region, parts in trace.peaks.items()}
        return replace(
            trace, resting=self._holds(trace.resting), saved=self._holds(trace.saved), peaks=peaks
        )

    def _holds(self, parts: Bytes) -> Bytes:
        parts = dict(parts)
        sizes = self.trace.sizes
        ranks = self.shards
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
        if self.offloads and STATES in parts:
            parts[STATES] -= sizes["scaled_states"] / self._owners
            parts[MASTER] = 0.0
        return parts

    def _holds_in(self, region: str, parts: Bytes) -> Bytes:
        """Return this rank's bytes at a moment of the step, including temporary ones."""
        sizes = self.trace.sizes
        held = self._holds(parts)
        if region == "step":
            if self.sharding in DEEPSPEED:
                held[GRADIENTS] += held[MASTER]  # the gradient of this rank's part, in FP32
            return held
        goes_back = region.startswith("backward")
        if self.sharding in ("fsdp2", "zero3"):
            width = 1 if self.gathers_codes else self.scaled_width
            # as gathered
            block = width * sizes["block_scaled"] + HALF * (sizes["block"] - sizes["block_scaled"])
            held[WEIGHTS] += HALF * sizes["outside"] + GATHERED_LAYERS * block
            held[GRADIENTS] += GATHERED_LAYERS * HALF * sizes["block"] if goes_back else 0
        elif self.sharding == "ddp" and self.ranks > 1 and goes_back:
            held[GRADIENTS] += self._in_flight(region)
        elif self.sharding == "zero2" and goes_back:
            held[GRADIENTS] += 2 * HALF * min(ZERO_BUCKET, sizes["trained"])
        return held

    def _in_flight(self, region: str) -> float:
        """Return the bytes of scaled weights' gradients in flight under DDP: they wait in high
        precision for a full bucket (at the latest after the first blocks), and go into messages, or
        are copied for a plain sum."""
        sizes = self.trace.sizes
        bucket = min(SINGLE * sizes["scaled"], max(DDP_BUCKET, SINGLE * sizes["largest_scaled"]))
        is_full = region not in ("backward of the head", "backward of the last block")
        if not is_full and bucket >= SINGLE * sizes["block_scaled"]:
            return 0.0
        if not self.sends_fp8:
            return 2 * bucket
        # sent, received, and this rank's part in FP32
        messages = 2 * FP8_MESSAGE + SINGLE / self.ranks
        return bucket * (1 + messages / SINGLE)

    def work(
        self, plain: dict[str, float], batch: int, waits: float, workload: Workload
    ) -> StepWork:
        """Return this rank's work in a step; `plain` has the flows of the same step in bf16."""
        sizes = self.trace.sizes
        owned = 1.0
        if self.sharding in ("fsdp2", *DEEPSPEED):
            owned /= self.shards
        scaled = owned * sizes["scaled"]
        if self.sharding == "ddp" and self.shares_states:
            scaled /= self.ranks
        width = self.scaled_width or int(sizes["weight_width"])
        if not self.scaled_width and self.sharding in ("fsdp2", "zero3"):
            width = HALF
        return StepWork(
            products=self.trace.products,
            flows=plain,
            batch=batch,
            trained=owned * (sizes["trained"] - sizes["scaled"]) + scaled,
            scaled=scaled,
            weight_bytes=width,
            sent=self.sent_bytes(),
            waits=waits,
            devices=self.ranks,
            packed=sizes["packed"] * batch,
            trained_bytes=int(sizes["trained_width"]),
            microbatches=workload.microbatches,
            linked=scaled * max(FP8_MESSAGE, self.scaled_width) if self.offloads else 0.0,
            cores=workload.cores,
            largest=sizes["largest_scaled"],
        )

    @property
    def _owners(self) -> int:
        """Return the number of ranks that share the states."""
        return self.ranks if self.sharding == "ddp" and self.shares_states else 1

    def offloaded_bytes(self) -> tuple[float, float]:
        """Return the bytes in the host's memory, and over its link in a step."""
        sizes, scaled = self.trace.sizes, self.trace.sizes["scaled"] / self._owners
        rest = self.trace.resting[MASTER] + sizes["scaled_states"]
        return (
            rest / self._owners + scaled * self.scaled_width,
            scaled * (FP8_MESSAGE + self.scaled_width),
        )

    def sent_bytes(self) -> float:
        """Return the bytes that the rank sends to others in one step without accumulation."""
        if self.ranks == 1 or self.sharding == "none":
            return 0.0
        sizes = self.trace.sizes
        share = (self.shards - 1) / self.shards
        scaled = sizes["scaled"]
        trained = sizes["trained"]
        states = 2 * share * SINGLE * sizes["scaling_states"]
        if self.sharding == "ddp":
            if self.sends_fp8 and not scaled:  # DDP's communication hook takes all
                return states + 2 * share * FP8_MESSAGE * trained
            gradients = sizes["plain_gradients"] + scaled * (
                FP8_MESSAGE if self.sends_fp8 else SINGLE
            )
            owned = scaled if self.shares_states else 0
            return states + 2 * share * gradients + share * owned * self.scaled_width
        if self.sharding == "fsdp2":
            narrow, width = (
                (sizes["converted"], 1) if self.gathers_codes else (scaled, self.scaled_width)
            )
            weights = width * narrow + HALF * (sizes["parameters"] - narrow)
            # in backward; parameters outside the blocks stay gathered
            again = weights - HALF * sizes["outside"]
            width = FP8_MESSAGE if self.sends_fp8 else HALF
            replicas = self.ranks / self.shards
            # sums of shards over the machines
            between = 2 * (1 - 1 / replicas) * trained * width / self.shards
            return states + share * (weights + again + trained * width) + between
        # gradients; weights, with ZeRO-3 in forward and in backward
        passes = 3 if self.sharding == "zero3" else 2
        return states + passes * share * HALF * trained
