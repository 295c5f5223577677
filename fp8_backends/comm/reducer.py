"""`GradientReducer`: the gradients of scaled weights, in buckets, to the other ranks while backward still runs.

A bucket leaves as soon as its gradients are there and the buckets before it have left, so the order of collectives is
the same on all ranks. On the wire, of buckets 0, 1, 2 (first and second shot of the two-shot all-reduce):

    first 0, first 1, second 0, first 2, second 1, second 2, which weights were used at all

A gradient waits where backward has put it; when its bucket leaves it is read once, on its way into the message, and
dropped. What comes back takes its place. Tensors start at multiples of the collective's block, so each has scales of
its own.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn

from ..errors import FP8BackendError
from ..numerics.formats import E4M3
from ..numerics.scaled_tensor import ScaledTensor, quantize
from .two_shot import BLOCK, AllReduce, Part, Reduced


class Bucket(NamedTuple):
    """Gradients that travel together, one behind the other."""

    indices: list[int]
    """Of parameters of the reducer."""
    starts: list[int]
    """Element at which each begins; a multiple of BLOCK."""
    numel: int


class GradientReducer:
    """Averages gradients over ranks. `parameters` are in the order of the buckets: the last registered first, since
    backward reaches it first.

    Args:
        weights: names and trained weights, the same on every rank.
        group: used by nothing else while backward runs.
        comm: "fp8" or "plain" (FP32 all-reduce; stored in E4M3 afterwards).
        bucket_bytes: size of a bucket in FP32.
    """

    def __init__(self, weights: dict[str, nn.Parameter], group: dist.ProcessGroup, comm: str, bucket_bytes: int):
        self.names, self.parameters = list(weights)[::-1], list(weights.values())[::-1]
        self.group, self.comm = group, comm
        self.buckets = _buckets(self.parameters, bucket_bytes // 4)
        self.bucket_of = {index: k for k, bucket in enumerate(self.buckets) for index in bucket.indices}
        self.beside = Beside(self.parameters[0].device)
        self.abandon()

    def serves(self, weights: dict[str, nn.Parameter], comm: str) -> bool:
        """Whether it is the reducer of exactly these."""
        same = [id(weight) for weight in weights.values()][::-1] == [id(weight) for weight in self.parameters]
        return same and comm == self.comm

    def abandon(self) -> None:
        """Ready for a new backward pass."""
        self.left: list[UnderWay] = []
        """Of each bucket that has left."""
        self.here: set[int] = set()
        """Parameters whose gradient is complete."""
        self.used: list[bool] = [False] * len(self.parameters)

    @torch.no_grad()
    def arrived(self, index: int) -> None:
        """The gradient of a parameter is complete: send what can be sent."""
        if self.bucket_of[index] < len(self.left):
            raise FP8BackendError(
                f"{self.names[index]}: a second gradient in one backward pass, after the first had left for the other "
                f"ranks. This happens where re-entrant activation checkpointing meets a weight that several layers "
                f"share: use use_reentrant=False"
            )
        self.here.add(index)
        while len(self.left) < len(self.buckets) and self.here.issuperset(self.buckets[len(self.left)].indices):
            self._send(contributes=True)

    @torch.no_grad()
    def finish(self, contributes: bool = True) -> None:
        """Send what is left, wait for everything and put the averages where the gradients were."""
        while len(self.left) < len(self.buckets):
            self._send(contributes)
        with self.beside:
            self.left[-1].start_second_shot()
        used = self._used_somewhere()
        results = []
        with self.beside:
            for bucket, under_way in zip(self.buckets, self.left, strict=True):
                reduced = under_way.wait()
                for index, start in zip(bucket.indices, bucket.starts, strict=True):
                    if contributes and used[index]:
                        results.append((index, self._gradient(index, start, reduced)))
        self.beside.hand_over([gradient for _, gradient in results])
        for index, gradient in results:
            self.parameters[index].grad = gradient
        self.abandon()

    def _send(self, contributes: bool) -> None:
        bucket = self.buckets[len(self.left)]
        with self.beside:
            parts = []
            for index, start in zip(bucket.indices, bucket.starts, strict=True):
                parameter = self.parameters[index]
                if contributes and parameter.grad is not None:
                    self.used[index] = True
                    parts.append(self.beside.borrowed(parameter.grad, start))
                    parameter.grad = None
            end = Part(torch.empty(0, device=self.parameters[0].device), bucket.numel)  # where no gradient ends it
            under_way = (AllReduce if self.comm == "fp8" else PlainAllReduce)([*parts, end], self.group)
            if self.left:
                self.left[-1].start_second_shot()
        self.left.append(under_way)

    def _used_somewhere(self) -> list[bool]:
        """Of each parameter, whether any rank has a gradient: else it keeps none, as in DDP."""
        used = torch.tensor(self.used, dtype=torch.uint8, device=self.parameters[0].device)
        dist.all_reduce(used, dist.ReduceOp.MAX, group=self.group)
        return self.used if all(self.used) else used.bool().tolist()  # the device is asked where it matters only

    def _gradient(self, index: int, start: int, reduced: Reduced | torch.Tensor) -> ScaledTensor:
        parameter = self.parameters[index]
        end = start + parameter.numel()
        if isinstance(reduced, torch.Tensor):
            gradient = quantize(reduced[start:end].view(parameter.shape), E4M3.dtype, parameter.dtype)
        else:
            codes, scale_inv = reduced.codes[start:end], reduced.scale_inv[start // BLOCK : -(-end // BLOCK)]
            gradient = ScaledTensor(codes.view(parameter.shape), scale_inv, parameter.dtype, BLOCK)
        gradient.accumulates = True
        return gradient


def _buckets(parameters: list[nn.Parameter], capacity: int) -> list[Bucket]:
    """Consecutive parameters, `capacity` elements or one parameter a bucket."""
    buckets: list[Bucket] = []
    for index, parameter in enumerate(parameters):
        numel = -(-parameter.numel() // BLOCK) * BLOCK
        if not buckets or buckets[-1].numel + numel > capacity:
            buckets.append(Bucket([], [], 0))
        last = buckets[-1]
        buckets[-1] = Bucket([*last.indices, index], [*last.starts, last.numel], last.numel + numel)
    return buckets


class UnderWay(Protocol):
    """A reduction on its way, as `two_shot.AllReduce`."""

    def start_second_shot(self) -> None: ...

    def wait(self) -> Reduced | torch.Tensor: ...


class PlainAllReduce:
    """The mean in FP32, by the backend's own all-reduce; in the form of `two_shot.AllReduce`."""

    def __init__(self, parts: list[Part], group: dist.ProcessGroup) -> None:
        self.size = dist.get_world_size(group)
        self.values = torch.zeros(parts[-1].start, device=parts[-1].values.device)
        for part in parts[:-1]:
            place = self.values[part.start : part.start + len(part.values)].copy_(part.values)
            if part.scale_inv is not None:
                place.mul_(part.scale_inv)
        self.work = dist.all_reduce(self.values, group=group, async_op=True)

    def start_second_shot(self) -> None:
        pass

    def wait(self) -> torch.Tensor:
        self.work.wait()
        return self.values.div_(self.size)


