"""The one function that makes every FP8 product, and the engines it can use.

All three products of a linear layer are brought to one form, `A @ B.T` with A [m, k] and B [n, k]. Hopper's FP8 units
take both row-major alone, so that the contraction runs along contiguous memory; other engines take views as well.

    fprop   y  [tokens, out] = x  [tokens, in]  @ (w [out, in]).T
    dgrad   dx [tokens, in]  = dy [tokens, out] @ (w.T [in, out]).T
    wgrad   dw [out, in]     = dy.T [out, tokens] @ (x.T [in, tokens]).T

A GPU also wants k and n in multiples of 16, which `scaled_mm` pads to, never two E5M2 operands, and a bf16 output where
scales are per row. The last two are held on every device, so that what passes on a laptop is valid on a GPU.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from ..numerics.kernels import cpu_casts
from ..numerics.scaling import Quantized
from . import hardware

ALIGNMENT = 16
"""FP8 products take multiples of this in the contraction and in the columns of the result."""

SCALED_MM, BF16_EXACT, FP32_EXACT, EMULATED = "scaled_mm", "bf16-exact", "fp32-exact", "emulated"
VALUES = {BF16_EXACT: torch.bfloat16, FP32_EXACT: torch.float32, EMULATED: torch.float32}
"""In what the engines that have no FP8 products multiply the codes, all of which are values of either."""


def engine_for(device: torch.device, out_dtype: torch.dtype, scaling: str = "dynamic") -> str:
    """Which engine multiplies FP8 operands on this device, whose scales are those of a rule (`dynamic` stands for all
    rules that have no block scales).

    - `scaled_mm`: `torch._scaled_mm`, the hardware's FP8 units.
    - `bf16-exact`: every E4M3 and E5M2 value is a bf16 value, so a bf16 product with FP32 accumulation of the codes
      is the same product. Taken for bf16 results on a CPU that has such products in hardware.
    - `fp32-exact`: the same in FP32. Taken on a CPU for all else: without the hardware a bf16 product takes from 7 to
      1,000 times as long, and `torch._scaled_mm` is either this very product or, on some chips, as slow.
    - `emulated`: the codes in FP32, for devices that have no FP8 products, or products of other codes (MI300).
    """
    if device.type == "cuda":
        return engine_of_gpu(scaling, device)
    if device.type == "cpu":
        return exact_engine(out_dtype)
    return SCALED_MM if device.type == "meta" else EMULATED


@functools.cache
def engine_of_gpu(scaling: str, device: torch.device) -> str:
    """`engine_for` on a CUDA device: asked for every product, and always the same."""
    # one without a driver is a fake tensor's: judge it as the FP8 GPU that it stands for
    return SCALED_MM if not hardware.has_gpu() or hardware.gpu_multiplies(scaling, device) else EMULATED


def exact_engine(out_dtype: torch.dtype) -> str:
    """The engine of a CPU, for a result of this dtype."""
    return BF16_EXACT if out_dtype == torch.bfloat16 and hardware.cpu_bf16() else FP32_EXACT


engine_for = torch.compiler.assume_constant_result(engine_for)
_cpu_multiplies = torch.compiler.assume_constant_result(hardware.cpu_multiplies)


def scaled_product(a: Quantized, b: Quantized, out_dtype: torch.dtype, fast_accumulation: bool = False) -> torch.Tensor:
    """`(a.codes * a.scale_inv) @ (b.codes * b.scale_inv).T` with FP32 accumulation.

    Args:
        a: codes [m, k], scale_inv 0-dimensional or [m, 1].
        b: codes [n, k], scale_inv 0-dimensional or [n, 1]; both scales per tensor or both per row.
        out_dtype: bf16, fp16 or fp32. Per-row products are computed in bf16 and cast.
        fast_accumulation: let Hopper keep partial sums in fewer bits (`use_fast_accum`): for fprop only.

    Returns:
        [m, n] of out_dtype.
    """
    # a failure here is this package's fault, not the user's
    (m, k), (n, b_k) = a.codes.shape, b.codes.shape
    rowwise = a.scale_inv.dim() == 2
    assert k == b_k
    assert not (a.codes.dtype == b.codes.dtype == torch.float8_e5m2), "no GPU multiplies E5M2 by E5M2"
    assert a.scale_inv.dtype == b.scale_inv.dtype == torch.float32
    assert a.scale_inv.shape == ((m, 1) if rowwise else ()) and b.scale_inv.shape == ((n, 1) if rowwise else ())
    product_dtype = torch.bfloat16 if rowwise else out_dtype
    engine = engine_for(a.codes.device, product_dtype)
    if engine == SCALED_MM:
        return _scaled_mm(*a, *b, product_dtype, fast_accumulation).to(out_dtype)
    return exact_product(*a, *b, VALUES[engine], product_dtype).to(out_dtype)


def wgrad_dtype(blocks: bool, device: torch.device, weight_dtype: torch.dtype, out_dtype: torch.dtype) -> torch.dtype:
    """In what the weight's gradient comes out of its product, beside products in out_dtype.

    A GPU's FP8 units write FP32 as well where tensors have one scale (no `blocks`), so that the gradient of an FP32
    weight is rounded once and not cast. On a CPU products in bf16 are the faster ones.
    """
    in_fp32 = weight_dtype == torch.float32 and not blocks and engine_for(device, torch.float32) == SCALED_MM
    return torch.float32 if in_fp32 else out_dtype


def plain_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [m, k] @ b [n, k].T in high precision, of operands and result of one dtype. On a CPU that has no products of
    it in hardware in FP32, rounded once."""
    if a.device.type == "cpu" and not _cpu_multiplies(a.dtype):
        with torch.autocast("cpu", enabled=False):  # it would round the FP32 operands again
            return torch.mm(a.float(), b.float().t()).to(a.dtype)
    return torch.mm(a, b.t())


