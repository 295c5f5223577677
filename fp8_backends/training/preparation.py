"""Turn a model and a recipe into a model that trains in FP8, with the proof on its first optimizer step.

`prepare` and Accelerate's methods run the same phases: resolve the recipe, check, convert the layers, store their
weights, connect the ranks, watch the optimizer.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from ..comm import ddp, fsdp2, gathers
from ..compute import registry
from ..compute.expert_functions import is_expert_parallel
from ..compute.fields import flag, parsed
from ..errors import FP8BackendError
from ..numerics.modules import CONVERSION, check_is_module, plain_name
from ..numerics.scaled_tensor import ScaledTensor
from ..numerics.sharded_tensor import is_distributed
from ..recipes.handlers import Recipe, Spec, resolve
from ..recipes.strings import level_name
from ..states import checkpoint, gradient_release, levels, optimizers, original, scaled_states
from ..words import listed, shown
from . import conversion, fused_head, proof, quantized_layers, rules, saved_activations, scaling_state
from .auditing import check_is_optimizer, parameter_ids, parameters_of, unwrapped
from .conversion import PREPARED, Prepared, prepared_roots
from .watching import guard, monitor
from .weight_products import offloaded_modules

logger = logging.getLogger("fp8_backends")

Model = TypeVar("Model", bound=nn.Module)
Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer | None)


def prepare(model: Model, optimizer: Optimizer, spec: Spec = None) -> tuple[Model, Optimizer]:
    """Make `model` train in FP8, without Accelerate.

    Return the same two objects: layers are swapped in place and keep their Parameter objects, so the optimizer,
    schedulers, ties and frozen weights stay valid. Call it before or after the optimizer took steps, or on a model on
    the meta device.

    Args:
        model: any `nn.Module`.
        optimizer: trains the model's parameters; its first step prints the proof. None prepares only the model.
        spec: argument of `resolve`: a backend string such as `"native:delayed"`, a recipe, a dict; None picks for
            this machine.

    Returns:
        (model, optimizer)

    Raises:
        RecipeError: the string or a field cannot be honoured.
        BackendUnavailableError: the backend cannot run on this machine.
        FP8BackendError: the model cannot be converted, or is already prepared with another recipe.
    """
    recipe = resolve(spec)
    if recipe.implementation == "original":
        return original.initialize(model, optimizer, recipe)
    order = "; the order is prepare(model, optimizer, spec)"
    if optimizer is not None:
        check_is_optimizer(optimizer, hint=order)
    check_is_module(model, hint=order)
    rules.refuse(rules.Setup(recipe, rules.Machine.this()), rules.RELEASE_RULES)
    if optimizer is not None:  # before the model changes
        check_trains([model], [optimizer], recipe)
        check_optimizer(optimizer, recipe)
    prepare_model(model, recipe)
    if optimizer is not None:
        watch_optimizer(model, optimizer, recipe)
    return model, optimizer


def initialize(
    model: Model, optimizer: Optimizer, opt_level: str = "O1", use_te: bool = False
) -> tuple[Model, Optimizer]:
    """Call `prepare` with the signature of `msamp.initialize`, for scripts that move from MS-AMP.

    `use_te` selects TransformerEngine's products instead of native ones.
    """
    level = level_name(opt_level, f"opt_level={shown(opt_level)}")
    return prepare(model, optimizer, f"te+msamp:{level}" if parsed("use_te", flag, use_te) else f"msamp:{level}")


def prepare_model(model: nn.Module, recipe: Recipe) -> nn.Module:
    """Convert a model's layers in place for a resolved recipe, and return the model. Repeating it does nothing."""
    fsdp2.reshard(model)  # gathered weights are no Parameters
    check_model(model, recipe)
    compute = registry.get_compute(recipe.compute)
    if compute.takes_block_codes(recipe):
        quantized_layers.freeze_codes(model)
    prepared = conversion.convert(model, recipe, compute)
    quantized_layers.save_plain(model)
    root = conversion.unwrapped(model)
    store_weights(root, prepared)
    saved_activations.install(root, prepared)
    connect_ranks(model, recipe)
    return model


# Check


