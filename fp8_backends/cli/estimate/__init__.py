"""What a training step takes in memory and sends, told before it runs."""

from .estimates import Estimate, Workload, estimate
from .model_shapes import ModelShape

__all__ = ["Estimate", "ModelShape", "Workload", "estimate"]
