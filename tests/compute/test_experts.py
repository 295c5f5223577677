"""Compare FP8 experts with a Linear over the expert's weight and tokens, and check products against
a GPU's rules."""

from types import SimpleNamespace

import pytest
import torch
from expert_families import EXPERTS, Twin, make_experts, routed
from gpu_rules import Calls, Context
from model_families import WIDTH
from torch._subclasses.fake_tensor import FakeTensorMode
from widths import nightly

import fp8_backends
from fp8_backends import preparation
from fp8_backends.compute.experts import grouped_products, grouped_scaling
from fp8_backends.compute.experts import native_layer as experts_module
from fp8_backends.compute.experts.grouped_products import (
    Groups,
    grouped_product,
    grouped_wgrad,
    plain_product,
    plain_wgrad,
)
from fp8_backends.compute.experts.grouped_scaling import quantize_experts, quantize_groups
from fp8_backends.compute.experts.native_layer import (
    GroupedFunction,
    quantized_weight,
)
from fp8_backends.compute.native.backend import NativeCompute, layer_rule
from fp8_backends.compute.native.layer_rule import Stored, fp8_product
from fp8_backends.compute.native.linear import Call
from fp8_backends.compute.native.scaling_states import KeepsLedger, Ledger
from fp8_backends.compute.native.weights import kind_of
from fp8_backends.compute.products import engine_of_gpu, scaled_product
from fp8_backends.formats.formats import E4M3
from fp8_backends.formats.scaling import (
    INPUT,
    POWER_OF_TWO,
    RULES,
    Quantized,
    Rule,
    new_window_state,
    record_amax,
    rolled_window_states,
    tensor_amax,
    window_scale,
)
from fp8_backends.kernels.quantize import quantize_blocks
from fp8_backends.recipes import handlers as recipes
from fp8_backends.recipes.handlers import FP8RecipeKwargs
from fp8_backends.tensors.scaled_tensor import quantize

SCALINGS = tuple(f"native:{scaling}" for scaling in NativeCompute.scalings)
PARTS = ("gate_up_proj", "down_proj")


def prepared(family, backend="native:dynamic", dtype=torch.float32, **fields):
    """The experts and a twin of Linears, both in FP8 with E4M3 everywhere."""
    fields = {
        "fp8_format": "E4M3",
        **({"amax_history_len": 4} if backend == "native:delayed" else {}),
        **fields,
    }
    root = make_experts(family, dtype)
    twin = torch.nn.Sequential(Twin(root.experts))
    for model in (root, twin):
        preparation.prepare_model(
            model, recipes.resolve(FP8RecipeKwargs(backend=backend, **fields))
        )
    return root, twin


def prepared_at(level, family, scaling):
    """Experts stored by a level, and a twin of Linears with the stored values."""
    root, fields = make_experts(family), {"fp8_format": "E4M3"}
    preparation.prepare_model(
        root, recipes.resolve(FP8RecipeKwargs(backend=f"native:{scaling}+msamp:{level}", **fields))
    )
    twin = torch.nn.Sequential(Twin(root.experts))
    preparation.prepare_model(
        twin, recipes.resolve(FP8RecipeKwargs(backend=f"native:{scaling}", **fields))
    )
    return root, twin


def run(model, hidden, chosen, weights, dy, autocast=True):
    """(output, gradients of hidden states and weights) of one training step without an update."""
    for hook in model._forward_pre_hooks.values():
        hook(model, ())  # the root's: delayed states roll
    inner = model.experts if hasattr(model, "experts") else model[0]
    hidden, weights = (t.clone().requires_grad_() for t in (hidden, weights))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = inner(hidden, chosen, weights)
    y.backward(dy)
    return y, hidden.grad, weights.grad