def check_machine(recipe: Recipe) -> None:
    """Refuse a recipe that cannot run on this machine.

    Raises:
        BackendUnavailableError: a library or a chip is missing, with the fix.
        RecipeError: `implementation="original"`, and the original MS-AMP cannot honour a field.
    """
    if recipe.implementation == "original":
        original.check(recipe)
    else:
        registry.check_available(recipe)


def check_model(model: nn.Module, recipe: Recipe) -> None:
    """Refuse a recipe that cannot run on this machine, or a model that this recipe cannot convert in its state."""
    registry.check_available(recipe)
    quantized_layers.check(model)
    if torch.is_inference_mode_enabled() or any(not is_lazy(p) and p.is_inference() for p in model.parameters()):
        raise FP8BackendError(
            "tensors of torch.inference_mode() can never train: build and prepare the model outside (it may run inside)"
        )
    check_sharing(model, rules.Setup(recipe, rules.Machine.this()))
    if recipe.level == "O0":
        return
    if any(not prepared_roots(wrapper.module) for wrapper in _ddp_wrappers(model)):
        reason = "stores the weights in another form, and DDP holds on to them as they were"
        order = "DistributedDataParallel(model), then prepare(ddp, optimizer, spec)"
    elif fsdp2.fsdp_modules(model) and not prepared_roots(model):
        reason = "stores the weights in another form, and FSDP2 has sharded them as they were"
        order = "fully_shard, then prepare(model, optimizer, spec)"
    else:
        return
    raise FP8BackendError(f"level {recipe.level} {reason}: prepare(model, None, spec) first, then {order}")


def check_sharing(model: nn.Module, setup: rules.Setup) -> None:
    """Raise `RecipeError` if ranks share layers of the model and this setup does not support it."""
    if (ranks := fsdp2.tensor_parallel_ranks(model)) > 1:
        holders = (module for module in model.modules() if any(map(is_distributed, module._parameters.values())))
        shared = replace(setup, tensor_parallel=ranks, experts_alone=all(map(is_expert_parallel, holders)))
        rules.refuse(shared, rules.TENSOR_PARALLEL_RULES)


def check_optimizer(optimizer: torch.optim.Optimizer, recipe: Recipe) -> None:
    """Refuse a recipe that cannot run on this machine, or an optimizer that `convert_optimizer` would refuse."""
    registry.check_available(recipe)
    if recipe.level != "O0":
        optimizers.check(unwrapped(optimizer), levels.state_rule(recipe))


def check_trains(models: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer], recipe: Recipe) -> None:
    """Refuse models that would not train: no optimizer holds their parameters, or one holds weights from before ranks
    shared them, or the weights are offloaded.

    Raises:
        FP8BackendError: the models would not train; a warning instead if the recipe's `on_unproven` is "warn".
    """
    models, optimizers = list(models), list(map(unwrapped, optimizers))
    stepped = {id(p) for optimizer in optimizers for p in getattr(optimizer, "state", ())}
    new = (p for model in models if not prepared_roots(model) for p in model.parameters())
    if recipe.scaling == "delayed" and any(id(p) in stepped for p in new):
        logger.warning(
            "%s: the optimizer has stepped already, and delayed scales begin at 1. To resume a run, prepare model and "
            "optimizer first, then load their state dicts",
            recipe.name,
        )
    held = {id(p): p for optimizer in optimizers for p in parameters_of(optimizer)}
    message = _offloaded_in_training(models) or _unknown_to(held, models) or _shared_after(held, models)
    if message is not None:
        proof.refuse_unproven(message, recipe)


def _offloaded_in_training(models: list[nn.Module]) -> str | None:
    for model in models:
        offloaded = offloaded_modules(model)
        for name, module in model.named_modules() if offloaded else ():
            if id(module) in offloaded and any(p.requires_grad for p in module.parameters(recurse=False)):
                return (
                    f"{plain_name(name) or type(module).__name__} is offloaded (cpu_offload, disk_offload, or a "
                    "device_map), so it would not train: Accelerate's hooks drop its copy after each forward. "
                    "Freeze it, or call accelerate.hooks.remove_hook_from_module(model, recurse=True)"
                )
    return None


