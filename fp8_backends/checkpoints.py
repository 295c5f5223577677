"""Write and read checkpoints: weights for other libraries, FP8 checkpoints, whole and plain values."""

from .training.exporting import Export, export
from .training.manifest import newest_checkpoint
from .training.plain_weights import plain_weights
from .training.preparation import whole_states
from .training.quantized_layers import dequantize

__all__ = ["Export", "dequantize", "export", "newest_checkpoint", "plain_weights", "whole_states"]
