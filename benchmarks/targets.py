"""Compare targets on a CPU and on a GPU with the benchmarks' records.

Each target is a row of data: a record, a reader of its figure, and a bound. A figure without a
record is not yet measured; a miss stays a miss. CPUs with bf16 products have other targets than
CPUs without, and each kind of CPU has separate records.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from measuring import DTYPES, cpu_features, table

Records = dict[str, dict]
"""By the name of the file without its ending, such as `linear_cpu_avx512_bf16` or `step_1b_gpu`."""
USUAL = ("avx512_bf16", "avx2")
"""The two documented CPUs, one with bf16 products and one without, by features."""


@dataclass(frozen=True)
class Target:
    """Define one figure and its bound. `read` takes all records and raises LookupError if an entry
    is missing."""

    what: str
    read: Callable[[Records], float]
    at_most: float | None = None
    at_least: float | None = None

    def value(self, records: Records) -> float | None:
        """None: not yet measured."""
        try:
            return self.read(records)
        except LookupError:
            return None

    def bound(self) -> str:
        if self.at_most is None and self.at_least is None:
            return "-"
        return (
            f"at most {self.at_most:.3g}"
            if self.at_most is not None
            else f"at least {self.at_least:.3g}"
        )

    def verdict(self, records: Records) -> str:
        value = self.value(records)
        if value is None:
            return "not yet measured"
        if self.at_most is None and self.at_least is None:
            return ""
        met = value <= self.at_most if self.at_most is not None else value >= self.at_least
        return "met" if met else "missed"


def load(folder: Path) -> Records:
    return {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}


def has_bf16(features: str) -> bool:
    """Tell if a CPU with this name in its records multiplies bf16 in hardware."""
    return features.endswith("bf16")


def features_of(records: Records, file: str | None = None) -> list[str]:
    """Return the CPUs with records, or with a record of one question, such as `linear_cpu`: the
    usual ones first, then by name."""
    split = [name.partition("_cpu_") for name in records]
    found = {
        features
        for question, _, features in split
        if features and file in (None, f"{question}_cpu")
    }
    return sorted(
        found, key=lambda features: (features not in USUAL, not has_bf16(features), features)
    )


def of_cpu(records: Records, features: str) -> Records:
    """The records of one kind of CPU, without its features in their names: `linear_cpu`."""
    end = f"_cpu_{features}"
    return {
        name.removesuffix(f"_{features}"): record
        for name, record in records.items()
        if name.endswith(end)
    }


def of_any_cpu(records: Records) -> Records:
    """Return the records, with the first CPU's of each question under `linear_cpu` and the like."""
    questions = {name.partition("_cpu_")[0] for name in records if "_cpu_" in name}
    first = {f"{each}_cpu": features_of(records, f"{each}_cpu")[0] for each in questions}
    return records | {name: records[f"{name}_{features}"] for name, features in first.items()}


def one(results: list[dict], **wanted) -> dict:
    """The only result with these values."""
    found = [
        each for each in results if all(each.get(key) == value for key, value in wanted.items())
    ]
    if len(found) != 1:
        raise LookupError(f"{len(found)} results with {wanted}")
    return found[0]


def ratio_of(file: str, key: str, **wanted) -> Callable[[Records], float]:
    """A ratio, paired by round, of one result of a file."""
    return lambda records: one(records[file]["results"], **wanted)[key]["ratio"]


def figure(file: str, key: str, **wanted) -> Callable[[Records], float]:
    """A plain figure of one result of a file."""
    return lambda records: one(records[file]["results"], **wanted)[key]


def tokens(results: list[dict], backend: str) -> float:
    """Return tokens a second; for bare `native`, `te` and `ao` the fastest measured rule's."""
    rates = [
        each["tokens_per_second"]
        for each in results
        if backend in (each["backend"], each["backend"].split(":")[0])
    ]
    if not rates:
        raise LookupError(f"there is no {backend}")
    return max(rates)


def speed(file: str, backend: str, other: str) -> Callable[[Records], float]:
    """Read the ratio of tokens a second of compiled steps."""

    def read(records: Records) -> float:
        found = [each for each in records[file]["results"] if each["form"] == "compiled"]
        return tokens(found, backend) / tokens(found, other)

    return read


