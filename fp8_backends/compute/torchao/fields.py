"""Recipe fields of `ao`. Imports nothing of TorchAO."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..fields import FUSED_HEAD, Field, Variable, flag

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig


def _config(value: Any) -> Float8LinearConfig:
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

FIELDS = (
    Field(
        "config",
        None,
        _config,
        "A torchao.float8.Float8LinearConfig, used as it is.",
        names_scaling=scaling_of,
        is_object=True,
    ),
    Field(
        "pad_inner_dim",
        None,
        flag,
        "Pad products whose inner dimension is no multiple of 16 (on unless it is turned off).",
        launcher_default=True,
    ),
    Field(
        "enable_fsdp_float8_all_gather",
        None,
        flag,
        "Gather weights in FP8 under FSDP2.",
        launcher_default=True,
        # where a value that equals the launcher's default is meant, and would count as not given
        further_variables=(Variable("ALL_GATHER"),),
    ),
    Field(
        "auto_filter",
        False,
        flag,
        "Leave layers in high precision that TorchAO finds too small to gain.",
        launcher_default=False,
    ),
    FUSED_HEAD,
)
"""In the order of Accelerate's `AORecipeKwargs`, then ours."""
