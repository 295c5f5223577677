"""Count compilations of kernels: one per kind of argument with faster code, and no more."""

from __future__ import annotations

import collections

import pytest
import torch
from ahead_of_time import HOPPER
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from fp8_backends.formats.formats import E4M3, E5M2
from fp8_backends.formats.scaling import ROWS, VECTORS
from fp8_backends.kernels import triton_blocks, triton_matrix


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

    def launch_metadata(self, *of):
        return None

    def run(self, *of):
        return None


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
