"""Keep layers in bf16 that a chip multiplies faster there, by the predictions of `compute.rates`:
the recipe's `small_layers`.

What a recipe names stays in FP8: by `layers`, or by `+` in `include`.
"""

from collections.abc import Iterable

from ..compute import hardware
from ..compute.chips import Rates, product_named, products_with_rates
from ..compute.rates import TOKENS, linear_seconds
from ..errors import RecipeError
from ..recipes.fields import KEPT_IN_BF16
from ..recipes.handlers import Recipe
from .weight_products import Found


def keep_in_bf16(weights: Iterable[Found], recipe: Recipe) -> None:
    """Note an obstacle at each Linear that is faster in bf16. `weights`: those not named by the
    recipe.

    Raises `RecipeError` if the speed of this machine's chip is unknown.
    """
    title, rates = _chip(recipe)
    for weight in weights:
        is_open = weight.obstacle is None and weight.default_exclusion is None
        if not is_open or weight.part or weight.conversion is not None:
            continue
        seconds = linear_seconds(weight.product.sizes, recipe.compute, recipe.scaling, rates)
        if not seconds.fp8_gains:
            weight.product.recipe = KEPT_IN_BF16
            weight.obstacle = (
                f"faster in bf16: {seconds.bf16 * 1e6:,.0f} us a step, {seconds.fp8 * 1e6:,.0f} in "
                f"FP8, predicted for {TOKENS:,} tokens on {title}, compiled (small_layers)"
            )


def _chip(recipe: Recipe) -> tuple[str, Rates]:
    if recipe.small_layers != KEPT_IN_BF16:
        return recipe.small_layers.upper(), product_named(recipe.small_layers).rates
    chip = hardware.chip()
    if chip.rates is None:
        raise RecipeError(
            f"small_layers: the speed of this machine's chip ({chip.title}) is unknown: name the "
            f"chip to decide for ({', '.join(products_with_rates())}), or leave small_layers out"
        )
    return chip.examples, chip.rates
