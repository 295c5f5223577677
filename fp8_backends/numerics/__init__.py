"""Numbers: formats, scaling, scaled and sharded tensors, what a Parameter stores, and the kernels that work on them."""
