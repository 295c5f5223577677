"""Run the Adam step on a CPU: `adam.cpp`, compiled for each kind of parameters at first use.

Libraries are stored in the folder of PyTorch's C++ extensions, under PyTorch's trust model
(docs/security.rst). `torch.utils.cpp_extension.load` itself needs ninja, absent from PyTorch's
requirements, and before torch 2.14 waits forever for the lock of a killed process. `CppCodeCache`
of TorchInductor adds 2 s to each process, compiled before or not.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

import torch

from ..announcement import announce
from ..formats.formats import E4M3, FORMATS
from .adam_table import AdamTable, Kind
from .triton_gate import is_eager

_SOURCE = Path(__file__).with_name("adam.cpp")
# no contraction: a fused product and sum would be rounded once
_FLAGS = "-std=c++17 -O3 -fPIC -shared -ffp-contract=off -fno-math-errno -fno-trapping-math".split()
_AVX512 = "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mf16c".split()
_CHUNK = 2**16
LONGEST_COMPILE = 300
"""Seconds."""
_ERROR_LENGTH = 2000
"""Characters of compiler messages quoted in a warning."""


class CPUKernels:
    """Run compiled kernels on PyTorch's threads."""

    def __init__(self, kind: Kind, library: ctypes.CDLL):
        self.kind, self.library = kind, library

    def chunk_size(self) -> int:
        """Return the elements of a chunk, whole blocks of the kind."""
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
        (name, ctypes.c_int64)
        for name in ("parameters", "chunks", "chunk_size", "block_size", "threads")
    ]


def usable(tensor: torch.Tensor) -> bool:
    """Return True for an eager CPU tensor."""
    return is_eager(tensor) and tensor.device.type == "cpu"


@functools.cache
def kernels(kind: Kind) -> CPUKernels | None:
    """Return the kernels of a kind; None if they cannot be compiled."""
    loaded = _library_of(kind._replace(scaled=(), block_size=0, finite_is_told=False))
    return None if loaded is None else CPUKernels(kind, loaded)


def _library_of(kind: Kind) -> ctypes.CDLL | None:
    formats = (*map(kind.format, range(4)), FORMATS[kind.copy] if kind.copy else E4M3)
    names = ("WEIGHT", "GRAD", "EXP_AVG", "EXP_AVG_SQ", "COPY")
    constants = {name: fmt.name.upper() for name, fmt in zip(names, formats, strict=True)} | {
        "BLOCKED": sum(is_blocked << i for i, is_blocked in enumerate(kind.blocked)),
        "BOUNDED": int(kind.bounded),
        "COPIED": int(kind.copy is not None),
        "DECOUPLED": int(kind.decoupled),
        "MAXIMIZE": int(kind.maximize),
        "STOCHASTIC": int(kind.stochastic),
    }
    definitions = [f"-D{name}={value}" for name, value in constants.items()]
    return library(_SOURCE, (*flags(), *definitions))


def flags() -> list[str]:
    """Return the compiler's flags for the vector instructions that PyTorch uses."""
    capability = torch.backends.cpu.get_cpu_capability()
    if capability.startswith("AVX512"):
        return _FLAGS + _AVX512
    return _FLAGS + ["-mavx2", "-mf16c"] * (capability == "AVX2")


@functools.cache
def library(
    source: Path, flags: tuple[str, ...], name: str = "the optimizer step"
) -> ctypes.CDLL | None:
    """Compile and load a library, once in this process; None after a warning with the reason.

    Args:
        source: C++ file.
        flags: for the compiler: g++, clang++ or the environment variable `CXX`.
        name: of its computation, for messages.
    """
    try:
        return _load(source, flags, name)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        warnings.warn(
            f"{name} runs uncompiled, which is slower: it needs a C++ compiler (g++ or clang++, or "
            "what the environment variable CXX names) and a folder where code may be written and "
            f"loaded (TORCH_EXTENSIONS_DIR or TMPDIR), and this failed: {error}",
            stacklevel=4,
        )
        return None


def _load(source: Path, flags: tuple[str, ...], name: str) -> ctypes.CDLL:
    named = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++", "c++")), "g++")
    compiler = shlex.split(named)
    # several machines and containers may share a home folder
    machine = (platform.system(), platform.machine(), platform.libc_ver())
    key = hashlib.sha256(source.read_bytes() + repr((compiler, flags, machine)).encode())
    cached = _cache() / f"{source.stem}-{key.hexdigest()[:32]}.so"
    command = [*compiler, *flags, str(source)]
    try:
        if not cached.exists():
            cached.parent.mkdir(parents=True, exist_ok=True)
            if not any(cached.parent.glob(f"{source.stem}-*.so")):
                announce(f"compiling {name} for this CPU with {named}: a few seconds, once")
            _compile(command, cached)
        return ctypes.CDLL(str(cached))
    except OSError as error:
        failure = error
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        private = Path(folder, cached.name)
        _compile(command, private)
        loaded = ctypes.CDLL(str(private))  # stays in memory
    warnings.warn(
        f"{name} was compiled for this process alone, as each process will: {failure}. Delete a "
        "damaged library, or let the environment variable TORCH_EXTENSIONS_DIR name a folder that "
        "can be written, on a disk with space from which code may be loaded",
        stacklevel=5,
    )
    return loaded


def _cache() -> Path:
    """Return our part of PyTorch's folder of C++ extensions, in Linux's default place. PyTorch's
    own function is in a module that also imports setuptools and looks for CUDA."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    extensions = os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.join(base, "torch_extensions")
    return Path(extensions, "fp8_backends")


def _compile(command: list[str], target: Path) -> None:
    """Compile, with OpenMP if possible, and rename the complete library into place. Without a lock,
    processes that start together all compile. Raises OSError with the compiler's messages."""
    with tempfile.TemporaryDirectory(dir=target.parent, ignore_cleanup_errors=True) as build:
        new = Path(build, "library")
        for openmp in (["-fopenmp"], []):
            done = subprocess.run(
                [*command, *openmp, "-o", str(new)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=LONGEST_COMPILE,
            )
            if done.returncode == 0:
                os.replace(new, target)
                return
    raise OSError(
        f"{shlex.join(command)} returned {done.returncode}\n{done.stderr[-_ERROR_LENGTH:]}"
    )
