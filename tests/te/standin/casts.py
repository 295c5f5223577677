"""Cast to FP8 with one scale a tensor (delayed and current scaling), and share code between
recipes.

Follows the kernels of transformer_engine/common (cast, recipe, transpose): a value is FP32(x) *
scale, rounded to nearest even and saturated; NaN stays NaN; scale_inv is 1 / scale in FP32. Codes
are kept as uint8, beside their transpose where a quantizer asks for columnwise use (a Hopper GPU
has FP8 products in one layout only).
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from . import blocks

FP8_DTYPES = {7: torch.float8_e4m3fn, 8: torch.float8_e5m2}
"""TransformerEngine's number of an FP8 type -> torch's."""
DTYPES = {
    0: torch.uint8,
    2: torch.int32,
    4: torch.float32,
    5: torch.float16,
    6: torch.bfloat16,
    **FP8_DTYPES,
}
FLT_MAX = torch.finfo(torch.float32).max


def quantize(tensor: torch.Tensor, quantizer, output=None, noop: torch.Tensor | None = None):
    """`tensor` cast by a quantizer of TransformerEngine's Python, into `output` or a new quantized
    tensor."""
    x = tensor.detach().contiguous()
    if output is None:
        output = create_empty_quantized_tensor(quantizer, x.shape, x.dtype, x.device, False)
    if x.numel() and not (noop is not None and noop.item() == 1):
        _cast_into(x, quantizer, output)
    return output


def create_empty_quantized_tensor(quantizer, shape, dtype: torch.dtype, device, pin_memory: bool):
    """Return a quantized tensor of this shape with unset codes: `dtype` is its nominal one."""
    if blocks.is_block_quantizer(quantizer):
        return blocks.create(quantizer, torch.Size(shape), dtype, device)
    return _create_per_tensor(quantizer, torch.Size(shape), dtype, device)


def dequantize(input, otype) -> torch.Tensor:
    """The values of a quantized tensor: FP32(code) * scale_inv, cast to `otype`."""
    dtype = DTYPES[int(otype)]
    if blocks.is_block_tensor(input):
        return blocks.dequantize(input).to(dtype)
    codes = input._data.view(FP8_DTYPES[int(input._fp8_dtype)])
    return (codes.float() * input._scale_inv).to(dtype)


def bgrad_quantize(input: torch.Tensor, quantizer) -> list:
    """The bias gradient, summed from the gradient before it is cast, and the cast gradient."""
    rows = input.detach().reshape(-1, input.shape[-1])
    bias_gradient = rows.float().sum(0).to(input.dtype)
    return [bias_gradient, input if quantizer is None else quantize(input, quantizer)]


def split_quantize(
    tensor: torch.Tensor, split_sections, quantizer_list, disable_bulk_allocation: bool = False
) -> list:
    """Each section of the rows with its own quantizer."""
    sections = tensor.split(list(split_sections))
    return [
        quantize(part, quantizer) for part, quantizer in zip(sections, quantizer_list, strict=True)
    ]


def fused_multi_row_padding(
    input: torch.Tensor, output: torch.Tensor, input_row_list, padded_input_row_list
) -> None:
    """Copy the rows of each section, and zeros behind them, into `output`
    (common/util/padding.cu)."""
    for rows, padded in zip(
        input.split(input_row_list), output.split(padded_input_row_list), strict=True
    ):
        padded.zero_()[: len(rows)] = rows


def fused_multi_row_unpadding(
    input: torch.Tensor, output: torch.Tensor, input_row_list, unpadded_input_row_list
) -> None:
    """Copy the first rows of each section into `output`."""
    for padded, rows in zip(
        input.split(input_row_list), output.split(unpadded_input_row_list), strict=True
    ):
        rows.copy_(padded[: len(rows)])


def fp8_transpose(input: torch.Tensor, dtype, *, out: torch.Tensor | None) -> torch.Tensor:
    """Codes with the last dimension first. uint8 in and out."""
    transposed = _last_dimension_first(input)
    return transposed if out is None else out.copy_(transposed)


def compute_amax(input: torch.Tensor, amax: torch.Tensor) -> None:
    amax.copy_(amax_of(input))


def swap_first_dims(tensor: torch.Tensor, *, out: torch.Tensor | None) -> torch.Tensor:
    swapped = tensor.transpose(0, 1).contiguous()
    return swapped if out is None else out.copy_(swapped)


def amax_of(x: torch.Tensor) -> torch.Tensor:
    """max |x| in FP32, 0-dimensional. The kernels' fmaxf passes NaN over."""
    return x.float().abs().nan_to_num(nan=0.0, posinf=float("inf")).amax()


