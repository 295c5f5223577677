"""Write a predicted backend, with fields of its recipe, as text."""

from __future__ import annotations

import ast
import re
from typing import Any

from torch import nn

PLAIN = "bf16"
TORCHAO = "torchao"
"""TorchAO without this package."""


def split(spec: str) -> tuple[str, dict[str, Any]]:
    """`native:dynamic?field=value&other=1`: a backend and fields of its recipe."""
    backend, _, told = spec.partition("?")
    return backend, {
        name: _value(text)
        for name, _, text in (each.partition("=") for each in told.split("&") if each)
    }


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def level_of(spec: str) -> str | None:
    """Return the MS-AMP level of the backend's optimizer, such as `O2`."""
    found = re.search(r"msamp:(O[1-5])", spec)
    return found and found[1]


def convert(model: nn.Module, spec: str) -> nn.Module:
    """Return the model prepared for a backend; unchanged for bf16."""
    backend, fields = split(spec)
    if backend == TORCHAO:
        from torchao.float8 import convert_to_float8_training

        convert_to_float8_training(
            model, module_filter_fn=lambda module, name: "lm_head" not in name
        )
    elif backend != PLAIN:
        import fp8_backends

        fp8_backends.prepare(model, None, fp8_backends.FP8RecipeKwargs(backend=backend, **fields))
    return model
