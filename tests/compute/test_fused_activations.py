"""`fuse_activations`: which norms and gated blocks are recognised, and that all runs as before where no kernel can.
The kernels are tested in `tests/numerics/triton_kernels`."""

import copy
import json
import pickle
import runpy
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import GemmaConfig, LlamaConfig, T5Config
from transformers.models.gemma.modeling_gemma import GemmaMLP, GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.t5.modeling_t5 import T5DenseGatedActDense

import fp8_backends
from fp8_backends.compute.native.fused_gates import FusedGate, Gate
from fp8_backends.compute.native.fused_norms import Formula, FusedNorm

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}


class Gated(nn.Module):
    """A block whose forward is given."""

    def __init__(self, forward):
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 32)
        self.computes = forward

    def forward(self, x):
        return self.computes(self, x)


def prepared(block, backend="native:dynamic", **fields):
    model = nn.Sequential(nn.Linear(16, 16), block, nn.Linear(16, 16))  # the last one is a head, and stays
    return fp8_backends.prepare(model, None, {"backend": backend, "fuse_activations": True, **fields})[0]


def llama():
    torch.manual_seed(0)
    return LlamaMLP(LlamaConfig(**SIZES))


KNOWN = {
    "Llama": (llama, Gate("gate_proj", "up_proj", "down_proj", "silu")),
    "Gemma": (
        lambda: GemmaMLP(GemmaConfig(**SIZES, hidden_activation="gelu_pytorch_tanh")),
        Gate("gate_proj", "up_proj", "down_proj", "gelu_tanh"),
    ),
    "of functions": (
        lambda: Gated(lambda self, x: self.w2(self.w3(x) * F.silu(self.w1(x)))),
        Gate("w1", "w3", "w2", "silu"),
    ),
}
OTHERS = {
    "gelu by erf": lambda self, x: self.w2(F.gelu(self.w1(x)) * self.w3(x)),
    "no product": lambda self, x: self.w2(F.silu(self.w1(x)) + self.w3(x)),
    "both activated": lambda self, x: self.w2(F.silu(self.w1(x)) * F.silu(self.w3(x))),
    "a sum after it": lambda self, x: self.w2(F.silu(self.w1(x)) * self.w3(x)) + x,
    "another input": lambda self, x: self.w2(F.silu(self.w1(x)) * self.w3(x + 1)),
    "dropout": lambda self, x: self.w2(F.dropout(F.silu(self.w1(x)) * self.w3(x), 0.5, self.training)),
    "in FP32": lambda self, x: self.w2((F.silu(self.w1(x).float()) * self.w3(x)).to(x.dtype)),
    "called twice": lambda self, x: self.w2(F.silu(self.w1(x)) * self.w3(x)) + 0 * self.w3(x).sum(),
    "reads a weight": lambda self, x: self.w2(F.silu(self.w1(x)) * self.w3(x)) * self.w1.weight.mean(),
}


@pytest.mark.parametrize("name", KNOWN)
def test_recognised(name):
    block, gate = KNOWN[name][0](), KNOWN[name][1]
    kind = type(block)
    model = prepared(block)
    assert model[1] is block and isinstance(block, kind) and isinstance(block, FusedGate) and block.fp8_gate == gate
    assert str(model._fp8_prepared.report).endswith("1 activation fused: 1")


@pytest.mark.parametrize("name", OTHERS)
def test_whatever_computes_something_else_runs_as_before(name):
    model = prepared(Gated(OTHERS[name]))
    assert type(model[1]) is Gated
    assert str(model._fp8_prepared.report).endswith("0 activations fused, all run as before")


def test_blocks_with_more_parts_or_without_an_fp8_layer_run_as_before():
    dropped = T5DenseGatedActDense(T5Config(d_model=16, d_ff=32, feed_forward_proj="gated-silu", dropout_rate=0.0))
    assert type(prepared(dropped)[1]) is T5DenseGatedActDense  # its dropout may be turned on later
    assert type(prepared(llama(), exclude=["*.up_proj"])[1]) is LlamaMLP
    replaced = llama()
    replaced.forward = lambda x: x
    assert type(prepared(replaced)[1]) is LlamaMLP


