"""Autograd around FP8 layers: the derivatives that they refuse, and the weight that they save under ZeRO-3.

An FP8 product's backward has no derivative, nor has an FP8 layer inside the transforms of `torch.func`. Gradients are
rounded to FP8 on the way, and PyTorch would take what backward reads of the weight and the input for constants: a
second derivative would lack these terms, in silence.
"""

from __future__ import annotations

import contextlib

import torch
from torch.autograd.graph import saved_tensors_hooks

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


def saved_by_name(weight: torch.nn.Parameter) -> contextlib.AbstractContextManager:
    """Let autograd save the Parameter in place of views of its data, and recreate the views in backward. DeepSpeed's
    ZeRO-3 takes the gathered data out of it after forward: saved views such as `weight.t()` would hold the weights of
    the whole model. Does nothing for other weights."""
    if not hasattr(weight, "ds_id"):
        return contextlib.nullcontext()

    def pack(tensor: torch.Tensor):
        if tensor.data_ptr() == weight.data_ptr() and tensor.numel() == weight.numel():
            return tensor.shape, tensor.stride()
        return tensor

    def unpack(packed):
        return packed if isinstance(packed, torch.Tensor) else weight.detach().as_strided(*packed)

    return saved_tensors_hooks(pack, unpack)
