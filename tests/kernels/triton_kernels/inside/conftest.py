"""Kernels run in Triton's interpreter, on tensors of the CPU."""

from __future__ import annotations

import numpy
import pytest
from triton.language import core
from triton.runtime import interpreter


def pytest_itemcollected(item):
    """The interpreter's maxima are NumPy's `nanmax`, which warns of nothing but NaN."""
    item.add_marker(pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning"))


@pytest.fixture(autouse=True)
def triton_interprets(no_fp8_in_environment, monkeypatch):
    """After the fixture that empties the environment: tensors of the CPU go to the kernels."""
    monkeypatch.setenv("FP8_BACKENDS_TRITON", "interpret")


@pytest.fixture(autouse=True, scope="session")
def silence_numpy_about_inf_and_nan():
    """Without a word: the interpreter is NumPy, which warns."""
    with numpy.errstate(all="ignore"):
        yield


@pytest.fixture(autouse=True, scope="session")
def the_interpreter_remembers():
    """Else each launch and each call inside of a kernel looks through all of Triton's language for
    operations to replace, and each value describes its type again: together most of the time."""
    patch_lang, patched = interpreter._patch_lang, {}

    def patch_once(function):
        names = function.__globals__
        if id(names) not in patched:
            patch_lang(function)  # for good: what this returns would undo it
            patched[id(names)] = names  # kept, so that no others get its id
        return interpreter._LangPatchScope()

    blocks, make_block, make_tensor = {}, core.block_type.__init__, core.tensor.__init__

    def block_once(block, element, shape):
        key = (element.name, *map(core._unwrap_if_constexpr, shape))
        if key not in blocks:
            make_block(block, element, shape)
            blocks[key] = block.__dict__
        block.__dict__ = blocks[key]

    dtypes, numpy_dtype = {}, interpreter._get_np_dtype

    def dtype_once(dtype):
        if dtype.scalar.name not in dtypes:
            dtypes[dtype.scalar.name] = numpy_dtype(dtype)
        return dtypes[dtype.scalar.name]

    shapes = {}

    def tensor_of_known_shape(tensor, handle, kind):
        if kind.name not in shapes:
            make_tensor(tensor, handle, kind)
            shapes[kind.name] = tensor.shape, tensor.numel
        tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
        tensor.shape, tensor.numel = shapes[kind.name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patch_once)
        patch.setattr(interpreter, "_get_np_dtype", dtype_once)
        patch.setattr(core.block_type, "__init__", block_once)
        patch.setattr(core.tensor, "__init__", tensor_of_known_shape)
        yield
