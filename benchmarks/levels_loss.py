"""Compare final losses of the levels with plain training, on the model and text of `fp8-backends
compare`, run by this command.

Its seeds, schedule, held-out windows and paired 95 % intervals; the record keeps one row per
backend.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from measuring import plain, table, write_json

from fp8_backends.tools.compare import summary
from fp8_backends.tools.compare.comparison import RESULTS


def compared(arguments) -> dict:
    """Return the command's results."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fp8_backends", "compare", "--output", folder]
        for name in ("backends", "reference", "seeds", "steps", "lr"):
            value = getattr(arguments, name)
            command += [f"--{name}", str(value)] if value else []
        ended = subprocess.run(command).returncode
        if ended not in (0, 1):  # 1: a check has failed, named in the figures
            raise SystemExit(ended)
        return json.loads(Path(folder, RESULTS).read_text())


def found_of(results: dict) -> list[dict]:
    """Return one row per trained backend, the reference first."""
    found = []
    for row in (row for row in summary.rows(results) if row.seeds_done):
        gap = row.gap and {
            "mean": row.gap.mean,
            "half_width": row.gap.half_width,
            "pairs": row.gap.pairs,
            "verdict": row.gap.verdict(),
        }
        losses = summary.held_out_losses(results, row.backend)
        found.append(
            {
                "backend": row.backend,
                "held_out_loss": row.held_out_loss,
                "gap": gap,
                "by_seed": losses,
            }
        )
    return found


def printed(found: list[dict]) -> str:
    rows = []
    for each in found:
        gap = each["gap"]
        half = f" ± {gap['half_width']:.4f}" if gap and gap["half_width"] is not None else ""
        shown = f"{gap['mean']:+.4f}{half} ({gap['verdict']})" if gap else ""
        rows.append([each["backend"], f"{each['held_out_loss']:.4f}", shown])
    return table(["backend", "held-out loss", f"gap to {found[0]['backend']}, nats"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backends", default="msamp:O2,msamp:O3")
    parser.add_argument("--reference", default=plain())
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="in place of the command's own")
    parser.add_argument("--lr", type=float, help="in place of the command's own")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    results = compared(arguments)
    found = found_of(results)
    print(printed(found))
    settings = {
        name: results["settings"][name]
        for name in ("seeds", "steps", "lr", "shape", "batch", "sequence")
    }
    record = {
        "question": "held-out loss of the levels",
        "precision": arguments.reference,
        "settings": settings,
    }
    write_json(
        arguments.json, {**record, "text_sha256": results["text"]["sha256"], "results": found}
    )


if __name__ == "__main__":
    main()
