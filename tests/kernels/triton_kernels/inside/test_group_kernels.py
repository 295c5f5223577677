"""Compare the kernels that quantize groups of rows and experts with plain operations, bitwise: all
outputs, also positions without a row and padded columns."""

from __future__ import annotations

import functools

import pytest
import torch
from expert_families import make_experts, routed
from test_quantize_kernels import assert_same
from triton.runtime.interpreter import InterpretedFunction
from widths import nightly

from fp8_backends import preparation
from fp8_backends.compute.experts import grouped_products, grouped_scaling
from fp8_backends.compute.experts.grouped_products import Groups
from fp8_backends.formats.formats import E4M3, E5M2
from fp8_backends.kernels import triton_gate
from fp8_backends.recipes import handlers as recipes
from fp8_backends.recipes.handlers import FP8RecipeKwargs

SIZES = {
    "of odd sizes, some empty": [0, 37, 0, 3, 90],
    "one": [21],
    "multiples": [16, 64, 32],
    "no rows": [0, 0],
    "many": [number % 3 for number in range(45)],
}


lines_of_groups = functools.partial(grouped_scaling.quantize_groups, lines=True)
lines_of_experts = functools.partial(grouped_scaling.quantize_experts, lines=True)


def tokens(sizes: list[int], columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, Groups]:
    """Return magnitudes varying over rows and columns, a subnormal number, rows of zeros, NaN, a row
    and a column of NaN, and an inf in the last group."""
    rows = sum(sizes)
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) * torch.logspace(
        -3, 2, columns
    )
    x *= torch.logspace(-2, 1, rows).unsqueeze(1)
    x[::7], x[:2, 0] = 0, 1e-40
    if rows > 5:
        x[5], x[:, 7] = torch.nan, -torch.nan
        x[3, 1], x[4, 2], x[-1, -1] = torch.nan, -torch.nan, -torch.inf
    return x.to(dtype), Groups.of(
        torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)), len(sizes)
    )


def plainly(monkeypatch, quantize, *args):
    """Return the result without kernels, in an older GPU's layout."""
    with monkeypatch.context() as patched:
        patched.setenv(triton_gate.VARIABLE, "0")
        for module in (grouped_products, grouped_scaling):
            patched.setattr(module, "has_places", lambda tensor: True)
        return quantize(*args)


