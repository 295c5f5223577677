"""Connect this package to Hugging Face Accelerate: `Accelerator(mixed_precision="fp8")` trains with
our backends."""

from .plugin import connect

__all__ = ["connect"]
