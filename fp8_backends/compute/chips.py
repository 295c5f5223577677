"""Every fact about chips, once: which backend multiplies FP8 matrices on which, and which precision to train in there.

Nothing here asks the machine; `hardware` finds its chip in this table. Sources: for TransformerEngine its own rules
(`is_fp8_available` and so on, version 2.20); for TorchAO and native what `torch._scaled_mm` and
`torch.nn.functional.scaled_mm` take; for the advice the vendors' tables of matrix instructions, and for Ada reports
that FP8 brings no speed there (TransformerEngine issue 972, torchtitan issue 548).
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

from .fields import check_known, parsed, word

INSTALL_TE = "pip install --no-build-isolation 'transformer-engine[pytorch]>=2.4'"
"""What the extra `te` brings; this package is on no index."""

State = Literal["FP8", "emulated", "refused"]
FP8, EMULATED, REFUSED = "FP8", "emulated", "refused"

MEANING = {
    FP8: "FP8 matrix units make the products",
    EMULATED: "the same numbers by bf16 or FP32 products, slower than bf16: for checking a recipe",
    REFUSED: "an error when a model is prepared",
}


class Advice(NamedTuple):
    """Which precision to train in."""

    precision: str
    """"fp8", "bf16", "fp16" or "fp32"."""
    backend: str
    """The backend for FP8; empty for the other precisions."""
    reason: str


class Chip(NamedTuple):
    """A kind of chips that multiply FP8 matrices alike."""

    key: str
    title: str
    """CUDA compute capability, or AMD's name."""
    examples: str
    since: tuple[int, int] | None = None
    """The first CUDA compute capability of this kind, which reaches up to the next one's. None: not NVIDIA's."""
    architecture: str = ""
    """How AMD's name of its architecture begins."""
    advice: Advice | None = None
    """None: `advice_for` looks closer."""
    te_backend: str = ""
    """The backend that is advised where TransformerEngine runs."""
    grouped_products: bool = False
    """Whether `torch._scaled_grouped_mm` multiplies with FP32 scales here."""

    @property
    def fp8(self) -> bool:
        """Whether it has FP8 matrix units, of which at least one backend makes use."""
        return any(row.cells[CHIPS.index(self)].state == FP8 for row in TABLE)


_TWICE_AS_FAST = "FP8 products are twice as fast as bf16's"
_COMPILE = "with torch.compile, for models of a billion parameters and more"
_UNCERTAIN = Advice(
    "bf16",
    "",
    "it has FP8 products, and reports say that they bring little or no speed there: compare first (fp8-backends "
    "compare); msamp:O2 saves memory in any case",
)
_NATIVE = Advice("fp8", "native:dynamic", f"{_TWICE_AS_FAST}; {_COMPILE}")
_TORCHAO = Advice(
    "fp8", "ao:tensorwise", f"{_TWICE_AS_FAST}, in codes of a kind of its own, which TorchAO uses; {_COMPILE}"
)

CPU, BEFORE_FP8, ADA, HOPPER, BLACKWELL, RTX_BLACKWELL, MI300, MI350 = CHIPS = (
    Chip("cpu", "CPU", "no GPU"),
    Chip("before-fp8", "to 8.6", "V100, A100, RTX 30, MI200", (0, 0)),
    Chip("ada", "8.9", "L4, L40S, RTX 40", (8, 9), advice=_UNCERTAIN),
    Chip("hopper", "9.0", "H100, H200", (9, 0), advice=_NATIVE, te_backend="te:delayed", grouped_products=True),
    Chip("blackwell", "10, 11", "B200, B300, Thor", (10, 0), advice=_NATIVE, te_backend="te:mxfp8"),
    Chip("rtx-blackwell", "12", "RTX 50, RTX PRO 6000, GB10", (12, 0), advice=_UNCERTAIN),
    Chip("mi300", "MI300", "gfx94", architecture="gfx94", advice=_TORCHAO),
    Chip("mi350", "MI350", "gfx95", architecture="gfx95", advice=_NATIVE),
)


class Product(NamedTuple):
    """A chip by the name that it is sold under, or a kind of chips by its key."""

    name: str
    gpu: tuple[int, int] | str | None
    """CUDA compute capability, or how AMD's name of its architecture begins. None: no GPU."""
    gib: int | None = None
    """Its memory. None for a kind of chips, whose products differ in it."""

    @property
    def chip(self) -> Chip:
        return CPU if self.gpu is None else chip_of(self.gpu)


