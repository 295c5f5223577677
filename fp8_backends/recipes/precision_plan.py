"""Predict precision and bytes per converted weight element of a recipe.

The rows are MS-AMP's table of optimization levels, extended by O0 and O4. `audit` measures live
tensors instead.
"""

from dataclasses import dataclass

from ..compute.registry import compute_of
from ..words import as_html
from .fields import KEPT_IN_BF16
from .handlers import Spec, resolve

BYTES = {"FP32": 4, "FP16": 2, "FP8": 1, "INT8": 1}
"""Bytes of one element."""


@dataclass(frozen=True)
class PrecisionPlan:
    """The precisions in which a recipe computes, communicates and stores."""

    gemm: str
    """The three products of a converted layer, with the names of products in high precision."""
    comm: str
    """Gradients between ranks."""
    weight: str
    """The weight in the model."""
    master_weight: str | None
    """A copy of the weight in more precision, or INT8 residuals; None if the weight is its own
    master."""
    weight_gradient: str
    """As stored; `released` if it is freed inside backward and takes no bytes."""
    optimizer_states: tuple[str, str]
    """Adam's first and second moment."""
    bytes_per_element: float
    """The bytes of weight, master weight, gradient and states together, on one rank."""

    def __str__(self) -> str:
        return (
            f"GEMM {self.gemm}, comm {self.comm}, weight {self.weight}, master "
            f"{self.master_weight or '-'}, gradient {self.weight_gradient}, Adam "
            f"{'+'.join(self.optimizer_states)}: {self.bytes_per_element:g} bytes per weight "
            "element"
        )

    def _repr_html_(self) -> str:
        headings = (
            "GEMM",
            "comm",
            "weight",
            "master",
            "gradient",
            "Adam",
            "bytes per weight element",
        )
        states = "+".join(self.optimizer_states)
        bytes_ = f"{self.bytes_per_element:g}"
        stored = (self.weight, self.master_weight or "-", self.weight_gradient, states)
        return as_html(
            "What the recipe promises", [headings, (self.gemm, self.comm, *stored, bytes_)]
        )


# level: (comm, weight, master weight, weight gradient, Adam states)
LEVEL_ROWS = {
    "O0": ("FP32", "FP32", None, "FP32", ("FP32", "FP32")),
    "O1": ("FP8", "FP16", None, "FP8", ("FP32", "FP32")),
    "O2": ("FP8", "FP16", None, "FP8", ("FP8", "FP16")),
    "O3": ("FP8", "FP8", "FP16", "FP8", ("FP8", "FP16")),
    "O4": ("FP8", "FP8", "INT8", "FP8", ("FP8", "FP8")),
}


def plan(spec: Spec = None) -> PrecisionPlan:
    """Return the precision plan of a recipe, for a model with FP32 weights and an Adam optimizer.

    Accepts the specs of `resolve` and raises its errors; needs no hardware.
    """
    recipe = resolve(spec)
    comm, weight, master, gradient, states = LEVEL_ROWS[recipe.level]
    stored = (
        [weight, *states]
        + ([master] if master else [])
        + ([] if recipe.gradient_release else [gradient])
    )
    high_precision = compute_of(recipe).high_precision_products(recipe)
    by_layers = dict.fromkeys(
        word if isinstance(word, str) else KEPT_IN_BF16 for word in (recipe.layers or {}).values()
    )
    return PrecisionPlan(
        gemm="FP8"
        + (
            f" ({' '.join(high_precision)} {recipe.autocast_dtype.upper()})"
            if high_precision
            else ""
        )
        + "".join(
            f", {kind} gradient {fmt.name.upper()}" for kind, fmt in recipe.gradient_formats.items()
        )
        + (f", by layers {', '.join(by_layers)}" if by_layers else ""),
        comm={"plain": "FP32", "fp8": "FP8", None: comm}[recipe.gradient_comm],
        weight=weight,
        master_weight=master,
        weight_gradient=f"{gradient}, released" if recipe.gradient_release else gradient,
        optimizer_states=states,
        bytes_per_element=sum(BYTES[precision] for precision in stored),
    )
