"""All facts about chips: the backends that multiply FP8 matrices on each, and the precision to
train in.

Sources: an H200 (MEASURED); TransformerEngine's own rules (`is_fp8_available` and so on, version
2.20); the operands of `torch._scaled_mm` and `torch.nn.functional.scaled_mm`; the vendors' tables
of matrix instructions; and reports: FP8 without speed on Ada (TransformerEngine issue 972,
torchtitan issue 548); rates of instructions on compute capability 12 (flashinfer issue 3628), MXFP8
there (TorchAO issue 4932, PyTorch issue 198126), and rowwise products (PyTorch issue 192707; PR
161236, in the binary of torch 2.11); rowwise on Ada and Windows (FreeToken PR 243, PyTorch issue
177651), and its speed (Unsloth's models/float8_training.py).
"""

from typing import Any, Literal, NamedTuple

from .fields import check_known, parsed, word

INSTALL_TE = "pip install --no-build-isolation 'transformer-engine[pytorch]>=2.4'"
"""Installs the extra `te`; this package is on no index."""
INSTEAD_OF_TE = (
    "use the native rule of the same name (native:delayed for te:delayed), which has the same codes"
)

State = Literal["FP8", "emulated", "refused"]
FP8, EMULATED, REFUSED = "FP8", "emulated", "refused"

MEANING = {
    FP8: "FP8 matrix units make the products",
    EMULATED: "the same casts; bf16 or FP32 products with FP32 sums, slower than "
    "bf16: for checking a recipe",
    REFUSED: "an error when a model is prepared",
}
MEASURED = (
    "measured on an H200 with torch 2.11.0 and CUDA 13.0: at 9.0 native, msamp and ao:tensorwise "
    "(training steps), and te:delayed, te:dynamic and te:blockwise (te.Linear of 2.20.2); all "
    "other cells follow libraries' rules and reports"
)


class Advice(NamedTuple):
    """The precision to train in."""

    precision: str
    """"fp8", "bf16", "fp16" or "fp32"."""
    backend: str
    """The backend for FP8; empty for the other precisions."""
    reason: str


class Chip(NamedTuple):
    """A kind of chips with the same FP8 products."""

    key: str
    title: str
    """CUDA compute capability, or AMD's name."""
    examples: str
    since: tuple[int, int] | None = None
    """The first CUDA compute capability of this kind, up to the next kind's. None: not NVIDIA's."""
    architecture: str = ""
    """The beginning of AMD's name of the architecture."""
    advice: Advice | None = None
    """None: `advice_for` decides by the GPU."""
    te_backend: str = ""
    """The advised backend if TransformerEngine runs."""
    grouped_products: bool = False
    """True if `torch._scaled_grouped_mm` multiplies with FP32 scales here."""

    @property
    def fp8(self) -> bool:
        """Return True if it has FP8 matrix units that a backend uses."""
        return any(cells[self].state == FP8 for cells in TABLE.values())


_TWICE_AS_FAST = "FP8 products are twice as fast as bf16's"
_COMPILE = "with torch.compile"
_UNCERTAIN = Advice(
    "bf16",
    "",
    "it has FP8 products, and reports say that they bring little or no speed there: compare first "
    "(fp8-backends compare); msamp:O2 saves memory in any case",
)
_MXFP8 = _UNCERTAIN._replace(
    reason=f"{_UNCERTAIN.reason}; native:mxfp8 with torch 2.14 is the one to compare: GeForce "
    "halves the rate of FP32 sums in all other products (reported for an RTX 5060 Ti: FP16 51, FP8 "
    "102, MXFP8 202 TFLOP/s)"
)
_NATIVE = Advice("fp8", "native:dynamic", f"{_TWICE_AS_FAST}; {_COMPILE}")
_TORCHAO = Advice(
    "fp8",
    "ao:tensorwise",
    f"{_TWICE_AS_FAST}, in codes of a kind of its own, which TorchAO uses; {_COMPILE}",
)

CPU, BEFORE_FP8, ADA, HOPPER, BLACKWELL, RTX_BLACKWELL, MI300, MI350 = CHIPS = (
    Chip("cpu", "CPU", "no GPU"),
    Chip("before-fp8", "to 8.6", "V100, A100, RTX 30, MI200", (0, 0)),
    Chip("ada", "8.9", "L4, L40S, RTX 40", (8, 9), advice=_UNCERTAIN),
    Chip(
        "hopper",
        "9.0",
        "H100, H200",
        (9, 0),
        advice=_NATIVE,
        te_backend="te:delayed",
        grouped_products=True,
    ),
    Chip("blackwell", "10, 11", "B200, B300, Thor", (10, 0), advice=_NATIVE, te_backend="te:mxfp8"),
    Chip("rtx-blackwell", "12", "RTX 50, RTX PRO 6000, GB10", (12, 0), advice=_MXFP8),
    Chip("mi300", "MI300", "gfx94", architecture="gfx94", advice=_TORCHAO),
    Chip("mi350", "MI350", "gfx95", architecture="gfx95", advice=_NATIVE),
)


