"""Find the weights of mixtures of experts, and count their FLOPs."""

from __future__ import annotations

import re
from collections.abc import Callable

from torch import nn

from ..compute.experts import obstacle
from ..tensors.sharded_tensor import full_shape

_TOP_K_FIELDS = ("num_experts_per_tok", "num_experts_per_token", "num_selected_experts", "moe_topk")
_LISTED_EXPERT = re.compile(r"((?:.*\.)?experts)\.\d+(?:\.|$)")


def find_part(module: nn.Module, part: str) -> tuple[str, tuple[int, int], str | None] | None:
    """Return (kind, (in, out), obstacle) of the Parameter `part`, if it can hold the weights of
    all experts."""
    shape = full_shape(module._parameters[part])
    if len(shape) != 3 or part.endswith("_scale_inv"):
        return None
    out_features, in_features = (
        reversed(shape[1:]) if getattr(module, "is_transposed", False) else shape[1:]
    )
    return "experts", (in_features, out_features), obstacle(module, part)


def count_visits(names: dict[nn.Module, list[str]]) -> Callable[[str, nn.Module, str], float]:
    """Return a function for the number of times a token passes a weight, by the experts visited."""
    configs = (module.__dict__.get("config") for module in names)
    parts = (part for config in configs for part in (config, getattr(config, "text_config", None)))
    numbers = (getattr(part, field, None) for part in parts for field in _TOP_K_FIELDS)
    top_k = next((number for number in numbers if isinstance(number, int)), None)
    lists = {
        name: len(module)
        for module, (name, *_) in names.items()
        if isinstance(module, nn.ModuleList) and name.split(".")[-1] == "experts"
    }

    def visited(name: str, module: nn.Module, part: str) -> float:
        parameter = module._parameters.get(part)
        if parameter is not None and len(full_shape(parameter)) == 3:
            return top_k or full_shape(parameter)[0]
        listed = _LISTED_EXPERT.match(name)
        number = lists.get(listed[1]) if listed else None
        return top_k / number if top_k and number else 1

    return visited
