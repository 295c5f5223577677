"""Write and read checkpoints: weights for other libraries, FP8 checkpoints, whole and plain values."""

from .states.optimizers import whole_states
from .training.exporting import Export, export
from .training.manifest import newest_checkpoint
from .training.quantized_layers import dequantize
from .training.stored_weights import plain_weights

__all__ = ["Export", "dequantize", "export", "newest_checkpoint", "plain_weights", "whole_states"]
