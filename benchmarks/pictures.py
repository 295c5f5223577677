"""Draw the pictures of the README and the guides, in light and dark, from records and from the
package.

    benchmarks/pictures.py                            prints the name and size of each picture
    benchmarks/pictures.py --write                    writes them to fp8_backends/docs/pictures
    benchmarks/pictures.py --record memory,monitor    first writes the records of these two pictures, in minutes

A picture is an SVG of 440 units across: its texts stay readable on a telephone. Colours and marks
are those of the package's own pages (`fp8_backends/tools/page.css`). A test compares the files with
the records.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import NamedTuple

import targets
from tables import dated

from fp8_backends.compute import chips
from fp8_backends.states.levels import STATE_FORMATS
from fp8_backends.tools import page
from fp8_backends.tools.compare import summary
from fp8_backends.tools.monitor import Samples, lost_db, read_samples
from fp8_backends.tools.terminal import with_minus_signs

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
PICTURES = HERE.parent / "fp8_backends" / "docs" / "pictures"
STYLE = Path(page.__file__).parent / "page.css"

WIDTH, MARGIN = 440, 18
SHOWN_WIDTH = 520
"""Pixels across where the page has room: body text of 16 pixels."""
GIGA = 1e9


# The drawing


def colors(theme: str) -> dict[str, str]:
    """Return the colours of page.css by name (`ink`, `c1`, …): `light`, or `dark`."""
    light, dark = re.findall(r":root \{(.*?)\}", STYLE.read_text(encoding="utf-8"), re.S)
    found = dict(re.findall(r"--([\w-]+): (#\w+);", light))
    return found | dict(re.findall(r"--([\w-]+): (#\w+);", dark)) if theme == "dark" else found


def chart_rules() -> str:
    """Return the rules of page.css for marks inside a drawing."""
    rules = re.findall(r"^svg [^{]*\{[^}]*\}", STYLE.read_text(encoding="utf-8"), re.M)
    return "\n".join(" ".join(rule.split()) for rule in rules)


@dataclass
class Picture:
    """A column of headings, bars and texts; `y` is the height so far."""

    title: str
    description: str = ""
    parts: list[str] = field(default_factory=list)
    y: float = MARGIN

    def text(
        self, x: float, words: str, css: str = "", anchor: str = "start", down: float = 0
    ) -> None:
        name = f' class="{css}"' if css else ""
        moved = f' text-anchor="{anchor}"' if anchor != "start" else ""
        self.parts.append(
            f'<text x="{x:g}" y="{self.y + down:g}"{name}{moved}>{escape(words)}</text>'
        )

    def rect(
        self, x: float, y: float, width: float, height: float, color: str, more: str = ""
    ) -> None:
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{height:g}" '
            f'fill="var(--{color})"{more}/>'
        )

    def heading(self, words: str) -> None:
        for line in textwrap.wrap(words, 44):
            self.y += 19
            self.text(MARGIN, line, "heading")
        self.y += 10

    def note(self, words: str) -> None:
        self.y += 4
        for line in textwrap.wrap(words, 60):
            self.y += 17
            self.text(MARGIN, line, "note")

    def legend(self, names: Iterable[tuple[str, str]]) -> None:
        """Name colours, in as many lines as they need."""
        x = MARGIN
        self.y += 14
        for name, color in names:
            width = 26 + 7.4 * len(name)
            if x > MARGIN and x + width > WIDTH - MARGIN:
                x, self.y = MARGIN, self.y + 20
            self.rect(x, self.y - 10, 11, 11, color, ' rx="3"')
            self.text(x + 16, name, "note")
            x += width
        self.y += 8

    def row(self, name: str, label: str) -> None:
        self.y += 22
        self.text(MARGIN, name, "row-label")
        self.text(WIDTH - MARGIN, label, "value", "end")

    def bar(
        self, parts: Sequence[tuple[float, str]], largest: float, height: int = 16, labels: str = ""
    ) -> None:
        """Draw (value, colour) side by side; `labels` formats the values inside, where they have
        room."""
        scale, x = (WIDTH - 2 * MARGIN) / largest, float(MARGIN)
        self.y += 7
        for value, color in parts:
            self.rect(x, self.y, max(value * scale - 1, 0.5), height, color)
            words = labels.format(value) if labels else ""
            if words and value * scale > 8 * len(words) + 4:
                middle, css = x + value * scale / 2, f"on {color}"
                self.text(middle, words, css, "middle", height / 2 + 4.5)
            x += value * scale
        self.y += height

    def chart(self, html: str, left: int = 0) -> None:
        """Add a chart of `page`, which measures in percent of its own width."""
        drawing = html[html.index("<svg") : html.rindex("</svg>") + 6]
        height = int(re.match(r'<svg height="(\d+)', drawing)[1])
        place = f'x="{MARGIN + left}" y="{self.y:g}" width="{WIDTH - 2 * MARGIN - left}" overflow="visible"'
        self.parts.append(re.sub(r'^<svg (height="\d+") [^>]*>', rf"<svg {place} \1>", drawing))
        self.y += height

    def svg(self, theme: str) -> str:
        known = colors(theme)
        inside = "".join(
            f".on.{name} {{ fill: {readable_on(color)}; }}\n"
            for name, color in known.items()
            if f"on {name}" in self.used
        )
        body = "\n".join(self.parts)
        height = math.ceil(self.y + MARGIN)
        drawn = f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{SHOWN_WIDTH}" \
height="{round(height * SHOWN_WIDTH / WIDTH)}" role="img" aria-labelledby="title description">
<title id="title">{escape(self.title)}</title>
<desc id="description">{escape(self.description)}</desc>
<style>
svg {{ font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }}
{chart_rules()}
svg .heading {{ fill: var(--ink); font-size: 15px; font-weight: 620; }}
svg .row-label, svg .value {{ font-size: 14px; }}
svg .code {{ fill: var(--ink); font: 600 14px ui-monospace, "SF Mono", Menlo, Consolas, monospace; }}
svg .plain {{ fill: var(--ink); font-size: 14px; }}
{inside}</style>
<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="12" fill="var(--card)" stroke="var(--rule)"/>
{body}
</svg>
"""
        return re.sub(r"var\(--([\w-]+)\)", lambda name: known[name[1]], drawn)

    @property
    def used(self) -> str:
        return "\n".join(self.parts)


