"""`GatheredCodes`: a weight gathered by FSDP2 as the FP8 codes of the products, in one
`torch.Tensor`.

It replaces the weight until FSDP2 frees the gathered memory. The high-precision values stay on the
ranks with its rows, so every other read raises.
"""

import torch
from torch.utils._pytree import tree_leaves

from ..errors import FP8BackendError
from ..formats.scaling import Quantized

aten = torch.ops.aten
FPROP, DGRAD = "fprop", "dgrad"
_CODES = tuple(f"{product}_{part}" for product in (FPROP, DGRAD) for part in Quantized._fields)
WEIGHT_AMAX = "weight_amax"


def _part(name: str) -> property:
    return property(lambda weight: weight.parts[name])


class GatheredCodes(torch.Tensor):
    """A tensor with the weight's shape and strides and the dtype of its gradient.

    Attributes:
        parts: the gathered tensors by name. All aliases share this dictionary, because FSDP2
            gathers again into the Parameter saved by a graph. `fprop_codes` and `dgrad_codes` are
            FP8 of the weight's shape, one tensor if one cast serves both products;
            `fprop_scale_inv` and `dgrad_scale_inv` as in `Quantized`, in the weight's layout, for
            experts [experts, rows of blocks, blocks in a row]; `weight_amax` is max |x|, FP32,
            0-dimensional or [experts], for the delayed rule.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    fprop_codes, fprop_scale_inv = _part(_CODES[0]), _part(_CODES[1])
    dgrad_codes, dgrad_scale_inv = _part(_CODES[2]), _part(_CODES[3])
    weight_amax = _part(WEIGHT_AMAX)

    @staticmethod
    def __new__(cls, parts: dict[str, torch.Tensor], dtype: torch.dtype):
        codes = next(parts[name] for name in _CODES if name in parts)
        return torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, strides=codes.stride(), dtype=dtype, device=codes.device
        )

    def __init__(self, parts: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
        self.parts = parts

    def read_by(self, product: str) -> Quantized:
        """Return the codes of FPROP or DGRAD, in the weight's layout. Raises `FP8BackendError` if
        not gathered now."""
        codes = self.parts.get(f"{product}_codes")
        if codes is None or (
            not torch.compiler.is_compiling() and codes.untyped_storage().nbytes() == 0
        ):
            raise self.error(
                f"those that {product} reads are not here now: forward gathers fprop's, backward "
                "gathers dgrad's, and code that was compiled for one of them finds the other"
            )
        return Quantized(codes, self.parts[f"{product}_scale_inv"])

    def error(self, what: str) -> FP8BackendError:
        """Return the error for an operation that needs more than these codes."""
        return FP8BackendError(
            f"a weight of shape {list(self.shape)} was gathered by FSDP2 as FP8 codes, and {what}. "
            "Use enable_fsdp_float8_all_gather=False"
        )

    def __tensor_flatten__(self):
        return list(self.parts), self.dtype

    @staticmethod
    def __tensor_unflatten__(inner_tensors, dtype, outer_size, outer_stride):
        return GatheredCodes(inner_tensors, dtype)

    def __repr__(self) -> str:
        return f"GatheredCodes({list(self.shape)} {self.dtype}, with {', '.join(self.parts)})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in _ALIASES or (func == aten.as_strided.default and is_whole(*args)):
            return GatheredCodes(args[0].parts, args[0].dtype)
        weight = next(
            leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, GatheredCodes)
        )
        raise weight.error(f"{func} asks for its values")


_ALIASES = (aten.detach.default, aten.alias.default, aten.lift_fresh.default)


def is_whole(weight: torch.Tensor, size, stride, storage_offset=None) -> bool:
    """Return True for the weight's own geometry, which FSDP2 asks for."""
    return (*size,) == weight.shape and (*stride,) == weight.stride() and not storage_offset


class WithoutTokens(torch.autograd.Function):
    """Return the output [..., features] of an empty input: reads no weights, and gives them zero
    gradients."""

    @staticmethod
    def forward(ctx, x, features, dtype, *weights):
        ctx.like = [None if t is None else (t.shape, t.dtype) for t in (x, None, None, *weights)]
        return x.new_empty(*x.shape[:-1], features, dtype=dtype)

    @staticmethod
    def backward(ctx, gradient):
        return tuple(
            torch.zeros(like[0], dtype=like[1], device=gradient.device)
            if like is not None and needed
            else None
            for like, needed in zip(ctx.like, ctx.needs_input_grad, strict=True)
        )
