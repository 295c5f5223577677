"""Accelerate's other features with FP8 on two processes; on one in `tests/accelerate_plugin`."""

from __future__ import annotations

import pytest
from ranks import report, run


@pytest.mark.slow
def test_features_on_two_ranks(subtests):
    report(subtests, run("feature_checks.py", 2))
