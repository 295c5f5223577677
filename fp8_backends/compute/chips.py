"""All facts about chips: the backends that multiply FP8 matrices on each, and the precision to
train in.

Sources: an H200 (MEASURED); TransformerEngine's own rules (`is_fp8_available` and so on, version
2.20); the operands of `torch._scaled_mm` and `torch.nn.functional.scaled_mm`; the vendors' tables
of matrix instructions; and reports: steps with one scale a tensor on Ada and compute capability 12
(LLMQ's README at b77d969); rates of instructions on the latter (flashinfer issue 3628), MXFP8 there
(TorchAO issue 4932, PyTorch issue 198126), and rowwise products (PyTorch issue 192707; PR 161236,
in the binary of torch 2.11); rowwise on Ada and Windows (FreeToken PR 243, PyTorch issue 177651),
and its speed (Unsloth's models/float8_training.py); current scaling first on Hopper
(Megatron-Bridge's recipes `*_h100_fp8cs_config`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ..formats.scaling import RULES
from .fields import check_known, parsed, word

INSTALL_TE = "pip install --no-build-isolation 'transformer-engine[pytorch]>=2.4'"
"""Installs the extra `te`; this package is on no index."""
INSTEAD_OF_TE = (
    "use the native rule of the same name (native:delayed for te:delayed), which has the same codes"
)

State = Literal["FP8", "emulated", "refused"]
RUNS, RUNS_EMULATED, REFUSED = "FP8", "emulated", "refused"

MEANING = {
    RUNS: "FP8 matrix units make the products",
    RUNS_EMULATED: "the same casts; bf16 or FP32 products with FP32 sums, slower than "
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
    compare_first: bool = False
    """True if only others have published a gain of speed."""


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
    "block-blackwell": Note(
        "TransformerEngine makes these products as MXFP8 ones",
        "their scales are powers of two, its default",
    ),
    "mxfp8": Note(
        "TransformerEngine multiplies MXFP8 on compute capability 10 and 11 only",
        "use te:dynamic or te:blockwise, or native:mxfp8 (emulated before 10)",
    ),
    "fnuz": Note(
        "MI300 multiplies FP8 codes of a kind of its own (fnuz)",
        "TorchAO uses them, and native, whose codes are the common ones, emulates",
    ),
    "rowwise-cpu": Note(
        f"TorchAO's rowwise products run on a CPU from torch {release(ROWWISE_CPU_TORCH)} on",
        "with an older one install a newer torch, or use native:rowwise",
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
    "block-e4m3": Note(
        f"PyTorch multiplies E4M3 in blocks of 128, from CUDA {release(_BLOCK_CUDA)} on",
        "with an older CUDA, and for E5M2 gradients (fp8_format='HYBRID'), products are emulated",
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
}
"""Numbered in reports, in the order of their first use there."""


class Cell(NamedTuple):
    """The products of a backend on a chip."""

    state: State
    note: str = ""
    """A key of NOTES."""
    cuda: tuple[int, int] = (0, 0)
    """The oldest CUDA release of PyTorch for `state`; older ones have `without`."""
    without: State = REFUSED
    torch: tuple[int, int] = (0, 0)
    """The oldest PyTorch for `state`."""

    def state_with(
        self, cuda: tuple[int, int] | None = None, torch: tuple[int, int] | None = None
    ) -> State:
        """Return the state with a release of PyTorch for a release of CUDA. None: new enough, or
        not CUDA."""
        is_old = (cuda or self.cuda) < self.cuda or (torch or self.torch) < self.torch
        return self.without if is_old else self.state


class Rates(NamedTuple):
    """Published limits of a chip. `rates` predicts by the H200's rates times the ratios of these
    limits."""

    bf16: float
    """Dense FLOP/s with FP32 sums, as `fp8`."""
    fp8: float
    memory: float
    """Bytes/s."""
    link: float
    """Bytes/s to other devices of the machine, in one direction."""
    network: float
    """Bytes/s of one device to other machines: 400 Gb/s a GPU with NVLink, else 100 Gb/s, as in the
    data centres of the published runs."""
    source: str = "a roofline"


_NO_TE, _EMULATED, _YES = Cell(REFUSED, "te-nvidia"), Cell(RUNS_EMULATED), Cell(RUNS)
DEFAULTS = {
    ("te:delayed", "te:dynamic"): _NO_TE,
    ("te:blockwise",): _NO_TE,
    ("te:mxfp8",): _NO_TE,
    ("ao:tensorwise",): _YES,
    ("ao:rowwise", "ao:rowwise_with_gw_hp"): _YES,
    (*(f"native:{name}" for name, rule in RULES.items() if rule.blocks is None), "msamp"): _YES,
    **{
        (f"native:{name}",): _EMULATED if rule.cuts_contraction else _YES
        for name, rule in RULES.items()
        if rule.blocks is not None
    },
}
"""Backends with the same products, and their cell on a chip that does not name the first of
them."""


@dataclass(frozen=True, eq=False)
class Chip:
    """A kind of chips with the same FP8 products."""

    key: str
    title: str
    """CUDA compute capability, or AMD's name."""
    examples: str
    gpu: tuple[int, int] | str | None
    """The first CUDA compute capability of this kind, up to the next kind's, or the beginning of
    AMD's name of the architecture. None: no GPU."""
    cells: dict[str, Cell] = field(default_factory=dict)
    """Products other than in DEFAULTS, by the first backend there."""
    advice: Advice | None = None
    """None: `advice_for` decides by the GPU."""
    te_backend: str = ""
    """The advised backend if TransformerEngine runs."""
    rates: Rates | None = None
    """Limits of the product that stands for this kind; None if no public table is known."""
    grouped_products: bool = False
    """True if `torch._scaled_grouped_mm` multiplies with FP32 scales here."""

    @property
    def table(self) -> dict[tuple[str, ...], Cell]:
        """Return the cells of all backends."""
        return {names: self.cells.get(names[0], cell) for names, cell in DEFAULTS.items()}

    @property
    def fp8(self) -> bool:
        """Return True if it has FP8 matrix units that a backend uses."""
        return any(cell.state == RUNS for cell in self.table.values())


