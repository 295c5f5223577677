"""A fused output head under DDP and FSDP2."""

from __future__ import annotations

import pytest
from ranks import report, run


@pytest.mark.slow
def test_a_fused_head_on_two_ranks(subtests):
    report(subtests, run("head_checks.py", 2))
