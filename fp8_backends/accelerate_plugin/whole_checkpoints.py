"""Save whole checkpoints or none, from many ranks.

A new checkpoint is written into `.NAME.saving/NAME` beside its place, sealed by a manifest, and renamed into its place.
An older one is first renamed to `.NAME.saving/.replaced`; files in it that belong to no checkpoint then move into the
new folder, and the rest is deleted. The next save or load finishes an interrupted replacement.

Each file system has a leader that seals and renames: the main process where all ranks see one folder, and the first
rank of each node with a disk of its own. An error on one rank reaches all of them before anything is sealed.
"""

from __future__ import annotations

import fnmatch
import functools
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from accelerate.state import PartialState

from ..announcement import announce, logger
from ..errors import FP8BackendError, on_all_ranks
from ..recipes.handlers import Recipe
from ..training import manifest
from ..training.manifest import Condition

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_OF_RANKS = ("random_states_*.pkl", "custom_checkpoint_*.pkl", "fp8_scaling_*.safetensors")
"""Files that more ranks or objects may have left in an older checkpoint without a manifest, and a loader would read."""


def _one_after_another(doing: str, function: Callable[[], object]) -> None:
    """Run a function on the main process, and then on the first rank of each other node, whose disk may be its own."""
    state = PartialState()
    on_all_ranks(doing, lambda: function() if state.is_main_process else None)
    on_all_ranks(doing, lambda: function() if state.is_local_main_process and not state.is_main_process else None)


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
        write: write all files of this rank into the given folder; its last part is the name of `output_dir`.
        step: the steps that this rank's optimizer has made, if it knows.
        total_limit: how many checkpoints to leave in the folder around this one.

    Raises:
        FP8BackendError: on all ranks, if one of them failed. The checkpoint that was there before is as it was.
    """
    if not output_dir:
        raise FP8BackendError("save_state was given no folder to save into")
    target, state = Path(os.path.realpath(os.path.expanduser(output_dir))), PartialState()
    holder, doing = manifest.holder_of(target), f"saving the checkpoint {target}"
    staging = holder / target.name

    def write_files() -> None:
        staging.mkdir(parents=True, exist_ok=True)
        write(str(staging))

    with ExitStack() as alone:
        lock = functools.partial(alone.enter_context, _locked(target))
        on_all_ranks(doing, lock if state.is_main_process else lambda: None)
        _one_after_another(doing, lambda: _make_way(target))
        try:
            on_all_ranks(doing, write_files)
            leads = seal(staging, recipe, step)
        except FP8BackendError as error:
            on_all_ranks(doing, lambda: shutil.rmtree(holder, True) if state.is_local_main_process else None)
            rest = f"The new files are in {holder}" if staging.exists() else "The new files are removed"
            raise FP8BackendError(
                f"{error}. A checkpoint that was there before is as it was. {rest}"
            ) from error.__cause__
        on_all_ranks(f"renaming the checkpoint {staging}", lambda: _put_in_place(target) if leads else None)
        if total_limit is not None:
            on_all_ranks(
                f"removing old checkpoints from {target.parent}",
                lambda: remove_oldest(target.parent, target, total_limit) if leads else None,
            )


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Wait until no other process or thread saves the same checkpoint, and keep others out. The lock ends with its
    process. File systems without locks, such as NFS, keep nobody out."""
    if fcntl is None:
        yield
        return
    holder, locked = manifest.holder_of(target), False
    while not locked:
        holder.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # the other process has removed it since
            descriptor = os.open(holder, os.O_RDONLY)
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            locked = holder.exists() and os.path.samestat(os.fstat(descriptor), holder.stat())
            if not locked:
                os.close(descriptor)
    try:
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # not only closed: a process that was forked meanwhile has it, too
        os.close(descriptor)
        with suppress(OSError):
            holder.rmdir()


def _make_way(target: Path) -> None:
    """Finish an earlier replacement of this checkpoint, and remove leftovers of an earlier save. Raise
    `FP8BackendError` if no rename can replace the target."""
    finish(target)
    holder = manifest.holder_of(target)
    for leftover in holder.iterdir() if holder.is_dir() else ():
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    if target.exists():
        kinds = {
            "a file": not target.is_dir(),
            "a mount point": target.is_mount(),
            "the current folder": target.samefile(os.curdir),
            "read-only": not os.access(target, os.W_OK),
        }
        if kind := next((kind for kind, is_it in kinds.items() if is_it), None):
            raise FP8BackendError(f"{target} is {kind}, and a save replaces the folder: save into another one")


