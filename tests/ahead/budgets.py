"""Bound the cost of the code for a GPU. A change above a bound fails here; a cheaper one may lower
it."""

from __future__ import annotations

from typing import NamedTuple


class Budget(NamedTuple):
    """Bound a compiled decoder layer of Llama 8B at 8192 tokens, forward and backward, and one
    eager Linear."""

    kernels: int
    """Kernels of the layer made by Inductor, in each version of torch."""
    megabytes: int
    """Megabytes read and written by them."""
    launches: int | None = None
    """Launches of this package's kernels, by an eager Linear. None: not counted."""
    operators: int | None = None
    """Other operators launched by PyTorch."""


BUDGETS = {
    "native:dynamic": Budget(67, 9_800, 6, 3),
    "native:delayed": Budget(59, 7_000, 3, 30),
    "native:rowwise": Budget(75, 10_600),
    "msamp:O2": Budget(75, 8_960),
    "msamp:O4": Budget(75, 8_960),
}
BYTEWISE = 50e6
"""Elements of a layer stored byte by byte at a stride. Inductor 2.13 stored 352 million with an
amax and its cast in one kernel: by bandwidth 2 to 6 ms in place of 0.4."""
BYTEWISE_IN_2_11 = 140e6
"""Inductor 2.11 still does so for some weights of `dynamic` and O2."""
SPECIALISATIONS = {"native:dynamic": 3, "native:delayed": 3}
"""Kernels compiled by Triton for one bf16 layer of aligned sizes: an eager run waits a second for
each."""
NOTES = 7
"""Calls of this package's operators by a compiled layer: one a Linear, in backward."""
INDUCTORS_STACK = 8
"""Bytes per thread kept outside registers by a kernel of Inductor's. This package's kernels keep
none."""
OPTIMIZER = {"bytes": 11.0, "instructions": 106.0}
"""Costs per element, in O2's step."""


def within(result: dict, budget: Budget) -> list[str]:
    """Return the excess of a result of `compiled_layers.py` as sentences."""
    layer = result["layer"]
    found = {"kernels": layer["kernels"], "megabytes": layer["bytes"] / 1e6}
    allowed = budget._asdict()
    return [
        f"{name}: {value:.0f}, not {allowed[name]}"
        for name, value in found.items()
        if value > allowed[name]
    ]


def assert_one_graph_of_fp8_products(result: dict) -> None:
    """Check a result of `compiled_layers.py`: no graph break, FP8 in each product, no other calls
    than the notes."""
    layer = result["layer"]
    assert layer["graphs"] == 1
    assert set(layer["other_calls"]) == {"note_backward"} and len(layer["other_calls"]) <= NOTES
    assert {product["dtype"][:6] for product in layer["products"]} == {"float8"}
