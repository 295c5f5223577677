"""Save whole checkpoints or none, from many ranks, with scaling states; check a folder before
loading anything of it.

A new checkpoint is written into `.NAME.saving/NAME` beside its place, sealed by a manifest, and
renamed into its place; an older one is first renamed to `.NAME.saving/.replaced`. The next save or
load finishes an interrupted replacement. A leader on each file system seals and renames.
docs/saving.rst describes the files.
"""

import fnmatch
import json
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import load
from accelerate.utils.constants import OPTIMIZER_NAME
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ..announcement import announce, logger
from ..checkpoints import manifest, scaling_state
from ..checkpoints.manifest import METADATA, Condition
from ..checkpoints.scaling_state import DAMAGED, ScalingState
from ..errors import FP8BackendError, on_all_ranks
from ..recipes.handlers import Recipe
from ..states.checkpoint import check_states
from ..states.scaled_states import ScaledStates
from ..torch_tools.modules import plain_name
from ..torch_tools.optimizers import unwrapped
from .engines import shares_layers, uses_deepspeed

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_FORMAT = 2
_OF_RANKS = ("random_states_*.pkl", "custom_checkpoint_*.pkl", "fp8_scaling_*.safetensors")
"""Files that a loader would read, and that more ranks may have left in an older checkpoint without
a manifest."""


# Saving


def save(
    output_dir: str | os.PathLike,
    write: Callable[[str], object],
    recipe: Recipe,
    step: int | None,
    total_limit: int | None = None,
) -> None:
    """Save a whole checkpoint or none. If one rank fails, all raise `FP8BackendError`, and an older
    checkpoint stays.

    `write` writes all files of this rank into a folder. `total_limit` checkpoints stay in the
    folder around this one.
    """
    if not output_dir:
        raise FP8BackendError("save_state was given no folder to save into")
    target = Path(os.path.realpath(os.path.expanduser(output_dir)))
    state = PartialState()
    holder = manifest.holder_of(target)
    doing = f"saving the checkpoint {target}"
    staging = holder / target.name

    with ExitStack() as lock:
        on_all_ranks(
            doing, lambda: lock.enter_context(_locked(target)) if state.is_main_process else None
        )
        _once_per_disk(doing, lambda: _make_way(target))
        try:
            on_all_ranks(
                doing, lambda: (staging.mkdir(parents=True, exist_ok=True), write(str(staging)))
            )
            leads = seal(staging, recipe, step)
        except FP8BackendError as error:
            on_all_ranks(
                doing, lambda: shutil.rmtree(holder, True) if state.is_local_main_process else None
            )
            rest = (
                f"The new files are in {holder}"
                if staging.exists()
                else "The new files are removed"
            )
            raise FP8BackendError(
                f"{error}. An earlier checkpoint there is as it was. {rest}"
            ) from error.__cause__
        on_all_ranks(
            f"renaming the checkpoint {staging}", lambda: _put_in_place(target) if leads else None
        )
        if total_limit is not None:
            on_all_ranks(
                f"removing old checkpoints from {target.parent}",
                lambda: _remove_oldest(target.parent, target, total_limit) if leads else None,
            )


