"""Limits of chips and libraries; `compute.chips` has the facts."""

from collections.abc import Callable

from ..compute.chips import NOTES, REFUSED, ROWWISE_CPU_TORCH, RUNS_EMULATED, described, release
from .setup import Setup, error, warning

TORCH = (2, 11), (2, 15)
"""The oldest PyTorch in this package's tests (`install_requires`), and the newest with code for a
GPU looked at."""
CUDA = (12, 4)
"""The oldest CUDA for FP8 training according to Axolotl and TorchAO."""


def _old_torch(setup: Setup, needed: tuple[int, int]) -> str:
    return f"torch {release(setup.machine.torch)}" if setup.machine.torch < needed else ""


def _untried_torch(setup: Setup) -> str:
    torch = setup.machine.torch
    is_tried = TORCH[0] <= torch and (torch <= TORCH[1] or not setup.machine.has_gpu)
    return "" if is_tried else f"torch {release(torch)}"


def _emulated_or_refused(setup: Setup) -> str:
    names: dict[str, list[str]] = {RUNS_EMULATED: [], REFUSED: []}
    for row in described(setup.machine.chip, setup.machine.cuda)["products"]:
        names.get(row["state"], []).extend(row["backends"])
    return "; ".join(
        f"{state}: {', '.join(backends)}" for state, backends in names.items() if backends
    )


def _asked_for_16_bits(setup: Setup) -> str:
    if "autocast_dtype" not in setup.recipe.given:
        return "bf16 in DeepSpeed's configuration" if setup.engine_bf16 else ""
    dtype = setup.recipe.autocast_dtype
    return f"autocast_dtype={dtype!r}" if dtype != "fp32" else ""


CHIP_RULES = (
    warning(
        "no_fp8_hardware",
        lambda s: not s.machine.chip.fp8 and (_emulated_or_refused(s) or True),
        "no FP8 hardware here: bf16 or FP32 products of the same codes stand in for FP8 ones, "
        "slower than bf16",
        'train with mixed_precision="bf16" for speed; FP8 here is for checking a recipe',
    ),
    warning(
        "slow_autocast",
        lambda s: not s.machine.bf16_products and _asked_for_16_bits(s),
        "this CPU has no fast products of 16 bits: bf16 or fp16 around FP8 takes from 7 to 1,000 "
        "times as long as FP32",
        "leave autocast_dtype out (in TrainingArguments: bf16=False, fp16=False; in DeepSpeed's "
        "configuration: bf16.enabled false), and FP32 runs around FP8 here",
    ),
    warning(
        "emulated_here",
        lambda s: (
            s.machine.chip.fp8
            and s.state == RUNS_EMULATED
            and (str(NOTES.get(s.cell.note, "")) or True)
        ),
        "this chip has other FP8 products than this recipe's: they are emulated, slower than bf16",
        "use a recipe with FP8 in the list of `fp8-backends doctor` for this chip",
    ),
    warning(
        "mixed_gpus",
        lambda s: (
            len(set(s.machine.capabilities)) > 1
            and "capabilities " + ", ".join(map(release, sorted(set(s.machine.capabilities))))
        ),
        "the GPUs here differ: limits of the oldest apply to all, and the ranks wait for the "
        "slowest",
        "choose GPUs of one kind with CUDA_VISIBLE_DEVICES",
    ),
    warning(
        "cuda_before_12_4",
        lambda s: (
            s.machine.chip.fp8
            and (s.machine.cuda or CUDA) < CUDA
            and f"CUDA {release(s.machine.cuda)}"
        ),
        "FP8 training is known to work from CUDA 12.4 on, and this PyTorch was built for an older "
        "one",
        "install a PyTorch for a newer CUDA",
    ),
    warning(
        "torch_untried",
        _untried_torch,
        f"this package was tried with torch {release(TORCH[0])} to {release(TORCH[1])}",
        f"install torch {release(TORCH[0])} to {release(TORCH[1])}",
    ),
    error(
        "rowwise_cpu_torch",
        lambda s: (
            s.cell is not None
            and s.cell.note == "rowwise-cpu"
            and s.machine.own_scaled_mm
            and _old_torch(s, ROWWISE_CPU_TORCH)
        ),
        *NOTES["rowwise-cpu"],
    ),
)


def _te_is_refused(notes: tuple[str, ...]) -> Callable[[Setup], bool | str]:
    """Match an NVIDIA GPU that refuses TransformerEngine's products for one of these reasons."""
    return lambda s: (
        bool(s.machine.capabilities)
        and s.recipe.compute == "te"
        and s.state == REFUSED
        and s.cell.note in notes
        # a cell with another state is refused for its release of CUDA
        and (s.cell.state == REFUSED or f"CUDA {release(s.machine.cuda)}")
    )


_TE_REFUSALS = {
    "te_before_fp8": ("te-8.9",),
    "te_ada_libraries": ("ada",),
    "te_block_chip": ("block-9.0",),
    "te_block_cuda": ("block-cuda", "block-blackwell"),
    "te_mxfp8_chip": ("mxfp8",),
}
"""Notes by rule; the first explains."""

TE_RULES = (
    error(
        "te_without_nvidia_gpu",
        lambda s: s.recipe.compute == "te" and not s.machine.capabilities,
        *NOTES["te-nvidia"],
    ),
    *(error(name, _te_is_refused(notes), *NOTES[notes[0]]) for name, notes in _TE_REFUSALS.items()),
    error(
        "te_backward_in_high_precision",
        lambda s: s.recipe.compute == "te" and bool(s.machine.backward_override),
        "NVTE_BACKWARD_OVERRIDE in the environment takes TransformerEngine's backward products out "
        "of FP8, or, with delayed scaling, stops it",
        "unset NVTE_BACKWARD_OVERRIDE",
    ),
)