class Product(NamedTuple):
    """A chip by its product name, or a kind of chips by its key."""

    name: str
    gpu: tuple[int, int] | str | None
    """CUDA compute capability, or the beginning of AMD's name of the architecture. None: no GPU."""
    gib: int | None = None
    """Its memory. None for a kind of chips."""

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
"""Memory is from NVIDIA's and AMD's data sheets (B200 and B300: a DGX's memory over its 8 GPUs).
Drivers show it in GiB, up to a percent less; 6 % less on cards with GDDR memory whose ECC is on."""
PRODUCTS = {
    **{product.name: product for product in _SOLD},
    **{chip.key: Product(chip.key, chip.architecture or chip.since) for chip in CHIPS},
}
"""All names for chips, in lower case."""


def product_named(name: str) -> Product:
    """Return the chip of a product such as "h100", or of a key of CHIPS. Raises `RecipeError` with
    the nearest name."""
    key = parsed("chip", word, name).lower().replace("_", "-").replace(" ", "")
    check_known("chip", key, PRODUCTS)
    return PRODUCTS[key]


_OLDER_NVIDIA = {
    (8, 0): Advice(
        "bf16", "", "it has bf16 products and none in FP8; msamp:O2 saves memory and costs time"
    ),
    (7, 0): Advice(
        "fp16",
        "",
        "it has fp16 products and none in bf16: keep the loss scaler, and expect models trained in "
        "bf16 to overflow",
    ),
    (0, 0): Advice("fp32", "", "it has no matrix units: lower precision brings no speed"),
}
"""By first compute capability, the newest first."""
_OLDER_AMD = {
    ("gfx90a", "gfx908", "gfx11", "gfx12"): Advice(
        "bf16", "", "PyTorch uses its bf16 products, and none in FP8"
    ),
    ("",): Advice("fp32", "", "it has no bf16 matrix units"),
}
_CPUS = {
    True: Advice(
        "bf16",
        "",
        "no GPU, and a CPU with bf16 products: for debugging and small models; FP8 has a GPU's "
        "casts here, and is slower than bf16",
    ),
    False: Advice(
        "fp32",
        "",
        "no GPU, and a CPU without bf16 products: for debugging; FP8 has a GPU's casts here, and "
        "FP8 and bf16 are slower than FP32",
    ),
}
"""True: with bf16 products."""


def chip_of(gpu: tuple[int, int] | str) -> Chip:
    """Return the chip of a CUDA compute capability, or of AMD's name of an architecture."""
    if isinstance(gpu, str):
        return next(
            (c for c in CHIPS if c.architecture and gpu.startswith(c.architecture)), BEFORE_FP8
        )
    return [c for c in CHIPS if c.since is not None and c.since <= tuple(gpu)][-1]


NATIVE_RECORDS: tuple[str, ...] = ("hopper",)
"""Keys of the CHIPS with a correct training by native on record in benchmarks/results
(`step_1b_gpu.json`)."""


class Choice(NamedTuple):
    """The meaning of the backend `auto`."""

    backend: str
    reason: str


def auto_on(
    chip: Chip, te_runs: bool = False, ao_runs: bool = True, native_runs: bool = True
) -> Choice:
    """Return the meaning of `auto` on a chip: with FP8 products, a backend proven there."""
    is_recorded = chip.key in NATIVE_RECORDS
    if not chip.fp8:
        return Choice("native", "no FP8 products in hardware here; native has a GPU's casts")
    if te_runs:
        return Choice("te", "TransformerEngine runs here")
    if is_recorded and native_runs:
        return Choice(
            "native", f"trainings by native on chips of this kind ({chip.title}) are on record"
        )
    if ao_runs and is_recorded:
        return Choice("ao", "TorchAO reads the given fields, and native does not")
    if ao_runs:
        return Choice(
            "ao",
            f"no training by native on chips of this kind ({chip.title}) is on record yet; many "
            "use TorchAO there",
        )
    return Choice("native", "neither TransformerEngine nor TorchAO can run this here")


