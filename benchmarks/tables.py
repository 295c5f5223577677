"""Write the tables of measurements in `benchmarks/README.rst`, `README.rst` and three pages from the
records in `benchmarks/results`.

    benchmarks/tables.py                                  prints them all, of every machine
    benchmarks/tables.py step linear                      prints these
    benchmarks/tables.py --write                          writes each between its markers in all documents
    benchmarks/tables.py --write benchmarks/README.rst    the same in one document

The markers are comments: `.. begin table NAME` and `.. end table NAME`. Most tables are described
by their columns; a benchmark prints its own record by the same description. In a document a table
shows its first record and links the others. A question without a record prints `not yet measured`.
Targets read one CPU with bf16 products and one without: the usual two, `targets.USUAL`, if
recorded, else the first by name.
"""

from __future__ import annotations

import argparse
import datetime
import re
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import targets
from measuring import table, text
from targets import Records, error_of, gap

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


# The machine of a record


def cpu(features: str) -> str:
    """Expand the name of a CPU's features."""
    return features if targets.has_bf16(features) else f"{features}: without bf16 products"


def dated(date: str) -> str:
    day = datetime.date.fromisoformat(date[:10])
    return f"{day.day} {day:%B %Y}"


def versions_and_date(machine: dict) -> str:
    versions = [f"{name} {machine[name].split('+')[0]}" for name in NAMED if machine.get(name)]
    return f"{', '.join(versions)}, {dated(machine['date'])}"


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
    return f"{chip}, {versions_and_date(machine)}"


def plain(record: dict) -> str:
    """Return the baseline of FP8 in a record, as text."""
    return "FP32" if record.get("precision") == "fp32" else "bf16"


def link(name: str) -> str:
    (file,) = RESULTS.glob(f"{name}.*")
    return f"`{name} <results/{file.name}>`_"


# Cells


def code(name: str) -> str:
    return f"``{name}``"


def percent(share: float) -> str:
    return targets.percent(share)


def share(of: float) -> str:
    return f"{100 * of:.0f} %"


def fixed(digits: int) -> Callable[[float], str]:
    return lambda value: f"{value:.{digits}f}"


def significant(digits: int) -> Callable[[float], str]:
    return lambda value: f"{value:.{digits}g}"


def whole(value: float) -> str:
    return str(round(value))


def by_x(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape))


def milliseconds(seconds: float) -> float:
    return seconds * 1e3


def paired(found: dict) -> str | None:
    """Return a mean gap with half of its interval."""
    return gap(found["mean"], found["half_width"]) if found["half_width"] is not None else None


def interval(digits: int) -> Callable[[dict], str]:
    def shown(ratio: dict) -> str:
        ends = (f"{ratio[name]:.{digits}f}" for name in ("ratio", "low", "high"))
        return "{} [{}, {}]".format(*ends)

    return shown


def relative(key: str, to_plain: str) -> Callable[[dict], str | None]:
    """Return megabytes with their change."""

    def read(row: dict) -> str | None:
        if not row[key] or row.get(to_plain) is None:
            return None
        return f"{row[key] / 1e6:.0f} MB ({percent(row[to_plain] - 1)})"

    return read


def spread(values: list[float]) -> str | None:
    if not values:
        return None
    low, high = f"{min(values):.3f}", f"{max(values):.3f}"
    return low if low == high else f"{low} to {high}"


@dataclass(frozen=True)
class Column:
    """Describe a column: `read` is a path of keys with dots, or a function of a row."""

    title: str
    read: str | Callable[[dict], Any]
    shown: Callable[[Any], Any] = text

    def cell(self, row: dict) -> Any:
        value: Any = row
        if callable(self.read):
            value = self.read(row)
        else:
            for key in self.read.split("."):
                value = value.get(key) if isinstance(value, dict) else None
        return None if value is None else self.shown(value)


def results(record: dict) -> list[dict]:
    return record["results"]


def no_note(record: dict) -> str:
    return ""


