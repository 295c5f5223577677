"""The `native` backend: this package's own FP8 products, on any device."""

from typing import Any

__all__ = ["NativeCompute"]


def __getattr__(name: str) -> Any:
    """`NativeCompute` is loaded when it is asked for: its products load PyTorch's compiler, which takes a second."""
    if name == "NativeCompute":
        from .backend import NativeCompute

        return NativeCompute
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
