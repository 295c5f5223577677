"""The `te` compute: training by TransformerEngine's own classes, over the stand-in for its
kernels."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from math import inf, nan

import pytest
import torch
import transformer_engine.pytorch as te
from model_families import evaluate_after_forward
from standin import compute_capability
from te_models import (
    BATCHES,
    InAutocast,
    Model,
    adamw,
    by_hand,
    loss_of,
    losses,
    model,
    of_te_linear,
)
from torch import nn
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
)
from transformer_engine.pytorch.module import linear as te_linear

import fp8_backends
from fp8_backends import BackendUnavailableError, FP8BackendError, TERecipeKwargs, prepare, resolve
from fp8_backends.compute import registry
from fp8_backends.compute.te.linear import TELinear
from fp8_backends.convert import conversion
from fp8_backends.convert.conversion import prepared_roots


def prepared(spec, recompute=None):
    made = model(recompute)
    return prepare(made, adamw(made), spec)


def scaling_state(made):
    (_, root, known), *_ = prepared_roots(made)
    return known.compute.scaling_state(root)


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# The numbers are TransformerEngine's


@pytest.mark.parametrize(
    ("spec", "recipe"),
    [
        (TERecipeKwargs(), DelayedScaling()),
        (
            TERecipeKwargs(margin=1, amax_history_len=3, amax_compute_algo="most_recent"),
            DelayedScaling(margin=1, amax_history_len=3, amax_compute_algo="most_recent"),
        ),
        ("te:dynamic", Float8CurrentScaling()),
        (
            TERecipeKwargs(scaling="dynamic", fp8_format="E4M3"),
            Float8CurrentScaling(fp8_format=Format.E4M3),
        ),
        ("te:blockwise", Float8BlockScaling()),
    ],
    ids=["delayed", "delayed most_recent", "dynamic", "dynamic E4M3", "blockwise"],
)
def test_losses_match_te_linear_in_te_autocast(spec, recipe):
    made, optimizer = prepared(spec)
    found = losses(made, optimizer, accumulate=2)
    assert found == by_hand(recipe, 2)
    assert found[-1] < 0.9 * found[0]


def test_layers_that_clip_step_after_step_are_named(caplog):
    """A model called twice a step, with the scale of the call before."""
    for algorithm in ("max", "most_recent"):
        made, optimizer = prepared(TERecipeKwargs(amax_compute_algo=algorithm))
        for _ in range(32):
            (loss_of(made, BATCHES[0]) + loss_of(made, 4 * BATCHES[0])).backward()
            optimizer.step()
            optimizer.zero_grad()
        named = [message for message in caplog.messages if "clip inputs" in message]
        assert len(named) == (algorithm == "most_recent")
    assert "te:delayed: scales clip inputs of" in named[0] and "first" in named[0]


@pytest.mark.parametrize("scaling", ["delayed", "dynamic", "blockwise"])
def test_high_precision_wgrad_uses_unquantized_operands(scaling):
    """fprop, dgrad and the bias gradient are as without it."""
    torch.manual_seed(0)
    plain = nn.Linear(32, 64)
    layers, x, dy = {}, torch.randn(5, 32), torch.randn(5, 64)
    for high in (False, True):
        layer, own = copy.deepcopy(plain), x.clone().requires_grad_()
        prepare(
            layer,
            None,
            TERecipeKwargs(scaling=scaling, override_linear_precision=(False, False, high)),
        )
        y = layer(own)
        y.backward(dy)
        layers[high] = (layer, y, own.grad)
    for usual, other in zip(layers[False][1:], layers[True][1:], strict=True):
        assert torch.equal(usual, other)
    usual, other = layers[False][0], layers[True][0]
    assert torch.equal(usual.bias.grad, other.bias.grad)
    # rows of zeros pad the sum: only the order of FP32 additions may differ
    torch.testing.assert_close(other.weight.grad, dy.t() @ x, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(usual.weight.grad, dy.t() @ x, rtol=1e-3, atol=1e-3)
    assert "high:wgrad" in repr(other)


def test_model_trains_with_high_precision_wgrad(capfd):
    """Recomputation changes no loss."""
    spec, found = TERecipeKwargs(override_linear_precision=(False, False, True)), []
    for reentrant in (None, True, False):
        made, optimizer = prepared(spec, reentrant)
        found.append(losses(made, optimizer))
        assert "fprop dgrad (te; wgrad in high precision by recipe)" in capfd.readouterr().err, (
            reentrant
        )
        assert fp8_backends.audit(made).products["blocks.0.up"]["wgrad"] == 0, reentrant
    assert found[0] == found[1] == found[2]


def test_mxfp8_runs_on_blackwell_and_is_refused_on_hopper():
    with pytest.raises(
        BackendUnavailableError, match=r"te:mxfp8 .*compute capability 10.0.*Fix: use te:delayed"
    ):
        prepared("te:mxfp8")
    with compute_capability(10, 0):
        batches = [torch.cat([batch, batch]) for batch in BATCHES]
        made, optimizer = prepared("te:mxfp8")
        by_hand = InAutocast(of_te_linear(), MXFP8BlockScaling())
        assert losses(made, optimizer, batches) == losses(by_hand, adamw(by_hand), batches)
        assert losses(made, optimizer, [batch[:1] for batch in BATCHES])  # 4 rows, padded to 32
    assert unfit(nn.Linear(48, 32), "te:mxfp8") == (
        "48 -> 32 are not multiples of 32, and TransformerEngine cannot pad them"
    )
    assert unfit(nn.Linear(48, 32), "te:delayed") is None


def test_te_version_without_external_weights_refuses_only_levels(monkeypatch):
    monkeypatch.delattr(te.Linear, "_get_weight_tensors")
    with pytest.raises(
        BackendUnavailableError, match=r"TransformerEngine 2.*takes no weight but its own.*2.9 or"
    ):
        prepared("te:delayed+msamp:O2")
    assert prepared("te:delayed")


@pytest.mark.parametrize("layer", [nn.Linear(32, 32), nn.RMSNorm(32)], ids=["Linear", "RMSNorm"])
def test_model_on_the_cpu_of_a_gpu_machine_is_refused(layer, monkeypatch):
    made, _ = prepare(nn.Sequential(copy.deepcopy(layer), nn.Linear(32, 32)), None, "te:delayed")
    x = torch.randn(16, 32)
    made(x)  # the stand-in computes on the CPU
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_available", lambda: True)
        with pytest.raises(
            FP8BackendError, match=r"on the CPU.*Fix: move model.*without Accelerator\(cpu=True\)"
        ):
            made(x)
        made.eval()(x)
    assert torch.isfinite(made.train()(x)).all()


def unfit(layer, spec):
    return registry.get_compute("te").unfit(layer, resolve(spec))


@pytest.mark.parametrize("spec", ["te:delayed", "te:dynamic"])
def test_recomputation_changes_no_loss_and_no_scale(spec):
    plain = prepared(spec)
    expected = losses(*plain)
    for reentrant in (True, False):
        recomputed = prepared(spec, reentrant)
        assert losses(*recomputed, BATCHES[:3]) == expected[:3], reentrant
        evaluate_after_forward(recomputed[0])
        assert losses(*recomputed, BATCHES[3:]) == expected[3:], reentrant
        assert same(scaling_state(recomputed[0]), scaling_state(plain[0])), reentrant
        products = fp8_backends.audit(recomputed[0]).products["blocks.0.up"]
        assert products == dict.fromkeys(("fprop", "dgrad", "wgrad", "recomputed"), len(BATCHES)), (
            reentrant
        )


@pytest.mark.parametrize(("recompute", "of_gradients"), [(None, 1), (False, 1), (True, 2)])
def test_scales_are_reduced_once_per_step_under_recomputation(recompute, of_gradients, monkeypatch):
    """Each reduction costs an all-reduce. Under reentrant recomputation the first layer without
    recomputation reduces the gradients' scales, as in TransformerEngine, and the end of backward
    the recomputed ones'."""
    manager, calls = te.quantization.FP8GlobalStateManager, []
    reduce = manager.reduce_and_update_fp8_tensors
    monkeypatch.setattr(
        manager,
        "reduce_and_update_fp8_tensors",
        lambda forward=True: [calls.append(forward), reduce(forward)],
    )
    made, optimizer = prepared("te:delayed", recompute)
    losses(made, optimizer, BATCHES[:3])
    assert (calls.count(True), calls.count(False)) == (3, 3 * of_gradients)


