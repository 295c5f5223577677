"""Write the tables of measurements in `benchmarks/README.rst`, `README.rst` and three pages from the
records in `benchmarks/results`.

    benchmarks/tables.py                                  prints them all
    benchmarks/tables.py --write                          writes each between its markers in all documents
    benchmarks/tables.py --write benchmarks/README.rst    the same in one document

The markers are comments: `.. begin table NAME` and `.. end table NAME`. `README.rst` and the index
have the table `summary`, three of the main `figures`; `README.rst` also `headline` and `choices`;
`tables.rst` has `models`, `cards` and `llmq`, and `speed.rst` `published`. A question without a
record prints `not yet measured`. CPU questions have a table per recorded kind of CPU, and the
targets read one CPU with bf16 products and one without: the usual two, `targets.USUAL`, if
recorded, else the first by name. Every table but the README's names the machine, the versions and
the date, and pairs speeds with losses for trained models.
"""

from __future__ import annotations

import argparse
import datetime
import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import targets
from targets import Records, gap

from fp8_backends.compute import chips

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
GUIDES = HERE.parent / "fp8_backends" / "docs"
DOCUMENTS = (
    HERE.parent / "README.rst",
    HERE / "README.rst",
    *(GUIDES / f"{name}.rst" for name in ("index", "tables", "speed")),
)
NAMED = ("torch", "triton", "torchao", "transformer-engine", "bitsandbytes")
"""Libraries with versions above a table."""