def advice_for(
    gpu: tuple[int, int] | str | None, te_runs: bool = False, cpu_bf16: bool = False
) -> Advice:
    """Return the advice for a CUDA compute capability, for AMD's name of an architecture, or for a
    CPU (None)."""
    if gpu is None:
        return _CPUS[cpu_bf16]
    chip = chip_of(gpu)
    if chip is BEFORE_FP8 and isinstance(gpu, str):
        return next(advice for names, advice in _OLDER_AMD.items() if gpu.startswith(names))
    if chip is BEFORE_FP8:
        return next(advice for since, advice in _OLDER_NVIDIA.items() if tuple(gpu) >= since)
    if chip.advice.precision == "fp8" and te_runs and chip.te_backend:
        return chip.advice._replace(backend=chip.te_backend)
    if chip.advice.precision != "fp8" or auto_on(chip).backend == "native":
        return chip.advice
    return chip.advice._replace(backend=_TORCHAO.backend)


def release(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


class Note(NamedTuple):
    reason: str
    fix: str
    """The remedy, or the consequence."""

    def __str__(self) -> str:
        return f"{self.reason}: {self.fix}"


_ADA_CUDA, _BLOCK_CUDA, _MX_CUDA = (12, 1), (12, 9), (12, 8)
"""The oldest CUDA releases of PyTorch with TransformerEngine's products on Ada, block scales and
MXFP8."""
ROWWISE_CPU_TORCH = (2, 13)
"""The first PyTorch with FP8 products of a scale for each row on CPUs."""
NATIVE_EQUIVALENT = (
    "the native equivalent, such as native:delayed for te:delayed: same fields, codes and scales"
)

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
        "block scales need compute capability 9.0 or higher",
        "use te:dynamic, or native:blockwise (emulated)",
    ),
    "block-cuda": Note(
        f"block scales need a PyTorch for CUDA {release(_BLOCK_CUDA)} or newer",
        "with an older one use te:dynamic, or native:blockwise (emulated then)",
    ),
    "block-e4m3": Note(
        f"PyTorch multiplies E4M3 in blocks of 128, from CUDA {release(_BLOCK_CUDA)} on",
        "with an older CUDA, and for E5M2 gradients (fp8_format='HYBRID'), products are emulated",
    ),
    "block-blackwell": Note(
        "TransformerEngine makes these products as MXFP8 ones",
        "their scales are powers of two, its default",
    ),
    "mxfp8": Note(
        "TransformerEngine multiplies MXFP8 on compute capability 10 and 11 only",
        "use te:dynamic or te:blockwise, or native:mxfp8 (emulated before 10)",
    ),
    "mxfp8-cuda": Note(
        f"MXFP8 products need a PyTorch for CUDA {release(_MX_CUDA)} or newer",
        "with an older one they are emulated",
    ),
    "mxfp8-rtx": Note(
        "reported, not measured: MXFP8 products on an RTX 5060 Ti (3.2 times bf16's speed) and "
        "5080, in the layout of native, with torch 2.14 for CUDA 13.0",
        "with an older PyTorch they are emulated",
    ),
    "rowwise-ada": Note(
        "reported: rowwise kernels on Ada ignore the current CUDA stream before torch 2.12, and "
        "Windows has none; a whole step ran at 0.98 of bf16's speed (an L4)",
        "with an older torch avoid CUDA graphs and side streams, or use one scale a tensor "
        "(native:dynamic)",
    ),
    "rowwise-rtx": Note(
        "reported: torch 2.10 refuses rowwise products on compute capability 12, and Windows has "
        "none; torch 2.11 has other kernels for them, not measured here; a whole step ran at 0.97 "
        "of bf16's speed (RTX PRO 6000)",
        "where they fail use one scale a tensor (native:dynamic)",
    ),
    "fnuz": Note(
        "MI300 multiplies FP8 codes of a kind of its own (fnuz)",
        "TorchAO uses them, and native, whose codes are the common ones, emulates",
    ),
    "rowwise-cpu": Note(
        f"TorchAO's rowwise products run on a CPU from torch {release(ROWWISE_CPU_TORCH)} on",
        "with an older one install a newer torch, or use native:rowwise",
    ),
}


class Cell(NamedTuple):
    """The products of a backend on a chip."""

    state: State
    note: str = ""
    """A key of NOTES."""
    cuda: tuple[int, int] | None = None
    """The oldest CUDA release of PyTorch for `state`; older ones have `without`."""
    without: State = REFUSED
    torch: tuple[int, int] = (0, 0)
    """The oldest PyTorch for `state`."""

    def state_with(
        self, cuda: tuple[int, int] | None = None, torch: tuple[int, int] | None = None
    ) -> State:
        """Return the state with a release of PyTorch for a release of CUDA. None: new enough, or
        not CUDA."""
        is_old = (cuda or self.cuda or ()) < (self.cuda or ()) or (torch or self.torch) < self.torch
        return self.without if is_old else self.state


