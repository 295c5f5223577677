"""Imitate a CPU without bf16 products: `PYTHONPATH=tests/without_bf16 python …`.

Python imports this module at its start, in every process that inherits the variable. PyTorch then
computes with AVX2 and without oneDNN, and its bf16 products take the same loops as on a CPU without
bf16 instructions. FP32 products stay unchanged: MKL chooses on its own. Inductor gets a separate
cache, since its keys ignore these instructions.
"""

import getpass
import importlib.util
import os
import sys
import tempfile

os.environ.setdefault("ATEN_CPU_CAPABILITY", "avx2")
_COMPILED = os.path.join(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}_without_bf16")
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", _COMPILED)


class _WithoutOneDNN:
    """Finds torch as it would be found, and switches oneDNN off when it has been loaded."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(cls)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            module._C._set_mkldnn_enabled(False)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _WithoutOneDNN)
