"""Read a `Float8LinearConfig` that a recipe holds. Imports nothing of TorchAO."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig


def float8_config(value: Any) -> Float8LinearConfig:
    """Parse the field `config`."""
    if type(value).__name__ != "Float8LinearConfig":
        raise ValueError("must be a torchao.float8.Float8LinearConfig")
    return value


def scaling_of(config: Any) -> str:
    """The recipe that a `Float8LinearConfig` follows: `tensorwise`, `rowwise`, `rowwise_with_gw_hp`, or `custom`."""
    casts = [getattr(config, f"cast_config_{name}") for name in _CASTS]
    rules = tuple("off" if cast.scaling_type.value == "disabled" else cast.scaling_granularity.value for cast in casts)
    return _RECIPE_OF_RULES.get(rules, "custom")


_CASTS = (
    *("input", "weight", "grad_output"),
    *("input_for_grad_weight", "weight_for_grad_input", "grad_output_for_grad_weight"),
)
_RECIPE_OF_RULES = {
    ("tensorwise",) * 6: "tensorwise",
    ("axiswise",) * 6: "rowwise",
    ("axiswise", "axiswise", "axiswise", "off", "tensorwise", "off"): "rowwise_with_gw_hp",
}
