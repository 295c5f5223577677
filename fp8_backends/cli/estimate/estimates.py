"""Memory and traffic of a training step, told before it runs.

A step of the model is traced on fake tensors (`step_trace.py`) with two and with three layers, and from there on
everything grows evenly with depth: weights, gradients, states, saved activations, and with them the highest moment of
each region of the step. The same with twice the batch says how activations grow. Models whose layers differ are traced
whole. What a rank of several holds and sends follows from the trace (`sharded_costs.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ...errors import FP8BackendError
from ...recipes import handlers as recipes
from ...recipes.handlers import Recipe
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
"""Without FP8: the dtype of autocast."""
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}
WEIGHT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

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
    fused: bool = True
    """`torch.optim.AdamW(fused=…)`."""


@dataclass
class Estimate:
    """Of one backend under one sharding. Bytes are those of one device, of one step."""

    backend: str
    sharding: str
    devices: int
    weights: float = 0.0
    master: float = 0.0
    gradients: float = 0.0
    states: float = 0.0
    """Of the optimizer."""
    buffers: float = 0.0
    """Of the model, FP8's scaling states among them, and DDP's buckets."""
    copies: float = 0.0
    """Of weights, from forward to backward: autocast's, FP8 codes."""
    activations: float = 0.0
    """From forward to backward."""
    peak: float = 0.0
    """The highest moment of the step."""
    peak_at: str = ""
    """When that is."""
    sent: float = 0.0
    """To other devices."""
    flops_share: float = 0.0
    """FP8 share, 0 to 1, of the FLOPs of weight products."""
    parameters: float = 0.0
    fits: bool | None = None
    largest_parameters: float | None = None
    """Of a model of this shape, deeper or less deep, that fits."""
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
    workload: Workload, backends: Iterable[str | Recipe], shardings: Iterable[str] = ("none",)
) -> list[Estimate]:
    """Estimates of each backend under each sharding, in this order. A backend that cannot train this model has the
    reason in `refused`.

    Args:
        backends: backend strings and recipes, and "bf16", "fp16" or "fp32" for training without FP8.
        shardings: of `sharded_costs.SHARDINGS`.

    Raises:
        RecipeError: an unknown backend.
        FP8BackendError: no backend can train this model, or its memory cannot be told.
    """
    longest = workload.model.longest
    if longest is not None and longest < workload.sequence:
        raise FP8BackendError(f"a sequence of {workload.sequence} tokens exceeds the model's {longest} positions")
    asked = [(name, _recipe_of(name)) for name in backends]
    shardings = list(shardings)
    known: dict[tuple, Growth] = {}
    found = [_estimate(workload, name, recipe, sharding, known) for sharding in shardings for name, recipe in asked]
    if found and all(each.refused for each in found):
        raise FP8BackendError("; ".join(dict.fromkeys(each.refused for each in found)))
    return found


def _recipe_of(name: str | Recipe) -> Recipe | None:
    return None if str(name).lower() in BASELINES else recipes.resolve(name)


def _estimate(workload: Workload, name: str | Recipe, recipe: Recipe | None, sharding: str, known: dict) -> Estimate:
    """`known`: the traces so far, which shardings share."""
    found = Estimate(str(name).lower() if recipe is None else recipe.name, sharding, workload.devices)
    refused = sharded_costs.refusal(recipe, sharding)
    if refused is not None:
        found.refused = refused
        return found
    key = (found.backend, sharding in sharded_costs.DEEPSPEED, sharding == "fsdp2" and _is_te(recipe))
    try:
        growth = known[key] = known.get(key) or Growth.traced(workload, recipe, sharding, found.backend)
    except FP8BackendError as error:
        found.refused = str(error).split("\n")[0]
        return found

    def of_rank(layers: float, batch: float) -> StepTrace:
        return sharded_costs.of_one_rank(growth.at(layers, batch), sharding, workload.devices, recipe)

    if _is_te(recipe):
        found.notes.append("te: as its native twin, with the second copy of the weights' codes that it keeps")
    layers = workload.model.layers
    _fill(found, of_rank(layers, workload.batch))
    found.sent = sharded_costs.sent_bytes(growth.at(layers, workload.batch), sharding, workload.devices, recipe)
    if workload.memory is not None:
        _fill_limits(found, workload, growth, of_rank)
    return found


def _fill(found: Estimate, trace: StepTrace) -> None:
    """What one rank holds."""
    for part in (WEIGHTS, MASTER, STATES, BUFFERS):
        setattr(found, part, trace.resting[part])
    found.gradients = trace.gradients
    found.copies, found.activations = trace.saved[COPIES] + trace.saved[CODES], trace.saved[ACTIVATIONS]
    found.peak_at, found.peak = _highest(trace)
    found.flops_share = trace.sizes["flops_fp8"] / trace.sizes["flops"]
    found.parameters = trace.sizes["parameters"]


def _highest(trace: StepTrace) -> tuple[str, float]:
    """(region, bytes) of the highest moment."""
    totals = {region: sum(parts.values()) for region, parts in trace.peaks.items()}
    region = max(totals, key=totals.get)
    return region, totals[region]


