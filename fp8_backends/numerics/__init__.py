"""Numbers: formats, scaling, scaled and sharded tensors, what a Parameter stores, and the kernels that work on them."""

from . import scaled_operations as scaled_operations  # what PyTorch's operations do with scaled tensors
