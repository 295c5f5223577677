"""The loss of an output head in chunks: against PyTorch's cross-entropy in high precision within
the rounding of its products, in FP8 against `FP8Linear` chunk by chunk, to the bit."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from test_native import SCALINGS, fp8_linear
from torch import nn

from fp8_backends.compute.native.backend import NativeCompute
from fp8_backends.convert.fused_head.deferred_logits import (
    CrossEntropy,
    HeadLoss,
    HeadProducts,
    chunk_loss,
    tokens_of_chunk,
)
from fp8_backends.convert.fused_head.native_head import FP8Head
from fp8_backends.errors import FP8BackendError
from fp8_backends.recipes.handlers import resolve

IGNORED = -100


def problem(seed, tokens, hidden, vocabulary, dtype, with_bias, ignored=0.2):
    """Return a head, hidden states with gradient, and labels with some ignored."""
    generator = torch.Generator().manual_seed(seed)
    head = nn.Linear(hidden, vocabulary, bias=with_bias)
    for parameter in head.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) / hidden**0.5
    x = torch.randn(tokens, hidden, generator=generator)
    labels = torch.randint(vocabulary, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) < ignored] = IGNORED
    return head.to(dtype), x.to(dtype).requires_grad_(), labels


def fp8_head(linear, scaling, **fields):
    compute, recipe = NativeCompute(), resolve({"backend": f"native:{scaling}", **fields})
    carrier = compute.build(linear, recipe, compute.new_shared(linear, recipe))
    carrier.__class__, carrier.fp8_is_ordinary = FP8Head, False
    return carrier


def head_loss(head, x, labels, products, elementwise=None, options=None):
    seen, options = [], options or CrossEntropy()
    loss = HeadLoss.apply(
        x,
        head.weight,
        head.bias,
        labels,
        products,
        elementwise,
        options,
        lambda *gradients: seen.append(gradients),
    )
    return loss, seen


def gradients(loss, head, x, factor=1.0):
    tensors = [x, *head.parameters()]
    return torch.autograd.grad(loss * factor, tensors)


def softcapped(y):
    return torch.tanh(y / 3.0) * 3.0


PROBLEMS = {
    "seed": st.integers(0, 1000),
    "tokens": st.sampled_from([1, 127, 128, 300]),
    "hidden": st.sampled_from([16, 24]),
    "vocabulary": st.sampled_from([2, 30, 64]),
    "with_bias": st.booleans(),
}


@settings(max_examples=20)
@given(
    **PROBLEMS,
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    takes_mean=st.booleans(),
    label_smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    elementwise=st.sampled_from([None, softcapped]),
    factor=st.sampled_from([1.0, 2.0**16]),
)
def test_high_precision_loss_is_within_product_rounding(
    seed,
    tokens,
    hidden,
    vocabulary,
    with_bias,
    dtype,
    takes_mean,
    label_smoothing,
    elementwise,
    factor,
):
    """`factor` stands for a loss scale."""
    head, x, labels = problem(seed, tokens, hidden, vocabulary, dtype, with_bias)
    labels[0] = 0  # at least one counts
    options = CrossEntropy(IGNORED, takes_mean, label_smoothing)
    loss, _ = head_loss(
        head, x, labels, HeadProducts(head.weight, head.bias, dtype), elementwise, options
    )
    found = gradients(loss, head, x, factor)

    exact_head, exact_x = (
        nn.Linear(hidden, vocabulary, bias=with_bias).double(),
        x.detach().double().requires_grad_(),
    )
    exact_head.load_state_dict({name: value.double() for name, value in head.state_dict().items()})
    logits = exact_head(exact_x)
    scores = logits if elementwise is None else elementwise(logits)
    reduction = "mean" if takes_mean else "sum"
    exact = F.cross_entropy(
        scores, labels, ignore_index=IGNORED, reduction=reduction, label_smoothing=label_smoothing
    )
    of_scores, *wanted = torch.autograd.grad(
        exact * factor, [scores, exact_x, *exact_head.parameters()]
    )

    # a score is rounded twice by the head and three times by the softcap, by half a unit each
    unit, counts = torch.finfo(dtype).eps, labels != IGNORED
    off = 3 * unit * max(scores.abs().max().item(), logits.abs().max().item())
    number = counts.sum().item()
    # the loss of a token changes by twice as much, and a probability by that power of e
    assert abs(loss.item() - exact.item()) <= (2 * off + 1e-6 * exact.item()) * (
        1 if takes_mean else number
    )
    size = factor / number if takes_mean else factor
    of_probability = size * scores.detach().softmax(1) * counts.unsqueeze(1)
    # then the gradient is rounded, and so are the softcap's derivative and the products
    change = of_probability * math.expm1(2 * off) + 8 * unit * of_scores.abs()
    bounds = [change @ exact_head.weight.abs(), change.T @ exact_x.abs(), change.sum(0)]
    smallest = torch.finfo(dtype).smallest_normal * hidden * tokens * max(size, 1.0)
    for gradient, expected, bound in zip(found, wanted, bounds, strict=False):
        assert gradient.dtype == dtype
        if expected.abs().max() < torch.finfo(dtype).max:
            assert (
                (gradient.double() - expected).abs() <= bound + 4 * unit * expected.abs() + smallest
            ).all()


@settings(max_examples=20)
@given(
    **PROBLEMS,
    scaling=st.sampled_from([*SCALINGS, "window"]),
    fp8_format=st.sampled_from(["HYBRID", "E4M3"]),
    high=st.sampled_from(
        [(False, False, False), (True, False, False), (False, True, False), (False, False, True)]
    ),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    label_smoothing=st.sampled_from([0.0, 0.1]),
)
def test_fp8_loss_matches_fp8_linear_per_chunk(
    seed, tokens, hidden, vocabulary, with_bias, scaling, fp8_format, high, dtype, label_smoothing
):
    fields = {"fp8_format": fp8_format, "override_linear_precision": high}
    given = problem(seed, tokens, hidden, vocabulary, dtype, with_bias)
    check_against_linear(*given, scaling, dtype, label_smoothing, **fields)


@pytest.mark.parametrize("kind", ["dgrad", "wgrad"])
@pytest.mark.parametrize("scaling", ["dynamic", "rowwise", "mxfp8"])
def test_fp8_loss_has_a_format_for_each_product_of_the_gradient(scaling, kind):
    given = problem(0, 300, 64, 96, torch.float32, True)
    check_against_linear(*given, scaling, torch.float32, 0.0, products={kind: "e4m3"})


def check_against_linear(head, x, labels, scaling, dtype, label_smoothing, **fields):
    tokens, hidden = x.shape
    with_bias = head.bias is not None
    options = CrossEntropy(IGNORED, False, label_smoothing)
    layer = fp8_head(head, scaling, **fields)
    loss, seen = head_loss(layer, x, labels, layer.head_products(dtype), None, options)
    found = gradients(loss, layer, x)
    assert seen == [(True, True)]

    ordinary = fp8_linear(head, scaling, **fields)
    total, dx, sums = torch.zeros(()), [], [torch.zeros(p.shape) for p in ordinary.parameters()]
    size = tokens_of_chunk(tokens, hidden)
    for rows, indices in zip(x.split(size), labels.split(size), strict=True):
        part = rows.detach().requires_grad_()
        y = ordinary(part)
        loss_of_part, dy = chunk_loss(y.detach(), indices, options)
        total += loss_of_part
        of_part, *of_parameters = torch.autograd.grad(y, [part, *ordinary.parameters()], dy)
        dx.append(of_part)
        of_parameters[1:] = [dy.sum(0, dtype=torch.float32)] if with_bias else []
        for each, gradient in zip(sums, of_parameters, strict=True):
            each += gradient
    assert torch.equal(loss, total)
    for gradient, expected in zip(found, [torch.cat(dx), *sums], strict=True):
        assert torch.equal(gradient, expected.to(dtype))
    if layer.fp8_scaling is not None:
        assert torch.equal(layer.fp8_scaling, ordinary.fp8_scaling)


def test_all_ignored_labels_give_nan_loss_and_zero_gradients():
    head, x, labels = problem(0, 20, 16, 30, torch.float32, True, ignored=2.0)
    loss, _ = head_loss(head, x, labels, HeadProducts(head.weight, head.bias, torch.float32))
    plain = F.cross_entropy(head(x), labels, ignore_index=IGNORED)
    assert loss.isnan() and plain.isnan()
    for mine, torchs in zip(gradients(loss, head, x), gradients(plain, head, x), strict=True):
        assert torch.equal(mine, torch.zeros_like(mine)) and torch.equal(mine, torchs)


def test_only_required_gradients_are_computed():
    head, x, labels = problem(0, 20, 16, 30, torch.float32, True)
    head.weight.requires_grad_(False)
    loss, seen = head_loss(head, x, labels, HeadProducts(head.weight, head.bias, torch.float32))
    loss.backward()
    assert (
        seen == [(True, False)]
        and x.grad is not None
        and head.weight.grad is None
        and head.bias.grad is not None
    )
    loss, seen = head_loss(
        head, x.detach(), labels, HeadProducts(head.weight, head.bias, torch.float32)
    )
    loss.backward()
    assert seen == [(False, False)]


def test_label_outside_vocabulary_is_an_error():
    head, x, labels = problem(0, 20, 16, 30, torch.float32, False)
    labels[3] = 30
    with pytest.raises(RuntimeError, match="out of bounds"):
        head_loss(head, x, labels, HeadProducts(head.weight, None, torch.float32))


def test_backward_runs_once_and_has_no_derivative():
    head, x, labels = problem(0, 20, 16, 30, torch.float32, False)
    loss, _ = head_loss(head, x, labels, HeadProducts(head.weight, None, torch.float32))
    with pytest.raises(FP8BackendError, match="create_graph"):
        torch.autograd.grad(loss, x, create_graph=True)
    torch.autograd.grad(loss, x, retain_graph=True)
    with pytest.raises(FP8BackendError, match="backward ran twice"):
        torch.autograd.grad(loss, x)


@pytest.mark.parametrize(
    ("tokens", "hidden", "chunks"),
    [(0, 16, 1), (300, 16, 3), (8191, 4096, 1), (8193, 4096, 2), (32768, 2048, 8)],
)
def test_chunks_are_equal_and_grow_with_hidden_size(tokens, hidden, chunks):
    sizes = [len(each) for each in torch.empty(tokens).split(tokens_of_chunk(tokens, hidden))]
    assert (
        len(sizes) == chunks
        and max(sizes) <= max(2 * hidden, 128)
        and max(sizes) - min(sizes) < 128 * chunks
    )
