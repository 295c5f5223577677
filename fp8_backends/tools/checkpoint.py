"""`fp8-backends checkpoint`: check the files of checkpoints, and name the faulty ones."""

import argparse
import json
from pathlib import Path
from typing import Any

from ..checkpoints import manifest
from ..errors import FP8BackendError
from ..words import shortened
from .terminal import paragraphs, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Reads every file of a checkpoint, or of all checkpoints in a folder, and says which are "
        "whole. Changes nothing. Exits with 1 when the checkpoint is not whole, or none in the "
        "folder is; with 0 where none has a manifest, since nothing is known of it."
    )
    parser.add_argument(
        "folder", metavar="FOLDER", type=Path, help="a checkpoint, or a folder of checkpoints"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    name = shortened(str(args.folder))
    try:
        folders = manifest.checkpoints_in(args.folder) or [args.folder]
        if folders == [args.folder] and not (
            args.folder.is_dir() and manifest.is_checkpoint(args.folder)
        ):
            raise FP8BackendError(
                f"{name} is no checkpoint of Accelerate or Trainer, and holds none"
            )
        reports = [described(folder) for folder in folders]
    except (OSError, UnicodeError) as error:
        raise FP8BackendError(
            f"{name} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from None
    newest = next((report["folder"] for report in reports if report["state"] == "whole"), None)
    print(
        json.dumps({"checkpoints": reports, "newest": newest}, indent=1)
        if args.json
        else _readable(reports, newest)
    )
    return int(newest is None and any(report["state"] != "no manifest" for report in reports))


def described(folder: Path) -> dict[str, Any]:
    """Return the state and manifest of a checkpoint as plain values; None for unknown ones."""
    condition = manifest.condition(folder)
    record = condition.manifest or {}
    sizes = [file["bytes"] for file in record.get("files", {}).values()]
    return {
        "folder": str(folder),
        "state": condition.word,
        "detail": condition.detail,
        **{
            name: record.get(name) for name in ("step", "time", "backend", "world_size", "versions")
        },
        "files": len(sizes) or None,
        "bytes": sum(sizes) if sizes else None,
    }


def _readable(reports: list[dict[str, Any]], newest: str | None) -> str:
    rows = [["checkpoint", "step", "saved at (UTC)", "backend", "ranks", "MB", "state"]]
    for report in reports:
        time = report["time"] and report["time"].partition(".")[0].replace("T", " ")
        size = report["bytes"] and f"{report['bytes'] / 1e6:,.1f}"
        cells = [
            Path(report["folder"]).name,
            report["step"],
            time,
            report["backend"],
            report["world_size"],
            size,
        ]
        rows.append([*("–" if cell is None else str(cell) for cell in cells), report["state"]])
    faults = paragraphs(
        [(Path(report["folder"]).name, report["detail"]) for report in reports if report["detail"]]
    )
    end = f"newest whole one: {newest}" if newest else "none of these is known to be whole"
    return "\n\n".join(filter(None, (table(rows), faults, end)))
