"""The functions behind every FP8 product, and their engines.

All three products of a linear layer have one form, `A @ B.T` with A [m, k] and B [n, k]: the
contraction runs along contiguous memory, as Hopper's FP8 units need it. A GPU wants k and n in
multiples of 16 (`scaled_mm` pads to them), never two E5M2 operands, and a bf16 output with scales
per row. Every device keeps the last two rules.

Engines without block scales multiply these powers of two into the codes, which rounds nothing in
FP32, and in bf16 for blocks with a largest value of at least 2**-115: all engines agree up to the
order of the FP32 sums, and one rounding.
"""

import contextlib
import functools

import torch
import torch.nn.functional as F

from ..formats.scaling import MX, ROWS, SQUARES, VECTORS, Blocks, Quantized
from ..kernels import cpu_casts
from ..kernels.quantize import dequantize_blocks
from . import hardware
from .interface import ALIGNMENT

SCALED_MM, BF16_EXACT, FP32_EXACT, EMULATED = "scaled_mm", "bf16-exact", "fp32-exact", "emulated"
VALUES = {BF16_EXACT: torch.bfloat16, FP32_EXACT: torch.float32, EMULATED: torch.float32}
"""The dtype in which engines without FP8 products multiply the codes; it holds every code
exactly."""


def engine_for(
    device: torch.device, out_dtype: torch.dtype, scaling: str = "dynamic", has_e5m2: bool = False
) -> str:
    """Return the engine for FP8 products on this device with the scales of a rule (`dynamic` stands
    for all rules without block scales). has_e5m2: an operand is E5M2, which PyTorch does not
    multiply in blocks of 128.

    - `scaled_mm`: `torch._scaled_mm`; block scales 1 x 128 (`blockwise`) on Hopper, 1 x 32
      (`mxfp8`) on Blackwell.
    - `bf16-exact`: a bf16 product of the codes with FP32 accumulation, for bf16 results on a CPU
      with bf16 products.
    - `fp32-exact`: the same in FP32, for all else on a CPU.
    - `emulated`: the codes in FP32, for devices without FP8 products or with other codes (MI300).
    """
    if device.type == "cuda":
        return EMULATED if has_e5m2 and scaling == "blockwise" else engine_of_gpu(scaling, device)
    if device.type == "cpu":
        if out_dtype == torch.bfloat16 and hardware.cpu_bf16():
            return BF16_EXACT
        return FP32_EXACT
    return SCALED_MM if device.type == "meta" else EMULATED


@functools.cache
def engine_of_gpu(scaling: str, device: torch.device) -> str:
    """Return `engine_for` of a CUDA device. Cached, since every product asks."""
    # fake tensors have CUDA devices without a driver: they stand for an FP8 GPU
    return (
        SCALED_MM
        if not hardware.has_gpu() or hardware.gpu_multiplies(scaling, device)
        else EMULATED
    )


engine_for = torch.compiler.assume_constant_result(engine_for)
_cpu_multiplies = torch.compiler.assume_constant_result(hardware.cpu_multiplies)


