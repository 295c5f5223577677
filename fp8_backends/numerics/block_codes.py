"""`BlockCodes`: a frozen matrix as an FP8 checkpoint has it, E4M3 codes with a scale for each block of 128 x 128, in
one `torch.Tensor`.

    value = code * scale_inv        codes: [out, in]; scale_inv: FP32 [ceil(out / 128), ceil(in / 128)], any numbers

It holds codes that somebody else has made, and gives them back to the bit. Products read them as they lie. Everything
else gets the plain values; nothing writes to it but a copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

from ..errors import FP8BackendError
from .formats import E4M3
from .scaled_operations import written_to
from .scaling import SQUARES, Quantized

aten = torch.ops.aten


class BlockCodes(torch.Tensor):
    """To PyTorch it has the dtype of the values it stands for."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype):
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, strides=data.stride(), dtype=dtype, device=data.device
        )

    def __init__(self, data: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype) -> None:
        self._data, self._scale_inv = data, scale_inv

    def exact(self) -> torch.Tensor:
        """The plain values, in the tensor's dtype."""
        return SQUARES.dequantize(Quantized(*self.parts), torch.float32).to(self.dtype)

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What it stores: codes and scales."""
        return self._data, self._scale_inv

    def __tensor_flatten__(self):
        return ["_data", "_scale_inv"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner_tensors, dtype, outer_size, outer_stride):
        return BlockCodes(inner_tensors["_data"], inner_tensors["_scale_inv"], dtype)

    def __repr__(self) -> str:
        return f"BlockCodes({list(self.shape)} {self.dtype}, stored as E4M3, one scale for 128 x 128 elements)"

    def __reduce_ex__(self, protocol):
        others = {name: value for name, value in self.__dict__.items() if name not in ("_data", "_scale_inv")}
        return _rebuild, (self._data.view(torch.uint8), self._scale_inv, self.dtype, others)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        operation = _ON_CODES.get(func)
        result = NotImplemented if operation is None else operation(func, *args, **kwargs)
        return _on_values(func, args, kwargs) if result is NotImplemented else result


def _rebuild(data: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype, others: dict[str, Any]) -> BlockCodes:
    tensor = BlockCodes(data.view(E4M3.dtype), scale_inv, dtype)
    tensor.__dict__.update(others)
    return tensor


def _on_values(func, args, kwargs):
    if next(written_to(func, args, kwargs, BlockCodes), None) is not None:
        raise FP8BackendError(
            f"{func} would change the frozen codes of an FP8 checkpoint in place: "
            f"fp8_backends.restore(model) makes weights plain, to merge adapters or to train them"
        )
    return func(*tree_map(_plain, args), **tree_map(_plain, kwargs))


def _plain(value: Any) -> Any:
    return value.exact() if isinstance(value, BlockCodes) else value


def _same(func, tensor, *args, **kwargs):
    return BlockCodes(*tensor.parts, tensor.dtype)


def _clone(func, tensor, **kwargs):
    return BlockCodes(*(each.clone() for each in tensor.parts), tensor.dtype)


def _to_copy(func, tensor, *, dtype=None, device=None, non_blocking=False, **kwargs):
    if dtype is not None and not dtype.is_floating_point:
        return NotImplemented
    moved = (each.to(device, non_blocking=non_blocking, copy=True) for each in tensor.parts)
    return BlockCodes(*moved, dtype or tensor.dtype)


def _empty_like(func, tensor, *, dtype=None, device=None, **kwargs):
    empty = (torch.empty_like(each, device=device) for each in tensor.parts)
    return BlockCodes(*empty, dtype or tensor.dtype)


def _copy_(func, target, source, non_blocking=False):
    """Codes as they are; values by the scales that are there, so that what was saved of these codes is these codes. A
    block with larger values gets a scale of its own."""
    if not isinstance(target, BlockCodes):
        return NotImplemented
    if not isinstance(source, BlockCodes):
        values = source.to(target.device, torch.float32).expand(target.shape)
        amax, scale_inv = SQUARES.amax(values), target._scale_inv
        # half of the last step above 448 still rounds to it
        fits = amax <= scale_inv * (E4M3.max + 16)
        scale_inv = torch.where(fits, scale_inv, SQUARES.inverse(SQUARES.scale(amax, E4M3), amax))
        factor = torch.where(scale_inv > 0, scale_inv.reciprocal(), torch.zeros_like(scale_inv))
        source = BlockCodes(SQUARES.cast(values, factor, E4M3), scale_inv, target.dtype)
    target._data.copy_(source._data, non_blocking)
    target._scale_inv.copy_(source._scale_inv, non_blocking)
    return target


_ON_CODES = {
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten.empty_like.default: _empty_like,
    aten.copy_.default: _copy_,
}

# PyTorch's protocol for subclasses in files that `torch.load(weights_only=True)` may read
torch.serialization.add_safe_globals([BlockCodes, _rebuild])