@dataclass(frozen=True)
class Table:
    """Describe the table of a question."""

    titles: dict[str, str]
    """Names of records, a CPU's without its features, with the caption above each table. The first
    recorded one is shown in documents."""
    columns: Callable[[dict], list[Column]] | list[Column]
    rows: Callable[[dict], list[dict]] = results
    note: Callable[[dict], str] = no_note
    """Text below the table."""

    def of(self, record: dict) -> str:
        columns = self.columns if isinstance(self.columns, list) else self.columns(record)
        header = [each.title.replace("{plain}", plain(record)) for each in columns]
        made = table(
            header, [[column.cell(row) for column in columns] for row in self.rows(record)]
        )
        return "\n\n".join(filter(None, [made, self.note(record)]))

    def recorded(self, records: Records) -> list[tuple[str, str, str]]:
        """Return (title, name, features) of each record: of a CPU's question all kinds of CPU, the
        usual ones first."""
        found = []
        for name, title in self.titles.items():
            if name in records:
                found.append((title, name, ""))
            if name.endswith("_cpu"):
                for features in targets.features_of(records, name):
                    found.append((title, f"{name}_{features}", features))
        return found

    def __call__(self, records: Records) -> str:
        """Return the tables of all records."""
        found = self.recorded(records)
        parts = []
        for title, name, features in found:
            parts.append(wrapped(f"{title} ({where(records[name], features)}):"))
            parts.append(self.of(records[name]))
        missing = [title for title in self.titles.values() if title not in {of[0] for of in found}]
        parts += [wrapped(f"{title}: not yet measured.") for title in missing]
        return "\n\n".join(parts)

    def brief(self, records: Records) -> str:
        """Return the table of the first record, with links to it and to the others."""
        found = self.recorded(records)
        if not found:
            return self(records)
        (title, name, features), *others = found
        caption = f"{title}: {link(name)} ({where(records[name], features)})"
        if others:
            caption += f"; also {', '.join(link(each[1]) for each in others)}"
        return f"{wrapped(caption + '.')}\n\n{self.of(records[name])}"


def wrapped(sentence: str) -> str:
    return textwrap.fill(sentence, 120, break_long_words=False, break_on_hyphens=False)


# Rows and columns of some tables


def unpaired(record: dict) -> str:
    alone = any(not each.get("to_plain", {}).get("paired", True) for each in record["results"])
    return "Plain bf16 ran once: all rounds are compared with it." if alone else ""


def with_interval(record: dict) -> list[dict]:
    """Return the variants with two seeds or more."""
    return [each for each in record["results"] if each["gap"] and each["gap"]["half_width"]]


def asked(record: dict) -> str:
    warmup = round(record["warmup_share"] * record["steps"])
    return f"{record['steps']} steps, {warmup} of warm-up, nats with 95 % intervals."


def curve(record: dict) -> list[Column]:
    """Return the columns of GRPO: the policy gap, and the rewards at four tenths of the steps."""
    tenth = record.get("arguments", record)["steps"] // 10
    columns = [
        Column("setting", "setting", code),
        Column("mean gap, nats", "gap.mean", significant(2)),
        Column("largest", "gap.largest", significant(2)),
        Column("k3", "gap.k3", significant(2)),
        Column(
            "multiplicative error \N{MINUS SIGN} 1",
            lambda row: f"{row['gap']['mult_prob_error'] - 1:.2g}",
        ),
    ]
    for at in (0, 2, 4, 9):
        columns.append(Column(f"{at * tenth + 1} to {(at + 1) * tenth}", reward_at(at)))
    return columns


def reward_at(tenth: int) -> Callable[[dict], str]:
    return lambda row: "{mean:.3f} ± {half_width:.3f}".format(**row["curve"][tenth])


def of_results(key: str) -> Callable[[dict], str]:
    return lambda row: share(row[key] / row["results"])


def to_first(record: dict) -> list[dict]:
    """Return the levels with their peaks over the first one's, plain training."""
    first, *_ = record["results"]
    rows = []
    for each in record["results"]:
        extra = [f"{name}={each[name]}" for name in OPTIONAL if each.get(name)]
        row = {**each, "name": ", ".join(map(code, [each["backend"], *extra]))}
        for key in ("peak_tensor_bytes", "peak_resident_bytes"):
            row[f"{key}_to_plain"] = each[key] / first[key] if each[key] and first[key] else None
        rows.append(row)
    return rows


OPTIONAL = ("saved_activations", "gradient_release")


def but_plain(record: dict) -> list[dict]:
    return [each for each in record["summaries"] if each["backend"] != plain(record).lower()]


def above_first(record: dict) -> list[dict]:
    """Return the long runs with their losses above the first one's."""
    reference, *_ = ([point["held_out_loss"] for point in run["points"]] for run in record["runs"])
    rows = []
    for number, run in enumerate(record["runs"]):
        losses = [point["held_out_loss"] for point in run["points"]]
        above = [a - b for a, b in zip(losses, reference, strict=True)]
        ends = {"last": above[-1], "most": max(above)} if number else {}
        stuck = sum(run["stuck"].values())
        rows.append({"backend": run["backend"], "loss": losses[-1], "stuck": stuck, **ends})
    return rows


def nats(value: float) -> str:
    return f"{value:+.4f}".replace("-", "\N{MINUS SIGN}")


def of_prepare(record: dict) -> list[dict]:
    parts = (record[name] for name in ("growth", "on_meta", "memory"))
    rows = []
    for grown, meta, memory in zip(*parts, strict=True):
        added = None if memory["added"] is None else memory["added"] / memory["weights"]
        rows.append({**grown, "seconds": meta["seconds"], "added": added})
    return rows


def layers_of(record: dict) -> list[Column]:
    n = record.get("layers") or record["arguments"]["layers"]
    return [
        Column("backend", "backend", code),
        Column(f"{n:,} Linears, s", "one.median_s"),
        Column(f"{2 * n:,}, s", "two.median_s"),
        Column("ratio", "ratio.ratio"),
        Column("8 billion on meta, s", "seconds"),
        Column("memory added", "added", share),
    ]


