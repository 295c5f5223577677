"""DeepSpeed ZeRO-1, 2 and 3 on two ranks, its CPU accelerator and gloo."""

from __future__ import annotations

import re

import pytest
from ranks import HERE, report, run

CHECKS = re.findall(r"^def (check_\w+)", (HERE / "deepspeed_checks.py").read_text(), re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, 1])  # two, each well below the time limit of a launch on a busy machine
def test_deepspeed_trains_in_fp8_on_two_ranks(subtests, part):
    pytest.importorskip("deepspeed")
    # not ACCELERATE_USE_CPU: under it Accelerate leaves DeepSpeed out and trains with DDP
    environment = {"ACCELERATE_USE_CPU": "false", "CUDA_VISIBLE_DEVICES": ""}
    report(subtests, run("deepspeed_checks.py", 2, *CHECKS[part::2], **environment))