def speed_eager(backend: str, other: str) -> Callable[[Records], float]:
    return lambda records: tokens(eager(records), backend) / tokens(eager(records), other)


def eager(records: Records) -> list[dict]:
    """Return the eager steps of four layers of Llama 8B; older records have them with the compiled
    ones."""
    file = _8B_EAGER if _8B_EAGER in records else _8B
    return [each for each in records[file]["results"] if each["form"] == "eager"]


def over(
    key: str, per: str | None = None, group: str = "results", file: str = "prepare_cpu"
) -> Callable:
    """The largest of a figure over all results of a list, relative to another figure of the same
    result."""

    def read(records: Records) -> float:
        values = [each[key] for each in records[file][group]]
        values = [each["ratio"] if isinstance(each, dict) else each for each in values]
        if None in values or not values:
            raise LookupError(f"{file} has not all of {key}")
        return max(
            v / each[per] if per else v
            for v, each in zip(values, records[file][group], strict=True)
        )

    return read


def of_limit(
    rate: Callable[[Records], float], limit: Callable[[Records], float]
) -> Callable[[Records], float]:
    return lambda records: rate(records) / limit(records)


def fp8_peak(records: Records) -> float:
    """FLOP/s of the best FP8 product of the same run."""
    best = records["limits_gpu"]["best_flops_per_second"]
    return max(rate for name, rate in best.items() if name.startswith("FP8"))


def bf16_peak(records: Records) -> float:
    return records["limits_gpu"]["best_flops_per_second"]["bf16"]


def best_linear(backend: str) -> Callable[[Records], float]:
    """FLOP/s of the widest layer, forward and backward, of the faster form."""

    def read(records: Records) -> float:
        results = [
            r
            for name in ("linear_eager_gpu", "linear_compiled_gpu")
            for r in records.get(name, {"results": []})["results"]
        ]
        rates = [each["tflops"] * 1e12 for each in results if each["backend"] == backend]
        if not rates:
            raise LookupError(f"no linear layer of {backend}")
        return max(rates)

    return read


def step_limit(file: str, backend: str) -> Callable[[Records], float]:
    """Return the share of tokens a second reached by a step with products with weights at the
    chip's peaks, attention at bf16's, and everything else free."""

    def read(records: Records) -> float:
        found = one(records[file]["results"], backend=backend, form="compiled")
        weights, attention = found["flops"]["weights"], found["flops"]["attention"]
        in_fp8 = weights * found["flops_share"]
        seconds = in_fp8 / fp8_peak(records) + (weights - in_fp8 + attention) / bf16_peak(records)
        return seconds / found["median_s"]

    return read


def quantize_share(kernel: str) -> Callable[[Records], float]:
    """Return the share of the copy's bandwidth, for the largest matrix."""

    def read(records: Records) -> float:
        of_kernel = [
            each for each in records["quantize_gpu"]["kernels"] if each["kernel"] == kernel
        ]
        if not of_kernel:
            raise LookupError(f"quantize_gpu has no {kernel}")
        return max(of_kernel, key=lambda each: each["shape"][0] * each["shape"][1])["share_of_copy"]

    return read


def two_shot_bytes(records: Records) -> float:
    """Return the bytes for the largest gradient."""
    reduced = [
        each for each in records["comm_cpu"]["collectives"] if each["collective"] == "all-reduce"
    ]
    return max(reduced, key=lambda each: each["elements"])["bytes_over"]["FP32"]


