"""Folders and files that nobody but this user can have written: code that is loaded lies in such ones.

The rule is that of OpenSSH's `StrictModes`, with the private groups of Debian and Fedora. On a system without Unix
modes (Windows) the rights of the user's profile stand for them.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

try:
    import grp
    import pwd
except ImportError:  # Windows
    grp = pwd = None

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
