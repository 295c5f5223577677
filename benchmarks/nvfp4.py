"""Measure the experimental rule `native:nvfp4`: losses with and without each of its parts, and the
error of gradients.

    nvfp4.py losses [--seeds N] [--steps N] --json benchmarks/results/nvfp4_loss_CPU.json
    nvfp4.py means --json benchmarks/results/nvfp4_means_CPU.json

`losses` trains the model of `fp8-backends compare` and prints the held-out loss minus bf16's, by
pairs with the same initial weights and order of data. The rule's parts are switched off here, by
other functions in their place: a recipe has no field for them. A second call with the same file
trains only the missing runs.

`means` prints the relative error of the mean of N stochastically rounded gradients of a layer.
Without bias, its square falls as 1/N. A block scale rounds to E4M3, to nearest as in the published
recipe: rounded down, it clips the block's largest values, a bias. `exact scales` are blocks with a
largest value of 6 times a power of two, which clip nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import torch
from measuring import table, write_json
from torch import nn

import fp8_backends
from fp8_backends.formats.scaling import INPUT, WEIGHT
from fp8_backends.kernels import nvfp4
from fp8_backends.tools.compare import summary
from fp8_backends.tools.compare.training_run import Run
from fp8_backends.tools.compare.workload import Settings, defaults, load_text

torch._dynamo.config.recompile_limit = 64
QUANTIZED = nvfp4.quantized = torch.compile(nvfp4.quantized, dynamic=True)
"""With the same bits, in a tenth of the time."""
PARTS = {
    "without transform": {"transformed": lambda x: x},
    "without stochastic rounding": {
        "quantized": lambda x, height=1, key=None: QUANTIZED(x, height)
    },
}
VARIANTS = ("bf16", "native:mxfp8", "native:nvfp4", *(f"native:nvfp4 {part}" for part in PARTS))
COUNTS = [2**power for power in range(11)]


def without(part: str) -> contextlib.AbstractContextManager:
    return mock.patch.multiple(nvfp4, **PARTS[part]) if part else contextlib.nullcontext()


def losses(arguments: argparse.Namespace) -> None:
    values = defaults(False) | {"steps": arguments.steps, "seeds": arguments.seeds}
    features = {"include": arguments.include} if arguments.include else {}
    settings = Settings(
        text=None, model=None, limit_mb=8.0, reference="bf16", device="cpu", features=features,
        loss_gap_bound=summary.LOSS_GAP_BOUND, **values,
    )  # fmt: skip
    text = load_text(None, settings.limit_mb)
    file = Path(arguments.json)
    known = json.loads(file.read_text()) if file.exists() else {"results": []}
    runs = {(run["backend"], run["seed"]): run["held_out_loss"] for run in known["results"]}
    for seed in range(settings.seeds):
        for variant in VARIANTS:
            if (variant, seed) in runs:
                continue
            backend, _, part = variant.partition(" ")
            with without(part):
                runs[variant, seed] = Run(settings, text, backend, seed).train(lambda *_: None)[
                    "held_out_loss"
                ]
            print(f"{variant} seed {seed}: {runs[variant, seed]:.4f}", flush=True)
            record(arguments, runs)
    rows = [
        [each["backend"], each["pairs"], f"{each['mean']:+.4f} ± {each['half_width']:.4f}"]
        for each in gaps(runs)
    ]
    print(table(["backend", "seeds", "held-out loss over bf16"], rows))


def record(arguments: argparse.Namespace, runs: dict[tuple[str, int], float]) -> None:
    results = [
        {"backend": variant, "seed": seed, "held_out_loss": loss}
        for (variant, seed), loss in runs.items()
    ]
    question = "held-out loss of native:nvfp4 and of its parts"
    values = {
        "question": question,
        "steps": arguments.steps,
        "results": results,
        "gaps": gaps(runs),
    }
    write_json(arguments.json, values)


def gaps(runs: dict[tuple[str, int], float]) -> list[dict]:
    """Return the mean gaps to bf16, with the half width of their 95 % interval, of variants with
    two seeds or more."""
    losses = {
        variant: {seed: loss for (name, seed), loss in runs.items() if name == variant}
        for variant in VARIANTS
    }
    found = {
        variant: summary.paired_gap(losses[variant], losses["bf16"]) for variant in VARIANTS[1:]
    }
    return [
        {"backend": variant, **asdict(gap)}
        for variant, gap in found.items()
        if gap and gap.pairs > 1
    ]


def means(arguments: argparse.Namespace) -> None:
    results = []
    for kind, product in itertools.product(("random", "exact scales"), ("dgrad", "wgrad")):
        results.append(
            {"gradients": kind, "product": product, "errors": errors_of_means(kind, product)}
        )
    rows = [
        [each["gradients"], each["product"], *(f"{error:.2g}" for error in each["errors"])]
        for each in results
    ]
    print(table(["gradients", "product", *map(str, COUNTS)], rows))
    if arguments.json:
        question = "relative error of the mean of N gradients by native:nvfp4"
        write_json(arguments.json, {"question": question, "counts": COUNTS, "results": results})


def errors_of_means(kind: str, product: str) -> list[float]:
    """Return the relative L2 error at each of COUNTS, to the product of the same codes of the other
    operand with dy in high precision."""
    torch.manual_seed(0)
    x, dy = torch.randn(256, 128, requires_grad=True), torch.randn(256, 64)
    layer = nn.Linear(128, 64, bias=False)
    codes = (
        nvfp4.quantize(x.detach(), INPUT).along_rows(),
        nvfp4.quantize(layer.weight.detach(), WEIGHT).along_columns(),
    )
    x_values, weight = (
        values * scale for values, scale in (nvfp4.dequantized(q, torch.float32) for q in codes)
    )
    operand = dy if product == "dgrad" else dy.t().contiguous()  # [rows, contraction], as quantized
    if kind == "exact scales":
        operand = operand.clamp(-3, 3)
        operand[:, ::16] = 6.0
        operand *= torch.exp2(torch.randint(-3, 4, (len(operand), 1)))
        inverse = nvfp4.transformed(torch.eye(nvfp4.BLOCK)).t()
        dy = (
            operand
            if product == "dgrad"
            else (operand.unflatten(1, (-1, nvfp4.BLOCK)) @ inverse).flatten(1).t()
        )
    exact = dy @ weight if product == "dgrad" else nvfp4.transformed(dy.t()) @ x_values.t()
    fp8_backends.prepare(
        nn.Sequential(layer), None, fp8_backends.FP8RecipeKwargs(backend="native:nvfp4")
    )
    total, errors = torch.zeros_like(exact, dtype=torch.float64), []
    for count in range(1, COUNTS[-1] + 1):
        total += torch.autograd.grad(layer(x), x if product == "dgrad" else layer.weight, dy)[0]
        if count in COUNTS:
            errors.append(((total / count - exact).norm() / exact.norm()).item())
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("losses", "means"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument(
        "--include", help="the recipe's field, such as *.layers.*: all blocks in 4 bits"
    )
    parser.add_argument("--json")
    arguments = parser.parse_args()
    {"losses": losses, "means": means}[arguments.what](arguments)


if __name__ == "__main__":
    main()
