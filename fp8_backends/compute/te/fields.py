"""Refusals of `te`. Imports nothing of TransformerEngine."""

from __future__ import annotations

from ...errors import Refusal

FUSED_NORMS_SHARDED = Refusal(
    "fuse_norms=True does not go with DeepSpeed's ZeRO-3, which gathers a norm's weight for the norm alone",
    "leave fuse_norms out, or use ZeRO stage 0 to 2, or FSDP2 with the norm and its layer in one unit",
)

DELAYED_PIPELINE = Refusal(
    "delayed scales of te do not go with a pipeline: after each forward TransformerEngine takes the largest amaxes of "
    "all ranks, and ranks with other stages would never come to that",
    "use te:dynamic, whose scales need no agreement, or native:delayed",
)