def of_modules(record: dict) -> list[dict]:
    return [
        {"module": name, **time, "over": record["to_accelerate"][name]["ratio"]}
        for name, time in record["seconds"].items()
    ]


def by_processes(record: dict) -> list[dict]:
    """Return the ratios of all backends, by model and processes."""
    groups: dict[tuple, dict] = {}
    for each in record["results"]:
        processes = "one process"
        if each["ranks"] > 1:
            processes = f"{each['sharding'].upper()}, {each['ranks']} processes"
        names = {"model": each["model"], "processes": processes}
        group = groups.setdefault(tuple(names.values()), names)
        for key, ratio in each["ratio"].items():
            group.setdefault(key, []).append(ratio)
    return list(groups.values())


def by_model(record: dict) -> list[dict]:
    """Return the results of all backends, by model."""
    rows: dict[str, dict] = {}
    for each in record["results"]:
        row = rows.setdefault(each["model"], {"model": each["model"], "of": []})
        row[each["backend"]] = f"{100 * each['flops_share']:.1f} %"
        row["of"].append(each)
    return list(rows.values())


def yes(holds: Iterable[bool]) -> str:
    return "yes" if all(holds) else "no"


def off(row: dict) -> str:
    ratios = (each["flops_share"] / each["flops_share_by_pytorch"] for each in row["of"])
    return f"{100 * max(abs(each - 1) for each in ratios):.2f} %"


def of_models(record: dict) -> list[Column]:
    backends = dict.fromkeys(each["backend"] for each in record["results"])
    return [
        Column("model", "model"),
        *(Column(code(name), name) for name in backends),
        Column("off", off),
        Column("learns", lambda row: yes(of["losses"][-1] < of["losses"][0] for of in row["of"])),
        Column("reloads", lambda row: yes(of["reloaded_equal"] for of in row["of"])),
        Column(
            "estimate / peak",
            lambda row: spread(
                [
                    of["estimated_peak"] / of["measured_peak"]
                    for of in row["of"]
                    if "measured_peak" in of
                ]
            ),
        ),
    ]


def published_shapes(record: dict) -> str:
    """Return the table of traced shapes."""
    if not record.get("shapes"):
        return ""
    backends = dict.fromkeys(each["backend"] for each in record["results"])

    def traced(backend: str) -> Callable[[dict], str]:
        return lambda row: (
            f"{100 * row['flops_share'][backend]:.1f} %, "
            f"{row['static'][backend] / row['parameters']:.2f}"
        )

    columns = [
        Column("shape", "model"),
        Column("parameters", lambda row: f"{row['parameters'] / 1e9:.1f} billion"),
        *(Column(code(name), traced(name)) for name in backends),
    ]
    told = (
        "Published shapes, a training step traced without memory: the share in FP8, "
        "and the bytes of weights, gradients and optimizer states for each parameter."
    )
    return f"{textwrap.fill(told, 120)}\n\n{Table({}, columns, lambda of: of['shapes']).of(record)}"


def of_steps(record: dict) -> list[Column]:
    """Return the columns of a predicted step: the layer's kernels, and its milliseconds."""
    names = dict.fromkeys(line["what"] for each in record["results"] for line in each["lines"])

    def spent(what: str) -> Callable[[dict], float | None]:
        def read(row: dict) -> float | None:
            seconds = {line["what"]: line["seconds"] for line in row["lines"]}
            return milliseconds(seconds[what]) if what in seconds else None

        return read

    return [
        Column("backend", "backend", code),
        Column("tokens/s", "tokens_per_second", whole),
        Column("kernels", "layer.kernels"),
        Column("MB", lambda row: whole(row["layer"]["bytes"] / 1e6)),
        Column("of its MLP", "mlp.kernels"),
        Column("MB", lambda row: whole(row["mlp"]["bytes"] / 1e6)),
        Column(
            "calls of an eager Linear",
            lambda row: row["eager"] and row["eager"]["launches"] + row["eager"]["operators"],
        ),
        *(Column(f"{name}, ms", spent(name)) for name in names),
    ]


BACKEND = Column("backend", "backend", code)
LOSS = Column("held-out loss", "held_out_loss", fixed(4))
GAP = Column("gap to {plain}, nats", "gap", paired)

