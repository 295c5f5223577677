"""Which layer is a model's output head, and whether its loss can be computed in chunks of tokens (`fused_head`)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from torch import nn

from ..compute.deferred_logits import DefersLogits, HighPrecisionHead
from ..compute.interface import Compute, DefersHead
from .weight_products import FP8, Found, layer_obstacle

if TYPE_CHECKING:
    from ..recipes.handlers import Recipe

logger = logging.getLogger("fp8_backends")


def fuse(
    root: nn.Module, found: list[Found], built: list[tuple[nn.Module, nn.Module]], recipe: Recipe, compute: Compute
) -> list[tuple[nn.Module, nn.Module]]:
    """Let the output head defer its logits, or log why it runs as an ordinary layer.

    Args:
        built: layers that are about to be converted and their carriers. The head's changes, if it is among them.

    Returns:
        The head and a carrier of its own, where it stays in high precision; else nothing.
    """
    head = output_head(root)
    if isinstance(head, DefersLogits):
        return []
    product = next((each.product for each in found if each.module is head), None)
    carrier = next((carrier for layer, carrier in built if layer is head), None)
    if head is None:
        reason = "no get_output_embeddings of the model names it"
    elif product is None:
        reason = f"it is no plain Linear, but {type(head).__module__}.{type(head).__name__}"
    elif product.state == FP8 and not (carrier is not None and isinstance(compute, DefersHead)):
        reason = f"{compute.name} multiplies it in FP8 and has no form of that in chunks (native has)"
    elif recipe.fp8_params and carrier is not None and not head.weight.requires_grad:
        reason = "its frozen weight is stored in FP8"
    else:
        reason = layer_obstacle(head, nn.Linear)
    if reason is not None:
        name = "the output head" if product is None else product.name
        logger.warning("%s: fused_head: %s runs as an ordinary layer: %s", recipe.name, name, reason)
        return []
    own = []
    if carrier is not None:
        compute.defer_head(carrier)
    else:
        carrier = HighPrecisionHead(head.in_features, head.out_features, bias=False, device="meta")
        own.append((head, carrier))
    carrier.fp8_is_ordinary = False
    return own


def output_head(root: nn.Module) -> nn.Module | None:
    """What `get_output_embeddings` of the model, or of the first part of it that has an answer, returns."""
    for module in root.modules():
        get = getattr(module, "get_output_embeddings", None)
        # a backbone inherits the method without a head, and raises or returns None
        head = _answer(get) if callable(get) else None
        if isinstance(head, nn.Module):
            return head
    return None


def _answer(get) -> object:
    try:
        return get()
    except Exception:  # whatever the model's own code raises, it names no head
        return None


def make_ordinary(root: nn.Module) -> None:
    """Let the head run as an ordinary layer: FSDP2 frees the whole weight when the forward of its group ends, and
    deferred logits might be read after that."""
    for module in root.modules():
        if isinstance(module, DefersLogits) and not module.fp8_is_ordinary:
            module.fp8_is_ordinary = True
            logger.warning("fused_head: the output head runs as an ordinary layer: FSDP2 shards its weight")
