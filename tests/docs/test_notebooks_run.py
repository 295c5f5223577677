"""The example notebooks run, and their stored outputs have the structure of a new run."""

from __future__ import annotations

import json
import re

import nbformat
import pytest
from notebooks import NOTEBOOKS, executed, structure


def test_stored_outputs_name_no_machine():
    assert [path.stem for path in NOTEBOOKS] == ["first_training", "reading_numerics"]
    for path in NOTEBOOKS:
        notebook = nbformat.read(path, 4)
        nbformat.validate(notebook)
        outputs = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
        assert sum(map(bool, outputs)) > len(outputs) / 2
        assert not re.search(
            r"/(tmp|home|root|work|usr)/|ipykernel_|\d\d:\d\d", json.dumps(outputs)
        )


@pytest.mark.nightly
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_with_its_stored_outputs(path):
    """`python tests/docs/notebooks.py --write` updates them."""
    stored, new = structure(nbformat.read(path, 4)), structure(executed(path))
    assert any(proofs for outputs in stored for *_, proofs in outputs)
    assert new == stored
