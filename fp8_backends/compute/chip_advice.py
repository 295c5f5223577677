"""Which precision to train in on which chip, as data: FP8 where its products are faster, else what is.

Sources: the vendors' tables of matrix instructions by compute capability and architecture; for Ada, reports that FP8
brings no speed there (TransformerEngine issue 972, torchtitan issue 548).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from . import hardware


class Advice(NamedTuple):
    precision: str
    """"fp8", "bf16", "fp16" or "fp32"."""
    backend: str
    """Of FP8; empty for the other precisions."""
    reason: str


class Row(NamedTuple):
    """What holds from one chip on, up to the row before it."""

    kind: str
    """"cuda", "rocm" or "cpu"."""
    since: tuple[int, ...] | str
    """Compute capability; AMD architectures by the beginning of their names; "" any."""
    precision: str
    reason: str
    te_backend: str = ""
    """Of FP8 with TransformerEngine."""
    backend: str = ""
    """And without."""


_COMPILE = "with torch.compile, for models of a billion parameters and more"
_UNCERTAIN = (
    "it has FP8 products, and reports say that they bring little or no speed there: compare first (fp8-backends "
    "compare); msamp:O2 saves memory in any case"
)

# fmt: off
ROWS = (
    Row("cuda", (12, 0), "bf16", _UNCERTAIN),
    Row("cuda", (10, 0), "fp8", f"FP8 products are twice as fast as bf16's; {_COMPILE}", "te:mxfp8", "native:dynamic"),
    Row("cuda", (9, 0), "fp8", f"FP8 products are twice as fast as bf16's; {_COMPILE}", "te:delayed", "native:dynamic"),
    Row("cuda", (8, 9), "bf16", _UNCERTAIN),
    Row("cuda", (8, 0), "bf16", "it has bf16 products and none in FP8; msamp:O2 saves memory and costs time"),
    Row("cuda", (7, 0), "fp16", "it has fp16 products and none in bf16: keep the loss scaler, and expect models that "
        "were trained in bf16 to overflow"),
    Row("cuda", (0, 0), "fp32", "it has no matrix units: lower precision brings no speed"),
    Row("rocm", "gfx95", "fp8", f"FP8 products are twice as fast as bf16's; {_COMPILE}", "", "native:dynamic"),
    Row("rocm", "gfx94", "fp8", "FP8 products are twice as fast as bf16's, in codes of a kind of its own, which "
        f"TorchAO uses; {_COMPILE}", "", "ao:tensorwise"),
    Row("rocm", "gfx90a gfx908 gfx11 gfx12", "bf16", "it has bf16 products and none in FP8 that PyTorch uses"),
    Row("rocm", "", "fp32", "it has no bf16 matrix units"),
    Row("cpu", "bf16", "bf16", "no GPU, and a CPU with bf16 products: for debugging and small models; FP8 runs here "
        "with the same numbers as on a GPU, and slower than bf16"),
    Row("cpu", "", "fp32", "no GPU, and a CPU without bf16 products: for debugging; FP8 and bf16 run here with the "
        "same numbers as on a GPU, and slower than FP32"),
)
# fmt: on


def advice_for(kind: str, chip: tuple[int, int] | str, te_runs: bool = False) -> Advice:
    """For a CUDA compute capability, an AMD architecture, or a CPU ("bf16" where it has such products, else "")."""
    row = next(row for row in ROWS if row.kind == kind and _covers(row, chip))
    backend = row.te_backend if te_runs and row.te_backend else row.backend
    return Advice(row.precision, backend, row.reason)


def _covers(row: Row, chip: tuple[int, int] | str) -> bool:
    if row.kind == "cuda":
        return tuple(chip) >= tuple(row.since)
    return not row.since or any(chip.startswith(name) for name in row.since.split())


def advice_here(te_runs: bool = False) -> Advice:
    """For this machine; where its GPUs differ, for the least of them, since all train together."""
    if not hardware.has_gpu():
        return advice_for("cpu", "bf16" if hardware.cpu_bf16() else "")
    if torch.version.hip:
        chips: Sequence = [
            torch.cuda.get_device_properties(index).gcnArchName for index in range(torch.cuda.device_count())
        ]
        return max((advice_for("rocm", chip) for chip in chips), key=_caution)
    return max((advice_for("cuda", chip, te_runs) for chip in hardware.capabilities()), key=_caution)


_PRECISIONS = ("fp8", "bf16", "fp16", "fp32")


def _caution(advice: Advice) -> int:
    return _PRECISIONS.index(advice.precision)
