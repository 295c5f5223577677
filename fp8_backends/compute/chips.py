"""Which backend multiplies FP8 matrices on which chip, as data.

Of TransformerEngine's columns: its own rules (`is_fp8_available` and so on, version 2.20). Of TorchAO's and the native
ones: what `torch._scaled_mm` and `torch.nn.functional.scaled_mm` take, and where this package emulates instead.
"""

from __future__ import annotations

import textwrap
from typing import Literal, NamedTuple

import torch

from . import hardware

State = Literal["FP8", "emulated", "refused"]
FP8, EMULATED, REFUSED = "FP8", "emulated", "refused"

MEANING = {
    FP8: "FP8 matrix units make the products",
    EMULATED: "the same numbers by bf16 or FP32 products, slower than bf16: for checking a recipe",
    REFUSED: "an error when a model is prepared",
}


class Chip(NamedTuple):
    key: str
    title: str
    """CUDA compute capability, or AMD's name."""
    examples: str


CPU, BEFORE_FP8, ADA, HOPPER, BLACKWELL, RTX_BLACKWELL, MI300, MI350 = CHIPS = (
    Chip("cpu", "CPU", "no GPU"),
    Chip("before-fp8", "to 8.6", "V100, A100, RTX 30, MI200"),
    Chip("ada", "8.9", "L4, L40S, RTX 40"),
    Chip("hopper", "9.0", "H100, H200"),
    Chip("blackwell", "10, 11", "B200, B300, Thor"),
    Chip("rtx-blackwell", "12", "RTX 50, RTX PRO 6000, GB10"),
    Chip("mi300", "MI300", "gfx94"),
    Chip("mi350", "MI350", "gfx95"),
)


class Cell(NamedTuple):
    state: State
    note: str = ""
    """A key of NOTES."""
    cuda: tuple[int, int] | None = None
    """The oldest CUDA release of PyTorch with which this holds; before it, `without`."""
    without: State = REFUSED


class Row(NamedTuple):
    backends: tuple[str, ...]
    cells: tuple[Cell, ...]
    """One for each of CHIPS."""


NOTES = {
    "te-nvidia": "TransformerEngine runs on NVIDIA GPUs only: native:delayed, native:dynamic, native:blockwise and "
    "native:mxfp8 follow its rules here",
    "te-8.9": "TransformerEngine multiplies FP8 matrices from compute capability 8.9 on: use the native twin, or bf16",
    "ada": "TransformerEngine wants CUDA 12.1 and cuBLASLt 12.1.3 there, or newer",
    "block-9.0": "block scales need compute capability 9.0: use te:dynamic, or native:blockwise, which emulates them",
    "block-cuda": "needs a PyTorch for CUDA 12.9 or newer; before that te:blockwise is refused and native:blockwise "
    "emulates",
    "block-blackwell": "TransformerEngine makes it of MXFP8 products, whose scales are powers of two, its default",
    "mxfp8": "MXFP8 products are on compute capability 10 and 11 only: use te:dynamic or te:blockwise, or "
    "native:mxfp8, which emulates them",
    "mxfp8-cuda": "needs a PyTorch for CUDA 12.8 or newer; before that it is emulated",
    "fnuz": "MI300 multiplies FP8 codes of a kind of its own (fnuz): TorchAO uses them, and native, whose codes are "
    "the common ones, emulates",
    "rowwise-cpu": "needs torch 2.13 or newer",
}

_NO_TE = Cell(REFUSED, "te-nvidia")
_OLD = Cell(REFUSED, "te-8.9")
_NO_MX = Cell(REFUSED, "mxfp8")
_YES, _EMULATED = Cell(FP8), Cell(EMULATED)
_ADA = Cell(FP8, "ada", (12, 1))
_AS_MX = Cell(FP8, "block-blackwell", (12, 9))

# fmt: off
TABLE = (
    # CPU, to 8.6, 8.9, 9.0, 10 and 11, 12, MI300, MI350
    Row(("te:delayed", "te:dynamic"),
        (_NO_TE, _OLD, _ADA, _YES, _YES, _YES, _NO_TE, _NO_TE)),
    Row(("te:blockwise",),
        (_NO_TE, _OLD, Cell(REFUSED, "block-9.0"), Cell(FP8, "block-cuda", (12, 9)), _AS_MX, _AS_MX, _NO_TE, _NO_TE)),
    Row(("te:mxfp8",),
        (_NO_TE, _OLD, _NO_MX, _NO_MX, _YES, _NO_MX, _NO_TE, _NO_TE)),
    Row(("ao:tensorwise",),
        (_EMULATED, _EMULATED, _YES, _YES, _YES, _YES, Cell(FP8, "fnuz"), _YES)),
    Row(("ao:rowwise", "ao:rowwise_with_gw_hp"),
        (Cell(EMULATED, "rowwise-cpu"), _EMULATED, _YES, _YES, _YES, _YES, Cell(FP8, "fnuz"), _YES)),
    Row(("native:dynamic", "native:delayed", "native:rowwise", "native:window", "msamp"),
        (_EMULATED, _EMULATED, _YES, _YES, _YES, _YES, Cell(EMULATED, "fnuz"), _YES)),
    Row(("native:blockwise",),
        (_EMULATED, _EMULATED, _EMULATED, Cell(FP8, "block-cuda", (12, 9), EMULATED), *[_EMULATED] * 4)),
    Row(("native:mxfp8",),
        (_EMULATED, _EMULATED, _EMULATED, _EMULATED, Cell(FP8, "mxfp8-cuda", (12, 8), EMULATED), *[_EMULATED] * 3)),
)
# fmt: on

