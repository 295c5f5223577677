"""Compare the `ao` compute with hand-written TorchAO, and cover the cases in which plain TorchAO
fails."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import pickle
import subprocess
import sys
import textwrap
import types

import pytest
import torch
import torch.nn.functional as F
import warm_process
from safetensors.torch import load_file, save_file
from torch import nn
from widths import nightly

from fp8_backends import preparation
from fp8_backends.compute.torchao import backend as ao
from fp8_backends.compute.torchao.backend import mend_cpu_product
from fp8_backends.errors import FP8BackendError, RecipeError
from fp8_backends.recipes import handlers as recipes

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
BF16 = torch.bfloat16


class Block(nn.Module):
    """A small language model without attention: 64 tokens in its vocabulary, one gated block, a
    head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.up, self.gate_proj, self.down = (
            nn.Linear(32, 96),
            nn.Linear(32, 96, bias=False),
            nn.Linear(96, 32),
        )
        self.norm = nn.LayerNorm(32)
        self.lm_head = nn.Linear(32, 64, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.down(F.silu(self.gate_proj(x)) * self.up(x))
        return self.lm_head(self.norm(x))


def block(dtype=torch.float32):
    torch.manual_seed(0)
    return Block().to(dtype)


def losses(model, optimizer, autocast=False, steps=5, tokens=(4, 16)):
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(steps):
        ids = torch.randint(0, 64, tokens, generator=generator)
        with torch.autocast("cpu", BF16) if autocast else contextlib.nullcontext():
            logits = model(ids)
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids.roll(-1, 1).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def raw_torchao(model, scaling, cast_inputs=False):
    """Convert a model by TorchAO itself, with the operator for this CPU."""
    mend_cpu_product()
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(scaling)
    convert_to_float8_training(
        model, config=config, module_filter_fn=lambda _, name: name != "lm_head"
    )
    if cast_inputs:
        for layer in (model.up, model.gate_proj, model.down):
            layer.register_forward_pre_hook(lambda _, args: args[0].to(BF16))
    return model


@pytest.mark.parametrize("tokens", [(4, 16), (3, 7)], ids=["64 tokens", "21 tokens"])
@pytest.mark.parametrize("precision", ["fp32 autocast", "bf16", "fp32"])
@pytest.mark.parametrize("scaling", RECIPES)
def test_losses_match_raw_torchao_loop_bitwise(scaling, precision, tokens):
    autocast, dtype = precision == "fp32 autocast", BF16 if precision == "bf16" else torch.float32
    # raw TorchAO crashes there; under CUDA's autocast it casts the input itself
    mended = scaling == "rowwise_with_gw_hp" and autocast
    raw = raw_torchao(block(dtype), scaling, cast_inputs=mended)
    expected = losses(raw, adamw(raw), autocast, tokens=tokens)

    model = block(dtype)
    model, optimizer = preparation.prepare(model, adamw(model), f"ao:{scaling}")
    assert losses(model, optimizer, autocast, tokens=tokens) == expected
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), raw.parameters(), strict=True))


@pytest.mark.parametrize("scaling", RECIPES)
def test_parameter_objects_stay_train_and_save(scaling, tmp_path):
    model = block()
    optimizer = adamw(model)
    before = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}
    preparation.prepare(model, optimizer, f"ao:{scaling}")
    losses(model, optimizer, autocast=True, steps=3)
    for name, parameter in model.named_parameters():
        assert id(parameter) == before[name][0]
        assert not torch.equal(parameter, before[name][1]), name
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    plain = block()
    plain.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert all(
        torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True)
    )


@pytest.mark.parametrize("scaling", RECIPES)
def test_zero_tokens_and_one_dimension(scaling):
    linear = nn.Linear(32, 16)
    preparation.prepare_model(linear, recipes.resolve(f"ao:{scaling}"))
    empty = torch.zeros(0, 32, requires_grad=True)
    out = linear(empty)
    out.sum().backward()
    assert out.shape == (0, 16) and empty.grad.shape == (0, 32) and not linear.weight.grad.any()
    x = torch.randn(32)
    assert torch.equal(linear(x), linear(x[None])[0])
    with pytest.raises(ValueError, match="32 input features"):
        linear(torch.randn(4, 31))


@pytest.mark.parametrize("shape", [(4, 16, 32), (64, 32), (32,)])
@pytest.mark.parametrize("compiled", [False, nightly(True)])
@pytest.mark.parametrize("scaling", RECIPES)
def test_outputs_without_bias_may_be_written_in_place(scaling, compiled, shape):
    linear = nn.Linear(32, 16, bias=False)
    preparation.prepare_model(linear, recipes.resolve(f"ao:{scaling}"))
    run = torch.compile(linear, backend="aot_eager") if compiled else linear
    x, gradients = torch.randn(shape), []
    for scale in (lambda y: y.mul_(3), lambda y: y * 3):
        scale(run(x)).square().sum().backward()
        gradients.append(linear.weight.grad)
        linear.weight.grad = None
    assert torch.equal(*gradients)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("scaling", RECIPES)
