"""Simulate a training step of one of many ranks under PyTorch's fake process group: its collectives
and its memory.

`RankTraining` wraps, prepares and steps a model on the process group of this process, real or fake.
`simulate` runs it on fake tensors as rank 0, which has the largest shards. Alike layers are traced
with four and five of them: each region of a step grows by the same bytes with every further one.
DDP's buckets do not end with layers: it is traced whole.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from ... import preparation
from ...announcement import logger
from ...compute.fields import check_known, parsed, whole_number
from ...errors import FP8BackendError
from ...recipes.handlers import Recipe, resolve
from ...words import listed
from ..compare.measuring import Collectives, Traffic
from . import step_trace
from .estimates import BASELINE_DTYPES, Workload
from .model_shapes import ModelShape
from .step_trace import ACTIVATIONS, GRADIENTS, Bytes, Regions

REPLICATE, SHARD, TENSOR_PARALLEL = DIMENSIONS = ("replicate", "shard", "tp")
"""Mesh dimensions in order: replicas (DDP, with the second HSDP), shards (FSDP2), parts of
layers."""
FEW = 4
"""Layers of the shorter model to extrapolate from: the first two and the last two have regions of
their own."""


class RankTraining:
    """This rank's training of a new model by a recipe (None: no FP8), on a mesh with `DIMENSIONS`,
    as by Accelerate."""

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe | None,
        autocast: Any,
        mesh: dist.DeviceMesh,
        checkpointing: bool = False,
    ) -> None:
        self.inner = model.train()
        names = mesh.mesh_dim_names
        if checkpointing:
            step_trace.enable_checkpointing(model)
        if TENSOR_PARALLEL in names:
            _share_layers(model, mesh[TENSOR_PARALLEL])
        if recipe is not None:
            recipe = step_trace.traced_recipe(model, recipe)
            preparation.prepare(model, None, recipe)
        step_trace.run_in_autocast(model, autocast)
        self.ddp = None
        if SHARD in names:
            _shard(model, mesh[tuple(name for name in names if name != TENSOR_PARALLEL)], autocast)
        elif REPLICATE in names:
            self.ddp = DistributedDataParallel(
                model, process_group=mesh.get_group(REPLICATE), init_sync=False
            )
        self.model = self.ddp or model
        # PyTorch steps only parameters of one mesh together
        groups: dict[Any, list[nn.Parameter]] = {}
        for parameter in self.model.parameters():
            groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
        self.optimizer = torch.optim.AdamW(
            [{"params": group} for group in groups.values()], lr=1e-4, fused=True
        )
        if recipe is not None:
            preparation.prepare(self.model, self.optimizer, recipe)

    def step(
        self, batch: dict[str, torch.Tensor], enter: Callable[[str], object] = lambda region: None
    ) -> None:
        """Make a step, and call `enter` with the names of its regions."""
        enter("forward")
        loss = step_trace.loss_of(self.model, batch)
        del batch
        enter("backward of the head")
        loss.backward()
        del loss
        enter("step")
        self.optimizer.step()
        self.optimizer.zero_grad()


def _share_layers(model: nn.Module, mesh: dist.DeviceMesh) -> None:
    """Share layers by transformers' plan for the model, in PyTorch's styles."""
    styles: dict[str, Callable] = {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    }
    plan = getattr(model, "tp_plan", None) or {}
    if not plan or not styles.keys() >= {*plan.values()}:
        reason = "no tp_plan"
        if plan:
            reason = f"the styles {listed(sorted({*plan.values()} - styles.keys()))}"
        raise FP8BackendError(
            f"{type(model).__name__} has {reason}, which no simulation knows: leave tp out"
        )
    for name in ("num_attention_heads", "num_key_value_heads"):
        if (heads := getattr(model.config, name, 0) or 0) % mesh.size():
            raise FP8BackendError(
                f"tp:{mesh.size()} does not divide {name}={heads}: heads are not split"
            )
    parallelize_module(
        model, mesh, {name: styles[style]() for name, style in plan.items()}, src_data_rank=None
    )


def _shard(model: nn.Module, mesh: dist.DeviceMesh, dtype: torch.dtype | None) -> None:
    """Shard each block, and the rest."""
    blocks = getattr(model, "_no_split_modules", None) or ()
    for module in [*(each for each in model.modules() if type(each).__name__ in blocks), model]:
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(dtype, dtype, dtype))


@dataclass
class Simulation:
    """A step of rank 0."""

    traffic: dict[tuple[str, str], Traffic]
    """By mesh dimension ("all": all ranks) and kind."""
    peaks: dict[str, Bytes]
    """Highest moment of each region of the step, in bytes by part (`step_trace.PARTS`)."""
    seconds: float = 0.0
    """Duration of the simulation."""

    @property
    def peak(self) -> float:
        return max(sum(parts.values()) for parts in self.peaks.values())

    @property
    def sent(self) -> float:
        return sum(each.sent for each in self.traffic.values())


def simulate(workload: Workload, backend: str | Recipe, mesh: Mapping[str, int]) -> Simulation:
    """Simulate a step of `workload` on rank 0 of a mesh such as `{"shard": 128, "tp": 8}`, with
    sizes of `DIMENSIONS`.

    Lifetimes are those of a GPU's tensors in the order of calls, with none of the allocator's or
    NCCL's own memory.

    Args:
        workload: `devices` and `memory` are not read.
        backend: a backend string or a recipe, or "bf16", "fp16" or "fp32" for training without FP8.

    Raises:
        RecipeError: an unknown backend or mesh dimension, or a recipe that does not support this
            mesh.
        FP8BackendError: a process group is running, or the step cannot be traced.
    """
    began = time.perf_counter()
    name = str(backend).lower()
    for dimension in mesh:
        check_known("mesh dimension", dimension, DIMENSIONS)
    sizes = {each: parsed(each, whole_number(1), mesh[each]) for each in DIMENSIONS if each in mesh}
    workload.model.check_sequence(workload.sequence)
    if dist.is_initialized():
        raise FP8BackendError(
            "a process group is running, and a simulation takes its place: simulate in another "
            "process, or after torch.distributed.destroy_process_group()"
        )
    recipe = None if name in BASELINE_DTYPES else resolve(backend)
    shape = workload.model
    is_ddp = SHARD not in sizes and REPLICATE in sizes
    if is_ddp or shape.layers <= FEW + 1 or not shape.grows_evenly:
        result = _trace(workload, shape, recipe, name, sizes)
    else:
        shapes = shape.with_layers(FEW), shape.with_layers(FEW + 1)
        first, deeper = (_trace(workload, each, recipe, name, sizes) for each in shapes)
        result = _grown(first, deeper, shape.layers - FEW)
    result.seconds = time.perf_counter() - began
    return result


def _grown(first: Simulation, deeper: Simulation, layers: int) -> Simulation:
    """Extrapolate to so many layers more than `first`; `deeper` has one more."""

    def at(old: float, new: float) -> float:
        return old + layers * (new - old)

    traffic = {
        key: old._replace(calls=at(old.calls, new.calls), bytes=at(old.bytes, new.bytes))
        for key, old in first.traffic.items()
        for new in [deeper.traffic[key]]
    }
    peaks = {
        region: {part: at(size, deeper.peaks[region][part]) for part, size in parts.items()}
        for region, parts in first.peaks.items()
    }
    return Simulation(traffic, peaks)


def _trace(
    workload: Workload, shape: ModelShape, recipe: Recipe | None, name: str, sizes: dict[str, int]
) -> Simulation:
    autocast = BASELINE_DTYPES[name if recipe is None else recipe.autocast_dtype]
    with (
        _fake_ranks(sizes) as mesh,
        step_trace.on_fake_tensors(lambda: shape.make_model(workload.dtype)) as (model, tracker),
        Collectives(mesh) as collectives,
    ):
        regions = Regions(tracker, shape.stacks(model))
        with _RealIndices():
            training = RankTraining(model, recipe, autocast, mesh, workload.checkpointing)

        def enter(region: str) -> None:
            regions.goes_back = region.startswith("backward")
            for parameter in training.model.parameters() if region == "step" else ():
                if parameter.grad is not None:
                    tracker.assign(parameter.grad, GRADIENTS)
            tracker.enter(region)

        step_trace.create_states(tracker, model, training.optimizer)
        _reduce_without_values(training.ddp)
        # the first step orders DDP's buckets, and tells DTensors the shapes of results
        for is_last in (False, True) if training.ddp or TENSOR_PARALLEL in sizes else (True,):
            if is_last and training.ddp:
                with _RealIndices():
                    training.ddp.reducer._rebuild_buckets()
            gc.collect()
            step_trace.assign_parts(tracker, model, training.optimizer)
            tracker.peaks.clear()
            tracker.peak_totals.clear()
            collectives.seen.clear()
            training.step(
                shape.make_batch(workload.batch, workload.sequence, workload.dtype), enter
            )
        if collectives.unknown:
            raise FP8BackendError(
                f"the bytes of the collective {collectives.unknown} are not known"
            )
        # kernels make no copies; the levels' eager code and torch 2.11 do
        tracker.peaks["step"][ACTIVATIONS] = 0
    return Simulation(collectives.seen, tracker.peaks)


@contextlib.contextmanager
def _fake_ranks(sizes: dict[str, int]) -> Iterator[dist.DeviceMesh]:
    """Be rank 0 of a mesh of fake ranks, announce nothing, and leave garbage: its time would differ
    between traces."""
    level = logger.level
    collects = gc.isenabled()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=math.prod(sizes.values()))
    try:
        logger.setLevel(logging.ERROR)
        gc.disable()
        yield dist.init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    finally:
        if collects:
            gc.enable()
        logger.setLevel(level)
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # has the mesh


def _reduce_without_values(ddp: DistributedDataParallel | None) -> None:
    """Replace DDP's own reduction, which reads its result, by a hook with the same collective."""

    def reduce(state, bucket):
        dist.all_reduce(bucket.buffer(), group=ddp.process_group)
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    if ddp is not None and not ddp._comm_hooks:  # a connected DDP refuses hooks
        DistributedDataParallel.register_comm_hook(ddp, None, reduce)


class _RealIndices(TorchDispatchMode):
    """Keep integers with values real: meshes read their ranks, and DDP the indices of its
    buckets."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # of each of 1,024 shards
        if func is torch.ops.prim.device.default and tuple(types) == (FakeTensor,):
            return FakeTensor.__torch_dispatch__(func, types, args)
        tensors = [each for each in tree_iter((args, kwargs)) if isinstance(each, torch.Tensor)]
        is_real = all(
            type(tensor) is torch.Tensor and not tensor.is_floating_point() for tensor in tensors
        )
        if not tensors:
            is_real = (
                func is torch.ops.aten.empty.memory_format
                and (kwargs or {}).get("dtype") == torch.int32
            )
        with _disable_current_modes() if is_real else contextlib.nullcontext():
            return func(*args, **(kwargs or {}))
