"""Refuse machines, models and optimizers that a recipe cannot train, before anything changes."""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from .. import rules
from ..announcement import logger
from ..comm import ddp, fsdp2
from ..compute import registry
from ..compute.registry import compute_of
from ..convert import conversion, features, quantized_layers
from ..convert.conversion import prepared_roots
from ..convert.weight_products import offloaded_modules
from ..errors import FP8BackendError
from ..evidence import proof
from ..recipes.handlers import Recipe
from ..states import levels, optimizers, original
from ..tensors.sharded_tensor import is_distributed
from ..torch_tools.modules import has_ranks, is_trained, plain_name
from ..torch_tools.optimizers import parameters_of, unwrapped
from ..words import listed


def check_machine(recipe: Recipe) -> None:
    """Raise `BackendUnavailableError` or `RecipeError` for a recipe that cannot run here."""
    if recipe.implementation == "original":
        original.check(recipe)
    else:
        registry.check_available(recipe)


def check_model(model: nn.Module, recipe: Recipe, has_codes: bool) -> None:
    """Refuse a recipe that cannot run on this machine, or a model that this recipe cannot convert
    in its state. `has_codes`: the result of `may_hold_codes`."""
    check_machine(recipe)
    if schedule := features.wanted("schedule", recipe):
        schedule.check_share(recipe)
    if has_codes:
        quantized_layers.check(model, recipe, compute_of(recipe))
    if torch.is_inference_mode_enabled() or any(
        not is_lazy(p) and p.is_inference() for p in model.parameters()
    ):
        raise FP8BackendError(
            "tensors of torch.inference_mode() can never train: build and prepare the model "
            "outside (it may run inside)"
        )
    if not has_ranks():
        return
    check_sharing(model, rules.Setup(recipe, rules.Machine.this()))
    if recipe.level == "O0":
        return
    if any(not prepared_roots(wrapper.module) for wrapper in ddp.wrappers(model)):
        reason = "stores the weights in another form, and DDP holds on to them as they were"
        order = "DistributedDataParallel(model), then prepare(ddp, optimizer, spec)"
    elif fsdp2.fsdp_modules(model) and not prepared_roots(model):
        reason = "stores the weights in another form, and FSDP2 has sharded them as they were"
        order = "fully_shard, then prepare(model, optimizer, spec)"
    else:
        return
    raise FP8BackendError(
        f"level {recipe.level} {reason}: prepare(model, None, spec) first, then {order}"
    )


def check_sharing(model: nn.Module, setup: rules.Setup) -> None:
    """Raise `RecipeError` if ranks share layers of the model and this setup does not support it."""
    if (ranks := fsdp2.ranks_sharing_layers(model)) > 1:
        from ..compute.experts import is_expert_parallel

        holders = (
            module
            for module in model.modules()
            if any(map(is_distributed, module._parameters.values()))
        )
        whole_layers = all(map(is_expert_parallel, holders))
        shared = replace(setup, tensor_parallel=ranks, whole_layers=whole_layers)
        rules.refuse(shared, rules.TENSOR_PARALLEL_RULES)


def check_optimizer(optimizer: torch.optim.Optimizer, recipe: Recipe) -> None:
    """Refuse an optimizer that `convert_optimizer` would refuse."""
    if recipe.level != "O0":
        optimizers.check(unwrapped(optimizer), levels.state_rule(recipe))
    if offload := features.wanted("offload", recipe):
        offload.check(unwrapped(optimizer))


def check_trains(
    models: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer], recipe: Recipe
) -> None:
    """Raise `FP8BackendError` (or warn, by `on_unproven`) for models that would not train: no
    optimizer holds their parameters, or one holds weights from before ranks shared them, or the
    weights are offloaded."""
    models = list(models)
    optimizers = list(map(unwrapped, optimizers))
    stepped = {id(p) for optimizer in optimizers for p in getattr(optimizer, "state", ())}
    is_delayed = any(each.scaling == "delayed" for each in recipe.recipes)
    new = (model for model in models if is_delayed and not prepared_roots(model))
    if any(id(p) in stepped for model in new for p in model.parameters()):
        logger.warning(
            "%s: the optimizer has stepped already, and delayed scales begin at 1. To resume a "
            "run, prepare model and optimizer first, then load their state dicts",
            recipe.name,
        )
    held = {id(p): p for optimizer in optimizers for p in parameters_of(optimizer)}
    message = None
    if any("_hf_hook" in module.__dict__ for model in models for module in model.modules()):
        message = _offloaded_in_training(models)
    if message is None and not any(is_trained(model, held) for model in models):
        kinds = dict.fromkeys(type(conversion.unwrapped(model)).__name__ for model in models)
        message = (
            f"the optimizer holds no parameter of the prepared model ({', '.join(kinds)}), so the "
            "model would not train: make it from this model's parameters()"
        )
    if message is None and has_ranks():
        message = _shared_after(held, models)
    if message is not None:
        proof.refuse_unproven(message, recipe)


def _offloaded_in_training(models: list[nn.Module]) -> str | None:
    for model in models:
        offloaded = offloaded_modules(model)
        for name, module in model.named_modules() if offloaded else ():
            if id(module) in offloaded and any(
                p.requires_grad for p in module.parameters(recurse=False)
            ):
                return (
                    f"{plain_name(name) or type(module).__name__} is offloaded (cpu_offload, "
                    "disk_offload, or a device_map), so it would not train: Accelerate's hooks "
                    "drop its copy after each forward. Freeze it, or call "
                    "accelerate.hooks.remove_hook_from_module(model, recurse=True)"
                )
    return None


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
        f"the optimizer was made before ranks shared {listed(names)}, so these would not train: "
        "make it after parallelize_module"
    )
