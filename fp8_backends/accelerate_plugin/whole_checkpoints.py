"""Checkpoints that are whole or not there, saved by many ranks.

A new checkpoint is written into a folder beside its place, `.NAME.saving`, sealed by a manifest and renamed in one
instant. One that takes the place of another is written into `NAME/.saving`; its manifest makes it the one that counts,
and then its files move over the old ones. If that is interrupted, the next save or load moves the rest. Files of the
user's own stay where they are.

Each file system has a leader that seals and moves: the main process where all ranks see one folder, and the first rank
of a node that has a disk of its own. An error on one rank reaches all of them before anything is sealed.
"""

from __future__ import annotations

import fnmatch
import functools
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from accelerate.state import PartialState
from accelerate.utils import gather_object

from ..announcement import announce, logger
from ..errors import FP8BackendError
from ..recipes.handlers import Recipe
from ..training import manifest
from ..training.manifest import Condition

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

Result = TypeVar("Result")

_WAIT = 300.0
"""Seconds to wait for another process that saves the same checkpoint."""
_REMOVED = ".removed"
_OF_RANKS = ("random_states_*.pkl", "custom_checkpoint_*.pkl", "fp8_scaling_*.safetensors")
"""What more ranks or objects may have left in an older checkpoint without a manifest, and a loader would read."""


def _on_all_ranks(doing: str, function: Callable[[], Result | None]) -> list[Result | None]:
    """Run a function that communicates with nobody, or no longer when it raises; its results by rank. An error on any
    rank is one `FP8BackendError` on all."""
    result, error = None, None
    try:
        result = function()
    except BaseException as caught:
        # that of FSDP2's sharded files is no Exception; its module takes seconds to import
        if not isinstance(caught, Exception) and type(caught).__name__ != "CheckpointException":
            raise
        error = caught
    said = None if error is None else str(error) if isinstance(error, FP8BackendError) else repr(error)
    try:
        outcomes = gather_object([(result, said)])
    except Exception as silence:
        if error is None:
            raise
        raise FP8BackendError(f"{doing} failed: {said}; and other ranks do not answer: {silence!r}") from error
    for rank, (_, said) in enumerate(outcomes):
        if said is not None:
            where = f" on rank {rank}" if len(outcomes) > 1 else ""
            raise FP8BackendError(f"{doing} failed{where}: {said}") from error
    return [result for result, _ in outcomes]


def _one_after_another(doing: str, function: Callable[[], Result]) -> Result | None:
    """Run a function on the main process, and then on the first rank of each other node, whose disk may be its own.
    Returns what the main process found."""
    state = PartialState()
    found = _on_all_ranks(doing, lambda: function() if state.is_main_process else None)
    _on_all_ranks(doing, lambda: function() if state.is_local_main_process and not state.is_main_process else None)
    return found[0]


# Saving


def save(
    output_dir: str | os.PathLike,
    write: Callable[[str], object],
    recipe: Recipe,
    step: int | None,
    total_limit: int | None = None,
) -> None:
    """Save a checkpoint that is whole or not there. All ranks call it.

    Args:
        write: writes all files of this rank into the folder that it is given; its last part is the name of
            `output_dir`.
        step: the steps that this rank's optimizer has made, if it knows.
        total_limit: how many checkpoints are to be left in the folder around this one.

    Raises:
        FP8BackendError: on all ranks, if one of them failed. The checkpoint that was there before is as it was.
    """
    if not output_dir:
        raise FP8BackendError("save_state was given no folder to save into; the current one is '.'")
    target, state = Path(os.path.realpath(os.path.expanduser(output_dir))), PartialState()
    doing = f"saving the checkpoint {target}"
    with ExitStack() as alone:
        lock = functools.partial(alone.enter_context, _locked(target))
        _on_all_ranks(doing, lock if state.is_main_process else lambda: None)
        _save(target, write, recipe, step, total_limit)


def _save(target: Path, write: Callable[[str], object], recipe: Recipe, step: int | None, limit: int | None) -> None:
    """`save`, where no other process saves."""
    state, doing = PartialState(), f"saving the checkpoint {target}"
    is_within = _one_after_another(doing, lambda: _make_way(target))
    holder = target / manifest.SAVING if is_within else _beside(target)
    staging = holder / target.name

    def write_files() -> None:
        staging.mkdir(parents=True, exist_ok=True)
        write(str(staging))

    try:
        _on_all_ranks(doing, write_files)
        leader = seal(staging, recipe, step)
    except FP8BackendError as error:
        _on_all_ranks(doing, lambda: shutil.rmtree(holder, True) if state.is_local_main_process else None)
        rest = f"What was written lies in {holder}" if holder.exists() else "What was written of the new one is removed"
        raise FP8BackendError(f"{error}. A checkpoint that was there before is as it was. {rest}") from error.__cause__
    _on_all_ranks(f"moving the checkpoint from {staging}", lambda: _move(staging, target) if leader else None)
    if limit is not None:
        _on_all_ranks(
            f"removing old checkpoints from {target.parent}",
            lambda: remove_oldest(target.parent, target, limit) if leader else None,
        )


