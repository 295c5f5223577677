"""A C++ source as a shared library: compiled in a few seconds at its first use, kept in the user's cache, loaded.

What is kept is loaded as code, so it lies in a folder that nobody else can write (`make_own`), and its name ends in
the SHA-256 of its content, by which it is verified before it is loaded: a half-written or damaged library is compiled
again. Between the two only processes of the same user could change it. Where there is no such folder, each process
compiles for itself in a temporary one.

Threads and processes that start together, such as the ranks of a run, compile once: one holds a lock, the others wait.
The lock saves work and nothing depends on it, since a library comes under its name whole: where files cannot be locked,
or somebody holds one for too long, several compile.

The compiler is called directly, because `torch.utils.cpp_extension.load` needs ninja, which PyTorch does not install,
and waits without end for the lock of a process that was killed.
"""

from __future__ import annotations

import contextlib
import ctypes
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

from ....announcement import announce

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None
try:
    import grp
    import pwd
except ImportError:  # Windows
    grp = pwd = None

_LONGEST_COMPILE = 300
"""Seconds, as all numbers here."""
_LONGEST_WAIT = 120
_POLL = 0.05
_PAUSE_PER_SECOND, _SHORTEST_PAUSE = 20, 600
"""What failed is tried again after at least so long, and after so much longer than it took."""
_ABANDONED_AFTER = 3600
"""Since when nobody can still compile in a folder."""
_ERROR_LENGTH = 2000
"""Characters of a compiler's messages that a warning quotes."""


class Library:
    """A library that is compiled and loaded when somebody first asks for it.

    Args:
        source: the C++ file.
        flags: of the compiler, which is g++, clang++ or what the environment variable `CXX` names.
    """

    def __init__(self, source: Path, flags: Sequence[str]):
        self._source, self._flags = source, tuple(flags)
        self._loaded: ctypes.CDLL | None = None
        self._next_try = 0.0
        self._lock = threading.Lock()

    def loaded(self) -> ctypes.CDLL | None:
        """The library; None where there is none, and a warning that says why, the first time. What failed is tried
        again later, because disks are emptied and machines get less busy."""
        # not without end: a process may be forked while another thread compiles
        if self._is_due() and self._lock.acquire(timeout=_LONGEST_WAIT):
            try:
                if self._is_due():
                    self._load()
            finally:
                self._lock.release()
        return self._loaded

    def _is_due(self) -> bool:
        return self._loaded is None and time.monotonic() >= self._next_try

    def _load(self) -> None:
        is_first, start = not self._next_try, time.monotonic()
        try:
            self._loaded = _load(self._source, self._flags)
        except (OSError, subprocess.SubprocessError) as error:
            now = time.monotonic()
            self._next_try = now + max(_SHORTEST_PAUSE, _PAUSE_PER_SECOND * (now - start))
            if is_first:
                warnings.warn(
                    "the optimizer step runs uncompiled, which is slower: it needs a C++ compiler (g++ or clang++, or "
                    "what the environment variable CXX names) and a folder where code may be written and loaded "
                    f"(XDG_CACHE_HOME or TMPDIR), and this failed: {error}",
                    stacklevel=3,
                )


def _load(source: Path, flags: tuple[str, ...]) -> ctypes.CDLL:
    """Load the library from the cache, else from a temporary folder. Raises `OSError` where both fail, and
    `subprocess.TimeoutExpired` where the compiler does not end."""
    failures: list[str] = []
    for folder_of_ones_own in (_cache, _temporary):
        try:
            with folder_of_ones_own() as folder:
                loaded = ctypes.CDLL(str(_library(folder, source, flags)))
        except OSError as error:
            failures.append(str(error))
            continue
        if failures:
            warnings.warn(
                f"the optimizer step was compiled for this process alone, as each process will: {failures[0]}. Let the "
                "environment variable XDG_CACHE_HOME name a folder of your own that can be written, on a disk with "
                "space from which code may be loaded, and that others cannot write, nor what lies above it",
                stacklevel=4,
            )
        return loaded
    raise OSError("; ".join(dict.fromkeys(failures)))


