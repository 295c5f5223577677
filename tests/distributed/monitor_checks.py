"""Monitor two ranks: rank 0 writes its statistics, and training stays unchanged."""

import json
import math
import os
import tempfile
from pathlib import Path

import engines
import ranks
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.tracking import GeneralTracker
from fsdp2_training import prepared_in
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fp8_backends
from fp8_backends.watch.monitor import summary

SIZES = {"input": 32 * 64, "weight": 64 * 128, "grad_output": 32 * 128}
"""Elements of the first layer's casts."""
STORED = ("gradient", "exp_avg", "exp_avg_sq")


def trained(spec, sharded, every):
    """Return the losses of some steps, and this rank's file."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    fields = {"backend": spec, "monitor_every": every}
    with tempfile.TemporaryDirectory() as folder:
        fields["monitor_file"] = os.path.join(folder, "file")
        wrapped, optimizer = prepared_in(
            fully_shard if sharded else DistributedDataParallel, model, fields
        )
        generator, losses = torch.Generator().manual_seed(dist.get_rank()), []
        for _ in range(4):
            x = torch.randn(32, 64, generator=generator)
            loss = (wrapped(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        file = Path(fields["monitor_file"])
        return losses, [
            json.loads(line) for line in file.read_text().splitlines()
        ] if file.exists() else None


def same_losses_and_one_writer(spec, sharded, stored=()):
    losses, records = trained(spec, sharded, every=2)
    assert losses == trained(spec, sharded, every=0)[0]
    if dist.get_rank():
        assert records is None
        return
    assert [record["step"] for record in records] == [2, 4]
    shard = SIZES["weight"] // (1 + sharded)
    expected = SIZES | dict.fromkeys(stored, shard)
    if sharded and stored:
        del expected["weight"]  # gathered in E4M3, and the master is not
    assert {
        name: entry["elements"] for name, entry in records[-1]["tensors"]["0"].items()
    } == expected


def check_ddp():
    same_losses_and_one_writer("native:delayed", sharded=False)


def check_ddp_with_sharded_states():
    same_losses_and_one_writer("msamp:O2", sharded=False, stored=STORED)


def check_fsdp2():
    same_losses_and_one_writer("native:dynamic", sharded=True)


def check_fsdp2_with_stored_weights():
    same_losses_and_one_writer("msamp:O3", sharded=True, stored=STORED)


class Notes(GeneralTracker):
    name, requires_logging_directory, main_process_only, tracker = "notes", False, False, None
    rows: list = []

    def __init__(self):
        super().__init__()

    def store_init_configuration(self, values):
        pass

    def log(self, values, step=None, **_):
        self.rows.append((step, values))


def one_rank_logs_its_samples(engine):
    """Trackers on every rank: the main process has the samples of its file, the others nothing."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    Notes.rows, file = [], Path(ranks.shared_folder(), "file")
    recipe = fp8_backends.FP8RecipeKwargs(
        backend="native:dynamic", monitor_every=2, monitor_file=str(file), guard="skip"
    )
    arguments = engines.engine_arguments(engine, 1.0, 1, "Sequential")
    accelerator = Accelerator(
        cpu=True, mixed_precision="fp8", kwargs_handlers=[recipe], log_with=Notes(), **arguments
    )
    engines.start_engine(accelerator, engine, arguments)
    accelerator.init_trackers("run")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for step in range(4):
        x = torch.randn(32, 64)
        x[0, 0] = math.nan if step == 2 and dist.get_rank() == 1 else 0.0
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank():
        assert Notes.rows == []
        return
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert Notes.rows == [(record["step"], summary(record)) for record in records]
    assert [
        (step, values["fp8/share"], values["fp8/guard_skipped"]) for step, values in Notes.rows
    ] == [
        (2, 1.0, 0),
        (4, 1.0, 1),
    ]


def check_trackers_under_ddp():
    one_rank_logs_its_samples("DDP")


def check_trackers_under_fsdp2():
    one_rank_logs_its_samples("FSDP2")


if __name__ == "__main__":
    ranks.main(globals())
