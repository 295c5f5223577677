"""Log the policy gap of TRL's GRPO."""

from __future__ import annotations

import inspect
from dataclasses import asdict
from typing import Any

import torch
from transformers import TrainerCallback

from .errors import FP8BackendError
from .evidence.policy_gap import PolicyGap, policy_gap
from .torch_tools.optimizers import unwrapped
from .watch import guard


class PolicyGapCallback(TrainerCallback):
    """Log the policy gap of each generation of `GRPOTrainer` as `policy_gap/*`, before the first
    step with its tokens.

        trainer.add_callback(PolicyGapCallback(trainer, bound=1.05))

    The rollout's logprobs come from vLLM or a `rollout_func`, the trainer's from TRL's
    `old_per_token_logps`, or one more forward if TRL needs none. The gap is that of all ranks'
    tokens.

    Args:
        trainer: a `GRPOTrainer` of TRL 1.16.
        bound: for the mean multiplicative error `mult_prob_error`. Above it, the guard acts before
            the step as the recipe's `guard` says: warn, skip or stop.

    Raises:
        FP8BackendError: when training begins, a bound without a guard; in a step, a rollout without
        logprobs.
    """

    def __init__(self, trainer: Any, bound: float | None = None) -> None:
        self.trainer, self.bound = trainer, bound
        self.gaps: list[PolicyGap] = []
        """One for each generation."""
        self._measured: Any = None
        """TRL's batches of the last generation."""

    def on_train_begin(self, args, state, control, optimizer=None, **kwargs) -> None:
        if self.bound is not None and guard.guard_of(unwrapped(optimizer)) is None:
            raise FP8BackendError(
                f"bound={self.bound} acts by the guard, and this training has none: set guard to "
                "warn, skip or stop in an FP8 recipe, or leave bound out to log the gap"
            )

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs) -> None:
        batches = self.trainer._buffered_inputs
        if batches is None or batches is self._measured:
            return
        self._measured = batches
        accelerator = self.trainer.accelerator
        tokens = accelerator.pad_across_processes(
            torch.cat([self._tokens_of(batch) for batch in batches])
        )
        tokens = accelerator.gather(tokens)
        if not tokens[:, -1].any():  # TRL has masked all
            return
        gap = policy_gap(*tokens.unbind(-1))
        self.gaps.append(gap)
        for name, value in asdict(gap).items():
            self.trainer._metrics["train"][f"policy_gap/{name}"].append(value)
        if self.bound is not None and not gap.mult_prob_error <= self.bound:  # also for NaN
            figures = f"a multiplicative error of {gap.mult_prob_error:.4g}, and the bound is {self.bound:.4g}"
            guard.guard_of(unwrapped(optimizer)).report(guard.POLICY, figures)

    @torch.no_grad()
    def _tokens_of(self, batch: dict[str, Any]) -> torch.Tensor:
        """Return logprobs of the trainer and of the rollout, and 1, of each token of a batch: FP32
        [tokens, 3]."""
        rollout = batch.get("sampling_per_token_logps")
        if rollout is None:
            raise FP8BackendError(
                "TRL's rollout has no logprobs: use vLLM, or a rollout_func that returns them"
            )
        trainer = batch.get("old_per_token_logps")
        if trainer is None:
            logprobs = self.trainer._get_per_token_logps_and_entropies
            ids, mask = (
                torch.cat([batch[f"prompt_{name}"], batch[f"completion_{name}"]], dim=1)
                for name in ("ids", "mask")
            )
            images = {
                name: batch[name]
                for name in inspect.signature(logprobs).parameters
                if name in batch
            }
            trainer, *_ = logprobs(self.trainer.model, ids, mask, rollout.shape[1], **images)
        mask = batch["completion_mask"] * batch.get("tool_mask", 1)
        known = mask.bool() & ~rollout.isnan()  # vLLM has no logprob of some tokens
        return torch.stack(
            [trainer[known], rollout[known], torch.ones_like(rollout[known])], dim=-1
        ).float()
