"""What the code generates and a page shows is the same."""

from __future__ import annotations

import dataclasses
import re

import generated
import pytest
from documents import GUIDES

from fp8_backends.recipes.handlers import FP8RecipeKwargs


@pytest.mark.parametrize("document", generated.DOCUMENTS, ids=lambda path: path.name)
def test_a_guide_shows_what_the_code_generates(document):
    """Known problems, the table of chips, the matrix of engines. `python tests/docs/generated.py --write` mends it."""
    text = generated.written(document)
    assert text == document.read_text(encoding="utf-8")
    if document.name in generated.TABLES:
        name, table = generated.TABLES[document.name]
        assert generated.between(name, table()) in text


def test_the_recipes_guide_names_every_field_and_no_other():
    text = (GUIDES / "recipes.rst").read_text(encoding="utf-8")
    table = re.search(r"^field  .*?\n=.*?\n(.*?)^=", text, re.M | re.S)[1]
    shown = re.findall(r"``(\w+)``", "\n".join(line[:35] for line in table.splitlines()))
    assert sorted(shown) == sorted(field.name for field in dataclasses.fields(FP8RecipeKwargs))
