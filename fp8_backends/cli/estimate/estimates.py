"""Memory and traffic of a training step, told before it runs.

A step of the model is traced on fake tensors (`step_trace.py`) with two and with three layers, and from there on
everything grows evenly with depth: weights, gradients, states, saved activations, and with them the highest moment of
each region of the step. The same with twice the batch says how activations grow. Models whose layers differ are traced
whole. What a rank of several holds and sends follows from the trace (`sharded_costs.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ...compute.fields import check_known, parsed, whole_number
from ...errors import FP8BackendError, RecipeError
from ...recipes.handlers import Recipe, resolve
from ...states.levels import WEIGHT
from ...words import shown
from . import sharded_costs
from .model_shapes import LONG, SHORT, ModelShape
from .step_trace import (
    ACTIVATIONS,
    BUFFERS,
    CODES,
    COPIES,
    MASTER,
    STATES,
    WEIGHTS,
    StepSettings,
    StepTrace,
    trace_step,
)

BASELINES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}
"""The dtype of autocast by its name. As a backend, a name stands for training without FP8."""

WEIGHT_DTYPES = ("fp32", "bf16")

USABLE = 0.92
"""Share of a device's memory that tensors can have. The rest is for the CUDA context, libraries' workspaces, and what
the allocator cannot use because it is in pieces."""


@dataclass(kw_only=True)
class Workload:
    """What is trained, and on what."""

    model: ModelShape
    batch: int = 1
    """Sequences in the batch of one device."""
    sequence: int = 1024
    checkpointing: bool = False
    weights: str = "fp32"
    """"fp32", under autocast, or "bf16" throughout."""
    devices: int = 1
    memory: float | None = None
    """Bytes of one device; None: not asked."""

    def __post_init__(self) -> None:
        for name in ("batch", "sequence", "devices"):
            setattr(self, name, parsed(name, whole_number(1), getattr(self, name)))


@dataclass
class Estimate:
    """What one backend takes under one sharding: bytes of one device, in one step."""

    backend: str
    sharding: str
    devices: int
    weights: float = 0.0
    master: float = 0.0
    gradients: float = 0.0
    states: float = 0.0
    """The optimizer's states."""
    buffers: float = 0.0
    """The model's buffers, FP8's scaling states among them, and DDP's buckets."""
    copies: float = 0.0
    """Copies of weights from forward to backward: autocast's, FP8 codes."""
    activations: float = 0.0
    """What is kept from forward to backward beside them."""
    peak: float = 0.0
    """The highest moment of the step."""
    peak_at: str = ""
    """When that is."""
    sent: float = 0.0
    """What goes to other devices."""
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
    """Why this backend does not go with this sharding; then nothing else is known."""
    notes: list[str] = field(default_factory=list)

    @property
    def static(self) -> float:
        """Bytes of weights, masters, gradients and states: what `audit` finds at the optimizer's step."""
        return self.weights + self.master + self.gradients + self.states

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "static": self.static}


def estimate(
    workload: Workload,
    backends: Collection[str | Recipe],
    shardings: Collection[str] = ("none",),
    on_backend: Callable[[str], object] = lambda name: None,
) -> list[Estimate]:
    """Estimate each backend under each sharding, in this order. A backend that cannot train this model has the reason
    in `refused`.

    Args:
        backends: backend strings and recipes, and "bf16", "fp16" or "fp32" for training without FP8.
        shardings: names from `sharded_costs.SHARDINGS`.
        on_backend: called with the name of each backend before its steps are traced, which takes seconds.

    Raises:
        RecipeError: an unknown backend or sharding, or a dtype of weights that no model is trained in.
        FP8BackendError: no backend can train this model, or its memory cannot be told.
    """
    for name, names in (("backends", backends), ("shardings", shardings)):
        if not isinstance(names, Collection) or isinstance(names, str):
            raise RecipeError(f"{name}={shown(names)}: {name} must be a list of names")
    for sharding in shardings:
        check_known("sharding", sharding, sharded_costs.SHARDINGS)
    check_known("dtype of weights", workload.weights, WEIGHT_DTYPES)
    longest = workload.model.longest
    if longest is not None and longest < workload.sequence:
        raise FP8BackendError(f"a sequence of {workload.sequence} tokens exceeds the model's {longest} positions")
    asked = []
    for name in backends:
        baseline = str(name).lower()
        recipe = None if baseline in BASELINES else resolve(name)
        asked.append((baseline if recipe is None else recipe.name, recipe))
    traced: dict[tuple, Growth] = {}
    found = []
    for sharding in shardings:
        for name, recipe in asked:
            on_backend(name)
            found.append(_estimate(workload, name, recipe, sharding, traced))
    if found and all(each.refused for each in found):
        raise FP8BackendError("; ".join(dict.fromkeys(each.refused for each in found)))
    return found