TABLES: dict[str, Callable[[Records], str]] = {
    "linear": Table(
        {
            "linear_eager_gpu": "All layers of Llama 1B, 8B and 70B on a GPU, eager",
            "linear_compiled_gpu": "The widest layers of Llama 1B, 8B and 70B on a GPU, compiled",
            "linear_model_gpu": "Eight Linears in one model on a GPU, compiled",
            "linear_cpu": "A linear layer, forward and backward, on a CPU",
        },
        [
            Column("tokens x in x out", "shape", by_x),
            Column("dtype", lambda row: row.get("dtype", "bf16")),
            BACKEND,
            Column("form", "form"),
            Column("ms", "median_s", milliseconds),
            Column("time / plain", "to_plain.ratio"),
            Column("time / TorchAO", "to_torchao.ratio"),
        ],
        note=unpaired,
    ),
    "step": Table(
        {
            "step_8b_gpu": "Four layers of Llama 8B at sequence 8192 on a GPU",
            "step_8b_te_gpu": "The same with ``te``, in another run",
            "step_8b_head_gpu": "The same with a fused loss, and a head in FP8",
            "step_8b_eager_gpu": "The same, eager",
            "step_8b_16layers_gpu": "Sixteen layers of Llama 8B at sequence 8192 on a GPU",
            "step_8b_4096_gpu": "Four layers of Llama 8B at sequence 4096",
            "step_1b_gpu": "Llama 1B at sequence 4096 on a GPU",
            "step_1b_8192_gpu": "The same at sequence 8192",
            "step_cpu": "A whole training step of a Llama of 8 M parameters on a CPU",
        },
        [
            BACKEND,
            Column("form", "form"),
            Column("tokens/s", "tokens_per_second", whole),
            Column("times {plain}", "times_plain", interval(2)),
            Column("peak memory", relative("peak_bytes", "peak_to_plain")),
            Column("FLOPs in FP8", "flops_share", share),
        ],
    ),
    "predicted-parts": Table(
        {
            "ahead_H200_rates": "A step on an H200, predicted by measured rates",
            "ahead_H200": "The same before any measurement",
            "ahead_H200_before": "The first prediction",
        },
        of_steps,
    ),
    "optimizer": Table(
        {
            "optimizer_gpu": "The optimizer's step over 268 M elements on a GPU",
            "optimizer_cpu": "The optimizer's step over 20 M elements on a CPU",
        },
        [
            Column("step", "step"),
            Column("bytes/element", "bytes"),
            Column("ns/element", "nanoseconds_per_element"),
            Column("time / fused FP32", "to_fused.ratio"),
            Column("time / AdamWFp8", "to_torchao.ratio"),
            Column("of a copy's bandwidth", "copy_share", share),
        ],
        rows=lambda record: [each for each in record["results"] if each["step"] != "copy"],
    ),
    "kernels": Table(
        {"quantize_gpu": "Kernels quantizing a bf16 matrix on a GPU"},
        [
            Column("kernel", "kernel"),
            Column("matrix", "shape", by_x),
            Column("GB/s", lambda row: whole(row["bytes_per_second"] / 1e9)),
            Column("of a copy's bandwidth", "share_of_copy", share),
        ],
        rows=lambda record: record["kernels"],
    ),
    "sums": Table(
        {"sums_gpu": "Results equal to the bit"},
        [
            Column(
                "``torch._scaled_mm`` with",
                lambda row: code(f"use_fast_accum={row['accumulation'] == 'fast'}"),
            ),
            Column("K", "depth"),
            Column("results", "results"),
            Column("emulated", of_results("emulated")),
            Column("in bf16", of_results("emulated_in_bf16")),
            Column("exact sums", of_results("exact_sums")),
            Column("in bf16", of_results("exact_sums_in_bf16")),
        ],
        rows=lambda record: record["by_depth"],
    ),
    "instructions": Table(
        {"tensor_cores": "Recordings of single instructions, K = 32"},
        [
            Column("chip", "chip"),
            Column("format", "format"),
            Column("instructions", "rows"),
            Column("equal, by the chip's rule", "equal"),
            Column("by exact sums", "exact_sums_equal"),
        ],
    ),
    "scale-loss": Table(
        {
            "scale_loss_gpu": "A Llama of 10.7 M parameters on a GPU, 15 runs at a time",
            "scale_loss_1000_gpu": "The same for longer",
            "scale_loss_cpu": "The same on a CPU, one run at a time",
        },
        [
            Column("variant", "variant"),
            Column("seeds", "seeds"),
            Column("held-out loss \N{MINUS SIGN} its reference's", "gap", paired),
            Column("minutes a run", lambda row: round(row["minutes"], 2)),
        ],
        rows=with_interval,
        note=asked,
    ),
    "rollouts": Table({"rollouts_cpu": "GRPO with rollouts in FP8, rewards at steps"}, curve),
    "communication": Table(
        {"comm_gpu": "On GPUs, over NCCL", "comm_cpu": "Two ranks on one CPU, over gloo"},
        [
            Column("collective", "collective"),
            Column("elements", "elements", "{:,}".format),
            Column("FP8, ms", "seconds.FP8.median_s", milliseconds),
            Column("bf16", "seconds.bf16.median_s", milliseconds),
            Column("FP32", "seconds.FP32.median_s", milliseconds),
            Column("time / bf16", "seconds_over.bf16.ratio"),
            Column("/ FP32", "seconds_over.FP32.ratio"),
            Column("bytes / bf16", "bytes_over.bf16"),
            Column("/ FP32", "bytes_over.FP32"),
        ],
        rows=lambda record: record["collectives"],
    ),
    "gradient-mean": Table(
        {"gradient_mean_cpu": "The mean of gradients sent in FP8"},
        [
            Column("gradients", "gradients"),
            Column("ranks", "ranks"),
            Column("method", "method"),
            Column("relative error", "error", fixed(3)),
            Column("elements lost", "lost", percent),
        ],
        rows=lambda record: record["figures"],
    ),
    "memory": Table(
        {
            "memory_cpu": "Peak memory of a whole training step, a Llama of 115 M parameters with "
            "one short sequence, on a CPU",
        },
        [
            Column("backend", "name"),
            Column("peak of tensors", relative("peak_tensor_bytes", "peak_tensor_bytes_to_plain")),
            Column(
                "peak resident", relative("peak_resident_bytes", "peak_resident_bytes_to_plain")
            ),
            Column("bytes/element", "bytes_per_element.total", fixed(1)),
        ],
        rows=to_first,
    ),
    "frozen-base": Table(
        {"frozen_base_cpu": "A LoRA step over a frozen base of 134 M elements"},
        [
            Column("scaling", "scaling"),
            Column("base", "base"),
            Column("bytes/element", "bytes"),
            Column("peak, MB", "peak", lambda peak: whole(peak / 1e6)),
        ],
    ),
    "finetune": Table(
        {
            "finetune_cpu": "A fine-tune with small rates; *moved* is the update along the one without "
            "FP8"
        },
        [
            Column("learning rate", "lr", lambda lr: f"{lr:.0e}".replace("e-0", "e-")),
            BACKEND,
            GAP,
            Column("moved", "displacement_along", fixed(3)),
        ],
        rows=but_plain,
    ),
    "levels": Table({"levels_loss_cpu": "The training of compare on a CPU"}, [BACKEND, LOSS, GAP]),
    "experts": Table(
        {"experts_cpu": "Mixtures of experts, bytes of an element of their weights"},
        [
            Column("model", "family"),
            BACKEND,
            LOSS,
            GAP,
            Column("bytes/element", "bytes_per_element", fixed(2)),
        ],
    ),
    "long-run": Table(
        {"long_run_cpu": "A small Llama for many steps, one seed"},
        [
            BACKEND,
            Column("held-out loss", "loss", fixed(4)),
            Column("above FP32, nats", "last", nats),
            Column("the most along the way", "most", nats),
            Column("scales stuck", "stuck"),
        ],
        rows=above_first,
    ),
    "ranks": Table(
        {
            "by_ranks_gpu": "Over NCCL, Llama 1B, each rank a GPU",
            "by_ranks_cpu": "Over gloo, each rank on one CPU core",
        },
        [
            Column("ranks", "ranks"),
            BACKEND,
            Column("tokens/s/GPU", "tokens_per_second", whole),
            Column("decrease", "decrease", percent),
            Column("faster", "faster", percent),
        ],
    ),
    "prepare": Table(
        {"prepare_cpu": "``prepare``: real weights without a second copy, time linear in layers"},
        layers_of,
        rows=of_prepare,
    ),
    "imports": Table(
        {"import_time_cpu": "Imports, each in a new interpreter"},
        [
            Column("statement", lambda row: code(f"import {row['module']}")),
            Column("s", "median_s"),
            Column("time / accelerate's", "over"),
        ],
        rows=of_modules,
    ),
    "overhead": Table(
        {"overhead_cpu": "The adapter: ``ao:tensorwise`` against TorchAO's own loop"},
        [
            Column("step through Accelerate / hand-written loop", "ratio", interval(4)),
            Column(
                "first losses",
                "losses_equal",
                lambda equal: f"{'equal' if equal else 'not equal'} to the bit",
            ),
        ],
        rows=lambda record: [record],
    ),
    "monitor": Table(
        {"monitor_cost_cpu": "Steps of a monitored model over those of one without a monitor"},
        [
            BACKEND,
            Column("compiled", "compiled"),
            Column("between samples", "between", interval(3)),
            Column("a sampled step", "sampled", interval(3)),
            Column("a sample every 100 steps", "share", percent),
        ],
        rows=lambda record: record["recipes"],
    ),
    "estimate": Table(
        {"estimate_cpu": "Estimate / measurement, lowest and highest over all backends"},
        [
            Column("model", "model"),
            Column("processes", "processes"),
            Column("static bytes", "static", spread),
            Column("peak of a step", "peak", spread),
            Column("bytes sent", "sent", spread),
        ],
        rows=by_processes,
    ),
    "advise": Table(
        {"advise_cpu": "Models in trouble, with the advised recipe"},
        [
            Column("model", "model"),
            Column("given", "given", code),
            Column("advised", "change"),
            Column("FP8", "flops_share", share),
            Column("gap left", "ratio"),
            Column("on other batches", "ratio_on_others"),
        ],
    ),
}
"""By name. The functions below are further ones."""


