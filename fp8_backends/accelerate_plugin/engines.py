"""Adapt Accelerate to its engines: FSDP2, tensor parallelism and DeepSpeed. Describe a set-up for
the rules."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import (
    DDPCommunicationHookType,
    DeepSpeedPlugin,
    DistributedType,
    DynamoBackend,
)
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils._pytree import tree_map

from ..checkpoints.scaling_state import IN_FILES, OPTIMIZER_KEY, ScalingState, collect, restore
from ..comm.backward import agree_on_scaling
from ..comm.ddp import Connection
from ..convert.conversion import prepared_roots
from ..errors import FP8BackendError
from ..preparation import has_stored_weights, optimizer_steps, ranks
from ..recipes.handlers import Recipe
from ..rules import Machine, Parallel, Setup
from ..states.sharding import shard_of
from ..tensors.parameter_swap import swap
from ..tensors.scaled_tensor import ScaledTensor, dequantize_shards
from ..tensors.sharded_tensor import inner_tensors, is_distributed, local_part, with_local
from ..torch_tools.modules import plain_name
from ..torch_tools.optimizers import parameters_by_key
from ..words import counted
from .callers import ENGINES, asks_for, running_trainer


def setup_of(accelerator: Accelerator) -> Setup:
    """Describe the recipe of an Accelerator with its machine and engine, without a model."""
    engine = accelerator.distributed_type
    state = accelerator.state
    parallel: Parallel | None = "ddp" if wraps_in_ddp(accelerator) else None
    known: dict[str, Any] = {}
    if engine == DistributedType.MEGATRON_LM:
        parallel = "megatron"
    elif engine == DistributedType.FSDP:
        parallel = "fsdp2" if accelerator.is_fsdp2 else "fsdp1"
        known["activation_checkpointing"] = state.fsdp_plugin.activation_checkpointing or None
        known["cpu_ram_efficient_loading"] = state.fsdp_plugin.cpu_ram_efficient_loading
    elif engine == DistributedType.DEEPSPEED:
        parallel = "deepspeed"
        plugin = state.deepspeed_plugin
        sections = [plugin.deepspeed_config.get(name) for name in ("bf16", "torch_autocast")]
        known["zero_stage"] = max(plugin.hf_ds_config._stage, 0)
        known["zero_offload"] = plugin.hf_ds_config.is_offload()
        known["engine_bf16"] = any(
            isinstance(section, dict) and str(section.get("enabled")).lower() == "true"
            for section in sections
        )
    if state.dynamo_plugin.backend != DynamoBackend.NO:
        is_regional = state.dynamo_plugin.use_regional_compilation
        known["compiled"] = "regional" if is_regional else "full"
    if accelerator.parallelism_config:
        known["tensor_parallel"] = accelerator.parallelism_config.tp_size
    hook = getattr(accelerator.ddp_handler, "comm_hook", DDPCommunicationHookType.NO)
    if hook != DDPCommunicationHookType.NO:
        known["comm_hook"] = str(getattr(hook, "value", hook))
    others = (name for name in filter(asks_for, ENGINES) if name.upper() != engine.value)
    arguments = getattr(running_trainer(), "args", None)
    return Setup(
        accelerator.fp8_recipe,
        Machine.this(),
        parallel,
        world_size=accelerator.num_processes,
        unused_engine=next(others, None),
        accumulation_steps=getattr(
            arguments, "gradient_accumulation_steps", accelerator.gradient_accumulation_steps
        ),
        max_grad_norm=getattr(arguments, "max_grad_norm", None),
        **known,
    )


def wraps_in_ddp(accelerator: Accelerator) -> bool:
    """Return True if Accelerate wraps models in DDP."""
    is_parallel = accelerator.use_distributed and str(
        accelerator.distributed_type.value
    ).startswith("MULTI_")
    return is_parallel and not shares_layers(accelerator)


def wrap_local_sgd() -> None:
    """Let `LocalSGD` keep whole states under DDP, where it steps without a reduction, on all
    ranks."""
    from accelerate.local_sgd import LocalSGD  # `import accelerate` loads no such module

    enter = LocalSGD.__enter__
    if hasattr(enter, "__wrapped__"):
        return

    @functools.wraps(enter)
    def keep_and_enter(self):
        connection = Connection.find(self.model) if self.enabled else None
        if connection is not None:
            connection.keep_whole_states("LocalSGD steps on each rank's own gradients")
        return enter(self)

    LocalSGD.__enter__ = keep_and_enter


# FSDP2. After sharding has swapped an optimizer's parameters, stock Accelerate finds them again by
# data address. Wrapper tensors (`ScaledTensor`, TorchAO's weights) have no address and would all
# become the same parameter, so this file finds them by name, and shards the states of an optimizer
# that has stepped.


@torch.no_grad()
def upcast(model: nn.Module) -> None:
    """Cast trainable parameters to FP32, as Accelerate does later, without knowing all formats of
    stored weights."""
    for name, parameter in model.named_parameters():
        if (
            parameter.requires_grad
            and parameter.dtype != torch.float32
            and parameter.dtype.is_floating_point
        ):
            if isinstance(parameter, ScaledTensor):
                swap(parameter, parameter.to(torch.float32).detach(), name)
            else:
                parameter.data = parameter.data.to(torch.float32)


@contextlib.contextmanager
def optimizers_follow_by_name(
    models: list[nn.Module], optimizers: list[torch.optim.Optimizer]
) -> Iterator[None]:
    """Take the parameters out of optimizers; afterwards insert the sharded model's by name, and
    shard the states."""
    if not models:
        yield
        return
    # the model object stays, in whatever wrapper; nothing here may keep its parameters alive
    (model,) = models
    detached = [_Detached(optimizer, model) for optimizer in optimizers]
    try:
        yield
    finally:
        by_name = {
            plain_name(name): p for name, p in model.named_parameters(remove_duplicate=False)
        }
        for held in detached:
            for group, names in zip(held.optimizer.param_groups, held.names, strict=True):
                group["params"] = [by_name[name] for name in names]
    for held in detached:
        held.shard_states()


class _Detached:
    """An optimizer without its parameters, which are known by name, and without its states."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        names = {id(p): plain_name(name) for name, p in model.named_parameters()}
        foreign = sum(
            id(p) not in names for group in optimizer.param_groups for p in group["params"]
        )
        if foreign:
            raise FP8BackendError(
                f"the optimizer holds {counted(foreign, 'parameter')} that the model prepared with "
                "it does not have: FSDP2 shards one model, and an optimizer of it can hold no "
                "others"
            )
        self.optimizer = optimizer
        self.names = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        self.states: dict[str, dict[str, Any]] = {
            names[id(p)]: state for p, state in optimizer.state.items() if state
        }
        optimizer.state.clear()
        for group in optimizer.param_groups:
            group["params"] = []

    def shard_states(self) -> None:
        """Load the states with the optimizer's own `load_state_dict`, which converts them to the
        format of weights."""
        if not self.states:
            return
        state_dict = self.optimizer.state_dict()
        names = [name for group in self.names for name in group]
        for name, (key, p) in zip(
            names, parameters_by_key(self.optimizer, state_dict).items(), strict=True
        ):
            if name in self.states:
                state_dict["state"][key] = {
                    part: _shard(value, p) for part, value in self.states.pop(name).items()
                }
        self.optimizer.load_state_dict(state_dict)


