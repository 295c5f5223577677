"""LoRA over a frozen base in FP8 or FP4 under FSDP2: codes are sharded and gathered as bytes."""

from __future__ import annotations

import pytest
from ranks import report, run


@pytest.mark.nightly
def test_frozen_codes_on_two_ranks(subtests):
    report(subtests, run("frozen_checks.py", 2))


@pytest.mark.nightly
def test_frozen_codes_on_four_ranks(subtests):
    """Shards are uneven, and their borders cut blocks."""
    report(subtests, run("frozen_checks.py", 4))


@pytest.mark.nightly
def test_adapters_through_accelerate(subtests):
    report(subtests, run("frozen_accelerate_checks.py", 2))


@pytest.mark.nightly
def test_checkpoint_of_two_ranks_resumes_on_other_world_sizes(subtests, tmp_path):
    folder = {"FROZEN_CHECKPOINTS": str(tmp_path)}
    written = run("frozen_checks.py", 2, "write_checkpoints", **folder)
    report(subtests, written)
    for readers in (1, 4):
        read = run("frozen_checks.py", readers, "read_checkpoints", **folder)
        report(subtests, read)
        with subtests.test(f"{readers} ranks continue to the bit"):
            expected = written["write_checkpoints"]["figures"]
            assert expected and read["read_checkpoints"]["figures"] == expected
