"""Generate parts of the documentation: known problems, chips, machines, engines, features, fields of recipes,
packed autograd nodes, rooms, and the list of examples.

python tests/docs/generated.py --write    writes them into the pages
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
sys.path += [
    str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "distributed", "house")
]
import feature_table  # noqa: E402
import matrix  # noqa: E402
from documents import GUIDES, ROOT  # noqa: E402
from test_arrows import FLOORS  # noqa: E402

from fp8_backends.compute import chips, rates
from fp8_backends.convert import saved_activations
from fp8_backends.recipes import fields
from fp8_backends.rules import THEMES
from fp8_backends.tools.examples import examples

WIDTH = 118


def chip_table() -> str:
    """Return the FP8 products of each backend by chip."""
    (_, *header), *rows = chips.rows()
    rows = [["backend", *header], *([f"``{row[0]}``", *row[1:]] for row in rows)]
    install = (
        "``te`` needs this package's extra ``te``, installed after a PyTorch for CUDA and with "
        "``--no-build-isolation``; the others come with the package."
    )
    sentences = [*(each[0].upper() + each[1:] + "." for each in chips.legend()), install]
    notes = "\n".join(
        textwrap.fill(f"{n}. {note}", WIDTH, subsequent_indent=" " * len(f"{n}. "))
        for n, note in enumerate(chips.NOTES.values(), 1)
    )
    return "\n\n".join([simple_table(rows), textwrap.fill(" ".join(sentences), WIDTH), notes])


def machines() -> str:
    """Return the recommended backend by machine, from `chips.recommended`; equal chips in a row."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for chip, backend, te in chips.recommended():
        with_te = "" if te == backend else f"``{te}``"
        name = chip.title if isinstance(chip.gpu, str) else chip.examples
        groups.setdefault((f"``{backend}``", with_te, chip.advice.reason), []).append(name)
    for name, (gpu, reason) in WITHOUT_FP8.items():
        groups[chips.advice_for(gpu, cpu_bf16=True).precision, "", reason] = [name]
    rows = [["machine", "take", "with te", "why"]]
    for (backend, with_te, reason), names in groups.items():
        first, *others = textwrap.wrap(reason, 36)
        rows.append([", ".join(names), backend, with_te, first])
        rows += [["", "", "", other] for other in others]
    return simple_table(rows)


WITHOUT_FP8 = {
    "A100, RTX 30, MI200": ((8, 0), "no FP8 products; msamp:O2 saves memory, and costs time"),
    "V100, T4": ((7, 0), "no bf16 products either: with a loss scaler"),
    "laptop, CI machine": (None, "native:dynamic checks a recipe, slower than bf16"),
}
"""A GPU of each kind, as `chips.advice_for` takes it, and a reason."""


def rules() -> str:
    """Return every rule with its severity, reason and fix, by theme."""
    lines = []
    for theme, of_theme in THEMES.items():
        lines += [theme, "-" * len(theme), ""]
        for rule in of_theme:
            text = f"{rule.severity}: {escaped(rule.reason)}. *Fix*: {escaped(rule.fix)}."
            lines += [f"``{rule.name}``", textwrap.indent(textwrap.fill(text, WIDTH - 4), "    ")]
        lines.append("")
    return "\n".join(lines[:-1]) + "\n"


def escaped(text: str) -> str:
    """Escape plain text for reStructuredText: `code` as literals, no accidental emphasis or
    references."""
    parts = text.split("`")
    plain = [part.replace("*", "\\*").replace("_ ", "\\_ ") for part in parts[::2]]
    code = [f"``{part}``" for part in parts[1::2]]
    return "".join(part for pair in zip(plain, [*code, ""], strict=True) for part in pair)


def engines() -> str:
    """Return the backends by engine, from `tests/distributed/matrix.py`."""
    header = ["backend", *matrix.ENGINES]
    rows = []
    for backend in (*matrix.BACKENDS, *matrix.TE_BACKENDS):
        refused = {name for name in matrix.ENGINES if matrix.refusal(backend, name, "train")}
        cells = (
            "refused" if name in refused else e.cell(backend) for name, e in matrix.ENGINES.items()
        )
        rows.append([f"``{backend}``", *cells])
    return simple_table([header, *rows])


def features() -> str:
    """Return Accelerate's features by backend, from `tests/feature_table.py`, with notes."""
    numbers, backends = feature_table.notes(), feature_table.BACKENDS
    rows = [
        [
            f"{feature.name} ({numbers[feature.note]})" if feature.note else feature.name,
            *map(feature.cell, backends),
        ]
        for feature in feature_table.FEATURES
    ]
    header = ["feature", *(f"``{backend}``" for backend in backends)]
    notes = [
        textwrap.fill(f"{number}. {note}.", WIDTH, subsequent_indent=" " * len(f"{number}. "))
        for note, number in numbers.items()
    ]
    return "\n\n".join([simple_table([header, *rows]), "\n".join(notes)])