@pytest.mark.nightly
@pytest.mark.parametrize(
    "dtype", [torch.float32, nightly(torch.bfloat16)], ids=["autocast", "bf16"]
)
@pytest.mark.parametrize("backend", SCALINGS)
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_experts_match_linear_layers_bitwise(family, backend, dtype):
    root, twin = prepared(family, backend, dtype)
    experts = root.experts
    for step in range(3):
        hidden, chosen, weights = routed(40, step, dtype)
        chosen = chosen % 2 if step == 1 else chosen  # two experts without tokens
        dy = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)
        ours, theirs = (
            run(m, hidden, chosen, weights, dy, dtype == torch.float32) for m in (root, twin)
        )
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), step
        for part in PARTS:
            gradient, expected = getattr(experts, part).grad, twin[0].gradient(part)
            gradient = gradient.transpose(1, 2) if experts.is_transposed else gradient
            if experts.is_transposed:
                # two scales multiply each element one after the other, here the other way round: a
                # bf16 unit
                torch.testing.assert_close(gradient, expected, rtol=2**-7, atol=0)
            else:
                assert torch.equal(gradient, expected), (step, part)
        root.zero_grad(), twin.zero_grad()
    layers = experts.fp8_weights.values()
    assert all(layer.fp8_products.tolist() == [3, 3, 3, 0] for layer in layers)


@pytest.mark.parametrize(
    ("level", "scaling", "family"),
    [
        ("O1", "delayed", "mixtral"),
        ("O2", "window", "gpt_oss"),
        ("O2", "rowwise", "mixtral"),
        ("O2", "blockwise", "mixtral"),
        ("O3", "window", "mixtral"),
        ("O4", "window", "gpt_oss"),
        ("O4", "mxfp8", "gpt_oss"),
    ],
)
def test_stored_weights_match_linear_layers(level, scaling, family):
    """FP16 data get a scale for each expert. E4M3 codes have one power-of-two scale; more scales
    would change no bit."""
    root, twin = prepared_at(level, family, scaling)
    stored = torch.float16 if level in ("O1", "O2") else torch.float8_e4m3fn
    assert all(getattr(root.experts, part).codes.dtype == stored for part in PARTS)
    for step in range(2):
        hidden, chosen, weights = routed(40, step)
        chosen = chosen % 2 if step else chosen  # two experts without tokens
        dy = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(step))
        ours, theirs = (run(model, hidden, chosen, weights, dy) for model in (root, twin))
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), step
        for part in PARTS:
            gradient, expected = getattr(root.experts, part).grad, twin[0].gradient(part)
            expected = expected.transpose(1, 2) if root.experts.is_transposed else expected
            assert gradient.codes.dtype == E4M3.dtype
            expected = quantize(expected, E4M3.dtype)
            if not root.experts.is_transposed:
                assert torch.equal(gradient.dequantize(), expected.dequantize())
            else:  # as above, and then rounded to E4M3: half a step more, or a step of the smallest
                least = expected.scale_inv.item() * 2**-9
                torch.testing.assert_close(
                    gradient.dequantize(), expected.dequantize(), rtol=2**-3, atol=least
                )
        root.zero_grad(), twin.zero_grad()


