"""Port the logic of Accelerate's tests/test_state_checkpointing.py: saved runs resume bitwise in
other processes."""

from __future__ import annotations

import copy
import os
import random

import pytest
import torch
from accelerate.utils import ProjectConfiguration, set_seed
from plugin_training import batches, mlp
from ported import BACKENDS, assert_same, fresh_accelerator, weights_of
from torch import nn
from torch.utils.data import DataLoader

pytestmark = pytest.mark.parametrize("backend", BACKENDS)
ROWS = [row for batch in batches(2) for row in zip(*batch, strict=True)]


class Run:
    """Hold the objects of one script run; a second instance stands for a restart."""

    def __init__(self, backend: str, **arguments) -> None:
        set_seed(42)
        self.accelerator = fresh_accelerator(backend, **arguments)
        model = mlp()
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
        loader = DataLoader(ROWS, batch_size=16, shuffle=True)
        made = self.accelerator.prepare(model, optimizer, scheduler, loader)
        self.model, self.optimizer, self.scheduler, self.loader = made

    def train(self, epochs: int) -> list[float]:
        """Losses, and a random number after each epoch."""
        seen = []
        for _ in range(epochs):
            for x, y in self.loader:
                loss = nn.functional.mse_loss(self.model(x), y)
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
                seen.append(loss.item())
            seen.append(random.random())
            self.scheduler.step()
        return seen

    def state(self) -> list[dict]:
        """A copy: the tensors of a state dict change with the next step."""
        states = [self.optimizer.state_dict(), self.scheduler.state_dict()]
        return [weights_of(self.model), *copy.deepcopy(states)]


@pytest.mark.slow
@pytest.mark.parametrize("safetensors", [True, False])
def test_training_resumes_from_a_folder(backend, safetensors, tmp_path):
    """Port `test_can_resume_training_with_folder`: a run loads into another model, and into
    itself."""
    first = Run(backend)
    first.accelerator.save_state(str(tmp_path / "initial"), safe_serialization=safetensors)
    initial, seen = first.state(), first.train(3)

    second = Run(backend)
    second.accelerator.load_state(str(tmp_path / "initial"))
    assert_same(second.state(), initial)
    assert second.train(2) == seen[:6]
    second.accelerator.save_state(str(tmp_path / "checkpoint"), safe_serialization=safetensors)
    second.accelerator.load_state(str(tmp_path / "checkpoint"))
    assert second.train(1) == seen[6:]
    assert_same(second.state(), first.state())


def test_training_resumes_from_newest_checkpoint_in_relative_folder(backend, tmp_path, monkeypatch):
    """Port `test_can_resume_training_checkpoints_relative_path`, `test_with_scheduler` and
    `test_automatic_loading`."""
    monkeypatch.chdir(tmp_path)

    def project(iteration: int = 0) -> ProjectConfiguration:
        return ProjectConfiguration(
            project_dir="run", iteration=iteration, automatic_checkpoint_naming=True
        )

    first = Run(backend, project_config=project())
    first.accelerator.save_state()
    initial = first.state()
    first.train(1)
    first.accelerator.save_state()
    saved, seen = first.state(), first.train(2)

    second = Run(backend, project_config=project(iteration=2))
    second.accelerator.load_state()  # the newest
    assert_same(second.state(), saved)
    assert second.train(2) == seen
    second.accelerator.save_state()
    second.accelerator.load_state(os.path.join("run", "checkpoints", "checkpoint_0"))
    assert_same(second.state(), initial)
    second.accelerator.load_state()
    assert_same(second.state(), first.state())


def test_registered_unprepared_model_is_saved(backend, tmp_path):
    """Call `register_for_checkpointing`, as examples/by_feature/checkpointing.py, with a second
    prepared model."""
    run = Run(backend)
    average = mlp(seed=3)
    run.accelerator.register_for_checkpointing(average)
    run.train(1)
    average.load_state_dict(weights_of(run.model))
    run.accelerator.save_state(str(tmp_path))
    expected = weights_of(average)
    average.load_state_dict(mlp(seed=4).state_dict())
    run.accelerator.load_state(str(tmp_path))
    assert_same(weights_of(average), expected)
    assert_same(weights_of(run.model), expected)