_TWICE_AS_FAST = "FP8 products are twice as fast as bf16's"
_NATIVE = Advice("fp8", "native:dynamic", f"{_TWICE_AS_FAST}; with torch.compile")
_TORCHAO = _NATIVE._replace(backend="ao:tensorwise")
_OWN_CODES = _TORCHAO._replace(
    reason=f"{_TWICE_AS_FAST}, in codes of a kind of its own, which TorchAO uses; with torch.compile"
)
_PUBLISHED = _NATIVE._replace(
    reason="LLMQ, in C++, publishes 1.2 to 1.6 times bf16's speed by this rule from 1.5 billion "
    "parameters on; with torch.compile; compare first (fp8-backends compare)",
    compare_first=True,
)

_NO_FP8 = dict.fromkeys(
    ("ao:tensorwise", "ao:rowwise", "native:dynamic", "native:rowwise"), _EMULATED
)
_NVIDIA = {
    "te:delayed": _YES,
    "te:blockwise": Cell(RUNS, "block-blackwell", _BLOCK_CUDA),
    "te:mxfp8": Cell(REFUSED, "mxfp8"),
}
_ROWS_ADA, _ROWS_RTX = Cell(RUNS, "rowwise-ada"), Cell(RUNS, "rowwise-rtx")
_FNUZ, _OTHER_CODES = Cell(RUNS, "fnuz"), Cell(RUNS_EMULATED, "fnuz")

H200 = Rates(989e12, 1979e12, 4.8e12, 450e9, 50e9, "measured on an H200 (but for the network)")
_B200 = Rates(2250e12, 4500e12, 7.67e12, 900e9, 50e9)
_RTX4090 = Rates(165.2e12, 330.3e12, 1.008e12, 32e9, 12.5e9)
_RTX5090 = Rates(209.5e12, 419e12, 1.792e12, 64e9, 12.5e9)
_PRO6000 = Rates(503.8e12, 1007.6e12, 1.792e12, 64e9, 12.5e9)
"""Limits as listed by: glennklockwood.com/garden/processors/h100, itkb.uw.cz (H200, NVLink of
Blackwell), torchao's `testing/training/roofline_utils.py` at 36027d8 (B200, RTX 5090), mullet.se
(NVIDIA's data sheet of the L40S), waredb.com (RTX 4090), LLMQ's `src/utilities/sol.cpp` at b77d969
(RTX PRO 6000; its memory is the RTX 5090's). PCIe 4 x16 and 5 x16 without NVLink."""

