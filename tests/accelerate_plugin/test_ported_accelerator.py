"""Port the FP8-related logic of Accelerate's tests/test_accelerator.py and tests/test_optimizer.py:
prepare, reference, save, load, unwrap, pickle and free objects."""

from __future__ import annotations

import gc
import io
import json
import pickle
import weakref
from pathlib import Path

import pytest
import torch
from accelerate.utils.modeling import load_checkpoint_in_model
from plugin_training import batches, mlp
from ported import BACKENDS, Tied, assert_same, components, fresh_accelerator, train, weights_of
from torch import nn

pytestmark = pytest.mark.parametrize("backend", BACKENDS)
INPUTS = batches(1, seed=7)[0][0]


def prepared(backend: str, model: nn.Module | None = None, steps: int = 1, **arguments) -> tuple:
    """(accelerator, model, optimizer, scheduler, loader) after some steps."""
    accelerator = fresh_accelerator(backend, **arguments)
    objects = accelerator.prepare(*components(model))
    width = 32 if isinstance(model, Tied) else 16
    train(accelerator, *objects[:3], [(x, y[:, :width]) for x, y in batches(steps)])
    return accelerator, *objects


def stock_state(optimizer) -> dict:
    """Return the state dict without scaling state: hooks add it, and PyTorch pickles no hooks."""
    return {
        key: value
        for key, value in optimizer.state_dict().items()
        if key in ("state", "param_groups")
    }


def test_prepared_objects_are_registered_and_none_passes_through(backend):
    accelerator = fresh_accelerator(backend)
    given = components()
    *objects, nothing, strangers = accelerator.prepare(*given, None, [1, 2, 3])
    known = (
        accelerator._models,
        accelerator._optimizers,
        accelerator._schedulers,
        accelerator._dataloaders,
    )
    for obj, kind in zip(objects, known, strict=True):
        assert [each is obj for each in kind] == [True] and obj._is_accelerate_prepared
    assert nothing is None and strangers == [1, 2, 3]
    assert accelerator.prepare_model(objects[0]) is objects[0] and len(accelerator._models) == 1


def test_freed_objects_leave_memory(backend):
    accelerator, model, optimizer, scheduler, loader = prepared(backend, steps=2)
    seen = [
        weakref.ref(model),
        weakref.ref(model[0]),
        weakref.ref(optimizer.optimizer),
        weakref.ref(loader),
    ]
    model, optimizer, scheduler, loader = accelerator.free_memory(
        model, optimizer, scheduler, loader
    )
    assert (model, optimizer, scheduler, loader) == (None,) * 4
    known = (
        accelerator._models,
        accelerator._optimizers,
        accelerator._schedulers,
        accelerator._dataloaders,
    )
    assert not any(known)
    gc.collect()
    assert [reference() for reference in seen] == [None] * 4


@pytest.mark.parametrize(("make", "safetensors"), [(mlp, True), (mlp, False), (Tied, True)])
def test_a_saved_state_replaces_random_weights(backend, make, safetensors, tmp_path):
    accelerator, model, optimizer, scheduler, _ = prepared(backend, make())
    saved, signature = weights_of(model), sum(p.abs().sum().item() for p in model.parameters())
    accelerator.save_state(str(tmp_path), safe_serialization=safetensors)
    model.load_state_dict(make(seed=3).state_dict())
    assert not any(torch.equal(value, saved[name]) for name, value in weights_of(model).items())
    accelerator.load_state(str(tmp_path))
    assert_same(weights_of(model), saved)
    assert sum(p.abs().sum().item() for p in model.parameters()) == signature
    if make is Tied:
        assert (
            model.linear1.weight is model.linear2.weight
            and model.linear1.bias is model.linear2.bias
        )


@pytest.mark.parametrize("options", [{}, {"safe_serialization": False}, {"max_shard_size": "20KB"}])
def test_saved_model_loads_into_prepared_and_stock_models(backend, options, tmp_path):
    accelerator, model, *_ = prepared(backend)
    expected, saved = model.eval()(INPUTS), weights_of(model)
    accelerator.save_model(model, tmp_path, **options)
    assert ("max_shard_size" in options) == (len(list(tmp_path.glob("*.safetensors"))) > 1)
    model.load_state_dict(mlp(seed=3).state_dict())
    load_checkpoint_in_model(model, str(tmp_path))
    assert_same(weights_of(model), saved)
    assert torch.equal(model(INPUTS), expected)
    stock = mlp(seed=3)
    load_checkpoint_in_model(stock, str(tmp_path))
    assert_same(weights_of(stock), saved)


