"""Run optional features: without the file of a feature, the package works and refuses recipes that
set its field.

A feature enters its functions in `FEATURES` when `registry.load` imports its file, each under the
name of an event:

    check_recipe(recipe)                        raise `RecipeError` before anything changes
    carriers(root, weights, recipe, compute, carriers)  adapt; return more (module, carrier) pairs
    prepare_model(root, prepared)               its layers are converted and its weights stored; may be repeated
    before_gathers(root)                        FSDP2 shards its weights and gathers them for each forward
    before_proof(models, optimizer, recipe)     register step hooks that run before the proof's
    after_proof(models, optimizer, recipe)      register step hooks that run after the proof's
    after_backward(accelerator, loss)           a backward pass under Accelerate is done
    join_uneven_inputs(accelerator)             refuse ranks with different numbers of steps
    report_samples(optimizer, report)           call `report(values, step)` for each sample of this optimizer's steps
    figures(optimizer)                          return {name: number} for the record of a sample of its steps
    find_part(module, name, part)               return (kind, (in, out), obstacle) of a Parameter, or None
    count_visits(modules, names)                return a function: (name, module, part) -> passes of a token
    has_whole_layers(module)                    return True if ranks share its layers without cutting any
    resume(root, prepared)                      its steps were loaded from a checkpoint
    audit(roots)                                return fields of `Audit` for these prepared roots
"""

from collections.abc import Callable
from typing import Any

from ..errors import RecipeError
from ..recipes.fields import OF_FEATURES
from ..recipes.handlers import Recipe

FEATURES: dict[str, dict[str, Callable[..., Any]]] = {name: {} for name in OF_FEATURES}
"""Recipe field (or name) of a feature -> its functions by event; empty without the feature's
file."""


def run(event: str, *arguments: Any) -> list[Any]:
    """Return the results of the features' functions for an event."""
    return [functions[event](*arguments) for functions in FEATURES.values() if event in functions]


def check(recipe: Recipe) -> None:
    """Raise `RecipeError` for a field that is set and whose feature is missing."""
    for field, functions in FEATURES.items():
        if not functions and (value := getattr(recipe, field)) != OF_FEATURES[field].default:
            raise RecipeError(
                f"{field}={value!r}: this copy of fp8_backends is without that feature; leave it "
                "out"
            )
