"""What a user chooses beside the backend: compilation, attention, optimizers, and fields of the recipe."""

from __future__ import annotations

from collections.abc import Callable

from .setup import Rule, Setup, always

AT_LEVELS = ("adamw_torch", "adamw_torch_fused", "adamw", "adam", "sgd", "muon", "torch.optim.adafactor")
"""Names for the classes of `torch.optim` that levels convert. The `adafactor` of transformers and Axolotl is another
than PyTorch's."""
BITSANDBYTES = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "lion_8bit", "paged_lion_8bit", "ademamix_8bit")


COMPILATION_RULES = (
    Rule(
        "ao_without_compile",
        "warning",
        lambda s: s.recipe.compute == "ao" and s.machine.has_gpu and not s.is_compiled,
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
        lambda s: bool(s.activation_checkpointing) and s.parallel == "fsdp2" and s.is_compiled,
        "FP8 under FSDP2 with torch.compile and activation checkpointing of whole blocks tends to be slower than bf16 "
        "(reported by Axolotl): what is recomputed is cast to FP8 again",
        "turn activation checkpointing off, or checkpoint selected operations only",
    ),
    Rule(
        "flash_attention_2_compile",
        "warning",
        lambda s: s.attention in ("flash_attention_2", "kernels-community/flash-attn2") and s.is_compiled,
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


def _name(setup: Setup) -> str:
    return (setup.optimizer or "").lower()


OPTIMIZER_RULES = (
    Rule(
        "level_optimizer",
        "error",
        lambda s: s.has_level and s.optimizer is not None and _name(s) not in AT_LEVELS,
        "the levels train with torch.optim.AdamW, Adam, SGD, Muon or Adafactor, whose states they store "
        "themselves: in 8 and 16 bits at O2 and O3, in 8 at O4",
        "use adamw_torch (torch.optim.AdamW), or a backend without +msamp",
        lambda s: s.optimizer,
    ),
    Rule(
        "lomo_ddp",
        "error",
        lambda s: s.parallel == "ddp" and s.world_size != 1 and _name(s) in ("lomo", "adalomo"),
        "LOMO steps inside backward, before DDP has averaged the gradients: the ranks drift apart, also without FP8",
        "train on one process, or use an optimizer that steps after backward",
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

RECIPE_RULES = (
    Rule(
        "fp16_autocast",
        "info",
        lambda s: s.recipe.autocast_dtype == "fp16",
        "fp16 around FP8 needs a loss scaler: Accelerate makes one, a loop of your own must",
        "use bf16 where the device has it",
    ),
)


def _releases(applies: Callable[[Setup], bool]) -> Callable[[Setup], bool]:
    return lambda setup: setup.recipe.gradient_release and applies(setup)


KEPT = "leave gradient_release out"

RELEASE_RULES = (
    Rule(
        "release_accumulation",
        "error",
        _releases(lambda s: s.accumulation_steps is not None and s.accumulation_steps > 1),
        "gradient_release steps with the gradients of each backward and drops them, so microbatches cannot accumulate",
        f"use gradient_accumulation_steps=1 with a larger batch, or {KEPT}",
        lambda s: f"gradient_accumulation_steps={s.accumulation_steps}",
        always,
    ),
    Rule(
        "release_clipping",
        "error",
        _releases(lambda s: bool(s.max_grad_norm)),
        "gradient_release has stepped with the first gradients before the last ones are there, so nothing can be "
        "clipped by the norm of all, or afterwards",
        f"clip nothing (max_grad_norm=0 in TrainingArguments, whose default is 1.0), or {KEPT}",
        lambda s: f"max_grad_norm={s.max_grad_norm:g}",
        always,
    ),
    Rule(
        "release_fp16",
        "error",
        _releases(lambda s: s.recipe.autocast_dtype == "fp16"),
        "gradient_release steps before a loss scaler could look at the gradients, divide them and leave the step out",
        f"use autocast_dtype='bf16', which needs no loss scaling, or {KEPT}",
        lambda s: "autocast_dtype='fp16'",
        always,
    ),
    Rule(
        "release_guard",
        "error",
        _releases(lambda s: s.recipe.guard not in ("off", "warn")),
        "gradient_release has made a step when the guard looks, so none can be left out or stopped",
        f"use guard='warn', which then sees losses and scaling states, or {KEPT}",
        lambda s: f"guard={s.recipe.guard!r}",
        always,
    ),
)
