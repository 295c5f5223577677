"""Mixtures of experts of transformers, whole: converted, counted, proven and restored like
Linears."""

import copy
import pickle
import sys

import pytest
import torch
from expert_families import EXPERTS, FAMILIES, build, make_experts, routed
from model_families import LAYERS, batch, evaluate_after_forward, loss_of, train
from torch import nn
from transformers.integrations import moe

import fp8_backends
from fp8_backends import preparation
from fp8_backends.compute import experts as functions
from fp8_backends.compute.products import engine_for
from fp8_backends.compute.registry import get_compute
from fp8_backends.convert import conversion
from fp8_backends.errors import FP8BackendError
from fp8_backends.evidence import auditing
from fp8_backends.recipes import handlers as recipes
from fp8_backends.recipes.handlers import FP8RecipeKwargs
from fp8_backends.states.gradient_release import is_dropped

PARTS = ("gate_up_proj", "down_proj")
FIRST = {"deepseek_v3": 1}
"""The first block with experts; 0 for the others."""
BACKENDS = {
    "mixtral": "native:rowwise",
    "qwen3_moe": "native:delayed",
    "deepseek_v3": "native:dynamic",
}


def names(family):
    blocks = range(FIRST.get(family, 0), LAYERS)
    return [f"model.layers.{i}.mlp.experts.{part}" for i in blocks for part in PARTS]


def prepare(model, backend="native:dynamic", **fields):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return fp8_backends.prepare(model, optimizer, FP8RecipeKwargs(backend=backend, **fields))


def reasons(model):
    found = {
        name: reason
        for name, reason in fp8_backends.audit(model).high_precision.items()
        if "experts" in name
    }
    return {name.rsplit(".", 1)[-1]: reason for name, reason in found.items()}


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_train_in_fp8_counted_and_proven(family, capsys):
    """Losses near high precision, but unequal; every parameter moves; keys and objects stay."""
    plain, model = build(family), build(family)
    keys, parameters = list(model.state_dict()), list(map(id, model.parameters()))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    backend = BACKENDS.get(family, "native:dynamic")
    model, optimizer = prepare(model, backend)
    losses = train(model, optimizer, steps=8)
    reference = train(plain, torch.optim.AdamW(plain.parameters(), lr=3e-3), steps=8)

    assert losses != reference and losses[-1] < losses[0] - 0.2
    assert max(abs(a - b) for a, b in zip(losses, reference, strict=True)) < 0.05
    assert not [name for name, p in model.named_parameters() if torch.equal(p, before[name])]
    assert list(model.state_dict()) == keys and list(map(id, model.parameters())) == parameters

    audit = fp8_backends.audit(model)
    assert [name for name in audit.products if "experts" in name and "shared" not in name] == names(
        family
    )
    for name in names(family):
        assert audit.products[name] == {"fprop": 8, "dgrad": 8, "wgrad": 8, "recomputed": 0}
        assert audit.engine[name] == engine_for(torch.device("cpu"), torch.bfloat16)
    assert audit.flops_share == pytest.approx(model._fp8_prepared.report.flops_share)
    total = len(names(family))
    assert f" Linear, {total}/{total} experts, " in capsys.readouterr().err


def test_share_counts_experts_visited_per_token():
    model, _ = prepare(build("mixtral"), include=["experts"])
    report = model._fp8_prepared.report
    assert report.converted == names("mixtral")
    by_name = {product.name: product for product in report.products}
    assert by_name[names("mixtral")[0]].flops == 2 * 2 * 32 * 128  # two experts of four
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=1)
    assert fp8_backends.audit(model).flops_share == pytest.approx(report.flops_share)
    assert 0.5 < report.flops_share < 0.8