class Beside:
    """On CUDA a stream of its own, so that packing and waiting for a bucket hold nobody up; elsewhere nothing.

    As a context: work inside runs on that stream, after what the current stream has been given so far.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.contexts: list = []

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
            self.contexts.append(torch.cuda.stream(self.stream))
            self.contexts[-1].__enter__()

    def __exit__(self, *error) -> None:
        if self.stream is not None:
            self.contexts.pop().__exit__(*error)

    def borrowed(self, tensor: torch.Tensor, start: int = 0) -> Part:
        """What a tensor of another stream, whose memory may be freed there while it is read here, has to send."""
        if self.stream is not None:
            for part in _parts(tensor):
                part.record_stream(self.stream)
        if isinstance(tensor, ScaledTensor) and tensor._data.dtype == torch.float32:
            return Part(tensor._data.reshape(-1), start, tensor._scale_inv)
        values = tensor.dequantize(torch.float32) if isinstance(tensor, ScaledTensor) else tensor
        return Part(values.reshape(-1), start)

    def hand_over(self, tensors: list[torch.Tensor]) -> None:
        """Let the current stream wait for what was made here, and use it."""
        if self.stream is not None:
            current = torch.cuda.current_stream(self.stream.device)
            current.wait_stream(self.stream)
            for part in (part for tensor in tensors for part in _parts(tensor)):
                part.record_stream(current)


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (tensor._data, tensor._scale_inv) if isinstance(tensor, ScaledTensor) else (tensor,)
