"""Port the FP8-related logic of Accelerate's tests/test_accelerator.py, test_state_checkpointing.py,
test_sync.py, test_script.py and test_scheduler.py, on one process. The kinds of backends take turns:
stateless and stateful scaling, TorchAO's layers, and two ways to store weights.

Accelerate compares a prepared model with a plain one within a tolerance. Here
`fp8_backends.prepare` prepares the other model for a loop without Accelerate: both round in the
same places, and gradients, weights and losses agree to the bit.
"""

from __future__ import annotations

import copy
import gc
import json
import pickle
import random
import weakref
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import GradientAccumulationPlugin, set_seed
from accelerate.utils.modeling import load_checkpoint_in_model
from plugin_training import batches, mlp, train
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import fp8_backends
from fp8_backends.states.levels import finish_accumulation

INPUTS = batches(1, seed=7)[0][0]


def rows(count: int) -> list:
    return [row for batch in batches(count) for row in zip(*batch, strict=True)]


class Tied(nn.Module):
    """Share weight and bias between two layers, as `ModelWithTiedWeights` of Accelerate's tests."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear1, self.linear2 = nn.Linear(32, 32), nn.Linear(32, 32)
        self.linear2.weight, self.linear2.bias = self.linear1.weight, self.linear1.bias

    def forward(self, x):
        return self.linear2(self.linear1(x))[:, :16]


class Run:
    """Hold the objects of one script run; a second instance stands for a restart, and `bare` has
    the same model without an Accelerator."""

    def __init__(
        self, backend: str, model=None, decay=lambda step: 1 / (1 + step), fields=None, **arguments
    ) -> None:
        set_seed(42)
        AcceleratorState._reset_state()
        GradientState._reset_state()
        recipe = fp8_backends.FP8RecipeKwargs(backend=backend, **(fields or {}))
        self.accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe], **arguments)
        model = mlp() if model is None else model
        made = []
        for each in (copy.deepcopy(model), model):
            optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2)
            made.append((each, optimizer, LambdaLR(optimizer, decay)))
        self.bare = made[0]
        loader = DataLoader(rows(3), batch_size=16, shuffle=True)
        prepared = self.accelerator.prepare(*made[1], loader)
        self.model, self.optimizer, self.scheduler, self.loader = prepared

    def trained(self, count: int = 1) -> Run:
        train(self.accelerator, self.model, self.optimizer, batches(count), self.scheduler)
        return self

    def epochs(self, count: int) -> list[float]:
        """Losses, and a random number after each epoch."""
        seen = []
        for _ in range(count):
            seen += train(self.accelerator, self.model, self.optimizer, self.loader)
            seen.append(random.random())
            self.scheduler.step()
        return seen

    def weights(self) -> dict[str, torch.Tensor]:
        return weights_of(self.model)

    def state(self) -> list[dict]:
        """A copy: the tensors of a state dict change with the next step."""
        states = [self.optimizer.state_dict(), self.scheduler.state_dict()]
        return [self.weights(), *copy.deepcopy(states)]

    def with_bare(self, backend: str) -> Run:
        fp8_backends.prepare(*self.bare[:2], backend)
        return self

    def bare_loss(self, x, y, **options) -> torch.Tensor:
        with self.accelerator.autocast():
            output = self.bare[0](x)
        return nn.functional.mse_loss(output.float(), y, **options)

    def bare_step(self) -> None:
        model, optimizer, scheduler = self.bare
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    def assert_same_gradients(self) -> None:
        pairs = zip(self.model.named_parameters(), self.bare[0].parameters(), strict=True)
        for (name, p), q in pairs:
            assert (p.grad is None) == (q.grad is None), name
            assert p.grad is None or torch.equal(plain(p.grad), plain(q.grad)), name

    def assert_same_weights(self) -> None:
        assert_same(self.weights(), weights_of(self.bare[0]))
        assert self.optimizer.param_groups[0]["lr"] == self.bare[1].param_groups[0]["lr"]


def mse(model, x, y) -> torch.Tensor:
    return nn.functional.mse_loss(model(x), y)


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of a state dict's values: plain weights at full stored precision."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same(one, other) -> None:
    """Equal to the bit, through dictionaries, lists and tensors of any storage."""
    assert type(one) is type(other), (type(one), type(other))
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(plain(one), plain(other))
    else:
        assert one == other


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor, whatever it is stored as."""
    return (
        tensor.detach().clone() if type(tensor) is torch.Tensor else tensor.detach().float() + 0.0
    )


