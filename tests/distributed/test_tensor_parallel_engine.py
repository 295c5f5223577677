"""Tensor parallelism around the products: one run on two ranks, and one on four for FSDP2 over the
parts."""

import pytest
from ranks import report, run


@pytest.mark.slow
def test_two_ranks_share_layers(subtests):
    report(subtests, run("tensor_parallel_engine_checks.py", 2))


@pytest.mark.slow
def test_fsdp2_shards_tensor_parallel_layers(subtests):
    checks = ("fsdp2_over_parts", "fsdp2_gathers_the_common_scale")
    report(subtests, run("tensor_parallel_engine_checks.py", 4, *checks))
