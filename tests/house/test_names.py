"""Give each constant of the package one meaning: no two files define a public name."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import fp8_backends

ROOT = Path(fp8_backends.__file__).parent
APART = ("docs", "examples")
"""Folders of scripts, which no module imports."""


def constants(path: Path) -> set[str]:
    """Return the public names in capitals that a file assigns at its top."""
    names = set()
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = []
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        names |= {
            node.id
            for target in targets
            for node in (target.elts if isinstance(target, ast.Tuple) else [target])
            if isinstance(node, ast.Name) and node.id.isupper() and not node.id.startswith("_")
        }
    return names


def test_a_public_constant_is_defined_in_one_file():
    files = defaultdict(list)
    for path in sorted(ROOT.rglob("*.py")):
        place = path.relative_to(ROOT)
        if place.parts[0] not in APART:
            for name in constants(path):
                files[name].append(str(place))
    assert len(files) > 300
    assert not {name: places for name, places in files.items() if len(places) > 1}
