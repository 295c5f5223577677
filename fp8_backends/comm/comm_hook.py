"""A DDP communication hook that averages gradients by the two-shot all-reduce in FP8.

DDP hands its buckets over in the same order on all ranks. As in `reducer`, the second shot of a bucket starts when the
next one has left; with the last bucket all are awaited. Gradients are read and written where they lie in the bucket.

DDP lays its buckets out anew after the first backward pass, also that of a resumed run. For a resumed run to equal an
unbroken one to the bit, an average may not depend on where in a bucket a gradient lies: each begins at a multiple of
the collective's block, and every contribution is rounded, whoever owns that part.
"""

from itertools import accumulate

import torch
import torch.distributed as dist

from .reducer import Beside
from .two_shot import BLOCK, AllReduce, Part


class HookState:
    """What the hook keeps while one backward pass runs."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.beside = group, Beside(device)
        self.under_way: list[tuple[AllReduce, list[Part], torch.Tensor, torch.futures.Future]] = []
        """Reduction, gradients in the bucket, the bucket, and what DDP waits for."""

    def __reduce__(self):
        return _nothing, ()  # a copied DDP has no communication hook


def _nothing() -> None:
    return None


@torch.no_grad()
def fp8_all_reduce(state, bucket):
    """The hook: (HookState, torch.distributed.GradBucket) -> Future of the averaged bucket.

    DDP compares annotations with `is`, so that there are none on which a postponed evaluation could act.
    """
    values = bucket.buffer()
    if bucket.index() == 0:
        state.under_way.clear()  # a backward pass that raised before its end
    devices = [values.device] if values.device.type == "cuda" else None
    future = torch.futures.Future(devices=devices)
    with state.beside:
        state.beside.borrowed(values)
        gradients = _aligned(values.split([gradient.numel() for gradient in bucket.gradients()]))
        reduction = AllReduce(gradients, state.group, rounded=True)
        if state.under_way:
            state.under_way[-1][0].start_second_shot()
        state.under_way.append((reduction, gradients, values, future))
        if bucket.is_last():
            for reduction, gradients, values, made in state.under_way:
                reduction.write(gradients)
                made.set_result(values)
            state.under_way.clear()
    return future


def _aligned(gradients: tuple[torch.Tensor, ...]) -> list[Part]:
    """One behind the other, each from a multiple of BLOCK on."""
    starts = accumulate((-(-len(gradient) // BLOCK) * BLOCK for gradient in gradients), initial=0)
    return [Part(gradient, start) for gradient, start in zip(gradients, starts, strict=False)]
