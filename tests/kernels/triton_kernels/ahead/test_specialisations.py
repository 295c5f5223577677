"""Count compilations of kernels: one per kind of argument with faster code, and no more."""

from __future__ import annotations

import collections

import pytest
import torch
from ahead_of_time import HOPPER
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from fp8_backends.formats.formats import E4M3, E5M2
from fp8_backends.formats.scaling import ROWS, VECTORS
from fp8_backends.kernels import triton_blocks, triton_common, triton_matrix


class NoGPU:
    """Stand for the driver, and launch nothing."""

    def get_current_target(self):
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class NothingCompiled:
    """Stand for a compiled kernel."""

    function = packed_metadata = None
    runs: list[tuple] = []

    def launch_metadata(self, *of):
        return None

    def run(self, *of):
        self.runs.append((self, *of))


@pytest.fixture
def compiled(monkeypatch):
    """Return the number of variants requested by launches, per kernel."""
    count = collections.Counter()

    def compile_nothing(self, key, signature, device, *of):
        count[self.__name__] += 1
        self.device_caches[device][0][key] = made = NothingCompiled()
        return made

    monkeypatch.setattr(JITFunction, "_do_compile", compile_nothing)
    for module in (triton_matrix, triton_blocks):
        for kernel in (each for each in vars(module).values() if isinstance(each, JITFunction)):
            monkeypatch.setattr(
                kernel, "device_caches", collections.defaultdict(kernel.create_binder)
            )
    driver.set_active(NoGPU())  # this process has no other, and none before
    NothingCompiled.runs.clear()
    return count


TOKENS = (1, 8, 20, 64, 1600)
"""Multiples of 16 and others: code for only the former stores wide in both layouts."""


def test_tensorwise_cast_has_few_specialisations(compiled):
    """Read the amax alike for any number of rows; positions of scales and recorded amaxes in a
    state do not count."""
    states = torch.zeros(3, 6, dtype=torch.int32)
    for tokens in TOKENS:
        x = torch.randn(tokens, 64)
        for fmt, row in ((E4M3, 0), (E4M3, 1), (E5M2, 2)):
            triton_matrix.quantize(x, fmt)
            scale = states.view(torch.float32)[row, 0]
            triton_matrix.quantize(x, fmt, scale, record=states[row, 2])
    assert compiled == {"amax_kernel": 1, "cast_kernel": 3 * 2 * 2}, (
        "rows: 1, multiples of 16, others; rules; formats"
    )


def test_rowwise_cast_has_few_specialisations(compiled):
    for tokens in TOKENS:
        for rows, columns in ((True, True), (True, False)):
            triton_blocks.quantize_blocks(torch.randn(tokens, 64), ROWS, E4M3, rows, columns)
        triton_blocks.quantize_blocks(torch.randn(tokens, 64), VECTORS, E4M3)
    rows = {"line_amax_kernel": 1, "line_cast_kernel": 3, "sweep_kernel": 1}
    assert compiled == rows | {"vectors_kernel": 3}


BUFFERS = [torch.zeros(64, dtype=dtype) for dtype in (torch.bfloat16, torch.float32, torch.uint8)]
POINTERS = st.none() | st.builds(
    lambda buffer, start: buffer[start:], st.sampled_from(BUFFERS), st.integers(0, 17)
)
NUMBERS = st.sampled_from((0, 1, 2, 15, 16, 17, 2**31 - 16, 2**31 - 1, 2**31, 2**32, 2**63))
LAUNCHES = st.tuples(
    st.tuples(*[POINTERS] * 8),
    st.tuples(*[NUMBERS] * 4),
    st.tuples(st.sampled_from(("given", "dynamic")), st.booleans()),
    st.fixed_dictionaries(
        {
            "FORMAT": st.sampled_from(("e4m3", "e5m2")),
            "HAS_FP8_CASTS": st.booleans(),
            "TILE_ROWS": st.sampled_from((32, 64)),
            "TILE_COLUMNS": st.just(128),
            "num_warps": st.sampled_from((4, 8)),
        },
        optional={"maxnreg": st.sampled_from((64, 128))},
    ),
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(LAUNCHES, min_size=1, max_size=8))
def test_short_launch_runs_the_kernel_of_tritons_own(compiled, launches):
    """Draw pointers at any alignment or None, and numbers of all kinds that Triton tells apart."""
    kernel, runs = triton_matrix.cast_kernel, NothingCompiled.runs
    for pointers, numbers, rule, constants in launches * 2:  # the second time, known
        arguments = (*pointers, *numbers, *rule)
        triton_common.launch(kernel, 3, arguments, constants)
        kernel[(3,)](*arguments, **constants)
        short, own = runs[-2:]
        made, *grid_stream_function_metadata = own[:7]
        assert short[0] is made and list(short[1:7]) == grid_stream_function_metadata
        assert all(a is b for a, b in zip(short[10:], own[10:], strict=True))
    runs.clear()


@pytest.mark.parametrize("variant", ["enter", "exit", "pre", "debug", "stages", "mode", "version"])
def test_hooks_and_other_versions_take_tritons_way(compiled, monkeypatch, variant):
    x, runtime, hooked = torch.zeros(16, 16), knobs.runtime, []
    triton_matrix.amax(x)
    if variant in ("enter", "exit"):
        monkeypatch.setattr(getattr(runtime, f"launch_{variant}_hook"), "calls", [hooked.append])
    elif variant == "pre":
        monkeypatch.setattr(triton_matrix.amax_kernel, "pre_run_hooks", [lambda *_, **__: None])
    elif variant == "debug":
        monkeypatch.setattr(runtime, "debug", True)
    elif variant == "stages":
        monkeypatch.setattr(runtime, "add_stages_inspection_hook", lambda: ("", ""))
    elif variant == "mode":
        monkeypatch.setattr(knobs.compilation, "instrumentation_mode", "consan")
    else:
        monkeypatch.setattr(triton_common, "_RUNS_COMPILED", False)
    triton_matrix.amax(x)
    entered, left = NothingCompiled.runs[-1][8:10]
    assert entered is runtime.launch_enter_hook and left is runtime.launch_exit_hook
    monkeypatch.undo()
