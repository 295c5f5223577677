"""A `ScaledTensor` that lies on several ranks: a `DTensor` whose local part is a ScaledTensor, rows of the whole (of
FSDP2 and tensor parallelism) or columns (of tensor parallelism).

It has one scale for the whole tensor, the same on every rank. A rank sees only its own part, so the ranks agree on the
amax before new values are stored: a maximum, over the mesh dimensions along which the tensor is sharded. Replicas
(HSDP) hold equal parts.
"""

from __future__ import annotations

import torch

from .meshes import agreed_over, is_distributed, shard_groups
from .scaled_tensor import ScaledTensor, quantize, quantize_pair, tensor_amax_of


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, the very object; any other tensor itself."""
    return tensor._local_tensor if is_distributed(tensor) else tensor


def device_of(parameter: torch.Tensor) -> torch.device:
    """The device that computes with a parameter: FSDP2 may keep shards on the CPU."""
    device = parameter.device
    if not is_distributed(parameter) or device.type in ("meta", parameter.device_mesh.device_type):
        return device
    kind = parameter.device_mesh.device_type
    return torch.device(kind, torch.get_device_module(kind).current_device())


def full_shape(parameter: torch.Tensor) -> torch.Size:
    """The shape of the whole Parameter. Under DeepSpeed's ZeRO-3 the Parameter itself is empty but for the moments in
    which it is gathered, and its shape is in `ds_shape`."""
    return getattr(parameter, "ds_shape", parameter.shape)


def with_local(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A DTensor that lies as `tensor` does, with other values on this rank; `local` itself for any other tensor."""
    if not is_distributed(tensor):
        return local
    return type(tensor).from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def placed_as(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """A parameter's gradient, lying as the parameter does: under tensor parallelism autograd may leave the gradient of
    a part whole, or as summands on the ranks. All ranks call it."""
    if not is_distributed(gradient) or gradient.placements == parameter.placements:
        return gradient
    return gradient.redistribute(parameter.device_mesh, parameter.placements)


def quantize_shards(values: torch.Tensor, storage: torch.dtype, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`scaled_tensor.quantize` for a DTensor with plain values: a DTensor with one scale for the whole tensor."""
    local = local_part(values.detach())
    amax = agreed_over(tensor_amax_of(local), shard_groups(values))
    return with_local(values, quantize(local, storage, dtype or values.dtype, amax=amax))


def quantize_pair_shards(values: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`scaled_tensor.quantize_pair` for a DTensor with plain values: a DTensor with one scale for the whole tensor."""
    local = local_part(values.detach())
    amax = agreed_over(tensor_amax_of(local), shard_groups(values))
    return with_local(values, quantize_pair(local, dtype or values.dtype, amax=amax))


def dequantize_shards(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A DTensor with plain values, with all the precision that is stored. Not differentiable."""
    local = local_part(tensor.detach())
    if isinstance(local, ScaledTensor):
        local = local.exact(dtype or tensor.dtype)
    return with_local(tensor, local)
