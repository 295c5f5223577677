"""Frozen bases of raw float8, as `module.to(torch.float8_e4m3fn)` leaves them."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from conversion_steps import take_steps
from peft import LoraConfig, get_peft_model
from tiny_checkpoints import same_bits
from torch import nn

import fp8_backends
from fp8_backends import FP8BackendError, RecipeError, checkpoints
from fp8_backends.compute.native import NativeCompute

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Block(nn.Module):
    """Each kind of module that sd-scripts casts: autocast returns those without FP8 to bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 32, 3, padding=1)
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 32)
        self.head = nn.Linear(32, 16)

    def forward(self, x):
        x = self.conv(x).flatten(2).transpose(1, 2)
        return self.head(x + self.second(nn.functional.gelu(self.first(x))))


def raw(dtype=E4M3) -> nn.Module:
    torch.manual_seed(0)
    return Block().requires_grad_(False).to(dtype)


def with_adapters(model: nn.Module, **given) -> nn.Module:
    """Wrap `first` and `second`, with the same adapters over any dtype of the base."""
    config = LoraConfig(r=4, target_modules=["first", "second"], init_lora_weights=False, **given)
    torch.manual_seed(1)
    model = get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        if "lora_A" in name or "lora_B" in name:
            nn.init.normal_(parameter, std=0.2)
    return model


def loss_of(model: nn.Module) -> torch.Tensor:
    x = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(2))
    with torch.autocast("cpu", torch.bfloat16):
        return model(x).float().square().mean()


def trained(model: nn.Module, spec, steps: int = 20) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    fp8_backends.prepare(model, optimizer, spec)
    return take_steps(lambda: loss_of(model), optimizer, steps)


def codes(model: nn.Module, name: str) -> torch.Tensor:
    return model.get_parameter(f"base_model.model.{name}.base_layer.weight").parts[0]


@pytest.mark.parametrize(
    ("rule", "dtype"),
    [*((rule, E4M3) for rule in NativeCompute.scalings), ("delayed", E5M2), ("mxfp8", E5M2)],
)
def test_adapters_train_over_raw_codes_as_over_their_values(rule, dtype):
    """Products multiply E4M3 without a second rounding, as `fp8_params` over the dequantized base;
    each rule casts the values of E5M2, as over the base itself."""
    base = raw(dtype)
    model, plain = with_adapters(copy.deepcopy(base)), with_adapters(copy.deepcopy(base).bfloat16())
    expected = {"backend": f"native:{rule}", "fp8_params": dtype == E4M3}
    losses = trained(model, f"native:{rule}")
    assert losses == trained(plain, expected) and losses[-1] < 0.9 * losses[0]
    for name in ("first", "second"):
        assert same_bits(codes(model, name), base.get_submodule(name).weight)
    inner = model.base_model.model
    assert same_bits(inner.conv.weight, base.conv.weight) and inner.conv.weight.dtype == dtype
    audit = fp8_backends.audit(model)
    assert set(audit.products) == {f"base_model.model.{n}.base_layer" for n in ("first", "second")}
    assert audit.high_precision["base_model.model.conv"].startswith("convolution")
    assert audit.bytes_per_element["weight"] == pytest.approx(1, abs=0.01)
    assert "raw e" in repr(inner.first.base_layer)


def test_head_named_in_include_is_taken_and_others_stay_raw():
    model = raw()
    fp8_backends.prepare(model, None, {"backend": "native:dynamic", "include": "+head"})
    assert set(fp8_backends.audit(model).products) == {"first", "second", "head"}
    model, _ = fp8_backends.prepare(raw(), None, {"backend": "native:dynamic", "exclude": "second"})
    assert type(model.second.weight) is nn.Parameter and model.second.weight.dtype == E4M3
    assert (model.second.bias.dtype, model.first.bias.dtype) == (E4M3, torch.bfloat16)
    model.eval()
    stock, x = raw(), torch.randn(2, 4, 8, 8)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(x), stock(x)), "evaluation runs in high precision, as in stock"


