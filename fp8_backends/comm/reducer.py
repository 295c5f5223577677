"""Average gradients over the ranks in buckets, while backward still runs.

`GradientReducer` serves scaled weights. A bucket leaves when its gradients are complete and the
buckets before it have left, so the order of collectives is the same on all ranks: first 0, first 1,
second 0, first 2, second 1, second 2 (the shots of the all-reduce), and the use of each weight. A
gradient is read once, into the message, and dropped; its average arrives at the end of backward, or
with gradient release when the second bucket after it has left.

`fp8_all_reduce` is a communication hook for DDP's own buckets, at level O0; DDP fills them in the
same order on all ranks. DDP rebuilds its buckets after the first backward pass, also in a resumed
run, and an average must not depend on a gradient's place: each starts at a multiple of the
collective's block, and every contribution is rounded.
"""

import contextlib
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ..errors import FP8BackendError
from ..formats.formats import E4M3
from ..kernels.devices import on_device
from ..tensors.scaled_tensor import Kind, ScaledTensor, quantize, stored_parts
from ..tensors.sharded_tensor import agreed_over
from ..torch_tools.modules import TemporaryHook
from .two_shot import MESSAGE_BLOCK, AllReduce, Part, Reduced


class Bucket(NamedTuple):
    """Consecutive gradients in one message."""

    indices: list[int]
    """Indices of their parameters in the reducer's list."""
    starts: list[int]
    """First element of each; a multiple of MESSAGE_BLOCK."""
    numel: int


