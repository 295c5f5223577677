"""Folders and files that nobody but this user can have written: code that is loaded lies in such ones.

The rule is that of OpenSSH's `StrictModes`. On a system without Unix modes (Windows) the rights of the user's profile
stand for them.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

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
    if found.st_mode & _OTHERS_WRITE and not found.st_mode & stat.S_ISVTX:
        raise PermissionError(f"others may write {parent}")


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
