"""The parts of the guides that the code generates: known problems, chips, engines, fields of recipes.

python tests/docs/generated.py --write    writes them into the guides
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from documents import GUIDES, ROOT

sys.path += [str(ROOT), str(ROOT / "tests" / "distributed")]
import matrix  # noqa: E402

from fp8_backends.compute import chips as hardware_table
from fp8_backends.recipes import fields
from fp8_backends.training import validators


def engines() -> str:
    """Which backend trains under which engine, as `tests/distributed/matrix.py` has it."""
    header = ["backend", *matrix.ENGINES]
    rows = [
        [f"``{backend}``", *("refused" if matrix.refusal(backend, each, "train") else "all" for each in matrix.ENGINES)]
        for backend in (*matrix.BACKENDS, *matrix.TE_BACKENDS)
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    rule = "  ".join("=" * width for width in widths)
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (header, *rows)]
    return "\n".join([rule, lines[0], rule, *lines[1:], rule])


def between(name: str, text: str) -> str:
    return f".. begin table {name}\n\n{text.strip()}\n\n.. end table {name}\n"


def written(document: Path) -> str:
    """The text of a guide with its generated part as the code has it."""
    text = document.read_text(encoding="utf-8")
    if document.name == "checks.rst":  # all below its introduction
        return text[: text.index("\n**") + 1] + validators.restructured_text()
    name, table = TABLES[document.name]
    marked = rf"^\.\. begin table {name}\n.*?^\.\. end table {name}\n"
    return re.sub(marked, lambda _: between(name, table()), text, flags=re.DOTALL | re.MULTILINE)


TABLES = {
    "doctor.rst": ("chips", hardware_table.restructured_text),
    "distributed.rst": ("engines", engines),
    "recipes.rst": ("fields", fields.restructured_text),
}
DOCUMENTS = [GUIDES / name for name in ("checks.rst", *TABLES)]

if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    for document in DOCUMENTS:
        document.write_text(written(document), encoding="utf-8")