def test_inference_mode_matches_no_grad(scaling, autocast):
    linear, x = nn.Linear(32, 16), torch.randn(2, 8, 32)
    preparation.prepare_model(linear, recipes.resolve(f"ao:{scaling}"))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        with torch.no_grad():
            expected = linear(x)
        with torch.inference_mode():
            assert torch.equal(linear(x), expected)
        linear(x).sum().backward()
    assert linear.weight.grad.any()


def test_copies_and_pickles_compute_with_their_own_weights():
    model = block()
    preparation.prepare(model, adamw(model), "ao:rowwise")
    ids = torch.randint(0, 64, (2, 16))
    expected = model(ids)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(ids), expected)
        losses(other, adamw(other), steps=2)
        assert not torch.equal(other(ids), expected)
    assert torch.equal(model(ids), expected)


def test_repr_shows_precision():
    model = nn.Sequential(nn.Linear(32, 32))
    preparation.prepare_model(model, recipes.resolve("ao"))
    assert "ao i:dyn_ten_e4m3,w:dyn_ten_e4m3,go:dyn_ten_e5m2)" in repr(model)


def test_unsupported_gpu_sizes_stay_in_high_precision():
    compute, recipe = ao.TorchAOCompute(), recipes.resolve("ao")
    assert compute.unfit(nn.Linear(32, 48), recipe) is None
    assert "not multiples of 16" in compute.unfit(nn.Linear(30, 48), recipe)
    assert "not multiples of 16" in compute.unfit(nn.Linear(32, 1), recipe)
    assert "size zero" in compute.unfit(nn.Linear(0, 16, device="meta"), recipe)
    assert "float64" in compute.unfit(nn.Linear(32, 48).double(), recipe)


def config(**fields):
    from torchao.float8 import Float8LinearConfig

    return dataclasses.replace(Float8LinearConfig(), **fields)


def test_config_is_used_unchanged():
    given = config(round_scales_to_power_of_2=True)
    model = nn.Sequential(nn.Linear(32, 32))
    preparation.prepare_model(model, recipes.resolve(recipes.AORecipeKwargs(config=given)))
    assert model[0].config is given
    named = [
        recipes.AORecipeKwargs(config=given.from_recipe_name(name)).scaling for name in RECIPES
    ]
    assert named == list(RECIPES) and recipes.AORecipeKwargs(config=given).scaling == "tensorwise"


@pytest.mark.parametrize("field", ["pad_inner_dim", "scaling"])
def test_config_contradicting_a_field_is_refused(field):
    recipe = types.SimpleNamespace(
        config=config(), scaling="tensorwise", pad_inner_dim=True, given={"config", "pad_inner_dim"}
    )
    if field == "scaling":
        recipe.scaling, recipe.given = "rowwise", {"config", "scaling"}
    with pytest.raises(RecipeError, match={"scaling": "ao:rowwise and a config"}.get(field, field)):
        ao.TorchAOCompute().check(recipe)


def test_fp8_all_gather_is_refused_without_fsdp2():
    model = block()
    with pytest.raises(FP8BackendError, match="enable_fsdp_float8_all_gather.*FSDP2"):
        spec = recipes.AORecipeKwargs(enable_fsdp_float8_all_gather=True)
        preparation.prepare(model, adamw(model), spec)
    assert type(model.up) is nn.Linear


def test_emulating_config_trains_with_notice():
    model = block()
    spec = recipes.AORecipeKwargs(config=config(emulate=True))
    model, optimizer = preparation.prepare(model, adamw(model), spec)
    found = losses(model, optimizer)
    assert found[-1] < found[0]
    assert ao.TorchAOCompute().engine(model.up) == "emulated"


@pytest.mark.nightly
def test_loading_torchao_prints_nothing():
    """Include the import by transformers; drop no other output."""
    script = (
        "import fp8_backends, logging\n"
        "from transformers import Trainer\n"
        "import torchao.float8\n"
        "logging.getLogger('torchao').warning('another')\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", script],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "another\n")


@pytest.mark.nightly
def test_compiled_layers_of_several_sizes_stay_within_buffers():
    """Run in a new process, since a fault ends it. The second model meets code compiled for the
    first, and is compiled with variable sizes, also in its padding."""
    script = textwrap.dedent(
        """
        import torch
        from torch import nn
        from fp8_backends import prepare

        def train(model, tokens, **options):
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            prepare(model, None, "ao:tensorwise")
            run = torch.compile(model, **options)
            for _ in range(4):
                x = torch.randn(tokens, model[0].in_features, requires_grad=bool(options))
                run(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

        train(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), 24, backend="aot_eager", fullgraph=True)
        for _ in range(3):
            train(nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)), 32)
        """
    )
    done = warm_process.run("-c", script)
    assert done.returncode == 0, done.stderr