def luminance(color: str) -> float:
    """Return the relative luminance of #rrggbb (WCAG)."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(first: str, second: str) -> float:
    high, low = sorted((luminance(first), luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def readable_on(color: str) -> str:
    return max(("#ffffff", "#000000"), key=lambda ink: contrast(ink, color))


# Records


def record(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def plain(version: str) -> str:
    return version.split("+")[0]


def percent(ratio: float) -> str:
    return targets.percent(ratio - 1, 0)


# The pictures


def comparison() -> Picture:
    """Losses, memory and bytes of a parameter by backend, from a run of `fp8-backends compare`."""
    results = record("comparison_cpu_avx2")
    rows, reference = summary.rows(results), summary.reference_of(results)
    others = [row.backend for row in rows if row.backend != reference]
    color = {name: f"c{number}" for number, name in enumerate(others, 1)} | {reference: "reference"}
    expected = summary.held_out_losses(results, reference)
    settings, machine = results["settings"], results["machine"]
    parameters = results["backends"][reference]["inspection"]["parameters"]
    name, plain_row = shown(reference), next(row for row in rows if row.backend == reference)
    beyond = 1 - parameters * plain_row.bytes_per_parameter / plain_row.peak_memory_bytes
    picture = Picture("FP8 backends compared: loss and memory")
    picture.heading(f"Held-out loss minus {name}'s, nats")
    intervals = []
    for row in rows:
        if row.gap is not None:
            losses = summary.held_out_losses(results, row.backend)
            points = [losses[seed] - expected[seed] for seed in losses]
            label = with_minus_signs(summary.cell(row, "gap"))
            ink = f"var(--{color[row.backend]})"
            intervals.append(
                page.Interval(
                    row.backend, ink, row.gap.mean, row.gap.low, row.gap.high, points, label
                )
            )
    bound = settings["loss_gap_bound"]
    label = f"dashed: bound of {bound:g} nats; bars: 95 % intervals"
    picture.chart(page.intervals(intervals, bound, 0.0, f"Loss gaps to {name}", label))
    picture.y += 14
    picture.heading("Peak memory of a training step")
    largest = max(row.peak_memory_bytes for row in rows)
    for row in rows:
        change = "" if row.backend == reference else f" ({percent(row.memory_ratio)})"
        picture.row(shown(row.backend), f"{row.peak_memory_bytes / 1e6:.1f} MB{change}")
        picture.bar([(row.peak_memory_bytes, color[row.backend])], largest, 12)
    picture.y += 14
    picture.heading("Bytes of a parameter, with gradient and Adam's moments")
    largest = max(row.bytes_per_parameter for row in rows)
    for row in rows:
        picture.row(shown(row.backend), f"{row.bytes_per_parameter:.1f}")
        picture.bar([(row.bytes_per_parameter, color[row.backend])], largest, 12)
    picture.note(
        f"fp8-backends compare: a Llama of {parameters / 1e6:.1f} M parameters, "
        f"{settings['seeds']} seeds of {settings['steps']} steps, on {machine['cores']} cores of "
        f"an {machine['processor']} (FP8 emulated), torch {plain(results['versions']['torch'])}, "
        f"{dated(results['date'])}. Levels do not change activations and scratch, "
        f"{100 * beyond:.0f} % of {name}'s peak."
    )
    picture.description = "; ".join(
        f"{row.backend}: "
        + (f"loss {summary.cell(row, 'gap')} nats against {name}, " if row.gap else "")
        + f"peak {row.peak_memory_bytes / 1e6:.1f} MB, {row.bytes_per_parameter:.1f} bytes a "
        "parameter"
        for row in rows
    )
    return picture


def shown(backend: str) -> str:
    return backend.upper() if backend == "fp32" else backend


class LevelBytes(NamedTuple):
    """Bytes of one element of a converted layer's weight."""

    name: str
    weight: float
    gradient: float
    exact: float
    """A master or a residual, which makes an FP8 weight exact."""
    exp_avg: float
    exp_avg_sq: float

    @property
    def total(self) -> float:
        return sum(self[1:])


