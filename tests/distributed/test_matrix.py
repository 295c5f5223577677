"""Every backend under every engine through stock Accelerate: save, resume, clip, accumulate, compile, or refused."""

from __future__ import annotations

import re
from pathlib import Path

import matrix
import pytest
from ranks import report, run

README = Path(__file__).parents[2] / "README.rst"


@pytest.mark.slow
@pytest.mark.parametrize("engine", matrix.ENGINES)
def test_each_backend_under(engine, subtests):
    names = [name for name in matrix.checks() if name.startswith(f"check_{engine.replace('-', '')}_")]
    outcome = run("matrix_checks.py", 1 if engine == "single" else 2, *names)
    report(subtests, outcome)
    assert list(outcome) == names


def test_the_table_of_the_readme_is_this_matrix():
    lines = README.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.split() == ["backend", *matrix.ENGINES])
    rows = {}
    for line in lines[first + 2 :]:
        if line.startswith("=="):
            break
        backend, *cells = re.split(r"\s{2,}", line.strip())
        rows[backend.strip("`")] = cells
    expected = {
        backend: ["refused" if matrix.refusal(backend, engine, "train") else "all" for engine in matrix.ENGINES]
        for backend in (*matrix.BACKENDS, *matrix.TE_BACKENDS)
    }
    assert rows == expected
