"""Activations in FP8 on two ranks, under DDP and FSDP2."""

from __future__ import annotations

import pytest
from ranks import report, run


@pytest.mark.slow
def test_saved_activations_on_two_ranks(subtests):
    report(subtests, run("saved_activations_checks.py", 2))
