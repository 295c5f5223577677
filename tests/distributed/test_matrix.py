"""Every backend under every engine through stock Accelerate: save, resume, clip, accumulate,
compile, or refused."""

from __future__ import annotations

import matrix
import pytest
from ranks import report, run

DEFAULT = [engine for engine in matrix.WHOLE if matrix.checks(engines=(engine,), nightly=False)]


@pytest.mark.parametrize(
    ("engine", "nightly"),
    [
        *(pytest.param(engine, False, marks=pytest.mark.slow) for engine in DEFAULT),
        *(pytest.param(engine, True, marks=pytest.mark.nightly) for engine in matrix.WHOLE),
    ],
)
def test_backend_trains_under_engine(engine, nightly, subtests):
    names = list(matrix.checks(engines=(engine,), nightly=nightly))
    outcome = run("matrix_checks.py", {"single": 1, "TPxDP": 4}.get(engine, 2), *names)
    report(subtests, outcome)
    assert list(outcome) == names


@pytest.mark.slow
def test_split_sequences_and_layers_train(subtests):
    outcome = run("split_checks.py", 2)
    report(subtests, outcome)
    assert list(outcome) == list(matrix.checks(engines=matrix.SPLIT))
