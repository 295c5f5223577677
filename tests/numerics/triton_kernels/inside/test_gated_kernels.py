"""The kernels of gated activations, against PyTorch's own operations and autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fp8_backends.compute.native.backend import NativeCompute
from fp8_backends.compute.native.fused_gates import ACTIVATIONS
from fp8_backends.numerics.formats import E4M3
from fp8_backends.numerics.kernels.fused import triton_gated
from fp8_backends.numerics.kernels.quantize import known_amax, triton_quantize
from fp8_backends.recipes.handlers import FP8RecipeKwargs
from fp8_backends.training.conversion import convert

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
NAMES = pytest.mark.parametrize("activation", ACTIVATIONS)
EPS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-20}
"""Half a unit in the last place, and of FP32 what a sum of a few terms may lose."""


def numbers(shape, dtype, seed: int = 0) -> list[torch.Tensor]:
    """Gate, up and the gradient of their product."""
    generator = torch.Generator().manual_seed(seed)
    return [(size * torch.randn(shape, generator=generator)).to(dtype) for size in (4, 1, 0.1)]


def by_autograd(gate, up, grad, activation) -> tuple[torch.Tensor, ...]:
    gate, up = gate.clone().requires_grad_(), up.clone().requires_grad_()
    product = ACTIVATIONS[activation](gate) * up
    product.backward(grad)
    return product.detach(), gate.grad, up.grad


def by_kernels(gate, up, grad, activation, keep_nan=False) -> tuple[triton_gated.Gated, ...]:
    product = triton_gated.forward(gate, up, activation, keep_nan)
    return product, *triton_gated.backward(grad, gate, up, activation, keep_nan)


@NAMES
@DTYPES
def test_values_and_gradients(dtype, activation):
    """SiLU in bf16 to the bit. Else within two units of the last place, and of the last places of FP32 that the
    activation loses where its terms cancel, far below zero: they count by the cube of the gate, times what follows."""
    gate, up, grad = numbers((70, 140), dtype)
    factors = up.float(), grad.float() * up.float(), grad.float()
    made = zip(by_kernels(gate, up, grad, activation), by_autograd(gate, up, grad, activation), factors, strict=True)
    for found, expected, factor in made:
        if (dtype, activation) == (torch.bfloat16, "silu"):
            assert torch.equal(found.values, expected)
        lost = 2.0**-23 * (1 + gate.float().abs()) ** 3 * factor.abs()
        smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        off = (found.values.float() - expected.float()).abs()
        assert (off <= 4 * EPS[dtype] * expected.float().abs() + lost + smallest * (1 + factor.abs())).all()
        assert found.partials.amax().view(torch.float32) == found.values.float().abs().max()


def test_silu_of_every_bf16_number():
    gate = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    up, grad = torch.full_like(gate, 1.5), torch.full_like(gate, -0.75)
    for found, expected in zip(by_kernels(gate, up, grad, "silu"), by_autograd(gate, up, grad, "silu"), strict=True):
        same = (found.values == expected) | (found.values.isnan() & expected.isnan())
        assert same.float().mean() > 0.999
        torch.testing.assert_close(found.values, expected, rtol=2 * EPS[torch.bfloat16], atol=1e-38, equal_nan=True)


@pytest.mark.parametrize("keep_nan", [False, True])
def test_the_amax_of_numbers_that_are_not_finite(keep_nan):
    """NaN is left out or kept, as the scaling rule says; inf always shows."""
    gate, up, grad = numbers((3, 5), torch.bfloat16)
    gate[0, 0], up[1, 1], grad[2, 2] = torch.nan, torch.inf, torch.nan
    for found in by_kernels(gate, up, grad, "silu", keep_nan):
        amax = found.partials.amax().view(torch.float32)
        values = found.values if keep_nan else found.values.nan_to_num(0, torch.inf, -torch.inf)
        assert torch.equal(amax, values.float().abs().max()) or (amax.isnan() and values.isnan().any())


def test_a_noted_amax_is_the_amax_until_the_tensor_changes():
    x = torch.randn(2, 6, 16)
    known_amax.note(x, torch.tensor([1.0, 7.0]).view(torch.int32), keep_nan=False)
    matrix = known_amax.as_matrix(x, 16)
    assert matrix.shape == (12, 16) and triton_quantize.quantize(matrix, E4M3).amax == 7
    assert known_amax.known_partials(matrix, keep_nan=True) is None
    x.add_(1)  # the matrix is a view
    assert triton_quantize.quantize(matrix, E4M3).amax == x.abs().max()
    assert known_amax.known_partials(known_amax.as_matrix(x, 16), keep_nan=False) is None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up, self.down = nn.Linear(32, 48), nn.Linear(32, 48, bias=False), nn.Linear(48, 32)
        self.act = nn.SiLU()

    def forward(self, x):
        return self.down(self.up(x) * self.act(self.gate_proj(x)))


def trained(scaling: str, fuse: bool, change=lambda block: None, steps: int = 2) -> list[torch.Tensor]:
    """What some steps of a block in the middle of a model give: results and gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), Block(), nn.Linear(32, 32))
    convert(model, FP8RecipeKwargs(backend=f"native:{scaling}", fuse_activations=fuse), NativeCompute())
    change(model[1])
    found = []
    for seed in range(steps):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(seed)))
        loss = y.float().square().mean()
        for other in model[1].__dict__.pop("read_elsewhere", []):
            loss = loss + other.float().square().sum()
        loss.backward()
        found += [y.detach(), *(p.grad.clone() for p in model.parameters())]
        model.zero_grad()
    return found


