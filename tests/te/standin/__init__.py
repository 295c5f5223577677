"""A stand-in for the compiled part of TransformerEngine, for tests on machines without CUDA (see
`activate`)."""

from .activate import activate, compute_capability

__all__ = ["activate", "compute_capability"]
