"""Hold the package to its budget of lines and files. Raising a number here is a visible change with a reason in its
commit."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import fp8_backends

LINES, FILES = 36_377, 181
SUFFIXES = (".py", ".pyi", ".cpp", ".css")


def test_lines_and_files_stay_within_the_budget():
    root = Path(fp8_backends.__file__).parent
    paths = [path for path in root.rglob("*") if path.suffix in SUFFIXES]
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    folders = Counter()
    for path, count in lines.items():
        folders[path.relative_to(root).parts[0] if path.parent != root else "."] += count
    table = "\n".join(f"{count:7,} {folder}" for folder, count in folders.most_common())
    print(table)
    assert sum(lines.values()) <= LINES, f"{sum(lines.values()):,} lines:\n{table}"
    assert len(lines) <= FILES