class RoundedOnce(LlamaRMSNorm):
    def forward(self, x):
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight * normed).to(x.dtype)


class OnceMore(LlamaRMSNorm):
    def __init__(self, size):
        super().__init__(size)
        self.scale = nn.Parameter(torch.ones(size))


NORMS = {
    "Llama": (lambda: LlamaRMSNorm(16, eps=1e-5), Formula(1e-5, False)),
    "Qwen3 in bf16": (lambda: Qwen3RMSNorm(16, eps=1e-6).bfloat16(), Formula(1e-6, False)),
    "Gemma": (lambda: GemmaRMSNorm(16), Formula(1e-6, True)),
    "PyTorch's": (lambda: nn.RMSNorm(16, eps=1e-5), None),
    "LayerNorm": (lambda: nn.LayerNorm(16), None),
    "rounded after the weight": (lambda: RoundedOnce(16), None),
    "two Parameters": (lambda: OnceMore(16), None),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms(name):
    """Those that round as Llama's or Gemma's does, to the bit."""
    norm, formula = NORMS[name][0](), NORMS[name][1]
    assert prepared(norm)[1] is norm and isinstance(norm, FusedNorm) == (formula is not None)
    if formula is not None:
        assert norm.fp8_formula == formula


def trained(model):
    found = []
    for seed in range(2):
        x = torch.randn(5, 16, generator=torch.Generator().manual_seed(seed))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x)
        y.float().square().mean().backward()
        found += [y.detach(), *(p.grad.clone() for p in model.parameters())]
    return found


@pytest.mark.slow
def test_a_cpu_computes_as_before_and_so_does_compiled_code():
    """To the bit, and the compiler sees the very same operations."""
    found = {}
    for fuse in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = prepared(nn.Sequential(LlamaRMSNorm(16), llama()), fuse_activations=fuse)
        graphs = []

        def note(graph, inputs, graphs=graphs):
            graphs.append(str(graph.graph))
            return graph

        compiled = torch.compile(copy.deepcopy(model), backend=note, fullgraph=True)
        found[fuse] = trained(model), trained(compiled), graphs
    for plain, fused in zip(found[False][:2], found[True][:2], strict=True):
        assert all(map(torch.equal, plain, fused))
    assert found[True][2] == found[False][2] and found[True][2]


def test_a_fused_block_can_be_copied_pickled_and_restored():
    model = prepared(llama())
    x, before = torch.randn(3, 16), list(model.parameters())
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(copied[1]) is type(model[1]) and torch.equal(copied(x), model(x))
    assert fp8_backends.prepare(model, None, model._fp8_prepared.recipe)[0] is model
    fp8_backends.restore(model)
    assert type(model[1]) is LlamaMLP and set(vars(model[1])) == set(vars(llama()))
    assert all(now is then for now, then in zip(model.parameters(), before, strict=True))


def test_the_report_of_a_recipe_without_it_says_nothing():
    assert "fused" not in str(prepared(llama(), fuse_activations=False)._fp8_prepared.report)


def test_the_benchmark_rehearses_on_a_cpu_and_fails_where_numbers_are_far_apart(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", list(sys.path))  # the script adds its folder
    script = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "gpu" / "activations.py"))
    monkeypatch.setattr(sys, "argv", ["activations.py", "--runs", "1", "--json", str(tmp_path / "found.json")])
    assert script["main"]() == 0
    assert len(json.loads((tmp_path / "found.json").read_text())["cases"]) == 4
    monkeypatch.setitem(script["ACTIVATIONS"], "silu", torch.relu)
    monkeypatch.setitem(script["main"].__globals__, "gated_product", lambda gate, up, *_: F.silu(gate) * up)
    assert script["main"]() == 1