@contextlib.contextmanager
def _cache() -> Iterator[Path]:
    """The folder of this user in which libraries stay."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    base = named if os.path.isabs(named) else os.path.expanduser("~/.cache")  # as XDG says: a relative one is ignored
    if not os.path.isabs(base):
        raise FileNotFoundError("this user has no home folder")
    folder = Path(os.path.realpath(base), "fp8_backends")
    make_own(folder)
    yield folder


@contextlib.contextmanager
def _temporary() -> Iterator[Path]:
    """A folder that goes at once: what is loaded stays in memory."""
    with tempfile.TemporaryDirectory(prefix="fp8_backends-", ignore_cleanup_errors=True) as name:
        folder = Path(os.path.realpath(name))
        make_own(folder)
        yield folder


def _library(folder: Path, source: Path, flags: tuple[str, ...]) -> Path:
    """A library that was verified, or compiled now."""
    compiler = _compiler()
    # a home folder may be that of several machines and containers
    kind = (compiler, flags, platform.system(), platform.machine(), platform.libc_ver())
    key = hashlib.sha256(source.read_bytes() + repr(kind).encode()).hexdigest()[:32]
    library = _verified(folder, key)
    if library is None:
        if not any(folder.glob("adam-*.so")):
            announce(f"compiling the optimizer's step for this CPU with {shlex.join(compiler)}: a few seconds, once")
        with _alone(folder / f"adam-{key}.lock"):
            library = _verified(folder, key) or _compiled(folder, key, [*compiler, *flags, str(source)])
    return library


def _compiler() -> list[str]:
    """The command that compiles C++, without its arguments for one file: `CXX` may have some, as in `ccache g++`."""
    named = os.environ.get("CXX", "").strip()
    if shutil.which(named):
        return [named]
    try:
        if words := shlex.split(named):
            return words
    except ValueError as error:
        raise OSError(f"CXX={named!r} is no command: {error}") from None
    return [next(filter(shutil.which, ("g++", "clang++", "c++")), "g++")]


def _verified(folder: Path, key: str) -> Path | None:
    """The library of that key whose content is what its name says."""
    for path in folder.glob(f"adam-{key}-*.so"):
        content = read_own(path)
        if content is not None and hashlib.sha256(content).hexdigest() == path.stem.rpartition("-")[2]:
            return path
    return None


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Wait for the process or the thread that holds this lock, as long as that makes sense."""
    descriptor = None
    try:
        if fcntl is not None:
            with contextlib.suppress(OSError):  # no locks on this file system
                descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
                _wait_for(descriptor)
        yield
    finally:
        if descriptor is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process that was forked meanwhile has the descriptor, too
            os.close(descriptor)


def _wait_for(descriptor: int) -> None:
    deadline = time.monotonic() + _LONGEST_WAIT
    while time.monotonic() < deadline:
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(_POLL)


def _compiled(folder: Path, key: str, command: list[str]) -> Path:
    _remove_abandoned(folder)
    with tempfile.TemporaryDirectory(prefix="build-", dir=folder, ignore_cleanup_errors=True) as build:
        new = Path(build, "library")
        _compile(command, new)
        new.chmod(0o600)
        library = folder / f"adam-{key}-{hashlib.sha256(new.read_bytes()).hexdigest()}.so"
        os.replace(new, library)
    return library


def _remove_abandoned(folder: Path) -> None:
    """Remove what processes left that were killed while they compiled."""
    for build in folder.glob("build-*"):
        with contextlib.suppress(OSError):
            if time.time() - build.stat().st_mtime > _ABANDONED_AFTER:
                shutil.rmtree(build)


def _compile(command: list[str], new: Path) -> None:
    """Raises `OSError` with what the compiler said, or without a compiler."""
    try:
        _run([*command, "-fopenmp", "-o", str(new)], new.parent)
    except subprocess.CalledProcessError:
        try:
            _run([*command, "-o", str(new)], new.parent)  # on one thread, where the compiler has no OpenMP
        except subprocess.CalledProcessError as error:
            raise OSError(f"{error}\n{error.stderr}") from None


