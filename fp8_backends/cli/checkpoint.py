"""`fp8-backends checkpoint`: which checkpoints are whole, and which file is at fault in the others."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ..errors import FP8BackendError
from ..training import manifest
from ..words import shortened
from .terminal import paragraphs, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Reads every file of a checkpoint, or of all checkpoints in a folder, and says which are whole. Changes "
        "nothing. Exits with 1 when the checkpoint is not whole, or none in the folder is; with 0 where none has a "
        "manifest, since nothing is known of it."
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="a checkpoint, or a folder of checkpoints")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Describe the checkpoints; 1 when none that was asked about can be loaded."""
    name = shortened(str(args.folder))
    try:
        folders = manifest.checkpoints_in(args.folder) or [args.folder]
        if folders == [args.folder] and not (args.folder.is_dir() and manifest.is_checkpoint(args.folder)):
            raise FP8BackendError(f"{name} is no checkpoint of Accelerate or Trainer, and holds none")
        found = [described(folder) for folder in folders]
    except (OSError, UnicodeError) as error:
        raise FP8BackendError(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    newest = next((each["folder"] for each in found if each["state"] == "whole"), None)
    print(json.dumps({"checkpoints": found, "newest": newest}, indent=1) if args.json else _readable(found, newest))
    return int(newest is None and any(each["state"] != "no manifest" for each in found))


def described(folder: Path) -> dict[str, Any]:
    """What a checkpoint is and says of itself, as plain values; None for what is not known without a manifest."""
    found = manifest.condition(folder)
    record = found.manifest or {}
    sizes = [file["bytes"] for file in record.get("files", {}).values()]
    return {
        "folder": str(folder),
        "state": found.word,
        "detail": found.detail,
        **{name: record.get(name) for name in ("step", "time", "backend", "world_size", "versions")},
        "files": len(sizes) or None,
        "bytes": sum(sizes) if sizes else None,
    }


def _readable(found: list[dict[str, Any]], newest: str | None) -> str:
    rows = [["checkpoint", "step", "saved at (UTC)", "backend", "ranks", "MB", "state"]]
    for each in found:
        time = each["time"] and each["time"].partition(".")[0].replace("T", " ")
        size = each["bytes"] and f"{each['bytes'] / 1e6:,.1f}"
        cells = [Path(each["folder"]).name, each["step"], time, each["backend"], each["world_size"], size]
        rows.append([*("–" if cell is None else str(cell) for cell in cells), each["state"]])
    faults = paragraphs([(Path(each["folder"]).name, each["detail"]) for each in found if each["detail"]])
    end = f"newest whole one: {newest}" if newest else "none of these is known to be whole"
    return "\n\n".join(filter(None, (table(rows), faults, end)))