def _estimate(workload: Workload, backend: str, recipe: Recipe | None, sharding: str, traced: dict) -> Estimate:
    """Estimate one backend under one sharding. `traced`: what was traced so far, which shardings share."""
    found = Estimate(backend, sharding, workload.devices)
    if sharding in sharded_costs.DEEPSPEED and recipe is not None and recipe.level != "O0":
        found.refused = f"level {recipe.level} goes with DDP and FSDP2, not with DeepSpeed's ZeRO"
        return found
    of_te, of_release = sharding == "fsdp2" and _is_te(recipe), sharding == "ddp" and _releases(recipe)
    key = (backend, id(recipe), sharding in sharded_costs.DEEPSPEED, of_te, of_release)
    try:
        growth = traced[key] = traced.get(key) or Growth.traced(workload, recipe, sharding, backend)
    except FP8BackendError as error:
        found.refused = str(error).split("\n")[0]
        return found

    if recipe is not None and recipe.saved_activations != "off":
        found.notes.append(f"saved_activations={recipe.saved_activations!r}, of the backends in FP8")

    def on_one_rank(layers: float, batch: float) -> sharded_costs.Rank:
        return sharded_costs.Rank(growth.at(layers, batch), sharding, workload.devices, recipe)

    def fits(layers: int, batch: int) -> bool:
        return highest(on_one_rank(layers, batch).step())[1] <= USABLE * workload.memory

    if _is_te(recipe):
        found.notes.append("te: as its native equivalent, with the second copy of the weights' codes that it keeps")
    if workload.devices > 1:
        found.notes.append(
            "figures are those without tensor parallelism: each device has whole layers, or gathers them"
        )
    layers, batch = workload.model.layers, workload.batch
    rank = on_one_rank(layers, batch)
    trace = rank.step()
    for part in (WEIGHTS, MASTER, STATES, BUFFERS):
        setattr(found, part, trace.resting[part])
    found.gradients, found.sent = trace.gradients, rank.sent_bytes()
    found.copies, found.activations = trace.saved[COPIES] + trace.saved[CODES], trace.saved[ACTIVATIONS]
    found.peak_at, found.peak = highest(trace)
    found.flops_share = trace.sizes["flops_fp8"] / (trace.sizes["flops"] or 1)
    found.parameters = trace.sizes["parameters"]
    if workload.memory is not None:
        found.fits, found.largest_batch = fits(layers, batch), _largest(lambda count: fits(layers, count))
        if growth.in_layers:
            found.largest_layers = _largest(lambda count: fits(count, batch))
            found.largest_parameters = growth.at(found.largest_layers, batch).sizes["parameters"]
    return found


def highest(trace: StepTrace) -> tuple[str, float]:
    """Return the (region, bytes) of the highest moment."""
    totals = {region: sum(parts.values()) for region, parts in trace.peaks.items()}
    region = max(totals, key=totals.get)
    return region, totals[region]


def _largest(holds: Callable[[int], bool]) -> int:
    """Return the largest number, from 0, up to which `holds` is true."""
    if not holds(1):
        return 0
    low, high = 1, 2
    while holds(high) and high < 2**24:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


Numbers = dict[tuple[str, ...], float]