# Tables over several records


def targets_cpu(records: Records) -> str:
    measured, parts = targets.features_of(records), []
    for usual in targets.USUAL:
        of_kind = [each for each in measured if targets.has_bf16(each) == targets.has_bf16(usual)]
        features = of_kind[0] if of_kind else usual
        rows = targets.rows(targets.on_cpu(features), targets.of_cpu(records, features))
        header = [f"to be shown on a CPU ({cpu(features)})", "measured", "bound", "verdict"]
        parts.append(table(header, rows))
    return "\n\n".join(parts)


def targets_gpu(records: Records) -> str:
    header = ["to be shown on a GPU", "measured", "bound", "verdict"]
    return table(header, targets.rows(targets.ON_GPU, records))


def limits(records: Records) -> str:
    """Return the shares of the chip's limits, measured in the same run."""
    if "limits_gpu" not in records:
        return "Limits of the chip: not yet measured."
    rows = [row[:2] for row in targets.rows(targets.AGAINST_LIMITS, records)]
    caption = f"{link('limits_gpu')} ({where(records['limits_gpu'])}):"
    return f"{wrapped(caption)}\n\n{table(['limit, or share of it', 'measured'], rows)}"


def answers(records: Records) -> str:
    """Return a row for each figure, with links to its records."""
    known = targets.of_any_cpu(records)
    rows = []
    for figure in targets.FIGURES:
        names = [link(name) for each in figure.records.split() for name in files_of(each)]
        rows.append([figure.what, figure.shown(known), ", ".join(names)])
    return table(["figure", "measured", "records"], rows)