LEVEL_PARTS = {
    "weight": "c1",
    "gradient": "c2",
    "master or residual": "c4",
    "exp_avg": "c3",
    "exp_avg_sq": "c5",
}


def level_bytes() -> list[LevelBytes]:
    """Take one training step in FP32 and at each level, and read the bytes of the live tensors."""
    rows = []
    for level in ("", *STATE_FORMATS):
        found = audited(level and f"msamp:{level}")
        moments = [
            f.dtype.itemsize + (4 / f.block_size if f.block_size else 0)
            for f in STATE_FORMATS.get(level, ())
        ]
        first, second = moments or (found["optimizer"] / 2, found["optimizer"] / 2)
        parts = (found["weight"], found["gradient"], found["master"], first, second)
        rows.append(LevelBytes(level or "bf16 mixed", *parts))
        if not math.isclose(sum(parts), sum(found.values()), rel_tol=1e-3):
            raise AssertionError(f"{level}: {parts} are not the live bytes {found}")
    return rows


def audited(backend: str) -> dict[str, float]:
    """Return the bytes of an element after a step, by part; of stock AdamW without a backend."""
    import torch
    from torch import nn

    import fp8_backends

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(256, 512, bias=False), nn.GELU(), nn.Linear(512, 256, bias=False)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if backend:
        fp8_backends.prepare(model, optimizer, backend)
    model(torch.randn(32, 256)).square().mean().backward()
    optimizer.step()
    found = fp8_backends.audit(model, optimizer).bytes_per_element
    return {part: found.get(part, 0.0) for part in ("weight", "gradient", "master", "optimizer")}