@contextlib.contextmanager
def frozen_codes_kept(accelerator: Accelerator, models: list[nn.Module]) -> Iterator[None]:
    """Shard a frozen base in FP8 or FP4 as it is. Stock Accelerate makes a state dict, of plain
    values, and for efficient loading fills a model on the meta device from it; here the first
    rank's bytes replace those of the other ranks, a tensor at a time, before FSDP2 shards them."""
    plugin = accelerator.state.fsdp_plugin
    is_efficient = plugin.cpu_ram_efficient_loading
    if accelerator.fp8_recipe.level != "O0" or not any(map(has_stored_weights, models)):
        yield
        return
    (model,) = models
    if is_efficient:
        for part in itertools.chain.from_iterable(map(inner_tensors, model.parameters())):
            memory = part.detach().view(-1).view(torch.uint8)
            message = memory.to(accelerator.device)
            dist.broadcast(message, 0)
            memory.copy_(message)
    plugin.cpu_ram_efficient_loading = False
    model.state_dict = lambda *args, **kwargs: {}
    try:
        yield
    finally:
        del model.state_dict
        plugin.cpu_ram_efficient_loading = is_efficient


def _shard(value: Any, parameter: torch.Tensor) -> Any:
    """Distribute a state of the parameter's shape with the parameter's placements; return any other
    as it is."""
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape or not value.dim():
        return value
    from torch.distributed.tensor import distribute_tensor

    if is_distributed(value):  # by tensor parallelism
        value = dequantize_shards(value).full_tensor()
    value = value.exact() if isinstance(value, ScaledTensor) else value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements)


