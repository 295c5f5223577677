"""Measure a training step: peak memory, autocast's copies of weights, and bytes sent to other
ranks."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ...tensors.sharded_tensor import inner_tensors
from ...words import counted


def peak_memory(
    step: Callable[[], object], model: nn.Module, optimizer: torch.optim.Optimizer
) -> int:
    """Return the highest bytes of tensors in a step: by PyTorch's allocator on a GPU, by the
    profiler on a CPU."""
    if next(model.parameters()).is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    tensors = [*model.parameters(), *model.buffers()]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    storages = (part.untyped_storage() for tensor in tensors for part in inner_tensors(tensor))
    resting = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    events = [
        event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return resting + max(itertools.accumulate(changes, initial=0))


@contextlib.contextmanager
def autocast_copies(model: nn.Module) -> Iterator[dict[str, int]]:
    """Yield a dictionary that collects, by weight, the bytes of half-precision copies saved for
    backward.

    A saved tensor is a copy if it equals the weight rounded to its dtype, so no activation counts.
    """
    by_shape: dict[tuple[int, ...], list[tuple[str, nn.Parameter]]] = {}
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            for shape in {tuple(weight.shape), tuple(weight.shape[::-1])}:
                by_shape.setdefault(shape, []).append((name, weight))
    copies: dict[str, int] = {}

    def look(saved: torch.Tensor) -> torch.Tensor:
        if type(saved) is torch.Tensor and saved.dtype in (torch.bfloat16, torch.float16):
            for name, weight in by_shape.get(tuple(saved.shape), ()):
                if weight.dtype == saved.dtype or name in copies:
                    continue
                rounded = weight.detach().to(saved.dtype)
                if any(
                    saved.shape == copy.shape and torch.equal(saved, copy)
                    for copy in (rounded, rounded.t())
                ):
                    copies[name] = saved.nbytes
                    break
        return saved

    with torch.autograd.graph.saved_tensors_hooks(look, lambda saved: saved):
        yield copies


SENT: dict[str, Callable[[int], float]] = {
    "allreduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "allgather": lambda ranks: ranks - 1,
    **dict.fromkeys(("reducescatter", "alltoall", "broadcast"), lambda ranks: (ranks - 1) / ranks),
}
"""Bytes sent for each byte of a rank's input, by kind of collective: a sum over N ranks sends
2 (N - 1) / N of its size, as a ring does, and every other one the least of any algorithm. The ranks
share a broadcast."""


class Traffic(NamedTuple):
    """Collectives of one kind in one group of ranks."""

    calls: int
    bytes: int
    """Of this rank's inputs."""
    ranks: int
    kind: str

    @property
    def sent(self) -> float:
        return SENT[self.kind](self.ranks) * self.bytes


class Collectives(TorchDispatchMode):
    """Count this thread's collectives, those of its backward passes and of DDP's reducer included,
    at c10d's operators.

    `seen` maps (mesh dimension, kind) to `Traffic`; `unknown` is the last operator without a kind
    in `SENT`.
    """

    def __init__(self, mesh: dist.DeviceMesh | None = None) -> None:
        super().__init__()
        self.seen: dict[tuple[str, str], Traffic] = {}
        self.unknown = ""
        self._names: dict[tuple[int, ...], str] = {}
        if mesh is not None:
            self._names[tuple(range(mesh.size()))] = "all"
            for name in mesh.mesh_dim_names:
                self._names[tuple(dist.get_process_group_ranks(mesh.get_group(name)))] = name

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional", "_dtensor"):
            names = (argument.name for argument in func._schema.arguments)
            self._count(
                func._schema.name.partition("::")[2],
                dict(zip(names, args, strict=False)) | (kwargs or {}),
            )
        return func(*args, **(kwargs or {}))

    def _count(self, operator: str, arguments: dict[str, Any]) -> None:
        group = arguments.get("process_group", arguments.get("group_name"))
        if group is None or "barrier" in operator:
            return  # no message
        plain = operator.lower().replace("_", "").removeprefix("sharddim")
        kind = next((kind for kind in SENT if plain.startswith(kind)), None)
        if kind is None:
            self.unknown = operator
            return
        if isinstance(group, str):
            group = dist.distributed_c10d._resolve_process_group(group)
        elif isinstance(group, torch.ScriptObject):
            group = dist.ProcessGroup.unbox(group)
        ranks = tuple(dist.get_process_group_ranks(group))
        inputs = next(
            value for name, value in arguments.items() if name.startswith(("input", "tensor"))
        )
        size = sum(
            tensor.nbytes for tensor in tree_iter(inputs) if isinstance(tensor, torch.Tensor)
        )
        key = self._names.get(ranks, counted(len(ranks), "rank")), kind
        before = self.seen.get(key, Traffic(0, 0, len(ranks), kind))
        self.seen[key] = before._replace(calls=before.calls + 1, bytes=before.bytes + size)


def sent_bytes(step: Callable[[], object]) -> int | None:
    """Run a step and return the bytes that this rank sends in its collectives; None if one is
    unknown."""
    with Collectives() as collectives:
        step()
    if collectives.unknown:
        return None
    return round(sum(traffic.sent for traffic in collectives.seen.values()))
