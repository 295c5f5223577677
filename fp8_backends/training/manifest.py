"""The manifest of a checkpoint: the size and SHA-256 of every file, written last. With it a checkpoint is whole.

No ranks are known here, only folders: `accelerate_plugin/checkpoints.py` saves on many ranks.
"""

from __future__ import annotations

import datetime
import errno
import hashlib
import json
import logging
import math
import os
import platform
import re
import stat
from collections.abc import Collection, Iterable
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple

from ..announcement import announce, is_main_process
from ..compute.hardware import version
from ..errors import FP8BackendError
from ..recipes.handlers import Recipe

logger = logging.getLogger("fp8_backends")

NAME = "fp8_manifest.json"
METADATA = "fp8_backend.json"
"""What `save_state` says about the backend. Since the second edition its key `manifest` promises the manifest."""
SAVING = ".saving"
"""Ends the name of the folder in which a checkpoint is written. Within a checkpoint, a folder that is no part of it."""
REPLACED = ".replaced"
"""In the folder in which a checkpoint is written: the older one, renamed out of its place."""
_FORMAT = 1
_TRAINER_STATE = "trainer_state.json"
"""What transformers' Trainer writes last of a checkpoint."""
_SIGNS = (NAME, METADATA, _TRAINER_STATE, "random_states_0.pkl")
"""By these a folder is known as a checkpoint of training."""


class Condition(NamedTuple):
    """The state of a checkpoint, and why."""

    word: Literal["whole", "incomplete", "damaged", "foreign", "no manifest"]
    detail: str = ""
    """The faulty file and its fault."""
    manifest: dict[str, Any] | None = None


# One checkpoint


def files_of(folder: Path) -> list[str]:
    """The files below a checkpoint's folder by relative path, the largest first, without its manifest."""
    found = []
    for at, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != SAVING]
        found += [Path(at, name) for name in names]
    paths = {path.relative_to(folder).as_posix(): path.stat().st_size for path in found if path.is_file()}
    return sorted(paths.keys() - {NAME}, key=lambda name: (-paths[name], name))


def digest(path: Path) -> dict[str, Any]:
    """The size of a file in bytes and its SHA-256."""
    hashed, size, buffer = hashlib.sha256(), 0, memoryview(bytearray(2**20))
    with path.open("rb", buffering=0) as file:
        while read := file.readinto(buffer):
            hashed.update(buffer[:read])
            size += read
    return {"bytes": size, "sha256": hashed.hexdigest()}