_GATE = [8192, 4096, 14336]
_EAGER = {"backend": "native:dynamic", "form": "eager"}
ON_CPU = (
    Target(
        "linear, forward + backward: ``native:dynamic`` / TorchAO tensorwise, eager",
        ratio_of("linear_cpu", "to_torchao", **_EAGER),
        at_most=0.5,
    ),
    Target("the same / plain bf16", ratio_of("linear_cpu", "to_plain", **_EAGER), at_most=1.6),
    Target(
        "the same: ``native:delayed`` / ``native:dynamic``",
        ratio_of("linear_cpu", "to_dynamic", backend="native:delayed", form="eager"),
        at_most=1.0,
    ),
    Target(
        "optimizer step, O2 / TorchAO's AdamWFp8",
        ratio_of("optimizer_cpu", "to_torchao", step="O2"),
        at_most=0.3,
    ),
    Target(
        "the same / ``torch.optim.AdamW(fused=True)``",
        ratio_of("optimizer_cpu", "to_fused", step="O2"),
        at_most=3.5,
    ),
    Target(
        "its bytes / FP32's",
        lambda r: figure("optimizer_cpu", "bytes", step="O2")(r) / 16,
        at_most=0.3751,
    ),
    Target(
        "adapter / hand-written TorchAO loop",
        lambda records: records["overhead_cpu"]["ratio"]["ratio"],
        at_most=1.02,
    ),
    Target("FP8 two-shot all-reduce, bytes sent / FP32's", two_shot_bytes, at_most=0.26),
    Target("``prepare`` of 4,000 Linears / of 2,000", over("ratio", group="growth"), at_most=2.2),
    Target(
        "``prepare`` of 8 billion parameters on the meta device, s",
        over("seconds", group="on_meta"),
        at_most=10,
    ),
    Target(
        "``prepare``, memory added / weights", over("added", "weights", group="memory"), at_most=0.5
    ),
    Target(
        "``import fp8_backends`` / ``import accelerate``",
        lambda records: records["import_time_cpu"]["to_accelerate"]["fp8_backends"]["ratio"],
        at_most=1.3,
    ),
)
"""Claims for CPUs with bf16 products. The largest over all backends, unless a backend is named."""

ON_CPU_WITHOUT_BF16 = (
    Target(
        "``native:dynamic`` linear fwd+bwd 1024x2048x2048, FP32 around it / plain FP32",
        ratio_of("linear_cpu", "to_plain", **_EAGER, dtype="fp32"),
        at_most=1.6,
    ),
    Target(
        "the same / TorchAO tensorwise",
        ratio_of("linear_cpu", "to_torchao", **_EAGER, dtype="fp32"),
        at_most=0.5,
    ),
    Target(
        "the same with bf16 results / plain bf16",
        ratio_of("linear_cpu", "to_plain", **_EAGER, dtype="bf16"),
        at_most=1.0,
    ),
    Target(
        "adapter overhead", lambda records: records["overhead_cpu"]["ratio"]["ratio"], at_most=1.02
    ),
)


def on_cpu(features: str) -> tuple[Target, ...]:
    return ON_CPU if has_bf16(features) else ON_CPU_WITHOUT_BF16


_8B = "step_8b_gpu"
_8B_TE = "step_8b_te_gpu"
_8B_EAGER = "step_8b_eager_gpu"
_1B = "step_1b_gpu"
_LOSS = "scale_loss_gpu"
ON_GPU = (
    Target(
        "layers of Llama 8B, sequence 8192, compiled: tokens/s, native / bf16",
        speed(_8B, "native", "bf16"),
        at_least=1.35,
    ),
    Target(
        "the same / TorchAO tensorwise",
        speed(_8B, "native", "ao:tensorwise"),
        at_least=1.0,
    ),
    Target("the same / TransformerEngine", speed(_8B_TE, "native", "te"), at_least=0.97),
    Target("the same, eager: native / bf16", speed_eager("native", "bf16"), at_least=1.25),
    Target(
        "Llama 1B, sequence 4096, compiled: native / bf16",
        speed(_1B, "native", "bf16"),
        at_least=1.2,
    ),
    Target(
        "layers of Llama 8B: peak memory, ``msamp:O2`` / bf16",
        lambda records: one(eager(records), backend="msamp:O2")["peak_to_plain"],
        at_most=0.61,
    ),
    Target(
        "the same: tokens/s, ``msamp:O2`` / native",
        speed_eager("msamp:O2", "native"),
        at_least=1.0,
    ),
    Target(
        "optimizer kernel, O2: bandwidth / a copy's",
        figure("optimizer_gpu", "copy_share", step="O2"),
        at_least=0.8,
    ),
    Target(
        "quantize kernel, ``delayed``: bandwidth / a copy's",
        quantize_share("delayed, both layouts"),
        at_least=0.7,
    ),
    Target(
        "quantize kernels, ``dynamic``: the same",
        quantize_share("dynamic, both layouts"),
        at_least=0.7,
    ),
)
"""`native` is the faster of its rules."""