@pytest.mark.parametrize("rolled", [0, 20], ids=["just in time", "from the history"])
def test_window_of_each_expert_matches_linear_layer(rolled):
    """Run before and after the first 16 steps; with an inf, with a NaN, and without tokens in some
    experts."""
    x, groups = torch.randn(12, 8), Groups.of(torch.arange(12) // 3, 5)
    x[4, 2], x[7, 3] = float("inf"), float("nan")
    states = new_window_state().repeat(5, 1, 1)
    for step in range(rolled):
        for expert in range(5):
            record_amax(states[expert], INPUT, torch.tensor(step + expert + 1.0))
        states = rolled_window_states(states, (E4M3, E4M3, E4M3))
    amax = grouped_scaling.amaxes_of_groups(x, groups, keep_nan=True)
    scales = grouped_scaling.scales(RULES["window"], amax, E4M3, INPUT, states)
    record_amax(recorded := states.clone(), INPUT, amax, keep_nan=True)
    for expert in range(4):
        rows = x[3 * expert : 3 * expert + 3]
        expected = states[expert].clone()
        record_amax(expected, INPUT, tensor_amax(rows), keep_nan=True)
        assert torch.equal(
            recorded[expert].view(torch.float32).nan_to_num(7),
            expected.view(torch.float32).nan_to_num(7),
        )
        scale = window_scale(states[expert], INPUT, tensor_amax(rows), E4M3)
        assert torch.equal(scales[expert], scale) or (expert == 2 and scales[expert].isnan())
    assert torch.equal(recorded[4], states[4])


class PowerOfTwo(Rule):
    """A rule of one's own: `dynamic`, rounded down to a power of two."""

    name = "power of two"

    def from_amax(self, tensor):
        return POWER_OF_TWO


def test_experts_ask_another_rule_for_its_scale():
    root, twin = prepared("mixtral")
    rule = PowerOfTwo()
    layers = [each for each in twin.modules() if isinstance(each, KeepsLedger)]
    for layer in (*root.experts.fp8_weights.values(), *layers):
        layer.fp8_rule = layer.fp8_rule._replace(scales=rule)
    hidden, chosen, weights = routed(40, 0, torch.float32)
    dy = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(0))
    ours, theirs = (run(m, hidden, chosen, weights, dy) for m in (root, twin))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("scaling", ["blockwise", "mxfp8"])
def test_wgrad_blocks_restart_at_each_group(scaling):
    """Groups of sizes around a block's, and empty ones."""
    rule = layer_rule(recipes.resolve(f"native:{scaling}"))
    blocks, sizes = rule.scales.blocks, (0, 127, 128, 0, 129, 1, 300, 31, 33)
    groups = Groups.of(torch.repeat_interleave(torch.arange(9), torch.tensor(sizes)), 9)
    x, dy = torch.randn(sum(sizes), 24), torch.randn(sum(sizes), 40)
    x8, dy8 = (
        grouped_scaling.quantize_groups_in_blocks(t, groups, rule, E4M3, False, True)
        for t in (x, dy)
    )
    dw = grouped_wgrad(dy8.along_rows(), x8.along_rows(), groups, scaling, torch.float32)
    for ours, x_rows, dy_rows in zip(dw, x.split(sizes), dy.split(sizes), strict=True):
        if not len(x_rows):
            assert not ours.any()
            continue
        operands = (
            quantize_blocks(rows, blocks, E4M3, rows=False).along_rows()
            for rows in (dy_rows, x_rows)
        )
        assert torch.equal(
            ours, fp8_product(rule.scales, *operands, torch.float32, by_weight=False)
        )


def test_e5m2_gradients_use_rowwise_e4m3():
    """Let tokens with gradients of 1 and of 2**-20 share an expert: one E4M3 scale zeroes the small
    ones, rowwise scales keep them."""
    hidden, _, weights = routed(32)
    chosen = torch.zeros(32, 2, dtype=torch.long)
    dy = torch.ones(32, WIDTH)
    dy[16:] = 2.0**-20
    found = {}
    for fmt in ("E4M3", "HYBRID"):
        root, _ = prepared("mixtral", fp8_format=fmt)
        y, dx, _ = run(root, hidden, chosen, weights, dy)
        found[fmt] = y, dx
    plain = make_experts("mixtral")
    _, expected, _ = run(plain, hidden, chosen, weights, dy)
    assert torch.equal(found["E4M3"][0], found["HYBRID"][0])
    assert not found["E4M3"][1][16:].any()
    small, exact = found["HYBRID"][1][16:], expected[16:]
    # two quantized gradients and weights on the way: 2**-4 each, averaged over 64 terms
    assert (small - exact).norm() < 0.1 * exact.norm()


