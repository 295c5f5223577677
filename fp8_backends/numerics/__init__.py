"""Numbers: formats, scaling, scaled and sharded tensors, and the kernels for them."""

from . import scaled_operations as scaled_operations  # registers PyTorch's operations on scaled tensors
