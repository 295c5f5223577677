"""Time `import fp8_backends` relative to `import accelerate`, its requirement.

New interpreters, one after another in random order; the ratio is paired by round. Target: at most
1.3.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from measuring import interleaved, interval, ratio, summary, table, write_json

MODULES = ("torch", "accelerate", "fp8_backends")


def imports(module: str):
    def run() -> None:
        subprocess.run([sys.executable, "-c", f"import {module}"], check=True)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    seconds = interleaved({module: imports(module) for module in MODULES}, arguments.runs, warmup=1)
    to_accelerate = {module: ratio(seconds[module], seconds["accelerate"]) for module in MODULES}
    summaries = {module: summary(seconds[module]) for module in MODULES}
    rows = [
        [module, summaries[module]["median_s"], interval(to_accelerate[module])]
        for module in MODULES
    ]
    print(table(["import", "s", "time / accelerate's"], rows))
    record = {"question": "time of an import", "seconds": summaries, "to_accelerate": to_accelerate}
    write_json(arguments.json, record)


if __name__ == "__main__":
    main()
