"""Which optimizers go with what."""

from __future__ import annotations

from .setup import Rule, Setup

TORCH_ADAM = ("adamw_torch", "adamw_torch_fused", "adamw", "adam")
"""Names for `torch.optim.AdamW` and `Adam`, which levels convert; transformers' and Axolotl's default among them."""
BITSANDBYTES = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "lion_8bit", "paged_lion_8bit", "ademamix_8bit")


def _name(setup: Setup) -> str | None:
    return None if setup.optimizer is None else setup.optimizer.lower()


OPTIMIZER_RULES = (
    Rule(
        "level_optimizer",
        "error",
        lambda s: s.has_level and _name(s) is not None and _name(s) not in TORCH_ADAM,
        "the levels O1, O2 and O3 train with torch.optim.AdamW or Adam, whose states they store themselves: in 8 and "
        "16 bits at O2 and O3",
        "use adamw_torch (torch.optim.AdamW), or a backend without +msamp",
        lambda s: s.optimizer,
    ),
    Rule(
        "bitsandbytes_fsdp2",
        "error",
        lambda s: s.parallel == "fsdp2" and _name(s) in BITSANDBYTES,
        "the 8-bit optimizers of bitsandbytes do not know FSDP2's sharded parameters (Axolotl refuses them, too)",
        "use adamw_torch with a level O2 or O3, which stores the states in 8 and 16 bits, or adamw_torch_8bit",
        lambda s: s.optimizer,
    ),
    Rule(
        "ao_adamw_fp8",
        "warning",
        lambda s: _name(s) == "ao_adamw_fp8",
        "TorchAO's FP8 Adam keeps the second moment in E4M3 with one scale for 256 elements: where gradients of one "
        "block span three orders of magnitude, small ones are flushed to zero, and their updates were 4.5 times too "
        "large on average in a synthetic test",
        "use adamw_torch with a level O2 or O3, whose second moment is FP16, or ao_adamw_8bit",
    ),
)
