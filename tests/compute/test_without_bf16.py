"""Test CPUs without bf16 products: the chosen engine, and no product in PyTorch's slow loops.

Tests of a whole CPU run in a separate process, with the switches of `tests/without_bf16`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from widths import nightly, one_each

from fp8_backends import audit, prepare
from fp8_backends.compute import hardware
from fp8_backends.recipes.handlers import FP8RecipeKwargs

TESTS = Path(__file__).resolve().parents[1]
BACKENDS = [
    "native:dynamic", "native:delayed", "native:rowwise", "native:blockwise", "native:mxfp8", "native:window",
    "msamp:O1", "msamp:O3",
]  # fmt: skip
HIGH_PRECISION = (False, False, False), (True, False, False), (False, True, True)


class ProductDtypes(TorchDispatchMode):
    """Record the dtypes of the operands of all plain products."""

    def __enter__(self):
        self.seen = set()
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (
            torch.ops.aten.mm,
            torch.ops.aten.addmm,
            torch.ops.aten.bmm,
            torch.ops.aten.baddbmm,
        ):
            self.seen.add(args[-1].dtype)
        assert func.overloadpacket is not torch.ops.aten._scaled_mm
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("backend, high_precision", one_each(BACKENDS, HIGH_PRECISION))
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, nightly(torch.float16)])
def test_products_run_in_fp32_for_any_autocast(backend, autocast, high_precision, monkeypatch):
    monkeypatch.setattr(hardware, "cpu_bf16", lambda: False)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    recipe = FP8RecipeKwargs(backend=backend, override_linear_precision=high_precision)
    model, optimizer = prepare(model, torch.optim.AdamW(model.parameters()), recipe)
    x = torch.randn(128, 64, requires_grad=True)
    with ProductDtypes() as products, torch.autocast("cpu", autocast, enabled=autocast is not None):
        y = model(x)
        y.float().square().mean().backward()
    assert y.dtype == (autocast or torch.float32) and products.seen == {torch.float32}
    optimizer.step()
    assert set(audit(model).engine.values()) == {"fp32-exact"}


def fresh_process(*arguments):
    """Run Python on a CPU without bf16 products, and return its output."""
    path = os.pathsep.join(
        [str(TESTS / "without_bf16"), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    )
    environment = {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=600, env=environment
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    return done.stdout


NO_FORM_MEETS_PYTORCHS_LOOPS = """
# at sizes that show it: the plain product of two row-major bf16 matrices takes hundreds of times FP32's
import sys
import time
import pytest
import torch
from fp8_backends.compute import hardware
from fp8_backends.compute.products import plain_product, scaled_product
from fp8_backends.formats.scaling import Quantized

assert not hardware.cpu_bf16() and hardware.fast_dtype("cpu") == torch.float32

def seconds(function):
    def one():
        start = time.perf_counter()
        function()
        return time.perf_counter() - start
    return min(one() for _ in range(5))

def forms(a, b):
    for name in ("NN", "NT", "TN", "TT"):
        # of the product a @ b.t(): T says that an operand lies column by column, b's as it is multiplied
        yield a if name[0] == "N" else a.t().contiguous().t(), b if name[1] == "T" else b.t().contiguous().t()

a, b, one = torch.randn(128, 512), torch.randn(512, 512), torch.tensor(1.0)
plain = seconds(lambda: torch.mm(a, b.t()))
slow = seconds(lambda: torch.mm(a.bfloat16(), b.bfloat16()))
assert slow > 20 * plain, (slow, plain)  # else a fifth of it would be no sign (38 times on Zen 4)
for out_dtype in (torch.bfloat16, torch.float16, torch.float32):
    for x, w in forms(a.to(out_dtype), b.to(out_dtype)):
        found = seconds(lambda: plain_product(x, w))
        assert found < slow / 5, ("plain", out_dtype, found, slow)
    for code in (torch.float8_e4m3fn, torch.float8_e5m2):
        for x, w in forms(a.to(code), b.to(torch.float8_e4m3fn)):
            for scales in ((one, one), (torch.ones(128, 1), torch.ones(512, 1))):
                operands = Quantized(x, scales[0]), Quantized(w, scales[1])
                found = seconds(lambda: scaled_product(*operands, out_dtype))
                assert found < slow / 5, (code, out_dtype, found, slow)
print("all forms")
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.nightly
def test_products_tests_pass_without_bf16(tmp_path):
    """Time all forms of a product, and run both products' tests on the other kind of CPU, in one
    process."""
    files = (
        "compute/test_products.py",
        "compute/test_block_products.py",
        "accelerate_plugin/test_plugin_precision.py",
    )
    tests = [str(TESTS / file) for file in files]
    # compiled code here is traced for a GPU, on any CPU
    options = ("-q", "-x", "-p", "no:cacheprovider", "--no-header", "-k", "not compile")
    out = fresh_process("-c", NO_FORM_MEETS_PYTORCHS_LOOPS, *tests, *options)
    assert out.startswith("all forms\n") and " passed" in out
