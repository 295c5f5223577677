"""Compare a record of `predict.py` with one of `step.py` on a GPU, of the same shape.

    beside.py DIR/step_8b_gpu.json

Each figure of a step has its prediction for the measured chip, or for the H200 on other chips.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from machine import CHIPS  # noqa: E402
from measuring import table  # noqa: E402

RESULTS = HERE.parent / "results"


def record_of(chip: str) -> dict:
    """Return the prediction for a chip by PyTorch's name for it; empty if there is none."""
    name = next((key for key in CHIPS if key in chip), next(iter(CHIPS)))
    file = RESULTS / f"ahead_{name}.json"
    return json.loads(file.read_text()) if file.exists() else {}


def rows(predicted: dict, measured: dict) -> list[list]:
    """Backend, tokens a second predicted and measured, times bf16 the same, and measured over
    predicted."""
    rates = {each["backend"]: each["tokens_per_second"] for each in predicted.get("results", [])}
    found = {
        each["backend"]: each["tokens_per_second"]
        for each in measured["results"]
        if each["form"] == "compiled"
    }
    if "torchao" in rates:
        rates.setdefault("ao:tensorwise", rates["torchao"])  # the same through this package
    made = []
    for backend in dict.fromkeys([*rates, *found]):
        ours, theirs = rates.get(backend), found.get(backend)
        over = [round(rate) if rate else "-" for rate in (ours, theirs)]
        for each, plain in ((ours, rates.get("bf16")), (theirs, found.get("bf16"))):
            over.append(f"{each / plain:.2f}" if each and plain else "-")
        made.append([backend, *over, f"{theirs / ours:.2f}" if ours and theirs else "-"])
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("measured", type=Path, help="a record of step.py")
    arguments = parser.parse_args()
    measured = json.loads(arguments.measured.read_text())
    predicted = record_of(measured["machine"]["chip"])
    header = [
        "compiled",
        "tokens/s predicted",
        "measured",
        "/ bf16 predicted",
        "measured",
        "measured / predicted",
    ]
    print(table(header, rows(predicted, measured)))


if __name__ == "__main__":
    main()