def test_blocks_called_outside_the_root_enter_fp8():
    """Called one by one, with and without recomputation: the same losses and scales."""

    def run(recompute):
        made, optimizer = prepared("te:delayed", recompute)
        made.__dict__["forward"] = lambda x: None  # the root's forward never runs
        found = []
        for batch in BATCHES[:4]:
            with torch.autocast("cpu", torch.bfloat16):
                x = made.first(batch)
                for block in made.blocks:
                    x = block(x)
                loss = (made.last(x).float() - batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found, scaling_state(made)

    plain, state = run(None)
    for reentrant in (True, False):
        recomputed, recomputed_state = run(reentrant)
        assert recomputed == plain, reentrant
        assert same(recomputed_state, state), reentrant
    assert (state["blocks.0.up.te_forward_scale"][:2] != 1).all()
    assert (state["blocks.0.up.te_backward_scale"][:1] != 1).all()


def test_models_with_different_recipes_train_together():
    """TransformerEngine's own text of a recipe leaves the algorithm out, and groups amaxes by
    it."""

    def together(*specs):
        runs = [prepared(spec) for spec in specs]
        found = [[] for _ in runs]
        for batch in BATCHES:
            now = [loss_of(made, batch) for made, _ in runs]
            for loss, (_, optimizer), own in zip(now, runs, found, strict=True):
                own.append(loss.item())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return found

    specs = [
        TERecipeKwargs(amax_history_len=4, amax_compute_algo=algorithm)
        for algorithm in ("max", "most_recent")
    ] + ["te:dynamic"]
    alone = [together(spec)[0] for spec in specs]
    assert together(*specs) == alone
    assert alone[0] != alone[1]


@pytest.mark.parametrize(("spec", "rows"), [("te:delayed", 5), ("te:dynamic", 1)])
def test_any_number_of_rows_is_padded_and_trimmed(spec, rows):
    """Rows of zeros change no scale, so each row matches a batch of sixteen."""
    torch.manual_seed(0)
    layer = nn.Linear(32, 48)
    other = copy.deepcopy(layer)
    prepare(layer, None, spec), prepare(other, None, spec)
    x = torch.zeros(16, 32)
    x[:rows] = torch.randn(rows, 32)
    short, whole = x[:rows].clone().requires_grad_(), x.clone().requires_grad_()
    y, y16 = layer(short), other(whole)
    assert y.shape == (rows, 48) and torch.equal(y, y16[:rows])
    y.square().sum().backward()
    y16[:rows].square().sum().backward()
    assert torch.equal(short.grad, whole.grad[:rows])
    assert torch.equal(layer.weight.grad, other.weight.grad) and torch.equal(
        layer.bias.grad, other.bias.grad
    )


def test_unsupported_shapes_and_dtypes_run_as_plain_linear():
    layer = nn.Linear(32, 16)
    plain = copy.deepcopy(layer)
    prepare(layer, None, "te:delayed")
    assert layer(torch.randn(32)).shape == (16,)
    assert layer(torch.randn(2, 3, 32)).shape == (2, 3, 16)
    assert layer(torch.zeros(0, 32)).shape == (0, 16)
    with pytest.raises(ValueError, match="32 input features"):
        layer(torch.zeros(2, 16))
    x = torch.randn(4, 32, dtype=torch.float64)
    assert torch.equal(layer.double()(x), plain.double()(x))


def test_output_may_be_changed_in_place():
    made = nn.Sequential(nn.Linear(32, 32), nn.ReLU(inplace=True), nn.Linear(32, 16))
    prepare(made, None, "te:dynamic")
    made(torch.randn(16, 32)).sum().backward()
    assert made[0].weight.grad.norm() > 0


# Evaluation


@pytest.mark.parametrize("in_fp8", [False, True])
def test_evaluation_leaves_scales_unchanged(in_fp8):
    """Evaluation in FP8, in high precision, and forwards without gradients in training mode."""
    made, optimizer = prepared(TERecipeKwargs(use_autocast_during_eval=in_fp8))
    losses(made, optimizer, BATCHES[:2])
    before, plain = scaling_state(made), model()
    plain.load_state_dict(made.state_dict())
    assert torch.equal(made.eval()(100 * BATCHES[2]), plain.eval()(100 * BATCHES[2])) != in_fp8
    with torch.no_grad():
        made.train()(1000 * BATCHES[2])
    assert same(scaling_state(made), before)


def test_first_forward_in_inference_mode_leaves_trainable_state():
    made, optimizer = prepared(TERecipeKwargs(use_autocast_during_eval=True))
    with torch.inference_mode():
        made.eval()(BATCHES[0])
    assert losses(made.train(), optimizer) == losses(*prepared("te:delayed"))


def test_a_teacher_in_eval_inside_the_students_forward_runs_plain():
    teacher = model().eval().requires_grad_(False)
    plain, expected = copy.deepcopy(teacher), []
    prepare(teacher, None, "te:dynamic")
    student, optimizer = prepared("te:delayed")
    reference = prepared("te:delayed")

    def ask(*args):
        with torch.no_grad():
            expected.append(torch.equal(teacher(BATCHES[0]), plain(BATCHES[0])))

    student.blocks[1].register_forward_pre_hook(ask)
    assert losses(student, optimizer) == losses(*reference)
    assert expected == [True] * len(BATCHES)


def test_nested_training_model_keeps_its_recipe():
    inner = prepared("te:dynamic")
    outer, optimizer = prepared("te:delayed")
    references = prepared("te:dynamic"), prepared("te:delayed")
    found = []

    @torch.autocast("cpu", enabled=False)  # a backward belongs outside of it
    def train_inner(*args):
        found.extend(losses(*inner, BATCHES[:1]))

    outer.blocks[1].register_forward_pre_hook(train_inner)
    assert losses(outer, optimizer) == losses(*references[1])
    assert found == losses(*references[0], BATCHES[:1] * len(BATCHES))


@pytest.mark.parametrize(
    ("error", "then"),
    [
        (KeyboardInterrupt, "itself"),
        (KeyboardInterrupt, "another model"),
        (KeyboardInterrupt, "evaluation, and itself"),
        (ValueError, "itself"),
    ],
)
def test_interrupted_forward_leaves_fp8(error, then):
    """No hook of PyTorch runs after a KeyboardInterrupt."""
    made, optimizer = prepared("te:delayed")
    losses(made, optimizer, BATCHES[:1])

    def interrupt(*args):
        raise error

    manager = te.quantization.FP8GlobalStateManager
    handle = made.last.register_forward_pre_hook(interrupt)
    with pytest.raises(error):
        made(BATCHES[1])
    handle.remove()
    assert not manager.is_fp8_enabled() and manager.quantization_state.autocast_depth == 0
    interrupted = scaling_state(made)
    assert interrupted["first.te_forward_amax_history"][0, 0] > 0  # the first layer had run
    if then.startswith("evaluation"):
        made.eval()(BATCHES[1])
        assert same(scaling_state(made), interrupted)
        made.train()
    if then == "another model":
        assert losses(*prepared("te:delayed")) == losses(*prepared("te:delayed"))
    else:
        losses(made, optimizer, BATCHES[1:2])
        assert scaling_state(made)["first.te_forward_amax_history"][0, 0] == 0  # rolled
    assert not manager.is_fp8_enabled() and manager.quantization_state.autocast_depth == 0


# Parameters, copies, checkpoints


def test_parameters_ties_and_flags_stay():
    made = model()
    made.blocks[1].up.weight = made.blocks[0].up.weight
    made.shared = made.first
    made.last.weight.requires_grad_(False)
    before = list(made.named_parameters(remove_duplicate=False))
    _, optimizer = prepare(made, adamw(made), "te:delayed")
    assert all(
        a is b
        for (_, a), (_, b) in zip(
            before, made.named_parameters(remove_duplicate=False), strict=True
        )
    )
    assert (
        made.shared is made.first
        and isinstance(made.first, nn.Linear)
        and isinstance(made.first, TELinear)
    )
    assert made.blocks[0].down.bias is None
    frozen = made.last.weight.clone()
    losses(made, optimizer)
    assert made.blocks[1].up.weight is made.blocks[0].up.weight
    assert torch.equal(made.last.weight, frozen) and made.last.weight.grad is None
    steps = len(BATCHES)
    assert fp8_backends.audit(made).products["last"] == {
        "fprop": steps,
        "dgrad": steps,
        "wgrad": 0,
        "recomputed": 0,
    }


def test_restore_leaves_no_trace():
    made, optimizer = prepared("te:delayed")
    before = {name: set(layer.__dict__) for name, layer in model().named_modules()}
    losses(made, optimizer, BATCHES[:2])
    conversion.restore(made)
    assert {name: set(layer.__dict__) for name, layer in made.named_modules()} == before
    assert type(made.first) is nn.Linear and not made._forward_hooks and not made._forward_pre_hooks
    plain = model()
    plain.load_state_dict(made.state_dict())
    assert torch.equal(made(BATCHES[0]), plain(BATCHES[0]))


@pytest.mark.parametrize("wrapped", ["before", "after"])
def test_restore_keeps_the_wrapper_of_other_code(wrapped):
    """The root's forward is ours: inside a later wrapper it stays, and runs without FP8."""
    manager, seen = te.quantization.FP8GlobalStateManager, []

    def wrap(root):
        forward = root.forward

        def wrapper(x):
            seen.append(manager.is_fp8_enabled())
            return forward(x)

        root.forward = wrapper
        return wrapper

    made = model()
    made.last.register_forward_pre_hook(lambda *args: seen.append(manager.is_fp8_enabled()))
    wrapper = wrap(made) if wrapped == "before" else None
    prepare(made, None, "te:delayed")
    wrapper = wrapper or wrap(made)
    made(BATCHES[0])
    assert seen == [wrapped == "before", True]
    conversion.restore(made)
    assert made.forward is wrapper
    seen.clear()
    plain = model()
    plain.load_state_dict(made.state_dict())
    assert torch.equal(made(BATCHES[0]), plain(BATCHES[0])) and seen == [False, False]
    prepare(made, None, "te:dynamic")
    assert not torch.equal(made(BATCHES[0]), plain(BATCHES[0])) and seen[-1]


def test_state_dicts_are_plain_and_load_both_ways():
    made, _ = prepared("te:delayed")
    losses(made, adamw(made), BATCHES[:1])
    assert made.state_dict().keys() == model().state_dict().keys()
    model().load_state_dict(made.state_dict(), strict=True)
    made.load_state_dict(model().state_dict(), strict=True)
    of_te = te.Linear(32, 32, device="cpu").state_dict(prefix="first.")
    assert "first._extra_state" in of_te
    made.load_state_dict({**model().state_dict(), **of_te}, strict=True)
    assert torch.equal(made.first.weight, of_te["first.weight"])


def test_copy_trains_independently_from_copied_scales():
    made, optimizer = prepared("te:delayed")
    losses(made, optimizer, BATCHES[:2])
    copies, kept = (copy.deepcopy(made), pickle.loads(pickle.dumps(made))), scaling_state(made)
    found = []
    for each in (*copies, made):
        assert same(scaling_state(each), kept)
        own = torch.optim.SGD(each.parameters(), lr=1e-2)
        found.append((losses(each, own, BATCHES[2:]), scaling_state(each)))
    for copied, state in found:
        assert copied == found[-1][0] and same(state, found[-1][1])


def test_resumed_run_matches_uninterrupted_run_bitwise():
    made, optimizer = prepared(TERecipeKwargs(amax_history_len=4, amax_compute_algo="max"))
    losses(made, optimizer, BATCHES[:3])
    weights, states = copy.deepcopy((made.state_dict(), optimizer.state_dict()))
    unbroken = losses(made, optimizer, BATCHES[3:])
    for batches in ([], BATCHES[:2]):  # loaded before the first forward, and later
        again, its_optimizer = prepared(TERecipeKwargs(amax_history_len=4, amax_compute_algo="max"))
        losses(again, its_optimizer, batches)
        again.load_state_dict(weights)
        its_optimizer.load_state_dict(copy.deepcopy(states))
        assert losses(again, its_optimizer, BATCHES[3:]) == unbroken
    assert all(type(tensor) is torch.Tensor for tensor in states["fp8_scaling"]["tensors"].values())


@pytest.mark.parametrize("ran", [False, True])
def test_foreign_and_impossible_scaling_states_are_refused(ran):
    made, optimizer = prepared(TERecipeKwargs(amax_history_len=4))
    if ran:
        losses(made, optimizer, BATCHES[:2])
    (_, root, known), *_ = prepared_roots(made)
    before = scaling_state(made)
    for other, message in (
        (
            {name: state for name, state in before.items() if not name.startswith("last")},
            "only this model has last",
        ),
        (scaling_state(prepared(TERecipeKwargs(amax_history_len=8))[0]), "amax_history_len"),
    ):
        with pytest.raises(FP8BackendError, match=message):
            known.compute.check_scaling_state(root, other)
    assert scaling_state(prepared("te:dynamic")[0]) == {}
    last = {
        part: [name for name in before if name.endswith(part)][-1]
        for part in ("_scale", "_amax_history")
    }
    for part, number in [("_scale", n) for n in (nan, inf, 0.0, -1.0)] + [
        ("_amax_history", n) for n in (nan, -1.0)
    ]:
        crafted = {name: tensor + 1 for name, tensor in before.items()}
        crafted[last[part]].view(-1)[-1] = number
        with pytest.raises(FP8BackendError, match=f"{last[part]} holds .*and must be"):
            known.compute.check_scaling_state(root, crafted)
    for dtype in (torch.int64, torch.bfloat16):
        with pytest.raises(FP8BackendError, match="is no tensor of torch.float32"):
            known.compute.check_scaling_state(
                root, before | {last["_scale"]: before[last["_scale"]].to(dtype)}
            )
    assert same(scaling_state(made), before)
    overflowed = {name: tensor.clone() for name, tensor in before.items()}
    overflowed[last["_amax_history"]][-1] = inf  # as after an overflow
    known.compute.check_scaling_state(root, overflowed)
    known.compute.load_scaling_state(root, overflowed)
    assert same(scaling_state(made), overflowed)


def test_a_model_prepared_on_meta_trains_like_any_other():
    reference = prepared("te:delayed")
    with torch.device("meta"):
        made = Model()
    prepare(made, None, "te:delayed")
    made.to_empty(device="cpu")
    made.load_state_dict(reference[0].state_dict())
    assert losses(made, adamw(made)) == losses(*reference)


# Proof


def test_the_first_step_proves_fp8(capfd):
    made, optimizer = prepared("te:delayed")
    made.unused = nn.Linear(32, 24)
    losses(made, optimizer, BATCHES[:2])
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("te:")]
    assert lines == ["te:delayed: 6/7 Linear, 100 % of weight FLOPs in FP8, fprop dgrad wgrad (te)"]
    audit = fp8_backends.audit(made, optimizer)
    assert audit.products["blocks.1.down"] == {"fprop": 2, "dgrad": 2, "wgrad": 2, "recomputed": 0}
    assert audit.products["first"]["dgrad"] == 0  # its input needs no gradient
    assert set(audit.engine.values()) == {"te"}


