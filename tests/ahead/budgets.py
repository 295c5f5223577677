"""Bound the cost of the code for a GPU. A change above a bound fails here; a cheaper one may lower it."""

from __future__ import annotations

from typing import NamedTuple


class Budget(NamedTuple):
    """Bound a compiled decoder layer of Llama 8B at 8192 tokens, forward and backward, and one eager Linear."""

    kernels: int
    """Kernels of the layer made by Inductor."""
    megabytes: int
    """Megabytes read and written by them."""
    mlp_kernels: int
    mlp_megabytes: int
    """The same for norm, feed-forward part and residual only."""
    launches: int | None
    """Launches of this package's kernels, by an eager Linear. None: not counted."""
    operators: int | None
    """Other operators launched by PyTorch."""


BUDGETS = {
    "native:dynamic": Budget(67, 9_800, 27, 6_430, 6, 3),
    "native:delayed": Budget(59, 7_950, 24, 5_120, 3, 30),
    "msamp:O2": Budget(75, 8_960, 30, 5_730, None, None),
}
SPECIALISATIONS = {"native:dynamic": 3, "native:delayed": 3}
"""Kernels compiled by Triton for one bf16 layer of aligned sizes: an eager run waits a second for each."""
NOTES = 7
"""Calls of this package's operators by a compiled layer: one a Linear, in backward."""
INDUCTORS_STACK = 8
"""Bytes per thread kept outside registers by a kernel of Inductor's. This package's kernels keep none."""
OPTIMIZER = {"bytes": 11.0, "instructions": 106.0}
"""Costs per element, in O2's step."""


def within(result: dict, budget: Budget) -> list[str]:
    """Return the excess of a `predict.py` result as sentences."""
    found = {
        "kernels": result["layer"]["kernels"],
        "megabytes": result["layer"]["bytes"] / 1e6,
        "mlp_kernels": result["mlp"]["kernels"],
        "mlp_megabytes": result["mlp"]["bytes"] / 1e6,
    }
    if result.get("eager"):
        found |= {name: result["eager"][name] for name in ("launches", "operators")}
    allowed = budget._asdict()
    return [f"{name}: {value:.0f}, not {allowed[name]}" for name, value in found.items() if value > allowed[name]]


def assert_one_graph_of_fp8_products(result: dict) -> None:
    """Check a compiled layer of `predict.py`: no graph break, FP8 in each product, no other calls than the notes."""
    layer = result["layer"]
    assert layer["graphs"] == 1
    assert set(layer["other_calls"]) == {"note_backward"} and len(layer["other_calls"]) <= NOTES
    assert {product["dtype"][:6] for product in layer["products"]} == {"float8"}
