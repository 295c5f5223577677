"""Numeric operations as PyTorch operations, C++ and Triton kernels with the same bits."""