CHIPS = (
    Chip(
        "cpu", "CPU", "no GPU", None, _NO_FP8 | {"ao:rowwise": Cell(RUNS_EMULATED, "rowwise-cpu")}
    ),
    Chip(
        "before-fp8",
        "to 8.6",
        "V100, A100, RTX 30, MI200",
        (0, 0),
        _NO_FP8 | dict.fromkeys(_NVIDIA, Cell(REFUSED, "te-8.9")),
    ),
    Chip(
        "ada",
        "8.9",
        "L4, L40S, RTX 40",
        (8, 9),
        _NVIDIA
        | {
            "te:delayed": Cell(RUNS, "ada", _ADA_CUDA),
            "te:blockwise": Cell(REFUSED, "block-9.0"),
            "ao:rowwise": _ROWS_ADA,
            "native:rowwise": _ROWS_ADA,
        },
        advice=_PUBLISHED,
        rates=_RTX4090,
    ),
    Chip(
        "hopper",
        "9.0",
        "H100, H200",
        (9, 0),
        _NVIDIA
        | {
            "te:blockwise": Cell(RUNS, "block-cuda", _BLOCK_CUDA),
            "native:blockwise": Cell(RUNS, "block-e4m3", _BLOCK_CUDA, RUNS_EMULATED),
        },
        advice=_NATIVE,
        te_backend="te:dynamic",
        rates=H200,
        grouped_products=True,
    ),
    Chip(
        "blackwell",
        "10, 11",
        "B200, B300, Thor",
        (10, 0),
        _NVIDIA
        | {
            "te:mxfp8": _YES,
            "native:mxfp8": Cell(RUNS, "mxfp8-cuda", _MX_CUDA, RUNS_EMULATED),
        },
        advice=_TORCHAO,
        te_backend="te:mxfp8",
        rates=_B200,
    ),
    Chip(
        "rtx-blackwell",
        "12",
        "RTX 50, RTX PRO 6000, GB10",
        (12, 0),
        _NVIDIA
        | {
            "ao:rowwise": _ROWS_RTX,
            "native:rowwise": _ROWS_RTX,
            "native:mxfp8": Cell(RUNS, "mxfp8-rtx", (13, 0), RUNS_EMULATED, (2, 14)),
        },
        advice=_PUBLISHED,
        rates=_RTX5090,
    ),
    Chip(
        "mi300",
        "MI300",
        "gfx94",
        "gfx94",
        {
            "ao:tensorwise": _FNUZ,
            "ao:rowwise": _FNUZ,
            "native:dynamic": _OTHER_CODES,
            "native:rowwise": _OTHER_CODES,
        },
        advice=_OWN_CODES,
    ),
    Chip("mi350", "MI350", "gfx95", "gfx95", advice=_TORCHAO),
)
CPU, BEFORE_FP8, *_ = CHIPS


class Product(NamedTuple):
    """A chip by its product name, or a kind of chips by its key."""

    name: str
    gpu: tuple[int, int] | str | None
    """As of a `Chip`."""
    gib: int | None = None
    """Its memory. None for a kind of chips."""
    rates: Rates | None = None

    @property
    def chip(self) -> Chip:
        return chip_of(self.gpu)


SOLD = {product.name: product for product in (
    Product("v100", (7, 0), 32), Product("t4", (7, 5), 16), Product("a100", (8, 0), 80), Product("a100-40", (8, 0), 40),
    Product("rtx3090", (8, 6), 24), Product("l4", (8, 9), 24),
    Product("l40s", (8, 9), 48, Rates(362e12, 733e12, 0.864e12, 32e9, 12.5e9)),
    Product("rtx4090", (8, 9), 24, _RTX4090),
    Product("h100", (9, 0), 80, H200._replace(memory=3.35e12, source="the H200's curves by the H100's limits (SXM)")),
    Product("h200", (9, 0), 141, H200), Product("b200", (10, 0), 180, _B200), Product("b300", (10, 3), 270),
    Product("rtx5090", (12, 0), 32, _RTX5090), Product("rtxpro6000", (12, 0), 96, _PRO6000),
    Product("mi300x", "gfx942", 192), Product("mi325x", "gfx942", 256), Product("mi350x", "gfx950", 288),
)}  # fmt: skip
"""Memory is from NVIDIA's and AMD's data sheets (B200 and B300: a DGX's memory over its 8 GPUs).
Drivers show it in GiB, up to a percent less; 6 % less on cards with GDDR memory whose ECC is on."""
CARDS = {**SOLD, **{chip.key: Product(chip.key, chip.gpu) for chip in CHIPS}}
"""All names for chips, in lower case."""


def products_with_rates() -> list[str]:
    """Return the names of products whose limits are published."""
    return [name for name, product in SOLD.items() if product.rates is not None]


def product_named(name: str) -> Product:
    """Return the chip of a product such as "h100", or of a key of CHIPS. Raises `RecipeError` with
    the nearest name."""
    key = parsed("chip", word, name).lower().replace("_", "-").replace(" ", "")
    check_known("chip", key, CARDS)
    return CARDS[key]


