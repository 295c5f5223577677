"""Layers under `native:nvfp4`: products on every engine, a GPU's layouts, compiled and recomputed
code, the default choice of layers, and refusals by name."""

from __future__ import annotations

import copy

import pytest
import torch
from gpu_rules import GPURules
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

import fp8_backends
from fp8_backends import FP8RecipeKwargs, RecipeError, audit, prepare
from fp8_backends.compute import hardware
from fp8_backends.compute.products import nvfp4_product
from fp8_backends.formats.scaling import GRAD_OUTPUT, INPUT, WEIGHT, Quantized
from fp8_backends.kernels import nvfp4

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ALL = FP8RecipeKwargs(backend="native:nvfp4", include="*")
EPSILON = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 80), nn.ReLU(), nn.Linear(80, 32))


def values_of(q: Quantized) -> torch.Tensor:
    values, scale = nvfp4.dequantized(q, torch.float32)
    return values.double() * scale.double()


@pytest.mark.parametrize("out_dtype", DTYPES)
def test_products_match_exact_ones_with_and_without_bf16_in_hardware(out_dtype, monkeypatch):
    torch.manual_seed(0)
    x, w = (
        nvfp4.quantize(torch.randn(17, 72), INPUT).along_columns(),
        nvfp4.quantized(torch.randn(33, 72), 16),
    )
    expected = values_of(x) @ values_of(w).t()
    bound = (
        2.1 * EPSILON[out_dtype] * expected.abs()
        + 160 * 2.0**-24 * values_of(x).abs() @ values_of(w).abs().t()
    )
    for has_bf16 in (True, False):
        monkeypatch.setattr(hardware, "cpu_bf16", lambda answer=has_bf16: answer)
        for enabled in (True, False):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                out = nvfp4_product(x, w, out_dtype)
            assert out.dtype == out_dtype and out.shape == expected.shape
            assert ((out.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("out_dtype", DTYPES)
def test_a_gpu_accepts_the_layout_of_every_size(out_dtype):
    """Fake CUDA tensors run torch's own checks of `scaled_mm`."""
    with FakeTensorMode():
        for m, n, k in [(256, 272, 300), (17, 5, 33), (1, 1, 1), (128, 128, 128), (256, 512, 640)]:
            blocks = -(-k // 16)
            a, b = (
                Quantized(
                    torch.empty(rows, 8 * blocks, dtype=torch.uint8, device="cuda"),
                    torch.empty(nvfp4.HEADER + rows * blocks, dtype=torch.uint8, device="cuda"),
                )
                for rows in (m, n)
            )
            out = nvfp4_product(a, b, out_dtype)
            assert out.shape == (m, n) and out.dtype == out_dtype and out.device.type == "cuda"


@pytest.mark.parametrize("out_dtype", DTYPES)
def test_a_gpu_gets_codes_and_scales_in_cublas_layout(out_dtype, monkeypatch):
    """`GPURules` repeats the call on fake CUDA tensors, and reads operands as cuBLAS describes
    them."""
    torch.manual_seed(0)
    x, w = nvfp4.quantized(torch.randn(150, 200)), nvfp4.quantized(torch.randn(40, 200), 16)
    expected = nvfp4_product(x, w, out_dtype)
    with GPURules(monkeypatch) as rules:
        on_a_gpu = nvfp4_product(x, w, out_dtype)
    torch.testing.assert_close(on_a_gpu, expected, rtol=2.1 * EPSILON[out_dtype] + 1e-5, atol=1e-5)
    assert rules.products == [((160, 112), (112, 64))]


def gradients(forward, net: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    torch.manual_seed(7)  # the key of stochastic rounding
    y = forward(x)
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), [x, *net.parameters()])]


def test_layer_computes_the_products_of_its_own_codes():
    net, _ = prepare(model()[:1], None, ALL)
    x = torch.randn(24, 48).bfloat16()
    y, dx, dw, db = gradients(net.bfloat16(), net, x)
    weight = net[0].weight.detach()
    x8, w8 = nvfp4.quantize(x, INPUT), nvfp4.quantize(weight, WEIGHT)
    expected = (
        nvfp4_product(x8.along_columns(), w8.along_columns(), torch.bfloat16) + net[0].bias.detach()
    )
    assert torch.equal(y, expected)
    dy = (2 * y.float()).bfloat16()
    torch.manual_seed(7)
    dy8 = nvfp4.quantize(dy, GRAD_OUTPUT)
    assert torch.equal(dx, nvfp4_product(dy8.along_columns(), w8.along_rows(), torch.bfloat16))
    assert torch.equal(dw, nvfp4_product(dy8.along_rows(), x8.along_rows(), torch.bfloat16))
    assert torch.equal(db, dy.sum(0))
    # both products read one weight: squares have the same scales both ways
    assert torch.equal(values_of(w8.along_columns())[:, :48], values_of(w8.along_rows()).t()[:80])


@pytest.mark.slow
def test_compiled_and_recomputed_code_repeats_eager_codes():
    net, _ = prepare(model(), None, ALL)
    x = torch.randn(40, 48)
    torch._dynamo.reset()
    with torch.autocast("cpu", torch.bfloat16):
        eager = gradients(net, net, x)
        compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
        for forward in (compiled, lambda x: checkpoint(net, x, use_reentrant=False)):
            for ours, theirs in zip(gradients(forward, net, x), eager, strict=True):
                assert torch.equal(ours, theirs)
    assert audit(net).products["0"] == {"fprop": 3, "dgrad": 3, "wgrad": 3, "recomputed": 1}


@pytest.mark.nightly
@pytest.mark.parametrize("tensor", [INPUT, WEIGHT, GRAD_OUTPUT])
def test_inductor_makes_the_same_codes(tensor):
    torch._dynamo.reset()
    compiled = torch.compile(nvfp4.quantize, fullgraph=True)
    x = (torch.randn(80, 96) * torch.exp2(torch.randint(-12, 8, (80, 96)))).bfloat16()
    with torch._inductor.config.patch(fallback_random=True):
        torch.manual_seed(3)
        ours = compiled(x, tensor)
    torch.manual_seed(3)
    for made, expected in zip(ours, nvfp4.quantize(x, tensor), strict=True):
        assert made is expected or torch.equal(made, expected)


def test_conv1d_equals_its_linear_twin():
    conv = nn.Sequential(Conv1D(64, 32), nn.ReLU(), Conv1D(32, 64))
    twin = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    for ours, theirs in ((twin[0], conv[0]), (twin[2], conv[2])):
        ours.weight.data, ours.bias.data = theirs.weight.data.t().clone(), theirs.bias.data.clone()
    x = torch.randn(16, 32)
    found = [gradients(prepare(net, None, ALL)[0], net, x) for net in (conv, twin)]
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs) or torch.equal(ours, theirs.t())