def test_each_product_can_stay_in_high_precision():
    hidden, chosen, weights = routed(40)
    dy = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(0))
    every = run(prepared("gpt_oss")[0], hidden, chosen, weights, dy)
    for kept in range(3):
        override = tuple(i == kept for i in range(3))
        root, twin = prepared("gpt_oss", override_linear_precision=override)
        ours, theirs = (run(m, hidden, chosen, weights, dy) for m in (root, twin))
        # high-precision products of torch differ from product to product by the order of summation
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=2**-6, atol=2**-6 * b.abs().max().item())
        assert torch.equal(ours[0], every[0]) == (kept != 0)
        expected = [int(i != kept) for i in range(3)] + [0]
        assert all(
            layer.fp8_products.tolist() == expected for layer in root.experts.fp8_weights.values()
        )


@pytest.mark.parametrize("backend", SCALINGS)
def test_non_finite_values_stay_within_their_expert(backend):
    """A NaN stays in its token. An inf has no code: it reaches all tokens of its expert (with
    rowwise scales only its own)."""
    root, twin = prepared("mixtral", backend)
    hidden, _, weights = routed(24)
    chosen = torch.arange(24).unsqueeze(1).repeat(1, 2) % EXPERTS
    hidden[4, 3], hidden[1, 2] = float("nan"), float("inf")  # experts 0 and 1
    dy = torch.randn(24, WIDTH)
    ours, theirs = (run(m, hidden, chosen, weights, dy) for m in (root, twin))
    bad = ~torch.isfinite(ours[0]).all(1)
    assert bad[4] and bad[1] and not bad[chosen[:, 0] > 1].any()
    assert all(
        torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(ours, theirs, strict=True)
    )


def test_evaluation_and_empty_batch_run_original_module():
    root, plain = prepared("gpt_oss")[0], make_experts("gpt_oss")
    for model, tokens in ((root, 0), (root.eval(), 8)):
        hidden, chosen, weights = routed(tokens)
        y = model.experts(hidden, chosen, weights)
        assert torch.equal(y, plain.experts(hidden, chosen, weights))
    assert not any(layer.fp8_products.any() for layer in root.experts.fp8_weights.values())
    root, _ = prepared("gpt_oss", use_autocast_during_eval=True)
    root.eval().experts(*routed(8))
    assert all(
        layer.fp8_products.tolist() == [1, 0, 0, 0] for layer in root.experts.fp8_weights.values()
    )


@pytest.mark.parametrize("placed", [False, True], ids=["as they lie", "as on a GPU"])
@pytest.mark.parametrize("backend", SCALINGS)
def test_rows_for_remote_experts_are_ignored(backend, placed, monkeypatch):
    """Expert parallelism without an exchange gives a rank all tokens, some for remote experts with
    weight zero. One of them is all inf. Results equal a batch without them."""
    for module in (grouped_products, grouped_scaling):
        monkeypatch.setattr(module, "has_places", lambda tensor: placed)
    hidden, chosen, weights = routed(40)
    foreign = torch.rand(40, 2, generator=torch.Generator().manual_seed(1)) < 0.5
    foreign[5] = True
    hidden[5] = float("inf")
    token, slot = torch.where(~foreign)
    dy = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(0))
    shared, alone = (prepared("gpt_oss", backend)[0] for _ in range(2))
    shared.experts._is_expert_parallel = True
    masked = chosen.masked_fill(foreign, EXPERTS), weights.masked_fill(foreign, 0.0)
    y, dx, dw = run(shared, hidden, *masked, dy)
    rows, dx_rows, dw_rows = run(
        alone, hidden[token], chosen[token, slot, None], weights[token, slot, None], dy[token]
    )
    assert torch.equal(y, torch.zeros_like(y).index_add(0, token, rows))
    assert torch.equal(dx, torch.zeros_like(dx).index_add(0, token, dx_rows))
    assert torch.equal(dw[token, slot], dw_rows[:, 0]) and not dw[foreign].any()
    for name, parameter in shared.experts.named_parameters():
        assert torch.equal(parameter.grad, alone.experts.get_parameter(name).grad), name


