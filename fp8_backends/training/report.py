"""What became of every weight product and norm of a model, for people and for programs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..notebooks import as_html
from ..words import counted, listed, share
from .weight_products import CONVOLUTION, FOREIGN_FP8, FP8, HIGH_PRECISION, WeightProduct


@dataclass
class NormLayer:
    """What became of a normalisation layer, for a backend that has its own form of them."""

    name: str
    swapped: bool
    reason: str | None
    """Why it stays as it is."""
    aliases: tuple[str, ...] = ()
    """Further names of a module that the model holds more than once."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


@dataclass
class ConversionReport:
    """What became of every weight product of a model."""

    products: list[WeightProduct]
    norms: list[NormLayer] = field(default_factory=list)
    """Empty for a backend that leaves norms alone."""

    @property
    def converted(self) -> list[str]:
        """Names of the layers that run in FP8."""
        return [product.name for product in self.products if product.state == FP8]

    @property
    def high_precision(self) -> dict[str, str]:
        """Those that stay in high precision, each with its reason."""
        return {product.name: product.reason for product in self.products if product.state == HIGH_PRECISION}

    @property
    def foreign_fp8(self) -> dict[str, str]:
        """Those that another library holds in FP8 and multiplies, each with its name."""
        return {product.name: product.reason for product in self.products if product.state == FOREIGN_FP8}

    @property
    def flops_share(self) -> float:
        """FLOPs of the converted weights over those of all, 0 to 1, for a token that passes all: what a step can at
        most run in FP8. A convolution counts with one position, since only a forward tells how many there are."""
        total = sum(product.flops for product in self.products)
        return sum(product.flops for product in self.products if product.state == FP8) / total if total else 0.0

    @property
    def has_convolutions(self) -> bool:
        """Whether `flops_share` is no more than an upper bound."""
        return any(product.kind == CONVOLUTION for product in self.products)

    def __str__(self) -> str:
        lines = [self._headline, *(f"  {state}: {names}" for state, names in self._names_by_state.items())]
        return "\n".join(lines + [f"  {line}" for line in self._norms_line])

    def _repr_html_(self) -> str:
        title = "; ".join([self._headline, *self._norms_line])
        return as_html(title, [("state", "weights"), *self._names_by_state.items()])

    @property
    def _headline(self) -> str:
        at_most = "at most " if self.has_convolutions else ""
        weights = counted(len(self.products), "weight")
        return f"{len(self.converted)} of {weights} in FP8, {at_most}{share(self.flops_share)} of weight FLOPs"

    @property
    def _names_by_state(self) -> dict[str, str]:
        """The weights that are in FP8, and those that are not by the reason."""
        noted = [(f"in FP8 ({p.reason})" if p.reason else "in FP8", p.name) for p in self.products if p.state == FP8]
        high = [(reason, name) for name, reason in (self.foreign_fp8 | self.high_precision).items()]
        return _grouped([*noted, *high])

    @property
    def _norms_line(self) -> list[str]:
        if not self.norms:
            return []
        unswapped = _grouped((norm.reason, norm.name) for norm in self.norms if not norm.swapped)
        line = f"{sum(norm.swapped for norm in self.norms)} of {counted(len(self.norms), 'norm')} swapped"
        return [line + "".join(f"; {names}: {reason}" for reason, names in unswapped.items())]


def _grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The names of each reason, from (reason, name)."""
    groups: dict[str, list[str]] = {}
    for reason, name in pairs:
        groups.setdefault(reason, []).append(name)
    return {reason: listed(names) for reason, names in groups.items()}