class GradientReducer:
    """Average gradients over ranks. `parameters` are in the order of the buckets, which is that of
    backward: the last registered first.

    Args:
        weights: names and trained weights, the same on every rank.
        group: unused by others while backward runs.
        comm: "fp8" or "plain" (FP32 all-reduce; stored in E4M3 afterwards).
        bucket_bytes: size of a bucket in FP32.
    """

    def __init__(
        self,
        weights: dict[str, nn.Parameter],
        group: dist.ProcessGroup,
        comm: str,
        bucket_bytes: int,
    ):
        self.names, self.parameters = list(weights)[::-1], list(weights.values())[::-1]
        self.group, self.comm = group, comm
        self.buckets = _buckets(self.parameters, bucket_bytes // 4)
        self.bucket_of = {
            index: k for k, bucket in enumerate(self.buckets) for index in bucket.indices
        }
        self.side_stream = SideStream(self.parameters[0].device)
        self.reset()

    def serves(self, weights: dict[str, nn.Parameter], comm: str) -> bool:
        """Return True if this reducer has exactly these weights."""
        same = [id(weight) for weight in weights.values()][::-1] == [
            id(weight) for weight in self.parameters
        ]
        return same and comm == self.comm

    def reset(self) -> None:
        """Prepare a new backward pass."""
        self.in_flight: list[AllReduce | PlainAllReduce | None] = []
        """Reductions of the buckets sent so far; None after arrival."""
        self.complete: set[int] = set()
        """Parameters with a complete gradient."""
        self.used: list[bool] = [False] * len(self.parameters)
        """Parameters with a gradient on this rank when their bucket left."""
        self.arrived = 0
        """Buckets received."""
        self.late: list[tuple[int, int, Reduced | torch.Tensor]] = []
        """Averages received for parameters unused on this rank: parameter, start in the bucket,
        bucket."""

    @torch.no_grad()
    def add(self, index: int) -> None:
        """Note the complete gradient of a parameter, and send complete buckets."""
        if self.bucket_of[index] < len(self.in_flight):
            raise FP8BackendError(
                f"{self.names[index]}: a second gradient in one backward pass, after the first had "
                "left for the other ranks. This happens where re-entrant activation checkpointing "
                "meets a weight that several layers share: use use_reentrant=False"
            )
        self.complete.add(index)
        for bucket in self.buckets[len(self.in_flight) :]:
            if not self.complete.issuperset(bucket.indices):
                break
            self._send(contributes=True)
        if _release_hooks(self.parameters[index]):
            # keep two buckets in flight while backward runs
            while self.arrived < len(self.in_flight) - 2:
                self._arrive(self.used)

    @torch.no_grad()
    def finish(self, contributes: bool = True) -> None:
        """Send the remaining buckets, wait for all, and replace the gradients by their averages."""
        while len(self.in_flight) < len(self.buckets):
            self._send(contributes)
        with self.side_stream.active():
            self.in_flight[-1].start_second_shot()
        used = self._used_somewhere(contributes)
        while self.arrived < len(self.buckets):
            self._arrive(used)
        for index, start, reduced in self.late:
            if used[index]:
                self._put([(index, start)], reduced)
        self.reset()

    def _arrive(self, used: list[bool]) -> None:
        """Wait for the next bucket, and replace the gradients of used parameters by their
        averages."""
        bucket, reduction = self.buckets[self.arrived], self.in_flight[self.arrived]
        self.in_flight[self.arrived] = None  # frees the message
        self.arrived += 1
        with self.side_stream.active():
            reduced = reduction.wait()
        places = list(zip(bucket.indices, bucket.starts, strict=True))
        self._put([(index, start) for index, start in places if used[index]], reduced)
        self.late += [(index, start, reduced) for index, start in places if not used[index]]

    def _put(self, places: list[tuple[int, int]], reduced: Reduced | torch.Tensor) -> None:
        with self.side_stream.active():
            gradients = [self._gradient(index, start, reduced) for index, start in places]
        self.side_stream.hand_over(gradients)
        for (index, _), gradient in zip(places, gradients, strict=True):
            self.parameters[index].grad = gradient
            for hook in _release_hooks(self.parameters[index]):
                hook.take(self.parameters[index])

    def _send(self, contributes: bool) -> None:
        bucket = self.buckets[len(self.in_flight)]
        with self.side_stream.active():
            parts = []
            for index, start in zip(bucket.indices, bucket.starts, strict=True):
                parameter = self.parameters[index]
                if contributes and parameter.grad is not None:
                    self.used[index] = True
                    parts.append(self.side_stream.part_of_message(parameter.grad, start))
                    parameter.grad = None
            # an empty part gives the message its length, also without a last gradient
            end = Part(
                torch.empty(0, dtype=torch.float32, device=self.parameters[0].device), bucket.numel
            )
            reduction = (AllReduce if self.comm == "fp8" else PlainAllReduce)(
                [*parts, end], self.group
            )
            if self.in_flight:
                self.in_flight[-1].start_second_shot()
        self.in_flight.append(reduction)

    def _used_somewhere(self, contributes: bool) -> list[bool]:
        """Return the parameters with a gradient on any rank. Only a rank without some gradient
        waits for the device."""
        device, here = self.parameters[0].device, self.used
        if all(here):
            used = torch.ones(len(here), dtype=torch.uint8, device=device)
        else:
            used = on_device(here, torch.uint8, device)
        used = agreed_over(used, [self.group])
        return here if all(here) or not contributes else used.bool().tolist()

    def _gradient(self, index: int, start: int, reduced: Reduced | torch.Tensor) -> ScaledTensor:
        parameter = self.parameters[index]
        end = start + parameter.numel()
        if isinstance(reduced, torch.Tensor):
            gradient = quantize(
                reduced[start:end].view(parameter.shape), E4M3.dtype, parameter.dtype
            )
        else:
            codes, scale_inv = (
                reduced.codes[start:end],
                reduced.scale_inv[start // MESSAGE_BLOCK : -(-end // MESSAGE_BLOCK)],
            )
            gradient = ScaledTensor(
                codes.view(parameter.shape), scale_inv, parameter.dtype, MESSAGE_BLOCK
            )
        gradient.kind = Kind.GRADIENT
        return gradient


def _release_hooks(parameter: nn.Parameter) -> list:
    """Return the hooks of a parameter that step inside backward, by a method `take`."""
    return [
        hook
        for hook in (parameter._post_accumulate_grad_hooks or {}).values()
        if hasattr(hook, "take")
    ]


def _buckets(parameters: list[nn.Parameter], capacity: int) -> list[Bucket]:
    """Fill buckets with consecutive parameters, `capacity` elements or one parameter each."""
    buckets: list[Bucket] = []
    for index, parameter in enumerate(parameters):
        numel = -(-parameter.numel() // MESSAGE_BLOCK) * MESSAGE_BLOCK
        if not buckets or buckets[-1].numel + numel > capacity:
            buckets.append(Bucket([], [], 0))
        last = buckets[-1]
        buckets[-1] = Bucket([*last.indices, index], [*last.starts, last.numel], last.numel + numel)
    return buckets


class PlainAllReduce:
    """Average in FP32 by the process group's own all-reduce, with the methods of `AllReduce`."""

    def __init__(self, parts: list[Part], group: dist.ProcessGroup) -> None:
        self.size = dist.get_world_size(group)
        self.values = torch.zeros(
            parts[-1].start, dtype=torch.float32, device=parts[-1].values.device
        )
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


class SideStream:
    """Pack and await buckets on a CUDA stream of their own; does nothing on other devices."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Run the body on the side stream, after the work queued on the current stream."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            yield

    def part_of_message(self, tensor: torch.Tensor, start: int = 0) -> Part:
        """Return a tensor of another stream as a part of a message. Its memory may be freed there
        during the read."""
        if self.stream is not None:
            for stored in stored_parts(tensor):
                stored.record_stream(self.stream)
        if isinstance(tensor, ScaledTensor) and tensor.codes.dtype == torch.float32:
            return Part(tensor.codes.reshape(-1), start, tensor.scale_inv)
        values = tensor.dequantize(torch.float32) if isinstance(tensor, ScaledTensor) else tensor
        return Part(values.reshape(-1), start)

    def hand_over(self, tensors: list[torch.Tensor]) -> None:
        """Make tensors of the side stream available to the current stream."""
        if self.stream is not None:
            current = torch.cuda.current_stream(self.stream.device)
            current.wait_stream(self.stream)
            for stored in (stored for tensor in tensors for stored in stored_parts(tensor)):
                stored.record_stream(current)


# DDP's own buckets


class HookState(TemporaryHook):
    """State of the communication hook, for one backward pass; a copied DDP has no such hook."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.side_stream = group, SideStream(device)
        self.in_flight: list[tuple[AllReduce, list[Part], torch.Tensor, torch.futures.Future]] = []
        """Reduction, gradients in the bucket, the bucket, and DDP's future."""


@torch.no_grad()
def fp8_all_reduce(state, bucket):
    """Average a bucket: (HookState, torch.distributed.GradBucket) -> Future of the bucket.

    Without annotations: DDP checks them, and misreads postponed ones.
    """
    values = bucket.buffer()
    if bucket.index() == 0:
        state.in_flight.clear()  # of a failed backward pass
    future = torch.futures.Future(devices=[values.device] if values.device.type == "cuda" else None)
    with state.side_stream.active():
        state.side_stream.part_of_message(values)
        sizes = [gradient.numel() for gradient in bucket.gradients()]
        # each at a multiple of MESSAGE_BLOCK
        starts = accumulate(
            (-(-size // MESSAGE_BLOCK) * MESSAGE_BLOCK for size in sizes), initial=0
        )
        gradients = [
            Part(part, start) for part, start in zip(values.split(sizes), starts, strict=False)
        ]
        reduction = AllReduce(gradients, state.group, rounded=True)
        if state.in_flight:
            state.in_flight[-1][0].start_second_shot()
        state.in_flight.append((reduction, gradients, values, future))
        if bucket.is_last():
            for reduction, gradients, values, future_mean in state.in_flight:
                reduction.write(gradients)
                future_mean.set_result(values)
            state.in_flight.clear()
    return future
