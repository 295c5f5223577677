"""A `ScaledTensor` that lies on several ranks: a `DTensor` whose local part is a ScaledTensor, rows of the whole.

It has one scale for the whole tensor, the same on every rank. A rank sees only its own rows, so the
ranks agree on the amax before new values are stored: a maximum, over the mesh dimensions along which the rows are
sharded. Replicas (HSDP) hold equal rows.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from .scaled_tensor import ScaledTensor, agreed_over, quantize, quantize_pair, tensor_amax_of


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether this is a DTensor, such as FSDP2 makes of a Parameter."""
    loaded = sys.modules.get("torch.distributed.tensor")  # half a second, for those who shard
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, the very object; any other tensor itself."""
    return tensor._local_tensor if is_distributed(tensor) else tensor


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


def shard_groups(tensor: torch.Tensor) -> list[dist.ProcessGroup]:
    """The groups of ranks that hold different parts of this DTensor; none for any other tensor."""
    if not is_distributed(tensor):
        return []
    mesh = tensor.device_mesh
    return [mesh.get_group(i) for i, placed in enumerate(tensor.placements) if placed.is_shard() and mesh.size(i) > 1]


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
