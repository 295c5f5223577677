"""The `ao` backend: TorchAO's float8 linear layer."""
