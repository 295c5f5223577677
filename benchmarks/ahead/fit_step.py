"""Fit the constants of the package's time model to the steps measured on an H200, and print the
errors that remain.

fit_step.py              prints the errors of the constants in `fp8_backends/compute/rates.py`
fit_step.py --fit        prints better ones, if there are any
"""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]
from measuring import options, table  # noqa: E402
from training import build  # noqa: E402

from fp8_backends.compute import rates  # noqa: E402

RECORDS = ("step_1b_gpu", "step_8b_gpu")
FITTED = ("bf16 in a step", "FP8 in a step", "attention", "compiled bytes", "launch")


class Steps:
    """Predict the recorded steps; traces are kept, so another constant takes no time."""

    def __init__(self) -> None:
        self.records = [
            json.loads((HERE.parent / "results" / f"{name}.json").read_text()) for name in RECORDS
        ]
        self.traced: list[dict] = [{} for _ in self.records]

    def errors(self) -> list[list]:
        """Return shape, form, backend, measured seconds, predicted ones, and the error of the speed
        over bf16."""
        from fp8_backends.tools.estimate import ModelShape, Workload, estimate

        rows = []
        for record, traced in zip(self.records, self.traced, strict=True):
            arguments = record["arguments"]
            shape, sizes = (
                arguments["shape"],
                {name: arguments[name] for name in ("batch", "sequence")},
            )
            model = ModelShape(shape, build(shape, sizes["sequence"], "meta").config)
            for form in ("eager", "compiled"):
                found = {
                    each["backend"]: each["median_s"]
                    for each in record["results"]
                    if each["form"] == form
                }
                workload = Workload(model=model, chip="h200", compiled=form == "compiled", **sizes)
                for each in estimate(workload, list(found), traced=traced):
                    seconds = found[each.backend]
                    ratio = each.speedup[1] / (found["bf16"] / seconds)
                    rows.append([shape, form, each.backend, seconds, each.time.seconds, ratio - 1])
        return rows

    def loss(self) -> float:
        """Weigh an error of a ratio four times as an error of seconds."""
        return sum(
            math.log(row[4] / row[3]) ** 2 + 4 * math.log1p(row[5]) ** 2 for row in self.errors()
        )


def fit(steps: Steps, tries: int) -> None:
    """Change the constants at random, and keep what is better."""
    random.seed(0)
    best, known = steps.loss(), dict(rates.CONSTANTS)
    for _ in range(tries):
        name = random.choice(FITTED)
        value = known[name].value * math.exp(random.gauss(0, 0.05))
        rates.CONSTANTS[name] = known[name]._replace(value=value)
        if (loss := steps.loss()) < best:
            best, known = loss, dict(rates.CONSTANTS)
        rates.CONSTANTS.update(known)


def main() -> None:
    arguments = options(__doc__, fit=False, tries=400)
    steps = Steps()
    if arguments.fit:
        fit(steps, arguments.tries)
        print({name: rates.constant(name) for name in FITTED})
    print(
        table(
            ["model", "form", "backend", "measured", "predicted", "error of the ratio"],
            steps.errors(),
        )
    )


if __name__ == "__main__":
    main()
