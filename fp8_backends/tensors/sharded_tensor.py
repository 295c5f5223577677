"""DTensors: this rank's part, the ranks with other parts, and the maximum over ranks.

FSDP2 shards Parameters by rows, tensor parallelism by rows or columns; a shard may be a
`ScaledTensor`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn


def is_distributed(tensor: torch.Tensor) -> bool:
    """Return True for a DTensor, such as a Parameter under FSDP2."""
    # compiled code must not watch the modules that are loaded
    if type(tensor) in (torch.Tensor, nn.Parameter):
        return False
    loaded = sys.modules.get("torch.distributed.tensor")  # importing it takes half a second
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, the very object; any other tensor itself."""
    return tensor._local_tensor if is_distributed(tensor) else tensor


def arrived(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for the collective behind a tensor."""
    wait = getattr(tensor, "trigger_wait", None)
    return tensor if wait is None else wait()


def with_local(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return a DTensor placed as `tensor` with another local part; `local` itself for any other
    tensor."""
    if not is_distributed(tensor):
        return local
    return type(tensor).from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def placed_as(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient placed as its parameter: autograd may leave it whole, or partial. All ranks
    call this."""
    if not is_distributed(gradient) or gradient.placements == parameter.placements:
        return gradient
    return gradient.redistribute(parameter.device_mesh, parameter.placements)


def device_of(parameter: torch.Tensor) -> torch.device:
    """Return the device that computes with a parameter. FSDP2 may offload shards to the CPU."""
    device = parameter.device
    if not is_distributed(parameter) or device.type in ("meta", parameter.device_mesh.device_type):
        return device
    kind = parameter.device_mesh.device_type
    return torch.device(kind, torch.get_device_module(kind).current_device())


def full_shape(parameter: torch.Tensor) -> torch.Size:
    """Return the whole Parameter's shape, also while DeepSpeed's ZeRO-3 has emptied it
    (`ds_shape`)."""
    return getattr(parameter, "ds_shape", parameter.shape)


def stored_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank stores, also under ZeRO-3."""
    if hasattr(tensor, "ds_tensor") and tensor.numel() == 0:
        return tensor.ds_tensor
    return local_part(tensor)


def inner_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors with a tensor's bytes on this rank: the parts of a wrapper subclass."""
    tensor = stored_part(tensor)
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from inner_tensors(getattr(tensor, name))
    if (residual := getattr(tensor, "residual", None)) is not None:
        yield residual


def stored_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype of a tensor's data in memory; of the first part of a wrapper subclass."""
    if type(tensor) is torch.Tensor:
        return tensor.dtype
    return next(inner_tensors(tensor)).dtype


def shard_groups(tensor: torch.Tensor) -> list[dist.ProcessGroup]:
    """Return the process groups over which a DTensor is sharded; none for any other tensor."""
    if not is_distributed(tensor):
        return []
    mesh = tensor.device_mesh
    return [
        mesh.get_group(i)
        for i, placement in enumerate(tensor.placements)
        # FSDP2 over tensor parallelism shards in strides
        if not placement.is_replicate() and mesh.size(i) > 1
    ]


def agreed_over(values: torch.Tensor, groups: Sequence[dist.ProcessGroup | None]) -> torch.Tensor:
    """Return the elementwise maximum over the ranks of these groups (None: all ranks) as a new
    tensor of the same shape: integers in their dtype, other values in FP32. NaN becomes inf, since
    a maximum may lose a NaN."""
    if values.is_meta:
        return values
    if values.is_floating_point():
        agreed = (
            values.detach().float().nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
        )
    else:
        agreed = values.clone()
    for group in groups:
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group)
    return agreed
