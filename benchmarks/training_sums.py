"""Train with exact sums and with a chip's: held-out loss minus the reference's, by `fp8-backends
compare`.

    training_sums.py --json benchmarks/results/training_sums_cpu_avx2.json --folder FOLDER

FOLDER keeps both comparisons: a second call runs only an unfinished one. On two cores, a step with
the sums of an H100 takes three to four times as long as an exact one, and both comparisons about an
hour.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from measuring import table, write_json

BACKENDS = "native:dynamic,native:delayed,msamp:O2"


def compared(folder: Path, arguments: argparse.Namespace, sums: str) -> dict:
    """Return the results of one comparison."""
    file = folder / sums / "results.json"
    if not file.exists() or json.loads(file.read_text())["status"] != "finished":
        command = [
            sys.executable,
            "-m",
            "fp8_backends",
            "compare",
            "--sums",
            sums,
            "--backends",
            arguments.backends,
        ]
        command += [
            "--steps",
            str(arguments.steps),
            "--seeds",
            str(arguments.seeds),
            "--output",
            str(file.parent),
        ]
        # 1: a check failed, and the record says by how much
        if subprocess.run(command).returncode == 2:
            raise SystemExit(f"{' '.join(command)}: failed")
    return json.loads(file.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backends", default=BACKENDS)
    parser.add_argument("--chip", default="h100", help="of the sums beside exact ones")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("training_sums"))
    parser.add_argument("--json")
    arguments = parser.parse_args()
    results = []
    for sums in (arguments.chip, "exact"):
        comparison = compared(arguments.folder, arguments, sums)
        asked = {"steps": arguments.steps, "seeds": arguments.seeds}
        if comparison["asked"] != asked:
            raise SystemExit(
                f"{arguments.folder / sums} holds {comparison['asked']}, and not {asked}"
            )
        for row in comparison["summary"]["rows"]:
            if row["gap"]:
                gap = {name: row["gap"][name] for name in ("mean", "half_width", "pairs")}
                results.append(
                    {"backend": row["backend"], "sums": sums, **gap, "loss": row["held_out_loss"]}
                )
        reference = comparison["around_fp8"]
    rows = [
        [
            each["backend"],
            each["sums"],
            each["pairs"],
            f"{each['mean']:+.4f}",
            f"{each['half_width']:.4f}",
        ]
        for each in results
    ]
    print(table(["backend", "sums", "seeds", "gap", "half width"], rows))
    question = "training with a chip's sums"
    write_json(
        arguments.json, {"question": question, "precision": reference, **asked, "results": results}
    )


if __name__ == "__main__":
    main()