PREDICTED = {
    f"{one} / {name}, tokens a second": Target("", speed(_8B, one, other))
    for rule in ("native:dynamic", "native:delayed")
    for one, name, other in (
        (rule, "bf16", "bf16"),
        (rule, "TorchAO", "ao:tensorwise"),
        ("msamp:O2", rule, rule),
    )
} | {"msamp:O2 / bf16, peak bytes, eager": ON_GPU[5]}
"""Measured figures, by the name of their prediction."""

AGAINST_LIMITS = (
    Target("bf16 product, TFLOP/s", lambda records: bf16_peak(records) / 1e12),
    Target("FP8 product, TFLOP/s", lambda records: fp8_peak(records) / 1e12),
    Target(
        "copy, GB/s read plus written",
        lambda records: records["limits_gpu"]["copy"]["bytes_per_second"] / 1e9,
    ),
    Target(
        "linear, ``native:dynamic`` / FP8 peak", of_limit(best_linear("native:dynamic"), fp8_peak)
    ),
    Target(
        "linear, ``native:delayed`` / FP8 peak", of_limit(best_linear("native:delayed"), fp8_peak)
    ),
    Target("linear, bf16 / bf16 peak", of_limit(best_linear("bf16"), bf16_peak)),
    Target("step of 8B layers, bf16, compiled / its limit", step_limit(_8B, "bf16")),
    Target(
        "step of 8B layers, ``native:dynamic``, compiled / its limit",
        step_limit(_8B, "native:dynamic"),
    ),
    Target("step of Llama 1B, bf16, compiled / its limit", step_limit(_1B, "bf16")),
    Target(
        "step of Llama 1B, ``native:dynamic``, compiled / its limit",
        step_limit(_1B, "native:dynamic"),
    ),
)
"""Shares of the chip's limits, measured in the same run. Not targets: no bound."""


@dataclass(frozen=True)
class Figure:
    """Define one row of the answers. `read` makes its text and raises LookupError without a
    record."""

    what: str
    read: Callable[[Records], str]
    records: str
    """Names of its records, without a CPU's features; the first is read."""

    def shown(self, records: Records) -> str:
        try:
            return self.read(records)
        except LookupError:
            return "not yet measured"


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:+.{digits}f} %".replace("-", "\N{MINUS SIGN}")


def gap(mean: float, half_width: float) -> str:
    return f"{mean:+.4f} \N{PLUS-MINUS SIGN} {half_width:.4f}".replace("-", "\N{MINUS SIGN}")


SUMMARIZED = ("native:dynamic", "ao:tensorwise", "te:delayed", "msamp:O2")


def seeds_of(record: dict, variants: Collection[str]) -> str:
    """Return the numbers of seeds of these variants' losses; empty for a record of anything
    else."""
    found = {each["seeds"] for each in record["results"] if each.get("variant") in variants}
    return " or ".join(map(str, sorted(found)))


def compiled(records: Records, backend: str) -> dict:
    """Return a backend's compiled step of four layers of Llama 8B; `te` ran on another day."""
    file = _8B_TE if backend.startswith("te:") else _8B
    return one(records[file]["results"], backend=backend, form="compiled")


def times_bf16(records: Records, backend: str) -> str:
    return f"{compiled(records, backend)['times_plain']['ratio']:.2f}"


def peak_to_bf16(records: Records, backend: str) -> str:
    return percent(compiled(records, backend)["peak_to_plain"] - 1, 0)


def loss_gap(records: Records, backend: str) -> str:
    found = one(records[_LOSS]["results"], variant=backend)["gap"]
    return gap(found["mean"], found["half_width"])


