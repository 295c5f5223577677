"""Write a predicted backend, with fields of its recipe, as text."""

from __future__ import annotations

import re

from measuring import split
from torch import nn

PLAIN = "bf16"
TORCHAO = "torchao"
"""TorchAO without this package."""


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
