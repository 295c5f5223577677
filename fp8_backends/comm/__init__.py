"""Move gradients and weights between ranks in FP8, under PyTorch's own DDP and FSDP2."""