@dataclass
class Growth:
    """How the numbers of a trace grow with depth and batch."""

    coefficients: dict[tuple[str, ...], tuple[float, float, float, float]] = field(default_factory=dict)
    """By number: (base, by layer, by batch, by both)."""
    in_layers: bool = True
    """Whether depth was varied; else the model is taken as it is."""

    def at(self, layers: float, batch: float) -> StepTrace:
        layers = layers if self.in_layers else 0
        found = {}
        for key, (base, by_layer, by_batch, by_both) in self.coefficients.items():
            found[key] = base + layers * by_layer + batch * (by_batch + layers * by_both)
        return StepTrace.from_numbers(found)

    @classmethod
    def traced(cls, workload: Workload, recipe: Recipe | None, sharding: str, backend: str) -> Growth:
        """Trace the model with few layers, where its layers are alike. The batch is varied where a memory is given for
        it to fit into.

        What grows with depth and is no activation does not depend on the batch; an activation that grows with depth is
        proportional to it.
        """
        batch, in_layers = workload.batch, workload.model.grows_evenly
        trace = tracer(workload, recipe, sharding, backend)
        short = workload.model.with_layers(SHORT) if in_layers else workload.model
        layers = SHORT if in_layers else 0
        first = trace(short, batch)
        deeper = trace(workload.model.with_layers(LONG), batch) if in_layers else first
        wider = trace(short, 2 * batch) if workload.memory is not None else first
        growth = cls(in_layers=in_layers)
        for key, value in first.items():
            by_depth = (deeper[key] - value) / (LONG - SHORT)
            by_width = (wider[key] - value) / batch
            both = by_depth / batch if key[-1] == ACTIVATIONS else 0.0
            by_layer, by_batch = by_depth - batch * both, by_width - layers * both
            base = value - layers * by_layer - batch * by_width
            growth.coefficients[key] = (base, by_layer, by_batch, both)
        return growth


def tracer(workload: Workload, recipe: Recipe | None, sharding: str, backend: str) -> Callable[..., Numbers]:
    """Return a function (model, batch) -> the numbers of the trace of its step."""
    autocast = BASELINES[backend if recipe is None else recipe.autocast_dtype]
    dtype = torch.float32 if workload.weights == "fp32" else torch.bfloat16
    if sharding in sharded_costs.DEEPSPEED:  # which holds the model in bf16
        dtype, autocast = torch.bfloat16, None
    settings = StepSettings(
        recipe=recipe,
        autocast=autocast,
        checkpointing=workload.checkpointing,
        releases="none" if not _releases(recipe) else "scaled" if sharding == "ddp" else "all",
    )

    def trace(model: ModelShape, batch: int) -> Numbers:
        def make_batch() -> dict[str, torch.Tensor]:
            made = model.make_batch(batch, workload.sequence)
            return {name: each.to(dtype) if each.is_floating_point() else each for name, each in made.items()}

        found = trace_step(lambda: model.make_model(dtype), make_batch, settings, model.stacks)
        if _is_te(recipe):
            _add_te_codes(found, recipe, sharding)
        return found.numbers()

    return trace


def _releases(recipe: Recipe | None) -> bool:
    return recipe is not None and recipe.gradient_release


def _is_te(recipe: Recipe | None) -> bool:
    return recipe is not None and recipe.compute == "te"


_ALL_CODES_LIVE = {
    "forward", "forward of the last block", "loss", "backward of the head", "backward of the last block",
}  # fmt: skip


def _add_te_codes(trace: StepTrace, recipe: Recipe, sharding: str) -> None:
    """Add the codes of weights that TransformerEngine keeps beside those of its native equivalent.

    It keeps them from forward to backward twice (as before Blackwell), as they are read by fprop and by dgrad; from O3
    on the first are the weight. The native equivalent keeps them once, or makes them in backward. Under FSDP2
    TransformerEngine makes those of gathered plain weights again.
    """
    in_fp8 = WEIGHT.get(recipe.level) == torch.float8_e4m3fn
    copies = 1 if in_fp8 and recipe.scaling in ("delayed", "dynamic") else 2
    if sharding == "fsdp2" and recipe.level == "O0":
        copies = 0
    more = copies * trace.sizes["converted"] - trace.saved[CODES]
    trace.saved[CODES] += more
    for region in _ALL_CODES_LIVE & trace.peaks.keys():
        trace.peaks[region][CODES] += more
