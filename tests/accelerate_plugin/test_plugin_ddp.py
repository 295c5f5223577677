"""Two processes with gloo: what `accelerate launch` starts as MULTI_CPU, DDP around a converted model."""

from __future__ import annotations

import sys

import pytest
from plugin_training import run_python

SCRIPT = """
import sys
sys.path[:0] = [{tests!r}, {tests!r} + "/../distributed"]

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import TorchDynamoPlugin
from ddp_training import Traffic, assert_equal_on_all_ranks
from plugin_training import batches, mlp, train

import fp8_backends
from fp8_backends.comm.ddp import Connection
from fp8_backends.errors import FP8BackendError


def accelerator(backend, accumulate=1, **options):
    AcceleratorState._reset_state()
    GradientState._reset_state()
    recipe = fp8_backends.FP8RecipeKwargs(backend=backend, **options.pop("fields", {{}}))
    made = Accelerator(
        mixed_precision="fp8", kwargs_handlers=[recipe], gradient_accumulation_steps=accumulate, **options
    )
    assert made.num_processes == 2
    return made


def prepared(acc):
    model = mlp()
    return acc.prepare(model, torch.optim.AdamW(model.parameters(), 5e-3))


def accumulates_and_travels_once(backend):
    acc = accelerator(backend, accumulate=4)
    model, optimizer = prepared(acc)
    data = batches(16, seed=1)[acc.process_index :: 2]
    with Traffic() as traffic:
        train(acc, model, optimizer, data)  # 8 microbatches: two steps
    assert traffic.count("all_to_all_single") == 2 * len(Connection.find(model).reducer.buckets), traffic.calls
    assert_equal_on_all_ranks(model, optimizer.optimizer)


class Blocks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        blocks = (torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh()) for _ in range(2))
        self.blocks = torch.nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def compiles_by_regions(backend):
    acc = accelerator(backend, dynamo_plugin=TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=True))
    model = Blocks()
    model, optimizer = acc.prepare(model, torch.optim.AdamW(model.parameters(), 5e-3))
    train(acc, model, optimizer, [(x, x.tanh()) for x, _ in batches(4, seed=1)[acc.process_index :: 2]])
    assert Connection.find(model).reducer is not None and "OptimizedModule" in repr(model)
    assert_equal_on_all_ranks(model, optimizer.optimizer)


def scaler_of_fp16_skips_on_all_ranks(backend):
    acc = accelerator(backend, fields={{"autocast_dtype": "fp16"}})
    model, optimizer = prepared(acc)
    data = batches(6, seed=1)[acc.process_index :: 2]
    train(acc, model, optimizer, data[:2])
    scale = acc.scaler.get_scale()
    x, y = data[2]
    acc.backward(((model(x) - y) ** 2).mean() * (float("inf") if acc.process_index else 1.0))
    optimizer.step()
    assert optimizer.step_was_skipped and acc.scaler.get_scale() < scale
    optimizer.zero_grad()
    assert_equal_on_all_ranks(model, optimizer.optimizer)


def refuses_a_model_with_nothing_for_ddp(backend):
    acc = accelerator(backend)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32, bias=False))
    try:
        acc.prepare(model, torch.optim.AdamW(model.parameters()))
    except FP8BackendError as error:
        assert "exclude" in str(error)
    else:
        raise AssertionError("prepared")


accumulates_and_travels_once("msamp:O2")
compiles_by_regions("msamp:O2")
scaler_of_fp16_skips_on_all_ranks("msamp:O2")
refuses_a_model_with_nothing_for_ddp("msamp:O2")
PartialState().print("done")
PartialState().destroy_process_group()
"""


@pytest.mark.slow
def test_ddp_accumulates_compiles_and_skips_in_step(tmp_path):
    script = tmp_path / "script.py"
    tests = __file__.rpartition("/")[0]
    script.write_text(SCRIPT.format(tests=tests))
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone")
    output = run_python(str(script), *torchrun, ACCELERATE_USE_CPU="true")
    assert "done" in output
