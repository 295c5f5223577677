"""Multiply quantized matrices: `generic_gemm`, like cuBLAS on TransformerEngine's device, and many
at once.

BLAS counts columns first, so in the row-major terms of PyTorch: with A [m, k] and B [n, k] after
their transpositions, D = B @ A.T, [n, m]. Codes are exact in FP32, products of two codes too; they
are summed in FP32, in the CPU's order.
"""

from __future__ import annotations

import math

import torch

from . import blocks
from .casts import DTYPES, FP8_DTYPES, any_layout, quantize


def generic_gemm(
    A,
    transA: bool,
    B,
    transB: bool,
    D,
    quantizer,
    output_dtype,
    bias: torch.Tensor | None,
    bias_type,
    gelu: bool,
    gelu_in,
    grad: bool,
    workspace,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap=None,
    comm_type=None,
    extra_output=None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> list:
    """Return [D, gradient of the bias, input of the GELU, extra output]; the last two are always
    None here.

    Raises:
        RuntimeError: cuBLAS or the compiled module refuse: sizes, or a missing transpose.
        NotImplementedError: GELU, overlap with communication.
    """
    if gelu or comm_overlap is not None or extra_output is not None:
        raise NotImplementedError(
            "generic_gemm: the stand-in does not emulate GELU or overlapped communication"
        )
    shape = _output_shape(_shape(A), transA, _shape(B), transB)
    product = _product(A, transA, B, transB) * alpha
    bias_gradient = None
    if bias is not None and grad:
        dtype = DTYPES[int(output_dtype)] if output_dtype is not None else B.dtype
        bias_gradient = B.reshape(-1, B.shape[-1]).float().sum(0).to(dtype)
    elif bias is not None:
        product = product + bias.float()
    out = _store(product.reshape(shape), D, accumulate, beta, output_dtype, A)
    return [out if quantizer is None else quantize(out, quantizer), bias_gradient, None, None]


def te_general_grouped_gemm(
    A,
    transA: bool,
    B,
    transB: bool,
    D: list[torch.Tensor],
    D_type,
    m_splits: list[int],
    bias: list[torch.Tensor],
    bias_type,
    single_output: bool,
    pre_gelu_out: list[torch.Tensor],
    grad: bool,
    workspace,
    workspaceSize: int,
    accumulate: bool,
    use_split_accumulator: bool,
    math_sm_count: int,
) -> list[torch.Tensor]:
    """Compute one product after the other (csrc/extensions/gemm.cpp): into consecutive rows of D[0]
    for a single output, else each into its own. Products with an empty operand are zeros. Returns
    `bias`, the gradients if `grad`."""
    outer = [
        _output_shape(_shape(a), transA, _shape(b), transB)[0] for a, b in zip(A, B, strict=True)
    ]
    outs = D[0].split(outer) if single_output else D
    for a, b, out, own in zip(A, B, outs, bias, strict=True):
        if 0 in _shape(a) or 0 in _shape(b):
            if not accumulate:
                out.zero_()
            if grad:
                own.zero_()
            continue
        product = (a, transA, b, transB, out, None, D_type, own if own.numel() else None, bias_type)
        _, bias_gradient, *_ = generic_gemm(
            *product,
            False,
            None,
            grad,
            workspace[0],
            workspaceSize,
            accumulate,
            use_split_accumulator,
        )
        if bias_gradient is not None:
            own.copy_(bias_gradient)
    return bias


def _store(
    product: torch.Tensor, D, accumulate: bool, beta: float | None, output_dtype, A
) -> torch.Tensor:
    if D is None:
        return product.to(DTYPES[int(output_dtype)] if output_dtype is not None else A.dtype)
    if D.shape != product.shape:
        raise RuntimeError(
            f"GEMM output has invalid dims (expected {tuple(product.shape)}, got {tuple(D.shape)})"
        )
    if accumulate:
        product = product + D.float() * (1.0 if beta is None else beta)
    return D.copy_(product)


def _output_shape(a: tuple[int, ...], transA: bool, b: tuple[int, ...], transB: bool) -> list[int]:
    """Return the leading dimensions of B and the outer one of A; raise if the contraction
    differs."""
    a_rows, b_rows = math.prod(a[:-1]), math.prod(b[:-1])
    if (a[-1] if transA else a_rows) != (b_rows if transB else b[-1]):
        raise RuntimeError(
            f"Invalid matrix dimensions for GEMM (A=({a_rows},{a[-1]}), transa={transA}, "
            f"B=({b_rows},{b[-1]}), transb={transB})"
        )
    return [*((b[-1],) if transB else b[:-1]), a_rows if transA else a[-1]]


def _product(A, transA: bool, B, transB: bool) -> torch.Tensor:
    """D in FP32, [n, m]."""
    if 0 in _shape(A) or 0 in _shape(B):
        return torch.zeros(math.prod(_output_shape(_shape(A), transA, _shape(B), transB)))
    if _is_plain(A) != _is_plain(B):
        raise RuntimeError("Inputs A and B to GEMM need to have compatible scaling modes")
    if _is_plain(A):
        a, b = A.reshape(-1, A.shape[-1]), B.reshape(-1, B.shape[-1])
        return (b.T if transB else b).float() @ (a.T if transA else a).float()
    if blocks.is_block_tensor(A):
        return blocks.product(A, transA, B, transB)
    a, b = _operand("A", A, rowwise=transA), _operand("B", B, rowwise=not transB)  # [m, k], [n, k]
    if a.dtype == b.dtype == torch.float8_e5m2:
        raise RuntimeError("cuBLAS has no product of two E5M2 operands")
    return scaled_codes(a, A._scale_inv, b, B._scale_inv)


def scaled_codes(a, a_scale_inv, b, b_scale_inv) -> torch.Tensor:
    """`(b * b_scale_inv) @ (a * a_scale_inv).T` of FP8 codes [m, k] and [n, k] with one scale each.
    FP32, [n, m]."""
    return b.float() @ a.float().T * b_scale_inv * a_scale_inv


def _operand(name: str, tensor, rowwise: bool) -> torch.Tensor:
    """FP8 codes with the contraction last, from the rowwise data or, on Hopper, from the
    transpose."""
    if rowwise:
        codes = tensor._data
    elif any_layout():
        codes = tensor._data.movedim(-1, 0)
    else:
        codes = None if tensor._transpose_invalid else tensor._transpose
    if codes is None:
        raise RuntimeError(f"Input {name} is missing {'row' if rowwise else 'column'}-wise usage")
    matrix = codes.reshape(-1, codes.shape[-1]) if rowwise else codes.reshape(codes.shape[0], -1)
    if matrix.shape[1] % 16:
        raise RuntimeError(
            f"Leading dimension requirement on {name} for FP8 GEMM. Caller must pad."
        )
    return matrix.contiguous().view(FP8_DTYPES[int(tensor._fp8_dtype)])


def _is_plain(operand) -> bool:
    return type(operand) in (torch.Tensor, torch.nn.Parameter)


def _shape(operand) -> torch.Size:
    return operand.shape if isinstance(operand, torch.Tensor) else operand.size()
