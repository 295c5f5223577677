"""Bound the English of docstrings, guides and READMEs: few relative clauses; docstrings begin with
a verb."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import fp8_backends

PACKAGE = Path(fp8_backends.__file__).parent
ROOT = PACKAGE.parent
PAGES = [
    *sorted(PACKAGE.glob("docs/*.rst")),
    *(ROOT / folder / "README.rst" for folder in ("", "benchmarks", "tests")),
]

RELATIVE = re.compile(r"\b(that|which|what|whose|where|those|whether)\b", re.IGNORECASE)
OPENING = re.compile(r"^(What|Whether|How|Those|Of|Where|Who|That|With|As|In)\b")
SECTIONS = re.compile(r"\n\s*(?:Args|Returns|Raises|Examples?|Parameters)s?:?\s*\n")

RELATIVE_SHARE, STACKED_SHARE, OPENING_SHARE = 0.28, 0.04, 0.02
"""Largest shares: sentences with a relative word, sentences with two or more, docstrings that begin
with one."""


def docstrings(folder: Path) -> Iterator[str]:
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                if text := ast.get_docstring(node):
                    yield text


def paragraphs(page: str) -> Iterator[str]:
    """Yield paragraphs and list items, without titles, tables, directives and literal blocks."""
    # tables
    page = re.sub(r"^=+( +=+)+\n(?:.*\n)+?=+( +=+)+\n(?=\n|\Z)", "", page, flags=re.MULTILINE)
    block, skipped = [], None
    for line in [*page.splitlines(), ""]:
        indent, text = len(line) - len(line.lstrip()), line.strip()
        if skipped is not None and (not text or indent > skipped):
            continue
        skipped = indent if text.startswith(".. ") or text.endswith("::") else None
        ends = not text or re.match(r"([=\-~^+|])(\1|-|$| )|\.\. ", text)
        if block and (ends or re.match(r"(\*|\d+\.) ", text)):
            yield " ".join(block)
            block = []
        if not ends:
            block.append(text)


def shares(texts: list[str]) -> tuple[float, float]:
    """Return the shares of sentences with one relative word or more, and with two or more."""
    counts = []
    for text in texts:
        words = re.sub(r"`+[^`]*`+_*", "X", SECTIONS.split(text)[0])
        sentences = re.split(r"(?<=[.!?])\s+", " ".join(words.split()))
        counts += [
            len(RELATIVE.findall(sentence)) for sentence in sentences if len(sentence.split()) >= 3
        ]
    return sum(count > 0 for count in counts) / len(counts), sum(
        count > 1 for count in counts
    ) / len(counts)


@pytest.mark.parametrize("folder", ["fp8_backends", "benchmarks", "tests"])
def test_docstrings_name_things_with_nouns(folder):
    texts = list(docstrings(ROOT / folder))
    relative, stacked = shares(texts)
    opening = sum(bool(OPENING.match(text)) for text in texts) / len(texts)
    assert relative <= RELATIVE_SHARE
    assert stacked <= STACKED_SHARE
    assert opening <= OPENING_SHARE


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_guides_name_things_with_nouns(page):
    relative, stacked = shares(list(paragraphs(page.read_text(encoding="utf-8"))))
    assert relative <= RELATIVE_SHARE
    assert stacked <= STACKED_SHARE


def test_prose_measure_counts_clauses_and_skips_code():
    page = "Title\n=====\n\nA thing that is told. Plain words here.\n\n.. code-block:: python\n\n   what = which\n"
    assert list(paragraphs(page)) == ["Title", "A thing that is told. Plain words here."]
    assert shares(["A thing that is told. Plain words here."]) == (0.5, 0.0)
    assert shares(["What which means what. Two words."]) == (1.0, 1.0)
