"""Run files of checks on two and on four ranks, several in one launch."""

from __future__ import annotations

import pytest
from ranks import report, run
from widths import nightly

BY_DEFAULT = "ddp_checks", "ddp_connecting"
ON_TWO_RANKS = (
    ("states_checks", "release_checks", "offload_checks"),
    ("fsdp2_checks", "gathers_checks"),
    ("fsdp2_accelerate_checks",),
    ("guard_checks", "export_checks", "monitor_checks", "ported_checks"),
    ("expert_checks",),
    (
        *("saved_activations_checks", "conv1d_checks", "head_checks"),
        *("tensor_parallel_checks", "tensor_parallel_engine_checks"),
    ),
)
"""Together half a minute or less of each rank's CPU."""
ON_FOUR_RANKS = (
    "ddp_checks:check_microbatches_are_summed_in_fp32_and_reduced_once",
    "ddp_checks:check_unused_weights_and_keyword_only_inputs",
    "ddp_checks:check_uneven_inputs",
    "ddp_connecting:check_subgroup_ddp_uses_its_group_and_timeout",
    "ddp_connecting:check_bytes_sent_by_a_rank",
    "states_checks:check_bytes_per_element_on_each_rank",
    "fsdp2_checks:hybrid_mesh",
    "fsdp2_accelerate_checks:hybrid_mesh",
    "tensor_parallel_engine_checks:fsdp2_over_parts",
    "tensor_parallel_engine_checks:fsdp2_gathers_the_common_scale",
)


@pytest.mark.parametrize(
    "files", [BY_DEFAULT, *map(nightly, ON_TWO_RANKS)], ids=lambda files: files[0]
)
def test_checks_on_two_ranks(files, subtests):
    report(subtests, run("ranks.py", 2, *files))


@pytest.mark.nightly
def test_checks_on_four_ranks(subtests):
    report(subtests, run("ranks.py", 4, *ON_FOUR_RANKS))
