"""Write and read checkpoints: weights for other libraries, FP8 checkpoints, whole and plain values."""

from ..convert.quantized_layers import dequantize
from ..convert.stored_weights import plain_weights
from ..states.checkpoint import whole_states
from .exporting import Export, export
from .manifest import newest_checkpoint

__all__ = ["Export", "dequantize", "export", "newest_checkpoint", "plain_weights", "whole_states"]