def test_hooks_around_a_checkpoint_see_the_model_and_plain_weights(backend, tmp_path):
    accelerator, model, *_ = prepared(backend)
    saved = weights_of(model)

    def save_config(models, weights, folder):
        assert_same([dict(each) for each in weights], [saved])
        Path(folder, "data.json").write_text(json.dumps({"name": type(models[0]).__name__}))

    def load_config(models, folder):
        models[0].loaded_name = json.loads(Path(folder, "data.json").read_text())["name"]

    hooks = [accelerator.register_save_state_pre_hook(save_config)]
    hooks.append(accelerator.register_load_state_pre_hook(load_config))
    for index, names in enumerate((["Sequential"], [])):
        accelerator.save_state(str(tmp_path / str(index)))
        model.load_state_dict(mlp(seed=3).state_dict())
        model.__dict__.pop("loaded_name", None)
        accelerator.load_state(str(tmp_path / str(index)))
        assert_same(weights_of(model), saved)
        assert [
            model.__dict__[name] for name in ("loaded_name",) if name in model.__dict__
        ] == names
        assert (tmp_path / str(index) / "data.json").exists() == bool(names)
        for hook in hooks:
            hook.remove()


def test_an_unwrapped_model_runs_and_survives_pickling(backend):
    accelerator, model, *_ = prepared(backend)
    expected = accelerator.unwrap_model(model.eval())(INPUTS)
    inner = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    with accelerator.autocast():
        assert torch.equal(inner(INPUTS).float(), expected)
    loaded = pickle.loads(pickle.dumps(inner))
    with accelerator.autocast():
        assert torch.equal(loaded(INPUTS).float(), expected)
    assert_same(weights_of(loaded), weights_of(inner))


def test_compiled_parallel_model_unwraps_with_and_without_compile(backend):
    accelerator, model, *_ = prepared(backend, steps=0)
    compiled, parallel = torch.compile(model), torch.compile(nn.DataParallel(model))
    assert (
        accelerator.unwrap_model(parallel, keep_torch_compile=True)._orig_mod is compiled._orig_mod
    )
    assert accelerator.unwrap_model(parallel, keep_torch_compile=False) is compiled._orig_mod


def test_accelerator_pickles_with_prepared_objects(backend):
    """Port `test_can_pickle_dataloader` and `test_pickle_accelerator`: the copy trains without
    affecting the original."""
    accelerator, model, optimizer, scheduler, loader = prepared(backend, steps=2)
    before = weights_of(model)
    loaded = pickle.loads(pickle.dumps(accelerator))
    assert_same(list(loaded._dataloaders[0]), list(loader))
    its_model, its_optimizer = loaded._models[0], loaded._optimizers[0]
    assert_same(weights_of(its_model), before)
    assert_same(stock_state(its_optimizer), stock_state(optimizer))
    assert [id(p) for p in its_model.parameters()] == [
        id(p) for p in its_optimizer.param_groups[0]["params"]
    ]
    train(loaded, its_model, its_optimizer, None, batches(1))
    assert not any(
        torch.equal(value, before[name]) for name, value in weights_of(its_model).items()
    )
    assert_same(weights_of(model), before)


def test_a_prepared_optimizer_pickles(backend):
    _, _, optimizer, *_ = prepared(backend)
    loaded = pickle.loads(pickle.dumps(optimizer))
    assert type(loaded.optimizer) is type(optimizer.optimizer)
    assert_same(stock_state(loaded), stock_state(optimizer))


def test_fp64_model_prepares_and_runs(backend):
    accelerator, model, *_ = prepared(backend)
    saved = weights_of(model)
    if backend not in ("msamp:O2", "msamp:O3"):
        saved = {name: value.double() for name, value in saved.items()}
    model.double()
    for name, value in weights_of(model).items():
        assert torch.equal(value.double(), saved[name].double()), name
    assert torch.isfinite(model(INPUTS.double())).all()


def test_a_trained_model_is_saved_by_torch_and_loaded(backend):
    """Read `torch.save(model.state_dict())` and `accelerator.save` back without our classes."""
    accelerator, model, *_ = prepared(backend)
    for save in (torch.save, accelerator.save):
        file = io.BytesIO()
        save(accelerator.get_state_dict(model), file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert all(type(value) is torch.Tensor for value in loaded.values())
        stock = mlp(seed=3)
        stock.load_state_dict(loaded)
        assert_same(weights_of(stock), weights_of(model))