def test_report_notes_experts_without_e5m2():
    hybrid, e4m3 = build("mixtral"), build("mixtral")
    prepare(hybrid, "native:dynamic"), prepare(e4m3, "native:dynamic", fp8_format="E4M3")
    assert "in FP8 (gradients in E4M3 with a scale a row: no GPU has grouped" in str(
        hybrid._fp8_prepared.report
    )
    assert "E5M2" not in str(e4m3._fp8_prepared.report)
    assert all(
        product.reason is None
        for product in e4m3._fp8_prepared.report.products
        if product.state == "fp8"
    )


def test_preparing_twice_is_idempotent_and_restore_undoes_all():
    model, plain = build("gpt_oss"), build("gpt_oss")
    experts = model.model.layers[0].mlp.experts
    prepare(model)
    layer = experts.fp8_weights["down_proj"]
    assert "experts, 32 -> 32, native:dynamic" in repr(experts) and "go:e4m3 by rows" in repr(
        experts
    )
    prepare(model)
    assert experts.fp8_weights["down_proj"] is layer and experts.config.original is model.config
    with pytest.raises(fp8_backends.RecipeError, match="prepared with native:dynamic already"):
        prepare(model, "native:rowwise")
    conversion.restore(model)
    assert experts.config is model.config
    assert [name for name, _ in model.named_modules()] == [
        name for name, _ in plain.named_modules()
    ]
    assert loss_of(model, batch()).item() == loss_of(plain, batch()).item()