_NO_TE, _OLD, _NO_MX = Cell(REFUSED, "te-nvidia"), Cell(REFUSED, "te-8.9"), Cell(REFUSED, "mxfp8")
_YES, _EMULATED, _FNUZ = Cell(FP8), Cell(EMULATED), Cell(FP8, "fnuz")
_ADA = Cell(FP8, "ada", _ADA_CUDA)
_RTX_MX = Cell(FP8, "mxfp8-rtx", (13, 0), EMULATED, (2, 14))
_ROWS_ADA, _ROWS_RTX = Cell(FP8, "rowwise-ada"), Cell(FP8, "rowwise-rtx")
_BLOCKS, _AS_MX = Cell(FP8, "block-cuda", _BLOCK_CUDA), Cell(FP8, "block-blackwell", _BLOCK_CUDA)

# fmt: off
_ROWS = {
    # CPU, to 8.6, 8.9, 9.0, 10 and 11, 12, MI300, MI350
    ("te:delayed", "te:dynamic"):
        (_NO_TE, _OLD, _ADA, _YES, _YES, _YES, _NO_TE, _NO_TE),
    ("te:blockwise",):
        (_NO_TE, _OLD, Cell(REFUSED, "block-9.0"), _BLOCKS, _AS_MX, _AS_MX, _NO_TE, _NO_TE),
    ("te:mxfp8",):
        (_NO_TE, _OLD, _NO_MX, _NO_MX, _YES, _NO_MX, _NO_TE, _NO_TE),
    ("ao:tensorwise",):
        (_EMULATED, _EMULATED, _YES, _YES, _YES, _YES, _FNUZ, _YES),
    ("ao:rowwise", "ao:rowwise_with_gw_hp"):
        (Cell(EMULATED, "rowwise-cpu"), _EMULATED, _ROWS_ADA, _YES, _YES, _ROWS_RTX, _FNUZ, _YES),
    ("native:dynamic", "native:delayed", "native:window", "msamp"):
        (_EMULATED, _EMULATED, _YES, _YES, _YES, _YES, Cell(EMULATED, "fnuz"), _YES),
    ("native:rowwise",):
        (_EMULATED, _EMULATED, _ROWS_ADA, _YES, _YES, _ROWS_RTX, Cell(EMULATED, "fnuz"), _YES),
    ("native:blockwise",):
        (_EMULATED, _EMULATED, _EMULATED, Cell(FP8, "block-e4m3", _BLOCK_CUDA, EMULATED), *[_EMULATED] * 4),
    ("native:mxfp8",):
        (*[_EMULATED] * 4, Cell(FP8, "mxfp8-cuda", _MX_CUDA, EMULATED), _RTX_MX, *[_EMULATED] * 2),
}
# fmt: on
TABLE = {backends: dict(zip(CHIPS, cells, strict=True)) for backends, cells in _ROWS.items()}
"""Cells by backends, those with the same products together, and by chip."""


def cell_of(backend: str, chip: Chip) -> Cell | None:
    """Return the cell of a backend such as "native:dynamic"; None for another package's backend."""
    return next((cells[chip] for backends, cells in TABLE.items() if backend in backends), None)


def described(chip: Chip, *releases: tuple[int, int] | None) -> dict[str, Any]:
    """Return a chip and every backend's products on it, with these releases of CUDA and PyTorch
    (none: new enough)."""
    products = []
    for backends, cells in TABLE.items():
        state, reason = cells[chip].state_with(*releases), str(NOTES.get(cells[chip].note, ""))
        install = (
            f"a PyTorch for CUDA, then {INSTALL_TE}" if backends[0].startswith("te:") else "nothing"
        )
        products.append(
            {"backends": backends, "state": state, "reason": reason, "install": install}
        )
    return {"key": chip.key, "title": chip.title, "examples": chip.examples, "products": products}


SHORT = {FP8: "FP8", EMULATED: "emul.", REFUSED: "no"}


def numbered_notes() -> dict[str, int]:
    """Number the notes in the order of the table."""
    keys = dict.fromkeys(
        cell.note for cells in TABLE.values() for cell in cells.values() if cell.note
    )
    return {key: number for number, key in enumerate(keys, 1)}


def rows() -> list[list[str]]:
    """Return a header, and a row for each backend."""
    notes = numbered_notes()
    table = [["", *(chip.title for chip in CHIPS)]]
    for backends, row in TABLE.items():
        cells = [
            SHORT[cell.state] + (f" ({notes[cell.note]})" if cell.note else "")
            for cell in row.values()
        ]
        table += [[backend, *cells] for backend in backends]
    return table


def legend() -> list[str]:
    examples = "; ".join(f"{chip.title}: {chip.examples}" for chip in CHIPS)
    states = "; ".join(f"{SHORT[state]}: {meaning}" for state, meaning in MEANING.items())
    return [f"columns are CUDA compute capabilities and AMD's chips ({examples})", states, MEASURED]
