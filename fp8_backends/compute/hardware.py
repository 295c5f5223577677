"""This machine's devices, their products, and the versions of libraries."""

import functools
import importlib.metadata
import platform
from dataclasses import dataclass
from typing import Any

import torch

from . import chips
from .chips import Advice, Chip

_BF16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16", "sve_bf16")
"""Names in `torch.cpu.get_capabilities`; the last two are Arm's."""

LIBRARIES = ("torch", "accelerate", "torchao", "transformer-engine", "transformers", "safetensors")


@dataclass(frozen=True)
class Availability:
    """The answer of a backend to the question if it can run here."""

    can_run: bool
    reason: str = ""
    """The reason why it cannot run, or the library and device to run on."""
    fix: str = ""
    """The component to install or change; empty when it can run."""

    def __bool__(self) -> bool:
        return self.can_run


def has_gpu() -> bool:
    return torch.cuda.is_available()


def device() -> str:
    return "cuda" if has_gpu() else "cpu"


def gpus() -> list[tuple[int, int] | str]:
    """Return each visible GPU's CUDA compute capability, or AMD's name of its architecture."""
    return [_gpu(index) for index in range(torch.cuda.device_count())] if has_gpu() else []


def _gpu(device: torch.device | int | None) -> tuple[int, int] | str:
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName
    return torch.cuda.get_device_capability(device)


def capabilities() -> list[tuple[int, int]]:
    """Return the CUDA capability of every visible GPU. Empty on ROCm, whose numbers have another
    meaning."""
    return [] if torch.version.hip else gpus()


def chip() -> Chip:
    """Return the chip of this machine: among different GPUs the one that does least, since all
    train together."""
    return min(map(chips.chip_of, gpus() or [None]), key=chips.CHIPS.index)


def gpu_chip(device: torch.device | int | None = None) -> Chip:
    """Return the chip of one GPU. None: the current one."""
    return chips.chip_of(_gpu(device))


def fp8_products() -> bool:
    """Return True if there are GPUs and all of them have FP8 matrix units."""
    return chip().fp8


def gpu_multiplies(scaling: str, device: torch.device) -> bool:
    """Return True if a GPU has the FP8 products of `native` with this scaling rule."""
    releases = cuda_release(), torch_release()
    return chips.cell_of(f"native:{scaling}", gpu_chip(device)).state_with(*releases) == chips.RUNS


def advice(te_runs: bool = False) -> Advice:
    """Return the precision to train in on this machine: among different GPUs the lesser one's."""
    advices = [chips.advice_for(gpu, te_runs, cpu_bf16()) for gpu in gpus() or [None]]
    return max(advices, key=lambda advice: ("fp8", "bf16", "fp16", "fp32").index(advice.precision))


def cuda_release() -> tuple[int, int] | None:
    """Return the release of CUDA in this PyTorch, or None."""
    return tuple(map(int, torch.version.cuda.split(".")[:2])) if torch.version.cuda else None


def torch_release() -> tuple[int, int]:
    """Return the release of the running PyTorch."""
    return tuple(
        int("".join(filter(str.isdigit, part)))
        for part in torch.__version__.split("+")[0].split(".")[:2]
    )


def cpu_bf16() -> bool:
    """Return True if this CPU has instructions for bf16 products, and PyTorch uses them: without
    oneDNN (Apple, or switched off) they take up to 1,000 times as long as FP32's. oneDNN's own
    answer is not enough: it serves bf16 on any AVX-512 by way of FP32, in four times the time."""
    return torch.backends.mkldnn.enabled and _cpu_has_bf16()


@functools.cache
def _cpu_has_bf16() -> bool:
    try:
        in_onednn = (
            torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        )
    except (AttributeError, RuntimeError):  # a PyTorch built without it
        return False
    capabilities = torch.cpu.get_capabilities()
    return in_onednn and any(capabilities.get(name, False) for name in _BF16_INSTRUCTIONS)


def cpu_multiplies(dtype: torch.dtype) -> bool:
    """Return True if products of bf16, fp16 or FP32 run best in that dtype on this CPU. Never fp16:
    CPUs with such products need as long as for FP32's, others as long as for bf16's."""
    return dtype == torch.float32 or (dtype == torch.bfloat16 and cpu_bf16())


def cpu_scaled_mm() -> bool:
    """Return True if `torch._scaled_mm` is of use on this CPU. From AMX on, PyTorch hands products
    of codes with one scale to oneDNN: without AMX-FP16 they take a thousand times as long there."""
    capabilities = torch.cpu.get_capabilities()
    slow = capabilities.get("amx_int8", False) and not capabilities.get("amx_fp16", False)
    return not (torch.backends.mkldnn.enabled and slow)


def fast_dtype(device: torch.device | str) -> torch.dtype:
    """Return the default dtype around FP8 on this device: bf16, or FP32 on a CPU without bf16
    products."""
    return (
        torch.float32 if torch.device(device).type == "cpu" and not cpu_bf16() else torch.bfloat16
    )


def fast_autocast(device: str) -> torch.autocast:
    """Return autocast to `fast_dtype`: bf16, or off."""
    return torch.autocast(device, torch.bfloat16, enabled=fast_dtype(device) == torch.bfloat16)


def fast_precision(device: torch.device | str) -> str:
    """Return `fast_dtype` by Accelerate's name: "bf16" or "fp32"."""
    return "bf16" if fast_dtype(device) == torch.bfloat16 else "fp32"


def describe() -> dict[str, Any]:
    """Describe this machine for `doctor` and reports, importing no library: the name of the first
    GPU or the CPU, the number of GPUs, their lowest CUDA capability, fast products, and versions
    (None: missing)."""
    return {
        "device": torch.cuda.get_device_name(0) if has_gpu() else cpu_name(),
        "gpus": torch.cuda.device_count() if has_gpu() else 0,
        "capability": min(capabilities(), default=None),
        "fp8_products": fp8_products(),
        "cpu_bf16": cpu_bf16(),
        "versions": {name: version(name) for name in LIBRARIES},
    }


def version(distribution: str) -> str | None:
    """Return the version in an installed distribution's metadata, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """Return the system's name of this CPU."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [
                line.partition(":")[2].strip() for line in lines if line.startswith("model name")
            ]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
