"""What one of N ranks holds and sends, from the trace of a step on one device.

=========  =====================================================================================================
sharding   what a rank holds beside activations
=========  =====================================================================================================
``none``   everything
``ddp``    everything, and DDP's buckets, as large as the gradients that it reduces; at O3 and O4 the masters (or
           residuals) and moments of scaled weights are spread over the ranks
``fsdp2``  1/N of weights, masters, gradients and moments; the parameters outside the blocks and those of two blocks
           (the one that computes and the next) gathered, and two blocks' gradients
``zero1``  DeepSpeed in bf16: weights and gradients, 1/N of FP32 masters, moments and of an FP32 copy of the gradients
``zero2``  the same with 1/N of the gradients, and two buckets of 5e8 elements
``zero3``  1/N of all, and the gathered parameters
=========  =====================================================================================================

Sent bytes are the least that any algorithm sends: 2 (N - 1) / N of what is summed over the ranks, (N - 1) / N of what
is gathered or scattered.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ...comm.two_shot import BLOCK
from ...recipes.handlers import Recipe
from ...states.levels import WEIGHT
from .step_trace import BUFFERS, COPIES, GRADIENTS, MASTER, STATES, WEIGHTS, Bytes, StepTrace

SHARDINGS = ("none", "ddp", "fsdp2", "zero1", "zero2", "zero3")
DEEPSPEED = ("zero1", "zero2", "zero3")

FP8_MESSAGE = (BLOCK + 1) / BLOCK
"""Bytes of an element that travels in E4M3, its share of a scale included."""
DDP_BUCKET = 25 * 2**20
"""DDP's `bucket_cap_mb`, in bytes."""
ZERO_BUCKET = 5e8
"""DeepSpeed's `reduce_bucket_size` and `allgather_bucket_size`, in elements."""
HALF, SINGLE = 2, 4
"""Bytes of an element."""
GATHERED = 2
"""Blocks whose parameters lie whole on a rank at a time: the one that computes, and the next."""


def refusal(recipe: Recipe | None, sharding: str) -> str | None:
    """Return why a backend does not go with a sharding, or None."""
    if sharding in DEEPSPEED and recipe is not None and recipe.level != "O0":
        return f"level {recipe.level} goes with DDP and FSDP2, not with DeepSpeed's ZeRO"
    return None


def on_one_rank(trace: StepTrace, sharding: str, ranks: int, recipe: Recipe | None) -> StepTrace:
    """Return the same step on one of `ranks` ranks, each of which has the traced batch for itself.

    `trace` is of weights in bf16 without autocast for DeepSpeed, and as trained on one device otherwise.
    """
    rank = _Rank(trace, sharding, ranks, recipe)
    return replace(
        trace,
        gradients=rank.holds({GRADIENTS: trace.gradients})[GRADIENTS],
        resting=rank.holds(trace.resting),
        saved=rank.holds(trace.saved),
        peaks={region: rank.holds_in(region, parts) for region, parts in trace.peaks.items()},
    )


class _Rank(NamedTuple):
    trace: StepTrace
    sharding: str
    ranks: int
    recipe: Recipe | None

    def holds(self, parts: Bytes) -> Bytes:
        """Return what of these parts lies on the rank for long."""
        change = {"none": dict, "ddp": self._ddp, "fsdp2": self._fsdp2}.get(self.sharding, self._deepspeed)
        return change(dict(parts))

    def _ddp(self, parts: Bytes) -> Bytes:
        if self.ranks > 1 and BUFFERS in parts:
            parts[BUFFERS] += self.trace.sizes["plain_gradients"]  # DDP's buckets
        if _shares_states_out(self.recipe) and STATES in parts:
            elsewhere = 1 - 1 / self.ranks
            parts[MASTER] -= elsewhere * parts[MASTER]
            parts[STATES] -= elsewhere * self.trace.sizes["scaled_states"]
        return parts

    def _fsdp2(self, parts: Bytes) -> Bytes:
        for part in parts.keys() & {WEIGHTS, MASTER, GRADIENTS, STATES}:
            parts[part] /= self.ranks
        if COPIES in parts:
            parts[COPIES] = 0.0  # what is gathered is in bf16 already: nothing for autocast
        return parts

    def _deepspeed(self, parts: Bytes) -> Bytes:
        stage, trained = int(self.sharding[-1]), self.trace.sizes["trained"]
        if WEIGHTS in parts:
            parts[WEIGHTS] /= self.ranks if stage == 3 else 1
            parts[MASTER], parts[STATES] = SINGLE * trained / self.ranks, 2 * SINGLE * trained / self.ranks
        if GRADIENTS in parts:
            parts[GRADIENTS] /= self.ranks if stage > 1 else 1
        return parts

    def holds_in(self, region: str, parts: Bytes) -> Bytes:
        """Return the same at a moment of the step, with what lives there only."""
        sizes, held = self.trace.sizes, self.holds(parts)
        if region == "step":
            if self.sharding in DEEPSPEED:
                held[GRADIENTS] += held[MASTER]  # the gradient of this rank's part, in FP32
            return held
        goes_back = region.startswith("backward")
        if self.sharding in ("fsdp2", "zero3"):
            held[WEIGHTS] += HALF * sizes["outside"] + GATHERED * _block_bytes(self.trace, self.recipe)
            held[GRADIENTS] += GATHERED * HALF * sizes["block"] if goes_back else 0
        elif self.sharding == "ddp" and self.ranks > 1 and goes_back:
            held[GRADIENTS] += _in_flight(self.trace, region, self.ranks, self.recipe)
        elif self.sharding == "zero2" and goes_back:
            held[GRADIENTS] += 2 * HALF * min(ZERO_BUCKET, sizes["trained"])
        return held


