"""The guard on two ranks."""

from __future__ import annotations

import pytest
from ranks import report, run


@pytest.mark.slow
def test_the_guard_on_two_ranks(subtests):
    report(subtests, run("guard_checks.py", 2))