def bytes_by_level() -> Picture:
    """Bytes of a weight by level, read from live tensors after a step."""
    rows = level_bytes()
    picture = Picture("Bytes of a weight in training, by level")
    picture.heading("Bytes of a weight element, with AdamW")
    picture.legend((name, color) for name, color in LEVEL_PARTS.items())
    for row in rows:
        name = row.name if row.name == "bf16 mixed" else f"msamp:{row.name}"
        picture.row(name, f"{row.total:.0f} bytes")
        picture.bar(
            list(zip(row[1:], LEVEL_PARTS.values(), strict=True)), rows[0].total, 24, "{:.0f}"
        )
    picture.note(
        "Read from live tensors after one step. O3 keeps a master of two bytes, O4 a residual of "
        f"one; O4's scales add {rows[-1].total - 5:.2f} bytes. bf16 mixed keeps FP32 weights."
    )
    picture.description = "; ".join(
        f"{row.name}: {row.total:.0f} bytes, of them weight {row.weight:.0f}, gradient "
        f"{row.gradient:.0f}, master or residual {row.exact:.0f}, exp_avg {row.exp_avg:.0f}, "
        f"exp_avg_sq {row.exp_avg_sq:.0f}"
        for row in rows
    )
    return picture


def wire() -> Picture:
    """Bytes that a rank sends in a step, by engine and backend, from a record of two ranks."""
    found = record("wire_cpu_avx2")
    results, machine = found["results"], found["machine"]
    picture = Picture("Bytes sent between ranks, by engine and level")
    largest, sentences = max(each["measured"]["sent"] for each in results), []
    for engine, title in (("ddp", "DDP"), ("fsdp2", "FSDP2")):
        rows = [each for each in results if each["sharding"] == engine]
        usual = rows[0]["measured"]["sent"]
        picture.heading(f"{title}: megabytes a rank sends in a step")
        for number, each in enumerate(rows):
            sent, backend = each["measured"]["sent"], each["backend"]
            change = "" if sent == usual else f" ({percent(sent / usual)})"
            picture.row(backend, f"{sent / 1e6:.2f}{change}")
            picture.bar([(sent, f"c{number}" if number else "reference")], largest, 14)
            sentences.append(f"{title} {backend}: {sent / 1e6:.2f} MB{change}")
        picture.y += 14
    picture.y -= 14
    parameters = results[0]["parameters"] / 1e6
    picture.note(
        f"Two ranks, counted at the collectives: a Llama of {parameters:.1f} M parameters, whose "
        "embedding and head travel in high precision. native:dynamic gathers codes with "
        f"enable_fsdp_float8_all_gather=True. torch {plain(machine['torch'])} over gloo, "
        f"{dated(machine['date'])}."
    )
    picture.description = "; ".join(sentences)
    return picture


class Exit(NamedTuple):
    """An answer to a question, and the backend to take; "" leads to the next question."""

    answer: str
    take: str
    reason: str
    chips: tuple[str, ...] = ()
    """Keys of `chips.CHIPS`, of an answer about chips."""


def names_of(keys: Sequence[str]) -> str:
    """Return the products of kinds of chips: examples for NVIDIA, titles for AMD."""
    kinds = [chip for chip in chips.CHIPS if chip.key in keys]
    return ", ".join(chip.title if isinstance(chip.gpu, str) else chip.examples for chip in kinds)


