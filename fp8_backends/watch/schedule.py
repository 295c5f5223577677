"""Change the recipe of a prepared model at given optimizer steps (`schedule`).

All ranks count the same steps, so they change at the same one without a message. A checkpoint has
the count.
"""

import math
import weakref

import torch
from torch import nn

from ..announcement import announce
from ..compute import registry
from ..convert.conversion import PREPARED, Prepared, Root
from ..errors import RecipeError
from ..recipes.fields import STEPS
from ..recipes.handlers import Recipe
from ..torch_tools.modules import CONVERSION
from ..torch_tools.optimizers import running_trainer


def check_share(recipe: Recipe) -> None:
    """Raise `RecipeError` if a phase of `schedule` begins at a share of an unknown number of
    steps."""
    shares = [start for start in recipe.schedule or {} if isinstance(start, float)]
    if shares and STEPS not in recipe.schedule and running_trainer() is None:
        example = f'schedule={{{shares[0]}: {recipe.schedule[shares[0]]!r}, "steps": 1000}}'
        raise RecipeError(
            f"schedule: {shares[0]} is a share of an unknown number of steps; add it: {example}"
        )


class CountSteps:
    """Count the steps of an optimizer (post-hook), and change the recipe of its model when a phase
    begins."""

    def __init__(self, root: nn.Module) -> None:
        self.root = weakref.ref(root)

    def __call__(self, optimizer: torch.optim.Optimizer, args, kwargs) -> None:
        root = self.root()
        if root is not None and (prepared := root.__dict__.get(PREPARED)) is not None:
            prepared.steps += 1
            follow(root, prepared)


def count_steps(roots: list[Root], optimizer: torch.optim.Optimizer) -> None:
    """Count the steps of the first optimizer of each prepared model with a schedule."""
    for _, root, prepared in roots:
        if not prepared.recipe.schedule or optimizer not in prepared.observed.optimizers()[:1]:
            continue
        hooks = optimizer._optimizer_step_post_hooks.values()
        if not any(isinstance(hook, CountSteps) and hook.root() is root for hook in hooks):
            optimizer.register_step_post_hook(CountSteps(root))


def follow(root: nn.Module, prepared: Prepared, has_new_layers: bool = False) -> None:
    """Run the layers by the recipe of the present step. Raises `RecipeError` as `check_share`."""
    schedule = prepared.recipe.schedule
    if not schedule:
        return
    begun = [
        start
        for start in schedule
        if start != STEPS and _step_of(start, prepared.recipe) <= prepared.steps
    ]
    word = schedule[max(begun)] if begun else ""
    if word == prepared.phase and not (has_new_layers and word):
        return
    recipe = prepared.recipe.by_phase[word] if word else prepared.recipe
    of_layers = () if recipe is None else prepared.recipe.recipes[1:]
    for layer in prepared.compute.converted_layers(root).values():
        own = layer.__dict__[CONVERSION].recipe
        switch = registry.get_compute(own.compute).switch
        if recipe is None:
            switch(layer, own)  # bf16 holds the states of its own rule, whatever phase it follows
        switch(layer, own if own in of_layers else recipe)
    if word != prepared.phase:
        name = word if recipe is None else recipe.name
        announce(f"{prepared.recipe.name}: {name} from step {prepared.steps} on, by schedule")
    prepared.phase = word


def _step_of(start: int | float, recipe: Recipe) -> float:
    """Return the first step of a phase; infinite while a Trainer does not know its number of
    steps."""
    if isinstance(start, int):
        return start
    check_share(recipe)
    steps = recipe.schedule.get(STEPS) or running_trainer().state.max_steps
    return round(start * steps) if steps > 0 else math.inf
