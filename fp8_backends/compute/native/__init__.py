"""This package's own products, with every scaling rule, on any device."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backend import NativeCompute as NativeCompute


def __getattr__(name: str) -> Any:
    """Import `NativeCompute` at its first use: it loads PyTorch's compiler."""
    if name == "NativeCompute":
        from .backend import NativeCompute

        return NativeCompute
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