def test_failed_conversion_leaves_experts_unchanged(monkeypatch):
    model = build("mixtral")
    recipe = recipes.resolve("native:dynamic")
    monkeypatch.setattr(type(get_compute("native")), "attach", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        preparation.prepare_model(model, recipe)
    experts = model.model.layers[0].mlp.experts
    assert experts.config is model.config and "fp8_weights" not in experts._modules


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["deep", "pickle"],
)
def test_copy_has_separate_counters_and_states(copied, monkeypatch):
    model, _ = prepare(build("mixtral"), "native:delayed", amax_history_len=4)
    loss_of(model, batch()).backward()
    # as in another process
    monkeypatch.delitem(moe.ALL_EXPERTS_FUNCTIONS._global_mapping, functions.IMPLEMENTATION)
    other = copied(model)
    loss_of(other, batch()).backward()
    for own, counts in ((model, [1, 1, 1, 0]), (other, [2, 2, 2, 0])):
        experts = own.model.layers[1].mlp.experts
        assert all(
            layer.weight is getattr(experts, part) for part, layer in experts.fp8_weights.items()
        )
        assert all(layer.fp8_products.tolist() == counts for layer in experts.fp8_weights.values())


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`")
def test_recomputation_is_counted_separately_and_changes_no_scale():
    losses = {}
    for checkpointing in (False, True):
        model, optimizer = prepare(build("gpt_oss"), "native:delayed", amax_history_len=4)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            evaluate_after_forward(model)
        losses[checkpointing] = train(model, optimizer, steps=3)
        experts = model.model.layers[0].mlp.experts
        expected = [3, 3, 3, 3 * checkpointing]
        assert all(
            layer.fp8_products.tolist() == expected for layer in experts.fp8_weights.values()
        )
    assert losses[False] == losses[True]


def test_evaluation_runs_the_models_expert_function():
    model, plain = build("mixtral"), build("mixtral")
    prepare(model)
    for implementation in ("grouped_mm", "batched_mm", "eager"):
        for each in (model, plain):
            each.set_experts_implementation(implementation)
        with torch.no_grad():
            assert torch.equal(loss_of(model.eval(), batch()), loss_of(plain.eval(), batch()))
    loss_of(model.train(), batch()).backward()  # in FP8, for any setting of the model
    assert all(fp8_backends.audit(model).products[name]["wgrad"] == 1 for name in names("mixtral"))
    in_evaluation, _ = prepare(build("mixtral").eval())
    assert not any(module.training for module in in_evaluation.modules())


def test_frozen_experts_run_and_count_no_wgrad():
    model = build("mixtral")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("experts" not in name)
    model, optimizer = prepare(model, on_unproven="raise")
    train(model, optimizer, steps=1)
    audit = fp8_backends.audit(model)
    assert all(
        audit.products[name] == {"fprop": 1, "dgrad": 1, "wgrad": 0, "recomputed": 0}
        for name in names("mixtral")
    )
    report = model._fp8_prepared.report
    experts = sum(p.flops for p in report.products if p.kind == "experts")
    total, converted = (
        sum(p.flops for p in report.products if p.state == "fp8" or all_) for all_ in (True, False)
    )
    assert audit.flops_share == pytest.approx((3 * converted - experts) / (3 * total - experts))


def test_filters_select_each_expert_weight():
    model, optimizer = prepare(build("gpt_oss"), exclude=["down_proj"])
    plain = build("gpt_oss")
    losses = train(model, optimizer, steps=4)
    reference = train(plain, torch.optim.AdamW(plain.parameters(), lr=3e-3), steps=4)
    assert max(abs(a - b) for a, b in zip(losses, reference, strict=True)) < 0.05
    assert reasons(model) == {"down_proj": "left out by exclude='down_proj'"}
    experts = model.model.layers[0].mlp.experts
    assert list(experts.fp8_weights) == ["gate_up_proj"] and experts.down_proj.grad is None
    model, _ = prepare(build("gpt_oss"), exclude=["experts"])
    assert (
        "fp8_weights" not in model.model.layers[0].mlp.experts._modules and len(reasons(model)) == 2
    )


def stored_experts(model):
    return [(name, p) for name, p in model.named_parameters() if name in names("mixtral")]


@pytest.mark.parametrize(
    ("backend", "family", "weight", "master", "states"),
    [
        ("msamp:O1", "qwen3_moe", 2, 0, 8),
        ("msamp:O2", "gpt_oss", 2, 0, 3),
        ("native:blockwise+msamp:O3", "mixtral", 1, 2, 3),
        ("native:mxfp8+msamp:O4", "deepseek_v3", 1, 1, 2.0625),
    ],
)
def test_levels_store_the_weights_of_experts(backend, family, weight, master, states):
    """Bytes of each element from storages; losses near high precision, in evaluation too."""
    plain, model = build(family), build(family)
    model, optimizer = prepare(model, backend)
    losses = train(model, optimizer, steps=2)
    reference = train(plain, torch.optim.AdamW(plain.parameters(), lr=3e-3), steps=2)
    assert max(abs(a - b) for a, b in zip(losses, reference, strict=True)) < 0.05
    audit = fp8_backends.audit(model, optimizer)
    assert all(audit.products[name]["wgrad"] == 2 for name in names(family))
    found = audit.bytes_per_element
    scales = 0.02  # of smallest weights: 4 bytes for each tensor or block
    assert found["weight"] == pytest.approx(weight, abs=scales) and found[
        "master"
    ] == pytest.approx(master, abs=scales)
    assert found["gradient"] == pytest.approx(1, abs=scales)
    assert found["optimizer"] == pytest.approx(states, abs=scales)
    with torch.no_grad():
        evaluated = [loss_of(each.eval(), batch()).item() for each in (model, plain)]
    assert evaluated[0] == pytest.approx(evaluated[1], abs=0.05)


def test_stored_experts_resume_bitwise_and_export_plain():
    """Accumulate, save, load, move, copy, read plain weights and restore before the comparison."""

    def trained(model, optimizer, steps):
        losses = []
        for step in steps:
            for microbatch in range(2):
                loss = loss_of(model, batch(seed=2 * step + microbatch))
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return losses

    model, optimizer = prepare(build("mixtral"), "msamp:O4")
    trained(model, optimizer, range(2))
    saved = model.state_dict()
    assert {type(value) for value in saved.values()} == {torch.Tensor} and list(saved) == list(
        build("mixtral").state_dict()
    )
    assert all(torch.equal(saved[name], p.exact()) for name, p in stored_experts(model))
    saved, states = copy.deepcopy((saved, optimizer.state_dict()))
    compute = get_compute("native")

    other, resumed = prepare(build("mixtral", seed=3), "msamp:O4")
    other.load_state_dict(saved)
    resumed.load_state_dict(states)
    compute.load_scaling_state(other, compute.scaling_state(model))
    other.to(torch.float32)  # swaps the storage; hooks stay
    with fp8_backends.checkpoints.plain_weights(other):
        assert all(type(p) is nn.Parameter for _, p in stored_experts(other))
    copied = copy.deepcopy(other)
    expected = trained(model, optimizer, range(2, 4))
    assert trained(other, resumed, range(2, 4)) == expected
    for (_, ours), (_, theirs) in zip(stored_experts(model), stored_experts(other), strict=True):
        assert torch.equal(ours.exact(), theirs.exact())
    assert loss_of(copied, batch(seed=4)).item() == expected[0]

    assigned, _ = prepare(build("mixtral", seed=3), "msamp:O4")
    assigned.load_state_dict(saved, assign=True)
    assert all(
        type(p) is type(q) for p, q in zip(assigned.parameters(), model.parameters(), strict=True)
    )
    loss_of(assigned, batch(seed=4)).backward()
    assert all(p.grad.codes.dtype == torch.float8_e4m3fn for _, p in stored_experts(assigned))

    values = {name: p.exact() for name, p in stored_experts(model)}
    conversion.restore(model)
    assert all(
        type(p) is nn.Parameter and torch.equal(p, values[name])
        for name, p in stored_experts(model)
    )
    plain = build("mixtral").model.layers[0].mlp.experts
    assert model.model.layers[0].mlp.experts.__dict__.keys() == plain.__dict__.keys()


def test_gradients_of_stored_experts_are_released_in_backward():
    fields = {"gradient_release": True}
    kept, released = (prepare(build("mixtral"), "msamp:O2", **each) for each in ({}, fields))
    for step in range(2):
        losses = []
        for model, optimizer in (kept, released):
            loss_of(model, batch(seed=step)).backward()
            losses.append([is_dropped(p.grad) for _, p in stored_experts(model)])
            optimizer.step()
            optimizer.zero_grad()
        assert not any(losses[0]) and all(losses[1])
    pairs = zip(stored_experts(kept[0]), stored_experts(released[0]), strict=True)
    assert all(torch.equal(ours.exact(), theirs.exact()) for (_, ours), (_, theirs) in pairs)


def test_backends_without_experts_are_named():
    model, _ = prepare(build("mixtral"), "ao")
    found = reasons(model)
    assert set(found) == set(PARTS)
    assert all(
        "ao has no products for them (native and te have)" in each for each in found.values()
    )
    of_te = conversion.expected(build("mixtral"), recipes.resolve("te"))
    assert set(names("mixtral")) <= set(of_te.converted)  # known without TransformerEngine


def test_frozen_fp8_weights_exclude_experts():
    model = build("mixtral").requires_grad_(False)
    preparation.prepare_model(
        model, recipes.resolve(FP8RecipeKwargs(backend="native", fp8_params=True))
    )
    assert all(
        "fp8_params stores 2-D weights in FP8" in reason for reason in reasons(model).values()
    )
    loss_of(model, batch())
    assert fp8_backends.audit(model).products["model.layers.0.self_attn.q_proj"]["fprop"] == 1


def test_lora_on_experts_is_skipped():
    peft = pytest.importorskip("peft")
    wanted = peft.LoraConfig(
        r=4, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"]
    )
    model = peft.get_peft_model(build("mixtral"), wanted)
    model, optimizer = prepare(model)
    losses = train(model, optimizer, steps=4)
    assert losses[-1] < losses[0]
    assert "adapted by PEFT" in reasons(model)["gate_up_proj"]
    products = fp8_backends.audit(model).products
    ran = {name: counts for name, counts in products.items() if "experts" in name}
    assert [name.split(".")[-1] for name in ran] == ["down_proj"] * LAYERS
    # frozen; the gradient goes through it to the adapter
    assert all(
        counts == {"fprop": 4, "dgrad": 4, "wgrad": 0, "recomputed": 0} for counts in ran.values()
    )


class Loose(nn.Module):
    """Multiply without the experts interface."""

    def __init__(self):
        super().__init__()
        self.up_proj = nn.Parameter(torch.randn(EXPERTS, 32, 32) / 6)


class WithExperts(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.first, self.experts = nn.Linear(32, 32), experts


def obstacle_of(experts):
    model = WithExperts(experts)
    preparation.prepare_model(model, recipes.resolve("native"))
    return next(iter(reasons(model).values()))


def test_unregistered_experts_are_named(monkeypatch):
    assert "Loose multiplies by this 3-D Parameter outside" in obstacle_of(Loose())

    replaced = make_experts("mixtral").experts
    replaced.forward = lambda *args: args[0]
    assert "its forward was replaced" in obstacle_of(replaced)

    quantized = make_experts("mixtral").experts
    quantized.up = quantized.gate_up_proj = nn.Parameter(
        torch.zeros(4, 8, 8, dtype=torch.int8), requires_grad=False
    )
    assert "weight dtype torch.int8" in obstacle_of(quantized)

    # transformers 4 has no registry
    monkeypatch.delattr(sys.modules["transformers.integrations.moe"], "ALL_EXPERTS_FUNCTIONS")
    assert "this transformers has no registry of expert functions (5.0 has)" in obstacle_of(
        make_experts("mixtral").experts
    )


def test_unprepared_model_runs_registered_function_as_eager():
    prepare(build("mixtral"), "native:dynamic")  # registers the function
    experts, plain = make_experts("gpt_oss").experts, make_experts("gpt_oss").experts
    experts.config._experts_implementation, plain.config._experts_implementation = (
        "fp8_backends",
        "eager",
    )
    assert torch.equal(experts(*routed(8)), plain(*routed(8)))


def test_delayed_states_are_saved_and_synchronized_per_expert():
    model, _ = prepare(build("mixtral"), "native:delayed", amax_history_len=4)
    compute = get_compute("native")
    for _ in range(2):
        loss_of(model, batch()).backward()
    state = compute.scaling_state(model)
    name = next(name for name in state if "down_proj" in name)
    assert state[name].shape == (EXPERTS, 3, 6)
    # each expert has its own scales
    assert len(state[name].view(torch.float32)[:, :, 0].unique()) > 2
    other, _ = prepare(build("mixtral"), "native:delayed", amax_history_len=4)
    compute.load_scaling_state(other, state)
    assert loss_of(other, batch()).item() == loss_of(model, batch()).item()
    longer, _ = prepare(build("mixtral"), "native:delayed", amax_history_len=5)
    with pytest.raises(FP8BackendError, match="amax_history_len"):
        compute.load_scaling_state(longer, state)


@pytest.mark.parametrize("how", ["to_empty", "assign"])
def test_meta_model_gets_fresh_counters_when_materialized(how):
    with torch.device("meta"):
        model = build("mixtral")
    preparation.prepare_model(
        model, recipes.resolve(FP8RecipeKwargs(backend="native:delayed", amax_history_len=4))
    )
    real = build("mixtral").state_dict()
    if how == "to_empty":
        model.to_empty(device="cpu").load_state_dict(real)
    else:
        model.load_state_dict(real, assign=True)
    experts = model.model.layers[0].mlp.experts
    experts(*routed(8)).sum().backward()
    scaling = experts.fp8_weights["down_proj"].fp8_scaling
    assert (scaling.view(torch.float32)[:, :, 0] == 1).all() and not scaling[:, :, 1].any()
    products = auditing.audit(model).products[names("mixtral")[0]]
    assert products == {"fprop": 1, "dgrad": 0, "wgrad": 1, "recomputed": 0}