INSTALL = {
    "te": "a PyTorch for CUDA, then pip install --no-build-isolation 'fp8-backends[te]'",
    "ao": "nothing",
    "native": "nothing",
}
_INSTALL_SENTENCE = (
    "``te`` needs this package's extra ``te``, installed after a PyTorch for CUDA and with ``--no-build-isolation``; "
    "the others come with the package."
)


class Support(NamedTuple):
    """What one backend does on one chip."""

    backends: tuple[str, ...]
    state: State
    reason: str
    """Empty where there is nothing to know."""
    install: str


def chip_here() -> Chip:
    """The chip of this machine; of several, the one of the lowest capability."""
    if not hardware.has_gpu():
        return CPU
    if torch.version.hip:
        architecture = torch.cuda.get_device_properties(0).gcnArchName
        return next((c for c in (MI300, MI350) if architecture.startswith(c.examples)), BEFORE_FP8)
    return chip_of(hardware.lowest_capability())


def chip_of(capability: tuple[int, int]) -> Chip:
    """The chip of a CUDA compute capability."""
    if capability < hardware.FP8_CAPABILITY:
        return BEFORE_FP8
    if capability < (9, 0):
        return ADA
    return {9: HOPPER, 10: BLACKWELL, 11: BLACKWELL}.get(capability[0], RTX_BLACKWELL)


def supports(chip: Chip, cuda: tuple[int, int] | None = None) -> list[Support]:
    """What every backend does on that chip, with a PyTorch for that release of CUDA (None: new enough)."""
    return [_support(row, row.cells[CHIPS.index(chip)], cuda) for row in TABLE]


def supports_here() -> list[Support]:
    """The same for this machine."""
    return supports(chip_here(), hardware.cuda_release())


def support_of(compute: str, scaling: str, chip: Chip, cuda: tuple[int, int] | None = None) -> Support | None:
    """The row of one backend; None for a backend that is not of this package."""
    return next((s for s in supports(chip, cuda) if f"{compute}:{scaling}" in s.backends), None)


def _support(row: Row, cell: Cell, cuda: tuple[int, int] | None) -> Support:
    too_old = cell.cuda is not None and cuda is not None and cuda < cell.cuda
    compute = row.backends[0].partition(":")[0]
    state = cell.without if too_old else cell.state
    return Support(row.backends, state, NOTES.get(cell.note, ""), INSTALL[compute])


# as text

SHORT = {FP8: "FP8", EMULATED: "emul.", REFUSED: "no"}


def numbered_notes() -> dict[str, int]:
    """Notes in the order in which the table meets them."""
    keys = dict.fromkeys(cell.note for row in TABLE for cell in row.cells if cell.note)
    return {key: number for number, key in enumerate(keys, 1)}


def text(width: int = 100) -> str:
    """The whole table with its notes, in plain characters."""
    notes = [_wrapped(f"({number}) ", NOTES[key], width) for key, number in numbered_notes().items()]
    below = [_wrapped("", each, width) for each in _legend()] + notes
    return "\n".join([*_aligned(_rows()), "", *sum(below, [])])


def restructured_text(width: int = 118) -> str:
    """The same for the README."""
    header, *rows = _rows()
    rows = [[f"``{row[0]}``", *row[1:]] for row in rows]
    lines = _aligned([["backend", *header[1:]], *rows])
    columns = [max(map(len, column)) for column in zip(["backend", *header[1:]], *rows, strict=True)]
    rule = "  ".join("=" * column for column in columns)
    notes = [_wrapped(f"{number}. ", NOTES[key], width) for key, number in numbered_notes().items()]
    sentences = [*(each[0].upper() + each[1:] + "." for each in _legend()), _INSTALL_SENTENCE]
    legend = textwrap.wrap(" ".join(sentences), width)
    return "\n".join([rule, lines[0], rule, *lines[1:], rule, "", *legend, "", *sum(notes, [])]) + "\n"


def _rows() -> list[list[str]]:
    notes = numbered_notes()
    header = ["", *(chip.title for chip in CHIPS)]
    rows = [header]
    for row in TABLE:
        cells = [SHORT[cell.state] + (f" ({notes[cell.note]})" if cell.note else "") for cell in row.cells]
        rows += [[backend, *cells] for backend in row.backends]
    return rows


def _legend() -> list[str]:
    examples = "; ".join(f"{chip.title}: {chip.examples}" for chip in CHIPS)
    states = "; ".join(f"{SHORT[state]}: {meaning}" for state, meaning in MEANING.items())
    return [f"columns are CUDA compute capabilities and AMD's chips ({examples})", states]


def _wrapped(label: str, text: str, width: int) -> list[str]:
    """A paragraph under its label."""
    return textwrap.wrap(label + text, width, subsequent_indent=" " * len(label))


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
