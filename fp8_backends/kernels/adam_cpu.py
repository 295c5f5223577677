"""Run the Adam step on a CPU: `adam.cpp`, compiled for each kind of parameters at first use and
cached as a library.

docs/security.rst states the conditions for a cached library. Correctness does not depend on the
lock of compilations, as libraries are renamed into place whole. The compiler is called directly:
`torch.utils.cpp_extension.load` needs ninja, absent from PyTorch's requirements, and waits forever
for the lock of a killed process.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from ..announcement import announce
from ..formats.formats import E4M3, FORMATS
from .adam_table import AdamTable, Kind
from .triton_gate import is_eager

try:
    import fcntl
    import grp
    import pwd
except ImportError:  # Windows
    fcntl = grp = pwd = None

_SOURCE = Path(__file__).with_name("adam.cpp")
# no contraction: a fused product and sum would be rounded once
_FLAGS = "-std=c++17 -O3 -fPIC -shared -ffp-contract=off -fno-math-errno -fno-trapping-math".split()
_AVX512 = "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mf16c".split()
_CHUNK = 2**16
_ONE_BY_ONE = threading.Lock()

# seconds
LONGEST_COMPILE, LONGEST_WAIT, _POLL = 300, 120, 0.05
_PAUSE_PER_SECOND, _SHORTEST_PAUSE = 20, 600
"""Pause before retrying a failure: the longer of 20 times its duration and 600."""
_ABANDONED_AFTER = 3600
"""Age at which a build folder is nobody's."""
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


def kernels(kind: Kind) -> CPUKernels | None:
    """Return the kernels of a kind; None if they cannot be compiled."""
    with _ONE_BY_ONE:  # `functools.cache` may run twice for two threads
        library = library_of(kind._replace(scaled=(), block_size=0, finite_is_told=False))
    loaded = library.loaded()
    return None if loaded is None else CPUKernels(kind, loaded)


@functools.cache
def library_of(kind: Kind) -> Library:
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
    return Library(_SOURCE, (*flags(), *(f"-D{name}={value}" for name, value in constants.items())))


def flags() -> list[str]:
    """Return the compiler's flags for the vector instructions that PyTorch uses."""
    capability = torch.backends.cpu.get_cpu_capability()
    if capability.startswith("AVX512"):
        return _FLAGS + _AVX512
    return _FLAGS + ["-mavx2", "-mf16c"] * (capability == "AVX2")


class Library:
    """A library compiled and loaded at first use.

    Args:
        source: C++ file.
        flags: for the compiler: g++, clang++ or the environment variable `CXX`.
        name: of its computation, for messages.
    """

    def __init__(self, source: Path, flags: Sequence[str], name: str = "the optimizer step"):
        self._source, self._flags, self._name = source, tuple(flags), name
        self._loaded: ctypes.CDLL | None = None
        self.next_try = 0.0
        self._lock = threading.Lock()

    def loaded(self) -> ctypes.CDLL | None:
        """Return the library, or None after a warning about the first failure. Later calls retry:
        disks get emptied."""
        # with a timeout: a process may be forked while another thread compiles
        if self._is_due() and self._lock.acquire(timeout=LONGEST_WAIT):
            try:
                if self._is_due():
                    self._load()
            finally:
                self._lock.release()
        return self._loaded

    def _is_due(self) -> bool:
        return self._loaded is None and time.monotonic() >= self.next_try

    def _load(self) -> None:
        is_first, start = not self.next_try, time.monotonic()
        try:
            self._loaded = _load(self._source, self._flags, self._name)
        except (OSError, subprocess.SubprocessError) as error:
            now = time.monotonic()
            self.next_try = now + max(_SHORTEST_PAUSE, _PAUSE_PER_SECOND * (now - start))
            if is_first:
                warnings.warn(
                    f"{self._name} runs uncompiled, which is slower: it needs a C++ compiler (g++ "
                    "or clang++, or what the environment variable CXX names) and a folder where "
                    "code may be written and loaded (XDG_CACHE_HOME or TMPDIR), and this failed: "
                    f"{error}",
                    stacklevel=3,
                )


