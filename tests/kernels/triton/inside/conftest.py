"""Kernels run in Triton's interpreter, on tensors of the CPU."""

from __future__ import annotations

import numpy
import pytest
from triton.runtime import interpreter


@pytest.fixture(autouse=True)
def triton_interprets(no_fp8_in_environment, monkeypatch):
    """Send CPU tensors to the kernels, after the fixture that empties the environment."""
    monkeypatch.setenv("FP8_BACKENDS_TRITON", "interpret")


@pytest.fixture(autouse=True, scope="session")
def numpy_computes_with_inf_and_nan_as_a_gpu_does():
    """Silence NumPy, the interpreter's engine, which warns about inf and NaN."""
    with numpy.errstate(all="ignore"):
        yield


@pytest.fixture(autouse=True, scope="session")
def the_language_is_patched_once():
    """Else the interpreter looks through all of Triton's language and puts NumPy's operations in their places at every
    launch and at every call of a function inside of a kernel, which takes half of its time."""
    patch_lang, patched = interpreter._patch_lang, {}

    def patch_once(function):
        names = function.__globals__
        if id(names) not in patched:
            patch_lang(function)  # for good: what this returns would undo it
            patched[id(names)] = names  # kept, so that no others get its id
        return interpreter._LangPatchScope()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patch_once)
        yield