def files_of(question: str) -> list[str]:
    """Return the names of a question's records: one, or one a kind of CPU."""
    files = sorted(path.stem for path in RESULTS.iterdir())
    return [each for each in files if re.fullmatch(f"{question}(_(avx|amx|neon).*)?", each)]


def predicted(records: Records) -> str:
    """Pair `ahead/predict.py`'s step on a GPU with the measured one."""
    names = ("ahead_H200_before", "ahead_H200", "ahead_H200_rates")
    first, latest, by_rates = (records.get(name) for name in names)
    if latest is None or by_rates is None or "step_8b_gpu" not in records:
        return "A step on a GPU: not yet predicted, or not yet measured."
    tokens = latest["arguments"]["tokens"]
    caption = f"One sequence of {tokens:,} tokens, {', '.join(map(link, names))}:"
    rows = []
    measured = {what: target.value(records) for what, target in targets.PREDICTED.items()}
    for what in latest["ratios"]:
        ratios = [each and each["ratios"].get(what) for each in (first, latest, by_rates)]
        rows.append([what, *ratios, measured.get(what)])
    optimizer = [optimizer_share(each) for each in (first, latest, by_rates)]
    reached = targets.ON_GPU[7].value(records)
    rows.append(["optimizer of msamp:O2, bandwidth / a copy's", *optimizer, reached])
    header = ["figure", "*predicted* at first", "*predicted*", "by measured rates", "measured"]
    return f"{wrapped(caption)}\n\n{table(header, rows + speeds(latest, by_rates, records))}"


def speeds(blind: dict, by_rates: dict, records: Records) -> list[list]:
    """Return tokens a second of compiled steps, with errors of both predictions."""
    rows = []
    for each in records["step_8b_gpu"]["results"]:
        # the same code
        backend = "torchao" if each["backend"] == "ao:tensorwise" else each["backend"]
        if each["form"] != "compiled":
            continue
        cells = []
        for record in (blind, by_rates):
            rate = targets.one(record["results"], backend=backend)["tokens_per_second"]
            cells.append(f"{rate:.0f} ({percent(rate / each['tokens_per_second'] - 1)})")
        name = f"{each['backend']}, tokens a second"
        rows.append([name, None, *cells, round(each["tokens_per_second"])])
    return rows


def optimizer_share(record: dict | None) -> float | None:
    found = [each for each in results(record or {"results": []}) if each["backend"] == "msamp:O2"]
    return found[0]["optimizer"]["share_of_a_copy"] if found else None


def published(records: Records) -> str:
    """Return predicted and published speeds of FP8 over bf16, one row a run in PyTorch, LLMQ's
    errors, and the sources with their assumptions."""
    if "published" not in records:
        return "Published runs: not yet measured."
    found = records["published"]["results"]
    in_cpp = [each for each in found if each["source"].startswith("LLMQ")]
    in_pytorch = [each for each in found if each not in in_cpp]
    rows = Table({}, OF_PUBLISHED, lambda record: in_pytorch).of({})
    sentence = f"{errors(in_pytorch)} *bf16 speed*: published over predicted."
    sources: dict[str, list[str]] = {}
    for each in found:
        sources.setdefault(each["source"], []).extend(each["assumed"].split(", "))
    lines = []
    for source, assumed in sources.items():
        known = ", ".join(dict.fromkeys(filter(None, assumed)))
        lines.append(f"* {source}" + (f"; assumed: {known}" if known else ""))
    filled = [textwrap.fill(line, 118, subsequent_indent="  ") for line in lines]
    parts = [rows, textwrap.fill(sentence, 118)]
    if in_cpp:
        told = f"LLMQ's fused C++, by model in `Tables <tables.rst>`_: {errors(in_cpp)}"
        parts.append(textwrap.fill(told.replace(": Median", ": median"), 118))
    return "\n\n".join([*parts, "\n".join(filled)])