SUMMARY = {
    "speed, times bf16's": times_bf16,
    "peak memory, over bf16's": peak_to_bf16,
    "change in held-out loss, nats": loss_gap,
}
"""The figures of `README.rst`: the column, and the reader of each backend."""


def shown(read: Callable[[Records, str], str], records: Records, backend: str) -> str:
    """Return a figure of SUMMARY for a backend."""
    return Figure("", lambda known: read(known, backend), "").shown(records)


CAPTION = (
    "{chip}, against bf16 autocast over FP32 weights: four layers of Llama 8B, compiled, 8,192 tokens a "
    "step."
)
OF_LOSSES = (
    " Losses, with 95 % intervals: 10.7 million parameters, 160 steps, {seeds} seeds; too small to "
    "promise anything at 8 billion, so ``fp8-backends compare`` before a long run."
)


def _together(read: Callable[[Records, str], str]) -> Callable[[Records], str]:
    names = [each for each in SUMMARIZED if not each.startswith("te:")]
    return lambda records: ", ".join(read(records, each) for each in names)


def _peak(records: Records) -> str:
    results = records["memory_cpu"]["results"]
    plain, level = (
        one(results, backend=name)["peak_tensor_bytes"] for name in ("bf16", "msamp:O2")
    )
    return percent(level / plain - 1, 0)


def _bytes(records: Records) -> str:
    results = records["memory_cpu"]["results"]
    found = [one(results, backend=f"msamp:{level}") for level in ("O1", "O2", "O3")]
    return ", ".join(f"{each['bytes_per_element']['total']:.0f}" for each in found)


def _mean_error(records: Records) -> str:
    figures = records["gradient_mean_cpu"]["figures"]
    errors = [each["error"] for each in figures if each["method"] == "two-shot, 128"]
    return f"{100 * max(errors):.1f} %"


def _times(backend: str) -> Callable[[Records], str]:
    return lambda records: (
        f"{ratio_of('step_cpu', 'times_plain', backend=backend, form='eager')(records):.2f}"
    )


def _ends(values: Iterable[float], form: str) -> str:
    """Return the least and the greatest of some values."""
    found = list(values)
    ends = dict.fromkeys(f"{end:{form}}" for end in (min(found), max(found)))
    return " to ".join(ends).replace("-", "\N{MINUS SIGN}")


def _gaps(file: str, key: str = "results", backend: str = "") -> Callable[[Records], str]:
    """Return the range of a backend's gaps to plain training in a record, or of all backends'."""

    def read(records: Records) -> str:
        found = [each for each in records[file][key] if each["backend"] not in DTYPES]
        gaps = [each["gap"]["mean"] for each in found if backend in ("", each["backend"])]
        return _ends(gaps, "+.4f")

    return read


def _after_all(records: Records) -> str:
    last = [run["points"][-1]["held_out_loss"] for run in records["long_run_cpu"]["runs"]]
    return ", ".join(f"{each - last[0]:+.4f}" for each in last[1:])


def _checked(*files: str) -> Callable[[Records], str]:
    def read(records: Records) -> str:
        checks = [each["passed"] for file in files for each in records[file]["checks"]]
        return f"{sum(checks)} of {len(checks)} pass"

    return read


def _equal(records: Records) -> str:
    rows = records["sums_gpu"]["by_depth"]
    equal, results = (sum(each[name] for each in rows) for name in ("emulated", "results"))
    return f"{equal:,} of {results:,}"


def _range_of(file: str, key: str, form: str) -> Callable[[Records], str]:
    """Return the ends of a ratio over the results of a record."""
    return lambda records: _ends(
        (each["ratio"][key] for each in records[file]["results"] if key in each["ratio"]), form
    )


def _monitored(records: Records) -> str:
    return (
        _ends((100 * each["share"] for each in records["monitor_cost_cpu"]["recipes"]), ".1f")
        + " %"
    )


def _predicted(records: Records) -> str:
    found = records["published"]["results"]
    return f"{100 * statistics.median(map(error_of, found)):.1f} %"


def error_of(row: dict) -> float:
    return abs(row["predicted"] / row["published"] - 1)


