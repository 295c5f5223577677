"""The `ao` compute: TorchAO's float8 linear layer."""
