"""A DDP communication hook that averages gradients by the two-shot all-reduce in FP8.

DDP hands its buckets over in the same order on all ranks. As in `reducer`, the second shot of a bucket starts when the
next one has left; with the last bucket all are awaited. What comes back has the dtype of the gradients.

DDP lays its buckets out anew after the first backward pass, also that of a resumed run. For a resumed run to equal an
unbroken one to the bit, an average may not depend on where in a bucket a gradient lies: each begins at a multiple of
the collective's block, and is rounded before the collective decides who owns which part and need not round it.
"""

import torch
import torch.distributed as dist

from .reducer import Beside
from .two_shot import BLOCK, AllReduce, Reduced, decode, encode


class HookState:
    """What the hook keeps while one backward pass runs."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.beside = group, Beside(device)
        self.under_way: list[tuple[AllReduce, list[int], torch.Tensor, torch.futures.Future]] = []
        """Reduction, sizes of its gradients, the bucket, and what DDP waits for."""

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
        sizes = [gradient.numel() for gradient in bucket.gradients()]
        reduction = AllReduce(_rounded(_aligned(values.split(sizes))), state.group)
        if state.under_way:
            state.under_way[-1][0].start_second_shot()
        state.under_way.append((reduction, sizes, values, future))
        if bucket.is_last():
            for reduction, sizes, values, made in state.under_way:
                made.set_result(_close(reduction.wait().values(), sizes).to(values.dtype))
            state.under_way.clear()
    return future


def _aligned(gradients: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """One behind the other, FP32, each from a multiple of BLOCK on."""
    padded = [torch.nn.functional.pad(gradient.float(), (0, -gradient.numel() % BLOCK)) for gradient in gradients]
    return torch.cat(padded)


def _rounded(values: torch.Tensor) -> torch.Tensor:
    codes, scale_inv = decode(encode(values.unsqueeze(0)))
    return Reduced(codes[0], scale_inv[0]).values()


def _close(values: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Undoes `_aligned`."""
    parts = values.split([size + -size % BLOCK for size in sizes])
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
