"""Predict a training step on an H100 or H200, in bf16, with TorchAO and with this package, on a
machine without a GPU, by tracing the package.

    predict.py --json benchmarks/results/ahead_H200_rates.json
    predict.py --backends "native:dynamic?amax_history_len=16,bf16" --tokens 4096 --chip H100

It runs by the Python of an environment with PyTorch's build for CUDA. Every backend is traced in a
separate process, for one to three minutes; `--no-machine-code` takes a tenth, and times kernels
only by their bytes. An existing record keeps its backends unless they are named again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]
import rates  # noqa: E402
import whole_step  # noqa: E402
from machine import CHIPS  # noqa: E402
from measuring import table, write_json  # noqa: E402
from specs import PLAIN, TORCHAO, level_of, split  # noqa: E402

BACKENDS = "bf16,torchao,ao:tensorwise,native:dynamic,native:delayed,native:rowwise,msamp:O2"
SHAPES = {"8b": "8b-4layers", "1b": "1b"}


def answered(script: str, *arguments: str) -> dict:
    """Return the output of another script here, run in a separate process."""
    path = os.pathsep.join([str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.run(
        [sys.executable, str(HERE / script), *arguments],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(process.stdout.splitlines()[-1])


def peaks(backends: list[str], shape: str, tokens: int) -> dict[str, float]:
    """Bytes at the highest moment of an eager step, by `fp8-backends estimate`."""
    from training import build

    from fp8_backends import FP8RecipeKwargs
    from fp8_backends.tools.estimate import ModelShape, Workload, estimate

    workload = Workload(
        model=ModelShape(shape, build(shape, tokens, "meta").config), batch=1, sequence=tokens
    )
    asked = {}
    for spec in backends:
        backend, fields = split(spec)
        if backend != TORCHAO:
            asked[spec] = FP8RecipeKwargs(backend=backend, **fields) if fields else backend
    return {
        spec: found.peak
        for spec, found in zip(asked, estimate(workload, asked.values()), strict=True)
    }


def predict(arguments: argparse.Namespace, known: list[dict], keep: Callable[[dict], None]) -> None:
    """Save each backend's figures, and the ratios from all of them, as soon as they are known."""
    chip, shape = CHIPS[arguments.chip], SHAPES[arguments.shape]
    asked = arguments.backends.split(",")
    levels = {spec: level for spec in asked if (level := level_of(spec))}
    # a bare Linear has no head for such fields
    of_host = [each for each in asked if each not in levels and "lm_head" not in each]
    steps = ";".join(sorted(set(levels.values())))
    eager = answered("eager_calls.py", "--backends", ",".join(of_host), "--levels", steps)
    peak_bytes = peaks(asked, shape, arguments.tokens)
    results = {each["backend"]: each for each in known}
    options = ["--shape", shape, "--tokens", str(arguments.tokens), "--chip", arguments.chip]
    options += ["--no-machine-code"] if arguments.no_machine_code else []
    for spec in asked:
        print(f"tracing {spec}", file=sys.stderr, flush=True)
        traced = answered("compiled_layers.py", spec, *options)
        optimizer = eager["optimizer"].get(levels.get(spec))
        of_an_element = optimizer and optimizer["of_an_element"]
        lines = whole_step.lines(traced, layers_of(shape), of_an_element, chip)
        seconds = sum(line.seconds for line in lines)
        results[spec] = {
            "lines": [line._asdict() for line in lines],
            "seconds": seconds,
            "tokens_per_second": arguments.tokens / seconds,
            "peak_bytes": peak_bytes.get(spec),
            "eager": eager["linear"].get(spec),
            "quantize": eager["quantize"].get(spec),
            "optimizer": optimizer
            and optimizer | {"share_of_a_copy": whole_step.share_of_a_copy(of_an_element, chip)},
            **traced,
        }
        all_seconds = {name: each["seconds"] for name, each in results.items()}
        known_peaks = {
            name: each["peak_bytes"] for name, each in results.items() if each["peak_bytes"]
        }
        keep(
            {
                "results": list(results.values()),
                "ratios": whole_step.ratios(all_seconds, known_peaks),
            }
        )


def layers_of(shape: str) -> int:
    from training import SHAPES as MODELS

    return MODELS[shape]["num_hidden_layers"]


def printed(record: dict) -> str:
    results = record["results"]
    plain = next((each["tokens_per_second"] for each in results if each["backend"] == PLAIN), None)
    header = [
        "backend",
        "tokens/s",
        "/ bf16",
        "kernels a layer",
        "MB",
        "of its MLP",
        "MB",
        "eager Linear, us",
        "calls",
    ]
    rows, parts = [], []
    for each in results:
        rate, eager = each["tokens_per_second"], each["eager"]
        row = [each["backend"], round(rate), f"{rate / plain:.2f}" if plain else "-"]
        for part in ("layer", "mlp"):
            row += [each[part]["kernels"], round(each[part]["bytes"] / 1e6)]
        calls = (
            [round(eager["python_us"]), eager["launches"] + eager["operators"]]
            if eager
            else ["-", "-"]
        )
        rows.append(row + calls)
        parts.append({line["what"]: f"{line['seconds'] * 1e3:.2f}" for line in each["lines"]})
    names = list(dict.fromkeys(name for part in parts for name in part))
    lines = [
        [each["backend"], *map(part.get, names, ["-"] * len(names))]
        for each, part in zip(results, parts, strict=True)
    ]
    ratios = [
        [name, "-" if value is None else f"{value:.3f}"] for name, value in record["ratios"].items()
    ]
    tables = [
        table(header, rows),
        table(["milliseconds", *names], lines),
        table(["predicted", ""], ratios),
    ]
    return "\n\n".join(tables)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--backends", default=BACKENDS, help="with fields of a recipe after a question mark"
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="8b")
    parser.add_argument("--tokens", type=int, default=8192, help="of the one sequence of a batch")
    parser.add_argument("--chip", choices=list(CHIPS), default="H200")
    parser.add_argument("--no-machine-code", action="store_true")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    told = {
        name: getattr(arguments, name) for name in ("shape", "tokens", "chip", "no_machine_code")
    }
    file = Path(arguments.json or "")
    known = json.loads(file.read_text()) if arguments.json and file.exists() else {}
    if known and known["arguments"] != told:
        raise SystemExit(f"{file.name} is of {known['arguments']}: name another file")
    record = {
        "question": "a training step, predicted",
        "arguments": told,
        "chip": CHIPS[arguments.chip]._asdict(),
    }
    record["rates"] = rates.curves()

    def keep(found: dict) -> None:
        record.update(found)
        write_json(arguments.json, record)

    predict(arguments, known.get("results", []), keep)
    print(printed(record))


if __name__ == "__main__":
    main()