def pad(matrix: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Zero rows and columns up to the next multiples in the last two dimensions (a zero code adds nothing to a
    product)."""
    missing = -matrix.shape[-2] % rows, -matrix.shape[-1] % columns
    if not any(missing):
        return matrix
    widths = (0, missing[1], 0, missing[0])
    if matrix.dtype.itemsize > 1:
        return F.pad(matrix, widths)
    return F.pad(matrix.view(torch.uint8), widths).view(matrix.dtype)  # constant_pad has no float8 kernel


def row_major(matrix: torch.Tensor) -> torch.Tensor:
    """A view as memory of its own. Strides count in dimensions of size 1 too, where `is_contiguous` ignores them and a
    GPU's products do not."""
    # `contiguous()` of a fake CUDA tensor asks for a CUDA device; this does not
    in_rows = matrix.is_contiguous() and matrix.stride(-2) == matrix.shape[-1]
    return matrix if in_rows else matrix.clone(memory_format=torch.contiguous_format)


def _scaled_mm(a, a_scale_inv, b, b_scale_inv, out_dtype, fast_accumulation):
    n = b.shape[0]
    if a_scale_inv.dim() == 2:
        a_scale_inv = _in_one_column(a_scale_inv)
        b_scale_inv = _in_one_column(pad(b_scale_inv, ALIGNMENT, 1)).t()  # one scale a column of b.T
    product = torch._scaled_mm(
        row_major(pad(a, 1, ALIGNMENT)),
        row_major(pad(b, ALIGNMENT, ALIGNMENT)).t(),  # column-major
        scale_a=a_scale_inv,
        scale_b=b_scale_inv,
        out_dtype=out_dtype,
        use_fast_accum=fast_accumulation,
    )
    return product if product.shape[1] == n else product.narrow(1, 0, n)


def _in_one_column(scale_inv: torch.Tensor) -> torch.Tensor:
    """[n, 1] with both strides 1: a view of [1, n] has another, which counts as contiguous and is refused."""
    return scale_inv.reshape(-1).unsqueeze(1)


def exact_product(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    values_dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """`scaled_product` by a plain product of the codes as values of `values_dtype`, bf16 or FP32."""
    # one factor at a time: the product of two small scales may underflow where each alone does not. A bf16 product of
    # codes is scaled in FP32 and rounded again: at most one more half unit in the last place
    with torch.autocast(a.device.type, enabled=False):  # autocast would round the operands, or to fp16 their product
        if cpu_casts.serves(a) or cpu_casts.serves(b):
            return cpu_casts.product(a, b, a_scale_inv, b_scale_inv.t(), values_dtype, out_dtype)
        product = torch.mm(a.to(values_dtype), b.to(values_dtype).t())
        return (product.float() * a_scale_inv * b_scale_inv.t()).to(out_dtype)
