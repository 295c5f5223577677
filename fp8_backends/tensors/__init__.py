"""Tensors that store low-precision data: scaled tensors, block codes, shards, and their
operations."""

from . import scaled_operations as scaled_operations  # registers PyTorch operations