def product_dtype(blocks: Blocks | None, out_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a product of codes in these blocks is computed, before a cast to
    `out_dtype`. In blocks of the contraction: fp16 by way of FP32."""
    if blocks is None:
        return out_dtype
    is_bf16 = blocks is ROWS or out_dtype == torch.bfloat16
    return torch.bfloat16 if is_bf16 else torch.float32


def scaled_product(
    a: Quantized,
    b: Quantized,
    out_dtype: torch.dtype,
    fast_accumulation: bool = False,
) -> torch.Tensor:
    """Return `(a.codes * a.scale_inv) @ (b.codes * b.scale_inv).T` with FP32 accumulation, [m, n]
    of out_dtype.

    Codes [m, k] and [n, k]; scale_inv both 0-dimensional, or [m, 1] and [n, 1]: such products are
    computed in bf16 and cast. fast_accumulation: let Hopper keep partial sums in fewer bits
    (`use_fast_accum`); for fprop only.
    """
    # a failure here is this package's fault, not the user's
    (m, k), (n, b_k) = a.codes.shape, b.codes.shape
    rowwise = a.scale_inv.dim() == 2
    assert k == b_k
    assert not (a.codes.dtype == b.codes.dtype == torch.float8_e5m2), (
        "no GPU multiplies E5M2 by E5M2"
    )
    assert a.scale_inv.dtype == b.scale_inv.dtype == torch.float32
    assert a.scale_inv.shape == ((m, 1) if rowwise else ()) and b.scale_inv.shape == (
        (n, 1) if rowwise else ()
    )
    dtype = product_dtype(ROWS if rowwise else None, out_dtype)
    engine = engine_for(a.codes.device, dtype)
    if engine == SCALED_MM:
        product = _scaled_mm(*a, *b, dtype, fast_accumulation)
    else:
        product = exact_product(*a, *b, VALUES[engine], dtype)
    if rowwise:
        product = product.to(out_dtype)
    return product


def block_scaled_product(
    a: Quantized, a_blocks: Blocks, b: Quantized, b_blocks: Blocks, out_dtype: torch.dtype
) -> torch.Tensor:
    """Return the values of a [m, k] @ the values of b [n, k].T with FP32 accumulation, [m, n] of
    out_dtype. a: codes in VECTORS or MX; b: in VECTORS or SQUARES, or in MX if a is."""
    assert a.codes.shape[1] == b.codes.shape[1]
    assert not (a.codes.dtype == b.codes.dtype == torch.float8_e5m2), (
        "no GPU multiplies E5M2 by E5M2"
    )
    assert a_blocks is MX or a_blocks is VECTORS, "no product multiplies codes in other blocks"
    dtype = product_dtype(a_blocks, out_dtype)
    has_e5m2 = torch.float8_e5m2 in (a.codes.dtype, b.codes.dtype)
    scaling = "mxfp8" if a_blocks is MX else "blockwise"
    engine = engine_for(a.codes.device, dtype, scaling, has_e5m2)
    if engine == SCALED_MM:
        multiply = _mx_scaled_mm if a_blocks is MX else _vector_scaled_mm
        product = multiply(a, b, b_blocks, dtype)
        return product.narrow(0, 0, a.codes.shape[0]).narrow(1, 0, b.codes.shape[0]).to(out_dtype)
    with _in_own_dtypes(a.codes):
        values = (
            dequantize_blocks(a, a_blocks, VALUES[engine]),
            dequantize_blocks(b, b_blocks, VALUES[engine]),
        )
        product = torch.mm(values[0], values[1].t())
    return product.to(out_dtype)


def _in_own_dtypes(operand: torch.Tensor) -> contextlib.AbstractContextManager:
    """Switch autocast off, which would round FP32 operands, or a product to fp16. Where it is off,
    its context takes longer than a small product."""
    device = operand.device.type
    if torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()


def plain_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a [m, k] @ b [n, k].T in high precision, operands and result of one dtype. A CPU
    without products of this dtype in hardware multiplies in FP32 and rounds once."""
    if a.device.type == "cpu" and not _cpu_multiplies(a.dtype):
        with _in_own_dtypes(a):
            return torch.mm(a.float(), b.float().t()).to(a.dtype)
    return torch.mm(a, b.t())


def wgrad_dtype(
    blocks: bool, device: torch.device, weight_dtype: torch.dtype, out_dtype: torch.dtype
) -> torch.dtype:
    """Return the dtype of wgrad's product, given out_dtype of the others. A GPU's FP8 units write
    FP32 too for tensors with one scale: an FP32 weight's gradient is then rounded once. On a CPU,
    bf16 products are faster."""
    if blocks or weight_dtype != torch.float32:
        return out_dtype
    is_scaled_mm = engine_for(device, torch.float32) == SCALED_MM
    return torch.float32 if is_scaled_mm else out_dtype


def pad(matrix: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Append zeros up to the next multiples in the last two dimensions. A zero code adds nothing to
    a product."""
    height, width = matrix.shape[-2:]
    if not (height % rows or width % columns):
        return matrix
    widths = (0, -width % columns, 0, -height % rows)
    if matrix.dtype.itemsize > 1:
        return F.pad(matrix, widths)
    # constant_pad has no float8 kernel
    return F.pad(matrix.view(torch.uint8), widths).view(matrix.dtype)


def row_major(matrix: torch.Tensor) -> torch.Tensor:
    """Copy a view that is not row-major: GPUs check strides of size 1 too, unlike
    `is_contiguous`."""
    # `contiguous()` of a fake CUDA tensor asks for a CUDA device; this does not
    in_rows = matrix.is_contiguous() and matrix.stride(-2) == matrix.shape[-1]
    return matrix if in_rows else matrix.clone(memory_format=torch.contiguous_format)


def _scaled_mm(a, a_scale_inv, b, b_scale_inv, out_dtype, fast_accumulation):
    n = b.shape[0]
    if a_scale_inv.dim() == 2:
        # both strides 1: a view of [1, n] has another, counts as contiguous, and is refused
        a_scale_inv = a_scale_inv.reshape(-1).unsqueeze(1)
        # one scale a column of b.T
        b_scale_inv = pad(b_scale_inv, ALIGNMENT, 1).reshape(-1).unsqueeze(1).t()
    product = torch._scaled_mm(
        row_major(pad(a, 1, ALIGNMENT)),
        row_major(pad(b, ALIGNMENT, ALIGNMENT)).t(),  # column-major
        scale_a=a_scale_inv,
        scale_b=b_scale_inv,
        out_dtype=out_dtype,
        use_fast_accum=fast_accumulation,
    )
    return product if product.shape[1] == n else product.narrow(1, 0, n)


def exact_product(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    values_dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Compute `scaled_product` as a plain product of the codes as values of `values_dtype`, bf16 or
    FP32."""
    # one factor at a time: the product of two small scales may underflow although neither does. A
    # bf16 product of codes is scaled in FP32 and rounded again: at most one more half unit in the
    # last place
    with _in_own_dtypes(a):
        if cpu_casts.is_on_host(a) and max(a.numel(), b.numel()) >= cpu_casts.FEWEST_TO_CAST:
            return cpu_casts.product(a, b, a_scale_inv, b_scale_inv.t(), values_dtype, out_dtype)
        product = torch.mm(a.to(values_dtype), b.to(values_dtype).t())
        return (product.float() * a_scale_inv * b_scale_inv.t()).to(out_dtype)


_SCALED_MM = torch.ops.aten._scaled_mm_v2
"""The operator behind `torch.nn.functional.scaled_mm`, a function that the compiler of torch 2.11
cannot trace."""


def _vector_scaled_mm(
    a: Quantized, b: Quantized, b_blocks: Blocks, out_dtype: torch.dtype
) -> torch.Tensor:
    # on Hopper: the contraction in multiples of 128. Scales of VECTORS are stored column after
    # column, scales of SQUARES row after row, in multiples of four to a row
    in_squares, kinds = b_blocks is SQUARES, F.ScalingType
    return _block_scaled_mm(
        row_major(pad(a.codes, ALIGNMENT, 128)),
        row_major(pad(b.codes, 128 if in_squares else ALIGNMENT, 128)),
        _by_columns(a.scale_inv),
        kinds.BlockWise1x128.value,
        row_major(pad(b.scale_inv, 1, 4)) if in_squares else _by_columns(b.scale_inv),
        (kinds.BlockWise128x128 if in_squares else kinds.BlockWise1x128).value,
        out_dtype,
    )


def _by_columns(scale_inv: torch.Tensor) -> torch.Tensor:
    """Copy the scales, transposed."""
    return pad(scale_inv, ALIGNMENT, 1).t().clone(memory_format=torch.contiguous_format)


def _mx_scaled_mm(
    a: Quantized, b: Quantized, b_blocks: Blocks, out_dtype: torch.dtype
) -> torch.Tensor:
    # on Blackwell: all sizes in multiples of 32, and swizzled scales
    (a, a_scale_inv), (b, b_scale_inv) = (
        (row_major(pad(q.codes, 32, 32)), swizzled(q.scale_inv)) for q in (a, b)
    )
    kind = F.ScalingType.BlockWise1x32.value
    return _block_scaled_mm(a, b, a_scale_inv, kind, b_scale_inv, kind, out_dtype)


def _block_scaled_mm(*operands) -> torch.Tensor:
    """Multiply; in compiled code inside this package's operator, since Inductor of torch 2.13 swaps
    PyTorch's for the older `_scaled_mm`, with scales of other layouts."""
    return (block_scaled_mm if torch.compiler.is_compiling() else _multiply)(*operands)


def _multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    a_kind: int,
    b_scale_inv: torch.Tensor,
    b_kind: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Return a [m, k] @ b [n, k].T; all operands row-major. Scales of vectors and squares are
    stored transposed; scales of mxfp8 are flat and swizzled, in uint8, since Inductor has no code
    for E8M0."""
    scales = *_scales(a_scale_inv, a_kind), *_scales(b_scale_inv, b_kind)
    return _SCALED_MM(a, b.t(), *scales, None, out_dtype)


def _scales(scale_inv: torch.Tensor, kind: int) -> tuple[list[torch.Tensor], list[int], list[int]]:
    if kind == F.ScalingType.BlockWise1x32.value:
        swizzle = F.SwizzleType.SWIZZLE_32_4_4.value
        return [scale_inv.view(torch.float8_e8m0fnu)], [kind], [swizzle]
    return [scale_inv.t()], [kind], []


block_scaled_mm = torch.library.custom_op(
    "fp8_backends::block_scaled_mm", _multiply, mutates_args=()
)
"""`_multiply`, opaque to a compiler."""


@block_scaled_mm.register_fake
def _(a, b, a_scale_inv, a_kind, b_scale_inv, b_kind, out_dtype) -> torch.Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)


def swizzled(scales: torch.Tensor) -> torch.Tensor:
    """Reorder uint8 scales [rows, blocks in a row] to cuBLAS's flat order: tiles of 128 x 4 one
    after the other, and in a tile row 32 i + j at place 4 j + i, so that each thread finds its four
    rows side by side."""
    scales = pad(scales, 128, 4)
    tiles = scales.view(scales.shape[0] // 128, 4, 32, scales.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)
