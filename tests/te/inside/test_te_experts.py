"""Experts with `te`: TransformerEngine's `GroupedLinear` on 3-D Parameters, over the stand-in for
its kernels."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import transformer_engine.pytorch as te
from expert_families import Twin, build, make_experts, routed
from model_families import evaluate_after_forward, train
from standin import compute_capability
from torch import nn

import fp8_backends
from fp8_backends import BackendUnavailableError, FP8RecipeKwargs
from fp8_backends.convert import conversion
from fp8_backends.tensors.parameter_swap import swap
from fp8_backends.tensors.scaled_tensor import ScaledTensor

NAMES = (".experts.gate_up_proj", ".experts.down_proj")


def prepared(model: nn.Module, spec: str, **fields):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return fp8_backends.prepare(model, optimizer, FP8RecipeKwargs(backend=spec, **fields))


def refusals(model: nn.Module) -> set[str]:
    reasons = fp8_backends.audit(model).high_precision
    return {reason for name, reason in reasons.items() if name.endswith(NAMES)}


def results(model: nn.Module, step: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The output of a training step without an update, and all gradients."""
    hidden, chosen, weights = routed(40, step, dtype)
    chosen = chosen % 2 if step == 1 else chosen  # two experts without tokens
    hidden.requires_grad_(), weights.requires_grad_()
    inner = model[0] if isinstance(model, nn.Sequential) else model.experts
    y = inner(hidden, chosen, weights)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(step)).to(dtype))
    found = {"y": y, "hidden": hidden.grad, "weights": weights.grad, **gradients(inner)}
    model.zero_grad()
    return found


