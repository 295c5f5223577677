"""Predict a training step on an H100 or H200, in bf16, with TorchAO and with this package, on a
machine without a GPU, by tracing the package.

    predict.py --json benchmarks/results/ahead_H200_rates.json
    predict.py --backends "native:dynamic?amax_history_len=16,bf16" --tokens 4096 --chip H100

It runs by the Python of an environment with PyTorch's build for CUDA. Every backend is traced in a
separate process, for one to three minutes; `--no-machine-code` takes a tenth, and times kernels
only by their bytes. An existing record keeps its backends unless they are named again.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]
import rates  # noqa: E402
import whole_step  # noqa: E402
from machine import CHIPS  # noqa: E402
from measuring import answer, options, write_json  # noqa: E402
from specs import TORCHAO, level_of, split  # noqa: E402
from tables import printed  # noqa: E402

BACKENDS = "bf16,torchao,ao:tensorwise,native:dynamic,native:delayed,native:rowwise,msamp:O2"
SHAPES = {"8b": "8b-4layers", "1b": "1b"}


def answered(script: str, *words: object) -> dict:
    """Return the output of another script here, run in a process of one thread."""
    path = f"{HERE.parents[1]}:{os.environ.get('PYTHONPATH', '')}"
    return answer(str(HERE / script), *words, PYTHONPATH=path, OMP_NUM_THREADS="1")


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


def predict(arguments: Namespace, known: list[dict], keep: Callable[[dict], None]) -> None:
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
    words = ["--shape", shape, "--tokens", arguments.tokens, "--chip", arguments.chip]
    words += ["--no-machine-code"] if arguments.no_machine_code else []
    for spec in asked:
        print(f"tracing {spec}", file=sys.stderr, flush=True)
        traced = answered("compiled_layers.py", "--backend", spec, *words)
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


def main() -> None:
    arguments = options(
        __doc__,
        backends=BACKENDS,
        shape=tuple(SHAPES),
        tokens=8192,
        chip=tuple(CHIPS),
        no_machine_code=False,
    )
    told = ("shape", "tokens", "chip", "no_machine_code")
    file = Path(arguments.json or "")
    known = json.loads(file.read_text()) if file.is_file() else {}
    if known and any(known["arguments"][name] != getattr(arguments, name) for name in told):
        raise SystemExit(f"{file.name} is of {known['arguments']}: name another file")
    record: dict = {}

    def keep(found: dict) -> None:
        chip = CHIPS[arguments.chip]._asdict()
        question = "a training step, predicted"
        record.update(write_json(arguments, question, chip=chip, rates=rates.curves(), **found))

    predict(arguments, known.get("results", []), keep)
    printed("predicted-parts", record)
    for name, ratio in record["ratios"].items():
        print(f"{name}: {ratio or 0:.3f}")


if __name__ == "__main__":
    main()
