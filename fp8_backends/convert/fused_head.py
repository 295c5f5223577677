"""Find a model's output head, and decide if its loss can be computed in chunks of tokens (`fused_head`)."""

import contextlib

from torch import nn

from ..announcement import logger
from ..compute.interface import Compute
from ..recipes.handlers import Recipe
from ..torch_tools.modules import CONVERSION, HEAD_CONVERSION, plain_name
from .weight_products import FP8, Found, layer_obstacle


def find(root: nn.Module, found: list[Found], recipe: Recipe, compute: Compute) -> Found | None:
    """Return the output head to defer logits from now on, of the weights `found`; if there is none, log the reason."""
    head = output_head(root)
    weight = next((weight for weight in found if weight.module is head), None)
    if head is None:
        reason = "no get_output_embeddings of the model names it"
    elif weight is None:
        reason = f"it is no plain Linear, but {type(head).__module__}.{type(head).__name__}"
    elif CONVERSION in head.__dict__ or HEAD_CONVERSION in head.__dict__:
        return None  # it defers already
    elif weight.product.state == FP8 and not compute.defers_head:
        reason = f"{compute.name} multiplies it in FP8, and has no form of that in chunks (native has)"
    else:
        reason = layer_obstacle(head, nn.Linear)
    if reason is None:
        return weight
    name = "the output head" if weight is None else weight.product.name
    logger.warning("%s: fused_head: %s runs as an ordinary layer: %s", recipe.name, name, reason)
    return None


def output_head(root: nn.Module) -> nn.Module | None:
    for module in root.modules():
        get = getattr(module, "get_output_embeddings", None)
        # a backbone inherits the method without a head, and returns None or raises any error
        with contextlib.suppress(Exception):
            if callable(get) and isinstance(head := get(), nn.Module):
                return head
    return None


def make_ordinary(root: nn.Module) -> None:
    """Run the head as an ordinary layer: FSDP2 frees the whole weight before deferred logits are read."""
    for name, module in root.named_modules():
        if getattr(module, "fp8_is_ordinary", None) is False:
            module.fp8_is_ordinary = True
            logger.warning("fused_head: %s runs as an ordinary layer: FSDP2 shards its weight", plain_name(name))