_NO_AMD_FP8 = Advice("bf16", "", "PyTorch uses its bf16 products, and none in FP8")
_OLDER = (
    (
        (8, 0),
        Advice(
            "bf16", "", "it has bf16 products and none in FP8; msamp:O2 saves memory and costs time"
        ),
    ),
    (
        (7, 0),
        Advice(
            "fp16",
            "",
            "it has fp16 products and none in bf16: keep the loss scaler, and expect models "
            "trained in bf16 to overflow",
        ),
    ),
    ((0, 0), Advice("fp32", "", "it has no matrix units: lower precision brings no speed")),
    *((name, _NO_AMD_FP8) for name in ("gfx90a", "gfx908", "gfx11", "gfx12")),
    ("", Advice("fp32", "", "it has no bf16 matrix units")),
)
"""Advice for GPUs of BEFORE_FP8: the first that `_is_from` matches."""
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


def _is_from(gpu: tuple[int, int] | str | None, first: tuple[int, int] | str | None) -> bool:
    """Return True for a CUDA compute capability from `first` on, or a name that begins so."""
    if isinstance(gpu, str) and isinstance(first, str):
        return gpu.startswith(first)
    if isinstance(gpu, tuple) and isinstance(first, tuple):
        return gpu >= first
    return gpu is first


def chip_of(gpu: tuple[int, int] | str | None) -> Chip:
    """Return the chip of a CUDA compute capability, of AMD's name of an architecture, or of a CPU
    (None)."""
    return [BEFORE_FP8, *(chip for chip in CHIPS if _is_from(gpu, chip.gpu))][-1]


class Choice(NamedTuple):
    """The meaning of the backend `auto`."""

    backend: str
    reason: str


def auto_on(
    chip: Chip, te_runs: bool = False, serves: Callable[[str], bool] = lambda backend: True
) -> Choice:
    """Return the meaning of `auto` on a chip: the recommended backend. `serves` returns True if a
    backend can run and honours the given fields."""
    if not chip.fp8:
        return Choice("native", "no FP8 products in hardware here; native has a GPU's casts")
    advised, *_ = advice_for(chip.gpu, te_runs).backend.split(":")
    backend = next(filter(serves, (advised, "native", "ao")), advised)
    if backend == advised:
        return Choice(backend, f"recommended for {chip.examples}")
    return Choice(backend, f"{advised} cannot run here, or does not read the given fields")


def advice_for(
    gpu: tuple[int, int] | str | None, te_runs: bool = False, cpu_bf16: bool = False
) -> Advice:
    """Return the advice for a CUDA compute capability, for AMD's name of an architecture, or for a
    CPU (None)."""
    if gpu is None:
        return _CPUS[cpu_bf16]
    chip = chip_of(gpu)
    if chip.advice is None:
        return next(advice for first, advice in _OLDER if _is_from(gpu, first))
    if te_runs and chip.te_backend:
        return chip.advice._replace(backend=chip.te_backend)
    return chip.advice


def recommended() -> list[tuple[Chip, str, str]]:
    """Return each chip with FP8 products, and the backend to take without and with
    TransformerEngine: for doctor, README, guides and pictures alike."""
    return [
        (chip, advice_for(chip.gpu).backend, advice_for(chip.gpu, te_runs=True).backend)
        for chip in CHIPS
        if chip.fp8
    ]


def cell_of(backend: str, chip: Chip) -> Cell | None:
    """Return the cell of a backend such as "native:dynamic"; None for another package's backend."""
    return next((cell for backends, cell in chip.table.items() if backend in backends), None)


def described(chip: Chip, *releases: tuple[int, int] | None) -> dict[str, Any]:
    """Return a chip and every backend's products on it, with these releases of CUDA and PyTorch
    (none: new enough)."""
    products = []
    for backends, cell in chip.table.items():
        state, reason = cell.state_with(*releases), str(NOTES.get(cell.note, ""))
        install = (
            f"a PyTorch for CUDA, then {INSTALL_TE}" if backends[0].startswith("te:") else "nothing"
        )
        products.append(
            {"backends": backends, "state": state, "reason": reason, "install": install}
        )
    return {"key": chip.key, "title": chip.title, "examples": chip.examples, "products": products}


IN_SHORT = {RUNS: "FP8", RUNS_EMULATED: "emul.", REFUSED: "no"}


def rows() -> list[list[str]]:
    """Return a header, and a row for each backend."""
    numbers = {key: f" ({number})" for number, key in enumerate(NOTES, 1)}
    table = [["", *(chip.title for chip in CHIPS)]]
    for backends in DEFAULTS:
        cells = [chip.table[backends] for chip in CHIPS]
        texts = [IN_SHORT[cell.state] + numbers.get(cell.note, "") for cell in cells]
        table += [[backend, *texts] for backend in backends]
    return table


def legend() -> list[str]:
    examples = "; ".join(f"{chip.title}: {chip.examples}" for chip in CHIPS)
    states = "; ".join(f"{IN_SHORT[state]}: {meaning}" for state, meaning in MEANING.items())
    return [f"columns are CUDA compute capabilities and AMD's chips ({examples})", states, MEASURED]
