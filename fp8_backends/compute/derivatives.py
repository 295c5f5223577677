"""What has no derivative: an FP8 product's backward, and an FP8 layer inside the transforms of `torch.func`.

Their gradients are rounded to FP8 on the way, and PyTorch would take what backward reads of the weight and the input
for constants: a second derivative would lack these terms, in silence.
"""

from __future__ import annotations

import torch

from ..errors import FP8BackendError

_WAY_OUT = (
    "compute it with a native backend in evaluation mode (model.eval()), whose layers multiply in high precision there "
    "and those of ao do not, or leave these layers out with exclude=…"
)


def refuse_second_derivative(*_) -> None:
    """Raise `FP8BackendError` in a backward that is to be differentiated itself (`create_graph=True`)."""
    if not torch.compiler.is_compiling() and torch.is_grad_enabled():
        raise FP8BackendError(f"create_graph=True: the gradient of an FP8 product has no derivative; {_WAY_OUT}")


def refuse_transforms() -> None:
    """Raise `FP8BackendError` in a forward that runs inside a transform of `torch.func`, or with dual numbers."""
    if torch.compiler.is_compiling():
        return
    # as `torch.autograd.Function.apply` asks, and as `torch.autograd.forward_ad` counts
    if torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0:
        raise FP8BackendError(
            "an FP8 layer cannot run inside torch.func's grad, vmap, jvp and the like, nor in forward-mode "
            f"differentiation (loss.backward() and torch.autograd.grad work); {_WAY_OUT}"
        )
