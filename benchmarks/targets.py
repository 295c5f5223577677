"""Compare targets on a CPU and on a GPU with the benchmarks' records.

Each target is a row of data: a record, a reader of its figure, and a bound. A figure without a
record is not yet measured; a miss stays a miss. CPUs with bf16 products have other targets than
CPUs without, and each kind of CPU has separate records.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from measuring import cpu_features, table

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


def tokens(records: Records, file: str, backend: str, form: str) -> float:
    """Return tokens a second; for bare `native`, `te` and `ao` the fastest measured rule's."""
    rates = [
        each["tokens_per_second"]
        for each in records[file]["results"]
        if each["form"] == form and backend in (each["backend"], each["backend"].split(":")[0])
    ]
    if not rates:
        raise LookupError(f"{file} has no {backend}, {form}")
    return max(rates)


def speed(file: str, backend: str, other: str, form: str) -> Callable[[Records], float]:
    return lambda records: tokens(records, file, backend, form) / tokens(records, file, other, form)


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


def step_limit(file: str, backend: str, form: str) -> Callable[[Records], float]:
    """Return the share of tokens a second reached by a step with products with weights at the
    chip's peaks, attention at bf16's, and everything else free."""

    def read(records: Records) -> float:
        found = one(records[file]["results"], backend=backend, form=form)
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


