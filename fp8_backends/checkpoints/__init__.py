"""Write and read checkpoints: weights for libraries and rollouts, FP8 and 4-bit checkpoints, whole
and plain values."""

from ..convert.quantized_layers import dequantize, freeze_codes, load_codes
from ..convert.stored_weights import plain_weights
from ..states.checkpoint import whole_states
from .exporting import Export, export
from .manifest import newest_checkpoint
from .rollouts import RolloutWeights, rollout_weights

__all__ = [
    "Export",
    "RolloutWeights",
    "dequantize",
    "export",
    "freeze_codes",
    "load_codes",
    "newest_checkpoint",
    "plain_weights",
    "rollout_weights",
    "whole_states",
]
