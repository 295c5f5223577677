"""TransformerEngine's cells of the matrix: each of its backends under each engine, over the stand-in."""

from __future__ import annotations

from pathlib import Path

import pytest
from distributed import matrix
from distributed.ranks import report, run

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize("engines", [("single",), ("DDP", "FSDP2", "ZeRO-1", "ZeRO-2", "ZeRO-3")], ids=len)
def test_each_te_backend_under(engines, te_site, subtests):
    starts = tuple(f"check_{engine.replace('-', '')}_" for engine in engines)
    names = [name for name in matrix.checks(matrix.TE_BACKENDS) if name.startswith(starts)]
    outcome = run(str(HERE / "te_matrix_checks.py"), len(engines[:2]), *names, TE_SITE=str(te_site))
    report(subtests, outcome)
    assert list(outcome) == names
