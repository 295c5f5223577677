"""The monitor on two ranks."""

import pytest
from ranks import report, run


@pytest.mark.slow
def test_two_ranks_write_one_file_with_their_losses(subtests):
    report(subtests, run("monitor_checks.py", ranks=2))