def test_states_copies_and_files_keep_codes():
    base, model = raw(), raw()
    fp8_backends.prepare(model, None, "native:dynamic")
    model.load_state_dict(base.state_dict())
    state = model.state_dict()
    assert {type(tensor) for tensor in state.values()} == {torch.Tensor}
    fresh = raw()
    nn.init.zeros_(fresh.first.weight)
    fresh.load_state_dict(state)
    assert same_bits(fresh.first.weight, base.first.weight)
    file = io.BytesIO()
    torch.save(model.first.weight, file)
    file.seek(0)
    for weight in (
        torch.load(file, weights_only=True),
        copy.deepcopy(model).first.weight,
        model.first.weight,
    ):
        assert same_bits(weight.parts[0], base.first.weight)
    state["first.weight"] = state["first.weight"] * 2
    with pytest.raises((RuntimeError, FP8BackendError), match="cannot take other values"):
        model.load_state_dict(state)
    weight = model.first.weight
    fp8_backends.restore(model)
    assert model.first.weight is weight and type(weight) is nn.Parameter
    assert torch.equal(weight, base.first.weight.bfloat16())


@pytest.mark.parametrize("use_dora, dtype", [(False, E4M3), (True, E4M3), (False, E5M2)])
def test_peft_over_frozen_raw_codes_merges_only_after_restore(use_dora, dtype):
    """PEFT 0.21 rounds adapters over raw float8 to float8, cannot make DoRA's there, and cannot
    merge. Over frozen codes it does all as over bf16."""
    model, plain = raw(dtype), raw(dtype).bfloat16()
    assert checkpoints.freeze_codes(model) == ["first", "second", "head"]
    model, plain = (with_adapters(each, use_dora=use_dora) for each in (model, plain))
    spec = {"backend": "native:rowwise", "fp8_params": dtype == E4M3}
    assert trained(model, "native:rowwise", 3) == trained(plain, spec, 3)
    before = codes(model, "first").clone()
    with pytest.raises(FP8BackendError, match=r"restore\(model\) makes weights plain, to merge"):
        model.merge_adapter()
    assert same_bits(codes(model, "first"), before)
    for each in (model, plain):
        fp8_backends.restore(each)
        each.merge_adapter()
    merged = model.base_model.model.first.base_layer.weight
    assert torch.equal(merged, plain.base_model.model.first.base_layer.weight)
    assert not torch.equal(merged, before.bfloat16())
    for each in (model, plain):
        each.unmerge_adapter()
    assert torch.equal(merged, plain.base_model.model.first.base_layer.weight)


@pytest.mark.parametrize("backend", ["msamp:O1", "msamp:O4", "ao:tensorwise"])
def test_backends_without_raw_codes_refuse_by_name(backend):
    model = raw()
    with pytest.raises(RecipeError, match=r"first: .*raw e4m3 codes: use native"):
        fp8_backends.prepare(model, None, backend)
    assert type(model.first) is nn.Linear and model.first.weight.dtype == E4M3


def test_trainable_raw_float8_is_refused_by_name():
    for trains in ("weight", "bias"):
        model = raw()
        model.second.get_parameter(trains).requires_grad_()
        with pytest.raises(RecipeError, match=r"second: .*train.*model.to\(torch.bfloat16\)"):
            fp8_backends.prepare(model, None, "native:dynamic")


def test_codes_with_a_scale_of_their_own_are_refused_by_name():
    model = raw()
    model.second.register_buffer("scale_weight", torch.tensor(0.5))
    for take in (lambda m: fp8_backends.prepare(m, None, "native"), checkpoints.freeze_codes):
        with pytest.raises(RecipeError, match="second: raw float8 .* has scale_weight besides"):
            take(model)
        assert model.first.weight.dtype == E4M3
    with pytest.raises(FP8BackendError, match="second.weight in the checkpoint: of another name"):
        checkpoints.load_codes(
            Block(), {**Block().state_dict(), "second.weight": raw().second.weight}
        )


def test_patched_codes_of_others_stay_theirs():
    """musubi-tuner's and diffusers' layers cast in a forward of their own."""
    model = raw()
    layer = model.second
    layer.register_buffer("scale_weight", torch.tensor(0.5))
    layer.forward = lambda x: nn.functional.linear(
        x, layer.weight.to(x.dtype) * layer.scale_weight.to(x.dtype), layer.bias.to(x.dtype)
    )
    fp8_backends.prepare(model, None, "native:dynamic")
    loss_of(model)
    audit = fp8_backends.audit(model)
    assert set(audit.products) == {"first"}
    assert "forward was replaced" in audit.high_precision["second"]
