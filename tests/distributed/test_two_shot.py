"""The two-shot collective on 1, 3 and 8 ranks, and simulated at 2 to 32. The other files have 2 and
4."""

from __future__ import annotations

import pytest
import torch
import two_shot_checks
from ranks import report, run
from widths import nightly


@pytest.mark.parametrize("ranks", [nightly(1), 3, nightly(8)])
def test_collective_on_ranks(ranks, subtests):
    report(subtests, run("two_shot_checks.py", ranks))


@pytest.mark.parametrize(
    ("ranks", "kind"),
    [(2, "independent"), (4, "correlated"), (8, "heavy-tailed"), (32, "rows of many sizes")],
)
def test_mean_of_many_ranks_is_within_4_percent(ranks, kind):
    gradients = [two_shot_checks.of_rank(kind, 2**17, rank) for rank in range(ranks)]
    mean = two_shot_checks.simulated_mean(gradients)
    error = two_shot_checks.relative(mean, torch.stack(gradients).double().mean(0))
    assert error <= two_shot_checks.LARGEST_ERROR, error