def _run(command: list[str], folder: Path) -> None:
    """Run a compiler with all its temporary files in that folder. Its messages go to a file: programs that it started
    and that outlive it would keep a pipe open."""
    with open(folder / "messages", "w+", encoding="utf-8", errors="replace") as messages:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=messages,
            stderr=messages,
            env={**os.environ, "TMPDIR": str(folder)},
            timeout=_LONGEST_COMPILE,
        )
        messages.seek(0)
        if done.returncode:
            raise subprocess.CalledProcessError(done.returncode, command, stderr=messages.read()[-_ERROR_LENGTH:])


# Folders and files that nobody but this user can have written. The rule is that of OpenSSH's `StrictModes`, with the
# private groups of Debian and Fedora. On a system without Unix modes (Windows) the rights of the user's profile stand
# for them.

_HAS_MODES = hasattr(os, "geteuid")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ONLY_OWNER = 0o700
# no link, and no waiting for whoever writes into a pipe
_AS_IT_IS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def make_own(folder: Path) -> None:
    """Make a folder of mode 0700, with the parents that it lacks, or give the one that is there this mode.

    Args:
        folder: absolute, and without links above its last part (`os.path.realpath`).

    Raises:
        PermissionError: others than this user and root could put something there: the folder is a link or belongs to
            another user, or others may rename what lies in one of its parents.
        OSError: it cannot be made.
    """
    for missing in reversed([each for each in (folder, *folder.parents) if not os.path.lexists(each)]):
        with contextlib.suppress(FileExistsError):  # of a process that started at the same time
            missing.mkdir(_ONLY_OWNER)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise PermissionError(f"{folder} is a file or a link, and no folder")
    if not _HAS_MODES:
        return
    for parent in folder.parents:
        _check_parent(parent)
    if found.st_uid != os.geteuid():
        raise PermissionError(f"{folder} belongs to another user")
    if found.st_mode & ~_ONLY_OWNER & 0o777:
        with contextlib.suppress(OSError):  # a file system that is read-only
            folder.chmod(_ONLY_OWNER)
    if folder.lstat().st_mode & _OTHERS_WRITE:
        raise PermissionError(f"others may write {folder}, and its mode cannot be changed")


def _check_parent(parent: Path) -> None:
    found = parent.lstat()
    if found.st_uid not in (0, os.geteuid()):
        raise PermissionError(f"{parent} belongs to another user")
    if not found.st_mode & _OTHERS_WRITE or found.st_mode & stat.S_ISVTX:
        return
    if found.st_mode & stat.S_IWOTH or not _is_private(found.st_gid) or _has_list(parent):
        raise PermissionError(f"others may write {parent}")


def _is_private(group: int) -> bool:
    """Whether a group is that of this user alone, as where each user has one and the umask is 002.

    It must have the user's name: a directory service need not tell who else is in a group such as `domain users`. And
    it must be nobody else's first group, for which the system's users are listed. Both take under a millisecond with
    local users, and are asked only where a folder is open to its group.
    """
    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:  # of a container, or a service that does not answer
        return False
    if user.pw_gid != group or found.gr_name != user.pw_name or {*found.gr_mem} - {user.pw_name}:
        return False
    return all(each.pw_gid != group or each.pw_uid == user.pw_uid for each in pwd.getpwall())


def _has_list(folder: Path) -> bool:
    """Whether a folder has an access control list: its group's bits then stand for further users and groups."""
    try:
        return "system.posix_acl_access" in os.listxattr(folder)
    except (AttributeError, OSError):  # not Linux, or a file system without
        return False


def read_own(path: Path) -> bytes | None:
    """The content of a regular file of this user that nobody else may write, and that has no other name; None for
    anything else."""
    try:
        descriptor = os.open(path, os.O_RDONLY | _AS_IT_IS)
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            return None
        if _HAS_MODES and (found.st_uid != os.geteuid() or found.st_mode & _OTHERS_WRITE):
            return None
        return file.read()