def gradients(inner: nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradients of experts' Parameters, or of their twin's Linears in the same form."""
    if not isinstance(inner, Twin):
        return {name: parameter.grad for name, parameter in inner.named_parameters()}
    found = {}
    for part, layers in (("gate_up_proj", inner.up), ("down_proj", inner.down)):
        found[part] = (
            inner.gradient(part).transpose(1, 2)
            if layers[0].bias is not None
            else inner.gradient(part)
        )
        if layers[0].bias is not None:  # GPT-OSS
            grads = [
                torch.zeros_like(each.bias) if each.bias.grad is None else each.bias.grad
                for each in layers
            ]
            found[f"{part}_bias"] = torch.stack(grads)
    return found


def assert_equal_to_linears(
    family: str, spec: str, dtype: torch.dtype = torch.float32, **fields
) -> nn.Module:
    root = make_experts(family, dtype)
    twin = nn.Sequential(Twin(root.experts))
    prepared(root, spec, **fields), prepared(twin, spec, **fields)
    for step in range(3):
        ours, theirs = (results(model, step, dtype) for model in (root, twin))
        for name, expected in theirs.items():
            assert torch.equal(ours[name], expected), (step, name)
        assert ours.keys() == theirs.keys()
    return root


@pytest.mark.parametrize(
    ("family", "spec", "fields"),
    [
        ("gpt_oss", "te:delayed", {"amax_history_len": 2}),
        ("mixtral", "te:dynamic", {}),
        ("gpt_oss", "te:blockwise", {}),
        ("gpt_oss", "te:dynamic", {"override_linear_precision": (False, False, True)}),
    ],
)
def test_experts_match_linear_layers_bitwise(family, spec, fields):
    root = assert_equal_to_linears(family, spec, **fields)
    assert "4 experts, 32 -> " in repr(root) and f"{spec} i:E4M3" in repr(root)


def test_bf16_and_mxfp8_experts_match_linear_layers_bitwise():
    assert_equal_to_linears("gpt_oss", "te:delayed", torch.bfloat16)
    with compute_capability(10, 0):
        assert_equal_to_linears("gpt_oss", "te:mxfp8")


@pytest.mark.parametrize(
    ("family", "scaling", "level"),
    [("gpt_oss", "delayed", "O2"), ("gpt_oss", "blockwise", "O3"), ("mixtral", "delayed", "O3")],
)
def test_stored_weights_match_linear_layers_bitwise(family, scaling, level):
    """Give Linears a part of the same data with the same scale. Gradients of weights are stored in
    E4M3."""
    root = make_experts(family)
    twin = nn.Sequential(Twin(root.experts))
    prepared(root, f"te:{scaling}+msamp:{level}"), prepared(twin, f"te:{scaling}")
    for part, layers in (("gate_up_proj", twin[0].up), ("down_proj", twin[0].down)):
        stored = getattr(root.experts, part)
        data = stored.codes.mT.contiguous() if root.experts.is_transposed else stored.codes
        for layer, matrix in zip(layers, data, strict=True):
            swap(layer.weight, ScaledTensor(matrix.clone(), stored.scale_inv.clone()), "weight")
    for step in range(2):
        ours, theirs = (results(model, step, torch.float32) for model in (root, twin))
        for name, expected in theirs.items():
            if isinstance(ours[name], ScaledTensor):
                assert (ours[name].dequantize() - expected).norm() < 2**-4 * expected.norm(), name
            else:
                assert torch.equal(ours[name], expected), (step, name)
        for model in (root, twin):  # Linears keep a cast until then
            conversion.prepared_roots(model)[0][2].compute.after_optimizer_step(model)


def test_o4_trains_with_five_bytes_per_element_and_saves_plain():
    plain, model = build("gpt_oss"), build("gpt_oss")
    model, optimizer = prepared(model, "te:delayed+msamp:O4")
    losses = train(model, optimizer, steps=4)
    reference = train(plain, torch.optim.AdamW(plain.parameters(), lr=3e-3), steps=4)
    assert losses == pytest.approx(reference, abs=0.05)
    audit = fp8_backends.audit(model, optimizer)
    assert audit.bytes_per_element["total"] == pytest.approx(5 + 8 / 128, rel=2e-3)
    assert refusals(model) == set() and sum(name.endswith(NAMES) for name in audit.products) == 4
    assert {type(value) for value in model.state_dict().values()} == {torch.Tensor}
    plain.load_state_dict(model.state_dict())


@pytest.mark.parametrize("family", ["deepseek_v3"])
def test_models_train_with_counts_and_proof(family, capsys):
    plain, model = build(family), build(family)
    parameters, keys = list(map(id, model.parameters())), list(model.state_dict())
    model, optimizer = prepared(model, "te:delayed")
    losses = train(model, optimizer, steps=3)
    reference = train(plain, torch.optim.AdamW(plain.parameters(), lr=3e-3), steps=3)
    assert losses != reference and losses == pytest.approx(reference, abs=0.05)
    assert list(map(id, model.parameters())) == parameters and list(model.state_dict()) == keys
    audit = fp8_backends.audit(model, optimizer)
    experts = {name: counts for name, counts in audit.products.items() if name.endswith(NAMES)}
    assert f" Linear, {len(experts)}/{len(experts)} experts, " in capsys.readouterr().err
    (_, _, has), *_ = conversion.prepared_roots(model)
    for name, counts in experts.items():
        assert (
            counts == {"fprop": 3, "dgrad": 3, "wgrad": 3, "recomputed": 0}
            and audit.engine[name] == "te"
        )
        path, _, part = name.rpartition(".")
        # Hopper
        assert (
            has.compute.transient_bytes_per_element(model.get_submodule(path).fp8_weights[part])
            == 2
        )
    conversion.restore(model)
    assert "TE" not in repr(model) and list(model.state_dict()) == keys


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    (_, root, has), *_ = conversion.prepared_roots(model)
    return has.compute.scaling_state(root)


def test_recomputation_resume_and_copies_change_no_bit():
    model, optimizer = prepared(build("gpt_oss"), "te:delayed")
    recomputed, its_optimizer = prepared(build("gpt_oss"), "te:delayed")
    recomputed.gradient_checkpointing_enable({"use_reentrant": False})
    evaluate_after_forward(recomputed)
    losses = train(model, optimizer, steps=3)
    assert train(recomputed, its_optimizer, steps=3) == losses
    state, other = state_of(model), state_of(recomputed)
    assert all(torch.equal(other[name], value) for name, value in state.items())
    name = "model.layers.0.mlp.experts.down_proj.te_"
    assert state[f"{name}forward_scale"].shape == (4 * 3,) and state[
        f"{name}backward_scale"
    ].shape == (4 * 2,)
    assert (state[f"{name}forward_scale"].view(4, 3)[:, :2] != 1).all()

    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    further = train(model, optimizer, steps=2)
    resumed, its_optimizer = prepared(build("gpt_oss", seed=1), "te:delayed")
    resumed.load_state_dict(saved[0]), its_optimizer.load_state_dict(copy.deepcopy(saved[1]))
    (_, root, has), *_ = conversion.prepared_roots(resumed)
    has.compute.load_scaling_state(root, state)
    assert train(resumed, its_optimizer, steps=2) == further
    for copied in copies:
        its_optimizer = torch.optim.AdamW(copied.parameters(), lr=3e-3)
        its_optimizer.load_state_dict(copy.deepcopy(saved[1]))
        assert train(copied, its_optimizer, steps=2) == further


def test_evaluation_and_empty_batch_run_original_module():
    root, plain = make_experts("gpt_oss"), make_experts("gpt_oss")
    prepared(root, "te:delayed")
    for tokens in (0, 8):
        hidden, chosen, weights = routed(tokens)
        assert torch.equal(
            root.experts(hidden, chosen, weights), plain.experts(hidden, chosen, weights)
        )
        root.eval()
    root.train()
    assert not torch.equal(
        root.experts(hidden, chosen, weights), plain.experts(hidden, chosen, weights)
    )


def test_unconverted_weight_stays_in_high_precision():
    """The unconverted part is never rounded to FP8, and its gradient is close."""
    root, plain = make_experts("gpt_oss"), make_experts("gpt_oss")
    prepared(root, "te:dynamic", exclude=["experts.gate_up_proj"])
    assert list(root.experts.fp8_weights) == ["down_proj"]
    ours, theirs = (results(model, 0, torch.float32) for model in (root, plain))
    for name, expected in theirs.items():
        # steps of E4M3 and E5M2
        assert (ours[name] - expected).norm() < 0.06 * expected.norm(), name


def test_unsupported_expert_options_are_named():
    frozen = build("mixtral").requires_grad_(False)
    frozen.lm_head.requires_grad_()
    model, _ = prepared(frozen, "te:dynamic", fp8_params=True)
    assert refusals(model) == {
        "fp8_params stores 2-D weights in FP8, and leaves those of experts in high precision"
    }


def test_unpaddable_sizes_and_old_te_versions_are_refused(monkeypatch):
    model, _ = prepared(build("qwen3_moe", moe_intermediate_size=24), "te:dynamic")
    why = fp8_backends.audit(model).high_precision["model.layers.0.mlp.experts.down_proj"]
    assert why == "24 -> 32 are not multiples of 16, and TransformerEngine cannot pad them"
    monkeypatch.delattr(te.GroupedLinear, "_get_bias_tensors")
    with pytest.raises(
        BackendUnavailableError, match="te:delayed of experts .* te.GroupedLinear .*2.14 or newer"
    ):
        prepared(build("mixtral"), "te:delayed")


def test_bf16_phase_runs_the_original_module():
    root, plain = make_experts("gpt_oss"), make_experts("gpt_oss")
    prepared(root, "te:dynamic", schedule={0: "bf16"})
    hidden, chosen, weights = routed(8)
    assert torch.equal(
        root.experts(hidden, chosen, weights), plain.experts(hidden, chosen, weights)
    )
