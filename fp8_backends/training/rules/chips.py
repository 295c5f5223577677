"""What the chip and the libraries cannot do; `compute.chips` has the facts."""

from __future__ import annotations

from collections.abc import Callable

from ...compute.chips import EMULATED, NOTES, REFUSED, ROWWISE_CPU_TORCH, release, supports
from .setup import Rule, Setup

TORCH = (2, 11)
"""The oldest PyTorch that this package was tried with (`install_requires`)."""
FSDP2_TORCH = (2, 6)
"""Accelerate's own bound (`FSDP2_PYTORCH_VERSION`)."""
REDUCE_SCATTER_TORCH = (2, 9)
"""The first PyTorch with `FSDPModule.set_custom_reduce_scatter` as `comm.fsdp2` calls it."""
CUDA = (12, 4)
"""The oldest CUDA for FP8 training, as Axolotl and TorchAO name it."""


def _old_torch(setup: Setup) -> str:
    return f"torch {release(setup.machine.torch)}"


def _cuda(setup: Setup) -> str:
    return f"CUDA {release(setup.machine.cuda)}"


def _states(setup: Setup) -> str:
    """The backends that this chip emulates and refuses."""
    found = supports(setup.machine.chip, setup.machine.cuda)
    names = {each: [] for each in (EMULATED, REFUSED)}
    for each in found:
        names.get(each.state, []).extend(each.backends)
    return "; ".join(f"{state}: {', '.join(backends)}" for state, backends in names.items() if backends)


CHIP_RULES = (
    Rule(
        "no_fp8_hardware",
        "warning",
        lambda s: not s.machine.chip.fp8,
        "no FP8 hardware here: FP8 products are made by other means, with the same numbers and slower than bf16",
        'train with mixed_precision="bf16" for speed; FP8 here is for checking a recipe',
        _states,
    ),
    Rule(
        "slow_autocast",
        "warning",
        lambda s: (
            not s.machine.bf16_products and "autocast_dtype" in s.recipe.given and s.recipe.autocast_dtype != "fp32"
        ),
        "this CPU has no fast products of 16 bits: what runs around FP8 in bf16 or fp16 takes from 7 to 1,000 times as "
        "long as in FP32",
        "leave autocast_dtype out (in TrainingArguments: bf16=False, fp16=False), and FP32 runs around FP8 here",
        lambda s: f"autocast_dtype={s.recipe.autocast_dtype!r}",
    ),
    Rule(
        "emulated_here",
        "warning",
        lambda s: s.machine.chip.fp8 and s.state == EMULATED,
        "this chip has FP8 products, and not those of this recipe: they are emulated, slower than bf16",
        "use a recipe that `fp8-backends doctor` lists as FP8 on this chip",
        lambda s: str(NOTES.get(s.cell.note, "")),
    ),
    Rule(
        "mixed_gpus",
        "warning",
        lambda s: len(set(s.machine.capabilities)) > 1,
        "the GPUs here differ: what the oldest lacks counts for all, and the ranks wait for the slowest",
        "choose GPUs of one kind with CUDA_VISIBLE_DEVICES",
        lambda s: "capabilities " + ", ".join(map(release, sorted(set(s.machine.capabilities)))),
    ),
    Rule(
        "cuda_before_12_4",
        "warning",
        lambda s: s.machine.chip.fp8 and s.machine.cuda is not None and s.machine.cuda < CUDA,
        "FP8 training is known to work from CUDA 12.4 on, and this PyTorch was built for an older one",
        "install a PyTorch for a newer CUDA",
        _cuda,
    ),
    Rule(
        "torch_untried",
        "warning",
        lambda s: s.machine.torch < TORCH,
        f"this package was tried with torch {release(TORCH)} and newer",
        f"install torch {release(TORCH)} or newer",
        _old_torch,
    ),
    Rule(
        "fsdp2_torch",
        "error",
        lambda s: s.parallel == "fsdp2" and s.machine.torch < FSDP2_TORCH,
        f"Accelerate's FSDP2 needs torch {release(FSDP2_TORCH)} or newer",
        f"install torch {release(TORCH)} or newer",
        _old_torch,
    ),
    Rule(
        "fp8_gradients_torch",
        "error",
        lambda s: s.parallel == "fsdp2" and s.recipe.comm == "fp8" and s.machine.torch < REDUCE_SCATTER_TORCH,
        f"gradients in FP8 under FSDP2 need a reduce-scatter of one's own, which torch has from "
        f"{release(REDUCE_SCATTER_TORCH)} on",
        'set gradient_comm="plain", or install a newer torch',
        _old_torch,
    ),
    Rule(
        "rowwise_cpu_torch",
        "error",
        lambda s: (
            s.cell is not None
            and s.cell.note == "rowwise-cpu"
            and s.machine.torch < ROWWISE_CPU_TORCH
            and s.machine.own_scaled_mm
        ),
        *NOTES["rowwise-cpu"],
        _old_torch,
    ),
)


def _te_is_refused(*notes: str) -> Callable[[Setup], bool]:
    """Whether an NVIDIA GPU refuses TransformerEngine's products for one of these reasons."""
    return lambda s: (
        bool(s.machine.capabilities) and s.recipe.compute == "te" and s.state == REFUSED and s.cell.note in notes
    )


TE_RULES = (
    Rule(
        "te_without_nvidia_gpu",
        "error",
        lambda s: s.recipe.compute == "te" and not s.machine.capabilities,
        *NOTES["te-nvidia"],
    ),
    Rule("te_before_fp8", "error", _te_is_refused("te-8.9"), *NOTES["te-8.9"]),
    Rule("te_ada_libraries", "error", _te_is_refused("ada"), *NOTES["ada"], _cuda),
    Rule("te_block_chip", "error", _te_is_refused("block-9.0"), *NOTES["block-9.0"]),
    Rule("te_block_cuda", "error", _te_is_refused("block-cuda", "block-blackwell"), *NOTES["block-cuda"], _cuda),
    Rule("te_mxfp8_chip", "error", _te_is_refused("mxfp8"), *NOTES["mxfp8"]),
    Rule(
        "te_backward_in_high_precision",
        "error",
        lambda s: s.recipe.compute == "te" and bool(s.machine.backward_override),
        "NVTE_BACKWARD_OVERRIDE in the environment takes TransformerEngine's backward products out of FP8, or, with "
        "delayed scaling, stops it",
        "unset NVTE_BACKWARD_OVERRIDE",
    ),
)
