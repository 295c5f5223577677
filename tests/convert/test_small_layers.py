"""Keep Linears in bf16 that a chip multiplies faster there (`small_layers`)."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import fp8_backends
from fp8_backends import RecipeError
from fp8_backends.compute import chips, hardware
from fp8_backends.compute.rates import linear_gain

WIDE, NARROW = 2048, 512


class Attention(nn.Module):
    """Query and key projections of a Llama 1B, and a small output head."""

    def __init__(self, hidden: int = WIDE) -> None:
        super().__init__()
        self.q_proj = nn.Linear(hidden, hidden)
        self.k_proj = nn.Linear(hidden, NARROW)
        self.lm_head = nn.Linear(NARROW, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.k_proj(self.q_proj(x)))


def train(backend: str, **fields) -> tuple[list[float], nn.Module]:
    """Return two steps' losses, and the model."""
    torch.manual_seed(0)
    model = Attention()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    fp8_backends.prepare(model, optimizer, {"backend": backend, **fields})
    x = torch.randn(16, WIDE)
    found = []
    for _ in range(2):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found, model


@pytest.mark.parametrize("backend", ["native:delayed", "ao:tensorwise", "msamp:O2"])
def test_a_small_layer_trains_as_an_excluded_one(backend, capsys):
    found, model = train(backend, small_layers="h200")
    line = capsys.readouterr().err
    assert found == train(backend, exclude="k_proj")[0]
    assert " + 1 layer bf16: 1/3 Linear" in line
    reasons = fp8_backends.audit(model).high_precision
    assert reasons.keys() == {"k_proj", "lm_head"}
    assert "(small_layers)" in reasons["k_proj"] and "on H200, compiled" in reasons["k_proj"]
    assert reasons["lm_head"].startswith("output head")


@pytest.mark.parametrize(
    "fields",
    [
        {"include": "+k_proj"},
        {"layers": {"k_proj": "native:rowwise"}},
        {"small_layers": "fp8"},
    ],
)
def test_layers_named_by_the_recipe_stay_in_fp8(fields):
    _, model = train("native:dynamic", **{"small_layers": "h200", **fields})
    assert "k_proj" in fp8_backends.audit(model).products


def test_the_choice_is_the_predicted_gain_of_each_layer():
    sizes = [(64 << a, 64 << b) for a in range(8) for b in range(8)]
    model = nn.ModuleList(nn.Linear(*size, device="meta") for size in sizes)
    fields = {"backend": "native:rowwise", "small_layers": "rtx4090"}
    fp8_backends.prepare(model, torch.optim.SGD(model.parameters()), fields)
    converted = {model[int(name)] for name in fp8_backends.audit(model).products}
    rates = chips.product_named("rtx4090").rates
    for size, layer in zip(sizes, model, strict=True):
        assert (layer in converted) == (linear_gain([size], "native", "rowwise", rates) > 1), size
    assert 0 < len(converted) < len(sizes)


def test_bf16_decides_for_this_machines_chip(monkeypatch):
    hopper = chips.product_named("h200").chip
    monkeypatch.setattr(hardware, "chip", lambda: dataclasses.replace(hopper))
    _, model = train("native:dynamic", small_layers="bf16")
    reason = fp8_backends.audit(model).high_precision["k_proj"]
    assert f"on {hopper.examples}, compiled" in reason


def test_an_unknown_chip_and_a_model_of_small_layers_are_refused():
    with pytest.raises(RecipeError, match="chip .CPU. is unknown: name the chip .*h200"):
        train("native:dynamic", small_layers="bf16")
    with pytest.raises(fp8_backends.FP8BackendError, match=r"faster in bf16: .*\(small_layers\)"):
        train("native:dynamic", small_layers="h200", exclude="q_proj")
