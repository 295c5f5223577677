"""The `native` compute: this package's own FP8 products, on any device."""

from .backend import NativeCompute

__all__ = ["NativeCompute"]