# Tensor parallelism without FSDP2. Stock Accelerate writes the files of rank 0, with its part of
# each shared layer. Here all ranks gather DTensors for a file, and take their part when they load
# it: M ranks load files of N ranks.


def shares_layers(accelerator: Accelerator) -> bool:
    """Return True if ranks share layers and FSDP2, which has its own state dicts, does not shard
    them."""
    parallelism = accelerator.parallelism_config
    return parallelism is not None and parallelism.tp_enabled and not accelerator.is_fsdp2


def whole(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Gather the DTensors of a state dict as plain CPU tensors; tied ones stay tied. All ranks call
    it."""
    gathered: dict[tuple[int, Any], torch.Tensor] = {}

    def gather(value: Any) -> Any:
        if not is_distributed(value):
            return value
        plain = dequantize_shards(value)
        key = (local_part(plain).data_ptr(), plain.shape)
        if key not in gathered:
            gathered[key] = plain.full_tensor().cpu()
        return gathered[key]

    return tree_map(gather, state_dict)


@contextlib.contextmanager
def whole_files(accelerator: Accelerator) -> Iterator[None]:
    """Around stock `save_state` and `load_state`, let optimizers and models save and load whole
    tensors."""
    if not shares_layers(accelerator):
        yield
        return
    optimizers = list(accelerator._optimizers)
    accelerator._optimizers[:] = map(_WholeStates, optimizers)
    handles = [
        model.register_load_state_dict_pre_hook(_take_parts) for model in accelerator._models
    ]
    handles += [
        model.register_state_dict_post_hook(lambda _, states, *__: states.update(whole(states)))
        for model in accelerator._models
    ]
    try:
        yield
    finally:
        accelerator._optimizers[:] = optimizers
        for handle in handles:
            handle.remove()


class _WholeStates:
    """Stands for an optimizer while its state dict is saved or loaded."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return whole(self.optimizer.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        states = dict(state_dict["state"])
        for key, p in parameters_by_key(self.optimizer, state_dict).items():
            states[key] = {name: _part(value, p) for name, value in states.get(key, {}).items()}
        self.optimizer.load_state_dict(
            {**state_dict, "state": {key: state for key, state in states.items() if state}}
        )


def _take_parts(model: nn.Module, state_dict: dict[str, Any], prefix: str, *_) -> None:
    """Load hook of a model: replace whole weights by this rank's DTensors."""
    for name, p in model.named_parameters(prefix=prefix.removesuffix("."), remove_duplicate=False):
        if name in state_dict:
            state_dict[name] = _part(state_dict[name], p)


def _part(value: Any, p: torch.Tensor) -> Any:
    """Distribute a whole tensor of the shape of the DTensor `p` as `p` is; return anything else as
    it is."""
    if (
        not is_distributed(p)
        or is_distributed(value)
        or getattr(value, "shape", None) != p.shape
        or not p.dim()
    ):
        return value
    return with_local(p, shard_of(p, value))


# DeepSpeed. At O0 its engine owns the steps, the precision around FP8 and the communication.
# Weights and optimizer states are in its flat ZeRO partitions, and its optimizers call the torch
# optimizer once for each group of parameters, if at all. So a step is observed after Accelerate's
# synchronised backward, which takes it. At a level the engine runs at stage 0 with a torch
# optimizer, and `comm.deepspeed` connects it.


def uses_deepspeed(accelerator: Accelerator) -> bool:
    return accelerator.distributed_type == DistributedType.DEEPSPEED


def uses_zero(accelerator: Accelerator) -> bool:
    """Return True if DeepSpeed's engine owns weights, states and steps."""
    return uses_deepspeed(accelerator) and accelerator.fp8_recipe.level == "O0"


def is_at_stage_0(accelerator: Accelerator) -> bool:
    """Return True if DeepSpeed's engine leaves weights and states to a level."""
    return uses_deepspeed(accelerator) and not uses_zero(accelerator)


MSAMP = "msamp"
"""Section of a DeepSpeed configuration: `enabled` and `opt_level`, as in MS-AMP's fork."""


def asked_by_deepspeed(arguments: Mapping[str, Any]) -> str | None:
    """Return the backend string of a `DeepSpeedPlugin` with `enable_msamp`, or of its
    configuration; else None."""
    plugins = arguments.get("deepspeed_plugins") or arguments.get("deepspeed_plugin")
    plugin = next(iter(plugins.values()), None) if isinstance(plugins, dict) else plugins
    section = getattr(plugin, "deepspeed_config", {}).get(MSAMP) or {}
    return f"msamp:{section.get('opt_level', 'O1')}" if section.get("enabled") else None


def with_zero_states(recipe: Recipe, accelerator: Accelerator) -> Recipe:
    """Shard the states of a level as ZeRO-1 and 2 promise, unless the recipe says otherwise."""
    plugin = accelerator.state.deepspeed_plugin
    if not uses_deepspeed(accelerator) or recipe.level == "O0" or recipe.shard_states is not None:
        return recipe
    return recipe.replace(shard_states=True) if plugin.hf_ds_config._stage in (1, 2) else recipe


@contextlib.contextmanager
def engine_at_stage_0(plugin: DeepSpeedPlugin) -> Iterator[None]:
    """Configure an engine that leaves weights, states and precision to a level, with an optimizer
    of PyTorch."""
    config = plugin.deepspeed_config
    given = dict(plugin.deepspeed_config)
    new = {
        "zero_optimization": {"stage": 0},
        "bf16": {"enabled": False},
        "fp16": {"enabled": False},
        MSAMP: {},
    }
    optimizer = config.get("optimizer")
    if optimizer and str(optimizer.get("type")).lower() in ("adam", "adamw"):
        new["optimizer"] = optimizer | {
            "params": optimizer.get("params", {}) | {"torch_adam": True}
        }
    config |= new
    try:
        yield
    finally:
        for name in new:
            config.pop(name)
        config |= {name: given[name] for name in new.keys() & given.keys()}


class EngineSteps:
    """Steps of a DeepSpeed engine, with the step hooks of a torch optimizer and no parameters."""

    def __init__(self) -> None:
        self._optimizer_step_post_hooks: dict[int, Callable] = {}
        self.param_groups: list[dict] = []
        self.state: dict = {}

    def register_step_post_hook(self, hook: Callable) -> None:
        self._optimizer_step_post_hooks[len(self._optimizer_step_post_hooks)] = hook


def run_post_hooks(optimizer: Any) -> None:
    """Run the step post-hooks of an optimizer whose `step` was not called."""
    for hook in [
        *optimizer._optimizer_step_post_hooks.values(),
        *_global_optimizer_post_hooks.values(),
    ]:
        hook(optimizer, (), {})


def watch_engine(accelerator: Accelerator) -> None:
    """Let the engine's first step prove that its model runs in FP8. Repeating it does nothing."""
    if not accelerator._models:
        return
    if accelerator.fp8_engine_steps is None:
        accelerator.fp8_engine_steps = EngineSteps()
    optimizer_steps.watch_optimizer(
        accelerator._models,
        accelerator.fp8_engine_steps,
        accelerator.fp8_recipe,
        accelerator.fp8_log_sample,
    )
    for engine in accelerator._models:
        _keep_scaling_in_checkpoints(engine)


def after_engine_backward(accelerator: Accelerator) -> None:
    """Let ranks agree on scaling states, and run the hooks of a step, which the engine skips after
    an overflow."""
    if not accelerator.sync_gradients:
        return
    engine = accelerator.deepspeed_engine_wrapped.engine
    agree_on_scaling(ranks.scaling_buffers(prepared_roots(engine)), engine.seq_data_parallel_group)
    if engine.was_step_applied():
        run_post_hooks(accelerator.fp8_engine_steps)


def _keep_scaling_in_checkpoints(engine: nn.Module) -> None:
    """Save scaling states in the client state of the engine's own checkpoints; `save_state` has
    files of its own."""
    if "save_checkpoint" in engine.__dict__:
        return
    save = engine.save_checkpoint
    load = engine.load_checkpoint

    @functools.wraps(save)
    def save_checkpoint(save_dir, tag=None, client_state=None, *args, **kwargs):
        client_state = dict(client_state or {})
        state = collect([engine])
        if (state.tensors or state.steps) and not hasattr(engine, IN_FILES):
            client_state[OPTIMIZER_KEY] = state._asdict()
        return save(save_dir, tag, client_state, *args, **kwargs)

    @functools.wraps(load)
    def load_checkpoint(load_dir, *args, **kwargs):
        path, client_state = load(load_dir, *args, **kwargs)
        if (
            path is not None
            and not hasattr(engine, IN_FILES)
            and not kwargs.get("load_module_only")
        ):
            saved = client_state.pop(OPTIMIZER_KEY, None)
            restore([engine], ScalingState.of(saved, str(path)), str(path))
        return path, client_state

    engine.save_checkpoint = save_checkpoint
    engine.load_checkpoint = load_checkpoint
