"""What autograd saves of a weight whose memory DeepSpeed's ZeRO-3 takes away between forward and backward."""

from __future__ import annotations

import contextlib

import torch
from torch.autograd.graph import saved_tensors_hooks


def saved_by_name(weight: torch.nn.Parameter) -> contextlib.AbstractContextManager:
    """Let autograd save the Parameter in place of views of its data, which backward makes anew. DeepSpeed's ZeRO-3
    takes the gathered data out of it after forward, and a saved `weight.t()` would hold that of the whole model. Does
    nothing for other weights."""
    if not hasattr(weight, "ds_id"):
        return contextlib.nullcontext()

    def pack(tensor: torch.Tensor):
        if tensor.data_ptr() == weight.data_ptr() and tensor.numel() == weight.numel():
            return tensor.shape, tensor.stride()
        return tensor

    def unpack(packed):
        return packed if isinstance(packed, torch.Tensor) else weight.detach().as_strided(*packed)

    return saved_tensors_hooks(pack, unpack)