def _unknown_to(held: dict[int, torch.Tensor], models: list[nn.Module]) -> str | None:
    if any(id(parameter) in held for model in models for parameter in model.parameters()):
        return None
    names = ", ".join(dict.fromkeys(type(conversion.unwrapped(model)).__name__ for model in models))
    return (
        f"the optimizer holds no parameter of the prepared model ({names}), so the model would not train: make it from "
        "this model's parameters()"
    )


def _shared_after(held: dict[int, torch.Tensor], models: list[nn.Module]) -> str | None:
    parameters = {id(p): (name, p) for model in models for name, p in model.named_parameters()}
    former = {p.shape for key, p in held.items() if key not in parameters and not is_distributed(p)}
    names = [
        plain_name(name)
        for key, (name, p) in parameters.items()
        if is_distributed(p) and p.requires_grad and key not in held and p.shape in former
    ]
    if not names:
        return None
    return (
        f"the optimizer was made before ranks shared {listed(names)}, so these would not train: make it after "
        "parallelize_module"
    )


# Store


def store_weights(root: nn.Module, prepared: Prepared) -> None:
    """Store the weights of converted layers in the form of the backend and the level, and hide them from DDP."""
    layers = prepared.compute.converted_layers(root)
    prepared.compute.store_weights(root, prepared.recipe)
    if prepared.recipe.level != "O0":
        levels.store_weights(layers, prepared.recipe.level, by_fsdp2=bool(fsdp2.fsdp_modules(root)))
        levels.export_ties(root)
        for layer in layers.values():
            undo = layer.__dict__[CONVERSION].undo
            if levels.make_plain not in undo:
                undo.append(levels.make_plain)
    ddp.ignore(root)
    prepared.undo += [undo for undo in (ddp.forget, levels.forget_ties) if undo not in prepared.undo]


def keep_weight_casts(model: nn.Module, keep: bool = True) -> None:
    """Cast each weight to FP8 once per optimizer step, not in each forward of an accumulated step. Results are
    bit-identical.

    An optimizer step watched by `prepare` discards the codes, and so does any other change of the weight except a
    write through `weight.data` between two microbatches. Codes take one byte an element; rules with one scale a tensor
    hold them until backward anyway. `native:delayed` (its scales move with every forward), other backends and compiled
    code ignore the setting. An `Accelerator` with `gradient_accumulation_steps` above 1 turns it on automatically if
    weights are whole on every rank.

    Args:
        model: prepared, or holds prepared models.
        keep: False turns it off again.

    Raises:
        FP8BackendError: nothing is prepared, or weights are sharded: they are gathered for each forward, and their
            codes would take the memory that sharding saves.
    """
    check_is_module(model)
    roots = prepared_roots(model)
    if not roots:
        raise FP8BackendError("no model here is prepared: fp8_backends.prepare(model, optimizer, spec) comes first")
    if keep and any(is_distributed(p) or hasattr(p, "ds_id") for p in model.parameters()):
        raise FP8BackendError(
            "weights are sharded (FSDP2 or DeepSpeed ZeRO-3), and codes would take the memory that sharding saves: "
            "leave keep_weight_casts out"
        )
    for _, root, prepared in roots:
        prepared.compute.keep_weight_casts(root, keep)


# Connect ranks


def connect_ranks(model: nn.Module, recipe: Recipe) -> None:
    """Reduce the gradients of a prepared model as its recipe says, inside `DistributedDataParallel` or `fully_shard`,
    and make ranks that share its layers agree on scaling states. Every rank calls it; repeating it does nothing.

    Raises:
        FP8BackendError: it was wrapped before it was prepared, or FP8 does not support the named wrapper.
    """
    for wrapper in _ddp_wrappers(model):
        if roots := prepared_roots(wrapper.module):
            for _, _, prepared in roots:
                prepared.observed.wrapper = weakref.ref(wrapper)
            ddp.connect(wrapper, recipe.comm, levels.swap_gradient_hook, ScalingBuffers(roots))
    roots = prepared_roots(model)
    if fsdp2.fsdp_modules(model):
        for _, root, prepared in roots:
            prepared.compute.keep_weight_casts(root, False)
            fused_head.make_ordinary(root)
        fsdp2.connect(model, recipe.comm, ScalingBuffers(roots))
        levels.watch_shards(model)
        travelling: dict[gathers.Place, gathers.Travelling] = {}
        for _, root, prepared in roots:
            travelling |= prepared.compute.travelling(root, prepared.recipe)
        gathers.connect(model, travelling)
    elif fsdp2.tensor_parallel_ranks(model) > 1:
        fsdp2.agree(model, ScalingBuffers(roots))
        levels.expect_equal_gradients(model)