def test_step_in_another_thread_adds_no_products():
    one, its_optimizer = prepared("te:delayed")
    loss_of(one, BATCHES[0]).backward()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(lambda: losses(*prepared("te:delayed"), BATCHES[:2])).result()
    its_optimizer.step()
    counts = fp8_backends.audit(one).products["first"]
    assert counts == {"fprop": 1, "dgrad": 0, "wgrad": 1, "recomputed": 0}


def test_high_precision_products_are_not_counted():
    made, optimizer = prepared("te:delayed")

    class Off(nn.Module):
        def forward(self, x):
            with te.autocast(enabled=False, recipe=DelayedScaling()):
                return self.part(x)

    made.blocks[0].up, off = Off(), made.blocks[0].up
    made.blocks[0].up.part = off
    losses(made, optimizer, BATCHES[:1])
    counts = fp8_backends.audit(made).products
    assert (counts["blocks.0.up.part"]["fprop"], counts["blocks.0.up.part"]["wgrad"]) == (0, 0)
    assert (counts["blocks.0.down"]["fprop"], counts["blocks.0.down"]["wgrad"]) == (1, 1)


def test_model_never_running_in_fp8_is_an_error():
    made, optimizer = prepared("te:delayed")
    made.eval()
    with pytest.raises(FP8BackendError, match="no FP8 product ran"):
        losses(made, optimizer, BATCHES[:2])


