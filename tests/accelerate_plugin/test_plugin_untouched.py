"""Without FP8, stock Accelerate behaves identically with and without this package, to the bit."""

from __future__ import annotations

import pytest
from plugin_training import run_python

SCRIPT = """
import sys
from pathlib import Path

import torch
{imports}
from accelerate import Accelerator
from torch import nn

torch.manual_seed(0)
accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2, cpu=True)
model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 16))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
for _ in range(10):
    with accelerator.accumulate(model):
        loss = model(torch.randn(8, 32)).square().mean()
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0) if accelerator.sync_gradients else 0
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    print(loss.item().hex(), float(norm).hex(), scheduler.get_last_lr())
print(type(accelerator).__name__, type(accelerator).__mro__[1].__name__)
accelerator.save_state({folder!r})
accelerator.save_model(model, {folder!r} + "/export")
for path in sorted(Path({folder!r}).rglob("*.safetensors")):
    print(path.name, path.read_bytes().hex())
print(sorted(path.name for path in Path({folder!r}).rglob("*")))
"""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    def run(imports: str, **environment) -> str:
        folder = tmp_path_factory.mktemp("run")
        script = folder / "script.py"
        script.write_text(SCRIPT.format(imports=imports, folder=str(folder / "state")))
        return run_python(str(script), **environment)

    return run


@pytest.fixture(scope="module")
def stock(outcome):
    return outcome("")


def test_import_changes_no_bit_of_bf16_training(outcome, stock):
    assert "Accelerator object" in stock
    assert outcome("import fp8_backends") == stock


def test_disabled_package_changes_no_bit(outcome, stock):
    check = "import accelerate; assert not hasattr(accelerate.Accelerator.__init__, '__wrapped__')"
    assert outcome(f"import fp8_backends; {check}", FP8_BACKENDS_DISABLE="1") == stock