def _frozen(records: Records) -> str:
    results = records["frozen_base_cpu"]["results"]
    plain, *others = (
        one(results, base=base, scaling="rowwise")["peak"] for base in ("bf16", "FP8", "NVFP4")
    )
    return ", ".join(percent(each / plain - 1, 0) for each in others)


def _advised(records: Records) -> str:
    return _ends(
        (each["ratio"] for each in records["advise_cpu"]["results"] if each["advised"]), ".2f"
    )


def _policy_gaps(records: Records) -> str:
    results = records["rollouts_cpu"]["results"]
    gaps = (one(results, setting=name)["gap"]["mean"] for name in ("codes", "bf16"))
    return ", ".join(f"{each:.2g}" for each in gaps)


def _faster(records: Records) -> str:
    results = records["by_ranks_cpu"]["results"]
    return f"{1 + one(results, ranks=2, backend='native:dynamic')['faster']:.2f}"


def _parity(records: Records) -> str:
    results = records["te_parity_gpu"]["results"]
    return f"{sum(each['equal'] for each in results)} of {len(results)} trainings"


def _learnt(records: Records) -> str:
    results = records["models_cpu"]["results"]
    learn = sum(each["losses"][-1] < each["losses"][0] for each in results)
    return f"{learn} of {len(results)}"