def test_users_te_linear_is_skipped_and_not_counted():
    made = model()
    made.last = te.Linear(32, 32, device="cpu")
    _, optimizer = prepare(made, adamw(made), "te:dynamic")
    losses(made, optimizer, BATCHES[:2])
    assert type(made.last) is te.Linear
    products = fp8_backends.audit(made).products
    assert "last" not in products and products["blocks.1.down"]["wgrad"] == 2
    # nor is a product of the user's layer counted for another
    assert products["first"]["dgrad"] == 0


@pytest.mark.parametrize("scaling", ["dynamic", "delayed"])
def test_schedule_pauses_te_as_a_restored_model(scaling):
    """Delayed scales stay as they were, and go on after the pause."""
    fields = {"backend": f"te:{scaling}", "schedule": {2: "bf16", 4: f"te:{scaling}"}}
    made, optimizer = prepared(fields)
    found = losses(made, optimizer, BATCHES[:2])
    before = {name: state.clone() for name, state in scaling_state(made).items()}
    by_hand, its_optimizer = prepared(f"te:{scaling}")
    assert losses(by_hand, its_optimizer, BATCHES[:2]) == found
    fp8_backends.restore(by_hand)
    assert registry.get_compute("te").cast_of(made.first, 0, BATCHES[0]) is None
    assert losses(made, optimizer, BATCHES[2:4]) == losses(by_hand, its_optimizer, BATCHES[2:4])
    assert same(scaling_state(made), before)
    # the pause has ended
    assert registry.get_compute("te").cast_of(made.first, 0, BATCHES[0]) is not None
    counted = fp8_backends.audit(made).products
    assert losses(made, optimizer, BATCHES[4:5]) != losses(by_hand, its_optimizer, BATCHES[4:5])
    assert (
        counted["first"]["fprop"] == 2 and fp8_backends.audit(made).products["first"]["fprop"] == 3
    )