_8B, _8B_TE, _1B, _LOSS = "step_8b_gpu", "step_8b_te_gpu", "step_1b_gpu", "scale_loss_gpu"
ON_GPU = (
    Target(
        "layers of Llama 8B, sequence 8192, compiled: tokens/s, native / bf16",
        speed(_8B, "native", "bf16", "compiled"),
        at_least=1.35,
    ),
    Target(
        "the same / TorchAO tensorwise",
        speed(_8B, "native", "ao:tensorwise", "compiled"),
        at_least=1.0,
    ),
    Target(
        "the same / TransformerEngine", speed(_8B_TE, "native", "te", "compiled"), at_least=0.97
    ),
    Target("the same, eager: native / bf16", speed(_8B, "native", "bf16", "eager"), at_least=1.25),
    Target(
        "Llama 1B, sequence 4096, compiled: native / bf16",
        speed(_1B, "native", "bf16", "compiled"),
        at_least=1.2,
    ),
    Target(
        "layers of Llama 8B: peak memory, ``msamp:O2`` / bf16",
        figure(_8B, "peak_to_plain", backend="msamp:O2", form="eager"),
        at_most=0.61,
    ),
    Target(
        "the same: tokens/s, ``msamp:O2`` / native",
        speed(_8B, "msamp:O2", "native", "eager"),
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
    f"{one} / {name}, tokens a second": Target("", speed(_8B, one, other, "compiled"))
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
    Target("step of 8B layers, bf16, compiled / its limit", step_limit(_8B, "bf16", "compiled")),
    Target(
        "step of 8B layers, ``native:dynamic``, compiled / its limit",
        step_limit(_8B, "native:dynamic", "compiled"),
    ),
    Target("step of Llama 1B, bf16, compiled / its limit", step_limit(_1B, "bf16", "compiled")),
    Target(
        "step of Llama 1B, ``native:dynamic``, compiled / its limit",
        step_limit(_1B, "native:dynamic", "compiled"),
    ),
)
"""Shares of the chip's limits, measured in the same run. Not targets: no bound."""


@dataclass(frozen=True)
class Figure:
    """Define one row of the main figures. `read` makes its text and raises LookupError without a
    record."""

    what: str
    file: str
    read: Callable[[dict], str]

    def shown(self, records: Records) -> str:
        try:
            return self.read(records[self.file])
        except LookupError:
            return "not yet measured"


def _peak(record: dict) -> str:
    plain, level = (one(record["results"], backend=name) for name in ("bf16", "msamp:O2"))
    return f"{100 * level['peak_tensor_bytes'] / plain['peak_tensor_bytes'] - 100:+.0f} %".replace(
        "-", "\N{MINUS SIGN}"
    )


def _bytes(record: dict) -> str:
    found = [one(record["results"], backend=f"msamp:{level}") for level in ("O1", "O2", "O3")]
    return ", ".join(f"{each['bytes_per_element']['total']:.0f}" for each in found)


def gap(mean: float, half_width: float) -> str:
    return f"{mean:+.4f} \N{PLUS-MINUS SIGN} {half_width:.4f}".replace("-", "\N{MINUS SIGN}")


def _gap(variant: str) -> Callable[[dict], str]:
    def read(record: dict) -> str:
        found = one(record["results"], variant=variant)["gap"]
        return gap(found["mean"], found["half_width"])

    return read


def _sent(record: dict) -> str:
    return f"{two_shot_bytes({'comm_cpu': record}):.2f}"


def _mean_error(record: dict) -> str:
    return f"{100 * max(each['error'] for each in record['figures'] if each['method'] == 'two-shot, 128'):.1f} %"


def _times(backend: str) -> Callable[[dict], str]:
    def read(record: dict) -> str:
        return (
            f"{one(record['results'], backend=backend, form='eager')['times_plain']['ratio']:.2f}"
        )

    return read


SUMMARIZED = ("native:dynamic", "ao:tensorwise", "te:delayed", "msamp:O2")


def seeds_of(record: dict, variants: Collection[str]) -> str:
    """Return the numbers of seeds of these variants' losses; empty for a record of anything
    else."""
    found = {each["seeds"] for each in record["results"] if each.get("variant") in variants}
    return " or ".join(map(str, sorted(found)))


def step_of(backend: str) -> str:
    """Return the record with a step of this backend."""
    return _8B_TE if backend.startswith("te:") else _8B


def _speed_on_gpu(backend: str) -> Callable[[dict], str]:
    """Read tokens a second in a compiled step, over bf16's."""
    return lambda record: (
        f"{one(record['results'], backend=backend, form='compiled')['times_plain']['ratio']:.2f}"
    )


def _peak_on_gpu(backend: str) -> Callable[[dict], str]:
    def read(record: dict) -> str:
        peak = one(record["results"], backend=backend, form="compiled")["peak_to_plain"]
        return f"{100 * peak - 100:+.0f} %".replace("-", "\N{MINUS SIGN}")

    return read


def _joined(read: Callable[[str], Callable[[dict], str]]) -> Callable[[dict], str]:
    return lambda record: ", ".join(
        read(each)(record) for each in SUMMARIZED if step_of(each) == _8B
    )


SPEED, PEAK = "speed, times bf16's", "peak memory, over bf16's"
SUMMARY = (
    (SPEED, step_of, _speed_on_gpu),
    (PEAK, step_of, _peak_on_gpu),
    ("change in held-out loss, nats", lambda backend: _LOSS, _gap),
)
"""The figures of `README.rst`: the column, and the record and a reader of each backend."""
CAPTION = (
    "{chip}, against bf16 autocast over FP32 weights: four layers of Llama 8B, compiled, 8,192 tokens a "
    "step."
)
OF_LOSSES = (
    " Losses, with 95 % intervals: 10.7 million parameters, 160 steps, {seeds} seeds; too small to "
    "promise anything at 8 billion, so ``fp8-backends compare`` before a long run."
)


def of_summary(what: str, backend: str) -> Figure:
    """Return a figure of SUMMARY for a backend."""
    ((record, reader),) = [
        (of(backend), read(backend)) for name, of, read in SUMMARY if name == what
    ]
    return Figure(what, record, reader)


FIGURES = (
    Figure(
        "training bytes per weight element, ``msamp:O1``, ``O2``, ``O3`` (bf16: 16)",
        "memory_cpu",
        _bytes,
    ),
    Figure(
        "peak bytes of a step's tensors, ``msamp:O2`` / bf16 autocast (115 M parameters, 64 "
        "tokens)",
        "memory_cpu",
        _peak,
    ),
    Figure("bytes of gradients sent between ranks, FP8 / FP32", "comm_cpu", _sent),
    Figure(
        "relative error of a mean of gradients sent in FP8, 2 to 32 ranks",
        "gradient_mean_cpu",
        _mean_error,
    ),
    Figure(
        "time of a step through Accelerate / of a hand-written TorchAO loop",
        "overhead_cpu",
        lambda record: f"{record['ratio']['ratio']:.3f}",
    ),
    Figure(
        "tokens/s on this CPU / bf16's, ``native:dynamic`` (FP8 is emulated)",
        "step_cpu",
        _times("native:dynamic"),
    ),
    Figure("the same, ``ao:tensorwise``", "step_cpu", _times("ao:tensorwise")),
)
"""Of the usual CPU with bf16 products."""
FIGURES_ON_GPU = (
    Figure(
        "**on a GPU**, four layers of Llama 8B, compiled: tokens/s / bf16's, ``native``, ``ao``, "
        "``msamp:O2``",
        _8B,
        _joined(_speed_on_gpu),
    ),
    Figure("peak memory of that step, over bf16's", _8B, _joined(_peak_on_gpu)),
    Figure(
        "held-out loss minus bf16's, nats, ``native:dynamic`` (10.7 M parameters)",
        _LOSS,
        _gap("native:dynamic"),
    ),
    Figure("the same, ``msamp:O2``", _LOSS, _gap("msamp:O2")),
)


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
