"""What Accelerate's tests of FP8 ask (its tests/test_fp8.py: conversion, and FP8 from a configuration file), on a CPU.

Its cases: `can_convert_ao_model` and `can_convert_te_model`, each with a handler in the script and, `from_config`, with
`Accelerator()` alone under a launcher that has read a YAML file. They end when a layer of FP8 is in the model. Here a
step runs as well, every parameter moves, products are counted, and what is saved loads into the stock class.

BERT is built from its configuration, since theirs is downloaded; `native` stands in the place of TransformerEngine,
which tests/te has. Their cases on several GPUs and under DeepSpeed are cells of tests/distributed/test_matrix.py.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import accelerate.utils
import pytest
import torch
import yaml
from accelerate import Accelerator
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_simple_launcher_cmd_env
from plugin_training import assert_all_moved, assert_fp8_products, copied_parameters, run_python
from safetensors.torch import load_file
from torch import nn

import fp8_backends

STEPS = 3
CONFIG = {"distributed_type": "NO", "num_processes": 1, "mixed_precision": "fp8", "use_cpu": True}
"""Theirs, and `use_cpu`: without it the launcher counts GPUs."""


def bert():
    """(model, batches) in the place of `bert-base-cased`: 13 Linear layers for FP8, and a classifier of 2 rows."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(vocab_size=64, max_position_embeddings=32, **sizes)
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 64, (8, 16), generator=generator) for _ in range(STEPS)]
    return BertForSequenceClassification(config), [{"input_ids": each, "labels": each[:, 0] % 2} for each in ids]


def layers_of_te():
    """(model, batches): theirs has a LayerNorm without bias between two Linear layers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32, bias=False), nn.Linear(32, 16))
    return model, [{"input": torch.randn(16, 32)} for _ in range(STEPS)]


FP8_LAYERS = {bert: 13, layers_of_te: 2}


def configured(path: Path, **fp8_config) -> Path:
    path.write_text(yaml.safe_dump(CONFIG | {"fp8_config": fp8_config}))
    return path


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """The environment in which stock `accelerate launch` would start a script, from Accelerate's own functions."""

    def launch(**fp8_config) -> None:
        file = configured(tmp_path / "config.yaml", **fp8_config)
        arguments = launch_command_parser().parse_args(["--config_file", str(file), "script.py"])
        arguments, _, _ = _validate_launch_command(arguments)
        for name, text in prepare_simple_launcher_cmd_env(arguments)[1].items():
            monkeypatch.setenv(name, text)

    return launch


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    output = model(**batch)
    return output.loss if hasattr(output, "loss") else output.square().mean()


def train(accelerator, model, optimizer, scheduler, data) -> list[float]:
    losses = []
    for batch in data:
        loss = loss_of(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def prepared(accelerator, make):
    """(model, optimizer, scheduler, batches), prepared in one call as theirs are, with the loader between them."""
    model, data = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    loader = torch.utils.data.DataLoader(torch.randn(10, 32), batch_size=2)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    assert len(list(loader)) == 5
    return model, optimizer, scheduler, data


def assert_converted_and_trains(accelerator, make, folder: Path) -> nn.Module:
    """All that is asked of a conversion, whoever has asked for FP8. Returns the model."""
    assert accelerator.fp8_enabled
    model, optimizer, scheduler, data = prepared(accelerator, make)
    before = copied_parameters(model)
    train(accelerator, model, optimizer, scheduler, data)
    assert_all_moved(model, before)
    assert_fp8_products(model, layers=FP8_LAYERS[make])
    accelerator.save_state(str(folder / "state"))
    accelerator.save_model(model, str(folder / "export"))
    unbroken = train(accelerator, model, optimizer, scheduler, data)
    accelerator.load_state(str(folder / "state"))
    assert train(accelerator, model, optimizer, scheduler, data) == unbroken
    accelerator.load_state(str(folder / "state"))
    stock, saved = make()[0], load_file(folder / "export" / "model.safetensors")
    stock.load_state_dict(saved)
    assert all(torch.equal(p, saved[name]) for name, p in model.named_parameters())
    return model


def test_ao_converts_a_model_of_transformers(tmp_path):
    """`can_convert_ao_model`."""
    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[accelerate.utils.AORecipeKwargs()])
    assert accelerate.utils.has_ao_layers(assert_converted_and_trains(accelerator, bert, tmp_path))