def flush(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no folder
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write(folder: Path, files: dict[str, dict[str, Any]], recipe: Recipe, step: int | None, world_size: int) -> None:
    """Write the manifest of a folder whose files are on the disk. It is there in one instant, and on the disk when this
    returns.

    Args:
        files: the `digest` of each of `files_of`.
        step: how often the optimizer has stepped, if anybody knows.
        world_size: the number of ranks that saved.
    """
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
    unfinished = folder / f"{NAME}.tmp"
    unfinished.write_bytes(_text(json.loads(json.dumps(record, default=str))))
    flush(unfinished)
    for at, _, _ in os.walk(folder):
        flush(Path(at))
    os.replace(unfinished, folder / NAME)
    flush(folder)


def _text(record: dict[str, Any]) -> bytes:
    """The bytes of a manifest, with a checksum of its own."""
    checksum = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    return (json.dumps(record | {"sha256": checksum}, indent=1) + "\n").encode()


def holder_of(folder: Path) -> Path:
    """Return the folder beside a checkpoint's place in which it is written."""
    return folder.parent / f".{folder.name}{SAVING}"


def place_of(folder: Path) -> Path:
    """Return the folder with a checkpoint's files: its place, or between the two renames of a replacement the folder in
    which it was written."""
    is_between = (holder_of(folder) / REPLACED).exists() and not folder.exists()
    return holder_of(folder) / folder.name if is_between else folder


def files_named_by(folder: Path) -> set[str] | None:
    """The files that the manifest of a folder names by relative path; None without an intact one."""
    found = _read(folder)
    return None if found.manifest is None else set(found.manifest["files"])


def preferred_to(names: Collection[str]) -> dict[str, str]:
    """Map the files that Accelerate would load in place of some of these to the files that they replace."""
    instead = {re.sub(r"^pytorch_model(_\d+)?\.bin$", r"model\1.safetensors", name): name for name in names}
    return {other: name for other, name in instead.items() if other not in names}


def condition(folder: Path, part: slice = slice(None)) -> Condition:
    """Tell what a checkpoint is, by reading every file of it once, or only a part of them. Read it again if it is
    replaced meanwhile."""
    found = _found(place_of(folder), part)
    while found.word != "whole" and (again := _found(place_of(folder), part)) != found:
        found = again
    return found


def _found(folder: Path, part: slice) -> Condition:
    """Read a folder once."""
    found = _read(folder)
    if found.word != "whole":
        return found
    names = sorted(found.manifest["files"], key=lambda name: -found.manifest["files"][name]["bytes"])
    for name in names[part]:
        if fault := _fault(folder / name, found.manifest["files"][name]):
            return Condition("damaged", f"{name} {fault}", found.manifest)
    for instead, name in preferred_to(found.manifest["files"]).items():
        if (folder / instead).exists():
            detail = f"{instead} is no part of it, and would be loaded in place of {name}: move it away"
            return Condition("damaged", detail, found.manifest)
    return found


def _fault(path: Path, expected: dict[str, Any]) -> str:
    """Say what is wrong with a file, empty if nothing is."""
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
    """The manifest of a folder, as far as it can be told without reading the files that it names."""
    try:
        text = _content(folder / NAME)
    except FileNotFoundError:
        return _without_manifest(folder)
    except OSError as error:
        return Condition("damaged", f"{NAME} cannot be read ({error.strerror})")
    try:
        record = json.loads(text)
        intact = _text({key: value for key, value in record.items() if key != "sha256"}) == text
    except (ValueError, AttributeError, RecursionError):
        return Condition("damaged", f"{NAME} is no manifest")
    if isinstance(record.get("format"), int) and record["format"] > _FORMAT:
        return Condition("foreign", f"{NAME} has format {record['format']}; this version reads format {_FORMAT}")
    if not intact:
        return Condition("damaged", f"{NAME} does not fit its own checksum")
    if not _is_record(record):
        return Condition("damaged", f"{NAME} does not hold what a manifest of format {_FORMAT} does")
    return Condition("whole", manifest=record)


def _content(path: Path) -> bytes:
    """The bytes of a file, which is no pipe or device: reading one may never end. Raises `OSError`."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is no file")
    return path.read_bytes()


def _is_record(found: dict[str, Any]) -> bool:
    """Tell whether a manifest is as `write` makes it and names files below its folder: a checksum tells damage, and not
    who wrote it."""
    try:
        datetime.datetime.fromisoformat(found["time"])
        files = found["files"].items()
        return (
            isinstance(found["backend"], str)
            and found["backend"].isprintable()
            and all(type(number) in (int, type(None)) for number in (found["step"], found["world_size"]))
            and isinstance(found["versions"], dict)
            and all(name.isprintable() and not name.startswith("/") for name, _ in files)
            and all(".." not in PurePosixPath(name).parts for name, _ in files)
            and all(type(file["bytes"]) is int and isinstance(file["sha256"], str) for _, file in files)
        )
    except (LookupError, TypeError, ValueError, AttributeError):
        return False


def _without_manifest(folder: Path) -> Condition:
    try:
        if (folder / METADATA).exists() and "manifest" in json.loads(_content(folder / METADATA)):
            return Condition("incomplete", f"{NAME} is missing: a save ended early, or the file was removed")
    except (ValueError, TypeError, OSError, RecursionError):
        return Condition("damaged", f"{METADATA} is not what save_state wrote, and {NAME} is missing")
    if re.fullmatch(r"checkpoint-\d+", folder.name) and not any(folder.glob("random_states_*.pkl")):
        try:
            json.loads(_content(folder / _TRAINER_STATE))
        except (OSError, ValueError, RecursionError):
            return Condition("incomplete", f"{_TRAINER_STATE}, which Trainer writes last, is missing or cut off")
    return Condition("no manifest", "stock Accelerate or a Trainer without FP8 saved it")


# A folder of checkpoints


def is_checkpoint(folder: Path) -> bool:
    """Return True if a folder looks like a checkpoint of Accelerate or Trainer, whole or not."""
    signs = any((place_of(folder) / name).exists() for name in _SIGNS)
    return signs or re.fullmatch(r"checkpoint[-_]\d+", folder.name) is not None


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, the newest first: by the numbers of Accelerate's names (`checkpoint_3`),
    which count saves; else by the steps of their manifests; else by the numbers of names that differ in nothing else;
    else by the time of saving, wrong after a clock was set back. An unknown step comes before known ones."""
    try:
        names = {each.name for each in folder.iterdir() if not each.is_symlink()}  # a link is another name
    except (FileNotFoundError, NotADirectoryError):
        return []
    names |= {name[1 : -len(SAVING)] for name in names if (folder / name / REPLACED).exists()}
    # what begins with a dot is being saved or removed
    found = [folder / name for name in names if not name.startswith(".")]
    found = [each for each in found if place_of(each).is_dir() and is_checkpoint(each)]
    numbers = {each: re.fullmatch(r"(.*?)(\d+)", each.name) for each in found}
    prefixes = {match and match[1] for match in numbers.values()}
    records = {each: _read(place_of(each)).manifest for each in found}
    steps = {each: record and record["step"] for each, record in records.items()}
    if prefixes == {"checkpoint_"} or (None in steps.values() and len(prefixes) == 1 and None not in prefixes):
        return sorted(found, key=lambda each: int(numbers[each][2]), reverse=True)

    def order(each: Path) -> tuple[float, float]:
        if records[each] is None:
            return math.inf, place_of(each).stat().st_mtime
        time = datetime.datetime.fromisoformat(records[each]["time"]).timestamp()
        return math.inf if steps[each] is None else steps[each], time

    return sorted(found, key=order, reverse=True)


def newest_checkpoint(folder: str | os.PathLike) -> str | None:
    """Find the newest whole checkpoint in a folder, or the folder itself if it is the only one.

    Every file is read, so that nothing half written or damaged is returned. What is newer and was skipped is named in a
    warning. Checkpoints without a manifest, of stock Accelerate, are returned only where none has one. Each rank reads
    by itself: nothing is communicated.

    Returns:
        A path for `Accelerator.load_state` or `Trainer.train(resume_from_checkpoint=…)`; None where nothing was saved
        whole yet.

    Raises:
        FP8BackendError: none is whole, and one is damaged that was: to begin anew in silence would be wrong.
    """
    folder = Path(folder).expanduser()
    found = checkpoints_in(folder) or ([folder] if is_checkpoint(folder) else [])
    chosen = choose((each, condition(each)) for each in found)
    return None if chosen is None else str(chosen)


def choose(candidates: Iterable[tuple[Path, Condition]]) -> Path | None:
    """Choose the first whole checkpoint, as `newest_checkpoint` says."""
    skipped: list[tuple[Path, Condition]] = []
    chosen = None
    for folder, found in candidates:
        if found.word == "whole":
            chosen = folder
            break
        skipped.append((folder, found))
    if chosen is None:
        chosen = next((folder for folder, found in skipped if found.word == "no manifest"), None)
        if chosen is not None:
            announce(f"{chosen} carries no manifest: its files are taken as they are")
    for folder, found in skipped:
        if folder == chosen:
            break
        if is_main_process():
            logger.warning("%s is skipped: %s", folder, said(found))
    if chosen is None and (damaged := [each for each in skipped if each[1].word in ("damaged", "foreign")]):
        folder, found = damaged[0]
        raise FP8BackendError(
            f"no checkpoint in {folder.parent} can be loaded. {folder.name} is the newest that was whole: "
            f"{said(found)}. Move it away to begin anew"
        )
    return chosen


def said(found: Condition) -> str:
    """A condition in words, such as `damaged: optimizer.bin is missing`."""
    return f"{found.word}: {found.detail}" if found.detail else found.word