def _load(source: Path, flags: tuple[str, ...], name: str) -> ctypes.CDLL:
    """Load the library from the cache, else from a temporary folder. Raises OSError, or
    `TimeoutExpired`."""
    try:
        return ctypes.CDLL(str(_compiled_once(_cache(), source, flags, name)))
    except OSError as error:
        failure = str(error)
    try:
        with tempfile.TemporaryDirectory(
            prefix="fp8_backends-", ignore_cleanup_errors=True
        ) as path:
            folder = Path(os.path.realpath(path))
            make_own(folder)
            # stays in memory
            loaded = ctypes.CDLL(str(_compiled_once(folder, source, flags, name)))
    except OSError as error:
        raise OSError("; ".join(dict.fromkeys((failure, str(error))))) from None
    warnings.warn(
        f"{name} was compiled for this process alone, as each process will: {failure}. Let the "
        "environment variable XDG_CACHE_HOME name a folder of your own that can be written, on a "
        "disk with space from which code may be loaded, and that others cannot write, nor what "
        "lies above it",
        stacklevel=4,
    )
    return loaded


def _cache() -> Path:
    """Return this user's folder of libraries."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    # XDG ignores a relative one
    base = named if os.path.isabs(named) else os.path.expanduser("~/.cache")
    if not os.path.isabs(base):
        raise FileNotFoundError("this user has no home folder")
    folder = Path(os.path.realpath(base), "fp8_backends")
    make_own(folder)
    return folder


def _compiled_once(folder: Path, source: Path, flags: tuple[str, ...], name: str) -> Path:
    """Return a verified library, or compile it."""
    compiler = _compiler()
    # several machines and containers may share a home folder
    kind = (compiler, flags, platform.system(), platform.machine(), platform.libc_ver())
    key = hashlib.sha256(source.read_bytes() + repr(kind).encode()).hexdigest()[:32]
    stem = f"{source.stem}-{key}"
    library = _verified(folder, stem)
    if library is None:
        if not any(folder.glob(f"{source.stem}-*.so")):
            announce(
                f"compiling {name} for this CPU with {shlex.join(compiler)}: a few seconds, once"
            )
        with _locked(folder / f"{stem}.lock"):
            library = _verified(folder, stem) or _compiled(
                folder, stem, [*compiler, *flags, str(source)]
            )
    return library


def _compiler() -> list[str]:
    """Return the C++ compiler's command. `CXX` may include arguments, as in `ccache g++`."""
    named = os.environ.get("CXX", "").strip()
    if shutil.which(named):
        return [named]
    try:
        if words := shlex.split(named):
            return words
    except ValueError as error:
        raise OSError(f"CXX={named!r} is no command: {error}") from None
    return [next(filter(shutil.which, ("g++", "clang++", "c++")), "g++")]


def _verified(folder: Path, stem: str) -> Path | None:
    """Find the library of that name with the content its name promises."""
    for path in folder.glob(f"{stem}-*.so"):
        content = read_own(path)
        if (
            content is not None
            and hashlib.sha256(content).hexdigest() == path.stem.rpartition("-")[2]
        ):
            return path
    return None


@contextlib.contextmanager
def _locked(lock: Path) -> Iterator[None]:
    """Wait for the holder of this lock, up to a timeout; without locks on this file system, do not
    wait."""
    descriptor = None
    try:
        if fcntl is not None:
            with contextlib.suppress(OSError):
                descriptor = os.open(
                    lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600
                )
                deadline, held = time.monotonic() + LONGEST_WAIT, False
                while not held and time.monotonic() < deadline:
                    try:
                        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        held = True
                    except BlockingIOError:
                        time.sleep(_POLL)
        yield
    finally:
        if descriptor is not None:
            with contextlib.suppress(OSError):
                # a process forked meanwhile has the descriptor, too
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def _compiled(folder: Path, stem: str, command: list[str]) -> Path:
    """Compile in a folder inside this one, with OpenMP if possible, and rename the library into
    place. Raises OSError with the compiler's messages, or without a compiler."""
    for build in folder.glob("build-*"):  # of killed processes
        with contextlib.suppress(OSError):
            if time.time() - build.stat().st_mtime > _ABANDONED_AFTER:
                shutil.rmtree(build)
    with tempfile.TemporaryDirectory(
        prefix="build-", dir=folder, ignore_cleanup_errors=True
    ) as build:
        new = Path(build, "library")
        try:
            _run([*command, "-fopenmp", "-o", str(new)], new.parent)
        except subprocess.CalledProcessError:
            try:
                _run([*command, "-o", str(new)], new.parent)
            except subprocess.CalledProcessError as error:
                raise OSError(f"{error}\n{error.stderr}") from None
        new.chmod(0o600)
        library = folder / f"{stem}-{hashlib.sha256(new.read_bytes()).hexdigest()}.so"
        os.replace(new, library)
    return library


