"""The connection to Hugging Face Accelerate: stock `Accelerator(mixed_precision="fp8")` trains with our backends.

`plugin.py` patches `Accelerator.__init__`, once; `mixin.py` is the class of an Accelerator that trains in FP8;
`checkpoint.py` carries the scaling state through `save_state` and `load_state`; `whole_checkpoints.py` makes their
checkpoints whole or not there.
"""

from .plugin import connect

__all__ = ["connect"]
