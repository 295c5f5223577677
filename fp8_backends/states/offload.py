"""Keep optimizer states in the memory of the host, and make the steps there: `offload="states"`
(docs/levels.rst).

A scaled weight has a *twin* in the host: its codes and scale, and the weight's master or residual.
The moments lie beside it. A gradient is copied to the host, the optimizer's own step runs on the
twin by the C++ kernels, and the new codes and scale are copied back: while backward goes on, if
gradients are released, else in `step()`, one weight while others are copied. All bits equal those
of a step on the device. Plain parameters stay on the device with their states.
"""

import mmap
import os
import queue
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import FP8BackendError
from ..formats.formats import FORMAT_OF
from ..kernels.devices import free_memory
from ..tensors.scaled_tensor import Kind, ScaledStorage, ScaledTensor, stored_parts
from ..tensors.sharded_tensor import is_distributed
from ..torch_tools.backward_end import call_when_backward_ends, inside_backward
from ..words import readable_bytes
from . import checkpoint
from .link import Link, link_to
from .scaled_states import LocalView, ScaledStates

MOST_BUFFERS = 4
"""Gradients in the host's memory at once."""
_ALIGNED = 64
"""Bytes: places of tensors in a buffer are multiples of it."""

ELSEWHERE = (
    "FSDP2 moves shards by its CPUOffloadPolicy at level O0, and DeepSpeed plain states by "
    "offload_optimizer_device: cpu"
)


@dataclass
class _Twin:
    """A weight's stored values in the host."""

    tensor: ScaledTensor
    amax: torch.Tensor
    """On the device: the weight's `known_amax`."""
    seen: weakref.ref | None = None
    version: int = 0
    """The codes on the device, and autograd's count of writes to them, when both were equal."""

    def equals(self, stored: ScaledStorage) -> bool:
        """Return True if nobody has written to the weight since `see`."""
        if self.seen is None or self.tensor.stored.rest is not stored.rest:
            return False
        return self.seen() is stored.codes and self.version == stored.codes._version

    def see(self, stored: ScaledStorage) -> None:
        self.seen, self.version = weakref.ref(stored.codes), stored.codes._version


