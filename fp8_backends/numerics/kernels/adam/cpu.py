"""The Adam step for a CPU: `cpu.cpp`, compiled in a second at its first use and kept in the user's cache.

Processes that start together, such as the ranks of a run, compile once: one holds a lock, the others wait for it. The
compiler is called directly, because `torch.utils.cpp_extension.load` needs ninja, which PyTorch does not install, and
waits without end for the lock of a process that was killed.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

import torch

from ....announcement import announce
from ...formats import FORMATS
from ..eager import is_eager
from .table import AdamTable, Kind

_SOURCE = Path(__file__).with_name("cpu.cpp")
# no contraction: a product and a sum that become one instruction would be rounded once
_FLAGS = "-std=c++17 -O3 -fPIC -shared -ffp-contract=off -fno-math-errno -fno-trapping-math".split()
_AVX512 = "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mf16c".split()
_CHUNK = 2**16
_LONGEST_COMPILE = 300
"""Seconds."""
_LONGEST_WAIT = 2 * _LONGEST_COMPILE
"""A compiler without OpenMP is called twice."""


class CPUKernels:
    """Runs compiled kernels on PyTorch's threads."""

    def __init__(self, kind: Kind, library: ctypes.CDLL):
        self.kind, self.library = kind, library

    def chunk_size(self) -> int:
        block = self.kind.block_size or 1
        return -(-_CHUNK // block) * block

    def run(self, kernel: str, table: AdamTable) -> None:
        arguments = _Table(
            table.rows.data_ptr(),
            table.amax.data_ptr(),
            table.grad_amax.data_ptr(),
            table.stored.data_ptr(),
            len(table.jobs),
            sum(table.chunk_counts),
            table.chunk_size,
            self.kind.block_size,
            torch.get_num_threads(),
        )
        getattr(self.library, kernel)(ctypes.byref(arguments))


class _Table(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("rows", "amaxes", "grad_amaxes", "stored")] + [
        (name, ctypes.c_int64) for name in ("parameters", "chunks", "chunk_size", "block_size", "threads")
    ]


def usable(tensor: torch.Tensor) -> bool:
    """Whether this is real memory of the CPU, in eager mode."""
    return is_eager(tensor) and tensor.device.type == "cpu"


def kernels(kind: Kind) -> CPUKernels | None:
    """The kernels of a kind; None where nothing compiles them."""
    library = _library(kind._replace(scaled=(), block_size=0, finite_is_told=False))
    return None if library is None else CPUKernels(kind, library)


@functools.cache
def _library(kind: Kind) -> ctypes.CDLL | None:
    """The compiled library; None, and a warning that says why, where that fails."""
    try:
        return ctypes.CDLL(str(_compiled(tuple(_definitions(kind)))))
    except (OSError, subprocess.SubprocessError) as error:
        warnings.warn(
            f"the optimizer step runs uncompiled, which is slower: it needs a C++ compiler (g++ or clang++, or what "
            f"the environment variable CXX names), and this failed: {getattr(error, 'stderr', None) or error}",
            stacklevel=2,
        )
        return None


def _definitions(kind: Kind) -> list[str]:
    names = ("WEIGHT", "GRAD", "EXP_AVG", "EXP_AVG_SQ", "COPY")
    values = [FORMATS[dtype].name.upper() for dtype in (*kind.dtypes, kind.copy or torch.float8_e4m3fn)]
    numbers = {
        "BLOCKED": sum(is_blocked << i for i, is_blocked in enumerate(kind.blocked)),
        "BOUNDED": int(kind.bounded),
        "COPIED": int(kind.copy is not None),
        "DECOUPLED": int(kind.decoupled),
        "MAXIMIZE": int(kind.maximize),
        "STOCHASTIC": int(kind.stochastic),
    }
    return [f"-D{name}={value}" for name, value in (*zip(names, values, strict=True), *numbers.items())]


def _compiled(definitions: tuple[str, ...]) -> Path:
    """The shared library, from the cache or made now. Raises `OSError` without a compiler or a place to write, or where
    another process compiles for longer than it may; `subprocess.SubprocessError` where the compiler fails."""
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++", "c++")), "g++")
    flags = (*_FLAGS, *_instruction_set(), *definitions)
    key = hashlib.sha256(_SOURCE.read_bytes() + repr((compiler, flags)).encode()).hexdigest()[:32]
    library = _cache() / f"adam-{key}.so"
    if not library.exists():
        if not any(library.parent.glob("adam-*.so")):
            announce(f"compiling the optimizer's step for this CPU with {compiler}: a few seconds, once")
        from filelock import FileLock  # no library that `import accelerate` loads

        with FileLock(library.with_suffix(".lock"), timeout=_LONGEST_WAIT):
            if not library.exists():
                with tempfile.TemporaryDirectory(dir=library.parent) as folder:
                    new = Path(folder, library.name)
                    _compile([compiler, *flags, str(_SOURCE), "-o", str(new)])
                    os.replace(new, library)  # whole: a process that is ended before leaves nothing under that name
    return library


def _compile(command: list[str]) -> None:
    options = {"check": True, "capture_output": True, "text": True, "timeout": _LONGEST_COMPILE}
    try:
        subprocess.run([*command, "-fopenmp"], **options)
    except subprocess.CalledProcessError:
        subprocess.run(command, **options)  # on one thread, where the compiler has no OpenMP


def _instruction_set() -> list[str]:
    capability = torch.backends.cpu.get_cpu_capability()
    if capability.startswith("AVX512"):
        return _AVX512
    return ["-mavx2", "-mf16c"] if capability == "AVX2" else []


@functools.cache
def _cache() -> Path:
    """A folder that belongs to this user."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fp8_backends"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: no home
        pass
    return Path(tempfile.mkdtemp(prefix="fp8_backends"))
