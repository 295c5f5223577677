"""The monitor on two ranks."""

import pytest
from ranks import report, run


@pytest.mark.slow
def test_two_ranks_have_one_file_and_their_own_losses(subtests):
    report(subtests, run("monitor_checks.py", ranks=2))
