"""TransformerEngine's cells of the matrix: each of its backends under each engine, over the stand-in."""

from __future__ import annotations

from pathlib import Path

import pytest
from distributed import matrix
from distributed.ranks import report, run

HERE = Path(__file__).parent
ON_TWO_RANKS = tuple(engine for engine in matrix.ENGINES if engine not in ("single", "TPxDP"))


@pytest.mark.slow
@pytest.mark.parametrize("engines", [("single",), ON_TWO_RANKS], ids=len)
def test_each_te_backend_under(engines, te_site, subtests):
    names = list(matrix.checks(matrix.TE_BACKENDS, engines))
    outcome = run(str(HERE / "te_matrix_checks.py"), len(engines[:2]), *names, TE_SITE=str(te_site))
    report(subtests, outcome)
    assert list(outcome) == names
