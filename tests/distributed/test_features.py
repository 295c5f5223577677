"""Accelerate's other features with FP8 on two processes; on one in `tests/accelerate_plugin`."""

from __future__ import annotations

import feature_checks
import pytest
from feature_table import cells, in_turn
from ranks import report, run

WIDE = {
    feature_checks.name_of(*cell) for cell in cells() if not in_turn(*cell, processes=2)
} & feature_checks.checks().keys()


@pytest.mark.nightly
@pytest.mark.parametrize("wide", [False, True])
def test_features_on_two_ranks(wide, subtests):
    checks = [name for name in vars(feature_checks) if name.startswith("check_")]
    report(subtests, run("feature_checks.py", 2, *(n for n in checks if (n in WIDE) == wide)))
