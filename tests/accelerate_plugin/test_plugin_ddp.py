"""Two processes with gloo: DDP around a converted model."""

from __future__ import annotations

import sys

import pytest
from plugin_training import run_python

SCRIPT = """
import sys
sys.path.insert(0, {tests!r})

import torch
from accelerate import Accelerator
from plugin_training import batches, mlp, train

import fp8_backends

recipe = fp8_backends.FP8RecipeKwargs(backend={backend!r})
accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe])
assert accelerator.num_processes == 2
model = mlp()
before = [p.detach().clone() for p in model.parameters()]
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 5e-3))
assert type(model).__name__ == "DistributedDataParallel"
data = batches(16, seed=1)[accelerator.process_index :: 2]
losses = train(accelerator, model, optimizer, data[:6])
assert all(not torch.equal(p, b) for p, b in zip(model.parameters(), before))
for p in model.parameters():
    assert all(torch.equal(p, other) for other in accelerator.gather(p.detach()[None]))
products = fp8_backends.audit(accelerator.unwrap_model(model)).products
assert len(products) == 3 and all(c["fprop"] and c["wgrad"] for c in products.values())
accelerator.save_state({folder!r})
unbroken = train(accelerator, model, optimizer, data[6:])
accelerator.load_state({folder!r})
assert train(accelerator, model, optimizer, data[6:]) == unbroken
assert list(accelerator.get_state_dict(model)) == list(mlp().state_dict())
accelerator.print("done", losses[0] > losses[-1])
accelerator.end_training()
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["native:delayed"])
def test_ddp_trains_stays_in_step_and_resumes(backend, tmp_path):
    script = tmp_path / "script.py"
    folder = str(tmp_path / "state")
    tests = __file__.rpartition("/")[0]
    script.write_text(SCRIPT.format(backend=backend, folder=folder, tests=tests))
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone")
    output = run_python(str(script), *torchrun, ACCELERATE_USE_CPU="true")
    assert "done True" in output
    assert (tmp_path / "state" / "fp8_scaling_1.safetensors").exists()
