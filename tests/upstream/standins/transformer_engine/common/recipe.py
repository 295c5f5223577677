"""The recipes' fields and defaults of TransformerEngine 2.20.2. As there, pydantic drops unknown
fields."""

from enum import Enum

from pydantic.dataclasses import dataclass


class Format(Enum):
    """FP8 formats, by the largest value in forward and in backward."""

    E4M3 = (448, 448)
    E5M2 = (57344, 57344)
    HYBRID = (448, 57344)


@dataclass
class DelayedScaling:
    """Scales from the amaxes of earlier steps."""

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"


@dataclass
class MXFP8BlockScaling:
    """Scales of blocks of 32."""

    margin: int = 0
    fp8_format: Format = Format.E4M3
