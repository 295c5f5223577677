"""The class of experts that come as codes of an FP8 checkpoint, and stay frozen.

transformers' `FP8Experts` multiplies codes by its own kernels, and has a registry of functions of
its own. This class multiplies the values of its Parameters, whatever holds them, by the registry of
all other experts. Imports transformers, so it is imported for such experts only.
"""

from torch import nn
from transformers.integrations.finegrained_fp8 import FP8Experts
from transformers.integrations.moe import grouped_mm_experts_forward, use_experts_implementation


@use_experts_implementation
class FrozenExperts(nn.Module):
    """`FP8Experts` without scales: a module becomes one, and none is built."""

    _apply_gate = FP8Experts._apply_gate
    forward = grouped_mm_experts_forward
