from __future__ import annotations

import io
import re

import pytest

from fp8_backends.tools.terminal import Progress, paragraphs, table


@pytest.fixture(autouse=True)
def no_width_is_set(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)


ROWS = [
    ["backend", "loss", "peak memory"],
    ["bf16", "2.75", "35.9 MB"],
    ["native:dynamic", "12.75", "9.1 MB"],
]


def test_numbers_are_right_aligned():
    assert table(ROWS).splitlines() == [
        "backend          loss  peak memory",
        "bf16             2.75      35.9 MB",
        "native:dynamic  12.75       9.1 MB",
    ]


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_a_narrow_terminal_cuts_nothing(columns, monkeypatch):
    """A wide table has parts, each with the names of the rows."""
    monkeypatch.setenv("COLUMNS", str(columns))
    rows = [
        ["backend", *(f"heading {n:02}" for n in range(12))],
        ["bf16", *(f"value {n:02}" for n in range(12))],
    ]
    text = "\n\n".join(
        [table(rows), table(rows, justify="left"), paragraphs([("note", "some words " * 30)])]
    )
    assert max(map(len, text.splitlines())) <= columns
    parts = table(rows).split("\n\n")
    assert len(parts) > 1 and all(part.startswith("backend ") for part in parts)
    values = [row for part in parts for row in part.splitlines()[1].split()[1:]]
    assert [value for value in values if value != "value"] == [f"{n:02}" for n in range(12)]
    assert all(text.count(cell) == 2 for row in rows for cell in row[1:])
    assert len(re.findall(r"some\s+words", text)) == 30


def test_a_column_wider_than_the_width_is_whole():
    assert "x" * 150 in table([["a", "b"], ["y", "x" * 150]])


def test_paragraphs_align_with_their_labels():
    text = "see [rule_name] and :smile: at http://host/path: " + "word " * 40
    lines = paragraphs([("warning", text), ("", "fix: it")]).splitlines()
    assert lines[0].startswith("warning   see [rule_name] and :smile: at http://host/path: word")
    assert all(line.startswith(" " * 10) for line in lines[1:]) and max(map(len, lines)) <= 100
    assert lines[-1] == " " * 10 + "fix: it"
    assert " ".join(" ".join(lines[:-1]).split()) == f"warning {text.strip()}"


def test_a_word_longer_than_a_line_loses_nothing():
    lines = paragraphs([("file", "/folder" * 30)]).splitlines()
    assert "".join(line[10:] for line in lines) == "/folder" * 30


@pytest.mark.parametrize("is_terminal", [False, True])
def test_progress_names_steps_only_on_a_terminal(is_terminal, monkeypatch, capsys):
    errors = io.StringIO()
    errors.isatty = lambda: is_terminal
    monkeypatch.setattr("sys.stderr", errors)
    monkeypatch.setenv("TERM", "xterm")
    with Progress("tracing a step") as progress:
        progress("msamp:O2: first steps")  # as markup, `:O2:` would be an emoji
    assert capsys.readouterr().out == "" and "tracing a step" in errors.getvalue()
    assert ("msamp:O2:" in errors.getvalue()) is is_terminal
    assert is_terminal or errors.getvalue() == "tracing a step …\n"
