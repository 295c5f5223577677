"""Optimizer states in the memory of the host on 2 ranks: one run of all checks."""

import pytest
from ranks import report, run

pytestmark = pytest.mark.slow


def test_states_in_the_host_of_two_ranks(subtests):
    report(subtests, run("offload_checks.py", 2))
