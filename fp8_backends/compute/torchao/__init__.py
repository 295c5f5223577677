"""The `ao` backend: TorchAO's float8 linear layer. This file imports nothing of TorchAO."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig

_IMPORT_MESSAGES = {
    "torchao": ("Failed to load", "Skipping import of cpp extensions"),
    "torchao.kernel.intmm": ("Detected no triton",),
    "torch.utils._pytree": ("register_constant",),
}
"""Texts to drop, by logger."""


def drop_import_messages() -> None:
    """Drop TorchAO's messages at import: its wheel holds libraries for several CUDA versions and
    warns of each unfit one. Other records pass. Repeating it does nothing."""
    for name in _IMPORT_MESSAGES:
        logging.getLogger(name).addFilter(_is_wanted)


def _is_wanted(record: logging.LogRecord) -> bool:
    return not any(text in record.getMessage() for text in _IMPORT_MESSAGES[record.name])


def float8_config(value: Any) -> Float8LinearConfig:
    """Parse the field `config`."""
    if type(value).__name__ != "Float8LinearConfig":
        raise ValueError("must be a torchao.float8.Float8LinearConfig")
    return value


def scaling_of(config: Float8LinearConfig) -> str:
    """Name the recipe of a `Float8LinearConfig`: `tensorwise`, `rowwise`, `rowwise_with_gw_hp`, or
    `custom`."""
    casts = [getattr(config, f"cast_config_{name}") for name in CASTS]
    rules = tuple(
        "off" if cast.scaling_type.value == "disabled" else cast.scaling_granularity.value
        for cast in casts
    )
    return _RECIPE_OF_RULES.get(rules, "custom")


CASTS = (
    *("input", "weight", "grad_output"),
    *("input_for_grad_weight", "weight_for_grad_input", "grad_output_for_grad_weight"),
)
"""The casts of a configuration: first INPUT, WEIGHT and GRAD_OUTPUT."""
_RECIPE_OF_RULES = {
    ("tensorwise",) * 6: "tensorwise",
    ("axiswise",) * 6: "rowwise",
    ("axiswise", "axiswise", "axiswise", "off", "tensorwise", "off"): "rowwise_with_gw_hp",
}
