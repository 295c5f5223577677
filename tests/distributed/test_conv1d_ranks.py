"""GPT-2 under DDP and FSDP2."""

from __future__ import annotations

import pytest
from ranks import report, run


@pytest.mark.slow
def test_gpt2_on_two_ranks(subtests):
    report(subtests, run("conv1d_checks.py", 2))
