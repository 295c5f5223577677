"""The recipe field `sums`: all products of native training sum as a chip's tensor cores."""

import model_families
import pytest
import torch
from expert_families import make_experts, routed
from torch import nn

import fp8_backends
from fp8_backends.compute import hardware, products, tensor_cores
from fp8_backends.compute.chips import chip_of
from fp8_backends.compute.native import layer_rule
from fp8_backends.errors import RecipeError

CPU = torch.device("cpu")


@pytest.fixture
def seen(monkeypatch):
    """Every product, as (operands, out_dtype, fast accumulation, sums, result)."""
    calls, original = [], products.scaled_product

    def spy(a, b, out_dtype, fast_accumulation=False, sums="exact"):
        result = original(a, b, out_dtype, fast_accumulation, sums)
        # bias is added in place
        calls.append((a, b, out_dtype, fast_accumulation, sums, result.clone()))
        return result

    monkeypatch.setattr(layer_rule, "scaled_product", spy)
    return calls


def check(seen, sums, fast, slow):
    """Samples of each product equal the reference's sums, times scales, to the bit."""
    assert [sum(call[3] is flag for call in seen) for flag in (True, False)] == [fast, slow]
    for a, b, out_dtype, fast_accumulation, called_with, result in seen:
        rows, columns = (torch.arange(0, len(x.codes), 23) for x in (a, b))
        codes = a.codes[rows], b.codes[columns]
        zeros = torch.zeros(len(rows), len(columns))
        out = tensor_cores.by_reference(*codes, tensor_cores.CHIPS[sums], fast_accumulation, zeros)
        if a.scale_inv.dim():
            out = (out * a.scale_inv[rows] * b.scale_inv[columns].t()).to(torch.bfloat16)
        else:
            out = out * (a.scale_inv * b.scale_inv)
        assert called_with == sums and torch.equal(result[rows][:, columns], out.to(out_dtype))


