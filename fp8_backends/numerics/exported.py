"""Tensors of a model's state dict at the levels: plain memory, and writes that reach the weight."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_iter, tree_map

from ..errors import FP8BackendError
from .scaled_operations import await_all, keep_changes, written_to
from .scaled_tensor import ScaledTensor, WithoutMemory
from .sharded_tensor import local_part, with_local


def exported(weight: torch.Tensor) -> torch.Tensor:
    """The exact values of a scaled Parameter, for a state dict. Of a DTensor: a DTensor."""
    return with_local(weight, Exported(local_part(weight.detach()).exact(), weight))


class Exported(WithoutMemory):
    """A plain copy of a weight's exact values. Operations that write to it, or to a view of it, write to the weight as
    well, as in any state dict of PyTorch. Copies and files of it are plain tensors.

    Args:
        values: the copy, or a view of it.
        weight: the Parameter.
        whole: the Exported that `values` is a view of.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values: torch.Tensor, weight: torch.Tensor, whole: Exported | None = None):
        return torch.Tensor._make_subclass(cls, values)

    def __init__(self, values: torch.Tensor, weight: torch.Tensor, whole: Exported | None = None) -> None:
        self._values, self._weight, self._whole = values, weight, whole
        self._writes = _writes(weight)

    def values(self) -> torch.Tensor:
        """The plain values, in the same memory."""
        return self._values

    @property
    def data(self) -> torch.Tensor:
        """A view that autograd knows nothing of. Values that are assigned are written."""
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        self.detach().copy_(values)

    @property
    def _is_param(self) -> bool:
        return False

    @_is_param.setter
    def _is_param(self, value: bool) -> None:  # `load_state_dict(assign=True)`: another model gets a plain Parameter
        torch.utils.swap_tensors(self, torch.nn.Parameter(self._values, self.requires_grad))

    def __repr__(self) -> str:
        return repr(self._values)

    def __reduce_ex__(self, protocol):
        return self._values.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        return memo.setdefault(id(self), self._values.clone())

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = {id(each._values): each for each in tree_iter((args, kwargs)) if isinstance(each, cls)}
        written = [each if each._whole is None else each._whole for each in written_to(func, args, kwargs, cls)]
        for whole in written:
            whole._follow(func)
        result = func(*tree_map(_plain, args), **tree_map(_plain, kwargs))
        await_all(result if written else ())
        for whole in written:
            whole._write()
        memory = {each.untyped_storage()._cdata: each for each in given.values()}

        def shown(value: Any) -> Any:
            origin = memory.get(value.untyped_storage()._cdata) if type(value) is torch.Tensor else None
            if origin is None or id(value) in given:
                return given.get(id(value), value)
            return Exported(value, origin._weight, origin if origin._whole is None else origin._whole)

        return tree_map(shown, result)

    def _follow(self, func) -> None:
        """Before a write: take over what has changed in the weight since. Raise where the write would not reach it."""
        if torch.Tag.inplace_view in func.tags or getattr(self._weight, "shared_out", False):
            raise FP8BackendError(
                f"{func} would change a tensor of shape {tuple(self.shape)} of a state dict, and not the weight: the "
                f"operation changes shapes or strides, or one rank owns the exact values (levels O3 and O4 under DDP). "
                f"Change a clone(), and load it with model.load_state_dict on all ranks"
            )
        weight = local_part(self._weight.detach())
        if self._writes != _writes(self._weight) and not weight.is_meta:
            self._values.copy_(weight)

    @torch.no_grad()
    def _write(self) -> None:
        weight = local_part(self._weight.detach())
        if isinstance(weight, ScaledTensor) and not weight.is_meta:
            keep_changes(weight, self._values)
        elif not weight.is_meta:  # else the model was emptied since, such as to be sharded
            weight.copy_(self._values)
        self._writes = _writes(self._weight)


def _plain(value: Any) -> Any:
    return value._values if isinstance(value, Exported) else value


def _writes(weight: torch.Tensor) -> tuple[int, ...]:
    """Autograd's counts of writes to what is stored."""
    weight = local_part(weight)
    parts = (weight._data, weight._scale_inv) if isinstance(weight, ScaledTensor) else (weight,)
    return tuple(part._version for part in parts)
