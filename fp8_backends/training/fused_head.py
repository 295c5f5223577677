"""Which layer is a model's output head, and whether its loss can be computed in chunks of tokens (`fused_head`)."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

from torch import nn

from ..compute.interface import Compute
from ..numerics.modules import CONVERSION, HEAD_CONVERSION, plain_name
from .weight_products import FP8, Found, layer_obstacle

if TYPE_CHECKING:
    from ..compute.deferred_logits import HighPrecisionHead
    from ..recipes.handlers import Recipe

logger = logging.getLogger("fp8_backends")


def find(root: nn.Module, found: list[Found], recipe: Recipe, compute: Compute) -> Found | None:
    """The output head that is to defer its logits from now on, or None, and then a line in the log says why it runs as
    an ordinary layer. `found`: the weights of the model with the state that they will have."""
    head = output_head(root)
    each = next((each for each in found if each.module is head), None)
    if head is None:
        reason = "no get_output_embeddings of the model names it"
    elif each is None:
        reason = f"it is no plain Linear, but {type(head).__module__}.{type(head).__name__}"
    elif CONVERSION in head.__dict__ or HEAD_CONVERSION in head.__dict__:
        return None  # it defers already
    elif each.product.state == FP8 and not compute.defers_head:
        reason = f"{compute.name} multiplies it in FP8, and has no form of that in chunks (native has)"
    else:
        reason = layer_obstacle(head, nn.Linear)
    if reason is None:
        return each
    name = "the output head" if each is None else each.product.name
    logger.warning("%s: fused_head: %s runs as an ordinary layer: %s", recipe.name, name, reason)
    return None


def high_precision_carrier(head: nn.Linear) -> HighPrecisionHead:
    """What the head takes on where it stays in high precision."""
    from ..compute.deferred_logits import HighPrecisionHead  # loads torch.compile, for those who ask for it

    return HighPrecisionHead(head.in_features, head.out_features, bias=False, device="meta")


def output_head(root: nn.Module) -> nn.Module | None:
    """What `get_output_embeddings` of the model, or of the first part of it that has an answer, returns."""
    for module in root.modules():
        get = getattr(module, "get_output_embeddings", None)
        # a backbone inherits the method without a head, and returns None or raises whatever its code does
        with contextlib.suppress(Exception):
            if callable(get) and isinstance(head := get(), nn.Module):
                return head
    return None


def make_ordinary(root: nn.Module) -> None:
    """Let the head run as an ordinary layer: FSDP2 frees the whole weight when the forward of its group ends, and
    deferred logits might be read after that."""
    for name, module in root.named_modules():
        if getattr(module, "fp8_is_ordinary", None) is False:
            module.fp8_is_ordinary = True
            logger.warning("fused_head: %s runs as an ordinary layer: FSDP2 shards its weight", plain_name(name))
