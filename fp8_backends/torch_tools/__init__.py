"""Look into and hook onto PyTorch modules, optimizers and backward passes."""