# test_accelerator.py


def known_to(accelerator: Accelerator) -> list[list]:
    kinds = ("_models", "_optimizers", "_schedulers", "_dataloaders")
    return [getattr(accelerator, kind) for kind in kinds]


def test_prepared_objects_are_registered_and_none_passes_through():
    run = Run("native:dynamic")
    objects = (run.model, run.optimizer, run.scheduler, run.loader)
    for obj, kind in zip(objects, known_to(run.accelerator), strict=True):
        assert [each is obj for each in kind] == [True] and obj._is_accelerate_prepared
    assert run.accelerator.prepare(None, [1, 2, 3]) == (None, [1, 2, 3])
    assert run.accelerator.prepare_model(run.model) is run.model
    assert len(run.accelerator._models) == 1


@pytest.mark.parametrize("backend", ["native:delayed", "ao:tensorwise", "msamp:O3"])
def test_freed_objects_leave_memory(backend):
    run = Run(backend).trained(2)
    held = (run.model, run.model[0], run.optimizer.optimizer, run.loader)
    seen = [weakref.ref(each) for each in held]
    accelerator, objects = run.accelerator, (run.model, run.optimizer, run.scheduler, run.loader)
    del run, held
    objects = accelerator.free_memory(*objects)
    assert objects == [None] * 4 and not any(known_to(accelerator))
    gc.collect()
    assert [reference() for reference in seen] == [None] * 4


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("native:delayed", {}),
        ("msamp:O2", {"safe_serialization": False}),
        ("msamp:O3", {"max_shard_size": "20KB"}),
    ],
)
def test_saved_model_loads_into_prepared_and_stock_models(backend, options, tmp_path):
    run = Run(backend).trained()
    expected, saved = run.model.eval()(INPUTS), run.weights()
    run.accelerator.save_model(run.model, tmp_path, **options)
    assert ("max_shard_size" in options) == (len(list(tmp_path.glob("*.safetensors"))) > 1)
    run.model.load_state_dict(mlp(seed=3).state_dict())
    load_checkpoint_in_model(run.model, str(tmp_path))
    assert_same(run.weights(), saved)
    assert torch.equal(run.model(INPUTS), expected)
    stock = mlp(seed=3)
    load_checkpoint_in_model(stock, str(tmp_path))
    assert_same(weights_of(stock), saved)


