"""Accelerate's own logic for several processes, over our backends."""

from __future__ import annotations

import pytest
from ranks import report, run


@pytest.mark.slow
def test_accelerates_logic_for_two_ranks(subtests):
    report(subtests, run("ported_checks.py", 2))
