"""FSDP2 with gradients that travel in FP8, by its own extension points.

The weights' tensors decide themselves how they travel (`ScaledTensor.fsdp_pre_all_gather`): in FP16 at the levels O1
and O2, in FP8 from O3 on. `FP8ReduceScatter` reduces gradients by an all-to-all of E4M3, with a scale for every 128
elements of FSDP2's flat buffer, which knows no boundaries of parameters. The sum is FP32.

Two things stay FSDP2's own, and plain: with one shard it copies and reduces nothing, and the all-reduce between the
replicas of a hybrid mesh (HSDP) has no extension point.
"""

from __future__ import annotations

import functools
import inspect
import sys

import torch
import torch.distributed as dist
from torch import nn

from ..errors import FP8BackendError
from .backward import States, agree_after_backward, mesh_groups
from .two_shot import reduce_scatter

CONNECTED = "_fp8_gradient_comm"
"""Attribute of a connected FSDP2 module, which says how its gradients travel."""


def connect(root: nn.Module, gradient_comm: str, scaling_states: States = list) -> None:
    """Let the gradients of all FSDP2 modules in `root` travel as `gradient_comm` says, "fp8" or "plain" (FSDP2's own
    reduce-scatter). Afterwards the parameters are shards, whatever ran before. Repeating it does nothing.

    Args:
        scaling_states: returns the live states of scaling rules, which the ranks agree on after each backward pass.

    Raises:
        FP8BackendError: this torch has no such extension point, or a module's parameters lie on several meshes.
    """
    modules = fsdp_modules(root)
    reshard(root)
    for name, module in modules.items():
        if CONNECTED not in module.__dict__:
            # what a forward has gathered goes back to shards before anything is loaded into them
            module.register_load_state_dict_pre_hook(_reshard)
        if gradient_comm == "fp8" and module.__dict__.get(CONNECTED) != "fp8":
            _set_reduce_scatter(module, name)
        module.__dict__[CONNECTED] = gradient_comm
    if modules and scaling_states():
        _agree(modules, scaling_states)


def fsdp_modules(root: nn.Module) -> dict[str, nn.Module]:
    """Name -> module, for each module that `fully_shard` was applied to."""
    loaded = sys.modules.get("torch.distributed.fsdp")  # not loaded for those who do not shard
    if loaded is None or not hasattr(loaded, "FSDPModule"):
        return {}
    return {name: module for name, module in root.named_modules() if isinstance(module, loaded.FSDPModule)}


def reshard(root: nn.Module) -> None:
    """Make the parameters of all FSDP2 modules in `root` shards, whatever ran before."""
    for module in fsdp_modules(root).values():
        module.reshard()


def _agree(modules: dict[str, nn.Module], scaling_states: States) -> None:
    """Let the ranks agree after every backward pass of the outermost FSDP2 module, also under `no_sync`: the message is
    small, and FSDP2 does not tell whether it reduces."""
    outermost = next(iter(modules.values()))
    agree_after_backward(outermost, scaling_states, mesh_groups(outermost))


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
    """`FP8ReduceScatter` as a subclass of the base class that FSDP2 wants, which lies in a private module of torch."""
    try:
        from torch.distributed.fsdp import FSDPModule
        from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

        asked = ["self", "output_tensor", "input_tensor", "group", "op", "async_op"]
        as_known = list(inspect.signature(ReduceScatter.__call__).parameters) == asked
        known = as_known and ReduceScatter.__abstractmethods__ == {"allocate", "__call__"}
        known = known and hasattr(FSDPModule, "set_custom_reduce_scatter")
    except ImportError:
        known = False
    if not known:
        raise FP8BackendError(
            f"gradient_comm=\"fp8\" under FSDP2 needs torch's interface for a reduce-scatter of one's own "
            f"(FSDPModule.set_custom_reduce_scatter), and torch {torch.__version__} has none or another: "
            f'use gradient_comm="plain", or torch 2.9 to 2.13'
        )
    return type("FP8ReduceScatter", (FP8ReduceScatter, ReduceScatter), {"__doc__": FP8ReduceScatter.__doc__})


class FP8ReduceScatter:
    """FSDP2's reduce-scatter, with contributions that travel in E4M3 and are summed in FP32."""

    def allocate(self, size, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Make a buffer for what is reduced, or for the result."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False) -> None:
        """Reduce `input_tensor`, [ranks * n], the rows for the ranks one behind the other, into `output_tensor`, [n].
        FSDP2 takes the result as ordered on the current stream."""
        rows = input_tensor.view(group.size(), -1)
        reduce_scatter(rows, group, out=output_tensor, factor=_factor(op, group))


def _factor(op, group: dist.ProcessGroup) -> float:
    """The number that turns a sum into the reduction that FSDP2 asks for."""
    if op == dist.ReduceOp.AVG:
        return 1.0 / group.size()
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.PREMUL_SUM:
        _, factor = op.__getstate__()  # the factor has no other way out
        return float(factor)
    raise FP8BackendError(f'gradient_comm="fp8" sums and averages; FSDP2 asks for {op}: use gradient_comm="plain"')
