"""Train weights in scaled precision under DeepSpeed's engine (docs/distributed.rst).

At levels O1 to O4 the engine runs at stage 0: it all-reduces the plain gradients, clips, steps and
saves. As under DDP, `reducer.GradientReducer` reduces the gradients of scaled weights, and
`ddp.SharedOut` assigns states to ranks.
"""

import weakref
from functools import partial
from typing import Any

import torch
from torch import nn

from ..errors import FP8BackendError
from ..tensors.block_codes import BlockCodes
from ..tensors.scaled_tensor import ScaledTensor
from .backward import States, agree_after_backward
from .ddp import Connection, Watch, own_group

BUCKET_BYTES = 25 * 2**20
"""Bytes of a bucket of gradients in FP32, as DDP's `bucket_cap_mb`."""


def connect(engine: Any, gradient_comm: str, watch: Watch, scaling_states: States) -> None:
    """Connect the gradients of an FP8 model at a level inside a `DeepSpeedEngine`, on every rank.
    Idempotent.

    The engine does the rest at O0. Arguments as for `ddp.connect`. Raises `FP8BackendError` for
    settings of the engine that would leave scaled weights out.
    """
    weights = {
        name: p
        for name, p in engine.module.named_parameters()
        if isinstance(p, (ScaledTensor, BlockCodes))
    }
    if (
        not any(isinstance(weight, ScaledTensor) for weight in weights.values())
        or engine.optimizer is None
    ):
        return
    check(engine)
    connection = EngineConnection.find(engine)
    if connection is None:
        engine.register_forward_hook(connection := EngineConnection(engine))
        connection.start([*weights.values(), *scaling_states()])
        engine.optimizer.get_grads_for_reduction = partial(_plain_gradients, engine)
        engine.clip_fp32_gradients = partial(_clip, engine)
    connection.reduce(weights, gradient_comm, watch, BUCKET_BYTES)
    agree_after_backward([engine], scaling_states, [connection.group])


class EngineConnection(Connection):
    """Reduce in backward passes at the end of an accumulation, which the engine knows after
    forward."""

    def __init__(self, engine: Any) -> None:
        super().__init__(own_group(engine.seq_data_parallel_group, torch.device(engine.device)))
        self.engine = weakref.ref(engine)

    def begin(self, gradient: torch.Tensor | None = None) -> None:
        engine = self.engine()
        if engine.is_gradient_accumulation_boundary() and not engine.inside_no_sync_ctxt:
            super().begin(gradient)


def check(engine: Any) -> None:
    """Raise `FP8BackendError` for settings of a DeepSpeed engine that leave no level its
    weights."""
    settings = {
        "zero_optimization.stage "
        f"{engine.zero_optimization_stage()}": engine.zero_optimization_stage() > 0,
        "bf16.enabled": engine.bfloat16_enabled(),
        "fp16.enabled": engine.fp16_enabled(),
        "torch_autocast in fp16": engine.torch_autocast_z0_gradscaler is not None,
        "checkpoint.load_universal": engine.load_universal_checkpoint(),
        "managed_gradient_accumulation false": not getattr(
            engine, "managed_gradient_accumulation", lambda: True
        )(),
        "DeepCompile": engine.is_deepcompile_enabled(),
        "tensor parallelism": engine.mp_world_size > 1,
        "sequence parallelism": engine.sequence_parallel_size > 1,
        "a pipeline": engine.pipeline_parallelism,
        "DeepSpeed's MoE layers": engine.has_moe_layers,
    }
    if given := [name for name, is_given in settings.items() if is_given]:
        raise FP8BackendError(
            f"DeepSpeed with {', '.join(given)} does not go with weights in scaled precision "
            "(levels O1 to O4). Set "
            '"zero_optimization": {"stage": 0} and "bf16": {"enabled": false} (Accelerator does, '
            "for stages 1 and 2 "
            "with states shared by the ranks), shard_states=True in the recipe for ZeRO-1's "
            "memory, and leave the others out; or use FSDP2, or the same backend without +msamp"
        )


def _plain_gradients(engine: Any) -> tuple[list[torch.Tensor], dict]:
    """Return the gradients that the engine reduces, and none of experts: `get_grads_for_reduction`
    of an optimizer. Parameters without one get zeros, as from the engine itself."""
    if EngineConnection.find(engine).at_home:
        raise FP8BackendError(
            "gradients of scaled weights were not reduced over the ranks, since forward did not "
            "run through the engine: call engine(inputs), not engine.module(inputs)"
        )
    plain = [
        p
        for p in engine.module.parameters()
        if p.requires_grad and p.numel() and not isinstance(p, ScaledTensor)
    ]
    for p in plain:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    return [p.grad.data for p in plain], {}


def _clip(engine: Any) -> None:
    """Clip as PyTorch does, and keep the norm for `get_global_grad_norm`, which stage 0 in FP32
    leaves out."""
    engine._global_grad_norm = nn.utils.clip_grad_norm_(
        engine.module.parameters(), engine.gradient_clipping()
    )
