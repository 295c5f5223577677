"""`fp8_backends.checkpoints.export` on two ranks: one run of all checks."""

import pytest
from ranks import report, run


@pytest.mark.slow
def test_export_on_two_ranks(subtests):
    report(subtests, run("export_checks.py", 2))