class ScalingBuffers:
    """Return the live scaling states of prepared roots, in a fixed order, when called. Copied with the model."""

    def __init__(self, roots: list[tuple[str, nn.Module, Prepared]]) -> None:
        self.roots = [(root, prepared.compute) for _, root, prepared in roots]

    def __call__(self) -> list[torch.Tensor]:
        return [state for root, compute in self.roots for state in compute.scaling_buffers(root)]


def _ddp_wrappers(model: nn.Module) -> list[DistributedDataParallel]:
    return [module for module in model.modules() if isinstance(module, DistributedDataParallel)]


# Watch the optimizer


def convert_optimizer(optimizer: torch.optim.Optimizer, recipe: Recipe) -> None:
    """Make an optimizer train the weights that a level stores. Nothing to do at O0, or if repeated.

    Raises:
        FP8BackendError: levels do not support this class, or it has an option without a scaled form.
    """
    if recipe.level != "O0":
        optimizers.convert(unwrapped(optimizer), levels.state_rule(recipe))


def watch_optimizer(models: nn.Module | Iterable[nn.Module], optimizer: torch.optim.Optimizer, recipe: Recipe) -> None:
    """Print the proof at the optimizer's first step, for the prepared models whose parameters it holds.

    `optimizer` may be wrapped (Accelerate's `AcceleratedOptimizer`). Repeating it does nothing. `recipe` is the
    models' recipe; each prepared model carries its own.
    """
    models = [models] if isinstance(models, nn.Module) else list(models)
    inner = unwrapped(optimizer)
    convert_optimizer(inner, recipe)
    if recipe.shares_states:
        _share_out_states(inner)
    if recipe.gradient_release:
        # Accelerate lists models without their DDP
        references = [prepared.observed.wrapper for model in models for _, _, prepared in prepared_roots(model)]
        wrappers = [wrapper for reference in references if reference is not None and (wrapper := reference())]
        by_ddp = {id(p) for wrapper in wrappers for p in wrapper._module_parameters}
        gradient_release.release_gradients(inner, (p for p in parameters_of(inner) if id(p) not in by_ddp))
    guard.watch(models, inner, recipe)
    proof.watch(models, optimizer)
    monitor.watch(models, inner, recipe)
    if (after_step := _after_step(inner)) is None:
        inner.register_step_post_hook(after_step := AfterStep())
        scaling_state.StateDictHooks(inner, after_step.modules_of)
    after_step.add(models)
    ddp.follow(inner)


def _share_out_states(optimizer: torch.optim.Optimizer) -> None:
    """Assign the optimizer states of each weight, and its master or residual, to one rank of its DDP. Every rank calls
    it, after `connect_ranks`."""
    scaled = [p for p in parameters_of(optimizer) if isinstance(p, ScaledTensor)]
    weights = [p for p in scaled if ddp.connection_of(p) is not None]
    connection = ddp.connection_of(weights[0]) if weights else None
    if optimizer.fp8_owners is None and connection is not None and connection.group.size() > 1:
        optimizer.fp8_owners = connection.owners = ddp.SharedOut(weights, connection.group)
        optimizer.register_step_pre_hook(connection.owners.refuse_local_step)
        optimizer.forget_others()


def finish_accumulation(model: nn.Module) -> None:
    """Cast the weight gradients that microbatches accumulated in high precision."""
    levels.finish_accumulation(model.parameters())


NO_OPTIMIZER = (
    "added after the model was prepared, in no prepared optimizer, and so not trained: call "
    "optimizer.add_param_group, or make the optimizer and prepare both when the model is complete"
)
"""Warning about trainable parameters that a step left unchanged."""


