"""`save_state` and `load_state` with scaling state; plain weights everywhere else."""

from __future__ import annotations

import json
import logging
import pickletools
import zipfile

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from plugin_training import assert_all_moved, batches, copied_parameters, mlp, train
from safetensors.torch import load_file

import fp8_backends
from fp8_backends.errors import FP8BackendError

DATA = batches(8)


def new_run(backend: str | None, seed: int = 0, **fields):
    """Accelerator, model and optimizer of a fresh run; None: bf16 by stock Accelerate."""
    AcceleratorState._reset_state(reset_partial_state=True)
    if backend is None:
        accelerator = Accelerator(mixed_precision="bf16")
    else:
        recipe = fp8_backends.FP8RecipeKwargs(backend=backend, **fields)
        accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe])
    model = mlp(seed)
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 5e-3))


def test_delayed_run_depends_on_its_scaling_state(tmp_path):
    """Show the difference that makes the file necessary in tests of resumed runs."""
    accelerator, model, optimizer = new_run("native:delayed")
    train(accelerator, model, optimizer, DATA[:4])
    accelerator.save_state(str(tmp_path))
    unbroken = train(accelerator, model, optimizer, DATA[4:])
    (tmp_path / "fp8_backend.json").unlink()
    (tmp_path / "fp8_manifest.json").unlink()
    accelerator, model, optimizer = new_run("native:delayed")
    accelerator.load_state(str(tmp_path))
    assert train(accelerator, model, optimizer, DATA[4:]) != unbroken


def test_files_of_a_checkpoint(tmp_path):
    accelerator, model, optimizer = new_run("native:delayed")
    train(accelerator, model, optimizer, DATA[:1])
    accelerator.save_state(str(tmp_path))
    metadata = json.loads((tmp_path / "fp8_backend.json").read_text())
    assert metadata["backend"] == "native:delayed"
    assert metadata["models"] == {"0.0": "native:delayed"}
    assert len(load_file(tmp_path / "fp8_scaling_0.safetensors")) == 3
    weights = load_file(tmp_path / "model.safetensors")
    assert {name: t.dtype for name, t in weights.items()} == {
        name: torch.float32 for name in mlp().state_dict()
    }


@pytest.mark.parametrize("backend", ["native:delayed", "msamp:O2", "native:dynamic+msamp:O3"])
def test_stock_accelerate_resumes_from_our_checkpoint(backend, tmp_path):
    accelerator, model, optimizer = new_run(backend)
    train(accelerator, model, optimizer, DATA[:2])
    accelerator.save_state(str(tmp_path))
    weights, moments = copied_parameters(model), moments_of(model, optimizer)
    assert not any("fp8_backends" in name for name in pickled_globals(tmp_path / "optimizer.bin"))
    accelerator, model, optimizer = new_run(None, seed=5)
    accelerator.load_state(str(tmp_path))
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    assert all(type(moment) is torch.Tensor for moment in moments_of(model, optimizer))
    assert all(map(torch.equal, moments, moments_of(model, optimizer)))


def moments_of(model, optimizer) -> list[torch.Tensor]:
    states = (optimizer.state[p] for p in model.parameters())
    return [state[name] + 0 for state in states for name in ("exp_avg", "exp_avg_sq")]


def pickled_globals(path) -> list[str]:
    """Return the globals imported while reading a file of `torch.save`."""
    with zipfile.ZipFile(path) as archive:
        (pickled,) = (name for name in archive.namelist() if name.endswith("data.pkl"))
        return [
            argument
            for opcode, argument, _ in pickletools.genops(archive.read(pickled))
            if opcode.name == "GLOBAL"
        ]


@pytest.mark.parametrize("backend, warns", [("native:delayed", True), ("native:dynamic", False)])
def test_stock_checkpoint_warns_about_fresh_scales(backend, warns, tmp_path, caplog):
    accelerator, model, optimizer = new_run(None)
    train(accelerator, model, optimizer, DATA[:2])
    accelerator.save_state(str(tmp_path))
    weights = copied_parameters(model)
    accelerator, model, optimizer = new_run(backend, seed=5)
    with caplog.at_level(logging.WARNING, "fp8_backends"):
        accelerator.load_state(str(tmp_path))
    assert ("start afresh" in caplog.text) == warns
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    train(accelerator, model, optimizer, DATA[2:3])
    assert_all_moved(model, weights)


