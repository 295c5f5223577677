"""DeepSpeed ZeRO-1, 2 and 3 on two ranks, its CPU accelerator and gloo."""

from __future__ import annotations

import pytest
from ranks import report, run


@pytest.mark.slow
def test_deepspeed_trains_in_fp8_on_two_ranks(subtests):
    pytest.importorskip("deepspeed")
    # not ACCELERATE_USE_CPU: under it Accelerate leaves DeepSpeed out and trains with DDP
    environment = {"ACCELERATE_USE_CPU": "false", "CUDA_VISIBLE_DEVICES": ""}
    report(subtests, run("deepspeed_checks.py", 2, **environment))
