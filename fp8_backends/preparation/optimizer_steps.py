"""Follow the steps of an optimizer that trains prepared models."""

import weakref
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from ..announcement import logger
from ..checkpoints import scaling_state
from ..comm import ddp
from ..convert import conversion, features
from ..convert.conversion import PREPARED, Prepared, Root, prepared_roots
from ..evidence import proof
from ..recipes.handlers import Recipe
from ..states import gradient_release, levels, optimizers
from ..torch_tools.modules import has_ranks, plain_name
from ..torch_tools.optimizers import parameter_ids, parameters_of, unwrapped
from ..words import listed


def convert_optimizer(optimizer: torch.optim.Optimizer, recipe: Recipe) -> None:
    """Make an optimizer train the weights that a level stores. Nothing to do at O0, or if repeated.
    Raises `FP8BackendError` for an unsupported class, or an option without a scaled form."""
    if recipe.level != "O0":
        optimizers.convert(unwrapped(optimizer), levels.state_rule(recipe))


def watch_optimizer(
    models: list[nn.Module],
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    report: Callable[[dict[str, float], int], None] | None = None,
) -> None:
    """Print the proof at the optimizer's first step, for the prepared models whose parameters it
    holds.

    `optimizer` may be wrapped (Accelerate's `AcceleratedOptimizer`). Repeating it does nothing.
    `recipe` is the models' recipe; each prepared model carries its own. `report` is called with the
    summary and the step of each sample (`monitor_every`).
    """
    roots = prepared_roots(*models)
    inner = unwrapped(optimizer)
    convert_optimizer(inner, recipe)
    if recipe.shares_states:
        _share_out_states(inner, recipe)
    if offload := features.wanted("offload", recipe):
        offload.install(inner)
    if recipe.gradient_release:
        # Accelerate lists models without their DDP
        by_ddp: set[int] = set()
        for _, _, prepared in roots:
            reference = prepared.observed.wrapper
            if reference is not None and (wrapper := reference()):
                by_ddp.update(map(id, wrapper._module_parameters))
        others = (p for p in parameters_of(inner) if id(p) not in by_ddp)
        gradient_release.release_gradients(inner, others)
    # a loaded feature may have to leave an optimizer that an earlier recipe prepared
    if guard := features.wanted("guard", recipe) or features.loaded("guard"):
        guard.watch(models, inner, recipe)
    proof.watch(roots, inner)
    if recipe.stateful.amax_compute_algo == "most_recent":
        from ..watch import guard

        guard.watch_clipping(models, inner, recipe)
    if monitor := features.wanted("monitor_every", recipe) or features.loaded("monitor_every"):
        monitor.watch(roots, inner, recipe, report)
    if schedule := features.wanted("schedule", recipe):
        schedule.count_steps(roots, inner)
    if (after_step := _after_step(inner)) is None:
        inner.register_step_post_hook(after_step := AfterStep())
        if isinstance(inner, torch.optim.Optimizer):  # DeepSpeed's engine has its own checkpoints
            models_of = after_step.modules_of
            inner.register_state_dict_post_hook(partial(scaling_state.save, models_of))
            inner.register_load_state_dict_pre_hook(partial(scaling_state.load, models_of))
    after_step.add(roots)
    if has_ranks():
        ddp.follow(inner)


def _share_out_states(optimizer: torch.optim.Optimizer, recipe: Recipe) -> None:
    """Assign each weight's optimizer states, master or residual to a rank of its DDP. All ranks
    call it."""
    weights = [p for p in parameters_of(optimizer) if ddp.connection_of(p) is not None]
    connections = list(map(ddp.connection_of, weights))
    whole = optimizer.fp8_owners is not None or any(
        connection.keeps_whole for connection in connections
    )
    if connections and not whole and connections[0].group.size() > 1:
        optimizer.fp8_owners = ddp.SharedOut(weights, connections[0].group, recipe)
        optimizer.register_step_pre_hook(optimizer.fp8_owners.refuse_local_step)
        optimizer.forget_others()


UNTRAINED = (
    "added after the model was prepared, in no prepared optimizer, and so not trained: call "
    "optimizer.add_param_group, or make the optimizer and prepare both when the model is complete"
)


class AfterStep:
    """Run after each optimizer step: notify the backends, and warn about new layers and untrained
    parameters."""

    def __init__(self) -> None:
        self.modules_of: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        """The last `_identity` of each prepared root."""

    def add(self, roots: list[Root]) -> None:
        for _, root, prepared in roots:
            self.modules_of.setdefault(root, _identity(root))
            left_out = _left_out(root, prepared)
            if prepared.observed.left_out is not None:
                left_out &= prepared.observed.left_out
            prepared.observed.left_out = left_out

    def __call__(self, optimizer: torch.optim.Optimizer, args, kwargs) -> None:
        for root, identity in list(self.modules_of.items()):
            prepared = root.__dict__.get(PREPARED)
            if not prepared:
                continue
            prepared.compute.after_optimizer_step(root)
            if torch.compiler.is_compiling() or identity == (now := _identity(root)):
                continue
            self.modules_of[root] = now
            left_out = prepared.observed.left_out
            untrained = _left_out(root, prepared) - left_out
            left_out |= untrained
            for names, what in (
                (conversion.update_report(root, prepared), conversion.ADDED),
                (levels.plain_weights_of(root), levels.REPLACED_WEIGHT),
                (sorted(untrained), UNTRAINED),
            ):
                if names:
                    logger.warning("%s: %s: %s", prepared.recipe.name, listed(names), what)


def _after_step(optimizer: torch.optim.Optimizer) -> AfterStep | None:
    return next(
        (
            hook
            for hook in optimizer._optimizer_step_post_hooks.values()
            if isinstance(hook, AfterStep)
        ),
        None,
    )


def is_proven(optimizer: torch.optim.Optimizer) -> bool | None:
    """Return True if a model of this optimizer is proven; None without a prepared model."""
    if (after_step := _after_step(optimizer)) is None:
        # MS-AMP proves nothing
        return True if type(optimizer).__module__.startswith("msamp") else None
    records = [root.__dict__.get(PREPARED) for root in after_step.modules_of]
    return any(prepared and prepared.observed.proven for prepared in records)


def _left_out(root: nn.Module, prepared: Prepared) -> set[str]:
    """Return the names of trainable parameters that no optimizer of this root holds."""
    held = set().union(*map(parameter_ids, prepared.observed.optimizers()))
    return {
        plain_name(name)
        for name, p in root.named_parameters()
        if p.requires_grad and id(p) not in held
    }


def _identity(root: nn.Module) -> int:
    """Return a number that changes with the modules or Parameters of a model. Cheap: every step
    needs it."""
    identity = 0
    modules = [root]
    while modules:
        module = modules.pop()
        identity += id(module)
        if module is not None:
            identity += sum(map(id, module._parameters.values()))
            modules += module._modules.values()
    return identity