_SOLD = (
    Product("v100", (7, 0), 32), Product("t4", (7, 5), 16), Product("a100", (8, 0), 80), Product("a100-40", (8, 0), 40),
    Product("rtx3090", (8, 6), 24), Product("l4", (8, 9), 24), Product("l40s", (8, 9), 48),
    Product("rtx4090", (8, 9), 24), Product("h100", (9, 0), 80), Product("h200", (9, 0), 141),
    Product("b200", (10, 0), 180), Product("b300", (10, 3), 270), Product("rtx5090", (12, 0), 32),
    Product("mi300x", "gfx942", 192), Product("mi325x", "gfx942", 256), Product("mi350x", "gfx950", 288),
)  # fmt: skip
"""Memory is from NVIDIA's and AMD's data sheets (B200 and B300: a DGX's memory over its 8 GPUs). Drivers show it in
GiB, up to a percent less; 6 % less on cards with GDDR memory whose ECC is on."""
PRODUCTS = {
    **{product.name: product for product in _SOLD},
    **{chip.key: Product(chip.key, chip.architecture or chip.since) for chip in CHIPS},
}
"""Every name of a chip that a user may give, in lower case."""


def product_named(name: str) -> Product:
    """The chip that a user names: a product such as "h100" or "RTX 4090", or a key of CHIPS such as "hopper".

    Raises:
        RecipeError: no such name, with the nearest one.
    """
    key = parsed("chip", word, name).lower().replace("_", "-").replace(" ", "")
    check_known("chip", key, PRODUCTS)
    return PRODUCTS[key]


_OLDER_NVIDIA = {
    (8, 0): Advice("bf16", "", "it has bf16 products and none in FP8; msamp:O2 saves memory and costs time"),
    (7, 0): Advice(
        "fp16",
        "",
        "it has fp16 products and none in bf16: keep the loss scaler, and expect models that were trained in bf16 to "
        "overflow",
    ),
    (0, 0): Advice("fp32", "", "it has no matrix units: lower precision brings no speed"),
}
"""By the first compute capability of each, the newest first."""
_OLDER_AMD = {
    ("gfx90a", "gfx908", "gfx11", "gfx12"): Advice(
        "bf16", "", "it has bf16 products and none in FP8 that PyTorch uses"
    ),
    ("",): Advice("fp32", "", "it has no bf16 matrix units"),
}
_CPUS = {
    True: Advice(
        "bf16",
        "",
        "no GPU, and a CPU with bf16 products: for debugging and small models; FP8 runs here with the same numbers as "
        "on a GPU, and slower than bf16",
    ),
    False: Advice(
        "fp32",
        "",
        "no GPU, and a CPU without bf16 products: for debugging; FP8 and bf16 run here with the same numbers as on a "
        "GPU, and slower than FP32",
    ),
}
"""By whether they have bf16 products."""


def chip_of(gpu: tuple[int, int] | str) -> Chip:
    """The chip of a CUDA compute capability, or of an architecture by AMD's name."""
    if isinstance(gpu, str):
        return next((c for c in CHIPS if c.architecture and gpu.startswith(c.architecture)), BEFORE_FP8)
    return [c for c in CHIPS if c.since is not None and c.since <= tuple(gpu)][-1]


NATIVE_RECORDS: tuple[str, ...] = ()
"""Keys of the CHIPS with a record in benchmarks/results of a training by native that was right. None yet."""


class Choice(NamedTuple):
    """What the backend `auto` means."""

    backend: str
    reason: str


def auto_on(chip: Chip, te_runs: bool = False, ao_runs: bool = True) -> Choice:
    """What `auto` means on a chip: on a GPU with FP8 products only what is proven there."""
    if not chip.fp8:
        return Choice("native", "no FP8 products in hardware here; native has the numbers that it has on a GPU")
    if te_runs:
        return Choice("te", "TransformerEngine runs here")
    if chip.key in NATIVE_RECORDS:
        return Choice("native", f"trainings by native on chips of this kind ({chip.title}) are on record")
    if ao_runs:
        return Choice(
            "ao", f"no training by native on chips of this kind ({chip.title}) is on record yet; many use TorchAO there"
        )
    return Choice("native", "neither TransformerEngine nor TorchAO can run this here")