def is_inside(row: dict) -> bool:
    low, high = row["interval"]
    return low <= row["published"] <= high


OF_PUBLISHED = [
    Column("run", "what"),
    BACKEND,
    Column("published", "published", fixed(2)),
    Column("predicted", "predicted", fixed(2)),
    Column("error", lambda row: percent(row["predicted"] / row["published"] - 1)),
    Column("interval", lambda row: "{:.2f} to {:.2f}".format(*row["interval"])),
    Column("inside", lambda row: yes([is_inside(row)])),
    Column(
        "bf16 speed",
        lambda row: (
            f"{row['bf16_published'] / row['bf16_predicted']:.2f}"
            if row.get("bf16_predicted")
            else None
        ),
    ),
]


def errors(rows: list[dict]) -> str:
    found = sorted(map(error_of, rows))
    return (
        f"Median error {100 * found[len(found) // 2]:.1f} %, worst {100 * found[-1]:.1f} %; "
        f"{sum(map(is_inside, rows))} of {len(rows)} in their interval."
    )


def llmq(records: Records) -> str:
    """Return LLMQ's published / predicted speeds: a row for each kind and number of chips."""
    if "published" not in records:
        return "LLMQ's runs: not yet measured."
    cells: dict[str, dict[str, str]] = {}
    for each in records["published"]["results"]:
        if each["source"].startswith("LLMQ"):
            model, chips_ = each["what"].split(", ")
            pair = f"{each['published']:.2f} / {each['predicted']:.2f}"
            cells.setdefault(chips_, {})[model] = pair
    models = sorted({model for row in cells.values() for model in row}, key=lambda m: float(m[:-1]))
    rows = [[chips_, *map(row.get, models)] for chips_, row in cells.items()]
    return table(["chips", *models], rows)


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
    rows: dict[str, list] = {}
    for each in found:
        row = rows.setdefault(each["chip"], [CARDS[each["chip"]]])
        row.append("{:.2f} ({:.2f} to {:.2f})".format(each["predicted"], *each["interval"]))
        row.append(each["published"] and f"{each['published']:.2f}")
    header = ["chip", *(f"{model}{of}" for model in models for of in ("", ", LLMQ"))]
    return table(header, list(rows.values()))


def offloaded(records: Records) -> str:
    """Return predicted steps on one RTX 4090 with optimizer states in the host."""
    if "published" not in records:
        return "Predicted steps with offload: not yet measured."
    names = {"7b": "Llama 2 7B", "7B": "Qwen 2.5 7B"}

    def batch(row: dict) -> str:
        one = f"{row['batch']} x 1,024"
        return f"{row['microbatches']} x {one}" if row["microbatches"] > 1 else one

    def rate(row: dict) -> str:
        low, middle, high = row["tokens_per_second"]
        return f"{middle:,.0f} ({low:,.0f} to {high:,.0f})"

    columns = [
        Column("model", "model", names.get),
        Column("tokens a step", batch),
        Column("peak", lambda row: f"{row['peak'] / 2**30:.1f} GiB"),
        Column("fits", lambda row: yes([row["fits"]])),
        Column("tokens/s", rate),
    ]
    for part in ("products", "casts", "attention", "other", "optimizer", "offload"):
        columns.append(Column(part, f"parts.{part}", fixed(2)))
    return Table({}, columns, lambda record: record["offloaded"]).of(records["published"])


def models(records: Records) -> str:
    """Return one row per model of each record, over all of its backends."""
    parts = []
    for features in targets.features_of(records, "models_cpu"):
        record = records[f"models_cpu_{features}"]
        standin = ""
        if record["arguments"].get("standin"):
            standin = "; ``te`` over the tests' stand-in for its kernels"
        steps = record["arguments"]["steps"]
        told = f"All backends, {steps} steps each ({where(record, features)}{standin}):"
        made = Table({}, of_models, by_model, note=published_shapes).of(record)
        parts += [textwrap.fill(told, 120), made]
    return "\n\n".join(parts or ["The architectures: not yet measured."])


# The README's own tables

FASTEST = chips.advice_for(chips.product_named("h100").gpu).backend


def summary(records: Records) -> str:
    """Return the three figures of `README.rst` by backend, of a GPU, with one line on their base."""
    rows = [
        [code(name), *(targets.shown(read, records, name) for read in targets.SUMMARY.values())]
        for name in targets.SUMMARIZED
    ]
    parts = [table(["backend", *targets.SUMMARY], rows)]
    if "step_8b_gpu" in records:
        caption = targets.CAPTION.format(chip=records["step_8b_gpu"]["machine"]["chip"])
        if "scale_loss_gpu" in records:
            seeds = targets.seeds_of(records["scale_loss_gpu"], targets.SUMMARIZED)
            caption += targets.OF_LOSSES.format(seeds=seeds)
        parts.append(textwrap.fill(caption, 120))
    return "\n\n".join(parts)