def gallery() -> str:
    """Return the subject of each example, and its command."""
    entries = []
    for each in examples().values():
        text = f"{textwrap.fill(escaped(each.shows), WIDTH - 4)}\nStart: ``{each.start}``"
        entries.append(
            f"`{each.script.stem} "
            f"<../examples/{each.script.name}>`_\n{textwrap.indent(text, '    ')}"
        )
    return "\n".join(entries)


def packed_nodes() -> str:
    """Return the packed autograd nodes, with the error bound of each."""
    rows = [["node", "saved tensors", "error of gradients"]]
    for name, kept in saved_activations.NODES.items():
        only = " (``fp8+attention``)" if kept.attention else ""
        rows.append([f"``{name}``", ", ".join(kept.fields) + only, escaped(kept.bound)])
    return simple_table(rows)


def constants() -> str:
    """Return the constants of the time model, with their sources."""
    rows = [
        [name, f"{each.value:.3g}", escaped(each.source)] for name, each in rates.CONSTANTS.items()
    ]
    return simple_table([["constant", "value", "source"], *rows])


def limits() -> str:
    """Return the published limits of chips."""
    header = ["chip", "bf16, TFLOP/s", "FP8", "memory, TB/s", "link, GB/s", "network", "source"]
    units = (1e12, 1e12, 1e12, 1e9, 1e9)
    known = [product for product in chips.SOLD.values() if product.rates]
    # the fastest network first; chips with equal links by memory
    known.sort(key=lambda product: (-product.rates.network, product.rates.link, -product.gib))
    rows = [[name, *(f"{x / unit:.4g}" for x, unit in zip(each, units, strict=False)), escaped(each.source)]
            for name, _, _, each in known]  # fmt: skip
    return simple_table([header, *rows])


def simple_table(rows: list[list[str]]) -> str:
    """Write a header and rows as reStructuredText."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = "  ".join("=" * width for width in widths)
    header, *lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join([rule, header, rule, *lines, rule])


def recipe_fields() -> str:
    """List every field with its values, default and readers."""
    lines = []
    for field in fields.FIELDS.values():
        if field.name in fields.NAMING or field.name in fields.COMMON:
            read_by = "every backend"
        elif field.name in fields.OF_LEVELS:
            read_by = f"level{'s' * (len(field.levels) > 1)} {', '.join(field.levels)}"
        else:
            read_by = fields.readers(field.name)
        lines.append(
            f"``{field.name}``"
            + (f" ({field.values_and_default})" if field.values_and_default else "")
        )
        text = f"{fields.help_of(field)} *Read by* {read_by}.".replace("_ ", "\\_ ").replace(
            "**", "\\*\\*"
        )
        lines += textwrap.wrap(text, WIDTH, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines) + "\n"


def between(name: str, text: str) -> str:
    return f".. begin table {name}\n\n{text.strip()}\n\n.. end table {name}\n"


def written(document: Path) -> str:
    """Return the text of a page with its generated parts up to date."""
    text = document.read_text(encoding="utf-8")
    if document.name == "checks.rst":  # all below its introduction
        return text[: re.search(r"^.+\n---+\n", text, re.M).start()] + rules()
    for name, table in TABLES[document.name].items():
        marked = rf"^\.\. begin table {name}\n.*?^\.\. end table {name}\n"
        text = re.sub(
            marked,
            lambda _, name=name, table=table: between(name, table()),
            text,
            flags=re.DOTALL | re.M,
        )
    return text


def rooms() -> str:
    """Return the rooms of the package, the lowest floor first, with the first line of each
    docstring."""
    rows = [["floor", "room", "contents"]]
    for floor, names in enumerate(FLOORS):
        for room in names:
            path = ROOT / "fp8_backends" / ("" if room == "__init__" else room)
            file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            shown = {"__init__": "``fp8_backends``"}.get(room, f"``{room}``")
            first = (
                ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
                .split("\n\n")[0]
                .replace("\n", " ")
            )
            rows.append([str(floor), shown, escaped(first)])
    return simple_table(rows)


TABLES = {
    "choosing.rst": {"machines": machines},
    "contributing.rst": {"rooms": rooms},
    "examples.rst": {"examples": gallery},
    "fields.rst": {"fields": recipe_fields},
    "tables.rst": {
        "chips": chip_table,
        "engines": engines,
        "features": features,
        "nodes": packed_nodes,
        "constants": constants,
        "rates": limits,
    },
}
DOCUMENTS = [GUIDES / name for name in ("checks.rst", *TABLES)]

if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    for document in DOCUMENTS:
        document.write_text(written(document), encoding="utf-8")
