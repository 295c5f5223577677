"""The kernels of RMSNorm, against PyTorch's own operations and autograd, and in a model."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fp8_backends.compute.native.backend import NativeCompute
from fp8_backends.compute.native.fused_norms import Formula, FusedNorm, fused_norm
from fp8_backends.numerics.kernels.fused import triton_norm
from fp8_backends.numerics.kernels.quantize import triton_quantize
from fp8_backends.numerics.kernels.quantize.known_amax import known_partials
from fp8_backends.recipes.handlers import FP8RecipeKwargs
from fp8_backends.training.conversion import convert

DTYPES = {
    "FP32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "a weight in FP32": (torch.bfloat16, torch.float32),
    "a weight in bf16": (torch.float32, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
}
ULP = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-22}


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(
    "formula, shape",
    [(Formula(1e-5, False), (6, 7, 300)), (Formula(1e-5, True), (70, 16))],
    ids=["Llama's", "Gemma's"],
)
def test_values_and_gradients(formula, dtypes, shape):
    """Values within a unit of the last place, which another order of the sum moves; in 16 bits nearly all are equal.
    The gradients against those of FP64."""
    generator = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(shape, generator=generator)).to(dtypes[0])
    weight = torch.randn(shape[-1], generator=generator).to(dtypes[1])
    values = formula(x, weight)
    grad = torch.randn(shape, generator=generator).to(values.dtype)

    found = triton_norm.forward(x, weight, *formula, keep_nan=False)
    assert found.values.dtype == values.dtype
    torch.testing.assert_close(found.values, values, rtol=2 * ULP[values.dtype], atol=0)
    if dtypes[0].itemsize == 2:
        assert (found.values == values).float().mean() > 0.995
    assert found.partials.amax().view(torch.float32) == found.values.float().abs().max()

    exact_x, exact_weight = x.double().requires_grad_(), weight.double().requires_grad_()
    normed = exact_x * torch.rsqrt(exact_x.square().mean(-1, keepdim=True) + 1e-5)
    (normed * (exact_weight + formula.centered)).backward(grad.double())
    x_grad, weight_grad = triton_norm.backward(grad, x, weight, *formula)
    assert (x_grad.dtype, weight_grad.dtype) == (x.dtype, torch.float32)
    for ours, exact in ((x_grad, exact_x.grad), (weight_grad, exact_weight.grad)):
        rounded = ULP[dtypes[0]] * exact.abs().amax()  # of the terms, which may cancel
        assert (ours.double() - exact).abs().max() <= rounded


@pytest.mark.parametrize("keep_nan", [False, True])
def test_the_amax_of_numbers_that_are_not_finite(keep_nan):
    x, weight = torch.randn(5, 16), torch.ones(16)
    x[1, 1], x[3, 3] = torch.nan, torch.inf
    formula = Formula(1e-5, False)
    found = triton_norm.forward(x, weight, *formula, keep_nan)
    expected = formula(x, weight)
    torch.testing.assert_close(found.values, expected, equal_nan=True)
    amax = found.partials.amax().view(torch.float32)
    assert amax.isnan() if keep_nan else amax == found.values.nan_to_num(0).abs().max()


def trained(fuse: bool) -> tuple[list[torch.Tensor], torch.nn.Module]:
    """What two steps of a small Llama give: losses and gradients."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=1, **sizes))
    model.train()
    convert(model, FP8RecipeKwargs(backend="native:dynamic", fuse_activations=fuse), NativeCompute())
    found = []
    for seed in range(2):
        tokens = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(seed))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        model.zero_grad()
    return found, model


def test_a_llama_trains_as_without_and_reads_what_it_quantizes_once(monkeypatch):
    """Five amax passes less a step: of the inputs of q, k and v, of gate and up, of down, and of the gradients of gate
    and up. The numbers differ by what the order of a sum moves, in FP8 and after."""
    passes, original = [], triton_quantize._partial_amaxes
    monkeypatch.setattr(triton_quantize, "_partial_amaxes", lambda *args: passes.append(1) or original(*args))
    plain, _ = trained(False)
    before = len(passes)
    ours, model = trained(True)
    assert 2 * before - len(passes) == 2 * 5
    assert sum(isinstance(module, FusedNorm) for module in model.modules()) == 3
    for one, other in zip(ours, plain, strict=True):
        assert (one - other).norm() <= 0.02 * other.norm()
    assert not all(map(torch.equal, ours, plain))


def test_inference_mode_in_training_notes_nothing():
    """Its tensors do not tell of changes."""
    with torch.inference_mode():
        y = fused_norm(torch.randn(3, 16), torch.ones(16), Formula(1e-5, False), False)
        assert known_partials(y, keep_nan=False) is None
    assert (
        known_partials(fused_norm(torch.randn(3, 16), torch.ones(16), Formula(1e-5, False), False), False) is not None
    )
