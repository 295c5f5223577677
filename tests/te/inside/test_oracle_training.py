"""Compare whole trainings: `te.Linear` under `te.autocast` over the stand-in, and the same model
under this package's `native`.

Only the order of sums in products differs: the stand-in, oneDNN and a GPU have one each. Here both
sides sum in FP64, and the order changes the 53rd bit, 29 bits below the following rounding to FP32.
Everything else is real and compared to the bit, step by step: losses, weight gradients, the scales
and histories after the step, and the weights at the end. Codes are compared through their results.
The last test bounds the difference of each side's own FP32 sums.

The layers have no bias: TransformerEngine adds it before the product is rounded to bf16 (and, with
FP32 activations, rounds the bias itself to bf16), `native` afterwards.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from standin import blocks as standin_blocks_module
from standin import products as standin_products
from torch import nn
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
)
from transformer_engine.pytorch import Linear, autocast
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

import fp8_backends
from fp8_backends.compute import products as native_products
from fp8_backends.compute.native import layer_rule
from fp8_backends.formats.scaling import GRAD_OUTPUT, HISTORY, INPUT, SCALE, WEIGHT

SIZES, TOKENS, STEPS = (64, 96, 32, 48), 32, 6  # no contraction is longer than a block of 128


@pytest.fixture
def exact_products(monkeypatch):
    def native(a, a_scale_inv, b, b_scale_inv, values_dtype, out_dtype):
        return (
            (a.double() @ b.double().T * a_scale_inv.double() * b_scale_inv.double())
            .float()
            .to(out_dtype)
        )

    def standin(a, a_scale_inv, b, b_scale_inv):
        return (b.double() @ a.double().T * b_scale_inv.double() * a_scale_inv.double()).float()

    def native_blocks(a, a_blocks, b, b_blocks, out_dtype):
        a, b = a_blocks.dequantize(a, torch.float64), b_blocks.dequantize(b, torch.float64)
        return (a @ b.T).float().to(out_dtype)

    def standin_blocks(a, a_scale_inv, b, b_scale_inv, a_first):
        return ((b.double() * b_scale_inv.double()) @ (a.double() * a_scale_inv.double()).T).float()

    monkeypatch.setattr(native_products, "exact_product", native)
    monkeypatch.setattr(standin_products, "scaled_codes", standin)
    monkeypatch.setattr(layer_rule, "block_scaled_product", native_blocks)
    monkeypatch.setattr(standin_blocks_module, "scaled_blocks", standin_blocks)


class Training:
    """Linear layers without bias, GELU between them, SGD with momentum. One of the two sides."""

    def __init__(self, layers: list[nn.Module], dtype: torch.dtype) -> None:
        self.model, self.dtype = nn.Sequential(*layers), dtype
        generator = torch.Generator().manual_seed(0)
        for weight in self.model.parameters():
            weight.data = torch.randn(weight.shape, generator=generator) / weight.shape[1] ** 0.5
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.9)

    def step(self, number: int) -> tuple[float, list[torch.Tensor]]:
        """The loss, and the gradients."""
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(TOKENS, SIZES[0], generator=generator) * 2.0**number  # to move scales
        target = torch.randn(TOKENS, SIZES[-1], generator=generator)
        with torch.autocast("cpu", self.dtype, enabled=self.dtype != torch.float32):
            loss = (self.forward(x).float() - target).square().mean()
        loss.backward()
        gradients = [weight.grad.clone() for weight in self.model.parameters()]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item(), gradients

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


class TransformerEngineTraining(Training):
    def __init__(self, recipe, dtype: torch.dtype) -> None:
        FP8GlobalStateManager.reset()
        self.recipe = recipe
        layers = [Linear(n, m, bias=False, device="cpu") for n, m in itertools.pairwise(SIZES)]
        super().__init__(_with_gelu(layers), dtype)
        self.layers = layers

    def forward(self, x):
        with autocast(recipe=self.recipe):
            return self.model(x)

    def state(self, layer: int, tensor: int) -> tuple[torch.Tensor, torch.Tensor]:
        meta = self.layers[layer].fp8_meta[
            "scaling_bwd" if tensor == GRAD_OUTPUT else "scaling_fwd"
        ]
        place = {INPUT: 0, WEIGHT: 1, GRAD_OUTPUT: 0}[tensor]
        return meta.scale[place], meta.amax_history[:, place]


class NativeTraining(Training):
    def __init__(self, backend: str, dtype: torch.dtype, **fields) -> None:
        self.layers = [nn.Linear(n, m, bias=False) for n, m in itertools.pairwise(SIZES)]
        super().__init__(_with_gelu(self.layers), dtype)
        fp8_backends.prepare(
            self.model, self.optimizer, fp8_backends.FP8RecipeKwargs(backend=backend, **fields)
        )

    def state(self, layer: int, tensor: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Roll native's states at the begin of its next forward: TransformerEngine does so at the
        end of this one."""
        now = [each.fp8_scaling.clone() for each in self.layers]
        (roll,) = self.model._forward_pre_hooks.values()
        roll(self.model, None)
        row = self.layers[layer].fp8_scaling.view(torch.float32)[tensor].clone()
        for each, state in zip(self.layers, now, strict=True):
            each.fp8_scaling.copy_(state)
        return row[SCALE], row[HISTORY:]