def exits_of_chips() -> tuple[Exit, ...]:
    """Return an answer for each group of chips with the same recommendation."""
    groups: dict[tuple[str, str], list[str]] = {}
    for chip, backend, te in chips.recommended():
        if te != backend:
            reason = f"with TransformerEngine: {te}"
        elif chip.advice.compare_first:
            reason = "1.2 to 1.6 times bf16 in C++ (LLMQ): compare first"
        else:
            reason = "with torch.compile"
        groups.setdefault((backend, reason), []).append(chip.key)
    return tuple(Exit("", *texts, tuple(keys)) for texts, keys in groups.items())


CHOICE = {
    "Is memory short?": (
        Exit("yes, one GPU", "msamp:O2", "6 bytes in place of 16 for a weight; msamp:O4: 5"),
        Exit(
            "yes, several GPUs", "msamp:O4", "DDP and ZeRO-2: 2 + 3/N bytes on N ranks; FSDP2: 5/N"
        ),
        Exit("no", "", ""),
    ),
    "Which chip trains?": (
        *exits_of_chips(),
        Exit("", "bf16", "no FP8 units (V100: fp16); msamp:O2 still saves memory", ("before-fp8",)),
        Exit(
            "none: a CPU", "native:dynamic", "a GPU's casts, to check a recipe; no speed", ("cpu",)
        ),
    ),
}
"""Questions, from top to bottom. Chips and backends are `chips.recommended`."""


def decision_tree() -> Picture:
    """Questions that lead to a backend."""
    picture = Picture("Choosing a backend")
    sentences = []
    for question, exits in CHOICE.items():
        top = picture.y
        picture.parts.append(
            f'<rect x="{MARGIN}" y="{top:g}" width="{WIDTH - 2 * MARGIN}" height="34" rx="8" '
            'fill="var(--rule-2)" stroke="var(--c1)"/>'
        )
        picture.text(MARGIN + 14, question, "heading", down=22)
        picture.y += 40
        spine = picture.y - 6
        for each in exits:
            answer = each.answer or names_of(each.chips)
            sentences.append(f"{question} {answer}: {each.take or 'next question'}")
            sentences[-1] += f" ({each.reason})" if each.reason else ""
            lines = textwrap.wrap(answer, 19)
            start = picture.y + 6
            for number, line in enumerate(lines):
                picture.text(MARGIN + 30, line, "plain", down=22 + 17 * number)
            if each.take:
                picture.parts.append(
                    f'<path d="M{MARGIN + 10} {start + 11:g}h14" stroke="var(--ink-2)" '
                    'fill="none"/>'
                )
                picture.text(200, "→", "plain", down=22)
                picture.text(216, each.take, "code", down=22)
                for number, line in enumerate(textwrap.wrap(each.reason, 29)):
                    picture.text(216, line, "note", down=40 + 16 * number)
            height = max(17 * len(lines), 18 + 16 * len(textwrap.wrap(each.reason, 29)))
            picture.y += height + 14
            bottom = start + 11
        if not each.take:
            picture.text(198, "↓ next", "note", down=22 - height - 14)
            bottom = picture.y + 4
            picture.y += 4
        picture.parts.append(
            f'<path d="M{MARGIN + 10} {spine:g}V{bottom:g}" stroke="var(--ink-2)" fill="none"/>'
        )
    picture.y -= 10
    picture.description = "; ".join(sentences)
    return picture


MEMORY_PARTS = {"weights": "c1", "master": "c4", "gradients": "c2", "states": "c3"}
GROWS_AT = 48
"""Step of the monitor's sample."""
MEMORY_BACKENDS = ("native:dynamic", "msamp:O1", "msamp:O2", "msamp:O3", "msamp:O4")