def anywhere(folder: Path) -> bool:
    """Tell whether any rank sees this checkpoint. All ranks call it."""
    return any(on_all_ranks(f"reading {folder}", lambda: manifest.place_of(folder).is_dir()))


def seal(folder: Path, recipe: Recipe, step: int | None) -> bool:
    """Write the manifest of a folder after all ranks have written; ranks with a common disk share the reading. All
    ranks call it. Return True if this rank leads its file system."""
    doing, state = f"sealing the checkpoint {folder}", PartialState()
    marks = folder / manifest.SAVING

    def leave_mark() -> None:
        marks.mkdir(parents=True, exist_ok=True)
        (marks / str(state.process_index)).touch()

    def first_mark() -> int:
        return min(map(int, os.listdir(marks)))

    def digests() -> dict[str, dict[str, Any]]:
        names = manifest.files_of(folder)[mine.index(state.process_index) :: len(mine)]
        for name in names:
            manifest.flush(folder / name)
        return {name: manifest.digest(folder / name) for name in names}

    on_all_ranks(doing, lambda: leave_mark() if state.is_local_main_process else None)
    found = on_all_ranks(doing, lambda: (first_mark(), step))
    leader = found[state.process_index][0]
    mine = [rank for rank, (its, _) in enumerate(found) if its == leader]
    read = on_all_ranks(doing, digests)
    steps = [step for _, step in found if step is not None]
    leads = leader == state.process_index

    def write_manifest() -> None:
        shutil.rmtree(marks, ignore_errors=True)
        files = {name: digest for rank in mine for name, digest in read[rank].items()}
        manifest.write(folder, files, recipe, max(steps, default=None), state.num_processes)

    on_all_ranks(doing, write_manifest if leads else lambda: None)
    return leads


def _put_in_place(target: Path) -> None:
    """Rename a sealed checkpoint into its place, and move what hooks have written beside it beside the target."""
    holder = manifest.holder_of(target)
    for each in holder.iterdir():
        if each.name != target.name and each.is_dir():
            shutil.copytree(each, target.parent / each.name, dirs_exist_ok=True)
        elif each.name != target.name:
            os.replace(each, target.parent / each.name)
    if target.exists():
        shutil.copystat(target, holder / target.name)
        os.rename(target, holder / manifest.REPLACED)
        finish(target)
    else:
        os.rename(holder / target.name, target)
        manifest.flush(target.parent)
    shutil.rmtree(holder, ignore_errors=True)


def finish(target: Path) -> None:
    """Put the new checkpoint into the place from which the old one was renamed, and delete the old one. Do nothing
    without an old one. A call that was interrupted anywhere can be repeated."""
    holder = manifest.holder_of(target)
    old = holder / manifest.REPLACED
    if not old.exists():
        return
    if not target.exists():
        os.rename(holder / target.name, target)
    manifest.flush(target.parent)
    names = manifest.files_named_by(old)
    if names is None:
        names = {each.name for each in old.iterdir() if any(fnmatch.fnmatch(each.name, of) for of in _OF_RANKS)}
    preferred = manifest.preferred_to(manifest.files_named_by(target) or ())
    for name in (*names, *preferred, manifest.NAME):
        (old / name).unlink(missing_ok=True)
    _move_missing(old, target)
    shutil.rmtree(holder, ignore_errors=True)


def _move_missing(old: Path, new: Path) -> None:
    """Move into a folder what it lacks of another one."""
    for each in list(old.iterdir()):
        place = new / each.name
        if not os.path.lexists(place):
            os.rename(each, place)
        elif each.is_dir() and not each.is_symlink() and place.is_dir():
            _move_missing(each, place)


