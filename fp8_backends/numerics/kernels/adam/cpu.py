"""The Adam step for a CPU: `cpu.cpp`, compiled for each kind of parameters (`cpu_library.py`)."""

from __future__ import annotations

import ctypes
import functools
import threading
from pathlib import Path

import torch

from ...formats import E4M3, FORMATS
from ..eager import is_eager
from .cpu_library import Library
from .table import AdamTable, Kind

_SOURCE = Path(__file__).with_name("cpu.cpp")
# no contraction: a product and a sum that become one instruction would be rounded once
_FLAGS = "-std=c++17 -O3 -fPIC -shared -ffp-contract=off -fno-math-errno -fno-trapping-math".split()
_AVX512 = "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mf16c".split()
_CHUNK = 2**16
_ONE_BY_ONE = threading.Lock()


class CPUKernels:
    """Runs compiled kernels on PyTorch's threads."""

    def __init__(self, kind: Kind, library: ctypes.CDLL):
        self.kind, self.library = kind, library

    def chunk_size(self) -> int:
        """How many elements are worked on together: a multiple of the kind's block size."""
        block = self.kind.block_size or 1
        return -(-_CHUNK // block) * block

    def run(self, kernel: str, table: AdamTable) -> None:
        """Run "measure_gradients", "bounds" or "write" for all parameters of a table."""
        arguments = _Table(
            table.rows.data_ptr(),
            table.bounds.data_ptr(),
            table.grad_amax.data_ptr(),
            len(table.jobs),
            sum(table.chunk_counts),
            table.chunk_size,
            self.kind.block_size,
            torch.get_num_threads(),
        )
        getattr(self.library, kernel)(ctypes.byref(arguments))


class _Table(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("rows", "bounds", "grad_amaxes")] + [
        (name, ctypes.c_int64) for name in ("parameters", "chunks", "chunk_size", "block_size", "threads")
    ]


def usable(tensor: torch.Tensor) -> bool:
    """Whether this is real memory of the CPU, in eager mode."""
    return is_eager(tensor) and tensor.device.type == "cpu"


def kernels(kind: Kind) -> CPUKernels | None:
    """The kernels of a kind; None where nothing compiles them."""
    with _ONE_BY_ONE:  # two threads that miss in a cache at the same time fill it twice
        library = _library(kind._replace(scaled=(), block_size=0, finite_is_told=False))
    loaded = library.loaded()
    return None if loaded is None else CPUKernels(kind, loaded)


@functools.cache
def _library(kind: Kind) -> Library:
    return Library(_SOURCE, (*_FLAGS, *_instruction_set(), *_definitions(kind)))


def _definitions(kind: Kind) -> list[str]:
    names = ("WEIGHT", "GRAD", "EXP_AVG", "EXP_AVG_SQ", "COPY")
    values = [fmt.name.upper() for fmt in (*map(kind.format, range(4)), FORMATS[kind.copy] if kind.copy else E4M3)]
    numbers = {
        "BLOCKED": sum(is_blocked << i for i, is_blocked in enumerate(kind.blocked)),
        "BOUNDED": int(kind.bounded),
        "COPIED": int(kind.copy is not None),
        "DECOUPLED": int(kind.decoupled),
        "MAXIMIZE": int(kind.maximize),
        "STOCHASTIC": int(kind.stochastic),
    }
    return [f"-D{name}={value}" for name, value in (*zip(names, values, strict=True), *numbers.items())]


def _instruction_set() -> list[str]:
    capability = torch.backends.cpu.get_cpu_capability()
    if capability.startswith("AVX512"):
        return _AVX512
    return ["-mavx2", "-mf16c"] if capability == "AVX2" else []