FIGURES = (
    Figure(
        "tokens/s over bf16's, four layers of Llama 8B, compiled: ``native``, ``ao``, ``msamp:O2``",
        _together(times_bf16),
        "step_8b_gpu step_8b_te_gpu step_1b_gpu",
    ),
    Figure("peak memory of that step, over bf16's", _together(peak_to_bf16), "step_8b_gpu"),
    Figure(
        "tokens/s on a CPU over bf16's, ``native:dynamic`` (FP8 is emulated)",
        _times("native:dynamic"),
        "step_cpu",
    ),
    Figure("the same, ``ao:tensorwise``", _times("ao:tensorwise"), "step_cpu"),
    Figure(
        "tokens/s on two ranks over gloo, over bf16's, ``native:dynamic``", _faster, "by_ranks_cpu"
    ),
    Figure(
        "time of a linear layer, 8192 x 4096 x 14336, over bf16's, ``native:dynamic``, eager",
        lambda records: (
            f"{ratio_of('linear_eager_gpu', 'to_plain', **_EAGER, shape=_GATE)(records):.2f}"
        ),
        "linear_eager_gpu linear_cpu",
    ),
    Figure(
        "bandwidth of the optimizer's kernel over a copy's, O2",
        lambda records: f"{figure('optimizer_gpu', 'copy_share', step='O2')(records):.2f}",
        "optimizer_gpu optimizer_cpu",
    ),
    Figure(
        "the same of a cast, ``native:dynamic``",
        lambda records: f"{quantize_share('dynamic, both layouts')(records):.2f}",
        "quantize_gpu",
    ),
    Figure(
        "FP8 products, TFLOP/s", lambda records: f"{fp8_peak(records) / 1e12:,.0f}", "limits_gpu"
    ),
    Figure(
        "time of a step through Accelerate over a hand-written TorchAO loop's",
        lambda records: f"{records['overhead_cpu']['ratio']['ratio']:.3f}",
        "overhead_cpu",
    ),
    Figure(
        "``import fp8_backends`` over ``import accelerate``",
        lambda records: (
            f"{records['import_time_cpu']['to_accelerate']['fp8_backends']['ratio']:.2f}"
        ),
        "import_time_cpu",
    ),
    Figure(
        "``prepare`` of 8 billion parameters on the meta device, at most, s",
        lambda records: f"{over('seconds', group='on_meta')(records):.2f}",
        "prepare_cpu",
    ),
    Figure(
        "time of a sampling monitor, one step in 100", _monitored, "monitor_cost_cpu monitor_sample"
    ),
    Figure("published speeds, predicted: median error", _predicted, "published"),
    Figure(
        "training bytes per weight element, ``msamp:O1``, ``O2``, ``O3`` (bf16: 16)",
        _bytes,
        "memory_cpu memory_8b",
    ),
    Figure(
        "peak bytes of a step's tensors, ``msamp:O2`` over bf16's (115 M parameters, 64 tokens)",
        _peak,
        "memory_cpu",
    ),
    Figure("LoRA's peak over a frozen bf16 base's: FP8, NVFP4", _frozen, "frozen_base_cpu"),
    Figure(
        "estimated peak over the measured one",
        _range_of("estimate_cpu", "peak", ".2f"),
        "estimate_cpu",
    ),
    Figure(
        "bytes of gradients sent between ranks, FP8 over FP32",
        lambda records: f"{two_shot_bytes(records):.2f}",
        "comm_cpu wire_cpu",
    ),
    Figure(
        "relative error of a mean of gradients sent in FP8, 2 to 32 ranks",
        _mean_error,
        "gradient_mean_cpu",
    ),
    Figure(
        "held-out loss minus plain training's, nats, ``native:dynamic`` (10.7 M parameters)",
        lambda records: loss_gap(records, "native:dynamic"),
        "scale_loss_gpu scale_loss_1000_gpu scale_loss_cpu",
    ),
    Figure(
        "the same, ``msamp:O2``", lambda records: loss_gap(records, "msamp:O2"), "scale_loss_gpu"
    ),
    Figure(
        "the same, model of ``compare``, ``msamp:O2``",
        _gaps("levels_loss_cpu", "results", "msamp:O2"),
        "levels_loss_cpu comparison_cpu",
    ),
    Figure(
        "the same after a fine-tune with small learning rates, ``msamp:O2``",
        _gaps("finetune_cpu", "summaries", "msamp:O2"),
        "finetune_cpu",
    ),
    Figure(
        "the same of four mixtures of experts, ``msamp:O2`` and ``O4``",
        _gaps("experts_cpu"),
        "experts_cpu",
    ),
    Figure("the same after 20,000 steps, ``msamp:O2``, ``O4``", _after_all, "long_run_cpu"),
    Figure(
        "policy gap of GRPO's rollouts, nats: FP8 on both sides, bf16 trainer",
        _policy_gaps,
        "rollouts_cpu",
    ),
    Figure("gradient's error left by ``advise``, where it helps", _advised, "advise_cpu"),
    Figure("architectures with every backend: losses fall", _learnt, "models_cpu"),
    Figure("results of tensor cores emulated to the bit", _equal, "sums_gpu tensor_cores"),
    Figure(
        "GPU's numbers against a CPU's, and messages over NCCL",
        _checked("check_eager_gpu", "check_features_gpu", "wire_gpu"),
        "check_eager_gpu check_features_gpu wire_gpu",
    ),
    Figure(
        "``te`` equal to TransformerEngine's own loop to the bit",
        _parity,
        "te_parity_gpu te_golden_H200",
    ),
)
"""Answers, each from the first record of its question."""


def rows(targets: tuple[Target, ...], records: Records) -> list[list[str]]:
    """Return rows of claim, figure, bound, verdict."""
    found = []
    for target in targets:
        value = target.value(records)
        shown = "-" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"
        found.append([target.what, shown, target.bound(), target.verdict(records)])
    return found


def report(targets: tuple[Target, ...], records: Records) -> str:
    """Return `rows` as plain text; without bounds and verdicts if no target has a bound."""
    found = [[cell.replace("``", "") for cell in row] for row in rows(targets, records)]
    if all(target.bound() == "-" for target in targets):
        return table(["against the limit of the hardware", "measured"], [row[:2] for row in found])
    return table(["target", "measured", "bound", "verdict"], found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="with the records")
    parser.add_argument(
        "--on", default=cpu_features(), help="gpu, or a CPU's features (default: this machine's)"
    )
    arguments = parser.parse_args()
    records, on = load(arguments.folder), arguments.on
    if on == "gpu":
        print(report(AGAINST_LIMITS, records), report(ON_GPU, records), sep="\n\n", end="\n\n")
    else:
        print(report(on_cpu(on), of_cpu(records, on)), end="\n\n")


if __name__ == "__main__":
    main()