def _with_gelu(layers: list[nn.Module]) -> list[nn.Module]:
    return [each for layer in layers for each in (layer, nn.GELU())][:-1]


RECIPES = {
    "max": (
        DelayedScaling(amax_history_len=4),
        "native:delayed",
        {"amax_history_len": 4, "amax_compute_algo": "max"},
    ),
    "most_recent": (
        DelayedScaling(amax_history_len=3, amax_compute_algo="most_recent", margin=1),
        "native:delayed",
        {"amax_history_len": 3, "amax_compute_algo": "most_recent", "margin": 1},
    ),
    "current": (Float8CurrentScaling(), "native:dynamic", {}),
    "block": (Float8BlockScaling(), "native:blockwise", {}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_training_matches_transformer_engine_bitwise(name, dtype, exact_products):
    recipe, backend, fields = RECIPES[name]
    te, native = TransformerEngineTraining(recipe, dtype), NativeTraining(backend, dtype, **fields)
    for step in range(STEPS):
        (loss, gradients), (our_loss, our_gradients) = te.step(step), native.step(step)
        assert our_loss == loss, f"loss of step {step}"
        for layer, (theirs, ours) in enumerate(zip(gradients, our_gradients, strict=True)):
            assert torch.equal(ours, theirs), f"weight gradient of layer {layer} in step {step}"
        if backend == "native:delayed":
            for layer, tensor in itertools.product(
                range(len(te.layers)), (INPUT, WEIGHT, GRAD_OUTPUT)
            ):
                for ours, theirs in zip(
                    native.state(layer, tensor), te.state(layer, tensor), strict=True
                ):
                    assert torch.equal(ours, theirs), (
                        f"state of layer {layer}, tensor {tensor} after step {step}"
                    )
    for ours, theirs in zip(native.model.parameters(), te.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_sums_of_both_sides_differ_only_by_rounding():
    """The first layer's first output in FP32. Each side adds `in_features` products of codes in
    some order in FP32: at most in_features roundings of half a unit in the last place, relative to
    the sum of the products' magnitudes; one more for each scale."""
    te, native = (
        TransformerEngineTraining(Float8CurrentScaling(), torch.float32),
        NativeTraining("native:dynamic", torch.float32),
    )
    x = torch.randn(TOKENS, SIZES[0], generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), autocast(recipe=te.recipe):
        theirs = te.layers[0](x)
    with torch.no_grad():
        ours = native.layers[0](x)
    magnitudes = x.abs() @ te.layers[0].weight.abs().T * 1.07**2  # a code is off by 1/16 at most
    assert ((ours - theirs).abs() <= 2 * (SIZES[0] + 2) * 2**-24 * magnitudes).all()