def positive_model():
    """Inputs and weights with a mean, whose long sums Hopper truncates."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 256))
    for layer in (model[0], model[2]):
        layer.weight.data.abs_()
    return model


def step(model, optimizer, x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@pytest.mark.slow
@pytest.mark.parametrize("scaling", ["dynamic", "delayed", "rowwise", "window"])
@pytest.mark.parametrize("sums", tensor_cores.CHIPS)
def test_every_product_of_a_training_step_has_the_sums_of_the_chip(scaling, sums, seen, capfd):
    model = positive_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    fp8_backends.prepare(model, optimizer, {"backend": f"native:{scaling}", "sums": sums})
    step(model, optimizer, torch.rand(300, 512).requires_grad_())
    check(seen, sums, fast=2, slow=4)
    assert f"fprop dgrad wgrad ({sums} sums)" in capfd.readouterr().err
    assert f"sums:{sums}" in repr(model)


def test_products_of_a_level_sum_so_too_and_the_loss_tells(seen):
    losses = {}
    for sums in ("exact", "h100"):
        model = positive_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        fp8_backends.prepare(model, optimizer, {"backend": "msamp:O2", "sums": sums})
        losses[sums] = step(
            model, optimizer, torch.rand(300, 512, generator=torch.Generator().manual_seed(0))
        )
    assert 0.9 < losses["h100"] / losses["exact"] < 0.999
    check([call for call in seen if call[4] == "h100"], "h100", fast=2, slow=3)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["native:dynamic", "native:rowwise"])
def test_products_of_experts_sum_so_too(backend, seen):
    root = make_experts("mixtral")
    fp8_backends.prepare(root, None, {"backend": backend, "sums": "h100", "fp8_format": "E4M3"})
    hidden, chosen, weights = routed(20)
    root.experts(hidden.requires_grad_(), chosen, weights).sum().backward()
    used = len(chosen.unique())
    check(seen, "h100", fast=2 * used, slow=4 * used)


@pytest.mark.slow
def test_products_of_a_head_in_chunks_sum_so_too(seen):
    model = model_families.build("llama")
    fields = {"sums": "ada", "fused_head": True, "include": "+lm_head"}
    fp8_backends.prepare(model, None, {"backend": "native", **fields})
    batch = model_families.batch()
    model(**batch).loss.backward()
    check(seen, "ada", fast=15, slow=30)


def test_rules_with_block_scales_and_other_backends_refuse_it_by_name():
    for backend in ("native:blockwise", "native:mxfp8", "ao", "te"):
        with pytest.raises(RecipeError, match="sums is not read by.*native"):
            fp8_backends.resolve({"backend": backend, "sums": "h100"})
        assert fp8_backends.resolve({"backend": backend, "sums": "exact"}).sums == "exact"
    with pytest.raises(RecipeError, match="sums='mi300x'"):
        fp8_backends.resolve({"backend": "native", "sums": "mi300x"})


def test_a_gpu_sums_by_itself_and_refuses_the_sums_of_another(monkeypatch):
    cuda = torch.device("cuda")
    assert not products.emulates("h100", cuda)  # a fake tensor's
    monkeypatch.setattr(hardware, "has_gpu", lambda: True)
    monkeypatch.setattr(hardware, "gpu_chip", lambda device: chip_of((9, 0)))
    assert not products.emulates("h100", cuda) and not products.emulates("exact", cuda)
    monkeypatch.setattr(hardware, "gpu_chip", lambda device: chip_of((8, 9)))
    with pytest.raises(RecipeError, match="sums='h100' on cuda: .*leave the field out"):
        products.emulates("h100", cuda)


@pytest.mark.slow
def test_a_compiled_layer_sums_so_too():
    x, results = torch.rand(32, 512), []
    for compiled in (False, True):
        model = positive_model()
        fp8_backends.prepare(model, None, {"backend": "native", "sums": "h100"})
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        run(x).sum().backward()
        results.append(model[0].weight.grad)
    assert torch.equal(*results)


def test_an_fp32_weight_has_its_gradient_rounded_once_as_on_a_gpu():
    assert products.wgrad_dtype(False, CPU, torch.float32, torch.bfloat16, "h100") == torch.float32
    assert (
        products.wgrad_dtype(False, CPU, torch.float32, torch.bfloat16, "exact") == torch.bfloat16
    )
    assert products.wgrad_dtype(True, CPU, torch.float32, torch.bfloat16, "h100") == torch.bfloat16


@pytest.mark.parametrize(
    "backend", ["native:dynamic", "native:rowwise", "msamp:O2", "ao:tensorwise", "ao:rowwise"]
)
@pytest.mark.parametrize(
    ("given", "fast"),
    [(True, [1, 1]), (False, [0, 0]), ("2", [1, 0]), (["0", "2"], [0, 0]), ("false", [0, 0])],
)
def test_fast_accumulation_is_on_off_or_off_for_named_layers(backend, given, fast, monkeypatch):
    model = positive_model()
    fp8_backends.prepare(model, None, {"backend": backend, "fast_accumulation": given})
    flags = []

    def scaled_mm(
        a, b, scale_a, scale_b, bias=None, scale_result=None, out_dtype=None, use_fast_accum=False
    ):
        flags.append(use_fast_accum)
        return torch.zeros(a.shape[0], b.shape[1], dtype=out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    monkeypatch.setattr(products, "engine_for", lambda *_: products.SCALED_MM)
    model(torch.rand(16, 512, requires_grad=True)).sum().backward()
    assert flags[:2] == [bool(flag) for flag in fast] and not any(flags[2:]) and len(flags) == 6
    shown = [part for part in repr(model).split("\n") if "native" in part]
    assert all(
        ("fast accumulation off" in part) != flag for part, flag in zip(shown, fast, strict=False)
    )
    assert sum(p.grad is not None for p in model.parameters()) == 4


def test_fast_accumulation_is_off_for_experts_by_name(seen):
    root = make_experts("mixtral")
    fields = {"sums": "h100", "fp8_format": "E4M3", "fast_accumulation": "down_proj"}
    fp8_backends.prepare(root, None, {"backend": "native:dynamic", **fields})
    hidden, chosen, weights = routed(20)
    root.experts(hidden, chosen, weights)
    used = len(chosen.unique())
    check(seen, "h100", fast=used, slow=used)


def test_a_layer_added_later_follows_the_name_too():
    model = positive_model()
    recipe = fp8_backends.resolve({"backend": "native", "fast_accumulation": ["0"]})
    fp8_backends.prepare(model, None, recipe)
    model.append(nn.Sequential(nn.Linear(256, 64), nn.Linear(64, 64)))
    fp8_backends.prepare(model, None, recipe)
    layers = [model[0], model[2], model[3][0], model[3][1]]
    assert [layer.fp8_rule.fast_accumulation for layer in layers] == [False, True, False, True]


def test_fast_accumulation_that_cannot_be_is_refused_by_name():
    for backend in ("native:blockwise", "native:mxfp8", "te:blockwise", "te:mxfp8"):
        with pytest.raises(RecipeError, match="fast_accumulation is not read by"):
            fp8_backends.resolve({"backend": backend, "fast_accumulation": False})
        assert fp8_backends.resolve({"backend": backend, "fast_accumulation": True})
    for pattern, said in (
        ("q_proj", "no weight of this model matches 'q_proj'"),
        ("2", "only layers in high precision"),
    ):
        with pytest.raises(RecipeError, match=said):
            fields = {"backend": "native", "fast_accumulation": pattern, "exclude": "2"}
            fp8_backends.prepare(positive_model(), None, fields)
    with pytest.raises(RecipeError, match="fast_accumulation"):
        fp8_backends.resolve({"backend": "native", "fast_accumulation": 7})
    from torchao.float8 import Float8LinearConfig

    with pytest.raises(RecipeError, match="gemm_config_output"):
        fp8_backends.resolve(
            {"backend": "ao", "config": Float8LinearConfig(), "fast_accumulation": False}
        )