def rst(header: list[str], rows: list[list]) -> str:
    """A simple table of reStructuredText. The first column must not be empty."""
    cells = [header, *[[_text(cell) for cell in row] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    rule = "  ".join("=" * width for width in widths)
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]
    return "\n".join([rule, lines[0], rule, *lines[1:], rule])


def _text(cell: object) -> str:
    if cell in (None, "-"):
        return "\N{EN DASH}"  # a lone hyphen would begin a list
    return (
        f"{cell:.3g}"
        if isinstance(cell, float) and abs(cell) < 100
        else str(round(cell))
        if isinstance(cell, float)
        else str(cell)
    )


def cpu(features: str) -> str:
    """Expand the name of a CPU's features."""
    return features if targets.has_bf16(features) else f"{features}: without bf16 products"


def where(record: dict, features: str = "") -> str:
    """Return machine, versions and date of a record, as half a sentence; for a CPU its features
    from the file's name."""
    machine = record["machine"]
    chip, gpus, threads = machine["chip"], machine.get("gpus", 0), machine["torch_threads"]
    if gpus > 1:
        chip = f"{gpus} x {chip}"
    elif not gpus:
        chip = f"{threads} {'core' if threads == 1 else 'cores'} of an {chip}"
    if features:
        chip += f" ({'; '.join(filter(None, [cpu(features), machine.get('switched')]))})"
    versions = [f"{name} {machine[name].split('+')[0]}" for name in NAMED if machine.get(name)]
    date = datetime.date.fromisoformat(machine["date"])
    return f"{chip}, {', '.join(versions)}, {date.day} {date:%B %Y}"


def percent(share: float, sign: bool = True) -> str:
    return (
        f"{100 * share:+.1f} %".replace("-", "\N{MINUS SIGN}") if sign else f"{100 * share:.0f} %"
    )


def quoted(backend: str) -> str:
    return f"``{backend}``"


def of_records(records: Records, names: dict[str, str], made: Callable[[dict], str]) -> str:
    """Return one table per record, under its title; a sentence per missing record. For a CPU, all
    kinds of CPU, the usual ones first."""
    parts = []
    for name, title in names.items():
        on_cpu = name.endswith("_cpu")
        kinds = (
            dict.fromkeys([*targets.USUAL, *targets.features_of(records, name)]) if on_cpu else [""]
        )
        for features in kinds:
            record = records.get(f"{name}_{features}" if features else name)
            if record:
                parts += [textwrap.fill(f"{title} ({where(record, features)}):", 120), made(record)]
            else:
                kind = f" ({cpu(features)})" if features else ""
                parts.append(textwrap.fill(f"{title}{kind}: not yet measured.", 120))
    return "\n\n".join(parts)


def plain(record: dict) -> str:
    """Return the baseline of FP8 in a record, as text."""
    return "FP32" if record.get("precision") == "fp32" else "bf16"


def targets_cpu(records: Records) -> str:
    measured, parts = targets.features_of(records), []
    for usual in targets.USUAL:
        of_kind = [each for each in measured if targets.has_bf16(each) == targets.has_bf16(usual)]
        features = of_kind[0] if of_kind else usual
        rows = targets.rows(targets.on_cpu(features), targets.of_cpu(records, features))
        parts.append(
            rst([f"to be shown on a CPU ({cpu(features)})", "measured", "bound", "verdict"], rows)
        )
    return "\n\n".join(parts)


def targets_gpu(records: Records) -> str:
    header = ["to be shown on a GPU", "measured", "bound", "verdict"]
    table = rst(header, targets.rows(targets.ON_GPU, records))
    limits = of_records(
        records,
        {"limits_gpu": "Limits of the chip, measured in the same run, and the share reached"},
        lambda record: rst(
            ["figure", "measured"],
            [row[:2] for row in targets.rows(targets.AGAINST_LIMITS, records)],
        ),
    )
    return f"{table}\n\n{limits}"


def linear(records: Records) -> str:
    def made(record: dict) -> str:
        rows = []
        for each in record["results"]:
            row = [
                "x".join(map(str, each["shape"])),
                each.get("dtype", "bf16"),
                quoted(each["backend"]),
                each["form"],
            ]
            ratios = [
                each[key]["ratio"] if key in each else None for key in ("to_plain", "to_torchao")
            ]
            rows.append([*row, each["median_s"] * 1e3, *ratios])
        table = rst(
            [
                "tokens x in x out",
                "dtype",
                "backend",
                "form",
                "ms",
                "time / plain",
                "time / TorchAO",
            ],
            rows,
        )
        unpaired = any(
            not each.get("to_plain", {}).get("paired", True) for each in record["results"]
        )
        return (
            f"{table}\n\nPlain bf16 ran once: all rounds are compared with it."
            if unpaired
            else table
        )

    names = {
        "linear_cpu": "A linear layer, forward and backward, on a CPU",
        "linear_compiled_gpu": "The widest layers of Llama 1B, 8B and 70B on a GPU, compiled",
        "linear_eager_gpu": "All layers of Llama 1B, 8B and 70B on a GPU, eager",
    }
    return of_records(records, names, made)


def step(records: Records) -> str:
    def made(record: dict) -> str:
        rows = []
        for each in record["results"]:
            speed = each["times_plain"]
            row = [quoted(each["backend"]), each["form"], round(each["tokens_per_second"])]
            row += [f"{speed['ratio']:.2f} [{speed['low']:.2f}, {speed['high']:.2f}]"]
            peak = each["peak_bytes"]
            row += [f"{peak / 1e6:.0f} MB ({percent(each['peak_to_plain'] - 1)})" if peak else None]
            rows.append(
                [*row, percent(each["flops_share"], sign=False), f"{each['last_loss']:.4f}"]
            )
        times = f"times {plain(record)}"
        return rst(
            ["backend", "form", "tokens/s", times, "peak memory", "FLOPs in FP8", "loss"], rows
        )

    names = {
        "step_cpu": "A whole training step of a Llama of 8 M parameters on a CPU",
        "step_8b_gpu": "Four layers of Llama 8B at sequence 8192 on a GPU",
        "step_8b_te_gpu": "The same with ``te``, in another run",
        "step_8b_4096_gpu": "The same at sequence 4096",
        "step_1b_gpu": "Llama 1B at sequence 4096 on a GPU",
        "step_1b_8192_gpu": "The same at sequence 8192",
    }
    return of_records(records, names, made)


def predicted(records: Records) -> str:
    """Pair `ahead/predict.py`'s step on a GPU with the measured one, with the first prediction, and
    with the one by measured rates."""
    latest, first, by_rates = map(
        records.get, ("ahead_H200", "ahead_H200_before", "ahead_H200_rates")
    )
    if latest is None:
        return "A step on a GPU: not yet predicted, and not yet measured."
    machine, asked = latest["machine"], latest["arguments"]
    versions = ", ".join(
        f"{name} {machine[name].split('+')[0]}" for name in NAMED if machine.get(name)
    )
    date = datetime.date.fromisoformat(machine["date"])
    title = f"*Predicted* for an {latest['chip']['name']}, one sequence of {asked['tokens']:,} tokens ({versions}, "
    parts = [textwrap.fill(f"{title}{date.day} {date:%B %Y}):", 120)]
    was = first["ratios"] if first else {}
    measured = {what: target.value(records) for what, target in targets.PREDICTED.items()}
    now = by_rates["ratios"] if by_rates else {}
    rows = [
        [what, was.get(what), ratio, now.get(what), measured.get(what)]
        for what, ratio in latest["ratios"].items()
    ]
    shares = [_share_of_a_copy(each) for each in (first, latest, by_rates)]
    rows.append(
        ["optimizer of msamp:O2, bandwidth / a copy's", *shares, targets.ON_GPU[7].value(records)]
    )
    parts.append(
        rst(["ratio", "*predicted* at first", "*predicted*", "by measured rates", "measured"], rows)
    )
    if by_rates and "step_8b_gpu" in records:
        parts.append(
            "Tokens a second of compiled steps, predicted before any measurement and by measured "
            "rates:"
        )
        parts.append(_errors_of_predictions(latest, by_rates, records["step_8b_gpu"]))
    if "quantize_gpu" in records and "optimizer_gpu" in records:
        parts += _misses_of_bandwidth(records, shares[1])
    parts.append("Milliseconds of a step, predicted:")
    names = list(
        dict.fromkeys(line["what"] for each in latest["results"] for line in each["lines"])
    )
    spent = [
        {line["what"]: line["seconds"] * 1e3 for line in each["lines"]}
        for each in latest["results"]
    ]
    of_backends = [quoted(each["backend"]) for each in latest["results"]]
    times = [
        [name, *(by_name.get(what) for what in names)]
        for name, by_name in zip(of_backends, spent, strict=True)
    ]
    parts.append(rst(["backend", *names], times))
    parts.append(
        "Kernels launched by a decoder layer, and the megabytes they move, at first and now:"
    )
    earlier = {each["backend"]: each for each in first["results"]} if first else {}
    costs = [
        [quoted(each["backend"]), *_costs(earlier.get(each["backend"]), each)]
        for each in latest["results"]
    ]
    header = [
        "backend",
        "tokens/s",
        "kernels",
        "MB",
        "of its MLP",
        "MB",
        "calls of an eager Linear",
    ]
    parts.append(rst(header, costs))
    if "step_8b_gpu" not in records:
        parts.append("The same on a GPU: not yet measured.")
    return "\n\n".join(parts)


def _errors_of_predictions(blind: dict, by_rates: dict, step: dict) -> str:
    predictions = [
        {each["backend"]: each["tokens_per_second"] for each in record["results"]}
        for record in (blind, by_rates)
    ]
    rows = []
    for each in step["results"]:
        # the same code
        backend = "torchao" if each["backend"] == "ao:tensorwise" else each["backend"]
        if each["form"] != "compiled" or any(backend not in found for found in predictions):
            continue
        measured, row = each["tokens_per_second"], [quoted(each["backend"])]
        for found in predictions:
            row += [round(found[backend]), percent(found[backend] / measured - 1)]
        rows.append([*row, round(measured)])
    return rst(["backend", "*predicted*", "error", "by measured rates", "error", "measured"], rows)


ASSUMED_OF_A_COPY = 0.9
"""`ahead/roofline.py`'s share of a copy's bandwidth reached by kernels."""


def _misses_of_bandwidth(records: Records, optimizer: float | None) -> list[str]:
    """Compare the assumed share of a copy's bandwidth with measured kernels, and the optimizer's
    predicted one."""
    found: dict[str, list[float]] = {}
    for each in records["quantize_gpu"]["kernels"]:
        found.setdefault(each["kernel"], []).append(each["share_of_copy"])
    del found["copy"]
    shares = {
        each["step"]: each["copy_share"]
        for each in records["optimizer_gpu"]["results"]
        if "copy_share" in each
    }
    found |= {
        f"optimizer, {step}": [shares[step]]
        for step in ("torch fused, FP32", "O2")
        if step in shares
    }
    rows, missed = [], []
    for kernel, measured in found.items():
        predicted = optimizer if kernel == "optimizer, O2" and optimizer else ASSUMED_OF_A_COPY
        miss = max((each - predicted for each in measured), key=abs)
        ends = dict.fromkeys(percent(each, sign=False) for each in (min(measured), max(measured)))
        rows.append(
            [kernel, percent(predicted, sign=False), " to ".join(ends), f"{100 * miss:+.0f} points"]
        )
        missed += [kernel] * (abs(miss) > 0.05)
    text = f"Bandwidth over a copy's. {len(missed)} of {len(rows)} predictions miss by more than 5 points:"
    return [text, rst(["kernel", "*predicted*", "measured", "largest miss"], rows)]


def _share_of_a_copy(record: dict | None) -> float | None:
    found = [
        each["optimizer"]
        for each in (record or {"results": []})["results"]
        if each["backend"] == "msamp:O2"
    ]
    return found[0]["share_of_a_copy"] if found and found[0] else None


def _costs(first: dict | None, latest: dict) -> list[str]:
    def figures(result: dict) -> list[str]:
        layer, mlp, eager = result["layer"], result["mlp"], result["eager"]
        found = [result["tokens_per_second"]]
        found += [
            figure for part in (layer, mlp) for figure in (part["kernels"], part["bytes"] / 1e6)
        ]
        found.append(eager and eager["launches"] + eager["operators"])
        return ["-" if each is None else f"{each:.0f}" for each in found]

    now = figures(latest)
    pairs = zip(figures(first) if first else now, now, strict=True)
    return [_text(after) if before == after else f"{before} to {after}" for before, after in pairs]


def optimizer(records: Records) -> str:
    def made(record: dict) -> str:
        rows = []
        for each in record["results"]:
            if each["step"] == "copy":
                continue
            ratios = [
                each[key]["ratio"] if key in each else None for key in ("to_fused", "to_torchao")
            ]
            share = each.get("copy_share")
            row = [each["step"], each["bytes"], each["nanoseconds_per_element"], *ratios]
            rows.append([*row, None if share is None else percent(share, sign=False)])
        header = [
            "step",
            "bytes/element",
            "ns/element",
            "time / fused FP32",
            "time / AdamWFp8",
            "of a copy's bandwidth",
        ]
        return rst(header, rows)

    names = {
        "optimizer_cpu": "The optimizer's step over 20 M elements on a CPU",
        "optimizer_gpu": "The optimizer's step over 268 M elements on a GPU",
    }
    return of_records(records, names, made)


def kernels(records: Records) -> str:
    def made(record: dict) -> str:
        rows = []
        for each in record["kernels"]:
            shape, rate = "x".join(map(str, each["shape"])), round(each["bytes_per_second"] / 1e9)
            rows.append([each["kernel"], shape, rate, percent(each["share_of_copy"], sign=False)])
        return rst(["kernel", "matrix", "GB/s", "of a copy's bandwidth"], rows)

    return of_records(records, {"quantize_gpu": "Kernels quantizing a bf16 matrix on a GPU"}, made)


def sums(records: Records) -> str:
    """Return equal bits: recorded products of a GPU, and recorded instructions of several chips."""

    def products(record: dict) -> str:
        rows = []
        for each in record["by_depth"]:
            accumulation = f"``use_fast_accum={each['accumulation'] == 'fast'}``"
            keys = ("emulated", "emulated_in_bf16", "exact_sums", "exact_sums_in_bf16")
            shares = [percent(each[key] / each["results"], sign=False) for key in keys]
            rows.append([accumulation, each["depth"], each["results"], *shares])
        header = [
            "``torch._scaled_mm`` with",
            "K",
            "results",
            "emulated",
            "in bf16",
            "exact sums",
            "in bf16",
        ]
        caption = f"Results equal to the bit ({where({'machine': record['recorded_on']})}):"
        return f"{textwrap.fill(caption, 120)}\n\n{rst(header, rows)}"

    def instructions(record: dict) -> str:
        rows = [
            [each["chip"], each["format"], each["rows"], each["equal"], each["exact_sums_equal"]]
            for each in record["results"]
        ]
        return rst(
            ["chip", "format", "instructions", "equal, by the chip's rule", "by exact sums"], rows
        )

    parts = (
        [products(records["sums_gpu"])]
        if "sums_gpu" in records
        else ["Products of a GPU: not yet measured."]
    )
    if "tensor_cores" in records:
        parts.append(
            "Recordings of single instructions, K = 32:\n\n" + instructions(records["tensor_cores"])
        )
    return "\n\n".join(parts)


def scale_loss(records: Records) -> str:
    """Return the paired losses at ten million parameters of variants with two seeds or more."""

    def made(record: dict) -> str:
        rows = [
            [
                each["variant"],
                each["seeds"],
                gap(each["gap"]["mean"], each["gap"]["half_width"]),
                round(each["minutes"], 2),
            ]
            for each in record["results"]
            if each["gap"] and each["gap"]["half_width"] is not None
        ]
        header = [
            "variant",
            "seeds",
            "held-out loss \N{MINUS SIGN} its reference's",
            "minutes a run",
        ]
        warmup = round(record["warmup_share"] * record["steps"])
        asked = f"{record['steps']} steps, {warmup} of warm-up, nats with 95 % intervals:"
        return f"{asked}\n\n{rst(header, rows)}"

    names = {
        "scale_loss_gpu": "A Llama of 10.7 M parameters on a GPU, 15 runs at a time",
        "scale_loss_1000_gpu": "The same for longer",
        "scale_loss_cpu": "The same on a CPU, one run at a time",
    }
    return of_records(records, names, made)


def rollouts(records: Records) -> str:
    """Return the policy gap and the rewards of GRPO by the precision of trainer and engine."""

    def made(record: dict) -> str:
        points = (0, 2, 4, 9)
        rows = [
            [
                quoted(each["setting"]),
                *(f"{each['gap'][name]:.2g}" for name in ("mean", "largest", "k3")),
                f"{each['gap']['mult_prob_error'] - 1:.2g}",
                *(
                    f"{each['curve'][at]['mean']:.3f} ± {each['curve'][at]['half_width']:.3f}"
                    for at in points
                ),
            ]
            for each in record["results"]
        ]
        tenth = record["steps"] // 10
        steps = [f"{at * tenth + 1} to {(at + 1) * tenth}" for at in points]
        header = [
            "setting",
            "mean gap, nats",
            "largest",
            "k3",
            "multiplicative error \N{MINUS SIGN} 1",
        ]
        seeds = (
            f"{record['results'][0]['seeds']} seeds, with 95 % intervals of the rewards at steps:"
        )
        return f"{seeds}\n\n{rst([*header, *steps], rows)}"

    return of_records(records, {"rollouts_cpu": "GRPO with rollouts in FP8"}, made)


def communication(records: Records) -> str:
    def made(record: dict) -> str:
        rows = []
        for each in record["collectives"]:
            milliseconds = [
                each["seconds"][form]["median_s"] * 1e3 for form in ("FP8", "bf16", "FP32")
            ]
            slower = [each["seconds_over"][form]["ratio"] for form in ("bf16", "FP32")]
            row = [each["collective"], f"{each['elements']:,}", *milliseconds, *slower]
            rows.append([*row, each["bytes_over"]["bf16"], each["bytes_over"]["FP32"]])
        over = ["time / bf16", "/ FP32", "bytes / bf16", "/ FP32"]
        return rst(["collective", "elements", "FP8, ms", "bf16", "FP32", *over], rows)

    names = {"comm_cpu": "Two ranks on one CPU, over gloo", "comm_gpu": "On GPUs, over NCCL"}
    return of_records(records, names, made)


def memory(records: Records) -> str:
    def made(record: dict) -> str:
        first, rows = record["results"][0], []
        for each in record["results"]:
            extra = [
                f"{name}={each[name]}"
                for name in ("saved_activations", "gradient_release")
                if each.get(name)
            ]
            cells = [", ".join(map(quoted, [each["backend"], *extra]))]
            for key in ("peak_tensor_bytes", "peak_resident_bytes"):
                known = each[key] and first[key]
                cells.append(
                    f"{each[key] / 1e6:.0f} MB ({percent(each[key] / first[key] - 1)})"
                    if known
                    else None
                )
            rows.append(
                [*cells, f"{each['bytes_per_element']['total']:.1f}", f"{each['losses'][-1]:.4f}"]
            )
        return rst(
            ["backend", "peak of tensors", "peak resident", "bytes/element", "loss of step 3"], rows
        )

    title = "Peak memory of a whole training step, a Llama of 115 M parameters with one short sequence, on a CPU"
    longer = "The same with a sequence of 2,560 tokens: activations are half of bf16's peak"
    return of_records(records, {"memory_cpu": title, "memory_long_cpu": longer}, made)


def distributed(records: Records) -> str:
    def made(record: dict) -> str:
        stored = {
            (run["engine"], run["backend"]): run["bytes_per_element"] for run in record["runs"]
        }
        rows = []
        for each in record["summaries"]:
            of_bytes = stored[each["engine"], each["backend"]]
            row = [quoted(each["backend"]), each["engine"], f"{each['loss']:.4f}"]
            row.append(
                None
                if each["backend"] == plain(record).lower()
                else gap(each["gap"], each["half_width"])
            )
            sent = each.get("sent_over_fp32_ddp")  # earlier records have none
            rows.append(
                [*row, f"{of_bytes['total']:.2f}" if of_bytes else None, sent and f"{sent:.3f}"]
            )
        header = [
            "backend",
            "engine",
            "held-out loss",
            f"gap to {plain(record)}, nats",
            "bytes/element",
        ]
        return rst([*header, "sent / FP32 under DDP"], rows)

    return of_records(
        records, {"distributed_cpu": "Two processes, bytes of an element on one rank"}, made
    )


def finetune(records: Records) -> str:
    def made(record: dict) -> str:
        rows = []
        for each in record["summaries"]:
            if each["backend"] != plain(record).lower():
                shown = gap(each["gap"]["mean"], each["gap"]["half_width"])
                moved = f"{each['displacement_along']:.3f}"
                rows.append(
                    [
                        f"{each['lr']:.0e}".replace("e-0", "e-"),
                        quoted(each["backend"]),
                        shown,
                        moved,
                    ]
                )
        return rst(["learning rate", "backend", f"gap to {plain(record)}, nats", "moved"], rows)

    title = "A fine-tune with small learning rates; `moved` is the update along the one without FP8, after training"
    return of_records(records, {"finetune_cpu": title.replace("`", "*")}, made)


def levels_loss(records: Records) -> str:
    def made(record: dict) -> str:
        rows = []
        for each in record["results"]:
            found = each["gap"] and gap(each["gap"]["mean"], each["gap"]["half_width"])
            rows.append([quoted(each["backend"]), f"{each['held_out_loss']:.4f}", found])
        return rst(["backend", "held-out loss", f"gap to {plain(record)}, nats"], rows)

    return of_records(records, {"levels_loss_cpu": "The training of compare on a CPU"}, made)


def experts(records: Records) -> str:
    def made(record: dict) -> str:
        rows = []
        for each in record["results"]:
            found = each["gap"] and gap(each["gap"]["mean"], each["gap"]["half_width"])
            row = [each["family"], quoted(each["backend"]), f"{each['held_out_loss']:.4f}", found]
            rows.append([*row, f"{each['bytes_per_element']:.2f}"])
        header = [
            "model",
            "backend",
            "held-out loss",
            f"gap to {plain(record)}, nats",
            "bytes/element",
        ]
        return rst(header, rows)

    return of_records(
        records, {"experts_cpu": "Mixtures of experts, bytes of an element of their weights"}, made
    )


def long_run(records: Records) -> str:
    def made(record: dict) -> str:
        reference, *_ = (each["points"] for each in record["runs"])
        rows = []
        for each in record["runs"]:
            above = [
                a["held_out_loss"] - b["held_out_loss"]
                for a, b in zip(each["points"], reference, strict=True)
            ]
            shown = [
                f"{value:+.4f}".replace("-", "\N{MINUS SIGN}") for value in (above[-1], max(above))
            ]
            shown = [None, None] if each["points"] is reference else shown
            loss = f"{each['points'][-1]['held_out_loss']:.4f}"
            rows.append([quoted(each["backend"]), loss, *shown, sum(each["stuck"].values())])
        return rst(
            [
                "backend",
                "held-out loss",
                "above FP32, nats",
                "the most along the way",
                "scales stuck",
            ],
            rows,
        )

    return of_records(records, {"long_run_cpu": "A small Llama for many steps, one seed"}, made)


def largest(records: Records) -> str:
    def batch(record: dict) -> str:
        rows = []
        for each in record["results"]:
            rate = each["best_tokens_per_second"]
            best = [f"{rate:.0f}", each["best_batch"]] if rate else [None, None]
            rows.append(
                [
                    quoted(each["backend"]),
                    _at_least(each["largest_batch"], each["exact_batch"]),
                    *best,
                ]
            )
        return rst(["backend", "largest micro-batch", "most tokens/s", "at a micro-batch of"], rows)

    def model(record: dict) -> str:
        rows = []
        for each in record["results"]:
            parameters = each["largest_parameters"]
            row = [quoted(each["backend"]), _at_least(each["largest_layers"], each["exact_layers"])]
            rows.append([*row, parameters and f"{parameters / 1e9:.2f}"])
        return rst(["backend", "most layers", "billion parameters"], rows)

    on_batch = {
        "largest_batch_gpu": "The largest micro-batch on the card: four layers of Llama 8B, "
        "sequence 4096"
    }
    on_model = {
        "largest_model_gpu": "The largest model on the card: layers of Llama 8B, one sequence of "
        "4096"
    }
    return f"{of_records(records, on_batch, batch)}\n\n{of_records(records, on_model, model)}"


def _at_least(size: int | None, exact: bool | None) -> str | None:
    return None if size is None else str(size) if exact else f"{size} or more"


def ranks(records: Records) -> str:
    def made(record: dict) -> str:
        rows = []
        for each in record["results"]:
            row = [each["ranks"], quoted(each["backend"]), round(each["tokens_per_second"])]
            row += [percent(each["decrease"]), percent(each["faster"]), f"{each['loss']:.4f}"]
            rows.append([*row, percent(each["loss_above"])])
        header = [
            "ranks",
            "backend",
            "tokens/s/GPU",
            "decrease",
            "faster",
            "loss",
            f"above {plain(record)}",
        ]
        return rst(header, rows)

    names = {
        "by_ranks_cpu": "Over gloo, each rank on one CPU core",
        "by_ranks_gpu": "Over NCCL, Llama 1B, each rank a GPU",
    }
    return of_records(records, names, made)


def start_up(records: Records) -> str:
    def prepare(record: dict) -> str:
        rows = []
        for grown, meta, memory in zip(
            record["growth"], record["on_meta"], record["memory"], strict=True
        ):
            seconds = [grown[key]["median_s"] for key in ("one", "two")]
            added = (
                None
                if memory["added"] is None
                else percent(memory["added"] / memory["weights"], sign=False)
            )
            rows.append(
                [
                    quoted(grown["backend"]),
                    *seconds,
                    grown["ratio"]["ratio"],
                    meta["seconds"],
                    added,
                ]
            )
        n = record["layers"]
        header = [
            "backend",
            f"{n:,} Linears, s",
            f"{2 * n:,}, s",
            "ratio",
            "8 billion on meta, s",
            "memory added",
        ]
        return rst(header, rows)

    def imports(record: dict) -> str:
        rows = [
            [f"``import {module}``", time["median_s"], record["to_accelerate"][module]["ratio"]]
            for module, time in record["seconds"].items()
        ]
        return rst(["statement", "s", "time / accelerate's"], rows)

    def overhead(record: dict) -> str:
        cost = record["ratio"]
        losses = "equal" if record["losses_equal"] else "not equal"
        interval = f"{cost['ratio']:.4f} [{cost['low']:.4f}, {cost['high']:.4f}]"
        return rst(
            ["step through Accelerate / hand-written loop", "first losses"],
            [[interval, f"{losses} to the bit"]],
        )

    prepared = of_records(
        records,
        {"prepare_cpu": "``prepare``: real weights without a second copy, time linear in layers"},
        prepare,
    )
    imported = of_records(
        records, {"import_time_cpu": "Imports, each in a new interpreter"}, imports
    )
    adapter = of_records(
        records,
        {"overhead_cpu": "The adapter: ``ao:tensorwise`` against TorchAO's own loop"},
        overhead,
    )
    return "\n\n".join([prepared, imported, adapter])


def estimate(records: Records) -> str:
    def made(record: dict) -> str:
        groups: dict[tuple, list[dict]] = {}
        for each in record["results"]:
            groups.setdefault((each["model"], each["sharding"], each["ranks"]), []).append(
                each["ratio"]
            )
        rows = []
        for (model, sharding, ranks), ratios in groups.items():
            cells = [
                _range([ratio[key] for ratio in ratios if key in ratio])
                for key in ("static", "peak", "sent")
            ]
            rows.append(
                [
                    model,
                    "one process" if ranks == 1 else f"{sharding.upper()}, {ranks} processes",
                    *cells,
                ]
            )
        return rst(["model", "processes", "static bytes", "peak of a step", "bytes sent"], rows)

    return of_records(
        records,
        {"estimate_cpu": "Estimate / measurement, lowest and highest over all backends"},
        made,
    )


def published(records: Records) -> str:
    """Return predicted and published speeds of FP8 over bf16, one row a run in PyTorch, LLMQ's
    errors, and the sources with their assumptions."""
    if "published" not in records:
        return "Published runs: not yet measured."
    found = records["published"]["results"]
    in_cpp = [each for each in found if each["source"].startswith("LLMQ")]
    in_pytorch = [each for each in found if each not in in_cpp]
    rows = []
    for each in in_pytorch:
        low, high = each["interval"]
        error = f"{100 * (each['predicted'] / each['published'] - 1):+.1f} %".replace(
            "-", "\N{MINUS SIGN}"
        )
        is_inside = "yes" if low <= each["published"] <= high else "no"
        numbers = [f"{each[name]:.2f}" for name in ("published", "predicted")]
        reached = (
            each.get("bf16_predicted") and f"{each['bf16_published'] / each['bf16_predicted']:.2f}"
        )
        rows.append(
            [
                each["what"],
                f"``{each['backend']}``",
                *numbers,
                error,
                f"{low:.2f} to {high:.2f}",
                is_inside,
                reached,
            ]
        )
    header = [
        "run",
        "backend",
        "published",
        "predicted",
        "error",
        "interval",
        "inside",
        "bf16 speed",
    ]
    sentence = f"{_errors(in_pytorch)} *bf16 speed*: published over predicted."
    sources: dict[str, list[str]] = {}
    for each in found:
        sources.setdefault(each["source"], []).extend(each["assumed"].split(", "))
    lines = []
    for source, assumed in sources.items():
        known = ", ".join(dict.fromkeys(filter(None, assumed)))
        lines.append(f"* {source}" + (f"; assumed: {known}" if known else ""))
    filled = [textwrap.fill(line, 118, subsequent_indent="  ") for line in lines]
    parts = [rst(header, rows), textwrap.fill(sentence, 118)]
    if in_cpp:
        told = f"LLMQ's fused C++, by model in `Tables <tables.rst>`_: {_errors(in_cpp)}"
        parts.append(textwrap.fill(told.replace(": Median", ": median"), 118))
    return "\n\n".join([*parts, "\n".join(filled)])


def _errors(rows: list[dict]) -> str:
    errors = sorted(abs(each["predicted"] / each["published"] - 1) for each in rows)
    inside = sum(
        low <= each["published"] <= high for each in rows for low, high in [each["interval"]]
    )
    return (
        f"Median error {100 * errors[len(errors) // 2]:.1f} %, worst {100 * errors[-1]:.1f} %; "
        f"{inside} of {len(rows)} in their interval."
    )


def llmq(records: Records) -> str:
    """Return LLMQ's published / predicted speeds: a row for each kind and number of chips."""
    if "published" not in records:
        return "LLMQ's runs: not yet measured."
    cells: dict[str, dict[str, str]] = {}
    for each in records["published"]["results"]:
        if not each["source"].startswith("LLMQ"):
            continue
        model, where_ = each["what"].split(", ")
        cells.setdefault(where_, {})[model] = f"{each['published']:.2f} / {each['predicted']:.2f}"
    models = sorted({model for row in cells.values() for model in row}, key=lambda m: float(m[:-1]))
    return rst(
        ["chips", *models],
        [[where_, *(row.get(model) for model in models)] for where_, row in cells.items()],
    )


CARDS = {
    "rtx4090": "RTX 4090",
    "l40s": "L40S",
    "rtx5090": "RTX 5090",
    "rtxpro6000": "RTX PRO 6000",
    "h100": "H100",
}


def cards(records: Records) -> str:
    """Return predicted speeds with their intervals on chips without a measured step, next to
    LLMQ's."""
    if "published" not in records:
        return "Predicted speeds: not yet measured."
    found = records["published"]["cards"]
    models = list(dict.fromkeys(each["model"] for each in found))
    rows = []
    for chip in dict.fromkeys(each["chip"] for each in found):
        row = [CARDS[chip]]
        for each in (each for each in found if each["chip"] == chip):
            low, high = each["interval"]
            row.append(f"{each['predicted']:.2f} ({low:.2f} to {high:.2f})")
            row.append(each["published"] and f"{each['published']:.2f}")
        rows.append(row)
    header = ["chip", *(f"{model}{of}" for model in models for of in ("", ", LLMQ"))]
    return rst(header, rows)


def offloaded(records: Records) -> str:
    """Return predicted steps on one RTX 4090 with optimizer states in the host."""
    if "published" not in records:
        return "Predicted steps with offload: not yet measured."
    parts = ("products", "casts", "attention", "other", "optimizer", "offload")
    names = {"7b": "Llama 2 7B", "7B": "Qwen 2.5 7B"}
    rows = []
    for each in records["published"]["offloaded"]:
        low, middle, high = each["tokens_per_second"]
        batch = f"{each['batch']} x 1,024"
        if each["microbatches"] > 1:
            batch = f"{each['microbatches']} x {batch}"
        fits = "yes" if each["fits"] else "no"
        row = [names[each["model"]], batch, f"{each['peak'] / 2**30:.1f} GiB", fits]
        row.append(f"{middle:,.0f} ({low:,.0f} to {high:,.0f})")
        rows.append(row + [f"{each['parts'][part]:.2f}" for part in parts])
    return rst(["model", "tokens a step", "peak", "fits", "tokens/s", *parts], rows)


def models(records: Records) -> str:
    """Return one row per model of each record, over all of its backends."""
    tables = []
    for features in targets.features_of(records, "models_cpu"):
        record, by_model = records[f"models_cpu_{features}"], {}
        for each in record["results"]:
            by_model.setdefault(each["model"], []).append(each)
        backends = [each["backend"] for each in next(iter(by_model.values()))]
        rows = []
        for model, results in by_model.items():
            shares = [f"{100 * each['flops_share']:.1f} %" for each in results]
            off = max(
                abs(each["flops_share"] / each["flops_share_by_pytorch"] - 1) for each in results
            )
            falls = (
                "yes" if all(each["losses"][-1] < each["losses"][0] for each in results) else "no"
            )
            equal = "yes" if all(each["reloaded_equal"] for each in results) else "no"
            weighed = [each for each in results if "measured_peak" in each]
            peaks = _range([each["estimated_peak"] / each["measured_peak"] for each in weighed])
            rows.append([model, *shares, f"{100 * off:.2f} %", falls, equal, peaks])
        standin = (
            "; ``te`` over the tests' stand-in for its kernels"
            if record["arguments"].get("standin")
            else ""
        )
        told = f"All backends, {record['arguments']['steps']} steps each ({where(record, features)}{standin}):"
        header = ["model", *map(quoted, backends), "off", "learns", "reloads", "estimate / peak"]
        tables += [textwrap.fill(told, 120), rst(header, rows)]
        if record.get("shapes"):
            told = (
                "Published shapes, a training step traced without memory: the share in FP8, "
                "and the bytes of weights, gradients and optimizer states for each parameter."
            )
            rows = [
                [
                    each["model"],
                    f"{each['parameters'] / 1e9:.1f} billion",
                    *(
                        f"{100 * each['flops_share'][b]:.1f} %, "
                        f"{each['static'][b] / each['parameters']:.2f}"
                        for b in backends
                    ),
                ]
                for each in record["shapes"]
            ]
            tables += [
                textwrap.fill(told, 120),
                rst(["shape", "parameters", *map(quoted, backends)], rows),
            ]
    return "\n\n".join(tables or ["The architectures: not yet measured."])


def _range(values: list[float]) -> str | None:
    if not values:
        return None
    low, high = f"{min(values):.3f}", f"{max(values):.3f}"
    return low if low == high else f"{low} to {high}"


def summary(records: Records) -> str:
    """Return the three figures of `README.rst` by backend, of a GPU, with one line on their base."""
    rows = [
        [
            quoted(backend),
            *(targets.of_summary(what, backend).shown(records) for what, *_ in targets.SUMMARY),
        ]
        for backend in targets.SUMMARIZED
    ]
    table = rst(["backend", *(what for what, *_ in targets.SUMMARY)], rows)
    measured_on = {
        record["machine"]["chip"] for name, record in records.items() if name in SUMMARIZED_RECORDS
    }
    captions = [targets.CAPTION.format(chip=chip) for chip in measured_on]
    if captions and "scale_loss_gpu" in records:
        seeds = targets.seeds_of(records["scale_loss_gpu"], targets.SUMMARIZED)
        captions[-1] += targets.OF_LOSSES.format(seeds=seeds)
    return "\n\n".join([table, *(textwrap.fill(caption, 120) for caption in captions)])


SUMMARIZED_RECORDS = ("step_8b_gpu", "step_8b_te_gpu", "scale_loss_gpu")
"""Records of `summary`, of one GPU."""


def headline(records: Records) -> str:
    """Return the measured gains of the fastest backend and of `msamp:O2`, with their base."""
    if not {"step_8b_gpu", "step_1b_gpu"} <= records.keys():
        return "Gains: not yet measured."
    speeds, peaks = (
        [targets.of_summary(what, backend).shown(records) for backend in (FASTEST, "msamp:O2")]
        for what in (targets.SPEED, targets.PEAK)
    )
    whole = targets.one(records["step_1b_gpu"]["results"], backend=FASTEST, form="compiled")
    gains = (
        (FASTEST, speeds[0], less(peaks[0]), "four layers of Llama 8B"),
        ("msamp:O2", speeds[1], less(peaks[1]), "the same"),
        (
            FASTEST,
            f"{whole['times_plain']['ratio']:.2f}",
            f"{100 - 100 * whole['peak_to_plain']:.0f} %",
            "a whole Llama of 1.1 billion parameters",
        ),
    )
    lines = [
        f"* ``{backend}``: {speed} times as fast, {memory} less peak memory ({what})"
        for backend, speed, memory, what in gains
    ]
    base = "On one H200 with ``torch.compile``, over compiled bf16 autocast with FP32 weights:"
    return "\n\n".join([base, "\n".join(lines)])


def less(change: str) -> str:
    return change.removeprefix("\N{MINUS SIGN}")


FASTEST = chips.advice_for(chips.product_named("h100").gpu).backend


def choices(records: Records) -> str:
    """Return the backend to take in each case, with its gain."""
    speed, peak = (
        {name: targets.of_summary(what, name).shown(records) for name in targets.SUMMARIZED}
        for what in (targets.SPEED, targets.PEAK)
    )
    if "published" not in records:
        return "Choices: not yet measured."
    small, large = (
        [
            f"{each['predicted']:.2f}"
            for each in records["published"]["cards"]
            if each["model"] == model and each["chip"] != "h100"
        ]
        for model in ("1.5B", "7B")
    )
    with_te = chips.advice_for(chips.product_named("h100").gpu, te_runs=True).backend
    cards_take = chips.advice_for(chips.product_named("rtx4090").gpu).backend
    rows = [
        [
            "H100, H200: the safe start",
            quoted(FASTEST),
            f"{speed[FASTEST]} times bf16, peak memory {peak[FASTEST]}; weights and Adam states stay FP32",
        ],
        [
            "H100, H200: fastest measured",
            quoted("msamp:O2"),
            f"{speed['msamp:O2']} times, {peak['msamp:O2']}; weights, gradients, Adam states in 8 and 16 bits",
        ],
        [
            "TransformerEngine at hand",
            quoted(with_te),
            f"NVIDIA's choice for H100; ``te:delayed``, measured: {speed['te:delayed']} times, {peak['te:delayed']}",
        ],
        [
            "RTX 40, RTX 50, L40S, RTX PRO 6000",
            quoted(cards_take),
            f"predicted: {min(small)} to {max(small)} times at 1.5 billion parameters, "
            f"{min(large)} to {max(large)} at 7",
        ],
        [
            "too little memory, any GPU",
            quoted("msamp:O2"),
            "6 bytes a weight in place of 16; slower without FP8 units",
        ],
        [
            "all of an 8B, one card of 24 GB",
            quoted("msamp:O4"),
            "estimated 14 GiB, host 28 GB: ``--fp8_offload states --fp8_gradient_release true``",
        ],
        [
            "LoRA over a frozen base",
            quoted(FASTEST),
            "with ``--fp8_params true`` half of bf16's memory; FP8 files keep their codes",
        ],
        [
            "DDP, FSDP2, ZeRO",
            "any",
            "correct in tests over CPU processes, ``msamp`` not by ZeRO-3; speed not measured",
        ],
        [
            "a laptop: does FP8 harm the loss?",
            quoted(FASTEST),
            "a GPU's rounding on any machine, slowly",
        ],
    ]
    return rst(["case", "take", "gain"], rows)


def main_figures(records: Records) -> str:
    """Return the main figures: of a GPU, and of the usual CPU with bf16 products."""
    features = targets.USUAL[0]
    measured = targets.of_cpu(records, features)
    rows = [[row.what, row.shown(records)] for row in targets.FIGURES_ON_GPU]
    rows += [[row.what, row.shown(measured)] for row in targets.FIGURES]
    machines = {}
    for name in sorted({row.file for row in targets.FIGURES} & set(measured)):
        machine, chip = where(measured[name], features), measured[name]["machine"]["chip"]
        machines[f"{chip}{machine.partition(chip)[2]}"] = None
    on_gpu = dict.fromkeys(
        where(records[row.file]) for row in targets.FIGURES_ON_GPU if row.file in records
    )
    captions = [f"GPU figures are from one {'; '.join(on_gpu)}."] if on_gpu else []
    captions += (
        [f"CPU figures are from 1 or 2 cores of an {'; '.join(machines)}."] if machines else []
    )
    return "\n\n".join(
        [rst(["figure", "measured"], rows), *filter(None, [textwrap.fill(" ".join(captions), 120)])]
    )


TABLES: dict[str, Callable[[Records], str]] = {
    "summary": summary,
    "headline": headline,
    "choices": choices,
    "figures": main_figures,
    "targets-cpu": targets_cpu,
    "targets-gpu": targets_gpu,
    "linear": linear,
    "step": step,
    "predicted": predicted,
    "optimizer": optimizer,
    "kernels": kernels,
    "sums": sums,
    "scale-loss": scale_loss,
    "rollouts": rollouts,
    "communication": communication,
    "memory": memory,
    "largest": largest,
    "ranks": ranks,
    "start-up": start_up,
    "distributed": distributed,
    "finetune": finetune,
    "levels": levels_loss,
    "experts": experts,
    "long-run": long_run,
    "estimate": estimate,
    "models": models,
    "published": published,
    "llmq": llmq,
    "cards": cards,
    "offloaded": offloaded,
}
_MARKED = re.compile(
    r"^\.\. begin table (?P<name>\S+)\n(?P<text>.*?)^\.\. end table (?P=name)\n",
    re.DOTALL | re.MULTILINE,
)


def between_markers(document: str) -> dict[str, str]:
    """The text between each pair of markers, by the table's name."""
    return {found["name"]: found["text"].strip("\n") for found in _MARKED.finditer(document)}


def written(document: str, records: Records) -> str:
    """The document with every marked table as the records have it. Tables of other programs stay as
    they are."""

    def put(found: re.Match) -> str:
        name = found["name"]
        if name not in TABLES:
            return found[0]
        return f".. begin table {name}\n\n{TABLES[name](records)}\n\n.. end table {name}\n"

    return _MARKED.sub(put, document)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument(
        "--write",
        type=Path,
        nargs="*",
        metavar="FILE",
        help="write into these documents (default: all)",
    )
    arguments = parser.parse_args()
    records = targets.load(arguments.results)
    if arguments.write is not None:
        for document in arguments.write or DOCUMENTS:
            document.write_text(
                written(document.read_text(encoding="utf-8"), records), encoding="utf-8"
            )
        return
    for name, table in TABLES.items():
        print(f".. begin table {name}\n\n{table(records)}\n\n.. end table {name}\n")


if __name__ == "__main__":
    main()
