"""Trackers get the monitor's samples: Accelerate's, those of a Trainer's `report_to`, and
Lightning's loggers."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path

import lightning
import pytest
import torch
from accelerate import Accelerator
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_trainers import trainer_for
from torch import nn
from widths import nightly_but

import fp8_backends
from fp8_backends.lightning import FP8Precision
from fp8_backends.torch_tools.optimizers import unwrapped
from fp8_backends.watch.monitor import monitor_of, summary

WORST = ("fp8/worst_sqnr", "fp8/saturated", "fp8/flushed", "fp8/not_finite")
GUARD = ("fp8/guard_faults", "fp8/guard_skipped")
LIGHTNINGS_STEP = "trainer/global_step"


def tensorboard(folder) -> dict[str, dict[int, float]]:
    """Read {tag: {step: value}} from all event files below a folder."""
    scalars = defaultdict(dict)
    for path in Path(folder).rglob("events.*"):
        events = EventAccumulator(str(path)).Reload()
        for tag in events.Tags()["scalars"]:
            scalars[tag] |= {event.step: event.value for event in events.Scalars(tag)}
    return scalars


def wandb_rows(folder) -> list[dict]:
    """Read the rows of an offline run: blocks of 32 KiB of records, a checksum, length and kind
    before each part."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.finish()
    wandb.teardown()  # writes all
    (file,) = Path(folder).rglob("run-*.wandb")
    data, position, payload, rows = file.read_bytes(), 7, b"", []
    while position + 7 <= len(data):
        if (left := 2**15 - position % 2**15) < 7:
            position += left
            continue
        length, kind = (
            int.from_bytes(data[position + 4 : position + 6], "little"),
            data[position + 6],
        )
        payload += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record, payload = Record.FromString(payload), b""
            if items := record.history.item:
                rows.append(
                    {
                        item.key or "/".join(item.nested_key): json.loads(item.value_json)
                        for item in items
                    }
                )
    return rows


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """Let W&B write into the test's folder."""
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    wandb.teardown()  # it has read the environment once
    yield
    wandb.teardown()


def by_step(rows: list[dict], axis: str) -> dict[str, dict[int, float]]:
    """Return {name: {step: value}} of rows with this axis."""
    scalars = defaultdict(dict)
    for row in rows:
        for name, value in row.items() if axis in row else ():
            scalars[name][row[axis]] = value
    return scalars


def assert_same_as_file(scalars, file, prefix: str = "", before: int = 0, extra=()) -> set[str]:
    """Compare the `fp8/` scalars with the file's summaries. `before`: the tracker counts steps from
    1 - before."""
    expected = defaultdict(dict)
    for record in map(json.loads, Path(file).read_text().splitlines()):
        for name, value in summary(record).items():
            expected[prefix + name][record["step"] - before] = pytest.approx(
                value, rel=1e-6, nan_ok=True
            )
    found = {name: values for name, values in scalars.items() if name.startswith(f"{prefix}fp8/")}
    assert {name: found[name] for name in found if name not in extra} == expected
    return {name.removeprefix(prefix) for name in expected}


