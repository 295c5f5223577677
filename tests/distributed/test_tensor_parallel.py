"""Tensor parallelism on two ranks: one run of all checks."""

import pytest
from ranks import report, run


@pytest.mark.slow
def test_tensor_parallelism_on_two_ranks(subtests):
    report(subtests, run("tensor_parallel_checks.py", 2))