@pytest.mark.parametrize(
    "autocast,weights",
    [(torch.float16, torch.float32), (None, torch.float16), (None, torch.float32)],
)
def test_other_dtypes_match_bf16_products(autocast, weights):
    root, plain = prepared("mixtral", dtype=weights)[0], make_experts("mixtral", weights)
    hidden, chosen, router = routed(40, dtype=weights)
    with torch.autocast("cpu", autocast or torch.float16, enabled=autocast is not None):
        y = root.experts(hidden, chosen, router)
    y.float().sum().backward()
    expected = plain.experts(hidden, chosen, router)
    assert y.dtype == weights and root.experts.down_proj.grad.dtype == weights
    # E4M3: 2**-4 an element at most, on two layers
    assert (y - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("backend", ["native:dynamic", "native:rowwise"])
def test_weights_are_cast_once_per_step(backend, monkeypatch):
    made = []
    monkeypatch.setattr(
        experts_module, "quantized_weight", lambda *args: made.append(1) or quantized_weight(*args)
    )
    results = {}
    for kept in (False, True):
        root, _ = prepared("gpt_oss", backend)
        optimizer = torch.optim.SGD(root.parameters(), lr=0.1)
        fp8_backends.prepare(root, optimizer, FP8RecipeKwargs(backend=backend, fp8_format="E4M3"))
        fp8_backends.convert.stored_weights.keep_weight_casts(root, kept)
        made.clear()
        for step in range(2):
            for microbatch in range(3):
                run(root, *routed(20, 3 * step + microbatch), torch.ones(20, WIDTH))
            optimizer.step()
        # two weights: the first step shows that they train
        assert len(made) == (2 * (3 + 1) if kept else 2 * 6)
        results[kept] = [parameter.detach().clone() for parameter in root.parameters()]
        # rowwise recomputes the codes for dgrad in backward, and holds none otherwise
        held = {"native:dynamic": 1, "native:rowwise": int(kept)}[backend]
        counted = fp8_backends.audit(root, optimizer).bytes_per_parameter["weight"]
        weights = sum(p.numel() for p in root.parameters() if p.dim() == 3)
        assert counted == pytest.approx(
            4 + held * weights / sum(p.numel() for p in root.parameters())
        )
    assert all(torch.equal(a, b) for a, b in zip(*results.values(), strict=True))


# a GPU's engine


def fake_weight(*shape, stored):
    if stored is None:
        return Stored(torch.empty(shape, device="cuda"), None)
    return Stored(torch.empty(shape, device="cuda", dtype=stored), torch.empty((), device="cuda"))


def step_on_fake_tensors(scaling, sizes, stored, transposed, groups):
    """Run forward and backward of 37 rows, and return the operators."""
    rule, (out, into), experts = (
        layer_rule(recipes.resolve(f"native:{scaling}")),
        sizes,
        len(groups.ends),
    )
    with Calls() as calls:
        x = torch.empty(37, into, device="cuda", dtype=torch.bfloat16)
        shape = (experts, into, out) if transposed else (experts, out, into)
        weight, of_weight = torch.empty(shape, device="cuda"), fake_weight(*shape, stored=stored)
        state = (
            torch.empty(experts, 3, 18, dtype=torch.int32, device="cuda")
            if scaling == "window"
            else None
        )
        context, w8 = Context(), quantized_weight(rule, of_weight, state, transposed, True)
        ledger = Ledger(torch.device("cuda"))
        call = Call(rule, state, ledger, torch.bfloat16, transposed, kind_of(weight), None)
        y = GroupedFunction.forward(context, x, weight, call, groups, w8, of_weight, False)
        with torch.no_grad():  # as autograd calls it
            dx, dw, *_ = GroupedFunction.backward(context, torch.empty_like(y))
    assert y.shape == (37, out) and y.dtype == torch.bfloat16 and y.device.type == "cuda"
    assert (
        dx.shape == x.shape
        and dx.dtype == x.dtype
        and dw.shape == weight.shape
        and dw.dtype == weight.dtype
    )
    return calls.seen


@pytest.mark.nightly
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "stored", [None, torch.float16, torch.float8_e4m3fn], ids=["plain", "FP16", "E4M3"]
)
@pytest.mark.parametrize("scaling", ["dynamic", "rowwise", "window"])
def test_a_gpu_accepts_every_product(scaling, stored, transposed):
    """Fake CUDA tensors run torch's checks of `_scaled_grouped_mm`."""
    for out, into in ((64, 32), (40, 24), (1, 33), (33, 1)):
        with FakeTensorMode():
            groups = Groups.of(torch.empty(37, dtype=torch.long, device="cuda"), 5)
            calls = step_on_fake_tensors(scaling, (out, into), stored, transposed, groups)
        assert calls.count(torch.ops.aten._scaled_grouped_mm.default) == 3


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("k, n", [(64, 32), (33, 5), (1, 40), (64, 1)])
def test_a_gpu_accepts_products_in_high_precision(k, n, transposed):
    """Torch's checks of `grouped_mm`: strides in multiples of 16 bytes. A sum's gradient is
    expanded."""

    def empty(*shape):
        return torch.empty(shape, device="cuda", dtype=torch.bfloat16)

    with FakeTensorMode():
        groups = Groups.of(torch.empty(37, dtype=torch.long, device="cuda"), 5)
        weight = empty(5, k, n).transpose(1, 2) if transposed else empty(5, n, k)
        assert plain_product(empty(37, k), weight, groups).shape == (37, n)
        for dy in (empty(37, n), empty(1, 1).expand(37, n)):
            assert plain_wgrad(dy, empty(37, k), groups).shape == (5, n, k)
            assert plain_product(dy, empty(5, k, n), groups).shape == (37, k)