def scale_from_amax(
    amax: torch.Tensor, fp8_max: float, epsilon: float, power_of_two: bool, for_inf: float
):
    """`compute_scale_from_amax` of common/recipe/recipe_common.cuh, element by element. FP32 in and
    out."""
    amax = torch.where(amax < epsilon, torch.full_like(amax, epsilon), amax)
    scale = torch.full_like(amax, fp8_max) / amax
    scale = torch.where(torch.isinf(scale), torch.full_like(scale, for_inf), scale)
    if power_of_two:
        # 0xFF800000: sign and exponent
        scale = (scale.view(torch.int32) & -0x00800000).view(torch.float32)
    return torch.where((amax == 0) | ~torch.isfinite(amax), torch.ones_like(scale), scale)


def codes_of(scaled: torch.Tensor, fp8_dtype: torch.dtype) -> torch.Tensor:
    """FP32 values, already scaled, as saturated FP8 codes in uint8."""
    largest = torch.finfo(fp8_dtype).max
    return scaled.clamp(-largest, largest).to(fp8_dtype).view(torch.uint8)


def _cast_into(x: torch.Tensor, quantizer, output) -> None:
    if blocks.is_block_quantizer(quantizer):
        blocks.cast_into(x, quantizer, output)
        return
    scale = (
        _delayed_scale(x, quantizer)
        if type(quantizer).__name__ == "Float8Quantizer"
        else _current_scale(x, quantizer)
    )
    codes = codes_of(x.float() * scale, FP8_DTYPES[int(quantizer.dtype)])
    on_hopper = not any_layout()
    output._data = _into(output._data, codes) if quantizer.rowwise_usage or not on_hopper else None
    with_transpose = quantizer.columnwise_usage and on_hopper
    output._transpose = (
        _into(output._transpose, _last_dimension_first(codes)) if with_transpose else None
    )
    output._transpose_invalid = not with_transpose
    output._fp8_dtype = quantizer.dtype
    output._scale_inv.copy_(scale.reciprocal())


def _delayed_scale(x: torch.Tensor, quantizer) -> torch.Tensor:
    """Return the current scale. The amax of x joins the amaxes recorded since the last update."""
    quantizer.amax.copy_(torch.fmax(quantizer.amax, amax_of(x)))
    return quantizer.scale.reshape(())


def _current_scale(x: torch.Tensor, quantizer) -> torch.Tensor:
    amax = amax_of(x)
    if quantizer.with_amax_reduction:
        dist.all_reduce(
            amax, dist.ReduceOp.MAX, group=quantizer._canonicalized_amax_reduction_group()
        )
    largest = torch.finfo(FP8_DTYPES[int(quantizer.dtype)]).max
    return scale_from_amax(
        amax, largest, quantizer.amax_epsilon, quantizer.force_pow_2_scales, FLT_MAX
    )


def _create_per_tensor(quantizer, shape: torch.Size, dtype: torch.dtype, device):
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

    def empty(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=device)

    on_hopper = not any_layout()
    parts = {
        "data": empty(*shape) if quantizer.rowwise_usage or not on_hopper else None,
        "data_transpose": empty(*shape[-1:], *shape[:-1])
        if quantizer.columnwise_usage and on_hopper
        else None,
        "fp8_scale_inv": torch.empty(1, dtype=torch.float32, device=device),
        "fp8_dtype": quantizer.dtype,
        "quantizer": quantizer,
    }
    if quantizer.internal:
        return Float8TensorStorage(**parts, fake_dtype=dtype)
    return Float8Tensor(shape=shape, dtype=dtype, device=device, **parts)


def any_layout() -> bool:
    """Return True if the device multiplies FP8 in every layout, and needs no transposes."""
    from transformer_engine.pytorch.utils import is_non_tn_fp8_gemm_supported

    return is_non_tn_fp8_gemm_supported()


def _last_dimension_first(codes: torch.Tensor) -> torch.Tensor:
    return codes.movedim(-1, 0).contiguous()


def _into(buffer: torch.Tensor | None, codes: torch.Tensor) -> torch.Tensor:
    return codes if buffer is None else buffer.copy_(codes)