def assert_same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert all(map(torch.equal, ours, theirs))


@pytest.fixture
def amax_passes(monkeypatch) -> list:
    taken, original = [], triton_quantize._partial_amaxes
    monkeypatch.setattr(triton_quantize, "_partial_amaxes", lambda *args: taken.append(1) or original(*args))
    return taken


@pytest.mark.parametrize("scaling, fewer", [("dynamic", 6), ("window", 6), ("delayed", 0)])
def test_a_fused_block_trains_to_the_bits_of_the_plain_one(scaling, fewer, amax_passes):
    """With three passes less a step, of the product and of the gradients of gate and up."""
    plain, before = trained(scaling, False), len(amax_passes)
    assert_same(trained(scaling, True), plain)
    assert 2 * before - len(amax_passes) == fewer


def seen_of(block) -> None:
    block.act.register_forward_hook(lambda *_: block.__dict__.setdefault("seen", []).append(1))


def changed_gradient(block) -> None:
    block.up.register_full_backward_pre_hook(lambda _, grads: (grads[0] * 3,))


def changed_in_place(block) -> None:
    block.down.register_forward_pre_hook(lambda _, args: (args[0].mul_(2),))


def read_elsewhere(block) -> None:
    """Gate and up get a second gradient, which autograd adds, maybe in place."""
    for layer in (block.gate_proj, block.up):
        layer.register_forward_hook(lambda *args: block.__dict__.setdefault("read_elsewhere", []).append(args[-1]))


@pytest.mark.parametrize("change", [seen_of, changed_gradient, changed_in_place, read_elsewhere])
def test_hooks_see_and_change_what_they_did_before(change):
    """What was changed has another amax than was noted. A hook on the activation runs."""
    blocks = []
    ours = trained("dynamic", True, lambda block: blocks.append(block) or change(block), steps=1)
    assert_same(ours, trained("dynamic", False, change, steps=1))
    assert change is not seen_of or len(blocks[0].seen) == 1


def test_what_a_kernel_cannot_read_is_computed_as_before():
    """A gate with gaps between its rows, and one of another dtype."""
    from fp8_backends.compute.native.fused_gates import gated_product

    wide = torch.randn(4, 40)
    gate, up = wide[:, :24], torch.randn(4, 24)
    assert torch.equal(gated_product(gate, up, "silu", False), F.silu(gate) * up)
    assert gated_product(up.bfloat16(), up, "silu", False).dtype == torch.float32