def record_memory() -> dict:
    """Estimate the training of an 8B model on one device, in minutes."""
    import torch

    import fp8_backends
    from fp8_backends.tools.estimate import Workload, estimate
    from fp8_backends.tools.estimate.model_shapes import from_parameters

    settings = {"batch": 1, "sequence": 2048, "checkpointing": True}
    model = from_parameters(8e9)
    recipes = [
        fp8_backends.FP8RecipeKwargs(backend=name, autocast_dtype="bf16")
        for name in MEMORY_BACKENDS
    ]
    found = estimate(Workload(model=model, **settings), ["bf16", *recipes])
    kept = ("backend", *MEMORY_PARTS, "peak", "peak_at", "parameters")
    results = [{key: each.to_dict()[key] for key in kept} for each in found]
    return {
        "torch": plain(torch.__version__),
        "model": model.title,
        "settings": settings,
        "results": results,
    }


def memory_8b() -> Picture:
    """Memory of training an 8B model, by the package's estimate."""
    found = record("memory_8b")
    picture = Picture("Memory of training an 8B model, by level")
    picture.heading("Llama of 8 B parameters on one GPU: gigabytes")
    picture.legend(
        {
            "weights": "c1",
            "gradients": "c2",
            "Adam's moments": "c3",
            "master or residual": "c4",
        }.items()
    )
    largest, sentences, top = max(each["peak"] for each in found["results"]), [], picture.y + 6
    for each in found["results"]:
        parts = [
            (each[name], MEMORY_PARTS[name])
            for name in ("weights", "gradients", "states", "master")
        ]
        picture.row(each["backend"], f"{each['peak'] / GIGA:.0f} GB")
        picture.bar(parts, largest, 18)
        sentences.append(f"{each['backend']}: {each['peak'] / GIGA:.0f} GB")
    gib = chips.product_named("h100").gib
    edge = MARGIN + gib * 2**30 / largest * (WIDTH - 2 * MARGIN)
    picture.parts.append(
        f'<line class="bound" x1="{edge:.1f}" y1="{top:g}" x2="{edge:.1f}" y2="{picture.y + 8:g}"/>'
    )
    picture.y += 22
    picture.text(edge, f"an H100's {gib} GiB", "note", "middle")
    settings = found["settings"]
    picture.note(
        "fp8-backends estimate --params 8B: highest moment of a step with AdamW, a sequence of "
        f"{settings['sequence']} tokens, activation checkpointing."
    )
    picture.description = "; ".join(sentences)
    return picture


