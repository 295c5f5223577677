"""Compare FSDP2 on two ranks with other world sizes. `test_checks.py` has its other checks."""

from __future__ import annotations

import pytest
from ranks import report, run

LARGEST_GAP = 0.01
"""Nats between a run on one rank and the same data on several. Differences: gradients are rounded
to E4M3 on the wire (0.026 relative L2, unbiased), and dynamic scales follow half a batch. Both act
as noise in a gradient already rounded to E4M3 and E5M2; the final loss may differ from bf16 by
0.01."""


@pytest.mark.nightly
def test_losses_are_those_of_one_rank(subtests):
    on_two, on_one = (run("fsdp2_checks.py", ranks, "losses") for ranks in (2, 1))
    for outcome in (on_two, on_one):
        report(subtests, outcome)
    for backend, losses in on_one["losses"]["figures"].items():
        with subtests.test(f"{backend}: losses as on one rank for 25 steps"):
            sharded = on_two["losses"]["figures"][backend]
            gaps = [abs(a - b) for a, b in zip(losses, sharded, strict=True)]
            assert len(gaps) == 25 and max(gaps) <= LARGEST_GAP, max(gaps)
            assert losses[-1] < 0.1 < 4 < losses[0], "it learns"


@pytest.mark.nightly
@pytest.mark.parametrize("readers", [1, 4])
def test_checkpoint_of_two_ranks_resumes_on_other_world_sizes(readers, subtests, tmp_path):
    folder = {"FSDP2_CHECKPOINTS": str(tmp_path)}
    written = run("fsdp2_checks.py", 2, "write_checkpoints", **folder)
    report(subtests, written)
    read = run("fsdp2_checks.py", readers, "read_checkpoints", **folder)
    report(subtests, read)
    for level, losses in written["write_checkpoints"]["figures"].items():
        with subtests.test(f"{level} goes on on {readers} as it would have"):
            resumed = read["read_checkpoints"]["figures"][level]
            assert max(abs(a - b) for a, b in zip(losses, resumed, strict=True)) <= LARGEST_GAP
            assert abs(losses[0] - resumed[0]) <= 1e-4, (
                "before any gradient was reduced over other ranks"
            )