@pytest.mark.parametrize("backend", ["native:dynamic", "msamp:O3"])
def test_hooks_around_a_checkpoint_see_the_model_and_plain_weights(backend, tmp_path):
    run = Run(backend).trained()
    saved, loaded = run.weights(), []

    def save_config(models, weights, folder):
        assert_same([dict(each) for each in weights], [saved])
        Path(folder, "data.json").write_text(json.dumps({"name": type(models[0]).__name__}))

    def load_config(models, folder):
        assert models[0] is run.model
        loaded.append(json.loads(Path(folder, "data.json").read_text())["name"])

    hooks = [run.accelerator.register_save_state_pre_hook(save_config)]
    hooks.append(run.accelerator.register_load_state_pre_hook(load_config))
    for name in ("hooked", "plain"):
        run.accelerator.save_state(str(tmp_path / name))
        run.model.load_state_dict(mlp(seed=3).state_dict())
        run.accelerator.load_state(str(tmp_path / name))
        assert_same(run.weights(), saved)
        assert loaded == ["Sequential"]
        assert (tmp_path / name / "data.json").exists() == (name == "hooked")
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("backend", ["ao:tensorwise", "msamp:O2"])
def test_an_unwrapped_model_runs_and_survives_pickling(backend):
    run = Run(backend).trained()
    accelerator = run.accelerator
    expected = accelerator.unwrap_model(run.model.eval())(INPUTS)
    inner = accelerator.unwrap_model(run.model, keep_fp32_wrapper=False)
    loaded = pickle.loads(pickle.dumps(inner))
    with accelerator.autocast():
        assert torch.equal(inner(INPUTS).float(), expected)
        assert torch.equal(loaded(INPUTS).float(), expected)
    assert_same(weights_of(loaded), weights_of(inner))
    compiled, parallel = torch.compile(run.model), torch.compile(nn.DataParallel(run.model))
    unwrapped = accelerator.unwrap_model(parallel, keep_torch_compile=True)
    assert unwrapped._orig_mod is compiled._orig_mod
    unwrapped = accelerator.unwrap_model(parallel, keep_torch_compile=False)
    assert unwrapped is compiled._orig_mod


@pytest.mark.parametrize("backend", ["native:dynamic", "msamp:O3"])
def test_fp64_model_prepares_and_runs(backend):
    run = Run(backend).trained()
    saved = run.weights()
    if backend == "native:dynamic":
        saved = {name: value.double() for name, value in saved.items()}
    run.model.double()
    for name, value in run.weights().items():
        assert torch.equal(value.double(), saved[name].double()), name
    assert torch.isfinite(run.model(INPUTS.double())).all()


# test_state_checkpointing.py


@pytest.mark.parametrize(
    ("backend", "safetensors"),
    [("native:delayed", True), ("ao:tensorwise", False), ("msamp:O3", True)],
)
def test_training_resumes_from_a_folder(backend, safetensors, tmp_path):
    """Port `test_can_resume_training_with_folder`: a run loads into another model, and into
    itself."""
    first = Run(backend)
    first.accelerator.save_state(str(tmp_path / "initial"), safe_serialization=safetensors)
    initial, seen = first.state(), first.epochs(3)

    second = Run(backend, mlp(seed=3))
    assert second.weights()["0.weight"].ne(initial[0]["0.weight"]).any()
    second.accelerator.load_state(str(tmp_path / "initial"))
    assert_same(second.state(), initial)
    assert second.epochs(2) == seen[:8]
    second.accelerator.save_state(str(tmp_path / "checkpoint"), safe_serialization=safetensors)
    second.accelerator.load_state(str(tmp_path / "checkpoint"))
    assert second.epochs(1) == seen[8:]
    assert_same(second.state(), first.state())


def test_tied_and_registered_models_are_saved(tmp_path):
    """Call `register_for_checkpointing`, as examples/by_feature/checkpointing.py, with a second
    prepared model, and with weights used twice."""
    run, average = Run("msamp:O2", Tied()).trained(), Tied(seed=3)
    run.accelerator.register_for_checkpointing(average)
    expected = run.weights()
    average.load_state_dict(expected)
    run.accelerator.save_state(str(tmp_path))
    for model in (average, run.model):
        model.load_state_dict(Tied(seed=4).state_dict())
    run.accelerator.load_state(str(tmp_path))
    assert_same(weights_of(average), expected)
    assert_same(run.weights(), expected)
    assert run.model.linear1.weight is run.model.linear2.weight
    assert run.model.linear1.bias is run.model.linear2.bias


# test_sync.py, test_script.py and test_scheduler.py