def _beside(target: Path) -> Path:
    return target.parent / f".{target.name}{manifest.SAVING}"


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Keep out other processes and threads that save the same checkpoint, or wait until they have. The lock ends with
    its process. Where the file system has none, as NFS, nothing is kept out.

    Raises:
        FP8BackendError: the other one takes longer than `_WAIT`.
    """
    if fcntl is None:
        yield
        return
    until = time.monotonic() + _WAIT
    while (descriptor := _lock(target)) is None:
        if time.monotonic() > until:
            raise FP8BackendError("another process is saving it: give each run a folder of its own")
        time.sleep(0.05)
    try:
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # not only closed: a process that was forked meanwhile has it, too
        os.close(descriptor)
        with suppress(OSError):
            _beside(target).rmdir()


def _lock(target: Path) -> int | None:
    """Lock the folder of a checkpoint, or the one that it is written into. Returns its descriptor; None where another
    one has it."""
    is_there = target.is_dir()
    place = target if is_there else _beside(target)
    place.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(place, os.O_RDONLY)
    except FileNotFoundError:  # removed since
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if target.is_dir() == is_there and os.path.samestat(os.fstat(descriptor), os.stat(place)):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        return descriptor  # this file system has no locks
    os.close(descriptor)
    return None


def _make_way(target: Path) -> bool:
    """Finish what an earlier save of this checkpoint has left, or remove it. Returns whether the folder exists."""
    finish(target)
    for holder in (_beside(target), target / manifest.SAVING):
        for leftover in holder.iterdir() if holder.is_dir() else ():
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    return target.exists()


def anywhere(folder: Path) -> bool:
    """Whether any rank sees this folder. All ranks call it."""
    return any(_on_all_ranks(f"reading {folder}", folder.is_dir))


def seal(folder: Path, recipe: Recipe, step: int | None) -> bool:
    """Write the manifest of a folder into which all ranks have written; the ranks that share a disk also share the
    reading. All ranks call it. Returns whether this rank leads its file system."""
    doing, state = f"sealing the checkpoint {folder}", PartialState()
    marks = folder / manifest.SAVING
    if state.num_processes > 1:
        _on_all_ranks(doing, lambda: _leave_mark(marks) if state.is_local_main_process else None)
    found = _on_all_ranks(doing, lambda: (_leader(marks), step))
    leader = found[state.process_index][0]
    mine = [rank for rank, (of_rank, _) in enumerate(found) if of_rank == leader]
    part = slice(mine.index(state.process_index), None, len(mine))
    digests = _on_all_ranks(doing, lambda: _digests(folder, manifest.files_of(folder)[part]))
    leads = leader == state.process_index
    steps = [step for _, step in found if step is not None]

    def write_manifest() -> None:
        shutil.rmtree(marks, ignore_errors=True)
        files = {name: digest for rank in mine for name, digest in digests[rank].items()}
        manifest.write(folder, files, recipe, max(steps, default=None), state.num_processes)

    _on_all_ranks(doing, write_manifest if leads else lambda: None)
    return leads


def _leave_mark(marks: Path) -> None:
    marks.mkdir(parents=True, exist_ok=True)
    (marks / str(PartialState().process_index)).touch()


def _leader(marks: Path) -> int:
    """The first rank whose mark this one sees."""
    return min(int(name) for name in os.listdir(marks)) if PartialState().num_processes > 1 else 0


def _digests(folder: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    digests = {}
    for name in names:
        manifest.flush(folder / name)
        digests[name] = manifest.digest(folder / name)
    return digests


def _move(staging: Path, target: Path) -> None:
    """Put a sealed checkpoint into its place, and what hooks have written beside it into the folder around that."""
    for each in staging.parent.iterdir():
        if each.name == staging.name:
            continue
        if each.is_dir():
            shutil.copytree(each, target.parent / each.name, dirs_exist_ok=True)
        else:
            os.replace(each, target.parent / each.name)
    if target.exists():
        if staging.parent.parent != target:  # somebody has made the folder since
            within = target / manifest.SAVING
            within.mkdir(exist_ok=True)
            os.rename(staging, within / target.name)
        finish(target)
    else:
        os.rename(staging, target)
        manifest.flush(target.parent)
    shutil.rmtree(_beside(target), ignore_errors=True)


def finish(target: Path) -> None:
    """Move the files of a sealed checkpoint over those of the one that it takes the place of; nothing without one.
    Interrupted anywhere, it can be repeated, also by several processes at a time."""
    staging = manifest.staged(target)
    new = None if staging is None else manifest.files_named_by(staging)
    if new is None:
        return
    old = manifest.files_named_by(target)
    if old is None:
        old = {each.name for each in target.iterdir() if any(fnmatch.fnmatch(each.name, of) for of in _OF_RANKS)}
    for name in (old - new) | manifest.preferred_to(new).keys():
        (target / name).unlink(missing_ok=True)
    (target / manifest.NAME).unlink(missing_ok=True)
    for name in sorted(new):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        _replace(staging / name, target / name)
    manifest.flush_folders(target)
    _replace(staging / manifest.NAME, target / manifest.NAME)
    manifest.flush(target)
    shutil.rmtree(target / manifest.SAVING, ignore_errors=True)


def _replace(source: Path, target: Path) -> None:
    try:
        os.replace(source, target)
    except FileNotFoundError:  # moved before
        if not target.exists():
            raise


def remove_oldest(folder: Path, newest: Path, limit: int) -> None:
    """Remove checkpoints that Accelerate has named from a folder until `limit` are left, the newest one among them. One
    that is being removed has no name any more that a loader looks for."""
    for leftover in (*folder.glob(f".*{_REMOVED}"), *folder.glob(f".*{manifest.SAVING}")):
        shutil.rmtree(leftover, ignore_errors=True)
    named = {each: re.fullmatch(r"checkpoint_(\d+)", each.name) for each in manifest.checkpoints_in(folder)}
    others = [each for each, match in named.items() if match and each.name != newest.name]
    others.sort(key=lambda each: int(named[each][1]), reverse=True)
    for each in others[max(limit - 1, 0) :]:
        logger.info("removing %s: total_limit is %d", each, limit)
        hidden = each.with_name(f".{each.name}{_REMOVED}")
        os.rename(each, hidden)
        shutil.rmtree(hidden, ignore_errors=True)


# Loading


def checked(input_dir: str | os.PathLike) -> None:
    """Refuse a checkpoint that is not whole, before anything of it is loaded. What is not there at all is left to
    Accelerate to refuse. All ranks call it.

    Raises:
        FP8BackendError: on all ranks. It names the file, and the newest whole checkpoint beside this one.
    """
    folder = Path(os.path.realpath(input_dir))
    if not anywhere(folder):
        return
    found = _condition(folder)
    if found.word == "whole":
        return
    if found.word == "no manifest":
        announce(f"{input_dir} carries no manifest: its files are taken as they are")
        return
    others = [each for each in manifest.checkpoints_in(folder.parent) if each != folder]
    newest = next((each for each in others if manifest.condition(each).word == "whole"), None)
    instead = f"the newest whole checkpoint beside it is {newest}" if newest else "no whole checkpoint lies beside it"
    raise FP8BackendError(f"{input_dir} is {manifest.said(found)}. Nothing of it is loaded; {instead}")


def _condition(folder: Path) -> Condition:
    """What a checkpoint is, found by all ranks together: those that see the same files share the reading."""
    _one_after_another(f"finishing the save that was interrupted in {folder}", lambda: _finish_alone(folder))
    seen = _on_all_ranks(f"reading {folder}", lambda: _identity(folder))
    rank = PartialState().process_index
    mine = [each for each, identity in enumerate(seen) if identity == seen[rank]]
    part = slice(mine.index(rank), None, len(mine))
    found = _on_all_ranks(f"reading {folder}", lambda: manifest.condition(folder, part)._replace(manifest=None))
    return next((each for each in found if each.word != "whole"), found[0])


def _finish_alone(folder: Path) -> None:
    """`finish`, while no other process does or begins to save there again."""
    if manifest.staged(folder) is not None:
        with _locked(folder):
            finish(folder)


def _identity(folder: Path) -> tuple:
    """What tells a manifest from its copy on another disk."""
    try:
        found = (folder / manifest.NAME).stat()
    except FileNotFoundError:
        return ()
    return found.st_ino, found.st_size, found.st_ctime_ns


def newest(folder: Path) -> Path:
    """`manifest.newest_checkpoint`, found by all ranks together. Raises `FP8BackendError` where there is none."""
    names = _on_all_ranks(f"reading {folder}", lambda: [each.name for each in manifest.checkpoints_in(folder)])[0]
    chosen = manifest.choose((folder / name, _condition(folder / name)) for name in names)
    if chosen is None:
        raise FP8BackendError(f"no checkpoint in {folder} is whole: there is nothing to load")
    return chosen
