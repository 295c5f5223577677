"""The first edition's name of `fp8_backends.training.conversion`."""

from .training.conversion import restore

__all__ = ["restore"]
