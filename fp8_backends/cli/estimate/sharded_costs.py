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


class Rank:
    """One of `ranks` ranks, each of which has the traced batch for itself.

    Args:
        trace: a step on one device; of weights in bf16 without autocast for DeepSpeed.
    """

    def __init__(self, trace: StepTrace, sharding: str, ranks: int, recipe: Recipe | None) -> None:
        self.trace, self.sharding, self.ranks = trace, sharding, ranks
        self.shares_states = recipe is not None and recipe.shares_states
        self.sends_fp8 = recipe is not None and recipe.comm == "fp8"
        self.scaled_width = 0 if recipe is None or recipe.level == "O0" else WEIGHT[recipe.level].itemsize
        """Bytes of an element of a scaled weight, as products read it; 0 where there is none."""

    def step(self) -> StepTrace:
        """Return the same step on this rank."""
        trace = self.trace
        return replace(
            trace,
            gradients=self._holds({GRADIENTS: trace.gradients})[GRADIENTS],
            resting=self._holds(trace.resting),
            saved=self._holds(trace.saved),
            peaks={region: self._holds_in(region, parts) for region, parts in trace.peaks.items()},
        )

    def _holds(self, parts: Bytes) -> Bytes:
        """Return what of these parts lies on the rank for long."""
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
                parts[COPIES] = 0.0  # what is gathered is in bf16 already: nothing for autocast
        elif self.sharding in DEEPSPEED:
            if WEIGHTS in parts:
                parts[WEIGHTS] /= ranks if self.sharding == "zero3" else 1
                parts[MASTER] = SINGLE * sizes["trained"] / ranks
                parts[STATES] = 2 * parts[MASTER]
            if GRADIENTS in parts:
                parts[GRADIENTS] /= 1 if self.sharding == "zero1" else ranks
        return parts

    def _holds_in(self, region: str, parts: Bytes) -> Bytes:
        """Return the same at a moment of the step, with what lives there only."""
        sizes, held = self.trace.sizes, self._holds(parts)
        if region == "step":
            if self.sharding in DEEPSPEED:
                held[GRADIENTS] += held[MASTER]  # the gradient of this rank's part, in FP32
            return held
        goes_back = region.startswith("backward")
        if self.sharding in ("fsdp2", "zero3"):
            plain = sizes["block"] - sizes["block_scaled"]
            block = sizes["block_scaled"] * self.scaled_width + HALF * plain  # as it is gathered
            held[WEIGHTS] += HALF * sizes["outside"] + GATHERED * block
            held[GRADIENTS] += GATHERED * HALF * sizes["block"] if goes_back else 0
        elif self.sharding == "ddp" and self.ranks > 1 and goes_back:
            held[GRADIENTS] += self._in_flight(region)
        elif self.sharding == "zero2" and goes_back:
            held[GRADIENTS] += 2 * HALF * min(ZERO_BUCKET, sizes["trained"])
        return held

    def _in_flight(self, region: str) -> float:
        """Return the bytes of gradients of scaled weights that are in flight under DDP.

        They wait in high precision until a bucket of them is there, and are read from there into messages, or copied
        for a plain sum. A bucket is full when the first blocks, which backward reaches last, are done, or sooner.
        """
        sizes = self.trace.sizes
        bucket = min(SINGLE * sizes["scaled"], max(DDP_BUCKET, SINGLE * sizes["largest_scaled"]))
        is_full = region not in ("backward of the head", "backward of the last block")
        if not is_full and bucket >= SINGLE * sizes["block_scaled"]:
            return 0.0
        if not self.sends_fp8:
            return 2 * bucket
        messages = 2 * FP8_MESSAGE + SINGLE / self.ranks  # sent and received, and the own part, which stays in FP32
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
            weights = self.scaled_width * scaled + HALF * (sizes["parameters"] - scaled)
            again = weights - HALF * sizes["outside"]  # in backward; what lies outside the blocks stays gathered
            return states + share * (weights + again + trained * (FP8_MESSAGE if self.sends_fp8 else HALF))
        passes = 3 if self.sharding == "zero3" else 2  # gradients; weights, with ZeRO-3 in forward and in backward
        return states + passes * share * HALF * trained
