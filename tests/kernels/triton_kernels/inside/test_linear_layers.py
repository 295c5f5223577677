"""Compare whole FP8 layers with operands cast by kernels, in both layouts, with plain PyTorch,
bitwise."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from widths import nightly

from fp8_backends.compute.native.backend import NativeCompute
from fp8_backends.convert.conversion import convert
from fp8_backends.formats.scaling import GRAD_OUTPUT, HISTORY, INPUT
from fp8_backends.kernels import triton_blocks, triton_matrix
from fp8_backends.recipes.handlers import FP8RecipeKwargs, resolve
from fp8_backends.tensors.scaled_tensor import quantize

COMPUTE = NativeCompute()


@pytest.fixture
def launched(monkeypatch):
    """Record the layouts (rows, columns) requested from kernels, in order."""
    asked = []
    for module, name in ((triton_matrix, "quantize"), (triton_blocks, "quantize_blocks")):
        original = getattr(module, name)

        def watched(*args, original=original, **named):
            made = original(*args, **named)
            asked.append((made.codes is not None, made.transposed is not None))
            return made

        monkeypatch.setattr(module, name, watched)
    return asked


def layer(scaling, stored=None, **fields):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 24))
    convert(model, FP8RecipeKwargs(backend=f"native:{scaling}", **fields))
    if stored is not None:
        torch.utils.swap_tensors(model[0].weight, nn.Parameter(quantize(model[0].weight, stored)))
    return model


def steps(model, dtype, needs_dx=True):
    found = []
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(2, 9, 40, generator=generator).to(dtype).requires_grad_(needs_dx)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x)
        y.backward(torch.randn(2, 9, 24, generator=generator).to(y.dtype))
        COMPUTE.after_optimizer_step(model)
        found += [y.detach(), model[0].weight.grad, *([x.grad] if needs_dx else [])]
        model.zero_grad()
    return found + list(model.buffers())


@pytest.mark.parametrize(
    "scaling, stored",
    [
        ("dynamic", torch.float16),
        ("delayed", torch.float8_e4m3fn),
        ("window", None),
        ("rowwise", torch.float8_e4m3fn),
        ("blockwise", None),
        ("mxfp8", None),
        nightly("dynamic", None),
        nightly("delayed", None),
        nightly("rowwise", None),
        nightly("window", torch.float16),
        nightly("blockwise", torch.float16),
        nightly("mxfp8", torch.float8_e4m3fn),
    ],
)
def test_kernel_layer_matches_plain_operations(scaling, stored, launched, monkeypatch):
    model = layer(scaling, stored)
    plain, dtype = (
        copy.deepcopy(model),
        torch.bfloat16 if scaling in ("delayed", "mxfp8") else torch.float32,
    )
    ours = steps(model, dtype)
    assert launched
    monkeypatch.setenv("FP8_BACKENDS_TRITON", "0")
    seen = len(launched)
    for one, other in zip(ours, steps(plain, dtype), strict=True):
        assert torch.equal(one, other)
    assert len(launched) == seen


@pytest.mark.parametrize("scaling", ["dynamic", "rowwise"])
def test_only_required_layouts_are_written(scaling, launched):
    """One tensor scale: x and w for fprop and for backward, dy for both. Rows: w again for dgrad,
    in backward."""
    of_step = {
        "dynamic": [(True, True)] * 3,
        "rowwise": [(True, True), (True, False), (True, True), (False, True)],
    }
    steps(layer(scaling), torch.bfloat16)
    assert launched == of_step[scaling] * 2
    launched.clear()
    steps(layer(scaling), torch.bfloat16, needs_dx=False)  # no dgrad: w and dy in one layout
    assert launched == [(True, True), (True, False), (False, True)] * 2
    launched.clear()
    # no wgrad
    layer(scaling).requires_grad_(False)(torch.randn(4, 40, requires_grad=True)).sum().backward()
    no_wgrad = {"dynamic": [(True, False), (True, True), (True, False)]}
    assert launched == no_wgrad.get(
        scaling, [(True, False), (True, False), (True, False), (False, True)]
    )
    launched.clear()
    with torch.no_grad():
        layer(scaling)(torch.randn(4, 40))
    assert launched == [(True, False)] * 2


class Operations(TorchDispatchMode):
    """Record names of PyTorch's operations. Triton's interpreter adds its own: it copies."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("scaling", ["dynamic", "delayed", "window"])
def test_layer_has_no_separate_amax_operation(scaling):
    """Casts record amaxes. A second layer with the same input records the amax seen by the first
    cast."""
    shared = COMPUTE.new_shared(None, None)
    recipe = resolve(FP8RecipeKwargs(backend=f"native:{scaling}"))
    q, k = (COMPUTE.build(nn.Linear(32, 16, bias=False), recipe, shared).train() for _ in range(2))
    first, x = (torch.randn(16, 32, requires_grad=True) * factor for factor in (1, 3))
    q(first)  # makes room for the results of many casts
    with Operations() as ran:
        q(x).backward(torch.full((16, 16), 2.0), retain_graph=True)
    assert not {"zeros", "zero_", "fmax", "maximum", "amax", "add_"} & ran.names, ran.names
    k(x)
    if scaling != "dynamic":
        of_q, of_k = (layer.fp8_scaling.view(torch.float32)[:, HISTORY] for layer in (q, k))
        assert of_q[INPUT] == of_k[INPUT] == x.abs().max() and of_q[GRAD_OUTPUT] == 2.0


def test_kept_weight_codes_have_layouts_of_later_forwards(launched):
    """Include dgrad's layout, unread by the first forward without gradients."""
    model, x = layer("dynamic"), torch.randn(4, 40)
    COMPUTE.keep_weight_casts(model, True)
    model[0].weight.grad = torch.zeros_like(model[0].weight)
    COMPUTE.after_optimizer_step(model)  # it trains
    with torch.no_grad():
        model(x)
    assert (
        launched == [(True, False), (True, True)]
        and COMPUTE.transient_bytes_per_element(model[0]) == 2
    )
    launched.clear()
    for _ in range(2):
        model(x.clone().requires_grad_()).sum().backward()
    assert launched == [(True, True)] * 4, "x and dy alone"
