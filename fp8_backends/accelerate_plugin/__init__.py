"""The connection to Hugging Face Accelerate: stock `Accelerator(mixed_precision="fp8")` trains with our backends.

`plugin.py` patches `Accelerator.__init__`, once; `mixin.py` is what an Accelerator becomes when FP8 is asked for;
`checkpoint.py` carries the scaling state through `save_state` and `load_state`; `whole_checkpoints.py` sees to it that
what they write is whole or not there.
"""

from .plugin import connect

__all__ = ["connect"]