def headline(records: Records) -> str:
    """Return the measured gains of the fastest backend and of `msamp:O2`, with their base."""
    if not {"step_8b_gpu", "step_1b_gpu"} <= records.keys():
        return "Gains: not yet measured."
    whole_ = targets.one(records["step_1b_gpu"]["results"], backend=FASTEST, form="compiled")
    steps = (
        (FASTEST, targets.compiled(records, FASTEST), "four layers of Llama 8B"),
        ("msamp:O2", targets.compiled(records, "msamp:O2"), "the same"),
        (FASTEST, whole_, "a whole Llama of 1.1 billion parameters"),
    )
    lines = [
        f"* ``{backend}``: {step['times_plain']['ratio']:.2f} times as fast, "
        f"{100 - 100 * step['peak_to_plain']:.0f} % less peak memory ({what})"
        for backend, step, what in steps
    ]
    base = "On one H200 with ``torch.compile``, over compiled bf16 autocast with FP32 weights:"
    return "\n\n".join([base, "\n".join(lines)])


def choices(records: Records) -> str:
    """Return the backend to take in each case, with its gain."""
    if "published" not in records:
        return "Choices: not yet measured."

    def speed(backend: str) -> str:
        return targets.shown(targets.times_bf16, records, backend)

    def peak(backend: str) -> str:
        return targets.shown(targets.peak_to_bf16, records, backend)

    def on_cards(model: str) -> str:
        found = [each for each in records["published"]["cards"] if each["model"] == model]
        speeds = [f"{each['predicted']:.2f}" for each in found if each["chip"] != "h100"]
        return f"{min(speeds)} to {max(speeds)}"

    with_te = chips.advice_for(chips.product_named("h100").gpu, te_runs=True).backend
    cards_take = chips.advice_for(chips.product_named("rtx4090").gpu).backend
    rows = [
        [
            "H100, H200: the safe start",
            code(FASTEST),
            f"{speed(FASTEST)} times bf16, peak memory {peak(FASTEST)}; weights and Adam states stay FP32",
        ],
        [
            "H100, H200: fastest measured",
            code("msamp:O2"),
            f"{speed('msamp:O2')} times, {peak('msamp:O2')}; weights, gradients, Adam states in 8 and 16 bits",
        ],
        [
            "TransformerEngine at hand",
            code(with_te),
            f"NVIDIA's choice for H100; ``te:delayed``, measured: {speed('te:delayed')} times, {peak('te:delayed')}",
        ],
        [
            "RTX 40, RTX 50, L40S, RTX PRO 6000",
            code(cards_take),
            f"predicted: {on_cards('1.5B')} times at 1.5 billion parameters, {on_cards('7B')} at 7",
        ],
        [
            "too little memory, any GPU",
            code("msamp:O2"),
            "6 bytes a weight in place of 16; slower without FP8 units",
        ],
        [
            "all of an 8B, one card of 24 GB",
            code("msamp:O4"),
            "estimated 14 GiB, host 28 GB: ``--fp8_offload states --fp8_gradient_release true``",
        ],
        [
            "LoRA over a frozen base",
            code(FASTEST),
            "with ``--fp8_params true`` half of bf16's memory; FP8 files keep their codes",
        ],
        [
            "DDP, FSDP2, ZeRO",
            "any",
            "correct in tests over CPU processes, ``msamp`` not by ZeRO-3; speed not measured",
        ],
        [
            "a laptop: does FP8 harm the loss?",
            code(FASTEST),
            "a GPU's rounding on any machine, slowly",
        ],
    ]
    return table(["case", "take", "gain"], rows)


TABLES |= {
    "summary": summary,
    "headline": headline,
    "choices": choices,
    "answers": answers,
    "targets-cpu": targets_cpu,
    "targets-gpu": targets_gpu,
    "limits": limits,
    "predicted": predicted,
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


def in_document(name: str, records: Records) -> str:
    """Return a table as documents have it."""
    made = TABLES[name]
    return made.brief(records) if isinstance(made, Table) else made(records)


def printed(name: str, record: dict) -> None:
    """Print the table of a benchmark's own record."""
    print(TABLES[name].of(record))


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
        return f".. begin table {name}\n\n{in_document(name, records)}\n\n.. end table {name}\n"

    return _MARKED.sub(put, document)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(TABLES)}")
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
            made = written(document.read_text(encoding="utf-8"), records)
            document.write_text(made, encoding="utf-8")
        return
    for name in arguments.names or TABLES:
        print(f".. begin table {name}\n\n{TABLES[name](records)}\n\n.. end table {name}\n")


if __name__ == "__main__":
    main()
