"""The names that NeMo, Megatron and Megatron-Bridge have for recipe fields, in our words.

Megatron's arguments may be spelled as on its command line (`--fp8-margin`). NeMo's and Bridge's precision plug-ins
(`bf16_with_fp8_mixed`, with hyphens too) are taken as a backend string, or under `precision` or `mixed_precision`.
What has no meaning here is refused by name; a value that asks for nothing, such as False, passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..compute.fields import closest
from ..errors import RecipeError
from .fields import FIELDS

NAMES = {synonym: (field, reads) for field in FIELDS.values() for synonym, reads in field.synonyms.items()}
"""Their names for fields of ours, each with what turns their value into ours."""

_LAYERS_BF16 = "which layers are first and last is for the model to say: name them in exclude, such as "
_LAYERS_BF16 += '["*.layers.0.*", "*.layers.31.*"]'
_GATHERED = "it belongs to Megatron's own gathering of FP8 weights: leave it out"

REFUSED = {
    "first_last_layers_bf16": _LAYERS_BF16,
    "num_layers_at_start_in_bf16": _LAYERS_BF16,
    "num_layers_at_end_in_bf16": _LAYERS_BF16,
    "tp_only_amax_red": "give the ranks that share their scales as fp8_group, a torch.distributed.ProcessGroup",
    "fp8_quantizer_factory": "quantizers of your own are no recipe of this package: register a backend instead",
    "keep_fp8_weight_transpose_cache": _GATHERED,
    "keep_fp8_transpose_cache": _GATHERED,
    "keep_fp8_transpose_cache_when_using_custom_fsdp": _GATHERED,
    "reuse_grad_buf_for_mxfp8_param_ag": _GATHERED,
    "fp4": "this package has no FP4",
    "fp4_param": "this package has no FP4",
    "fp4_param_gather": "this package has no FP4",
}
"""Arguments about FP8 that cannot be honoured, and what to do."""

_WITHOUT_EFFECT = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
"""Megatron reads them only with first_last_layers_bf16, and their default is 1."""

_DELAYED = {"scaling": "delayed", "fp8_format": "HYBRID", "amax_history_len": 1024, "amax_compute_algo": "max"}
PLUGINS = {
    "with_fp8_mixed": _DELAYED,
    "with_fp8_delayed_scaling_mixed": _DELAYED,
    "with_fp8_subchannel_scaling_mixed": {"scaling": "blockwise", "fp8_format": "HYBRID"},
    "with_mxfp8_mixed": {"scaling": "mxfp8", "fp8_format": "E4M3"},
}
"""Precision plug-ins behind their bf16_ or fp16_: what they compute. They gather weights in FP8 beside it, from masters
in high precision, which changes what travels and not the products; here weights stay as the backend stores them."""
_CURRENT_SCALING = "with_fp8_current_scaling_mixed"
_KEYS_OF_PLUGINS = ("precision", "mixed_precision")


def own_names(values: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """The fields under our names, and whether any had another.

    Raises:
        RecipeError: both names disagree, or something is asked for that cannot be honoured.
    """
    plain = {_plain(name): value for name, value in values.items()}
    plugin = _plugin_fields(plain)
    theirs = {name: value for name, value in plain.items() if name in NAMES or name in REFUSED}
    own = {name: value for name, value in plain.items() if name not in theirs}
    if "fp8" in theirs and not theirs["fp8"]:
        raise RecipeError(f"fp8={theirs['fp8']!r} turns FP8 off in NeMo: train in bf16, or say 'hybrid' or 'e4m3'")
    _refuse(theirs)
    for name, value in theirs.items():
        if name in NAMES and value is not None:
            _add(own, name, value)
    for field, value in plugin.items():
        own[field] = value if own.get(field) is None else own[field]  # an argument comes before its plug-in
    spelled = any(name.startswith("--") and name != "--backend" for name in values)
    return own, bool(theirs or plugin or spelled)


def _plain(name: str) -> str:
    """`--fp8-margin` as Python has it."""
    return name.removeprefix("--").replace("-", "_")


def _plugin_fields(plain: dict[str, Any]) -> dict[str, Any]:
    """Fields of a precision plug-in, which is taken out of `plain`."""
    named = [key for key in _KEYS_OF_PLUGINS if key in plain]
    if _plain(str(plain.get("backend"))).lower().startswith(("bf16_with_", "fp16_with_")):
        named.append("backend")
    if len(named) > 1:
        raise RecipeError(f"{' and '.join(named)} name a precision both: leave one out")
    return _of_plugin(named[0], plain.pop(named[0])) if named else {}


def _of_plugin(key: str, word: Any) -> dict[str, Any]:
    dtype, _, rest = _plain(str(word)).lower().partition("_")
    if dtype in ("bf16", "fp16") and rest in PLUGINS:
        return {**PLUGINS[rest], "autocast_dtype": dtype}
    if rest.endswith(_CURRENT_SCALING):
        raise RecipeError(
            f"{key}={word!r} keeps the first and last layers in high precision: use te:dynamic, and {_LAYERS_BF16}"
        )
    known = [f"{dtype}_{rest}" for dtype in ("bf16", "fp16") for rest in PLUGINS]
    raise RecipeError(
        f"{key}={word!r} is no FP8 precision of NeMo's or Megatron-Bridge's{closest(f'{dtype}_{rest}', known)}; known "
        f"are {', '.join(known)}"
    )


def _refuse(theirs: dict[str, Any]) -> None:
    for name, value in theirs.items():
        idle = name in _WITHOUT_EFFECT and "first_last_layers_bf16" in theirs  # refused itself, where it is True
        if name in REFUSED and value and not idle:
            raise RecipeError(f"{name}={value!r} cannot be honoured: {REFUSED[name]}")


def _add(own: dict[str, Any], name: str, value: Any) -> None:
    field, reads = NAMES[name]
    try:
        meant = reads(value) if field.name == "scaling" else field.parsed(reads(value))
    except ValueError as error:
        raise RecipeError(f"{name}: {error}") from None
    if own.get(field.name) is not None and own[field.name] not in (value, meant):
        raise RecipeError(
            f"{name}={value!r} and {field.name}={own[field.name]!r} are two names of one field: leave one out"
        )
    own[field.name] = meant