@pytest.mark.parametrize("sizes", SIZES)
def test_group_casts_match_reference(sizes, monkeypatch):
    x, groups = tokens(SIZES[sizes], 40, torch.bfloat16)
    scale = torch.rand(len(groups.ends), 3)[:, 1] + 0.5
    for args in ((E4M3,), (E4M3, scale))[: 1 if sizes == "many" else 2]:
        found = grouped_scaling.quantize_groups(x, groups, *args)
        assert_same(found, plainly(monkeypatch, grouped_scaling.quantize_groups, x, groups, *args))
    assert_same(
        lines_of_groups(x, groups, E4M3), plainly(monkeypatch, lines_of_groups, x, groups, E4M3)
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_group_casts_accept_dtypes_and_strides(dtype, monkeypatch):
    """Use more than one tile in both dimensions, with gaps between the rows and within them."""
    x, groups = tokens([70, 5], 600, dtype)
    for view in (x[:, 3:533], x[:, ::40]):
        for quantize, fmt in ((grouped_scaling.quantize_groups, E5M2), (lines_of_groups, E4M3)):
            assert_same(
                quantize(view, groups, fmt), plainly(monkeypatch, quantize, view, groups, fmt)
            )


VIEWS = {
    "odd sizes": lambda weight: weight,
    "columns first": lambda weight: weight.transpose(1, 2),
    "multiples, with gaps": lambda weight: weight[:2, :64, 3:35],
}


@pytest.mark.parametrize("view", VIEWS)
def test_expert_casts_match_reference(view, monkeypatch):
    weight = torch.randn(2, 70, 150, generator=torch.Generator().manual_seed(0))
    weight[0], weight[0, 0, 5], weight[1, 1, 4], weight[0, 2] = (
        weight[0] * 90,
        torch.nan,
        torch.inf,
        0,
    )
    weight = VIEWS[view](weight.bfloat16())
    quantize, lines = grouped_scaling.quantize_experts, lines_of_experts
    for args in ((E4M3, None), (E4M3, torch.rand(len(weight)) + 0.5)):
        assert_same(quantize(weight, *args), plainly(monkeypatch, quantize, weight, *args))
    assert_same(lines(weight, E4M3), plainly(monkeypatch, lines, weight, E4M3))


@pytest.mark.parametrize("layouts", [(True, False), (False, True)], ids=["rows", "columns"])
def test_single_layout_is_written(layouts, monkeypatch):
    x, groups = tokens([9, 0, 20], 24, torch.bfloat16)
    weight = x.view(1, *x.shape).repeat(2, 1, 1)
    for quantize, args in (
        (grouped_scaling.quantize_groups, (x, groups, E4M3, None, *layouts)),
        (lines_of_groups, (x, groups, E4M3, None, *layouts)),
        (grouped_scaling.quantize_experts, (weight, E4M3, None, *layouts)),
        (lines_of_experts, (weight, E4M3, None, *layouts)),
    ):
        found = quantize(*args)
        assert (found.codes is not None, found.transposed is not None) == layouts
        assert_same(found, plainly(monkeypatch, quantize, *args))


def test_offsets_beyond_2_31_elements(monkeypatch):
    """Space rows and matrices that far apart; no page of the memory between them is touched."""
    memory = torch.empty(2**31 + 2**12, dtype=torch.bfloat16)
    x, weight = (
        memory.as_strided((3, 40), (2**30, 1)),
        memory.as_strided((3, 20, 40), (2**30, 40, 1)),
    )
    weight.copy_(torch.randn(3, 20, 40))
    groups = Groups.of(torch.tensor([0, 1, 1]), 2)
    for lines in (False, True):
        quantize = lines_of_groups if lines else grouped_scaling.quantize_groups
        assert_same(
            quantize(x, groups, E4M3), plainly(monkeypatch, quantize, x.clone(), groups, E4M3)
        )
        quantize = lines_of_experts if lines else grouped_scaling.quantize_experts
        assert_same(quantize(weight, E4M3), plainly(monkeypatch, quantize, weight.clone(), E4M3))


@pytest.fixture
def launches(monkeypatch):
    """The names of kernels, in the order of their launches."""
    names, run = [], InterpretedFunction.run
    monkeypatch.setattr(
        InterpretedFunction,
        "run",
        lambda kernel, *a, **k: names.append(kernel.fn.__name__) or run(kernel, *a, **k),
    )
    return names


def experts_after_a_step(family, backend, **fields):
    """The output and gradients of experts, and their scaling states."""
    root = make_experts(family, torch.bfloat16, **fields)
    preparation.prepare_model(root, recipes.resolve(FP8RecipeKwargs(backend=backend)))
    hidden, chosen, weights = routed(12, dtype=torch.bfloat16)
    y = root.experts(hidden.requires_grad_(), chosen, weights)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype))
    return [
        y,
        hidden.grad,
        *(p.grad for p in root.parameters()),
        *(b for b in root.buffers() if b.dim() == 3),
    ]


@pytest.mark.parametrize(
    "family, backend",
    [
        ("mixtral", "native:delayed"),
        nightly("gpt_oss", "native:dynamic"),
        nightly("gpt_oss", "native:rowwise"),
        nightly("mixtral", "msamp:O2"),
        ("gpt_oss", "native:rowwise+msamp:O4"),
    ],
)
def test_kernel_layer_matches_plain_operations(family, backend, launches, monkeypatch):
    ours = experts_after_a_step(family, backend)
    assert set(launches) == {"amax_kernel", "cast_kernel"}
    monkeypatch.setenv(triton_gate.VARIABLE, "0")
    for one, other in zip(ours, experts_after_a_step(family, backend), strict=True):
        assert torch.equal(one, other)


def test_number_of_launches_is_independent_of_experts(launches):
    """Two kernels a cast: of x, the weight and dy, for each of two weights."""
    for experts in (4, 6):
        launches.clear()
        experts_after_a_step("mixtral", "native:dynamic", num_local_experts=experts)
        assert len(launches) == 2 * 3 * 2
