"""Write and check the manifest of a checkpoint: size and SHA-256 of every file, written last
(docs/saving.rst)."""

import datetime
import errno
import hashlib
import json
import math
import os
import platform
import re
import stat
from collections.abc import Collection, Iterable
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple

from ..announcement import announce, is_main_process, logger
from ..compute.hardware import version
from ..errors import FP8BackendError
from ..recipes.handlers import Recipe

MANIFEST = "fp8_manifest.json"
METADATA = "fp8_backend.json"
"""Description of the backend by `save_state`. Its key `manifest` promises a manifest."""
SAVING = ".saving"
"""Suffix of the folder for a checkpoint being written. A folder of this name inside a checkpoint is
no part of it."""
REPLACED_FOLDER = ".replaced"
"""Name of the replaced checkpoint, moved into the folder of the new one."""
_FORMAT = 1
_TRAINER_STATE = "trainer_state.json"
"""The last file of a checkpoint by transformers' Trainer."""
_SIGNS = (MANIFEST, METADATA, _TRAINER_STATE, "random_states_0.pkl")
"""Files that mark a folder as a checkpoint of training."""


class Condition(NamedTuple):
    word: Literal["whole", "incomplete", "damaged", "foreign", "no manifest"]
    detail: str = ""
    manifest: dict[str, Any] | None = None


# One checkpoint


