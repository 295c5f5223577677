"""Run TransformerEngine's real Python on a CPU: `from standin import activate; activate()`, then
import it.

TransformerEngine cannot be installed without CUDA: its wheel `transformer-engine` is pure Python,
but imports a compiled module, `transformer_engine_torch`, which needs NVIDIA's libraries and a GPU.
This package is a stand-in for that module. After `activate()`, `import transformer_engine.pytorch`
works in this process, and its own classes, among them `te.Linear`, `te.autocast`,
`FP8GlobalStateManager`, the recipe states and the quantizers, run forward and backward on CPU
tensors, with kernels that are short functions in PyTorch.

Real: all of TransformerEngine's Python, with "cuda" read as "cpu" (`reading`).

Emulated: the compiled kernels. Casts, amaxes, scales and the delayed update follow the kernels'
source to the bit (`casts`, `blocks`, `delayed`). Products multiply exact codes and accumulate in
FP32, in the CPU's order (`products`); a GPU's tensor cores accumulate in another order and, in
fprop of the per-tensor recipes, in fewer bits. Norms compute in FP32 (`norms`). Missing functions
raise NotImplementedError with their name.

Run it directly, with the packages of `tests/te/requirements.txt` in some folder:

    python -m pip install --no-deps --target FOLDER -r tests/te/requirements.txt
    TE_SITE=FOLDER PYTHONPATH=tests/te python
    >>> from standin import activate; activate()
    >>> import transformer_engine.pytorch as te
    >>> from transformer_engine.common.recipe import DelayedScaling
    >>> layer = te.Linear(64, 32, device="cpu")
    >>> with te.autocast(recipe=DelayedScaling()):
    ...     y = layer(torch.randn(16, 64))

Its tests are in `tests/te/inside`; `TE_SITE=FOLDER python -m pytest tests/te/inside` runs them. On
several ranks: `activate()` at the top of a file of checks (`tests/distributed/ranks.py`), here
`tests/te/te_checks.py`, which `tests/te/test_te_ranks.py` starts with `ranks.run(file, 2,
TE_SITE=FOLDER)`.

The rest of the process still sees no GPU: `torch.cuda.is_available()` stays False outside of
TransformerEngine's files.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from . import cuda_of_te, extension, reading


def activate() -> None:
    """Make `import transformer_engine.pytorch` work in this process, on the CPU. Calling it again
    changes nothing.

    Environment:
        TE_SITE: a folder to find TransformerEngine in, where it is not on the path.

    Raises:
        RuntimeError: TransformerEngine was imported before.
    """
    if any(isinstance(finder, reading.Finder) for finder in sys.meta_path):
        return
    if reading.PACKAGE in sys.modules:
        raise RuntimeError("TransformerEngine was imported before activate(): import it afterwards")
    if "TE_SITE" in os.environ and os.environ["TE_SITE"] not in sys.path:
        sys.path.append(os.environ["TE_SITE"])  # behind the packages of the environment
    # TransformerEngine's own switch: load no shared libraries
    os.environ["NVTE_PROJECT_BUILDING"] = "1"
    os.environ.setdefault("NVTE_TORCH_COMPILE", "0")  # its small fused functions run eagerly
    reading.install(_after_import)


@contextmanager
def compute_capability(major: int, minor: int) -> Iterator[None]:
    """Set TransformerEngine's device inside this context; the default is 9.0, a Hopper GPU.

    10.0 is Blackwell: per-tensor products in every layout, and MXFP8.
    """
    before, cuda_of_te.capability = cuda_of_te.capability, (major, minor)
    _forget_the_device()
    try:
        yield
    finally:
        cuda_of_te.capability = before
        _forget_the_device()


def _forget_the_device() -> None:
    """TransformerEngine asks once and remembers."""
    from transformer_engine.pytorch import quantization, utils

    for remembered in ("FP8", "MXFP8", "NVFP4", "FP8_BLOCK_SCALING"):
        setattr(quantization, f"_{remembered}_SUPPORT", None)
    for function in vars(utils).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()


def _after_import(module: ModuleType) -> None:
    if module.__name__ == "transformer_engine.common":
        module.load_framework_extension = _load_framework_extension


def _load_framework_extension(framework: str) -> None:
    if framework != "torch":
        raise ImportError(f"the stand-in has no {framework} part")
    sys.modules["transformer_engine_torch"] = extension.module()
