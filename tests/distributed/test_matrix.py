"""Every backend under every engine through stock Accelerate: save, resume, clip, accumulate,
compile, or refused."""

from __future__ import annotations

import matrix
import pytest
import widths
from ranks import report, run

DEFAULT = (
    ("single",),
    ("DDP", "FSDP2", "TP"),
    ("ZeRO-3", *matrix.SPLIT),
    ("TPxDP",),
)
"""Engines by launch."""


def names_of(engines: tuple[str, ...], nightly: bool) -> list[str]:
    """Return the cells of one of the runs: in the nightly one, those that the default run leaves
    out. A compiled cell follows its eager one."""
    default = matrix.checks(engines=engines, nightly=False)
    if not nightly:
        return list(default)
    left_out = matrix.checks(engines=engines).keys() - default.keys()
    return [
        name
        for name in matrix.checks(engines=engines)
        if name in left_out or f"{name}_compiled" in left_out
    ]


@pytest.mark.parametrize(
    ("engines", "nightly"),
    [
        *((engines, False) for engines in DEFAULT[:2]),
        *(widths.nightly(engines, False) for engines in DEFAULT[2:]),
        *(widths.nightly((engine,), True) for engine in matrix.WHOLE if names_of((engine,), True)),
    ],
    ids=lambda value: "+".join(value) if type(value) is tuple else ("default", "nightly")[value],
)
def test_backends_train_under_engines(engines, nightly, subtests):
    names = names_of(engines, nightly)
    ranks = {"single": 1, "TPxDP": 4}.get(engines[0], 2)
    outcome = run("matrix_checks.py", ranks, *names)
    report(subtests, outcome)
    assert list(outcome) == names
