"""What is refused at two places: by a rule before training, and by a layer that meets it while it runs."""

from __future__ import annotations

from typing import NamedTuple


class Refusal(NamedTuple):
    reason: str
    fix: str

    def __str__(self) -> str:
        return f"{self.reason}. Fix: {self.fix}"


FP8_PARAMS_SHARDED = Refusal(
    "fp8_params=True does not go with sharded weights: FSDP and DeepSpeed cut parameters up, and frozen FP8 weights "
    "are whole",
    "use DDP; or level O3 (msamp:O3, te+msamp:O3), whose FP8 weights FSDP2 shards",
)
FUSED_NORMS_ZERO3 = Refusal(
    "fuse_norms=True does not go with DeepSpeed's ZeRO-3, which gathers a norm's weight for the norm alone",
    "leave fuse_norms out, or use ZeRO stage 0 to 2, or FSDP2 with the norm and its layer in one unit",
)
