"""Gradient release on 2 ranks: one run of all checks."""

import pytest
from ranks import report, run

pytestmark = pytest.mark.slow


def test_gradient_release_on_two_ranks(subtests):
    report(subtests, run("release_checks.py", 2))
