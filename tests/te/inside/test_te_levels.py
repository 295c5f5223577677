"""te+msamp: TransformerEngine multiplies, the level stores. The twin without it is native with the
same recipe."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
import transformer_engine.pytorch  # noqa: F401, before it is asked about the device
from torch import nn

import fp8_backends
from fp8_backends.tensors.scaled_tensor import ScaledTensor

LEVELS = ("O1", "O2", "O3", "O4")
IN_E4M3 = ("O3", "O4")
BYTES = {"O1": 11, "O2": 6, "O3": 7, "O4": 5 + 8 / 128}  # with the scales of blocks
STEPS = 6


def net(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(64, 128, bias), nn.GELU(), nn.Linear(128, 64, bias=False), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(64, 16, bias))


def batch(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(72, 64, generator=torch.Generator().manual_seed(index))  # no multiple of 16
    return x, torch.tanh(x[:, :16])


def prepared(spec, bias: bool = True, **fields):
    model = net(bias)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return fp8_backends.prepare(
        model, optimizer, fp8_backends.FP8RecipeKwargs(backend=spec, **fields)
    )


def step(model, optimizer, index: int, microbatches: int = 1) -> float:
    x, y = batch(index)
    for rows in range(microbatches):
        part = slice(rows * 72 // microbatches, (rows + 1) * 72 // microbatches)
        loss = F.mse_loss(model(x[part]), y[part])
        (loss / microbatches).backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@pytest.mark.parametrize(
    ("level", "scaling"),
    [
        ("O1", "delayed"),
        ("O2", "dynamic"),
        ("O3", "blockwise"),
        ("O4", "dynamic"),
    ],
)
def test_levels_match_native_twin(level, scaling):
    """Store to nearest, without biases, which TransformerEngine rounds to bf16. Only the order of
    FP32 sums differs: it changes the first losses by rounding, and later ones by values moved
    across a boundary of FP8 codes."""
    losses = {}
    for compute in ("te", "native"):
        model, optimizer = prepared(
            f"{compute}:{scaling}+msamp:{level}", bias=False, rounding="nearest"
        )
        losses[compute] = [step(model, optimizer, index) for index in range(STEPS)]
    assert losses["te"][0] == pytest.approx(losses["native"][0], rel=1e-6)
    assert losses["te"] == pytest.approx(losses["native"], rel=1e-3)
    assert losses["te"][-1] < losses["te"][0]


@pytest.mark.parametrize("level", LEVELS)
def test_bytes_products_and_plain_exports_match_the_level(level):
    model, optimizer = prepared(f"te:delayed+msamp:{level}")
    for index in range(2):
        step(model, optimizer, index)
    audit = fp8_backends.audit(model, optimizer)
    # one scale a tensor
    assert audit.bytes_per_element["total"] == pytest.approx(BYTES[level], rel=2e-3)
    for name, count in audit.products.items():
        assert count["fprop"] and count["wgrad"] and bool(count["dgrad"]) == (name != "0"), (
            audit.products
        )
    (_, _, has), *_ = fp8_backends.convert.conversion.prepared_roots(model)
    # on Hopper dgrad multiplies a transposed copy; E4M3 weights are their own codes
    assert has.compute.transient_bytes_per_element(model[0]) == (1.0 if level in IN_E4M3 else 2.0)
    weights = [model[index].weight for index in (0, 2, 4)]
    assert all(isinstance(weight, ScaledTensor) for weight in weights)
    assert weights[0].codes.dtype == (torch.float8_e4m3fn if level in IN_E4M3 else torch.float16)
    codes = has.compute.weight_codes(model[0])  # what a checkpoint of codes holds
    assert (codes is not None) == (level in IN_E4M3)
    assert codes is None or torch.equal(
        codes.codes.view(torch.uint8), weights[0].codes.view(torch.uint8)
    )
    state = model.state_dict()
    assert list(state) == list(net().state_dict()) and {
        type(value) for value in state.values()
    } == {torch.Tensor}
    net().load_state_dict(state)


def casts(monkeypatch) -> list:
    """Record the shapes and dtypes of all casts from here on. Weights are cast from FP32,
    activations from bf16."""
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    seen, quantize_impl = [], Float8Quantizer.quantize_impl

    def watched(self, tensor):
        seen.append((tuple(tensor.shape), tensor.dtype))
        return quantize_impl(self, tensor)

    monkeypatch.setattr(Float8Quantizer, "quantize_impl", watched)
    return seen


@pytest.mark.parametrize("level", ["O2", "O4"])
def test_weight_is_cast_once_per_step_and_never_in_e4m3(level, monkeypatch):
    model, optimizer = prepared(f"te:delayed+msamp:{level}")
    step(model, optimizer, 0)
    seen = casts(monkeypatch)
    with torch.autocast("cpu", torch.bfloat16):
        for index in (1, 2):
            step(model, optimizer, index, microbatches=3)
    weights = [
        shape
        for shape, dtype in seen
        if dtype == torch.float32 and shape in {(128, 64), (64, 128), (16, 64)}
    ]
    assert len(weights) == (0 if level in IN_E4M3 else 2 * 3)


def test_manually_changed_weight_is_cast_again():
    model, optimizer = prepared("te:dynamic+msamp:O2")
    x, _ = batch(0)
    before = model(x)
    with torch.no_grad():
        for index in (0, 2, 4):
            model[index].weight.mul_(-1)
            if model[index].bias is not None:
                model[index].bias.zero_()
    assert not torch.equal(before, model(x))
    assert torch.equal(model(x), copy.deepcopy(model)(x))


def test_frozen_weights_stay():
    model = net()
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    model, optimizer = fp8_backends.prepare(model, optimizer, "te:delayed+msamp:O2")
    before = model.state_dict()["0.weight"].clone()
    losses = [step(model, optimizer, index) for index in range(4)]
    assert torch.equal(before, model.state_dict()["0.weight"]) and losses[-1] < losses[0]


@pytest.mark.parametrize(("level", "scaling"), [("O2", "delayed"), ("O4", "dynamic")])
def test_steps_in_the_host_equal_steps_on_the_device(level, scaling):
    usual = prepared(f"te:{scaling}+msamp:{level}")
    ours = prepared(f"te:{scaling}+msamp:{level}", offload="states")
    for index in range(STEPS):
        assert step(*ours, index, microbatches=2) == step(*usual, index, microbatches=2)
    for weight, expected in zip(ours[0].parameters(), usual[0].parameters(), strict=True):
        assert torch.equal(weight, expected)
