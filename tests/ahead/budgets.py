"""What the code for a GPU may cost at most. A change that costs more shows here; one that costs less may lower them."""

from __future__ import annotations

from typing import NamedTuple


class Budget(NamedTuple):
    """Of a decoder layer of Llama 8B at 8192 tokens, compiled, forward and backward; and of one eager Linear."""

    kernels: int
    """That Inductor makes of the layer."""
    megabytes: int
    """That they read and write."""
    mlp_kernels: int
    mlp_megabytes: int
    """The same of norm, feed-forward part and residual alone."""
    launches: int | None
    """Of this package's kernels, by an eager Linear. None: not counted."""
    operators: int | None
    """That PyTorch launches besides."""


BUDGETS = {
    "native:dynamic": Budget(109, 12_110, 46, 8_600, 6, 6),
    "native:delayed": Budget(122, 11_670, 53, 8_310, 3, 39),
    "msamp:O2": Budget(139, 11_700, 57, 7_420, None, None),
}
SPECIALISATIONS = {"native:dynamic": 3, "native:delayed": 3}
"""Kernels that Triton compiles for one bf16 layer of aligned sizes: an eager run waits a second for each."""
OPTIMIZER = {"bytes": 17.0, "instructions": 175.0}
"""Of an element, all passes of O2's step together."""


def within(result: dict, budget: Budget) -> list[str]:
    """What a result of `predict.py` has too much of, as sentences."""
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
