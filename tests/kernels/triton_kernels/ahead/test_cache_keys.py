"""The keys of Triton's disk cache: another constant of a kernel, as after an upgrade, is another
key."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import pytest
import triton.language as tl
from test_adam_machine_code import KINDS
from triton.compiler import ASTSource
from triton.runtime.jit import JITCallable, JITFunction

from fp8_backends import kernels
from fp8_backends.kernels import triton_adam


def functions() -> Iterator[JITCallable]:
    """Return all functions compiled or run by Triton at compile time."""
    for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        if module.name.rpartition(".")[2].startswith("triton_"):
            members = vars(importlib.import_module(module.name)).values()
            yield from (
                each
                for each in members
                if isinstance(each, JITCallable) and each.fn.__module__ == module.name
            )


FUNCTIONS = {
    f"{each.fn.__module__.removeprefix(kernels.__name__)}.{each.fn.__name__}": each
    for each in functions()
}


def key_of(function: JITCallable) -> str:
    """Compute the key of a process with these globals."""
    for each in FUNCTIONS.values():
        each.hash, each.used_global_vals = None, {}
    return function.cache_key


KERNELS = [
    name
    for name, each in FUNCTIONS.items()
    if isinstance(each, JITFunction) and name.endswith("_kernel")
]


@pytest.mark.parametrize("name", KERNELS)
def test_cache_key_covers_each_global_value(name, monkeypatch):
    """Include the globals of called functions."""
    function = FUNCTIONS[name]
    key = key_of(function)
    found = {
        at: where for each in FUNCTIONS.values() for at, where in each.used_global_vals.items()
    }
    for (variable, _), (value, variables) in found.items():
        other = tl.constexpr({"another": 1}) if isinstance(value, tl.constexpr) else {"another": 1}
        monkeypatch.setitem(variables, variable, other)
        assert key_of(function) != key, variable
        monkeypatch.undo()
    assert key_of(function) == key


def test_cache_key_covers_each_value_of_adam_kinds(monkeypatch):
    def key(kind) -> str:
        constants = triton_adam.TritonKernels(kind, True).constants
        return ASTSource(triton_adam.write_kernel, {}, {"KIND": constants}).hash()

    for kind in KINDS.values():
        before, values = key(kind), triton_adam.TritonKernels(kind, True).constants._values
        for name in values:
            monkeypatch.setattr(triton_adam._Constants, "_values", {**values, name: 12345})
            assert key(kind) != before, name
            monkeypatch.undo()
        assert key(kind) == before
    before = key(KINDS["O2"])
    for name, other in {
        "_CHUNK": 4096,
        "_LANES": 8,
        "EXP_AVG_BITS": (1, 2),
        "WEIGHT_BITS": (3, 4),
    }.items():
        monkeypatch.setattr(triton_adam, name, other)
        assert key(KINDS["O2"]) != before, name
        monkeypatch.undo()


def test_walk_finds_kernels_and_their_functions():
    assert ".triton_adam.write_kernel" in KERNELS and ".triton_common.format_max" in FUNCTIONS