def test_no_sync_is_inert_on_one_process():
    """Port `test_noop_sync` and the loop of `test_distributed_sync_multiple_fwd`."""
    run = Run("msamp:O2").with_bare("msamp:O2")
    accelerator, model = run.accelerator, run.model
    for x, y in batches(2):
        run.bare_loss(x, y).backward()
        with accelerator.no_sync(model):
            accelerator.backward(mse(model, x, y))
        run.assert_same_gradients()
    losses, bare = [], []
    for x, y in batches(3):
        bare.append(run.bare_loss(x, y))
        with accelerator.no_sync(model):
            losses.append(mse(model, x, y))
    for loss, other in zip(losses, bare, strict=True):
        other.backward()
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(loss)
        run.assert_same_gradients()


@pytest.mark.parametrize(
    ("backend", "sync_each_batch"), [("native:delayed", False), ("msamp:O3", True)]
)
def test_accumulation_matches_bare_loop(backend, sync_each_batch):
    """Port `test_gradient_accumulation` and `test_gradient_accumulation_with_opt_and_scheduler`;
    the last step of an epoch has one microbatch, also divided by two."""
    plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=sync_each_batch)
    run = Run(backend, gradient_accumulation_plugin=plugin).with_bare(backend)
    loader = run.accelerator.prepare(DataLoader(rows(5), batch_size=16))
    for index, (x, y) in enumerate(loader):
        is_step = index % 2 or index == 4
        with run.accelerator.accumulate(run.model):
            run.accelerator.backward(mse(run.model, x, y))
            (run.bare_loss(x, y) / 2).backward()
            if is_step:
                # as the bare optimizer's step will
                finish_accumulation(run.bare[0].parameters())
            run.assert_same_gradients()
            run.optimizer.step()
            run.scheduler.step()
            run.optimizer.zero_grad()
        if is_step:
            run.bare_step()
        run.assert_same_weights()
    assert run.scheduler.scheduler.last_epoch == 3


@pytest.mark.parametrize(
    ("backend", "split_batches"), [("ao:tensorwise", False), ("msamp:O2", True)]
)
def test_prepared_loader_matches_bare_loop(backend, split_batches):
    """Port `training_check` of test_script.py: three epochs, shuffled by a seedable sampler."""
    config = DataLoaderConfiguration(split_batches=split_batches, use_seedable_sampler=True)
    run = Run(backend, dataloader_config=config).with_bare(backend)
    orders = []
    for _ in range(3):
        data = copy.deepcopy(list(run.loader))
        orders.append(torch.cat([x for x, _ in data]))
        losses = train(run.accelerator, run.model, run.optimizer, data, run.scheduler)
        for (x, y), loss in zip(data, losses, strict=True):
            other = run.bare_loss(x, y)
            other.backward()
            run.bare_step()
            assert loss == other.item()
    run.assert_same_weights()
    assert not torch.equal(orders[0], orders[1])


@pytest.mark.parametrize(
    ("backend", "with_optimizer"), [("native:dynamic", True), ("msamp:O3", False)]
)
def test_scheduler_waits_for_skipped_steps(backend, with_optimizer):
    """Port `lambda_test`; a non-finite loss, in place of `_is_overflow`, makes the loss scaler
    skip."""
    run = Run(
        backend,
        decay=lambda step: 1 - step / 10,
        fields={"autocast_dtype": "fp16"},
        step_scheduler_with_optimizer=with_optimizer,
    )
    x, y = batches(1)[0]
    rates = []
    for factor in (1.0, float("inf"), 1.0):
        before = run.weights()["0.weight"]
        run.accelerator.backward(mse(run.model, x, y) * factor)
        run.optimizer.step()
        run.scheduler.step()
        run.optimizer.zero_grad()
        assert run.optimizer.step_was_skipped == (factor != 1.0)
        assert torch.equal(before, run.weights()["0.weight"]) == (factor != 1.0)
        rates.append(run.scheduler.get_last_lr()[0])
    expected = (9, 9, 8) if with_optimizer else (9, 8, 7)
    assert rates == pytest.approx([step / 1000 for step in expected])
