"""Estimate memory and traffic of a training step before it runs."""

from .estimates import Estimate, Workload, estimate
from .model_shapes import ModelShape

__all__ = ["Estimate", "ModelShape", "Workload", "estimate"]
