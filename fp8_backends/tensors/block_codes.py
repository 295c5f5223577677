"""`BlockCodes`: a frozen matrix of an FP8 checkpoint, E4M3 codes with a scale for each 128 x 128 block, as one
`torch.Tensor`.

    value = code * scale_inv        codes: [out, in]; scale_inv: FP32 [ceil(out / 128), ceil(in / 128)], any numbers

It keeps the checkpoint's codes to the bit. Products read the codes; every other operation reads plain values. Copying a
whole matrix into it is the only write; operations in place raise, also through views (`FrozenView`).
"""

from typing import Any

import torch
from torch.utils._pytree import tree_map

from ..errors import FP8BackendError
from ..formats.formats import E4M3
from ..formats.scaling import SQUARES, Quantized
from .scaled_operations import UNSAFE_VIEWS, returns_view, written_to
from .scaled_tensor import WithoutMemory
from .state_dict_copies import StateDictCopies

aten = torch.ops.aten
_STORED = ("codes", "scale_inv", "state_dict_copies")
REFUSAL = (
    "would change the frozen codes of an FP8 checkpoint in place: fp8_backends.restore(model) makes weights "
    "plain, to merge adapters or to train them, and `weight + 0` is a plain copy"
)


class Frozen(WithoutMemory):
    """A read-only tensor: operations read its plain values, `exact()`."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def values(self) -> torch.Tensor:
        return self.exact()

    @property
    def data(self) -> torch.Tensor:
        """A view outside of autograd. Assigning other values raises, since `torch.Tensor.data` would change nothing."""
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
    """A frozen matrix stored as codes and scales. PyTorch sees the dtype of its values."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype):
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, strides=data.stride(), dtype=dtype, device=data.device
        )

    def __init__(self, data: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype) -> None:
        self.codes, self.scale_inv, self.state_dict_copies = data, scale_inv, StateDictCopies()

    def exact(self) -> torch.Tensor:
        """Return the plain values, in the tensor's dtype."""
        self.state_dict_copies.check()
        return SQUARES.dequantize(Quantized(*self.parts), torch.float32).to(self.dtype)

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales."""
        return self.codes, self.scale_inv

    def __tensor_flatten__(self):
        return ["codes", "scale_inv"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner_tensors, dtype, outer_size, outer_stride):
        return BlockCodes(inner_tensors["codes"], inner_tensors["scale_inv"], dtype)

    def __repr__(self) -> str:
        return f"BlockCodes({list(self.shape)} {self.dtype}, stored as E4M3, one scale for 128 x 128 elements)"

    def __reduce_ex__(self, protocol):
        others = {name: value for name, value in self.__dict__.items() if name not in _STORED}
        return _rebuild, (self.codes.view(torch.uint8), self.scale_inv, self.dtype, others)


def _rebuild(data: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype, others: dict[str, Any]) -> BlockCodes:
    tensor = BlockCodes(data.view(E4M3.dtype), scale_inv, dtype)
    tensor.__dict__.update(others)
    return tensor


class FrozenView(Frozen):
    """A view of a `BlockCodes`: a copy of plain values. Writes raise, since the codes would not change."""

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
        return self._values

    @property
    def parts(self) -> tuple[torch.Tensor]:
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


def _part_by_part(func, tensor, *, dtype=None, **kwargs):
    if dtype is not None and not dtype.is_floating_point:
        return NotImplemented
    options = {name: kwargs[name] for name in ("device", "non_blocking") if name in kwargs}
    return BlockCodes(*(func(part, **options) for part in tensor.parts), dtype or tensor.dtype)


def _copy_(func, target, source, non_blocking=False):
    """Copy codes; encode plain values with the present scales, so that saved values of these codes give the same codes
    again. A block with larger values gets a new scale."""
    if not isinstance(source, BlockCodes):
        values = source.to(target.device, torch.float32).expand(target.shape)
        amax, scale_inv = SQUARES.amax(values), target.scale_inv
        # values up to half a step above 448 round to it
        fits = amax <= scale_inv * (E4M3.max + 16)
        scale_inv = torch.where(fits, scale_inv, SQUARES.inverse(SQUARES.scale(amax, E4M3), amax))
        factor = torch.where(scale_inv > 0, scale_inv.reciprocal(), torch.zeros_like(scale_inv))
        source = BlockCodes(SQUARES.cast(values, factor, E4M3), scale_inv, target.dtype)
    target.state_dict_copies.accept()
    target.codes.copy_(source.codes, non_blocking)
    target.scale_inv.copy_(source.scale_inv, non_blocking)
    return target


_ON_CODES = {
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.lift_fresh.default: _same,
    aten.clone.default: _part_by_part,
    aten._to_copy.default: _part_by_part,
    aten.empty_like.default: _part_by_part,
    aten.copy_.default: _copy_,
}

# PyTorch's protocol for subclasses in files that `torch.load(weights_only=True)` may read
torch.serialization.add_safe_globals([BlockCodes, _rebuild])
