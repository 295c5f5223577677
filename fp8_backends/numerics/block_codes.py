"""`BlockCodes`: a frozen matrix as an FP8 checkpoint has it, E4M3 codes with a scale for each block of 128 x 128, in
one `torch.Tensor`.

    value = code * scale_inv        codes: [out, in]; scale_inv: FP32 [ceil(out / 128), ceil(in / 128)], any numbers

It holds codes that somebody else has made, and gives them back to the bit. Products read them as they lie. Everything
else gets the plain values. Nothing writes to it but a copy of the whole: an operation in place is refused, through any
view of it (`FrozenView`), too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

from ..errors import FP8BackendError
from .formats import E4M3
from .scaled_operations import UNSAFE_VIEWS, returns_view, written_to
from .scaled_tensor import WithoutMemory
from .scaling import SQUARES, Quantized
from .state_dict_copies import StateDictCopies

aten = torch.ops.aten
_STORED = ("_data", "_scale_inv", "state_dict_copies")
REFUSAL = (
    "would change the frozen codes of an FP8 checkpoint in place: fp8_backends.restore(model) makes weights "
    "plain, to merge adapters or to train them, and `weight + 0` is a plain copy"
)


class Frozen(WithoutMemory):
    """A tensor that is read as its plain values, `exact()`, and refuses to be written to."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def values(self) -> torch.Tensor:
        return self.exact()

    def share_memory_(self) -> Frozen:
        """Move what is held to memory that other processes can see."""
        for part in self.parts:
            part.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether other processes can see what is held."""
        return all(part.is_shared() for part in self.parts)

    @property
    def data(self) -> torch.Tensor:
        """A view that autograd knows nothing of. Nothing can be assigned but the tensor's own: `torch.Tensor.data`
        would change nothing."""
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        if type(values) is not type(self) or any(a is not b for a, b in zip(values.parts, self.parts, strict=True)):
            raise FP8BackendError(f"an assignment to `.data` {REFUSAL}")

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        operation = _ON_CODES.get(func) if args and isinstance(args[0], BlockCodes) else None
        result = NotImplemented if operation is None else operation(func, *args, **kwargs)
        return _on_values(func, args, kwargs) if result is NotImplemented else result


class BlockCodes(Frozen):
    """To PyTorch it has the dtype of the values it stands for."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype):
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, strides=data.stride(), dtype=dtype, device=data.device
        )

    def __init__(self, data: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype) -> None:
        self._data, self._scale_inv, self.state_dict_copies = data, scale_inv, StateDictCopies()

    def exact(self) -> torch.Tensor:
        """The plain values, in the tensor's dtype."""
        self.state_dict_copies.check()
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
        others = {name: value for name, value in self.__dict__.items() if name not in _STORED}
        return _rebuild, (self._data.view(torch.uint8), self._scale_inv, self.dtype, others)


def _rebuild(data: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype, others: dict[str, Any]) -> BlockCodes:
    tensor = BlockCodes(data.view(E4M3.dtype), scale_inv, dtype)
    tensor.__dict__.update(others)
    return tensor


class FrozenView(Frozen):
    """Plain values of which a `BlockCodes` is asked for a view. They are a copy: what would write to them is refused,
    since the codes would not change."""

    @staticmethod
    def __new__(cls, values: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=values.device,
        )

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def exact(self) -> torch.Tensor:
        """The plain values, in the tensor's dtype."""
        return self._values

    @property
    def parts(self) -> tuple[torch.Tensor]:
        """What it holds: the values."""
        return (self._values,)

    def __tensor_flatten__(self):
        return ["_values"], None

    @staticmethod
    def __tensor_unflatten__(inner_tensors, context, outer_size, outer_stride):
        return FrozenView(inner_tensors["_values"])

    def __repr__(self) -> str:
        return f"FrozenView({self._values})"

    def __reduce_ex__(self, protocol):
        return self._values.clone().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        return memo.setdefault(id(self), self._values.clone())


def _on_values(func, args, kwargs):
    if next(written_to(func, args, kwargs, Frozen), None) is not None:
        raise FP8BackendError(f"{func} {REFUSAL}")
    result = func(*tree_map(_plain, args), **tree_map(_plain, kwargs))
    is_view = isinstance(args[0], Frozen) and (returns_view(func) or func in UNSAFE_VIEWS)
    return tree_map(FrozenView, result) if is_view else result


def _plain(value: Any) -> Any:
    return value.exact() if isinstance(value, Frozen) else value


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
    if not isinstance(source, BlockCodes):
        values = source.to(target.device, torch.float32).expand(target.shape)
        amax, scale_inv = SQUARES.amax(values), target._scale_inv
        # half of the last step above 448 still rounds to it
        fits = amax <= scale_inv * (E4M3.max + 16)
        scale_inv = torch.where(fits, scale_inv, SQUARES.inverse(SQUARES.scale(amax, E4M3), amax))
        factor = torch.where(scale_inv > 0, scale_inv.reciprocal(), torch.zeros_like(scale_inv))
        source = BlockCodes(SQUARES.cast(values, factor, E4M3), scale_inv, target.dtype)
    target.state_dict_copies.accept()
    target._data.copy_(source._data, non_blocking)
    target._scale_inv.copy_(source._scale_inv, non_blocking)
    return target


_ON_CODES = {
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.lift_fresh.default: _same,
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten.empty_like.default: _empty_like,
    aten.copy_.default: _copy_,
}

# PyTorch's protocol for subclasses in files that `torch.load(weights_only=True)` may read
torch.serialization.add_safe_globals([BlockCodes, _rebuild])