def test_checkpoint_of_another_backend_names_both_and_loads_the_weights(tmp_path, caplog):
    accelerator, model, optimizer = new_run("ao:tensorwise")
    train(accelerator, model, optimizer, DATA[:2])
    accelerator.save_state(str(tmp_path))
    weights = copied_parameters(model)
    accelerator, model, optimizer = new_run("native:delayed", seed=5)
    with caplog.at_level(logging.WARNING, "fp8_backends"):
        accelerator.load_state(str(tmp_path))
    assert "ao:tensorwise" in caplog.text and "native:delayed" in caplog.text
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())


def test_mismatched_scaling_state_is_an_error(tmp_path):
    accelerator, model, optimizer = new_run("native:delayed", amax_history_len=16)
    train(accelerator, model, optimizer, DATA[:2])
    accelerator.save_state(str(tmp_path))
    accelerator, model, optimizer = new_run("native:delayed", amax_history_len=32)
    with pytest.raises(FP8BackendError, match="amax_history_len"):
        accelerator.load_state(str(tmp_path))


def test_checkpoint_of_another_default_names_it_and_resumes_by_name(tmp_path, caplog):
    """As checkpoints from before `max` was the default of `amax_compute_algo`."""
    recent = {"amax_compute_algo": "most_recent"}
    accelerator, model, optimizer = new_run("native:delayed", **recent)
    train(accelerator, model, optimizer, DATA[:3])
    accelerator.save_state(str(tmp_path))
    unbroken = train(accelerator, model, optimizer, DATA[3:])
    for fields, messages in (({}, 1), (recent, 0)):
        caplog.clear()
        accelerator, model, optimizer = new_run("native:delayed", seed=5, **fields)
        with caplog.at_level(logging.WARNING, "fp8_backends"):
            accelerator.load_state(str(tmp_path))
        assert caplog.text.count("amax_compute_algo") == messages, caplog.text
        losses = train(accelerator, model, optimizer, DATA[3:])
        assert (losses == unbroken) == (fields == recent)


def test_each_model_keeps_its_scaling_state(tmp_path):
    def run():
        AcceleratorState._reset_state(reset_partial_state=True)
        recipe = fp8_backends.NativeRecipeKwargs(scaling="delayed", amax_history_len=4)
        accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe])
        models = [mlp(0), mlp(1, width=32)]
        optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
        return accelerator, accelerator.prepare(*models, *optimizers)

    accelerator, (a, b, opt_a, opt_b) = run()
    train(accelerator, a, opt_a, DATA[:3])
    train(accelerator, b, opt_b, DATA[3:5])
    accelerator.save_state(str(tmp_path))
    unbroken = train(accelerator, a, opt_a, DATA[5:]), train(accelerator, b, opt_b, DATA[5:])
    accelerator, (a, b, opt_a, opt_b) = run()
    accelerator.load_state(str(tmp_path))
    assert (
        train(accelerator, a, opt_a, DATA[5:]),
        train(accelerator, b, opt_b, DATA[5:]),
    ) == unbroken


def test_optimizer_prepared_after_load_state_warns_about_fresh_state(tmp_path, caplog):
    accelerator, model, optimizer = new_run("native:dynamic")
    train(accelerator, model, optimizer, DATA[:1])
    accelerator.save_state(str(tmp_path))
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(mixed_precision="native:dynamic")
    model = accelerator.prepare(mlp())
    accelerator.load_state(str(tmp_path))
    accelerator.prepare(torch.optim.AdamW(model.parameters()))
    (told,) = [message for message in caplog.messages if "prepared after load_state" in message]
    assert "before load_state" in told


def test_load_state_before_prepare_is_refused(tmp_path):
    accelerator, model, optimizer = new_run("native:delayed")
    train(accelerator, model, optimizer, DATA[:1])
    accelerator.save_state(str(tmp_path))
    AcceleratorState._reset_state(reset_partial_state=True)
    recipe = fp8_backends.FP8RecipeKwargs(backend="native:delayed")
    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe])
    with pytest.raises(
        FP8BackendError, match=r"load_state\(\) before prepare\(\).*accelerator.prepare\(model"
    ):
        accelerator.load_state(str(tmp_path))


@pytest.mark.parametrize("backend", ["native:delayed", "msamp:O2"])
def test_scheduled_run_resumes_across_its_change(backend, tmp_path):
    schedule = {3: "bf16"}
    accelerator, model, optimizer = new_run(backend, schedule=schedule)
    train(accelerator, model, optimizer, batches(2))
    accelerator.save_state(str(tmp_path))
    losses = train(accelerator, model, optimizer, batches(4, seed=2))
    resumed, model, optimizer = new_run(backend, seed=1, schedule=schedule)
    resumed.load_state(str(tmp_path))
    assert train(resumed, model, optimizer, batches(4, seed=2)) == losses
