"""What compilation, activation checkpointing and attention do to the speed of FP8."""

from __future__ import annotations

from .setup import Rule, Setup


def _compiled(setup: Setup) -> bool:
    return setup.compiled != "none"


COMPILATION_RULES = (
    Rule(
        "ao_without_compile",
        "warning",
        lambda s: s.recipe.compute == "ao" and s.gpu and not _compiled(s),
        "TorchAO's casts are many small kernels unless compiled: without torch.compile FP8 is slower than bf16",
        "compile the model, or its repeated blocks",
    ),
    Rule(
        "ao_ddp_full_compile",
        "warning",
        lambda s: s.recipe.compute == "ao" and s.parallel == "ddp" and s.compiled == "full",
        "TorchAO's FP8 under DDP with the whole model compiled is known to fail in other trainers",
        "compile the repeated blocks instead (regional compilation), or use FSDP2",
    ),
    Rule(
        "checkpointing_fsdp2_compile",
        "warning",
        lambda s: bool(s.activation_checkpointing) and s.parallel == "fsdp2" and _compiled(s),
        "FP8 under FSDP2 with torch.compile and activation checkpointing of whole blocks tends to be slower than bf16 "
        "(reported by Axolotl): what is recomputed is cast to FP8 again",
        "turn activation checkpointing off, or checkpoint selected operations only",
    ),
    Rule(
        "flash_attention_2_compile",
        "warning",
        lambda s: s.attention in ("flash_attention_2", "kernels-community/flash-attn2") and _compiled(s),
        "FlashAttention 2 does not go well with torch.compile (reported by Axolotl)",
        "use attn_implementation sdpa or flex_attention",
        lambda s: s.attention,
    ),
    Rule(
        "fp8_attention",
        "info",
        lambda s: s.attention == "fp8",
        "FP8 attention is another library's: this package converts layers with weights, and neither counts nor proves "
        "the products of attention",
        "use attn_implementation sdpa for a run whose FP8 products are all proven",
    ),
)
