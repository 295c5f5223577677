"""Compare the policy that trains with the one that generates: `fp8_backends.policy_gap`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import FP8BackendError


@dataclass(frozen=True)
class PolicyGap:
    """Figures of d = trainer's - rollout's logprob of each token drawn by the rollout, in nats.

    Equal policies have 0, 0, 0, 1 and 1.
    """

    mean: float
    """Mean of |d|."""
    largest: float
    """Largest |d|."""
    k3: float
    """KL(rollout, trainer) for each token, by Schulman's estimator: the mean of exp(d) - 1 - d
    (joschu.net/blog/kl-approx.html)."""
    mult_prob_error: float
    """Mean of exp(|d|): `token_mult_prob_error` of NeMo-RL."""
    effective_share: float
    """Effective sample size of the importance weights w = exp(d), as a share of the tokens:
    mean(w)**2 / mean(w**2)."""
    tokens: int


@torch.no_grad()
def policy_gap(
    trainer_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, mask: torch.Tensor | None = None
) -> PolicyGap:
    """Return the gap between two policies, from logprobs of the same tokens, computed in FP64. A
    NaN shows in all figures.

    Args:
        trainer_logprobs: of the training forward, any shape.
        rollout_logprobs: of the engine that has drawn the tokens, of this shape.
        mask: of this shape; zero leaves a token out, such as padding.

    Raises:
        FP8BackendError: the shapes differ, or no token is left.
    """
    tensors = [trainer_logprobs, rollout_logprobs] + ([] if mask is None else [mask])
    if len({tensor.shape for tensor in tensors}) > 1:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise FP8BackendError(
            f"policy_gap compares the same tokens, in tensors of one shape, not of {shapes}"
        )
    differences = trainer_logprobs.double() - rollout_logprobs.to(trainer_logprobs.device).double()
    if mask is not None:
        differences = differences[mask.bool().to(differences.device)]
    if not differences.numel():
        raise FP8BackendError("policy_gap: no token is left; check the mask")
    size = differences.abs()
    weights = (differences - differences.max()).exp()
    figures = (
        size.mean(),
        size.max(),
        (differences.expm1() - differences).mean(),
        size.exp().mean(),
        weights.mean().square() / weights.square().mean(),
    )
    return PolicyGap(*torch.stack(figures).tolist(), tokens=differences.numel())
