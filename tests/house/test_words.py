"""Numbers in sentences."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fp8_backends
from fp8_backends.words import counted, share


def test_noun_agrees_with_its_number():
    assert [counted(number, "layer") for number in (0, 1, 2)] == ["0 layers", "1 layer", "2 layers"]


@pytest.mark.parametrize(
    ("part", "text"),
    [
        *[(0.0, "0 %"), (1.0, "100 %"), (0.94, "94 %"), (0.5049, "50 %")],
        *[(0.997, "99.7 %"), (0.003, "0.3 %"), (0.9949, "99 %")],
        *[(0.99996, "over 99.9 %"), (1e-9, "under 0.1 %")],
    ],
)
def test_share_is_formatted_in_percent(part, text):
    assert share(part) == text


@given(st.floats(min_value=0, max_value=1, exclude_min=True, exclude_max=True))
def test_only_exact_shares_print_0_and_100_percent(part):
    assert share(part) not in ("0 %", "100 %")
    (number,) = re.findall(r"[0-9.]+", share(part))
    assert abs(float(number) - 100 * part) <= 0.5


NEVER_ONE = {"tools/compare/summary.py"}
"""Files with a number before a plural that is never 1 there."""


def test_package_uses_counted_for_plurals():
    """`{len(…)} layers` prints "1 layers" one day; `counted` does not."""
    root = Path(fp8_backends.__file__).parent
    by_hand = re.compile(r"\{len\([^{}]*\)\} [a-z]+(?: [a-z]+)?s\b")
    found = {
        str(file.relative_to(root))
        for file in root.rglob("*.py")
        if by_hand.search(file.read_text("utf-8"))
    }
    assert found == NEVER_ONE


def test_text_outside_the_commands_is_ascii():
    """Users print reports, and log lines to streams of any encoding. Only a command prepares its
    own stdout."""
    root = Path(fp8_backends.__file__).parent
    files = {file: file.relative_to(root).parts[0] for file in root.rglob("*.py")}
    printed = [file for file, room in files.items() if room not in ("tools", "docs", "examples")]
    assert printed
    for file in printed:
        tree = ast.parse(file.read_text("utf-8"))
        documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        strings = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        strings = [node for node in strings if id(node) not in documentation]
        assert [node.value for node in strings if not node.value.isascii()] == [], file
    # its docstrings are help, Accelerate's too
    assert (root / "recipes" / "fields.py").read_text("utf-8").isascii()
