"""How gradients and weights travel between ranks: in FP8, under PyTorch's own DDP and FSDP2."""