def advice_for(gpu: tuple[int, int] | str | None, te_runs: bool = False, cpu_bf16: bool = False) -> Advice:
    """The advice for a CUDA compute capability, for an architecture by AMD's name, or for a CPU (None)."""
    if gpu is None:
        return _CPUS[cpu_bf16]
    chip = chip_of(gpu)
    if chip is not BEFORE_FP8:
        return _with_backend(chip.advice, chip, te_runs)
    if isinstance(gpu, str):
        return next(advice for names, advice in _OLDER_AMD.items() if gpu.startswith(names))
    return next(advice for since, advice in _OLDER_NVIDIA.items() if tuple(gpu) >= since)


def _with_backend(advice: Advice, chip: Chip, te_runs: bool) -> Advice:
    """FP8 by a backend that `auto` may choose there."""
    if advice.precision != "fp8":
        return advice
    if te_runs and chip.te_backend:
        return advice._replace(backend=chip.te_backend)
    return advice if auto_on(chip).backend == "native" else _TORCHAO._replace(reason=advice.reason)


# Which backend multiplies FP8 matrices on which chip


def release(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


class Note(NamedTuple):
    reason: str
    fix: str
    """What to do about it, or what follows from it."""

    def __str__(self) -> str:
        return f"{self.reason}: {self.fix}"


_ADA_CUDA, _BLOCK_CUDA, _MX_CUDA = (12, 1), (12, 9), (12, 8)
"""The oldest CUDA releases of PyTorch with TransformerEngine's products on Ada, with block scales and with MXFP8."""
ROWWISE_CPU_TORCH = (2, 13)
"""The first PyTorch whose CPU multiplies FP8 with a scale for each row."""
NATIVE_EQUIVALENT = "the native equivalent, such as native:delayed for te:delayed: same fields, codes and scales"

NOTES = {
    "te-nvidia": Note("TransformerEngine runs on NVIDIA GPUs only", f"use {NATIVE_EQUIVALENT}"),
    "te-8.9": Note(
        "TransformerEngine multiplies FP8 matrices from compute capability 8.9 on",
        f"train in bf16, or use {NATIVE_EQUIVALENT}",
    ),
    "ada": Note(
        f"on Ada TransformerEngine wants CUDA {release(_ADA_CUDA)} and cuBLASLt 12.1.3, or newer",
        "where it is older, install a PyTorch for a newer CUDA",
    ),
    "block-9.0": Note(
        "block scales need compute capability 9.0 or higher", "use te:dynamic, or native:blockwise, which emulates them"
    ),
    "block-cuda": Note(
        f"block scales need a PyTorch for CUDA {release(_BLOCK_CUDA)} or newer",
        "with an older one use te:dynamic, or native:blockwise, which emulates them then",
    ),
    "block-blackwell": Note(
        "TransformerEngine makes these products as MXFP8 ones", "their scales are powers of two, its default"
    ),
    "mxfp8": Note(
        "MXFP8 products are on compute capability 10 and 11 only",
        "use te:dynamic or te:blockwise, or native:mxfp8, which emulates them",
    ),
    "mxfp8-cuda": Note(
        f"MXFP8 products need a PyTorch for CUDA {release(_MX_CUDA)} or newer", "with an older one they are emulated"
    ),
    "fnuz": Note(
        "MI300 multiplies FP8 codes of a kind of its own (fnuz)",
        "TorchAO uses them, and native, whose codes are the common ones, emulates",
    ),
    "rowwise-cpu": Note(
        f"TorchAO's rowwise products run on a CPU from torch {release(ROWWISE_CPU_TORCH)} on",
        "with an older one install a newer torch, or use native:rowwise, which makes them by other means",
    ),
}


class Cell(NamedTuple):
    """What a backend does on a chip."""

    state: State
    note: str = ""
    """A key of NOTES."""
    cuda: tuple[int, int] | None = None
    """The oldest CUDA release of PyTorch with which this holds; before it, `without`."""
    without: State = REFUSED

    def state_with(self, cuda: tuple[int, int] | None) -> State:
        """The state with a PyTorch for that release of CUDA. None: new enough, or not CUDA."""
        return self.without if self.cuda is not None and cuda is not None and cuda < self.cuda else self.state


class Row(NamedTuple):
    backends: tuple[str, ...]
    cells: tuple[Cell, ...]
    """One for each of CHIPS."""


_NO_TE, _OLD, _NO_MX = Cell(REFUSED, "te-nvidia"), Cell(REFUSED, "te-8.9"), Cell(REFUSED, "mxfp8")
_YES, _EMULATED, _FNUZ = Cell(FP8), Cell(EMULATED), Cell(FP8, "fnuz")
_ADA = Cell(FP8, "ada", _ADA_CUDA)
_BLOCKS, _AS_MX = Cell(FP8, "block-cuda", _BLOCK_CUDA), Cell(FP8, "block-blackwell", _BLOCK_CUDA)

# fmt: off
TABLE = (
    # CPU, to 8.6, 8.9, 9.0, 10 and 11, 12, MI300, MI350
    Row(("te:delayed", "te:dynamic"),
        (_NO_TE, _OLD, _ADA, _YES, _YES, _YES, _NO_TE, _NO_TE)),
    Row(("te:blockwise",),
        (_NO_TE, _OLD, Cell(REFUSED, "block-9.0"), _BLOCKS, _AS_MX, _AS_MX, _NO_TE, _NO_TE)),
    Row(("te:mxfp8",),
        (_NO_TE, _OLD, _NO_MX, _NO_MX, _YES, _NO_MX, _NO_TE, _NO_TE)),
    Row(("ao:tensorwise",),
        (_EMULATED, _EMULATED, _YES, _YES, _YES, _YES, _FNUZ, _YES)),
    Row(("ao:rowwise", "ao:rowwise_with_gw_hp"),
        (Cell(EMULATED, "rowwise-cpu"), _EMULATED, _YES, _YES, _YES, _YES, _FNUZ, _YES)),
    Row(("native:dynamic", "native:delayed", "native:rowwise", "native:window", "msamp"),
        (_EMULATED, _EMULATED, _YES, _YES, _YES, _YES, Cell(EMULATED, "fnuz"), _YES)),
    Row(("native:blockwise",),
        (_EMULATED, _EMULATED, _EMULATED, _BLOCKS._replace(without=EMULATED), *[_EMULATED] * 4)),
    Row(("native:mxfp8",),
        (*[_EMULATED] * 4, Cell(FP8, "mxfp8-cuda", _MX_CUDA, EMULATED), *[_EMULATED] * 3)),
)
# fmt: on


class Support(NamedTuple):
    """What one backend does on one chip."""

    backends: tuple[str, ...]
    state: State
    reason: str
    """Empty where there is nothing to know."""
    install: str


def cell_of(backend: str, chip: Chip) -> Cell | None:
    """The cell of a backend such as "native:dynamic"; None for a backend that is not of this package."""
    return next((row.cells[CHIPS.index(chip)] for row in TABLE if backend in row.backends), None)


@functools.cache
def multiplies(backend: str, gpu: tuple[int, int] | str, cuda: tuple[int, int] | None) -> bool:
    """Whether this GPU's FP8 matrix units make the products of this backend, with a PyTorch for that CUDA."""
    return cell_of(backend, chip_of(gpu)).state_with(cuda) == FP8


def supports(chip: Chip, cuda: tuple[int, int] | None = None) -> list[Support]:
    """What every backend does on that chip, with a PyTorch for that release of CUDA (None: new enough)."""
    found = []
    for row in TABLE:
        cell = row.cells[CHIPS.index(chip)]
        note = str(NOTES[cell.note]) if cell.note else ""
        install = f"a PyTorch for CUDA, then {INSTALL_TE}" if row.backends[0].startswith("te:") else "nothing"
        found.append(Support(row.backends, cell.state_with(cuda), note, install))
    return found


def described(chip: Chip, cuda: tuple[int, int] | None = None) -> dict[str, Any]:
    """A chip and what every backend does on it, as plain values."""
    products = [support._asdict() for support in supports(chip, cuda)]
    return {"key": chip.key, "title": chip.title, "examples": chip.examples, "products": products}


# As text

SHORT = {FP8: "FP8", EMULATED: "emul.", REFUSED: "no"}


def numbered_notes() -> dict[str, int]:
    """Notes in the order in which the table meets them."""
    keys = dict.fromkeys(cell.note for row in TABLE for cell in row.cells if cell.note)
    return {key: number for number, key in enumerate(keys, 1)}


def rows() -> list[list[str]]:
    """A header, and a row for each backend."""
    notes = numbered_notes()
    table = [["", *(chip.title for chip in CHIPS)]]
    for row in TABLE:
        cells = [SHORT[cell.state] + (f" ({notes[cell.note]})" if cell.note else "") for cell in row.cells]
        table += [[backend, *cells] for backend in row.backends]
    return table


def legend() -> list[str]:
    examples = "; ".join(f"{chip.title}: {chip.examples}" for chip in CHIPS)
    states = "; ".join(f"{SHORT[state]}: {meaning}" for state, meaning in MEANING.items())
    return [f"columns are CUDA compute capabilities and AMD's chips ({examples})", states]
