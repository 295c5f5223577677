"""The minima and maxima inserted into Inductor's kernels have the bits of PyTorch's, NaN
included."""

from __future__ import annotations

import importlib.util
import itertools

import torch

from fp8_backends.torch_tools.inductor import FUNCTIONS

KERNELS = """
@triton.jit
def elementwise(a, b, least, largest, N: tl.constexpr):
    at = tl.arange(0, N)
    x, y = tl.load(a + at), tl.load(b + at)
    tl.store(least + at, where_minimum(x, y))
    tl.store(largest + at, where_maximum(x, y))


@triton.jit
def reductions(a, least, largest, N: tl.constexpr):
    x = tl.load(a + tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :])
    tl.store(least + tl.arange(0, N), where_min2(x, 1))
    tl.store(largest + tl.arange(0, N), where_max2(x, 1))
"""


def test_where_forms_equal_pytorch(tmp_path):
    file = tmp_path / "where_kernels.py"
    file.write_text(f"import triton\nimport triton.language as tl\n\n{FUNCTIONS}{KERNELS}")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    kernels = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernels)
    special = [0.0, 1.0, -1.0, torch.inf, -torch.inf, torch.nan, 3.5, -448.0]
    pairs = torch.tensor(list(itertools.product(special, special)))
    a, b = pairs[:, 0].contiguous(), pairs[:, 1].contiguous()
    least, largest = torch.empty_like(a), torch.empty_like(a)
    kernels.elementwise[(1,)](a, b, least, largest, a.numel())
    assert torch.equal(least.nan_to_num(nan=7), torch.minimum(a, b).nan_to_num(nan=7))
    assert torch.equal(largest.nan_to_num(nan=7), torch.maximum(a, b).nan_to_num(nan=7))
    rows = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
    rows[3, 5], rows[4, 0], rows[5, 15] = torch.nan, torch.inf, -torch.inf
    least, largest = torch.empty(16), torch.empty(16)
    kernels.reductions[(1,)](rows, least, largest, 16)
    assert torch.equal(least.nan_to_num(nan=7), rows.amin(1).nan_to_num(nan=7))
    assert torch.equal(largest.nan_to_num(nan=7), rows.amax(1).nan_to_num(nan=7))