def test_layers_of_native_run_inside_the_region_of_te():
    """Each layer equals one prepared alone."""
    layers = {"first": "native:mxfp8", "*.down": "native:rowwise"}
    made, optimizer = prepared({"backend": "te:dynamic", "layers": layers})
    alone = model()
    its_optimizer = adamw(alone)
    for name, layer in list(alone.named_modules()):
        if isinstance(layer, nn.Linear):
            rule = (
                "native:mxfp8"
                if name == "first"
                else "native:rowwise"
                if name.endswith("down")
                else "te:dynamic"
            )
            prepare(layer, its_optimizer, {"backend": rule, "on_unproven": "warn"})
    assert losses(made, optimizer, BATCHES[:3]) == losses(alone, its_optimizer, BATCHES[:3])
    assert isinstance(made.first, nn.Linear) and not isinstance(made.first, TELinear)


def test_sizes_unsupported_by_te_stay_plain_by_name():
    made = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 24), nn.Linear(24, 16))
    prepare(made, None, "te:delayed")
    assert [type(layer) is TELinear for layer in made] == [True, False, False]
    (_, _, known), *_ = prepared_roots(made)
    assert known.report.high_precision["1"] == (
        "32 -> 24 are not multiples of 16, and TransformerEngine cannot pad them"
    )


