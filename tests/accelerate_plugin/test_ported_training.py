"""The training loops of Accelerate's test_sync.py, test_script.py and tests/test_scheduler.py, on
one process.

Accelerate compares a prepared model with a plain one within a tolerance. Here
`fp8_backends.prepare` prepares the other model for a loop without Accelerate: both round in the
same places, and gradients, weights and losses agree to the bit.
"""

from __future__ import annotations

import copy

import pytest
import torch
from accelerate.utils import GradientAccumulationPlugin, set_seed
from plugin_training import batches, mlp
from ported import BACKENDS, assert_same, components, fresh_accelerator, plain, train, weights_of
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import fp8_backends
from fp8_backends.states.levels import finish_accumulation

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


class Pair:
    """Build the same model, optimizer and scheduler twice: `ours` prepared by an Accelerator,
    `bare` without it."""

    def __init__(self, backend: str, decay=lambda step: 1 / (1 + step), **arguments) -> None:
        self.accelerator = fresh_accelerator(backend, **arguments)
        made = [self._make(decay) for _ in range(2)]
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(*made[0])
        self.bare_model, self.bare_optimizer, self.bare_scheduler = made[1]
        fp8_backends.prepare(self.bare_model, self.bare_optimizer, backend)

    @staticmethod
    def _make(decay) -> tuple:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return model, optimizer, LambdaLR(optimizer, decay)

    def bare_loss(self, x, y) -> torch.Tensor:
        with self.accelerator.autocast():
            output = self.bare_model(x)
        return nn.functional.mse_loss(output.float(), y)

    def bare_step(self) -> None:
        self.bare_optimizer.step()
        self.bare_scheduler.step()
        self.bare_optimizer.zero_grad()

    def assert_same_gradients(self) -> None:
        for (name, p), q in zip(
            self.model.named_parameters(), self.bare_model.parameters(), strict=True
        ):
            assert (p.grad is None) == (q.grad is None), name
            assert p.grad is None or torch.equal(plain(p.grad), plain(q.grad)), name

    def assert_same_weights(self) -> None:
        assert_same(weights_of(self.model), weights_of(self.bare_model))
        assert self.optimizer.param_groups[0]["lr"] == self.bare_optimizer.param_groups[0]["lr"]


def mse(model, x, y) -> torch.Tensor:
    return nn.functional.mse_loss(model(x), y)


def test_no_sync_is_inert_on_one_process(backend):
    """Port `test_noop_sync` and the loop of `test_distributed_sync_multiple_fwd`."""
    pair = Pair(backend)
    for index, (x, y) in enumerate(batches(3)):
        pair.bare_loss(x, y).backward()
        if index % 2 == 0:
            with pair.accelerator.no_sync(pair.model):
                pair.accelerator.backward(mse(pair.model, x, y))
        else:
            pair.accelerator.backward(mse(pair.model, x, y))
        pair.assert_same_gradients()
    losses, bare = [], []
    for x, y in batches(3):
        bare.append(pair.bare_loss(x, y))
        with pair.accelerator.no_sync(pair.model):
            losses.append(mse(pair.model, x, y))
    for loss, other in zip(losses, bare, strict=True):
        other.backward()
        with pair.accelerator.trigger_sync_in_backward(pair.model):
            pair.accelerator.backward(loss)
        pair.assert_same_gradients()


