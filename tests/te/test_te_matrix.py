"""TransformerEngine's cells of the matrix: each of its backends under each engine, over the
stand-in."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import widths

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "distributed"))

import matrix  # noqa: E402
from ranks import report, run  # noqa: E402

ON_TWO_RANKS = tuple(engine for engine in matrix.ENGINES if engine not in ("single", "TPxDP"))


@pytest.mark.parametrize(
    ("engines", "nightly"),
    [
        (("single",), False),
        widths.nightly(("single",), True),
        *(widths.nightly(ON_TWO_RANKS, wide) for wide in (False, True)),
    ],
    ids=lambda value: len(value) if type(value) is tuple else ("default", "nightly")[value],
)
def test_te_backend_trains_under_engine(engines, nightly, te_site, subtests):
    names = list(matrix.checks(matrix.TE_BACKENDS, engines, nightly))
    outcome = run(str(HERE / "te_matrix_checks.py"), len(engines[:2]), *names, TE_SITE=str(te_site))
    report(subtests, outcome)
    assert list(outcome) == names