@pytest.mark.parametrize("backend", ["native:dynamic", "native:blockwise"])
def test_group_sizes_are_read_once_per_layer(backend, monkeypatch):
    """Reading waits for a GPU."""
    root, _ = prepared("mixtral", backend)
    reads, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(
        torch.Tensor, "tolist", lambda tensor: reads.append(tensor.shape) or tolist(tensor)
    )
    run(root, *routed(40), torch.randn(40, WIDTH))
    assert len(reads) == 1


def test_cuda_graphs_exclude_operators_reading_group_sizes():
    for name in ("grouped_product", "grouped_wgrad", "quantize_block_columns"):
        assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.fp8_backends, name).default.tags, (
            name
        )


def _same_shape(target, source):
    assert target.shape == source.shape and target.dtype == source.dtype
    return target


@pytest.mark.nightly
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("stored", [torch.float16, torch.float8_e4m3fn], ids=["FP16", "E4M3"])
@pytest.mark.parametrize("scaling", ["blockwise", "mxfp8"])
def test_a_gpu_accepts_every_product_in_blocks(scaling, stored, transposed, monkeypatch):
    """Torch's checks of `scaled_mm` for each expert, inside the operators, with given sizes of
    groups."""
    for module in (grouped_products, grouped_scaling):
        monkeypatch.setattr(module, "rows_of_groups", lambda ends: [(0, 0, 20), (1, 20, 37)])
    monkeypatch.setattr(torch.Tensor, "copy_", _same_shape)  # autograd's asks for a CUDA device
    entered = SimpleNamespace(
        quantize_block_columns=grouped_scaling._quantize_columns,
        grouped_product=grouped_products._product_by_group,
        grouped_wgrad=grouped_products._wgrad_by_group,
    )
    with FakeTensorMode():
        monkeypatch.setattr(torch.ops, "fp8_backends", entered)
        groups = Groups(
            torch.empty(37, dtype=torch.long, device="cuda"), torch.empty(2, device="cuda")
        )
        calls = step_on_fake_tensors(scaling, (40, 24), stored, transposed, groups)
    assert calls.count(torch.ops.aten._scaled_mm_v2.default) == 6  # of two experts


