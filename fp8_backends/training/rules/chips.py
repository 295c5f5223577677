"""What the chip and the libraries cannot do."""

from __future__ import annotations

from ...compute import chips as hardware_table
from ...compute import hardware
from .setup import Rule, Setup, release

TORCH = (2, 11)
"""The oldest PyTorch that this package was tried with (`install_requires`)."""
FSDP2_TORCH = (2, 6)
"""Accelerate's own bound (`FSDP2_PYTORCH_VERSION`)."""
REDUCE_SCATTER_TORCH = (2, 9)
"""The first with `FSDPModule.set_custom_reduce_scatter` as `comm.fsdp2` calls it."""
ROWWISE_CPU_TORCH = (2, 13)
"""The first whose CPU multiplies FP8 with a scale for each row."""
CUDA = (12, 4)
"""What Axolotl and TorchAO name as the oldest CUDA for FP8 training."""


def _old_torch(setup: Setup) -> str:
    return f"torch {release(setup.torch)}"


def _states(setup: Setup) -> str:
    """What the backends do on this chip."""
    listed = []
    for state in (hardware_table.EMULATED, hardware_table.REFUSED):
        found = [each for each in hardware_table.supports(setup.chip, setup.cuda) if each.state == state]
        if found:
            listed.append(f"{state}: {', '.join(name for each in found for name in each.backends)}")
    return "; ".join(listed)


def _support(setup: Setup) -> hardware_table.Support | None:
    return hardware_table.support_of(setup.recipe.compute, setup.recipe.scaling, setup.chip, setup.cuda)


def _is_emulated(setup: Setup) -> bool:
    support = _support(setup)
    return setup.fp8_products and support is not None and support.state == hardware_table.EMULATED


def _is_ao_rowwise(setup: Setup) -> bool:
    return setup.recipe.compute == "ao" and setup.recipe.scaling.startswith("rowwise")


CHIP_RULES = (
    Rule(
        "no_fp8_hardware",
        "warning",
        lambda s: not s.fp8_products,
        "no FP8 hardware here: FP8 products are made by other means, with the same numbers and slower than bf16",
        'train with mixed_precision="bf16" for speed; FP8 here is for checking a recipe',
        _states,
    ),
    Rule(
        "slow_autocast",
        "warning",
        lambda s: not s.bf16_products and "autocast_dtype" in s.recipe.given and s.recipe.autocast_dtype != "fp32",
        "this CPU has no fast products of 16 bits: what runs around FP8 in bf16 or fp16 takes from 7 to 1,000 times as "
        "long as in FP32",
        "leave autocast_dtype out (in TrainingArguments: bf16=False, fp16=False), and FP32 runs around FP8 here",
        lambda s: f"autocast_dtype={s.recipe.autocast_dtype!r}",
    ),
    Rule(
        "emulated_here",
        "warning",
        _is_emulated,
        "this chip has FP8 products, and not those of this recipe: they are emulated, slower than bf16",
        "use a recipe that `fp8-backends doctor` lists as FP8 on this chip",
        lambda s: _support(s).reason,
    ),
    Rule(
        "mixed_gpus",
        "warning",
        lambda s: len(set(s.capabilities)) > 1,
        "the GPUs here differ: what the oldest lacks counts for all, and the ranks wait for the slowest",
        "choose GPUs of one kind with CUDA_VISIBLE_DEVICES",
        lambda s: "capabilities " + ", ".join(map(release, sorted(set(s.capabilities)))),
    ),
    Rule(
        "cuda_before_12_4",
        "warning",
        lambda s: s.fp8_products and s.cuda is not None and s.cuda < CUDA,
        "FP8 training is known to work from CUDA 12.4 on, and this PyTorch was built for an older one",
        "install a PyTorch for a newer CUDA",
        lambda s: f"CUDA {release(s.cuda)}",
    ),
    Rule(
        "torch_untried",
        "warning",
        lambda s: s.torch < TORCH,
        f"this package was tried with torch {release(TORCH)} and newer",
        f"install torch {release(TORCH)} or newer",
        _old_torch,
    ),
    Rule(
        "fsdp2_torch",
        "error",
        lambda s: s.parallel == "fsdp2" and s.torch < FSDP2_TORCH,
        f"Accelerate's FSDP2 needs torch {release(FSDP2_TORCH)} or newer",
        f"install torch {release(TORCH)} or newer",
        _old_torch,
    ),
    Rule(
        "fp8_gradients_torch",
        "error",
        lambda s: s.parallel == "fsdp2" and s.gradient_comm == "fp8" and s.torch < REDUCE_SCATTER_TORCH,
        f"gradients in FP8 under FSDP2 need a reduce-scatter of one's own, which torch has from "
        f"{release(REDUCE_SCATTER_TORCH)} on",
        'set gradient_comm="plain", or install a newer torch',
        _old_torch,
    ),
    Rule(
        "rowwise_cpu_torch",
        "error",
        lambda s: _is_ao_rowwise(s) and not s.gpu and s.torch < ROWWISE_CPU_TORCH,
        f"TorchAO's rowwise products run on a CPU from torch {release(ROWWISE_CPU_TORCH)} on",
        "use native:rowwise, which makes them by other means, or a newer torch",
        _old_torch,
    ),
)


def before_fp8(setup: Setup) -> bool:
    """Whether an NVIDIA GPU here is older than FP8 products."""
    return setup.capability is not None and setup.capability < hardware.FP8_CAPABILITY