def record_monitor(file: Path) -> None:
    """Train a small model with delayed scales; the inputs grow eightfold at the sampled step
    `GROWS_AT`."""
    import torch
    from torch import nn

    import fp8_backends

    file.unlink(missing_ok=True)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 64)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    spec = {
        "backend": "native:delayed",
        "monitor_every": 4,
        "monitor_file": str(file),
        "autocast_dtype": "fp32",
    }
    model, optimizer = fp8_backends.prepare(model, optimizer, spec)
    for step in range(1, 97):
        x = torch.randn(64, 64) * (8 if step >= GROWS_AT else 1)
        (model(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def monitor() -> Picture:
    """Errors of the worst tensors by step, as on the page of `fp8-backends monitor`."""
    samples: Samples = read_samples(RESULTS / "monitor_sample.jsonl")
    worst = sorted(samples.casts, key=lambda tensor: tensor.most_lost[0], reverse=True)[:4]
    lines = []
    for number, tensor in enumerate(worst, 1):
        by_step = dict(zip(tensor.steps, map(lost_db, tensor.entries), strict=True))
        values = [
            math.nan if by_step.get(step) is None else by_step[step] for step in samples.steps
        ]
        lines.append(page.Series(f"layer {tensor.label}", f"var(--c{number})", values))
    picture = Picture("What fp8-backends monitor shows")
    picture.heading("Rounding errors during training: the worst tensors")
    picture.legend((line.name, line.color[6:-1]) for line in lines)
    picture.y += 8
    label = "dB below the format's usual SQNR"
    picture.chart(
        page.curves(
            lines, samples.steps, "Error of the worst tensors", label, zero_line=True, height=260
        ),
        44,
    )
    picture.note(
        f"fp8-backends monitor: {samples.last['recipe']}, three Linears, a sample every 4 steps. "
        f"At step {GROWS_AT} the inputs grow eightfold, and scales from earlier steps clip them."
    )
    at = samples.steps.index(GROWS_AT)
    picture.description = "; ".join(
        f"{line.name}: {line.values[at - 1]:.1f} dB at step {samples.steps[at - 1]}, "
        f"{line.values[at]:.1f} dB at step {GROWS_AT}, {line.values[-1]:.1f} dB at step "
        f"{samples.steps[-1]}"
        for line in lines
    )
    return picture


def speed() -> Picture:
    """Tokens per second over bf16's, on an H200."""
    found = record("step_8b_gpu")
    te = [each for each in record("step_8b_te_gpu")["results"] if each["backend"].startswith("te:")]
    machine, results = found["machine"], [*found["results"], *te]
    picture = Picture("Tokens per second on an H200, over bf16's")
    sentences = []
    largest = max(each["times_plain"]["high"] for each in results)
    for form in ("compiled", "eager"):
        picture.heading(f"Tokens per second over bf16's, {form}")
        for number, each in enumerate(each for each in results if each["form"] == form):
            ratio = each["times_plain"]
            half = (ratio["high"] - ratio["low"]) / 2
            label = "1" if each["backend"] == "bf16" else f"{ratio['ratio']:.2f} ± {half:.2f}"
            picture.row(each["backend"], label)
            picture.bar([(ratio["ratio"], f"c{number}" if number else "reference")], largest, 14)
            if number:
                scale = (WIDTH - 2 * MARGIN) / largest
                ends, middle = (
                    [MARGIN + ratio[end] * scale for end in ("low", "high")],
                    picture.y - 7,
                )
                picture.parts.append(
                    f'<path d="M{ends[0]:.1f} {middle - 4:g}v8M{ends[0]:.1f} '
                    f'{middle:g}H{ends[1]:.1f}M{ends[1]:.1f} {middle - 4:g}v8" stroke="var(--ink)" '
                    'fill="none"/>'
                )
                sentences.append(f"{each['backend']}, {form}: {label}")
        picture.y += 14
    picture.y -= 14
    arguments = found["arguments"]
    picture.note(
        f"Four layers of Llama 8B on one {machine['chip']}, {arguments['sequence']:,} tokens a "
        f"step, {arguments['steps']} timed steps; torch {plain(machine['torch'])}, torchao "
        f"{machine['torchao']}, {dated(machine['date'])}; with 95 % intervals. te: in another run, "
        "a day later."
    )
    picture.description = f"bf16: 1; {'; '.join(sentences)}"
    return picture


def measured() -> Picture:
    """Speed and peak memory of a compiled step by backend, on an H200."""
    steps = {
        each["backend"]: each
        for name in ("step_8b_te_gpu", "step_8b_gpu")
        for each in record(name)["results"]
        if each["form"] == "compiled"
    }
    machine = record("step_8b_gpu")["machine"]
    rows = [steps[name] for name in ("bf16", *targets.SUMMARIZED)]
    columns = (("times_plain", "Speed"), ("peak_to_plain", "Peak memory"))
    shares = {
        "times_plain": [1.0, *(each["times_plain"]["ratio"] for each in rows[1:])],
        "peak_to_plain": [1.0, *(each["peak_to_plain"] for each in rows[1:])],
    }
    picture = Picture("Speed and peak memory of FP8 training on an H200")
    left, width, column_width = 150, 88, 146
    picture.y += 16
    for number, (_, title) in enumerate(columns):
        picture.text(left + number * column_width, title, "heading")
    picture.y += 4
    sentences = []
    for number, each in enumerate(rows):
        name, color = each["backend"], f"c{number}" if number else "reference"
        labels = ("1", "1") if number == 0 else [f"{shares[key][number]:.2f}" for key, _ in columns]
        picture.y += 8
        picture.text(MARGIN, name, "row-label", down=14)
        for column, (key, _) in enumerate(columns):
            x = left + column * column_width
            length = shares[key][number] * width / max(shares[key])
            picture.rect(x, picture.y, length, 18, color)
            picture.text(x + length + 5, labels[column], "value", down=14)
        sentences.append(f"{name}: speed {labels[0]}, peak memory {labels[1]}")
        picture.y += 18
    picture.note(
        f"bf16 = 1; more speed and less memory are better. {machine['chip']}, four layers of Llama 8B, "
        "compiled, over bf16 autocast with FP32 weights"
    )
    picture.description = "; ".join(sentences)
    return picture


OF_LOSSES = (
    "rows "
    "reversed", "native:dynamic", "native:delayed", "ao:tensorwise", "te:delayed", "msamp:O2", "msamp:O4"
)  # fmt: skip


def losses() -> Picture:
    """Losses of 10.7 million parameters minus bf16's, on an H200."""
    found = record("scale_loss_gpu")
    machine, by_name = found["machine"], {each["variant"]: each for each in found["results"]}
    ran = {
        name: {run["seed"]: run["held_out_loss"] for run in found["runs"] if run["variant"] == name}
        for name in by_name
    }
    picture = Picture("FP8's loss at 10.7 M parameters, minus bf16's")
    picture.heading("Held-out loss minus bf16's at 10.7 M parameters, nats")
    intervals, sentences = [], []
    for number, name in enumerate(OF_LOSSES):
        gap, label = by_name[name]["gap"], "bf16, other sums" if name == "rows reversed" else name
        text = targets.gap(gap["mean"], gap["half_width"])
        points = [ran[name][seed] - ran["reference"][seed] for seed in ran[name]]
        ink = f"var(--{f'c{number}' if number else 'reference'})"
        intervals.append(
            page.Interval(label, ink, gap["mean"], gap["low"], gap["high"], points, text)
        )
        sentences.append(f"{label}: {text}")
    bound = summary.LOSS_GAP_BOUND
    label = f"dashed: bound of {bound:g} nats; bars: 95 % intervals"
    picture.chart(page.intervals(intervals, bound, 0.0, "Loss gaps to bf16", label))
    seeds = targets.seeds_of(found, OF_LOSSES)
    picture.note(
        f"A Llama of 10.7 M parameters on one {machine['chip']}, {seeds} seeds of {found['steps']} "
        f"steps, paired by seed, weights and data; torch {plain(machine['torch'])}, "
        f"{dated(machine['date'])}. bf16, other sums: rows of each batch reversed."
    )
    picture.description = "; ".join(sentences)
    return picture


ALL: dict[str, Callable[[], Picture]] = {
    draw.__name__: draw
    for draw in (
        comparison,
        bytes_by_level,
        wire,
        decision_tree,
        memory_8b,
        monitor,
        measured,
        speed,
        losses,
    )
}


def files(names: Iterable[str] = ALL) -> dict[str, str]:
    """Return the text of each file by name."""
    pictures = {name: ALL[name]() for name in names}
    return {
        f"{name}_{theme}.svg": picture.svg(theme)
        for name, picture in pictures.items()
        for theme in ("light", "dark")
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--record", default="", help="memory,monitor")
    parser.add_argument("--only", help="names of pictures, by commas")
    arguments = parser.parse_args()
    if "memory" in arguments.record:
        (RESULTS / "memory_8b.json").write_text(
            json.dumps(record_memory(), indent=1) + "\n", encoding="utf-8"
        )
    if "monitor" in arguments.record:
        record_monitor(RESULTS / "monitor_sample.jsonl")
    PICTURES.mkdir(exist_ok=True)
    for name, text in files(arguments.only.split(",") if arguments.only else ALL).items():
        print(f"{name}: {len(text.encode()):,} bytes")
        if arguments.write:
            (PICTURES / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
