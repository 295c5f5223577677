"""Budget of the package: lines and files, and private names that tests read. Raising a number here is a visible change,
and a commit says why."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import fp8_backends

LINES, FILES = 40_015, 197
SUFFIXES = (".py", ".pyi", ".cpp", ".css")

PRIVATE = 29
"""Accesses of tests to private names of the package."""
FOREIGN = """_dispatch_tokens _dynamo _experts_implementation _fields _foreach_norm _get_bias_tensors
    _get_weight_tensors _models _optimizers _parameters _prepare_tp _quantizer _replace _repr_html_ _reset_state
    _scale_inv _scaled_mm""".split()
"""Names of other libraries and protocols, which the package defines or overrides, too."""


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


def test_tests_read_few_private_names():
    """Tests of behaviour survive a rewrite. A name that they need gets a public spelling."""
    own = {name for tree in trees(Path(fp8_backends.__file__).parent) for name in defined(tree)} - {*FOREIGN}
    found = Counter(name for tree in trees(Path(__file__).parents[1]) for name in read(tree) if name in own)
    table = "\n".join(f"{count:4} {name}" for name, count in found.most_common())
    print(table)
    assert found.total() <= PRIVATE, f"{found.total()} accesses:\n{table}"


def trees(folder: Path) -> Iterator[ast.AST]:
    return (ast.parse(path.read_text(encoding="utf-8")) for path in folder.rglob("*.py"))


def defined(tree: ast.AST) -> Iterator[str]:
    """Private functions, classes, globals, and attributes of `self`."""
    for node in ast.walk(tree):
        name = node.name if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else None
        if isinstance(getattr(node, "ctx", None), ast.Store):
            name = getattr(node, "id", node.attr if of_itself(node) else None)
        if name and name.startswith("_") and not name.startswith("__") and name != "_":
            yield name


def read(tree: ast.AST) -> Iterator[str]:
    """Attributes of anything but `self`, names that are imported, and texts for `setattr` and its like."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not of_itself(node):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield node.name
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("attr"):
            yield from (argument.value for argument in node.args if isinstance(argument, ast.Constant))


def of_itself(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and getattr(node.value, "id", "") in ("self", "cls")
