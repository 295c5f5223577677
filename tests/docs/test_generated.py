"""What the code generates and a page shows is the same."""

from __future__ import annotations

import generated
import pytest


@pytest.mark.parametrize("document", generated.DOCUMENTS, ids=lambda path: path.name)
def test_a_guide_shows_what_the_code_generates(document):
    """Known problems, chips, engines, fields, examples. `python tests/docs/generated.py --write` mends it."""
    text = generated.written(document)
    assert text == document.read_text(encoding="utf-8")
    if document.name in generated.TABLES:
        name, table = generated.TABLES[document.name]
        assert generated.between(name, table()) in text