def _once_per_disk(doing: str, function: Callable[[], object]) -> None:
    """Run a function on the main process, then on the first rank of each other node, whose disk may
    be its own."""
    state = PartialState()
    on_all_ranks(doing, lambda: function() if state.is_main_process else None)
    on_all_ranks(
        doing,
        lambda: function() if state.is_local_main_process and not state.is_main_process else None,
    )


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Let one process or thread at a time save this checkpoint, on file systems with locks (not on
    NFS)."""
    if fcntl is None:
        yield
        return
    holder = manifest.holder_of(target)
    locked = False
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
            # closing is not enough: a forked process has the descriptor, too
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
        with suppress(OSError):
            holder.rmdir()


def _make_way(target: Path) -> None:
    """Finish an earlier replacement of this checkpoint, remove leftovers, and refuse a target that
    stays."""
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
            raise FP8BackendError(
                f"{target} is {kind}, and a save replaces the folder: save into another one"
            )


def seal(folder: Path, recipe: Recipe, step: int | None) -> bool:
    """Write a folder's manifest once all ranks have written. Return True if this rank leads its
    file system."""
    doing = f"sealing the checkpoint {folder}"
    state = PartialState()
    marks = folder / manifest.SAVING

    def leave_mark() -> None:
        marks.mkdir(parents=True, exist_ok=True)
        (marks / str(state.process_index)).touch()

    def digests() -> dict[str, dict[str, Any]]:
        names = manifest.files_of(folder)[peers.index(state.process_index) :: len(peers)]
        for name in names:
            manifest.flush(folder / name)
        return {name: manifest.digest(folder / name) for name in names}

    on_all_ranks(doing, lambda: leave_mark() if state.is_local_main_process else None)
    leaders_and_steps = on_all_ranks(doing, lambda: (min(map(int, os.listdir(marks))), step))
    leader = leaders_and_steps[state.process_index][0]
    peers = [rank for rank, (other, _) in enumerate(leaders_and_steps) if other == leader]
    read = on_all_ranks(doing, digests)
    steps = [step for _, step in leaders_and_steps if step is not None]
    leads = leader == state.process_index

    def write_manifest() -> None:
        shutil.rmtree(marks, ignore_errors=True)
        files = {name: digest for rank in peers for name, digest in read[rank].items()}
        manifest.write(folder, files, recipe, max(steps, default=None), state.num_processes)

    on_all_ranks(doing, write_manifest if leads else lambda: None)
    return leads


def _put_in_place(target: Path) -> None:
    """Rename a sealed checkpoint into its place, and move files that hooks wrote beside it beside
    the target."""
    holder = manifest.holder_of(target)
    for path in holder.iterdir():
        if path.name != target.name and path.is_dir():
            shutil.copytree(path, target.parent / path.name, dirs_exist_ok=True)
        elif path.name != target.name:
            os.replace(path, target.parent / path.name)
    if target.exists():
        shutil.copystat(target, holder / target.name)
        os.rename(target, holder / manifest.REPLACED_FOLDER)
        finish(target)
    else:
        os.rename(holder / target.name, target)
        manifest.flush(target.parent)
    shutil.rmtree(holder, ignore_errors=True)


def finish(target: Path) -> None:
    """Put the new checkpoint into the place of the renamed old one, if any. Can be repeated after
    any interruption."""
    holder = manifest.holder_of(target)
    old = holder / manifest.REPLACED_FOLDER
    if not old.exists():
        return
    if not target.exists():
        os.rename(holder / target.name, target)
    manifest.flush(target.parent)
    names = manifest.files_named_by(old)
    if names is None:
        names = {
            path.name
            for path in old.iterdir()
            if any(fnmatch.fnmatch(path.name, of) for of in _OF_RANKS)
        }
    preferred = manifest.preferred_to(manifest.files_named_by(target) or ())
    for name in (*names, *preferred, manifest.MANIFEST):
        (old / name).unlink(missing_ok=True)
    _move_missing(old, target)
    shutil.rmtree(holder, ignore_errors=True)


def _move_missing(old: Path, new: Path) -> None:
    """Move files of the old folder without a namesake into the new one."""
    for path in list(old.iterdir()):
        place = new / path.name
        if not os.path.lexists(place):
            os.rename(path, place)
        elif path.is_dir() and not path.is_symlink() and place.is_dir():
            _move_missing(path, place)


def _remove_oldest(folder: Path, newest: Path, limit: int) -> None:
    """Remove Accelerate's checkpoints until `limit` are left. Each is first renamed, so that no
    loader finds it."""
    for leftover in folder.glob(f".*{manifest.SAVING}"):
        if not (leftover / manifest.REPLACED_FOLDER).exists():
            shutil.rmtree(leftover, ignore_errors=True)
    numbers = {
        path: re.fullmatch(r"checkpoint_(\d+)", path.name)
        for path in manifest.checkpoints_in(folder)
    }
    others = [path for path, match in numbers.items() if match and path.name != newest.name]
    others.sort(key=lambda path: int(numbers[path][1]), reverse=True)
    for path in others[max(limit - 1, 0) :]:
        logger.info("removing %s: total_limit is %d", path, limit)
        os.rename(path, manifest.holder_of(path))
        shutil.rmtree(manifest.holder_of(path), ignore_errors=True)


def seal_checkpoints_of(trainer: Any, recipe: Recipe) -> None:
    """Let transformers' Trainer, which never calls `save_state`, write manifests. Repeating it does
    nothing."""
    handler = getattr(trainer, "callback_handler", None)  # none while the Trainer is being built
    if handler is None or any(hasattr(callback, "fp8_recipe") for callback in handler.callbacks):
        return
    from transformers import TrainerCallback

    class SealingCallback(TrainerCallback):
        fp8_recipe = recipe

        def on_save(self, args, state, control, **kwargs) -> None:
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
            if _anywhere(folder):  # a hyperparameter search saves elsewhere
                seal(folder.resolve(), recipe, state.global_step)

    trainer.add_callback(SealingCallback())


# Loading


def _anywhere(folder: Path) -> bool:
    """Return True if any rank sees this checkpoint. All ranks call it."""
    return any(on_all_ranks(f"reading {folder}", lambda: manifest.place_of(folder).is_dir()))


def checked(input_dir: str | os.PathLike) -> bool:
    """Refuse a checkpoint that is not whole, on all ranks, before loading anything. Return True if
    a rank sees it."""
    folder = Path(os.path.realpath(input_dir))
    if not _anywhere(folder):
        return False
    condition = _condition(folder)
    if condition.word == "no manifest":
        announce(f"{input_dir} carries no manifest: its files are taken as they are")
    if condition.word in ("whole", "no manifest"):
        return True
    others = [path for path in manifest.checkpoints_in(folder.parent) if path != folder]
    newest = next((path for path in others if manifest.condition(path).word == "whole"), None)
    instead = (
        f"the newest whole checkpoint beside it is {newest}"
        if newest
        else "no whole checkpoint lies beside it"
    )
    raise FP8BackendError(
        f"{input_dir} is {manifest.said(condition)}. Nothing of it is loaded; {instead}"
    )


def _condition(folder: Path) -> Condition:
    """Find the condition of a checkpoint by all ranks together: ranks that see the same files share
    the reading."""

    def finish_alone() -> None:
        if (manifest.holder_of(folder) / manifest.REPLACED_FOLDER).exists():
            with _locked(folder):
                finish(folder)

    def identity() -> tuple:
        try:
            status = (folder / manifest.MANIFEST).stat()
        except FileNotFoundError:
            return ()
        # different for a copy on another disk
        return status.st_ino, status.st_size, status.st_ctime_ns

    _once_per_disk(f"finishing the save that was interrupted in {folder}", finish_alone)
    seen = on_all_ranks(f"reading {folder}", identity)
    rank = PartialState().process_index
    peers = [other for other, its in enumerate(seen) if its == seen[rank]]
    part = slice(peers.index(rank), None, len(peers))
    conditions = on_all_ranks(
        f"reading {folder}", lambda: manifest.condition(folder, part)._replace(manifest=None)
    )
    return next((condition for condition in conditions if condition.word != "whole"), conditions[0])


def newest(folder: Path) -> Path:
    """Find `manifest.newest_checkpoint` by all ranks together. Raises `FP8BackendError` without
    one."""
    names = on_all_ranks(
        f"reading {folder}", lambda: [path.name for path in manifest.checkpoints_in(folder)]
    )[0]
    chosen = manifest.choose((folder / name, _condition(folder / name)) for name in names)
    if chosen is None:
        raise FP8BackendError(f"no checkpoint in {folder} is whole: there is nothing to load")
    return chosen


# Scaling states


def save_scaling(accelerator: Accelerator, output_dir: str) -> None:
    folder = Path(output_dir)
    state = scaling_state.collect(accelerator._models)
    if accelerator.writes_files:
        metadata = {
            "format": _FORMAT,
            "backend": accelerator.fp8_recipe.name,
            "models": state.backends,
        }
        metadata |= {"recipes": state.recipes, "steps": state.steps}
        metadata["manifest"] = manifest.MANIFEST  # incomplete without the manifest
        (folder / METADATA).write_text(json.dumps(metadata, indent=2) + "\n")
    if state.tensors:
        save_file(state.tensors, folder / _tensor_file(accelerator.process_index))


def load_scaling(accelerator: Accelerator, input_dir: str | os.PathLike) -> None:
    """Check the scaling states and converted optimizers in a folder of `save_state`, then load the
    scaling states.

    All ranks raise `FP8BackendError`, before anything changes, if one of them cannot resume from
    it.
    """
    folder = Path(input_dir)

    def read_and_check() -> None:
        nonlocal saved
        saved = _read(folder, accelerator.process_index)
        scaling_state.check(accelerator._models, saved, str(folder))
        # ranks that share layers compare what they check, so none may leave it out
        # whose engine has its own
        has_files = accelerator.has_whole_weights and not uses_deepspeed(accelerator)
        if has_files and (accelerator.is_local_main_process or shares_layers(accelerator)):
            _check_optimizer_files(accelerator, folder)

    saved: ScalingState | None = None
    on_all_ranks(f"loading {folder}", read_and_check)
    scaling_state.write(accelerator._models, saved, str(folder))


def _check_optimizer_files(accelerator: Accelerator, folder: Path) -> None:
    names = {
        id(p): plain_name(name)
        for model in accelerator._models
        for name, p in model.named_parameters()
    }
    for i, optimizer in enumerate(map(unwrapped, accelerator._optimizers)):
        if isinstance(optimizer, ScaledStates):
            path = folder / (f"{OPTIMIZER_NAME}_{i}.bin" if i else f"{OPTIMIZER_NAME}.bin")
            try:
                if state_dict := _read_optimizer(path):
                    check_states(optimizer, state_dict, names)
                    optimizer.fp8_checked = True
            except FP8BackendError as error:
                raise FP8BackendError(f"{path}: {error}") from None


def _read_optimizer(path: Path) -> dict[str, Any] | None:
    """Read a file of `torch.save` without a copy; return None if only the user's `load_kwargs` can
    load it."""
    try:
        return load(path, map_location="cpu", mmap=zipfile.is_zipfile(path))
    except FP8BackendError:
        raise
    except Exception as error:  # PyTorch raises anything for a damaged file
        if "Unsupported global" in str(error):
            return None
        raise FP8BackendError(f"it cannot be read ({error!r}): {DAMAGED}") from None


def _read(folder: Path, rank: int) -> ScalingState | None:
    """Read the scaling states in a folder; return None without any. Raises `FP8BackendError` for
    damaged files."""
    path = folder / METADATA
    if not path.exists():
        return None
    try:
        metadata = json.loads(path.read_text())
        file_format = metadata["format"]
        backends = metadata["models"]
        recipes = metadata["recipes"]
        steps = metadata.get("steps", {})
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise FP8BackendError(f"{path} cannot be read ({error!r}): {DAMAGED}") from None
    if file_format != _FORMAT:
        raise FP8BackendError(
            f"{path} has format {file_format!r}, and this version of fp8_backends reads {_FORMAT}: "
            "load it with the version that wrote it"
        )
    # a run with fewer ranks has saved fewer files
    files = [folder / _tensor_file(saved_by) for saved_by in (rank, 0)]
    file = next(filter(Path.exists, files), None)
    try:
        tensors = load_file(file) if file else {}
    except (OSError, SafetensorError) as error:
        raise FP8BackendError(f"{file} cannot be read ({error}): {DAMAGED}") from None
    saved = {"backends": backends, "tensors": tensors, "recipes": recipes, "steps": steps}
    return ScalingState.of(saved, str(folder))


def _tensor_file(rank: int) -> str:
    return f"fp8_scaling_{rank}.safetensors"