class Offload:
    """The states and twins of an optimizer's weights in the host's memory."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._twins: dict[int, _Twin] = {}
        """By the `id` of a parameter."""
        self._free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        """Buffers of gradients; at first they are empty."""
        for _ in range(MOST_BUFFERS):
            self._free.put(link.empty((0,), torch.uint8))
        self._waits_for_end = False

    def twin_of(self, p: ScaledTensor) -> ScaledTensor:
        """Return a weight's stored values in the host, copied again if somebody wrote to it. Its
        master or residual moves there."""
        stored = p.stored
        twin = self._twins.get(id(p))
        if twin is None or twin.tensor.codes.shape != stored.codes.shape:
            codes = self.link.empty(stored.codes.shape, stored.codes.dtype)
            scale_inv = torch.empty_like(stored.scale_inv, device="cpu")
            tensor = ScaledTensor(codes, scale_inv, p.dtype)
            twin = self._twins[id(p)] = _Twin(tensor, torch.empty_like(stored.scale_inv))
        if not twin.equals(stored):
            twin.tensor.codes.copy_(stored.codes)
            twin.tensor.scale_inv.copy_(stored.scale_inv)
            if stored.rest is not None:
                stored.rest = stored.rest.to("cpu")
            twin.tensor.stored.rest = stored.rest
            stored.offloaded = self.for_files
            twin.see(stored)
        return twin.tensor

    def take(self, optimizer: ScaledStates, views: Sequence[LocalView]) -> list[LocalView]:
        """Start the steps of scaled weights in the host. Return the other parameters."""
        if inside_backward() and not self._waits_for_end:
            self._waits_for_end = True
            call_when_backward_ends(self._end)
        rest = []
        for view in views:
            if isinstance(view.parameter, ScaledTensor):
                self._start(optimizer, view)
            else:
                rest.append(view)
        return rest

    def _start(self, optimizer: ScaledStates, view: LocalView) -> None:
        p = view.parameter
        p.settle()
        twin = self.twin_of(p)
        view.state["step"] = view.state["step"].cpu()
        parts = stored_parts(view.gradient)
        buffer = self._free.get()  # waits for a step, if all are in use
        size = sum(map(_padded, parts))
        if buffer.numel() < size:
            buffer = self.link.empty((size,), torch.uint8)
        copies = _places(buffer, parts)
        fetched = self.link.fetch(zip(copies, parts, strict=True))
        gradient = copies[0]
        if isinstance(view.gradient, ScaledTensor):
            gradient = ScaledTensor(*copies, p.dtype, view.gradient.block_size, Kind.GRADIENT)
        has_master = twin.master is not None
        on_host = view._replace(
            weight=twin.master if has_master else twin,
            copy=twin if has_master else None,
            gradient=gradient,
        )
        self.link.run(self._step, optimizer, on_host, buffer, fetched)

    @torch.no_grad()
    def _step(
        self, optimizer: ScaledStates, view: LocalView, buffer: torch.Tensor, fetched: Any
    ) -> None:
        p = view.parameter
        twin = self._twins[id(p)]
        try:
            self.link.wait(fetched)
            optimizer.step_scaled([view])
        finally:
            self._free.put(buffer)
        pairs = list(zip(stored_parts(p), stored_parts(twin.tensor), strict=True))
        known = twin.tensor.known_amax()
        if known is not None:
            pairs.append((twin.amax, known))
        self.link.send(pairs)
        if known is not None:
            p.remember_amax(twin.amax)
        twin.see(p.stored)

    def _end(self) -> None:
        """Callback at the end of backward: the next forward may come before `step()`."""
        self._waits_for_end = False
        self.link.finish()

    @staticmethod
    def for_files(values: torch.Tensor) -> torch.Tensor:
        """Return values of a state dict in the host: in its memory, or in a file without a name."""
        values = values.cpu()
        folder = _checkpoint.get()
        if folder is None or not values.numel():
            return values
        with tempfile.TemporaryFile(dir=folder) as file:
            # a full disk raises here; a write to missing blocks would end the process
            os.posix_fallocate(file.fileno(), 0, values.nbytes)
            mapped = mmap.mmap(file.fileno(), values.nbytes)
        copy = torch.frombuffer(mapped, dtype=values.dtype).view(values.shape).copy_(values)
        mapped.madvise(mmap.MADV_DONTNEED)  # the system may write the pages out, and drop them
        return copy

    def check_memory(self, optimizer: ScaledStates, weights: Sequence[ScaledTensor]) -> None:
        """Raise `FP8BackendError` if the host has no memory for twins, moments and gradients."""
        needed = MOST_BUFFERS * max((p.numel() for p in weights), default=0)
        for p in weights:
            moments = [optimizer.moment_format(p, name) for name in optimizer.fp8_declared.roles]
            for dtype, block_size in moments:
                scales = 4 * p.numel() / block_size if block_size and dtype in FORMAT_OF else 0
                needed += p.numel() * dtype.itemsize + scales
            needed += p.stored.codes.nbytes
            needed += sum(part.nbytes for part in stored_parts(p, exact=True)[2:] if part.is_cuda)
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        free = free_memory()
        if ranks * needed > free:
            of_ranks = f" on each of {ranks} ranks" if ranks > 1 else ""
            raise FP8BackendError(
                f'offload="states" needs {readable_bytes(needed)} of the host\'s memory{of_ranks}, '
                f"and {readable_bytes(free)} are free: use level O4 (4 bytes an element; O2 5, O3 "
                "6, O1 10), free memory, or leave offload out"
            )


def check(optimizer: torch.optim.Optimizer) -> None:
    """Raise `FP8BackendError` for an optimizer without a step in the host."""
    if not isinstance(optimizer, (torch.optim.AdamW, torch.optim.Adam)):
        raise FP8BackendError(
            'offload="states" makes the steps of torch.optim.AdamW and Adam, by C++ kernels, and '
            f"not of {type(optimizer).__name__}: use one of these, or leave offload out"
        )
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(map(is_distributed, parameters)):
        raise FP8BackendError(
            'offload="states" goes with one process and DDP, and ranks share these parameters '
            f"(FSDP2, tensor parallelism): leave offload out; {ELSEWHERE}"
        )


def install(optimizer: ScaledStates) -> None:
    """Move an optimizer's states, masters and residuals to the host, and make the steps there.
    Repeating it adds parameters."""
    check(optimizer)
    owned = [p for group in optimizer.param_groups for p in group["params"] if optimizer.owns(p)]
    weights = [p for p in owned if isinstance(p, ScaledTensor) and not p.is_meta]
    if optimizer.fp8_offload is None:
        if len({p.device for p in weights}) != 1:
            raise FP8BackendError(
                'offload="states" wants an optimizer with weights of the level on one device: '
                "leave it out"
            )
        offload = Offload(link_to(weights[0].stored.codes))
        offload.check_memory(optimizer, weights)
        optimizer.fp8_offload = offload
    for p in weights:
        optimizer.fp8_offload.twin_of(p)
        checkpoint.store_states(optimizer, p, optimizer.state.get(p, {}))


_checkpoint: ContextVar[str | None] = ContextVar("_checkpoint", default=None)
"""Folder of the checkpoint that is being written."""


@contextmanager
def writing_checkpoint(folder: str) -> Iterator[None]:
    """Let state dicts have their values in files beside a checkpoint while it is written: FP32
    copies of all weights and moments would take up to 14 bytes an element of memory."""
    token = _checkpoint.set(folder)
    try:
        yield
    finally:
        _checkpoint.reset(token)


def _padded(part: torch.Tensor) -> int:
    return -(-part.nbytes // _ALIGNED) * _ALIGNED


def _places(buffer: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of a buffer for copies of tensors."""
    places, start = [], 0
    for part in parts:
        place = buffer[start : start + part.nbytes].view(part.dtype)
        places.append(place.view(part.shape))
        start += _padded(part)
    return places
