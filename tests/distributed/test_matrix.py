"""Every backend under every engine through stock Accelerate: save, resume, clip, accumulate, compile, or refused."""

from __future__ import annotations

import matrix
import pytest
from ranks import report, run


@pytest.mark.parametrize(
    "nightly", [pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("engine", matrix.WHOLE)
def test_each_backend_under(engine, nightly, subtests):
    names = list(matrix.checks(engines=(engine,), nightly=nightly))
    outcome = run("matrix_checks.py", {"single": 1, "TPxDP": 4}.get(engine, 2), *names)
    report(subtests, outcome)
    assert list(outcome) == names


@pytest.mark.slow
def test_sequences_and_layers_that_ranks_split(subtests):
    outcome = run("split_checks.py", 2)
    report(subtests, outcome)
    assert list(outcome) == list(matrix.checks(engines=matrix.SPLIT))
