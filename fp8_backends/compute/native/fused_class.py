"""The class of a module that another way to compute is mixed into: the same module, by the class that it was too."""

from __future__ import annotations

import copyreg
import functools

from torch import nn


@functools.cache
def class_for(mixin: type[nn.Module], original: type[nn.Module]) -> type[nn.Module]:
    """`original` with the forward of `mixin`, so that `isinstance` stays true. Its metaclass must be `type`."""
    members = {"fp8_parts": (mixin, original), "__module__": __name__}
    return _Fused(f"Fused{original.__name__}", (mixin, original), members)


def carrier_for(mixin: type[nn.Module], module: nn.Module, **attributes: object) -> nn.Module:
    """What `module` becomes (`Compute.build`): its class with `mixin`, and these attributes."""
    carrier = object.__new__(class_for(mixin, type(module)))
    carrier.__dict__.update(nn.Module().__dict__, **attributes)
    return carrier


class _Fused(type):
    """The class of these classes. They are pickled by what they were made from, since no name imports them."""

    fp8_parts: tuple[type[nn.Module], type[nn.Module]]


def _reduce(fused: _Fused):
    mixin, original = fused.fp8_parts
    made = class_for(mixin, original)
    return (class_for, fused.fp8_parts) if fused is made else fused.__qualname__  # a subclass of one of these


copyreg.pickle(_Fused, _reduce)