def test_ao_from_a_configuration_file_is_the_run_of_the_handler(launched, tmp_path):
    """`can_convert_ao_model(from_config=True)`; `fp8_config` holds `backend: AO` alone."""
    handler = Accelerator(mixed_precision="fp8", kwargs_handlers=[accelerate.utils.AORecipeKwargs()])
    expected = train(handler, *prepared(handler, bert))
    launched(backend="AO")
    accelerator = Accelerator()
    assert accelerator.fp8_recipe == handler.fp8_recipe
    assert accelerate.utils.has_ao_layers(assert_converted_and_trains(accelerator, bert, tmp_path))
    assert train(accelerator, *prepared(accelerator, bert)) == expected


def test_ao_from_a_configuration_file_with_fields_of_torchao(launched, tmp_path):
    """`test_can_prepare_model_single_gpu_from_config_with_additional_params`, whose fields reach TorchAO's layers."""
    from torchao.float8.float8_linear import Float8Linear

    launched(backend="AO", pad_inner_dim=True, enable_fsdp_float8_all_gather=False)
    accelerator = Accelerator()
    model = assert_converted_and_trains(accelerator, bert, tmp_path)
    configs = [module.config for module in model.modules() if isinstance(module, Float8Linear)]
    assert len(configs) == FP8_LAYERS[bert]
    assert all(config.pad_inner_dim and not config.enable_fsdp_float8_all_gather for config in configs)


def test_a_field_of_torchao_in_a_configuration_file_is_no_default(launched):
    """Theirs says what is the default too; here the file is seen to be read."""
    launched(backend="AO", pad_inner_dim=False)
    accelerator = Accelerator()
    model = accelerator.prepare_model(layers_of_te()[0])
    assert accelerator.fp8_recipe.pad_inner_dim is False and model[0].config.pad_inner_dim is False


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})

from pathlib import Path
from accelerate import Accelerator
from test_accelerate_own import assert_converted_and_trains, bert

assert_converted_and_trains(Accelerator(), bert, Path({folder!r}))
print("converted", flush=True)
"""


@pytest.mark.slow
def test_ao_from_a_configuration_file_under_the_launcher_itself(tmp_path):
    """`test_can_prepare_model_single_gpu_from_config`: the command, and the process that it starts."""
    script, file = tmp_path / "script.py", configured(tmp_path / "config.yaml", backend="AO")
    script.write_text(SCRIPT.format(tests=os.path.dirname(__file__), folder=str(tmp_path)))
    launcher = (sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file))
    assert "converted" in run_python(str(script), *launcher)


@pytest.mark.parametrize("backend", ["native:delayed", "native:dynamic", "native:mxfp8"])
def test_native_converts_the_layers_of_their_te_case(backend, tmp_path):
    """`can_convert_te_model`, and with MXFP8 `test_can_prepare_model_with_mxfp8_block_scaling`."""
    recipe = fp8_backends.FP8RecipeKwargs(backend=backend)
    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe])
    model = assert_converted_and_trains(accelerator, layers_of_te, tmp_path)
    assert type(model[1]) is nn.LayerNorm and model[1].bias is None


@pytest.mark.parametrize(
    ("fp8_config", "name"),
    [
        ({"backend": "NATIVE"}, "native:dynamic"),
        ({"backend": "native:delayed", "amax_history_len": 4}, "native:delayed"),
    ],
)
def test_native_from_a_configuration_file(fp8_config, name, launched, tmp_path):
    """`can_convert_te_model(from_config=True)`."""
    launched(**fp8_config)
    accelerator = Accelerator()
    assert accelerator.fp8_recipe.name == name
    model = assert_converted_and_trains(accelerator, layers_of_te, tmp_path)
    if name == "native:delayed":
        assert model[0].fp8_scaling.shape == (3, 6)  # 4 amaxes beside two values for each of three tensors
