"""What `Accelerator` does differently under DeepSpeed.

DeepSpeed's engine owns the steps, the precision around FP8 and the communication: weights and optimizer states lie in
its flat ZeRO partitions, and its optimizers call the torch optimizer once for each group of parameters, if at all. So
a step is seen from outside, where Accelerate drives the engine: after a synchronised backward, which takes the step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks

from ..comm.backward import agree_on_scaling
from ..training import preparation
from ..training.conversion import prepared_roots
from ..training.scaling_state import IN_FILES, OPTIMIZER_KEY, ScalingState, collect, restore


def in_use(accelerator: Accelerator) -> bool:
    """Whether DeepSpeed trains the models of this Accelerator."""
    return accelerator.distributed_type == DistributedType.DEEPSPEED


class EngineSteps:
    """The steps of a DeepSpeed engine, watched as a torch optimizer is: hooks run once after each step that was taken.

    Holds no parameters: what the engine trains are its partitions.
    """

    def __init__(self) -> None:
        self._optimizer_step_post_hooks: dict[int, Callable] = {}
        self.param_groups: list[dict] = []
        self.state: dict = {}

    def register_step_post_hook(self, hook: Callable) -> None:
        """hook(steps, args, kwargs) after each step, as `torch.optim.Optimizer.register_step_post_hook`."""
        self._optimizer_step_post_hooks[len(self._optimizer_step_post_hooks)] = hook

    def run_hooks(self) -> None:
        """Tell every hook that a step was taken."""
        for hook in [*self._optimizer_step_post_hooks.values(), *_global_optimizer_post_hooks.values()]:
            hook(self, (), {})


def watch(accelerator: Accelerator) -> None:
    """Let the engine's first step prove that its model runs in FP8. Repeating it does nothing."""
    if not accelerator._models:
        return
    if accelerator.fp8_engine_steps is None:
        accelerator.fp8_engine_steps = EngineSteps()
    preparation.watch_optimizer(accelerator._models, accelerator.fp8_engine_steps, accelerator.fp8_recipe)
    for engine in accelerator._models:
        _keep_scaling_in_checkpoints(engine)


def after_backward(accelerator: Accelerator) -> None:
    """After a backward whose gradients were reduced, let the ranks agree on scaling states, and run the step's hooks if
    the engine took a step (an overflow skips it)."""
    if not accelerator.sync_gradients:
        return
    engine = accelerator.deepspeed_engine_wrapped.engine
    agree_on_scaling(preparation.ScalingBuffers(prepared_roots(engine))(), engine.seq_data_parallel_group)
    if engine.was_step_applied():
        accelerator.fp8_engine_steps.run_hooks()


def _keep_scaling_in_checkpoints(engine: nn.Module) -> None:
    """Let the engine's own checkpoints, such as `transformers.Trainer` writes, hold the scaling state too, in the part
    that DeepSpeed leaves to its client. Inert inside `save_state` and `load_state`, which keep a file for each rank."""
    if "save_checkpoint" in engine.__dict__:
        return
    save, load = engine.save_checkpoint, engine.load_checkpoint

    @functools.wraps(save)
    def save_checkpoint(save_dir, tag=None, client_state=None, *args, **kwargs):
        client_state, state = dict(client_state or {}), collect([engine])
        if state.tensors and not hasattr(engine, IN_FILES):
            client_state[OPTIMIZER_KEY] = state._asdict()
        return save(save_dir, tag, client_state, *args, **kwargs)

    @functools.wraps(load)
    def load_checkpoint(load_dir, *args, **kwargs):
        path, client_state = load(load_dir, *args, **kwargs)
        if path is not None and not hasattr(engine, IN_FILES) and not kwargs.get("load_module_only"):
            saved = client_state.pop(OPTIMIZER_KEY, None)
            restore([engine], ScalingState.of(saved, str(path)), str(path))
        return path, client_state

    engine.save_checkpoint, engine.load_checkpoint = save_checkpoint, load_checkpoint