def _run(command: list[str], folder: Path) -> None:
    """Run a compiler with its temporary files in that folder. Its messages go to a file: a pipe
    could stay open."""
    with open(folder / "messages", "w+", encoding="utf-8", errors="replace") as messages:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=messages,
            stderr=messages,
            env={**os.environ, "TMPDIR": str(folder)},
            timeout=LONGEST_COMPILE,
        )
        messages.seek(0)
        if done.returncode:
            raise subprocess.CalledProcessError(
                done.returncode, command, stderr=messages.read()[-_ERROR_LENGTH:]
            )


# Folders and files only this user can have written, by the rule of OpenSSH's `StrictModes`, with
# the private groups of Debian and Fedora. Without Unix modes (Windows), the rights of the user's
# profile stand for them.

_HAS_MODES = hasattr(os, "geteuid")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ONLY_OWNER = 0o700
# follow no link, and do not wait for the writer of a pipe
_AS_IT_IS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def make_own(folder: Path) -> None:
    """Create a folder of mode 0700 and its missing parents, or give an existing one this mode.

    Args:
        folder: absolute, without links above its last part (`os.path.realpath`).

    Raises:
        PermissionError: users other than this one and root could write there: the folder is a link
            or belongs to another user, or others may rename entries of a parent.
        OSError: it cannot be created.
    """
    for missing in reversed(
        [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    ):
        with contextlib.suppress(FileExistsError):  # from a process that started at the same time
            missing.mkdir(_ONLY_OWNER)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise PermissionError(f"{folder} is a file or a link, and no folder")
    if not _HAS_MODES:
        return
    for parent in folder.parents:
        _check_parent(parent)
    if status.st_uid != os.geteuid():
        raise PermissionError(f"{folder} belongs to another user")
    if status.st_mode & ~_ONLY_OWNER & 0o777:
        with contextlib.suppress(OSError):  # a read-only file system
            folder.chmod(_ONLY_OWNER)
    if folder.lstat().st_mode & _OTHERS_WRITE:
        raise PermissionError(f"others may write {folder}, and its mode cannot be changed")


def _check_parent(parent: Path) -> None:
    status = parent.lstat()
    if status.st_uid not in (0, os.geteuid()):
        raise PermissionError(f"{parent} belongs to another user")
    if not status.st_mode & _OTHERS_WRITE or status.st_mode & stat.S_ISVTX:
        return
    if status.st_mode & stat.S_IWOTH or not _is_private(status.st_gid) or _has_access_list(parent):
        raise PermissionError(f"others may write {parent}")


def _is_private(group: int) -> bool:
    """Return True for a user's private group, as with umask 002: it has the user's name, since a
    directory service need not list the members of a group such as `domain users`, no other member,
    and is nobody else's first group."""
    try:
        user, entry = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:  # in a container, or from a silent directory service
        return False
    if user.pw_gid != group or entry.gr_name != user.pw_name or {*entry.gr_mem} - {user.pw_name}:
        return False
    return all(other.pw_gid != group or other.pw_uid == user.pw_uid for other in pwd.getpwall())


def _has_access_list(folder: Path) -> bool:
    """Return True if an access control list may let further users write through the group bits."""
    try:
        return "system.posix_acl_access" in os.listxattr(folder)
    except (AttributeError, OSError):  # not Linux, or a file system without lists
        return False


def read_own(path: Path) -> bytes | None:
    """Read a regular file of this user with a single name, not writable by others; None for
    anything else."""
    try:
        descriptor = os.open(path, os.O_RDONLY | _AS_IT_IS)
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            return None
        if _HAS_MODES and (status.st_uid != os.geteuid() or status.st_mode & _OTHERS_WRITE):
            return None
        return file.read()