@pytest.mark.parametrize(
    ("scaling", "given", "split"),
    [
        ("delayed", True, [0, 0, 0]),
        ("dynamic", False, [1, 1, 1]),
        ("delayed", ["1"], [0, 1, 0]),
        ("dynamic", ["0", "2"], [1, 0, 1]),
    ],
)
def test_fast_accumulation_off_is_the_split_accumulator_of_forward(
    scaling, given, split, monkeypatch
):
    made = nn.Sequential(*(nn.Linear(32, 32) for _ in split))
    prepare(made, None, TERecipeKwargs(scaling=scaling, fast_accumulation=given))
    before = str(made[0].te_state.te_recipe)
    calls, general_gemm = [], te_linear.general_gemm

    def spy(*args, use_split_accumulator=False, **kwargs):
        calls.append(use_split_accumulator)
        return general_gemm(*args, use_split_accumulator=use_split_accumulator, **kwargs)

    monkeypatch.setattr(te_linear, "general_gemm", spy)
    made(torch.randn(16, 32).requires_grad_()).sum().backward()
    assert calls[:3] == [bool(each) for each in split] and calls[3:] == [True] * 6
    assert str(made[0].te_state.te_recipe) == before
    assert all(
        ("fast accumulation off" in repr(layer)) == bool(each)
        for layer, each in zip(made, split, strict=True)
    )
