"""Connect this package to Hugging Face Accelerate: stock `Accelerator(mixed_precision="fp8")` trains with our backends.

`plugin.py` patches `Accelerator.__init__`, once; `mixin.py` is the class of an Accelerator in FP8; `engines.py` adapts
FSDP2, tensor parallelism and DeepSpeed; `checkpoints.py` makes checkpoints whole or absent, with scaling states.
"""

from .plugin import connect

__all__ = ["connect"]
