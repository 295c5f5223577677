"""The `te` compute on several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from distributed.ranks import report, run


@pytest.mark.nightly
def test_te_on_ranks(te_site, subtests):
    report(subtests, run(str(Path(__file__).parent / "te_checks.py"), 2, TE_SITE=str(te_site)))