@pytest.mark.parametrize("sync_each_batch", [False, True])
def test_accumulation_matches_bare_loop(backend, sync_each_batch):
    """Port `test_gradient_accumulation` and `test_gradient_accumulation_with_opt_and_scheduler`;
    the last step of an epoch has one microbatch, also divided by two."""
    plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=sync_each_batch)
    pair = Pair(backend, gradient_accumulation_plugin=plugin)
    rows = [row for batch in batches(5) for row in zip(*batch, strict=True)]
    loader = pair.accelerator.prepare(DataLoader(rows, batch_size=16))
    for index, (x, y) in enumerate(loader):
        with pair.accelerator.accumulate(pair.model):
            pair.accelerator.backward(mse(pair.model, x, y))
            (pair.bare_loss(x, y) / 2).backward()
            if index % 2 or index == 4:
                # as the bare optimizer's step will
                finish_accumulation(pair.bare_model.parameters())
            pair.assert_same_gradients()
            pair.optimizer.step()
            pair.scheduler.step()
            pair.optimizer.zero_grad()
        if index % 2 or index == 4:
            pair.bare_step()
        pair.assert_same_weights()
    assert pair.scheduler.scheduler.last_epoch == 3


@pytest.mark.slow
@pytest.mark.parametrize("split_batches", [False, True])
def test_prepared_loader_matches_bare_loop(backend, split_batches):
    """Port `training_check` of test_script.py: three epochs, shuffled by a seedable sampler."""
    from accelerate import DataLoaderConfiguration

    config = DataLoaderConfiguration(split_batches=split_batches, use_seedable_sampler=True)
    pair = Pair(backend, dataloader_config=config)
    rows = [row for batch in batches(3) for row in zip(*batch, strict=True)]
    set_seed(42)
    loader = pair.accelerator.prepare(DataLoader(rows, batch_size=16, shuffle=True))
    orders = []
    for _ in range(3):
        data = copy.deepcopy(list(loader))
        orders.append(torch.cat([x for x, _ in data]))
        losses = train(pair.accelerator, pair.model, pair.optimizer, pair.scheduler, data)
        for (x, y), loss in zip(data, losses, strict=True):
            other = pair.bare_loss(x, y)
            other.backward()
            pair.bare_step()
            assert loss == other.item()
    pair.assert_same_weights()
    assert not torch.equal(orders[0], orders[1])


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_scheduler_waits_for_skipped_steps(backend, with_optimizer):
    """Port `lambda_test`; a non-finite loss, in place of `_is_overflow`, makes the loss scaler
    skip."""
    pair = Pair(
        backend,
        lambda step: 1 - step / 10,
        fields={"autocast_dtype": "fp16"},
        step_scheduler_with_optimizer=with_optimizer,
    )
    x, y = batches(1)[0]
    rates = []
    for factor in (1.0, float("inf"), 1.0):
        before = weights_of(pair.model)
        pair.accelerator.backward(mse(pair.model, x, y) * factor)
        pair.optimizer.step()
        pair.scheduler.step()
        pair.optimizer.zero_grad()
        assert pair.optimizer.step_was_skipped == (factor != 1.0)
        assert torch.equal(before["0.weight"], weights_of(pair.model)["0.weight"]) == (
            factor != 1.0
        )
        rates.append(pair.scheduler.get_last_lr()[0])
    expected = (9, 9, 8) if with_optimizer else (9, 8, 7)
    assert rates == pytest.approx([step / 1000 for step in expected])


def test_manual_accumulation_matches_bare_loop(backend):
    """Port gradient_accumulation_for_autoregressive_models.py: Accelerate sees only one step."""
    accelerator = fresh_accelerator(backend)
    ours, bare = (components()[:3] for _ in range(2))
    model, optimizer, _ = accelerator.prepare(*ours)
    fp8_backends.prepare(*bare[:2], backend)
    for step in range(2):
        for x, y in batches(3, seed=step):
            accelerator.backward(nn.functional.mse_loss(model(x), y, reduction="sum") / 768)
            with accelerator.autocast():
                output = bare[0](x)
            (nn.functional.mse_loss(output.float(), y, reduction="sum") / 768).backward()
        norms = [accelerator.clip_grad_norm_(each.parameters(), 0.01) for each in (model, bare[0])]
        assert torch.equal(*norms) and norms[0] > 0.01
        for each in (optimizer, bare[1]):
            each.step()
            each.zero_grad()
    assert_same(weights_of(model), weights_of(bare[0]))
