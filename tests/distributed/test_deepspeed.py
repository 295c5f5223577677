"""DeepSpeed ZeRO-1, 2 and 3 on two ranks, its CPU accelerator and gloo."""

from __future__ import annotations

import pytest
from ranks import report, run

ENVIRONMENT = {"ACCELERATE_USE_CPU": "false", "CUDA_VISIBLE_DEVICES": ""}
"""Not ACCELERATE_USE_CPU: under it Accelerate leaves DeepSpeed out and trains with DDP."""


@pytest.mark.nightly
def test_deepspeed_trains_in_fp8_on_two_ranks(subtests):
    report(subtests, run("deepspeed_checks.py", 2, **ENVIRONMENT))


@pytest.mark.nightly
def test_levels_train_under_deepspeed_as_under_ddp(subtests):
    report(subtests, run("deepspeed_level_checks.py", 2, **ENVIRONMENT))


@pytest.mark.nightly
@pytest.mark.parametrize("count", [1, 4])
def test_routes_to_levels_under_deepspeed(count, subtests, tmp_path):
    """By Trainer and by files of other projects; checkpoints of two ranks resume on one and
    four."""
    environment = ENVIRONMENT | {"DEEPSPEED_CHECKPOINTS": str(tmp_path)}
    checks = ["write_checkpoints"]
    if count == 1:
        checks += ["check_trainer_resumes_bitwise", "check_files_of_other_projects"]
        checks += ["check_run_of_zero_without_a_level_continues_at_a_level"]
    written = run("deepspeed_route_checks.py", 2, *checks, **environment)
    report(subtests, written)
    read = run("deepspeed_route_checks.py", count, "read_checkpoints", **environment)
    report(subtests, read)
    for level, losses in written["write_checkpoints"]["figures"].items():
        with subtests.test(f"{level} continues on {count} as it would have"):
            resumed = read["read_checkpoints"]["figures"][level]
            assert resumed[0] == pytest.approx(losses[0], abs=1e-6), (
                "before any gradient was reduced over other ranks"
            )
            # gradients in E4M3 are rounded at other places
            assert resumed == pytest.approx(losses, rel=5e-3)


@pytest.mark.nightly
def test_levels_under_deepspeed_on_four_ranks(subtests):
    checks = (
        "check_losses_equal_ddp_at_every_stage",
        "check_wire_as_under_ddp",
    )
    report(subtests, run("deepspeed_level_checks.py", 4, *checks, **ENVIRONMENT))


@pytest.mark.nightly
def test_a_compiled_engine_trains_and_proves_it(subtests):
    report(subtests, run("deepspeed_checks.py", 2, "compiled_engine", **ENVIRONMENT))
