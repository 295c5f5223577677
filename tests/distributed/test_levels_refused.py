"""A level on two ranks: its gradients would not be reduced, so it is refused and never drifts in silence."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import torch
from torch import nn
import fp8_backends
from fp8_backends.errors import BackendUnavailableError, FP8BackendError
from fp8_backends.scaled_tensor import ScaledTensor

def model_and_optimizer():
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    return model, torch.optim.AdamW(model.parameters())

early, its_optimizer = fp8_backends.prepare(*model_and_optimizer(), "msamp:O2")
torch.distributed.init_process_group("gloo")
model, optimizer = model_and_optimizer()
try:
    fp8_backends.prepare(model, optimizer, "msamp:O2")
except BackendUnavailableError as error:
    assert "one process" in str(error) and not any(isinstance(p, ScaledTensor) for p in model.parameters())
    assert type(optimizer) is torch.optim.AdamW
else:
    raise AssertionError("prepared")
early(torch.randn(4, 64)).sum().backward()
before = early[0].weight.dequantize()
try:
    its_optimizer.step()
except FP8BackendError as error:
    assert "drift apart" in str(error) and torch.equal(early[0].weight.dequantize(), before)
else:
    raise AssertionError("stepped")
print("refused")
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_a_level_on_two_ranks_is_refused_when_prepared_and_when_it_steps(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    repository = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    environment = {**os.environ, "PYTHONPATH": repository, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*launcher, str(tmp_path / "script.py")], env=environment, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0 and ended.stdout.count("refused") == 2, ended.stdout + ended.stderr
