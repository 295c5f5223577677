"""What a training step weighs: its peak, and the copies of weights that autocast keeps until backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn

from ...training.auditing import inner_tensors


def peak_memory(step: Callable[[], object], model: nn.Module, optimizer: torch.optim.Optimizer) -> int | None:
    """Bytes of tensors at the highest point of one training step: weights, optimizer states, what the step adds.

    On a GPU what PyTorch's allocator counts. On a CPU the tensors that rest between steps, plus the highest level of
    what the profiler sees allocated and freed; None where this version of PyTorch does not tell.
    """
    if next(model.parameters()).is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    resting = sum(storage.nbytes() for storage in _resting_storages(model, optimizer))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    try:
        events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
        changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    except AttributeError:
        return None
    level = peak = 0
    for change in changes:
        level += change
        peak = max(peak, level)
    return resting + peak


def _resting_storages(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.UntypedStorage]:
    """Distinct storages of weights, buffers and optimizer states, between two steps."""
    tensors = [*model.parameters(), *model.buffers()]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    parts = [part for tensor in tensors for part in inner_tensors(tensor)]
    return list({part.untyped_storage().data_ptr(): part.untyped_storage() for part in parts}.values())


@contextlib.contextmanager
def autocast_copies(model: nn.Module) -> Iterator[dict[str, int]]:
    """Bytes of the half-precision copies of weights that forwards inside keep for their backward, by weight.

    Yields a dictionary that fills as forwards run. A saved tensor is such a copy if it equals the weight rounded to
    its dtype, so no activation is ever taken for one.
    """
    by_shape: dict[tuple[int, ...], list[tuple[str, nn.Parameter]]] = {}
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            for shape in {tuple(weight.shape), tuple(weight.shape[::-1])}:
                by_shape.setdefault(shape, []).append((name, weight))
    found: dict[str, int] = {}

    def look(saved: torch.Tensor) -> torch.Tensor:
        if type(saved) is torch.Tensor and saved.dtype in (torch.bfloat16, torch.float16):
            for name, weight in by_shape.get(tuple(saved.shape), ()):
                if weight.dtype != saved.dtype and name not in found and _is_rounded(saved, weight):
                    found[name] = saved.nbytes
                    break
        return saved

    with torch.autograd.graph.saved_tensors_hooks(look, lambda saved: saved):
        yield found


def _is_rounded(saved: torch.Tensor, weight: nn.Parameter) -> bool:
    rounded = weight.detach().to(saved.dtype)
    return any(saved.shape == each.shape and torch.equal(saved, each) for each in (rounded, rounded.t()))
