"""`fp8_backends.policy_gap`: figures of the logprobs of a trainer and a rollout."""

from __future__ import annotations

import math

import pytest
import torch

import fp8_backends
from fp8_backends import FP8BackendError


def test_equal_policies_have_no_gap():
    logprobs = torch.randn(3, 5).log_softmax(-1)
    gap = fp8_backends.policy_gap(logprobs, logprobs.clone())
    figures = gap.mean, gap.largest, gap.k3, gap.mult_prob_error, gap.effective_share, gap.tokens
    assert figures == (0.0, 0.0, 0.0, 1.0, 1.0, 15)


def test_figures_of_two_tokens():
    """The trainer gives the first twice the rollout's probability; the mask leaves out a third."""
    rollout = torch.tensor([[-3.0, -1.0, -2.0]], dtype=torch.float64)
    trainer = rollout + torch.tensor([[math.log(2), 0.0, 9.0]], dtype=torch.float64)
    gap = fp8_backends.policy_gap(trainer, rollout, mask=torch.tensor([[1, 1, 0]]))
    assert gap.mean == pytest.approx(math.log(2) / 2) and gap.largest == pytest.approx(math.log(2))
    assert gap.k3 == pytest.approx((1 - math.log(2)) / 2)
    assert gap.mult_prob_error == pytest.approx(1.5) and gap.effective_share == pytest.approx(
        1.5**2 / 2.5
    )
    assert gap.tokens == 2


def test_k3_estimates_divergence_from_rollout_to_trainer():
    """Within five standard errors of the exact KL(rollout, trainer), far from the other
    direction."""
    generator = torch.Generator().manual_seed(0)
    rollout, trainer = (
        torch.randn(8, generator=generator).double().log_softmax(0) for _ in range(2)
    )
    drawn = torch.multinomial(rollout.exp(), 20_000, replacement=True, generator=generator)
    gap = fp8_backends.policy_gap(trainer[drawn], rollout[drawn])
    exact, turned = (
        (p.exp() * (p - q)).sum().item() for p, q in ((rollout, trainer), (trainer, rollout))
    )
    d = (trainer - rollout)[drawn]
    error = (d.expm1() - d).std().item() / 20_000**0.5
    assert abs(gap.k3 - exact) < 5 * error < abs(turned - exact)


def test_large_differences_stay_finite_and_nan_shows():
    far = fp8_backends.policy_gap(torch.tensor([0.0, 0.0]), torch.tensor([-600.0, 0.0]))
    assert far.largest == 600 and far.effective_share == pytest.approx(0.5)
    broken = fp8_backends.policy_gap(torch.tensor([math.nan, 0.0]), torch.zeros(2))
    assert all(
        math.isnan(each)
        for each in (broken.mean, broken.largest, broken.k3, broken.effective_share)
    )


def test_other_shapes_and_empty_masks_are_refused():
    with pytest.raises(FP8BackendError, match=r"one shape, not of \(2, 3\), \(2, 4\)"):
        fp8_backends.policy_gap(torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(FP8BackendError, match="no token is left"):
        fp8_backends.policy_gap(torch.zeros(2), torch.zeros(2), mask=torch.zeros(2))
