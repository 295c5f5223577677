"""Copy between a device and the host while the device computes: `link_to` a CUDA device has
streams."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from ..kernels.triton_gate import is_eager

Pairs = Iterable[tuple[torch.Tensor, torch.Tensor]]
"""Target and source of copies."""


def link_to(tensor: torch.Tensor) -> "Link":
    """Return the link between a tensor's device and the host."""
    streams = tensor.is_cuda and is_eager(tensor)  # fake tensors have no streams
    return Streams(tensor.device) if streams else Link()


class Link:
    """Plain copies, complete when they return: the device is the host, or has no streams."""

    def empty(self, shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate memory of the host for copies."""
        return torch.empty(shape, dtype=dtype, device="cpu")

    def fetch(self, pairs: Pairs) -> Any:
        """Start copies to the host, after the work queued on the device. Return what `wait`
        takes."""
        self._copy(pairs)

    def wait(self, fetched: Any) -> None:
        """Wait in the host for copies of `fetch`."""

    def send(self, pairs: Pairs) -> None:
        """Start copies to the device."""
        self._copy(pairs)

    def run(self, task: Callable, *args) -> None:
        """Run a task of the host, after the tasks before it."""
        task(*args)

    def finish(self) -> None:
        """Wait for all tasks, and let the device's next work wait for the copies of `send`. Raises
        the error of a task."""

    def _copy(self, pairs: Pairs) -> None:
        for target, source in pairs:
            target.copy_(source)


class Streams(Link):
    """Copies on a CUDA stream for each direction, and tasks in a thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._down = torch.cuda.Stream(device)
        self._up = torch.cuda.Stream(device)
        self._worker = ThreadPoolExecutor(1, "fp8-offload")
        self._tasks: list[Future] = []

    def empty(self, shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)

    def fetch(self, pairs: Pairs) -> torch.cuda.Event:
        # the gradient is complete, backward has read the weight, and `send` has read its twin
        self._down.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._down):
            self._copy(pairs)
            return self._down.record_event()

    def wait(self, fetched: torch.cuda.Event) -> None:
        fetched.synchronize()

    def send(self, pairs: Pairs) -> None:
        with torch.cuda.stream(self._up):
            self._copy(pairs)

    def run(self, task: Callable, *args) -> None:
        self._tasks.append(self._worker.submit(task, *args))

    def finish(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.result()
        torch.cuda.current_stream(self._device).wait_stream(self._up)

    def _copy(self, pairs: Pairs) -> None:
        for target, source in pairs:
            target.copy_(source, non_blocking=True)
            if source.is_cuda:  # it may be dropped before it is read
                source.record_stream(torch.cuda.current_stream(self._device))