def _fill_limits(found: Estimate, workload: Workload, growth: Growth, of_rank: Callable) -> None:
    """Whether it fits, and what would."""
    usable = USABLE * workload.memory

    def fits(layers: int, batch: int) -> bool:
        return _highest(of_rank(layers, batch))[1] <= usable

    layers, batch = workload.model.layers, workload.batch
    found.fits = fits(layers, batch)
    found.largest_batch = _largest(lambda n: fits(layers, n))
    if growth.in_layers:
        found.largest_layers = _largest(lambda n: fits(n, batch))
        found.largest_parameters = growth.at(found.largest_layers, batch).sizes["parameters"]


def _largest(holds: Callable[[int], bool]) -> int:
    """The largest number, from 0, up to which `holds` is true."""
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
    """How the numbers of a trace grow: base + layers * by_layer + batch * (by_batch + layers * by_both)."""

    base: Numbers
    by_layer: Numbers
    by_batch: Numbers
    by_both: Numbers
    in_layers: bool = True
    """Whether depth was varied; else the model is taken as it is."""

    def at(self, layers: float, batch: float) -> StepTrace:
        layers = layers if self.in_layers else 0
        return StepTrace.from_numbers(
            {
                key: base + layers * self.by_layer[key] + batch * (self.by_batch[key] + layers * self.by_both[key])
                for key, base in self.base.items()
            }
        )

    @classmethod
    def traced(cls, workload: Workload, recipe: Recipe | None, sharding: str, title: str) -> Growth:
        """From traces of the model with few layers, where its layers are alike. The batch is varied where a memory is
        given for it to fit into."""
        model, batch, varied = workload.model, workload.batch, workload.memory is not None
        trace = _tracer(workload, recipe, sharding, title)
        if not model.grows_evenly:
            whole = trace(model, batch)
            return cls._of_whole(whole, trace(model, 2 * batch) if varied else whole, batch)
        short, long = model.with_layers(SHORT), model.with_layers(LONG)
        first, deeper = trace(short, batch), trace(long, batch)
        return cls._fitted(first, deeper, trace(short, 2 * batch) if varied else first, batch)

    @classmethod
    def _of_whole(cls, one: Numbers, two: Numbers, batch: int) -> Growth:
        slope = {key: (two[key] - one[key]) / batch for key in one}
        zero = dict.fromkeys(one, 0.0)
        return cls({key: one[key] - batch * slope[key] for key in one}, zero, slope, zero, in_layers=False)

    @classmethod
    def _fitted(cls, first: Numbers, deeper: Numbers, wider: Numbers, batch: int) -> Growth:
        """From (SHORT layers, batch), (LONG layers, batch) and (SHORT layers, 2 * batch).

        What grows with depth and is no activation does not depend on the batch; an activation that grows with depth is
        proportional to it.
        """
        growth = cls({}, {}, {}, {})
        for key, value in first.items():
            by_depth = (deeper[key] - value) / (LONG - SHORT)
            by_width = (wider[key] - value) / batch
            both = by_depth / batch if key[-1] == ACTIVATIONS else 0.0
            growth.by_both[key] = both
            growth.by_layer[key] = by_depth - batch * both
            growth.by_batch[key] = by_width - SHORT * both
            growth.base[key] = value - SHORT * growth.by_layer[key] - batch * by_width
        return growth


def _tracer(workload: Workload, recipe: Recipe | None, sharding: str, title: str) -> Callable[..., Numbers]:
    """A function (model, batch) -> the numbers of the trace of its step."""
    autocast = BASELINES[title] if recipe is None else AUTOCAST[recipe.autocast_dtype]
    dtype, autocast = sharded_costs.trains_in(sharding, WEIGHT_DTYPES[workload.weights], autocast)
    settings = StepSettings(
        recipe=_twin(recipe), autocast=autocast, checkpointing=workload.checkpointing, fused=workload.fused
    )

    def trace(model: ModelShape, batch: int) -> Numbers:
        found = trace_step(
            lambda: model.make_model(dtype), lambda: model.make_batch(batch, workload.sequence), settings, model.blocks
        )
        if _is_te(recipe):
            _add_te_codes(found, recipe, sharding)
        return found.numbers()

    return trace


def _twin(recipe: Recipe | None) -> Recipe | None:
    """TransformerEngine runs on GPUs only: the native twin of its recipe in its place."""
    if not _is_te(recipe):
        return recipe
    return recipes.resolve(recipe.name.replace("te:", "native:", 1))


def _is_te(recipe: Recipe | None) -> bool:
    return recipe is not None and recipe.compute == "te"


def _add_te_codes(trace: StepTrace, recipe: Recipe, sharding: str) -> None:
    """TransformerEngine keeps a weight's codes from forward to backward twice (as before Blackwell), as they are read
    by fprop and by dgrad; at O3 the first are the weight. Its native twin keeps them once, or makes them in backward.
    Under FSDP2 it makes those of gathered plain weights again."""
    one_scale = recipe.scaling in ("delayed", "dynamic")
    copies = 1 if recipe.level == "O3" and one_scale else 2
    if sharding == "fsdp2" and recipe.level == "O0":
        copies = 0
    more = copies * trace.sizes["converted"] - trace.saved[CODES]
    trace.saved[CODES] += more
    for region in _ALL_CODES_LIVE & trace.peaks.keys():
        trace.peaks[region][CODES] += more


_ALL_CODES_LIVE = {
    "forward", "forward of the last block", "loss", "backward of the head", "backward of the last block",
}  # fmt: skip