def _shares_states_out(recipe: Recipe | None) -> bool:
    return recipe is not None and recipe.shares_states


def _in_flight(trace: StepTrace, region: str, ranks: int, recipe: Recipe | None) -> float:
    """Return the bytes of gradients of scaled weights that are in flight under DDP.

    They wait in high precision until a bucket of them is there, and are read from there into messages, or copied for a
    plain sum. A bucket is full when the first blocks, which backward reaches last, are done, or sooner.
    """
    in_fp32 = SINGLE * trace.sizes["scaled"]
    bucket = min(in_fp32, max(DDP_BUCKET, SINGLE * trace.sizes["largest_scaled"]))
    is_full = region not in ("backward of the head", "backward of the last block")
    if not is_full and bucket >= SINGLE * trace.sizes["block_scaled"]:
        return 0.0
    if _comm(recipe) == "plain":
        return 2 * bucket
    messages = 2 * FP8_MESSAGE + SINGLE / ranks  # sent and received, and the own part, which stays in FP32
    return bucket * (1 + messages / SINGLE)


def _comm(recipe: Recipe | None) -> str:
    """Return how gradients travel: "fp8" or "plain"."""
    return "plain" if recipe is None else recipe.comm


def _block_bytes(trace: StepTrace, recipe: Recipe | None) -> float:
    """Return the bytes of the largest block's parameters, as FSDP2 gathers them."""
    scaled = trace.sizes["block_scaled"]
    return scaled * _scaled_width(recipe) + HALF * (trace.sizes["block"] - scaled)


def _scaled_width(recipe: Recipe | None) -> int:
    """Return the bytes of an element of a weight in scaled precision, as products read it; 0 where there is none."""
    return 0 if recipe is None or recipe.level == "O0" else WEIGHT[recipe.level].itemsize


# Communication


def sent_bytes(trace: StepTrace, sharding: str, ranks: int, recipe: Recipe | None) -> float:
    """Return the bytes that a rank sends to others in one step without accumulation. `trace`: on one device."""
    if ranks == 1 or sharding == "none":
        return 0.0
    sizes, share = trace.sizes, (ranks - 1) / ranks
    comm = _comm(recipe)
    states = 2 * share * SINGLE * sizes["scaling_states"]
    if sharding == "ddp":
        return states + _sent_by_ddp(trace, share, comm, recipe)
    if sharding == "fsdp2":
        scaled = sizes["scaled"]
        weights = _scaled_width(recipe) * scaled + HALF * (sizes["parameters"] - scaled)
        again = weights - HALF * sizes["outside"]  # in backward; what lies outside the blocks stays gathered
        gradients = sizes["trained"] * (FP8_MESSAGE if comm == "fp8" else HALF)
        return states + share * (weights + again + gradients)
    passes = 3 if sharding == "zero3" else 2  # gradients; weights, with ZeRO-3 in forward and in backward
    return states + passes * share * HALF * sizes["trained"]


def _sent_by_ddp(trace: StepTrace, share: float, comm: str, recipe: Recipe | None) -> float:
    sizes = trace.sizes
    plain, scaled = sizes["plain_gradients"], sizes["scaled"]
    if comm == "fp8" and not scaled:  # DDP's communication hook takes all
        return 2 * share * FP8_MESSAGE * sizes["trained"]
    gradients = plain + scaled * (FP8_MESSAGE if comm == "fp8" else SINGLE)
    owned = scaled if _shares_states_out(recipe) else 0
    return 2 * share * gradients + share * owned * _scaled_width(recipe)