def remove_oldest(folder: Path, newest: Path, limit: int) -> None:
    """Remove checkpoints that Accelerate has named from a folder until `limit` are left, the newest one among them. No
    loader looks for the name under which one is removed."""
    for leftover in folder.glob(f".*{manifest.SAVING}"):
        if not (leftover / manifest.REPLACED).exists():
            shutil.rmtree(leftover, ignore_errors=True)
    named = {each: re.fullmatch(r"checkpoint_(\d+)", each.name) for each in manifest.checkpoints_in(folder)}
    others = [each for each, match in named.items() if match and each.name != newest.name]
    others.sort(key=lambda each: int(named[each][1]), reverse=True)
    for each in others[max(limit - 1, 0) :]:
        logger.info("removing %s: total_limit is %d", each, limit)
        os.rename(each, manifest.holder_of(each))
        shutil.rmtree(manifest.holder_of(each), ignore_errors=True)


@functools.cache
def _sealing_callback() -> type:
    """Return the class of Trainer's callback. Defined here, because it imports transformers."""
    from transformers import TrainerCallback

    class SealingCallback(TrainerCallback):
        """Write the manifest of each checkpoint that Trainer has written: it never calls `save_state`."""

        def __init__(self, recipe: Recipe) -> None:
            self.recipe = recipe

        def on_save(self, args, state, control, **kwargs) -> None:
            """Seal the newest checkpoint. All ranks are here. A hyperparameter search saves elsewhere, without
            manifests."""
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
            if anywhere(folder):
                seal(folder.resolve(), self.recipe, state.global_step)

    return SealingCallback


def seal_checkpoints_of(trainer: Any, recipe: Recipe) -> None:
    """Let the checkpoints of transformers' Trainer have manifests. Repeating it does nothing."""
    handler = getattr(trainer, "callback_handler", None)  # none while the Trainer is being built
    if handler is not None and not any(isinstance(each, _sealing_callback()) for each in handler.callbacks):
        trainer.add_callback(_sealing_callback()(recipe))


# Loading


def checked(input_dir: str | os.PathLike) -> bool:
    """Refuse a checkpoint that is not whole, before anything of it is loaded. All ranks call it. Return whether any of
    them sees it.

    Raises:
        FP8BackendError: on all ranks. It names the file, and the newest whole checkpoint beside this one.
    """
    folder = Path(os.path.realpath(input_dir))
    if not anywhere(folder):
        return False
    found = _condition(folder)
    if found.word == "no manifest":
        announce(f"{input_dir} carries no manifest: its files are taken as they are")
    if found.word in ("whole", "no manifest"):
        return True
    others = [each for each in manifest.checkpoints_in(folder.parent) if each != folder]
    newest = next((each for each in others if manifest.condition(each).word == "whole"), None)
    instead = f"the newest whole checkpoint beside it is {newest}" if newest else "no whole checkpoint lies beside it"
    raise FP8BackendError(f"{input_dir} is {manifest.said(found)}. Nothing of it is loaded; {instead}")


def _condition(folder: Path) -> Condition:
    """Find the condition of a checkpoint by all ranks together: ranks that see the same files share the reading."""

    def finish_alone() -> None:
        if (manifest.holder_of(folder) / manifest.REPLACED).exists():
            with _locked(folder):
                finish(folder)

    def identity() -> tuple:
        try:
            found = (folder / manifest.NAME).stat()
        except FileNotFoundError:
            return ()
        return found.st_ino, found.st_size, found.st_ctime_ns  # a copy on another disk has others

    _one_after_another(f"finishing the save that was interrupted in {folder}", finish_alone)
    seen = on_all_ranks(f"reading {folder}", identity)
    rank = PartialState().process_index
    mine = [each for each, its in enumerate(seen) if its == seen[rank]]
    part = slice(mine.index(rank), None, len(mine))
    found = on_all_ranks(f"reading {folder}", lambda: manifest.condition(folder, part)._replace(manifest=None))
    return next((each for each in found if each.word != "whole"), found[0])


def newest(folder: Path) -> Path:
    """Find `manifest.newest_checkpoint` by all ranks together. Raise `FP8BackendError` where there is none."""
    names = on_all_ranks(f"reading {folder}", lambda: [each.name for each in manifest.checkpoints_in(folder)])[0]
    chosen = manifest.choose((folder / name, _condition(folder / name)) for name in names)
    if chosen is None:
        raise FP8BackendError(f"no checkpoint in {folder} is whole: there is nothing to load")
    return chosen
