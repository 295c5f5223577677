"""Time `import fp8_backends` relative to `import accelerate`, its requirement.

New interpreters, one after another in random order; the ratio is paired by round. Target: at most
1.3.
"""

from __future__ import annotations

import subprocess
import sys

from measuring import interleaved, options, ratio, summary, write_json
from tables import printed

MODULES = ("torch", "accelerate", "fp8_backends")


def imports(module: str):
    def run() -> None:
        subprocess.run([sys.executable, "-c", f"import {module}"], check=True)

    return run


def main() -> None:
    arguments = options(__doc__, runs=7)
    seconds = interleaved({module: imports(module) for module in MODULES}, arguments.runs, warmup=1)
    record = write_json(
        arguments,
        "time of an import",
        seconds={module: summary(seconds[module]) for module in MODULES},
        to_accelerate={module: ratio(seconds[module], seconds["accelerate"]) for module in MODULES},
    )
    printed("imports", record)


if __name__ == "__main__":
    main()
