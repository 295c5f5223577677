"""What this machine can do."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from . import chips
from .chips import Advice, Chip

_BF16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16", "sve_bf16")
"""As `torch.cpu.get_capabilities` names them; the last two are Arm's."""

LIBRARIES = ("torch", "accelerate", "torchao", "transformer-engine", "transformers", "safetensors")


@dataclass(frozen=True)
class Availability:
    """Whether a backend can run here."""

    can_run: bool
    reason: str = ""
    """Why it cannot run, or what it will run on."""
    fix: str = ""
    """What to install or change; empty when it can run."""

    def __bool__(self) -> bool:
        return self.can_run


@dataclass(frozen=True)
class Hardware:
    """The devices that this process sees, and the libraries that matter for FP8."""

    device: str
    """Name of the first visible GPU, or the CPU's."""
    gpus: int
    capability: tuple[int, int] | None
    """The lowest CUDA capability over the visible GPUs; None without a CUDA GPU."""
    fp8_products: bool
    """Whether every visible GPU multiplies FP8 matrices."""
    cpu_bf16: bool
    """Whether the CPU multiplies bf16 matrices in hardware."""
    versions: dict[str, str | None]
    """Versions of the libraries; None where one is missing."""


def has_gpu() -> bool:
    return torch.cuda.is_available()


def gpus() -> list[tuple[int, int] | str]:
    """Each visible GPU: its CUDA compute capability, or AMD's name of its architecture."""
    return [_gpu(index) for index in range(torch.cuda.device_count())] if has_gpu() else []


def _gpu(device: torch.device | int | None) -> tuple[int, int] | str:
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName
    return torch.cuda.get_device_capability(device)


def capabilities() -> list[tuple[int, int]]:
    """The CUDA capability of every visible GPU. Empty without one, and on ROCm, whose numbers mean something else."""
    return [] if torch.version.hip else gpus()


def lowest_capability() -> tuple[int, int] | None:
    return min(capabilities(), default=None)


def chip() -> Chip:
    """The chip of this machine. Where its GPUs differ, the one that does least: all of them train together."""
    return min(map(chips.chip_of, gpus()), key=chips.CHIPS.index, default=chips.CPU)


def gpu_chip(device: torch.device | int | None = None) -> Chip:
    """The chip of one GPU. None: the current one."""
    return chips.chip_of(_gpu(device))


def fp8_products() -> bool:
    """Whether there are GPUs and all of them have FP8 matrix units."""
    return chip().fp8


def gpu_multiplies(scaling: str, device: torch.device) -> bool:
    """Whether one GPU makes the FP8 products of `native` with this scaling rule, in the codes that they have there."""
    return chips.multiplies(f"native:{scaling}", _gpu(device), cuda_release())


def advice(te_runs: bool = False) -> Advice:
    """Which precision to train in on this machine. Where its GPUs differ, the least of them decides."""
    found = [chips.advice_for(gpu, te_runs) for gpu in gpus()] or [chips.advice_for(None, cpu_bf16=cpu_bf16())]
    return max(found, key=lambda each: ("fp8", "bf16", "fp16", "fp32").index(each.precision))


def cuda_release() -> tuple[int, int] | None:
    """The release of CUDA that this PyTorch was built for; None without."""
    return tuple(map(int, torch.version.cuda.split(".")[:2])) if torch.version.cuda else None


def torch_release() -> tuple[int, int]:
    """The release of the running PyTorch."""
    return tuple(int("".join(filter(str.isdigit, part))) for part in torch.__version__.split("+")[0].split(".")[:2])


def cpu_bf16() -> bool:
    """Whether this CPU has instructions for bf16 products, and PyTorch uses them as it is set now.

    Without either, PyTorch's bf16 products take from 7 to 1,000 times as long as FP32's, by their layout. Its own check
    is asked first: oneDNN may be missing (Apple) or switched off (`torch.backends.mkldnn.enabled`). It alone is not
    enough: oneDNN serves bf16 on any AVX-512, by way of FP32, in four times the time of an FP32 product.
    """
    return torch.backends.mkldnn.enabled and _cpu_has_bf16()


@functools.cache
def _cpu_has_bf16() -> bool:
    try:
        in_onednn = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    except (AttributeError, RuntimeError):  # a PyTorch that was built without it
        return False
    return in_onednn and any(_cpu_capabilities().get(name, False) for name in _BF16_INSTRUCTIONS)


def cpu_multiplies(dtype: torch.dtype) -> bool:
    """Whether products of bf16, fp16 or FP32 are best made in that dtype on this CPU. Never fp16: where a CPU has such
    products they are no faster than FP32's, and elsewhere they are as slow as bf16's."""
    return dtype == torch.float32 or (dtype == torch.bfloat16 and cpu_bf16())


def cpu_scaled_mm() -> bool:
    """Whether `torch._scaled_mm` is of use on this CPU. From AMX on, PyTorch hands products of codes with one scale to
    oneDNN, which has a fast form of them for AMX-FP16 alone: elsewhere they take a thousand times as long."""
    capabilities = _cpu_capabilities()
    slow = capabilities.get("amx_int8", False) and not capabilities.get("amx_fp16", False)
    return not (torch.backends.mkldnn.enabled and slow)


def _cpu_capabilities() -> Mapping[str, Any]:
    return getattr(torch.cpu, "get_capabilities", dict)()


def fast_dtype(device: torch.device | str) -> torch.dtype:
    """The default dtype around FP8 on this device: bf16, or FP32 on a CPU without bf16 products."""
    return torch.float32 if torch.device(device).type == "cpu" and not cpu_bf16() else torch.bfloat16


def fast_autocast(device: str) -> torch.autocast:
    """Autocast to `fast_dtype`: to bf16, or none."""
    return torch.autocast(device, torch.bfloat16, enabled=fast_dtype(device) == torch.bfloat16)


def fast_precision(device: torch.device | str) -> str:
    """`fast_dtype` as recipes and Accelerate name it: "bf16" or "fp32"."""
    return "bf16" if fast_dtype(device) == torch.bfloat16 else "fp32"


def describe() -> Hardware:
    """What `doctor` and reports print. Imports no library that is not loaded."""
    return Hardware(
        device=torch.cuda.get_device_name(0) if has_gpu() else cpu_name(),
        gpus=torch.cuda.device_count() if has_gpu() else 0,
        capability=lowest_capability(),
        fp8_products=fp8_products(),
        cpu_bf16=cpu_bf16(),
        versions={name: version(name) for name in LIBRARIES},
    )


def version(distribution: str) -> str | None:
    """The version of an installed distribution, from its metadata; None where it is missing."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """The name of this CPU as the system has it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
