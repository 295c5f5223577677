"""The first edition's name of `fp8_backends.cli.estimate`: what a training step takes in memory and sends."""

from .cli.estimate import Estimate, ModelShape, Workload, estimate

__all__ = ["Estimate", "ModelShape", "Workload", "estimate"]