def files_of(folder: Path) -> list[str]:
    """Return the relative paths of a checkpoint's files without its manifest, the largest first."""
    sizes = {}
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != SAVING]
        files = (path for name in names if (path := Path(parent, name)).is_file())
        sizes |= {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
    return sorted(sizes.keys() - {MANIFEST}, key=lambda name: (-sizes[name], name))


def digest(path: Path) -> dict[str, Any]:
    hashed, size, buffer = hashlib.sha256(), 0, memoryview(bytearray(2**20))
    with path.open("rb", buffering=0) as file:
        while read := file.readinto(buffer):
            hashed.update(buffer[:read])
            size += read
    return {"bytes": size, "sha256": hashed.hexdigest()}


def flush(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write(
    folder: Path,
    files: dict[str, dict[str, Any]],
    recipe: Recipe,
    step: int | None,
    world_size: int,
) -> None:
    """Write the manifest of a folder atomically, and flush it to the disk. `files`: `digest` by
    path of `files_of`."""
    libraries = {name: version(name) for name in ("fp8-backends", "torch", "accelerate")}
    record = {
        "format": _FORMAT,
        "backend": recipe.name,
        "recipe": recipe.to_dict(),
        "step": step,
        "world_size": world_size,
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(),
        "versions": libraries | {"python": platform.python_version()},
        "files": dict(sorted(files.items())),
    }
    unfinished = folder / f"{MANIFEST}.tmp"
    unfinished.write_bytes(_text(json.loads(json.dumps(record, default=str))))
    flush(unfinished)
    for parent, _, _ in os.walk(folder):
        flush(Path(parent))
    os.replace(unfinished, folder / MANIFEST)
    flush(folder)


def _text(record: dict[str, Any]) -> bytes:
    """Return the bytes of a manifest, with its own checksum."""
    checksum = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    return (json.dumps(record | {"sha256": checksum}, indent=1) + "\n").encode()


def holder_of(folder: Path) -> Path:
    """Return the folder for writing a checkpoint, a neighbour of its final place."""
    return folder.parent / f".{folder.name}{SAVING}"


def place_of(folder: Path) -> Path:
    """Return the folder with a checkpoint's files: between the two renames of a replacement the one
    for writing."""
    is_between = (holder_of(folder) / REPLACED_FOLDER).exists() and not folder.exists()
    return holder_of(folder) / folder.name if is_between else folder


def files_named_by(folder: Path) -> set[str] | None:
    """Return the relative paths in the manifest of a folder; None without an intact one."""
    manifest = _read(folder).manifest
    return None if manifest is None else set(manifest["files"])


def preferred_to(names: Collection[str]) -> dict[str, str]:
    """Map files that Accelerate would prefer over some of these to the files that they replace."""
    preferred = {
        re.sub(r"^pytorch_model(_\d+)?\.bin$", r"model\1.safetensors", name): name for name in names
    }
    return {other: name for other, name in preferred.items() if other not in names}


def condition(folder: Path, part: slice = slice(None)) -> Condition:
    """Check a checkpoint by reading its files, or a part of them; again if it is replaced
    meanwhile."""
    current = _condition(place_of(folder), part)
    while current.word != "whole" and (again := _condition(place_of(folder), part)) != current:
        current = again
    return current


def _condition(folder: Path, part: slice) -> Condition:
    current = _read(folder)
    if current.word != "whole":
        return current
    files = current.manifest["files"]
    for name in sorted(files, key=lambda name: -files[name]["bytes"])[part]:
        if fault := _fault(folder / name, files[name]):
            return Condition("damaged", f"{name} {fault}", current.manifest)
    for other, name in preferred_to(files).items():
        if (folder / other).exists():
            detail = (
                f"{other} is no part of it, and would be loaded in place of {name}: move it away"
            )
            return Condition("damaged", detail, current.manifest)
    return current


def _fault(path: Path, expected: dict[str, Any]) -> str:
    if not path.is_file():
        return "is missing"
    try:
        size = path.stat().st_size
        if size != expected["bytes"]:
            return f"has {size:,} bytes in place of {expected['bytes']:,}"
        same = digest(path)["sha256"] == expected["sha256"]
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return "" if same else "has other contents than were saved (its SHA-256 differs)"


def _read(folder: Path) -> Condition:
    try:
        text = _content(folder / MANIFEST)
    except FileNotFoundError:
        return _without_manifest(folder)
    except OSError as error:
        return Condition("damaged", f"{MANIFEST} cannot be read ({error.strerror})")
    try:
        record = json.loads(text)
        intact = _text({key: value for key, value in record.items() if key != "sha256"}) == text
    except (ValueError, AttributeError, RecursionError):
        return Condition("damaged", f"{MANIFEST} is no manifest")
    if isinstance(record.get("format"), int) and record["format"] > _FORMAT:
        return Condition(
            "foreign",
            f"{MANIFEST} has format {record['format']}; this version reads format {_FORMAT}",
        )
    if not intact:
        return Condition("damaged", f"{MANIFEST} does not fit its own checksum")
    if not _is_record(record):
        return Condition(
            "damaged", f"{MANIFEST} does not hold what a manifest of format {_FORMAT} does"
        )
    return Condition("whole", manifest=record)


def _content(path: Path) -> bytes:
    if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe or device may never end
        raise OSError(errno.EINVAL, "it is no file")
    return path.read_bytes()


def _is_record(record: dict[str, Any]) -> bool:
    """Return True for a manifest in the form of `write`, with names inside its folder."""
    try:
        datetime.datetime.fromisoformat(record["time"])
        files = record["files"].items()
        return (
            isinstance(record["backend"], str)
            and record["backend"].isprintable()
            and all(
                type(number) in (int, type(None))
                for number in (record["step"], record["world_size"])
            )
            and isinstance(record["versions"], dict)
            and all(name.isprintable() and not name.startswith("/") for name, _ in files)
            and all(".." not in PurePosixPath(name).parts for name, _ in files)
            and all(
                type(file["bytes"]) is int and isinstance(file["sha256"], str) for _, file in files
            )
        )
    except (LookupError, TypeError, ValueError, AttributeError):
        return False


def _without_manifest(folder: Path) -> Condition:
    try:
        if (folder / METADATA).exists() and "manifest" in json.loads(_content(folder / METADATA)):
            return Condition(
                "incomplete", f"{MANIFEST} is missing: a save ended early, or the file was removed"
            )
    except (ValueError, TypeError, OSError, RecursionError):
        return Condition(
            "damaged", f"{METADATA} is not what save_state wrote, and {MANIFEST} is missing"
        )
    if re.fullmatch(r"checkpoint-\d+", folder.name) and not any(folder.glob("random_states_*.pkl")):
        try:
            json.loads(_content(folder / _TRAINER_STATE))
        except (OSError, ValueError, RecursionError):
            return Condition(
                "incomplete", f"{_TRAINER_STATE}, which Trainer writes last, is missing or cut off"
            )
    return Condition("no manifest", "stock Accelerate or a Trainer without FP8 saved it")


# A folder of checkpoints


def is_checkpoint(folder: Path) -> bool:
    """Return True if a folder looks like a checkpoint of Accelerate or Trainer, whole or not."""
    signs = any((place_of(folder) / name).exists() for name in _SIGNS)
    return signs or re.fullmatch(r"checkpoint[-_]\d+", folder.name) is not None


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, the newest first: by the numbers of Accelerate's names
    (`checkpoint_3`), else by the steps of their manifests, the numbers in otherwise equal names, or
    the time of saving. An unknown step precedes known ones."""
    try:
        # a link is another name
        names = {path.name for path in folder.iterdir() if not path.is_symlink()}
    except (FileNotFoundError, NotADirectoryError):
        return []
    names |= {
        name[1 : -len(SAVING)] for name in names if (folder / name / REPLACED_FOLDER).exists()
    }
    # hidden folders are being saved or removed
    paths = [folder / name for name in names if not name.startswith(".")]
    paths = [path for path in paths if place_of(path).is_dir() and is_checkpoint(path)]
    numbers = {path: re.fullmatch(r"(.*?)(\d+)", path.name) for path in paths}
    prefixes = {match and match[1] for match in numbers.values()}
    records = {path: _read(place_of(path)).manifest for path in paths}
    steps = {path: record and record["step"] for path, record in records.items()}
    if prefixes == {"checkpoint_"} or (
        None in steps.values() and len(prefixes) == 1 and None not in prefixes
    ):
        return sorted(paths, key=lambda path: int(numbers[path][2]), reverse=True)

    def order(path: Path) -> tuple[float, float]:
        if records[path] is None:
            return math.inf, place_of(path).stat().st_mtime
        time = datetime.datetime.fromisoformat(records[path]["time"]).timestamp()
        return math.inf if steps[path] is None else steps[path], time

    return sorted(paths, key=order, reverse=True)


def newest_checkpoint(folder: str | os.PathLike) -> str | None:
    """Find the newest whole checkpoint in a folder, or the folder itself if it is the only one.

    Every file is read, to exclude half-written and damaged checkpoints. A warning names newer,
    skipped ones. Checkpoints without a manifest, of stock Accelerate, are returned only if none has
    one. Each rank reads alone, without communication.

    Returns:
        A path for `Accelerator.load_state` or `Trainer.train(resume_from_checkpoint=…)`; None
        before the first whole save.

    Raises:
        FP8BackendError: none is whole, and a formerly whole one is damaged: starting over silently
        would be wrong.
    """
    folder = Path(folder).expanduser()
    paths = checkpoints_in(folder) or ([folder] if is_checkpoint(folder) else [])
    chosen = choose((path, condition(path)) for path in paths)
    return None if chosen is None else str(chosen)


def choose(candidates: Iterable[tuple[Path, Condition]]) -> Path | None:
    """Choose the first whole checkpoint, as `newest_checkpoint` does."""
    skipped: dict[Path, Condition] = {}
    for chosen, state in candidates:
        if state.word == "whole":
            break
        skipped[chosen] = state
    else:
        chosen = next(
            (path for path, state in skipped.items() if state.word == "no manifest"), None
        )
        if chosen is not None:
            announce(f"{chosen} carries no manifest: its files are taken as they are")
    for path, state in skipped.items():
        if path == chosen:
            break
        if is_main_process():
            logger.warning("%s is skipped: %s", path, said(state))
    damaged = [path for path, state in skipped.items() if state.word in ("damaged", "foreign")]
    if chosen is None and damaged:
        raise FP8BackendError(
            f"no checkpoint in {damaged[0].parent} can be loaded. {damaged[0].name} is the newest "
            f"that was whole: {said(skipped[damaged[0]])}. Move it away to begin anew"
        )
    return chosen


def said(state: Condition) -> str:
    """Write a condition as text, such as `damaged: optimizer.bin is missing`."""
    return f"{state.word}: {state.detail}" if state.detail else state.word