def train(tracker: str, folder, offset: int = 1, **fields) -> Accelerator:
    """Train 6 steps, the fifth with a NaN, and log each loss: at its step, counted from
    `offset`."""
    recipe = fp8_backends.FP8RecipeKwargs(
        backend="native:dynamic", monitor_file=folder / "samples", **fields
    )
    accelerator = Accelerator(
        mixed_precision="fp8",
        kwargs_handlers=[recipe],
        log_with=tracker,
        project_dir=folder,
        cpu=True,
    )
    accelerator.init_trackers("run")
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for index in range(6):
        x = torch.randn(32, 64)
        x[0, 0] = math.nan if index == 4 and recipe.guard == "skip" else 0.0
        loss = model(x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": loss.item()}, step=index + offset)
    accelerator.end_training()
    return accelerator


def test_accelerates_tensorboard_has_the_values_of_the_file(tmp_path):
    train("tensorboard", tmp_path, guard="skip", monitor_every=2)
    scalars = tensorboard(tmp_path)
    names = assert_same_as_file(scalars, tmp_path / "samples")
    assert names == {"fp8/share", "fp8/sqnr/0", "fp8/sqnr/2", *WORST, *GUARD}
    assert scalars["fp8/share"] == {2: 1.0, 4: 1.0, 6: 1.0} and len(scalars["loss"]) == 6
    assert scalars["fp8/guard_skipped"] == {2: 0.0, 4: 0.0, 6: 1.0}
    assert scalars["fp8/guard_faults"] == {2: 0.0, 4: 0.0, 6: 2.0}  # a loss and its gradients


def test_a_training_without_monitor_logs_nothing_of_fp8(tmp_path):
    accelerator = train("tensorboard", tmp_path)
    assert tensorboard(tmp_path).keys() == {"loss"} and not (tmp_path / "samples").exists()
    assert monitor_of(unwrapped(accelerator._optimizers[0])) is None


@pytest.mark.nightly
@pytest.mark.parametrize("offset", [0, 1])
def test_wandb_keeps_every_row_of_the_script(offset, tmp_path, offline):
    """Its steps must increase: a sample logged at step 2 of the optimizer would lose a loss logged
    at step 1."""
    train("wandb", tmp_path, offset, monitor_every=2)
    rows = wandb_rows(tmp_path)
    losses = {row["_step"]: row["loss"] for row in rows if "loss" in row}
    assert sorted(losses) == list(range(offset, offset + 6))
    assert_same_as_file(by_step(rows, "fp8/step"), tmp_path / "samples", extra=["fp8/step"])


@pytest.mark.nightly
@pytest.mark.parametrize("tracker", ["tensorboard", "wandb"])
def test_a_trainer_reports_samples_at_its_steps(tracker, tmp_path, launched, offline, monkeypatch):
    launched(
        "native:delayed", monitor_every="2", monitor_file=str(tmp_path / "samples"), guard="warn"
    )
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path))
    # a resumed training, and one log at its end
    trainer_for(
        tmp_path,
        report_to=tracker,
        logging_steps=500,
        max_steps=3,
        save_strategy="steps",
        save_steps=3,
    ).train()
    trainer = trainer_for(tmp_path, report_to=tracker, logging_steps=500, bf16=True)
    trainer.train(resume_from_checkpoint=True)
    if tracker == "wandb":
        scalars = by_step(wandb_rows(tmp_path), "train/global_step")
    else:
        scalars = tensorboard(tmp_path)
    names = assert_same_as_file(scalars, tmp_path / "samples", prefix="train/")
    assert {"fp8/share", "fp8/sqnr/model.layers.mlp.up_proj", "fp8/guard_faults"} <= names
    # a new process samples every second of its own steps
    assert scalars["train/fp8/worst_sqnr"].keys() == {2, 5}
    share = fp8_backends.audit(trainer.model).flops_share
    assert 0.5 < share < 1 and scalars["train/fp8/share"][5] == pytest.approx(share, abs=1e-6)


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def training_step(self, batch, index):
        loss = (self.layers(batch) - batch).float().square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


@pytest.mark.parametrize("tracker", nightly_but(["tensorboard"], ["tensorboard", "wandb"]))
def test_lightnings_logger_has_samples_beside_its_metrics(tracker, tmp_path, offline):
    recipe = {
        "backend": "native:dynamic",
        "monitor_every": 2,
        "monitor_file": str(tmp_path / "samples"),
    }
    quiet = {
        name: False
        for name in ("enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    }
    trainer = lightning.Trainer(
        max_steps=6,
        plugins=[FP8Precision(recipe)],
        accelerator="cpu",
        logger=TensorBoardLogger(tmp_path)
        if tracker == "tensorboard"
        else WandbLogger(save_dir=tmp_path),
        log_every_n_steps=1,
        **quiet,
    )
    trainer.fit(Net(), torch.utils.data.DataLoader(torch.randn(16, 32), batch_size=16))
    scalars = (
        tensorboard(tmp_path)
        if tracker == "tensorboard"
        else by_step(wandb_rows(tmp_path), LIGHTNINGS_STEP)
    )
    assert scalars["loss"].keys() == {0, 1, 2, 3, 4, 5}
    assert "fp8/sqnr/layers" in assert_same_as_file(scalars, tmp_path / "samples", before=1)
