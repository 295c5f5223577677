"""A stand-in for TransformerEngine, which needs CUDA: as much of its interface as Accelerate's code around it calls."""