@pytest.mark.parametrize("lines", [False, True])
def test_cast_operators_return_declared_outputs(lines, monkeypatch):
    """torch's own check of operators: shapes, strides, no shared memory."""
    for module in (grouped_products, grouped_scaling):
        monkeypatch.setattr(module, "has_places", lambda tensor: True)
    groups, scale = Groups.of(torch.tensor([0, 0, 2, 2, 2]), 3), None if lines else torch.ones(3)
    tests = ("test_schema", "test_faketensor")
    for layouts in ((True, True), (True, False), (False, True)):
        options = E4M3.dtype, scale, *layouts, lines
        operators, weight = torch.ops.fp8_backends, torch.randn(3, 20, 40)
        x = torch.randn(5, 20)
        torch.library.opcheck(
            operators.quantize_groups.default, (x, *groups, *options), test_utils=tests
        )
        torch.library.opcheck(
            operators.quantize_experts.default, (weight, *options), test_utils=tests
        )


def grouped_mm_on_a_cpu(a, b, scale_a, scale_b, offs, out_dtype, use_fast_accum=False):
    """Run `torch._scaled_grouped_mm`'s checks on meta tensors, and compute group by group, with NaN
    for undefined numbers."""
    torch._scaled_grouped_mm(
        *(t.to("meta") for t in (a, b, scale_a, scale_b, offs)), out_dtype=out_dtype
    )
    bounds = [0, *offs.tolist()]
    assert all(bound % 16 == 0 for bound in bounds)
    groups = list(zip(bounds, bounds[1:], strict=False))
    if b.dim() == 3:
        out = torch.full((a.shape[0], b.shape[2]), float("nan"), dtype=out_dtype)
        for group, (begin, end) in enumerate(groups):
            left = Quantized(a[begin:end], scale_a[begin:end, None])
            out[begin:end] = scaled_product(
                left, Quantized(b[group].t(), scale_b[group, :, None]), out_dtype
            )
        return out
    scale_a, scale_b = scale_a.view(len(groups), -1, 1), scale_b.view(len(groups), -1, 1)
    out = torch.full((len(groups), a.shape[0], b.shape[1]), float("nan"), dtype=out_dtype)
    for group, (begin, end) in enumerate(groups):
        if begin < end:  # an empty sum has no promised value
            left = Quantized(a[:, begin:end].contiguous(), scale_a[group])
            out[group] = scaled_product(
                left, Quantized(b[begin:end].t().contiguous(), scale_b[group]), out_dtype
            )
    return out


@pytest.mark.parametrize(
    "sizes", [(0, 37, 0, 3), (16, 16, 16, 16), (0, 0, 0, 1), (50, 0, 0, 0), (1, 0, 0, 0)]
)
def test_grouped_kernel_gets_groups_aligned_to_16(monkeypatch, sizes):
    """For odd sizes, match group-by-group products bitwise and ignore the gaps between groups."""
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor(sizes))
    torch.manual_seed(0)
    x, dy, w = torch.randn(len(ids), 24), torch.randn(len(ids), 40), torch.randn(4, 40, 24)

    def products():
        groups = Groups.of(ids, 4)
        x8, dy8 = (quantize_groups(t, groups, E4M3, lines=True) for t in (x, dy))
        y = grouped_product(
            x8.along_columns(), quantize_experts(w, E4M3, lines=True).along_columns(), groups
        )
        return y.narrow(1, 0, 40), grouped_wgrad(dy8.along_rows(), x8.along_rows(), groups)

    y, dw = products()
    monkeypatch.setattr(grouped_products, "has_places", lambda ids: True)
    monkeypatch.setattr(grouped_scaling, "has_places", lambda x: True)
    by_group = products()
    monkeypatch.setattr(
        grouped_products, "grouped_engine_for", lambda device: grouped_products.SCALED_GROUPED_MM
    )
    monkeypatch.setattr(torch, "_scaled_grouped_mm", _checked(torch._scaled_grouped_mm))
    for padded in (by_group, products()):
        assert torch.equal(padded[0], y) and torch.equal(padded[1][:, :40, :24], dw)
        assert not padded[1][:, 40:].any() and not padded[1][:, :, 24:].any()
    assert y.shape == (len(ids), 40) and dw.shape == (4, 40, 24)
    assert [bool(gradient.any()) for gradient in dw] == [size > 0 for size in sizes]


