"""Reduce gradients in FP8 under FSDP2, by its own extension points, and agree on scaling states over meshes.

`FP8ReduceScatter` reduces gradients by an all-to-all of E4M3, with a scale for every 128 elements of FSDP2's flat
buffer, without regard to parameters. FSDP2 itself copies with one shard, and reduces between the replicas of a hybrid
mesh (HSDP) without an extension point: both stay plain. Under tensor parallelism gradients are whole on each rank or
sharded as the weights, so that only scaling states travel after backward.
"""

from __future__ import annotations

import functools
import inspect
import sys

import torch
import torch.distributed as dist
from torch import nn

from ..errors import FP8BackendError
from ..tensors.sharded_tensor import is_distributed
from .backward import States, agree_after_backward, mesh_groups
from .two_shot import reduce_scatter

CONNECTED = "_fp8_gradient_comm"
"""Attribute of a connected FSDP2 module: its `gradient_comm`."""


def connect(root: nn.Module, gradient_comm: str, scaling_states: States = list) -> None:
    """Reduce the gradients of all FSDP2 modules in `root` in "fp8" or "plain" (FSDP2's own reduce-scatter), and reshard
    their parameters. Idempotent.

    Args:
        scaling_states: returns the live states of scaling rules, for agreement after each backward pass.

    Raises:
        FP8BackendError: this torch lacks the extension point, or the parameters of a module are on several meshes.
    """
    modules = fsdp_modules(root)
    reshard(root)
    for name, module in modules.items():
        if CONNECTED not in module.__dict__:
            # loading needs shards, also after a forward has gathered them
            module.register_load_state_dict_pre_hook(_reshard)
        if gradient_comm == "fp8" and module.__dict__.get(CONNECTED) != "fp8":
            _set_reduce_scatter(module, name)
        module.__dict__[CONNECTED] = gradient_comm
    if modules:
        # also under `no_sync`: the message is small, and FSDP2 has no flag for a reduction
        agree(next(iter(modules.values())), scaling_states)


def agree(model: nn.Module, scaling_states: States) -> None:
    """Let the ranks of a model's meshes agree on scaling states after each backward pass. Idempotent."""
    if scaling_states():
        agree_after_backward(model, scaling_states, mesh_groups(model))


def tensor_parallel_ranks(model: nn.Module) -> int:
    """Return the number of ranks that share a layer by tensor parallelism; 1 without.

    Under FSDP2 every weight is a DTensor: there tensor parallelism is the mesh dimension named "tp" by transformers and
    Accelerate.
    """
    meshes = [p.device_mesh for p in model.parameters() if is_distributed(p)]
    if not fsdp_modules(model):
        return max((mesh.size() for mesh in meshes), default=1)
    named = [dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False)) for mesh in meshes]
    return max((sizes.get("tp", 1) for sizes in named), default=1)


def fsdp_modules(root: nn.Module) -> dict[str, nn.Module]:
    """Map names to the modules of `fully_shard`."""
    loaded = sys.modules.get("torch.distributed.fsdp")  # not loaded for those who do not shard
    if loaded is None or not hasattr(loaded, "FSDPModule"):
        return {}
    return {name: module for name, module in root.named_modules() if isinstance(module, loaded.FSDPModule)}


def reshard(root: nn.Module) -> None:
    """Reshard the parameters of all FSDP2 modules in `root`."""
    for module in fsdp_modules(root).values():
        module.reshard()


def _reshard(module: nn.Module, *_) -> None:
    module.reshard()


def _set_reduce_scatter(module: nn.Module, name: str) -> None:
    try:
        module.set_custom_reduce_scatter(_reduce_scatter_class()())
    except ValueError as error:
        raise FP8BackendError(
            f'gradient_comm="fp8": FSDP2 does not let the reduce-scatter of {name or "the model"} be chosen ({error}); '
            f'use gradient_comm="plain"'
        ) from error


@functools.cache
def _reduce_scatter_class() -> type:
    """Derive `FP8ReduceScatter` from FSDP2's base class, in a private module of torch."""
    try:
        from torch.distributed.fsdp import FSDPModule
        from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

        arguments = ["self", "output_tensor", "input_tensor", "group", "op", "async_op"]
        is_supported = (
            list(inspect.signature(ReduceScatter.__call__).parameters) == arguments
            and ReduceScatter.__abstractmethods__ == {"allocate", "__call__"}
            and hasattr(FSDPModule, "set_custom_reduce_scatter")
        )
    except ImportError:
        is_supported = False
    if not is_supported:
        raise FP8BackendError(
            f'gradient_comm="fp8" under FSDP2 needs torch\'s interface for a custom reduce-scatter '
            f"(FSDPModule.set_custom_reduce_scatter), and torch {torch.__version__} has none or another: "
            f'use gradient_comm="plain", or torch 2.9 to 2.13'
        )
    return type("FP8ReduceScatter", (FP8ReduceScatter, ReduceScatter), {"__doc__": FP8ReduceScatter.__doc__})


class FP8ReduceScatter:
    """FSDP2's reduce-scatter with E4M3 contributions and an FP32 sum."""

    def allocate(self, size, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate the input or the result."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False) -> None:
        """Reduce `input_tensor`, [ranks * n], a row for each rank, into `output_tensor`, [n], in order on the current
        stream."""
        if op == dist.ReduceOp.AVG:
            factor = 1.0 / group.size()
        elif op == dist.ReduceOp.SUM:
            factor = 1.0
        elif op == dist.ReduceOp.PREMUL_SUM:
            factor = float(op.__getstate__()[1])  # the only access to the factor
        else:
            raise FP8BackendError(
                f'gradient_comm="fp8" sums and averages; FSDP2 asks for {op}: use gradient_comm="plain"'
            )
        reduce_scatter(input_tensor.view(group.size(), -1), group, out=output_tensor, factor=factor)
