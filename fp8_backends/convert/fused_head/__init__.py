"""Compute a model's output head and its loss in chunks of tokens (`fused_head`).

Conversion builds the layers; the output head's then defers its logits (`deferred_logits`).
"""

import contextlib

from torch import nn

from ...announcement import logger
from ...compute.interface import Compute
from ...recipes.handlers import Recipe
from ...torch_tools.modules import CONVERSION, PLAIN_CONVERSION, plain_name
from ..weight_products import Found, layer_obstacle


def defer_logits(
    root: nn.Module,
    weights: list[Found],
    recipe: Recipe,
    compute: Compute,
    carriers: dict[nn.Module, nn.Module],
) -> list[tuple[nn.Module, nn.Module]]:
    """Let the output head's FP8 carrier defer its logits, or return one in high precision. Log the
    reason for none."""
    from . import native_head  # noqa: F401, loads torch.compile
    from .deferred_logits import HEADS, HighPrecisionHead

    head = output_head(root)
    weight, carrier = (
        next((weight for weight in weights if weight.module is head), None),
        carriers.get(head),
    )
    if head is None:
        reason = "no get_output_embeddings of the model names it"
    elif weight is None:
        reason = f"it is no plain Linear, but {type(head).__module__}.{type(head).__name__}"
    elif CONVERSION in head.__dict__ or PLAIN_CONVERSION in head.__dict__:
        return []  # it defers already
    elif (
        (reason := layer_obstacle(head, nn.Linear)) is None
        and carrier is not None
        and type(carrier) not in HEADS
    ):
        reason = (
            f"{compute.name} multiplies it in FP8, and has no form of that in chunks (native has)"
        )
    if reason is not None:
        name = "the output head" if weight is None else weight.product.name
        logger.warning(
            "%s: fused_head: %s runs as an ordinary layer: %s", recipe.name, name, reason
        )
    elif carrier is None:
        return [
            (
                head,
                HighPrecisionHead(head.in_features, head.out_features, bias=False, device="meta"),
            )
        ]
    else:
        carrier.__class__ = HEADS[type(carrier)]
        carrier.fp8_is_ordinary = False
    return []


def output_head(root: nn.Module) -> nn.Module | None:
    for module in root.modules():
        get = getattr(module, "get_output_embeddings", None)
        # a backbone inherits the method without a head, and returns None or raises any error
        with contextlib.suppress(Exception):
            if callable(get) and isinstance(head := get(), nn.Module):
                return head
    return None


def make_ordinary(root: nn.Module) -> None:
    """Run the head as an ordinary layer: FSDP2 frees the whole weight before deferred logits are
    read."""
    for name, module in root.named_modules():
        if getattr(module, "fp8_is_ordinary", None) is False:
            module.fp8_is_ordinary = True
            logger.warning(
                "fused_head: %s runs as an ordinary layer: FSDP2 shards its weight",
                plain_name(name),
            )