def _checked(original):
    def product(a, *args, **kwargs):
        return (
            original(a, *args, **kwargs) if a.is_meta else grouped_mm_on_a_cpu(a, *args, **kwargs)
        )

    return product


def test_engines_by_device(monkeypatch, either_cpu):
    cuda, engine_for = torch.device("cuda"), grouped_products.grouped_engine_for
    assert engine_for(torch.device("cpu")) == ("bf16-exact" if either_cpu else "fp32-exact")
    assert engine_for(cuda) == "scaled_grouped_mm"  # a fake tensor's, without a driver
    monkeypatch.setattr("fp8_backends.compute.hardware.has_gpu", lambda: True)
    for capability, engine in (
        ((9, 0), "scaled_grouped_mm"),
        ((8, 9), "scaled_mm"),
        ((10, 0), "scaled_mm"),
    ):
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda device, found=capability: found
        )
        engine_of_gpu.cache_clear()
        assert engine_for(cuda) == engine
    engine_of_gpu.cache_clear()
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(gcnArchName="gfx950")
    )
    assert engine_for(cuda) == "scaled_mm"


@pytest.mark.nightly
@pytest.mark.parametrize(
    "family,backend,on_gpu",
    [("mixtral", "native:window", True), nightly("gpt_oss", "native:mxfp8", False)],
)
def test_compiled_experts_match_eager_without_graph_break(family, backend, on_gpu, monkeypatch):
    """Include a GPU's padded groups and cast operators."""
    for module in (grouped_products, grouped_scaling):
        monkeypatch.setattr(module, "has_places", lambda tensor: on_gpu)
    hidden, chosen, weights = routed(24)
    dy = torch.randn(24, WIDTH)
    results = []
    for compiles in (False, True):
        torch._dynamo.reset()
        root, _ = prepared(family, backend)
        experts = root.experts
        if compiles:
            root.experts = torch.compile(experts, backend="aot_eager", fullgraph=True)
        found = run(root, hidden, chosen, weights, dy)
        counts = [layer.fp8_products.tolist() for layer in experts.fp8_weights.values()]
        results.append((*found, *(p.grad for p in experts.parameters()), counts))
    *eager, counts = results[0]
    *compiled, compiled_counts = results[1]
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))
    assert counts == compiled_counts == [[1, 1, 1, 0]] * 2


@pytest.mark.nightly
def test_compiled_experts_record_same_amaxes_when_forwards_precede_backwards():
    states = []
    for compiles in (False, True):
        torch._dynamo.reset()
        root, _ = prepared("mixtral", "native:delayed")
        experts = (
            torch.compile(root.experts, backend="aot_eager", fullgraph=True)
            if compiles
            else root.experts
        )
        (roll,) = root._forward_pre_hooks.values()
        for step in range(2):
            sums = []
            for microbatch in range(2):
                roll(root, ())
                hidden, chosen, weights = routed(24, 2 * step + microbatch)
                sums.append(
                    (experts(hidden.requires_grad_(), chosen, weights) * 2.0**microbatch).sum()
                )
            for each in sums:
                each.backward()
        states.append(NativeCompute().scaling_state(root))
    eager, compiled = states
    assert eager.keys() == compiled.keys() and all(
        torch.equal(state, eager[name]) for name, state in compiled.items()
    )
    assert all(state.view(torch.float32)[:, 2, 2].any() for state in eager.values())
