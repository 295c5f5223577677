"""The kernel of the cross-entropy against plain PyTorch operations: within a few units of FP32, and
then one of the gradient's dtype."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fp8_backends.compute.native.backend import NativeCompute
from fp8_backends.convert.fused_head.deferred_logits import DeferredLogits
from fp8_backends.convert.fused_head.native_head import FP8Head
from fp8_backends.kernels import triton_backward
from fp8_backends.recipes.handlers import resolve

IGNORED = -100
CLOSE = 1e-5
"""NumPy's exponentials and a sum of 300 numbers are off by less (measured: 1e-6)."""


def problem(rows: int, words: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows + words)
    logits = torch.randn(rows, words, generator=generator) * 4
    labels = torch.randint(words, (rows,), generator=generator)
    labels[rows // 2] = IGNORED
    return logits.to(dtype), labels


def in_pytorch(logits, labels, smoothing):
    """Losses of the rows and the gradient of their sum, FP64."""
    x = logits.double().requires_grad_()
    losses = F.cross_entropy(
        x, labels, ignore_index=IGNORED, label_smoothing=smoothing, reduction="none"
    )
    return losses.detach(), *torch.autograd.grad(losses.sum(), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("words, smoothing", [(1, 0.1), (64, 0.0), (300, 0.0), (300, 0.1)])
def test_losses_and_gradients_match_reference(words, dtype, smoothing):
    logits, labels = problem(5, words, dtype)
    losses, gradient = in_pytorch(logits, labels, smoothing)
    found_losses, found = triton_backward.cross_entropy(
        logits.clone(), labels, IGNORED, smoothing, block=64
    )
    assert (found_losses.dtype, found.dtype) == (torch.float32, dtype)
    assert torch.allclose(found_losses.double(), losses, rtol=CLOSE, atol=CLOSE)
    assert found[labels == IGNORED].eq(0).all()
    # one unit: the interpreter truncates to bf16, and a GPU rounds to nearest
    smallest = torch.finfo(dtype).smallest_normal
    assert torch.allclose(
        found.double(), gradient, rtol=CLOSE + torch.finfo(dtype).eps, atol=CLOSE * 1e-1 + smallest
    )


def test_gradient_reuses_memory_of_contiguous_logits():
    logits, labels = problem(5, 64, torch.float32)
    _, expected = in_pytorch(logits, labels, 0.0)
    wide = torch.cat([logits, logits], 1)
    _, found = triton_backward.cross_entropy(wide[:, :64], labels, IGNORED, 0.0, block=64)
    assert torch.allclose(found.double(), expected, atol=CLOSE) and torch.equal(
        wide[:, :64], logits
    )
    turned = logits.t().contiguous().t()
    _, found = triton_backward.cross_entropy(turned, labels, IGNORED, 0.0, block=64)
    assert torch.allclose(found.double(), expected, atol=CLOSE) and torch.equal(turned, logits)
    _, found = triton_backward.cross_entropy(logits, labels, IGNORED, 0.0, block=64)
    assert found.data_ptr() == logits.data_ptr()


@pytest.mark.parametrize("planted", [-torch.inf, torch.nan, torch.inf])
def test_non_finite_logits_propagate(planted):
    """An impossible word (-inf) leaves no trace; NaN and inf reach the loss."""
    logits, labels = problem(3, 64, torch.float32)
    labels[:] = 5
    logits[0, 7], logits[1, 0] = planted, planted
    losses, gradient = in_pytorch(logits, labels, 0.0)
    found_losses, found = triton_backward.cross_entropy(logits, labels, IGNORED, 0.0, block=64)
    assert torch.equal(found_losses.isfinite(), losses.isfinite())
    if planted == -torch.inf:
        assert torch.allclose(found.double(), gradient, atol=CLOSE)


def test_label_outside_vocabulary_gives_nan_loss():
    logits, labels = problem(3, 64, torch.float32)
    labels[:] = torch.tensor([64, -1, 3])
    losses, _ = triton_backward.cross_entropy(logits, labels, IGNORED, 0.0, block=64)
    assert losses.isnan().tolist() == [True, True, False]


def test_an_fp8_head_runs_on_the_kernels(monkeypatch):
    results = []
    for variable in ("interpret", "0"):
        monkeypatch.setenv("FP8_BACKENDS_TRITON", variable)
        torch.manual_seed(0)
        linear, compute, recipe = (
            torch.nn.Linear(16, 30, bias=False),
            NativeCompute(),
            resolve("native:dynamic"),
        )
        head = compute.build(linear, recipe, compute.new_shared(linear, recipe))
        head.__class__, head.fp8_is_ordinary = FP8Head, False
        x, labels = torch.randn(150, 16, requires_grad=True), torch.randint(30, (150,))
        logits = head(x)
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        assert isinstance(logits, DeferredLogits) and logits.pending.output is None
        results.append((loss.detach(), x.grad, linear.weight.grad))
    for found, expected in zip(*results, strict=True):
        # a gradient of the logits with another last bit may have the next code of E5M2
        assert (found - expected).norm() <= 0.02 * expected.norm()
