"""Check the products of tensor-parallel layers against a GPU's rules, without ranks.
`tests/distributed` has their numbers."""

import pytest
import torch
import torch.distributed as dist
from gpu_rules import Calls, Context
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from fp8_backends.compute.native.backend import layer_rule
from fp8_backends.compute.native.layer_rule import quantized, split_of
from fp8_backends.compute.native.linear import Call, LinearFunction
from fp8_backends.compute.native.scaling_states import Ledger
from fp8_backends.compute.native.tensor_parallel import COLWISE, ROWWISE, Cut
from fp8_backends.compute.native.weights import kind_of, read
from fp8_backends.formats.scaling import INPUT, WEIGHT
from fp8_backends.recipes import handlers as recipes


@pytest.fixture(scope="module")
def mesh():
    """Stand for two GPUs, with collectives that return their input."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cuda", (2,))
    dist.destroy_process_group()


@pytest.mark.nightly
@pytest.mark.parametrize("style", [COLWISE, ROWWISE])
@pytest.mark.parametrize("scaling", ["dynamic", "rowwise", "blockwise", "mxfp8"])
def test_a_gpu_accepts_the_products_of_parts(mesh, scaling, style):
    """Fake CUDA tensors run torch's checks of `_scaled_mm`. Ranks agree on each split operand."""
    rule, cut, out_dtype = (
        layer_rule(recipes.resolve(f"native:{scaling}")),
        Cut(mesh, style),
        torch.bfloat16,
    )
    with FakeTensorMode(), Calls() as calls:
        x = torch.empty(64, 256, device="cuda", dtype=out_dtype)
        weight, bias = torch.empty(128, 256, device="cuda"), torch.empty(128, device="cuda")
        x8 = quantized(x, rule.forward_format, rule, None, INPUT, split=split_of(cut, INPUT))
        stored = read(weight)
        w8 = stored.quantized(rule, None, split=split_of(cut, WEIGHT))
        context, ledger = Context(), Ledger(torch.device("cuda"))
        call = Call(rule, None, ledger, out_dtype, False, kind_of(weight), cut)
        y = LinearFunction.forward(context, x, weight, bias, call, x8, w8, stored)
        with torch.no_grad():  # as autograd calls it
            dx, dw, db, *_ = LinearFunction.backward(context, torch.empty_like(y))
    assert y.shape == (64, 128) and y.dtype == out_dtype and y.device.type == "cuda"
    assert dx.shape == x.shape and dw.shape == weight.shape and db.shape == bias.shape
    products = {torch.ops.aten._scaled_mm.default, torch.ops.aten._scaled_mm_v2.default}
    assert sum(call in products for call in calls.seen) == 3
    agreements = sum("allreduce" in str(call) for call in calls.seen)
    assert agreements == (0 if rule.scales.cuts_contraction else 2), calls.seen
