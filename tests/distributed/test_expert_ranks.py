"""Mixtures of experts on two ranks: one run of all checks."""

import pytest
from ranks import report, run


@pytest.mark.slow
def test_experts_on_two_ranks(subtests):
    report(subtests, run("expert_checks.py", 2))