class Blocks(nn.Module):
    """Numbered blocks of two layers, as a transformer has."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)]) for _ in range(count)
        )


@pytest.mark.parametrize(
    ("count", "last"), [(1, 0), (2, 1), (6, 1), (7, 2), (20, 3), (32, 5), (36, 6)]
)
def test_last_blocks_stay_in_high_precision_unless_named(count, last):
    """The published share, 15 %, rounded up: torchtitan keeps 5 of 32 and 6 of 36 blocks in
    bf16."""

    def in_high_precision(**fields):
        net, _ = prepare(Blocks(count), None, FP8RecipeKwargs(backend="native:nvfp4", **fields))
        return audit(net).high_precision

    found = in_high_precision()
    assert list(found) == [
        f"layers.{block}.{place}" for block in range(count - last, count) for place in (0, 1)
    ]
    assert all("last 15 % of blocks" in reason for reason in found.values())
    assert not in_high_precision(include="layers.*")
    assert not in_high_precision(include="+layers.*")
    assert not audit(prepare(Blocks(count), None, "native:mxfp8")[0]).high_precision


@pytest.mark.parametrize(
    "fields",
    [
        {"backend": "native:nvfp4+msamp:O2"},
        {"fp8_params": True},
        {"fused_head": True},
        {"fp8_format": "HYBRID"},
        {"activation_comm": "fp8"},
        {"enable_fsdp_float8_all_gather": True},
        {"fast_accumulation": False},
    ],
    ids=str,
)
def test_unsupported_fields_are_refused_by_name(fields):
    named = "level='O2'" if "backend" in fields else next(iter(fields))
    with pytest.raises(RecipeError, match=named):
        fp8_backends.resolve({"backend": "native:nvfp4", **fields})


def test_errors_of_a_refusal_name_the_way_out():
    with pytest.raises(
        RecipeError, match=r"experimental.*fused_head=True: leave it out, or use native:mxfp8"
    ):
        fp8_backends.resolve({"backend": "native:nvfp4", "fused_head": True})
    with pytest.raises(RecipeError, match="te has no scaling 'nvfp4'"):
        fp8_backends.resolve("te:nvfp4")


def test_log_and_plan_say_what_it_is(caplog):
    with caplog.at_level("WARNING", logger="fp8_backends"):
        prepare(model(), None, ALL)
        prepare(model(), None, "native:mxfp8")
    assert ["native:nvfp4 is experimental" in record.getMessage() for record in caplog.records] == [
        True
    ]
    assert (
        fp8_backends.plan(ALL).gemm == "NVFP4" and fp8_backends.plan("native:mxfp8").gemm == "FP8"
    )


def test_activations_outside_its_layers_are_saved_in_fp8():
    """The gradient differs as by other bits of stochastic rounding, which follow the values."""
    found = []
    for value, seed in (("off", 1), ("fp8", 1), ("off", 2)):
        torch.manual_seed(0)
        net = LlamaForCausalLM(
            LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
        )
        prepare(net, None, FP8RecipeKwargs(backend="native:nvfp4", saved_activations=value))
        torch.manual_seed(seed)
        loss = net(input_ids=torch.arange(64)[None], labels=torch.arange(64)[None]).loss
        loss.backward()
        found.append((loss.detach(), net.model.layers[0].mlp.down_proj.weight.grad))
    (loss, gradient), (packed_loss, packed), (_, reseeded) = found
    assert torch.equal(loss, packed_loss)
    assert (gradient - packed).norm() < 1.25 * (gradient - reseeded).norm()


def test_infinity_and_nan_reach_the_results():
    net, _ = prepare(model(), None, ALL)
    for bad in (torch.inf, torch.nan):
        x = torch.randn(16, 48)
        x[3, 5] = bad
        assert not net(x).isfinite().any()
    assert net(torch.zeros(16, 48)).isfinite().all()


def test_training_is_proven_and_monitored_and_lowers_the_loss(tmp_path, capsys):
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    file = tmp_path / "monitor.jsonl"
    prepare(
        net,
        optimizer,
        FP8RecipeKwargs(backend="native:nvfp4", include="*", monitor_every=5, monitor_file=file),
    )
    x, y = torch.randn(64, 48), torch.randn(64, 32)
    losses = []
    for _ in range(30):
        loss = nn.functional.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    assert "e2m1" in file.read_text()
    report = audit(net, optimizer)
    assert (
        "100 % of weight FLOPs in NVFP4 (experimental), fprop dgrad wgrad"
        in capsys.readouterr().err
    )
    assert "in NVFP4 (experimental)" in str(report)
    assert report.flops_share == 1.0 and set(report.engine.values()) <= {"bf16-exact", "fp32-exact"}
    plain = copy.deepcopy(net).state_dict()
    assert all(value.dtype == torch.float32 for value in plain.values())