class AfterStep:
    """Run after each optimizer step: notify the backends, and warn about layers added after `prepare` and parameters
    that no optimizer trains."""

    def __init__(self) -> None:
        self.modules_of: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        """The last `_identity` of each prepared root."""

    def add(self, models: list[nn.Module]) -> None:
        for _, root, prepared in (entry for model in models for entry in prepared_roots(model)):
            self.modules_of.setdefault(root, _identity(root))
            left_out, observed = _left_out(root, prepared), prepared.observed
            observed.left_out = left_out if observed.left_out is None else observed.left_out & left_out

    def __call__(self, optimizer: torch.optim.Optimizer, args, kwargs) -> None:
        for root, identity in list(self.modules_of.items()):
            prepared = root.__dict__.get(PREPARED)
            if not prepared:
                continue
            prepared.compute.after_optimizer_step(root)
            if not torch.compiler.is_compiling() and identity != (now := _identity(root)):
                self.modules_of[root] = now
                if added := conversion.update_report(root, prepared):
                    logger.warning("%s: %s: %s", prepared.recipe.name, listed(added), conversion.ADDED)
                left_out = prepared.observed.left_out
                if new := sorted(_left_out(root, prepared) - left_out):
                    left_out.update(new)
                    logger.warning("%s: %s: %s", prepared.recipe.name, listed(new), NO_OPTIMIZER)


def _after_step(optimizer: torch.optim.Optimizer) -> AfterStep | None:
    return next((hook for hook in optimizer._optimizer_step_post_hooks.values() if isinstance(hook, AfterStep)), None)


def is_proven(optimizer: torch.optim.Optimizer) -> bool | None:
    """Return True if a model of this optimizer is proven; None without a prepared model."""
    if (after_step := _after_step(optimizer)) is None:
        return True if type(optimizer).__module__.startswith("msamp") else None  # MS-AMP proves nothing
    records = [root.__dict__.get(PREPARED) for root in after_step.modules_of]
    return any(prepared and prepared.observed.proven for prepared in records)


def _left_out(root: nn.Module, prepared: Prepared) -> set[str]:
    """Return the names of trainable parameters that no optimizer of this root holds."""
    held = set().union(*map(parameter_ids, prepared.observed.optimizers()))
    return {plain_name(name) for name, p in root.named_parameters() if p.requires_grad and id(p) not in held}


def _identity(root: nn.Module) -> int:
    """Return a number that changes if modules are added, swapped or removed. Cheap: every step needs it."""
    identity, modules = 0, [root]
    while modules:
        module = modules.pop()
        identity += id(module)
        if module is not None and module._modules:
            modules += module._modules.values()
    return identity


# Checkpoints of states shared out between ranks


def whole_states(
    optimizer: torch.optim.Optimizer, receives: bool = True, moments: bool = True
) -> AbstractContextManager[None]:
    """Gather masters, residuals and optimizer states at levels O3 and O4 for as long as a checkpoint is written on
    several ranks: inside, `state_dict()` of model and optimizer holds them bit-exactly.

    All ranks enter and leave it. Optimizers without a level are left unchanged. Load a checkpoint without it: every
    rank loads the whole, and keeps its own part.

    Args:
        receives: gather on this rank: up to 5 bytes an element on the CPU, and 12 more in the optimizer's
            `state_dict()`. On other ranks `state_dict()` has placeholders on the meta device for this rank's scaled
            states and for weights of other ranks, whose states are left out.
        moments: False for weights only, 2 bytes an element at most.
    """
    check_is_optimizer(optimizer)
    inner = unwrapped(optimizer)
    is_scaled = isinstance(inner, scaled_states.ScaledStates)
    return checkpoint.whole_states(inner, receives, moments) if is_scaled else contextlib.nullcontext()


def unread_states(optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
    """Give placeholders from `state_dict()` while a checkpoint is loaded and states are shared out: some loaders read
    its names and shapes."""
    inner = unwrapped(optimizer)
    is_scaled = isinstance(inner, scaled_states.ScaledStates)
    return checkpoint.unread_states(inner) if is_scaled else contextlib.nullcontext()
