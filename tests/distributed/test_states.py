"""Optimizers on several ranks: all checks on 2 ranks, and bytes of an element on 4."""

import pytest
from ranks import report, run

pytestmark = pytest.mark.slow


def test_states_on_two_ranks(subtests):
    report(subtests, run("states_checks.py", 2))


def test_bytes_on_four_ranks(subtests):
    report(subtests, run("states_checks.py", 4, "check_bytes_per_element_on_each_rank"))
