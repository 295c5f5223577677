"""FP8 is proven at the first optimizer step, never assumed."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import logging
import pickle
import re
import weakref
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from fp8_backends import preparation
from fp8_backends.convert import conversion
from fp8_backends.errors import FP8BackendError
from fp8_backends.evidence import auditing, profiling, proof
from fp8_backends.preparation import optimizer_steps
from fp8_backends.recipes import handlers as recipes

BACKENDS = ("ao:tensorwise", "native:dynamic")


class Net(nn.Module):
    """Stack two layers of one shape and one of another; `used` and `checkpointed` select the
    forward."""

    def __init__(self, used=True, checkpointed=None):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 16)
        self.used, self.checkpointed = used, checkpointed

    def forward(self, x):
        if not self.used:
            return F.linear(x, self.first.weight)
        if self.checkpointed == "selective":
            saved = functools.partial(
                create_selective_checkpoint_contexts, [torch.ops.aten.relu.default]
            )
            return checkpoint(self.run, x, use_reentrant=False, context_fn=saved)
        if self.checkpointed is not None:
            return checkpoint(self.run, x, use_reentrant=self.checkpointed == "reentrant")
        return self.run(x)

    def run(self, x):
        return self.last(self.second(self.first(x).relu()).relu())


def prepared(spec="ao:tensorwise", **options):
    torch.manual_seed(0)
    model = Net(**options)
    return preparation.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), spec)


def backward(model, tokens=24):
    model(torch.randn(tokens, 32, requires_grad=True)).square().sum().backward()


def step(model, optimizer, microbatches=1, tokens=24):
    for _ in range(microbatches):
        backward(model, tokens)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("spec", BACKENDS)
def test_only_first_step_prints_one_line(spec, capfd):
    model, optimizer = prepared(spec)
    assert capfd.readouterr().err == ""
    step(model, optimizer)
    line = capfd.readouterr().err
    engine = {"ao": "ao", "native": r"[\w-]+"}[spec.split(":")[0]]
    pattern = rf"{spec}: 3/3 Linear, 100 % of weight FLOPs in FP8, fprop dgrad wgrad \({engine}\)\n"
    assert re.fullmatch(pattern, line), line
    preparation.prepare(model, optimizer, spec)
    step(model, optimizer)
    assert capfd.readouterr() == ("", "")


def test_proof_line_goes_to_logging_with_a_visible_handler(caplog, capfd):
    caplog.set_level(logging.INFO, logger="fp8_backends")
    step(*prepared())
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [
        "ao:tensorwise: 3/3 Linear"
    ]
    assert capfd.readouterr().err == ""


def test_only_the_main_process_speaks(monkeypatch, capfd):
    monkeypatch.setenv("RANK", "1")
    step(*prepared())
    assert capfd.readouterr().err == ""


def test_sentence():
    whole = proof.Proof(
        recipe="native:dynamic + 2 layers bf16",
        layers=Counter({"Linear": 28, "experts": 4}),
        of=Counter(
            {
                "convolution": 2,
                "Linear": 29,
                "parameter": 1,
                "FP8Linear of transformers": 14,
                "experts": 4,
            }
        ),
        flops=proof.Flops(94, 100),
        products=["fprop", "dgrad", "wgrad"],
        engine="bf16-exact+scaled_mm",
        notes=["compiled, counted by shape", "2 convolutions not counted"],
        idle=["last"],
        other_wgrad=[],
    )
    assert str(whole) == (
        "native:dynamic + 2 layers bf16: 28/29 Linear, 4/4 experts (beside 2 convolutions, 1 other "
        "weight, 14 FP8Linear of transformers), 94 % of weight FLOPs in FP8, fprop dgrad wgrad "
        "(bf16-exact+scaled_mm; compiled, counted by shape; 2 convolutions not counted)"
    )
    none = dataclasses.replace(whole, layers=Counter(), of=Counter({"convolution": 1}), notes=[])
    assert str(none).startswith(
        "native:dynamic + 2 layers bf16: 0/0 Linear (beside 1 convolution), 94 %"
    )


def proof_of(model):
    """Return the proof of a prepared model, or None."""
    ((_, _, prepared),) = conversion.prepared_roots(model)
    return prepared.observed.proof


def is_whole(model, layers=3):
    """Return True if all Linears are proven, with all their products."""
    found = proof_of(model)
    return (
        found is not None
        and found.layers == found.of == {"Linear": layers}
        and found.flops.share == 1
        and found.products == ["fprop", "dgrad", "wgrad"]
    )


def counts(model):
    return auditing.audit(model).products


@pytest.mark.parametrize("each", [False, True], ids=["one optimizer", "one for each parameter"])
def test_steps_inside_backward_are_proven_and_stop_the_profiler(each):
    """A profiler stopped inside a backward would stay on, and record every operator."""
    torch.manual_seed(0)
    model = Net()
    groups = [[p] for p in model.parameters()] if each else [list(model.parameters())]
    optimizers = [torch.optim.AdamW(group, lr=1e-3) for group in groups]
    for optimizer in optimizers:
        preparation.prepare(model, optimizer, "ao:tensorwise")
    for optimizer, group in zip(optimizers, groups, strict=True):

        def step(weight, optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad()

        group[0].register_post_accumulate_grad_hook(step)
    for _ in range(3):
        backward(model)
    assert not torch._C._autograd._profiler_enabled()
    assert is_whole(model)


@pytest.mark.nightly
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_step_inside_backward_waits_for_all_gradients(compiled):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])
    for layer in model:
        optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
        preparation.prepare(model, optimizer, {"backend": "native", "exclude": ["0"]})
        layer.weight.register_post_accumulate_grad_hook(
            lambda _, optimizer=optimizer: optimizer.step()
        )
    forward = torch.compile(model, backend="eager") if compiled else model
    for _ in range(2):
        backward(forward)
    found = proof_of(model)
    assert (found.layers["Linear"], found.of["Linear"], found.flops.share) == (3, 4, 0.75)
    assert found.products == ["fprop", "dgrad", "wgrad"]


def test_products_of_another_model_prove_nothing():
    """Both are profiled at once, and their layers have the same shapes."""
    bypassed, its_optimizer = prepared(used=False)
    used, other_optimizer = prepared()
    with pytest.raises(FP8BackendError, match="no FP8 product ran"):
        for _ in range(3):
            backward(bypassed)
            backward(used)
            its_optimizer.step()
            other_optimizer.step()


@pytest.mark.parametrize("microbatches", [1, 3])
def test_products_are_attributed_to_their_layers(microbatches):
    model, optimizer = prepared()
    step(model, optimizer, microbatches)  # one microbatch of an accumulated step is profiled
    assert counts(model) == {
        name: {"fprop": 1, "dgrad": 1, "wgrad": 1, "recomputed": 0}
        for name in ("first", "second", "last")
    }


def test_high_precision_wgrad_is_not_counted():
    model, optimizer = prepared("ao:rowwise_with_gw_hp")
    step(model, optimizer)
    assert all((c["fprop"], c["dgrad"], c["wgrad"]) == (1, 1, 0) for c in counts(model).values())
    found = proof_of(model)
    assert found.flops.share == pytest.approx(2 / 3) and found.products == ["fprop", "dgrad"]
    assert found.engine == "ao" and found.notes == ["wgrad in high precision by recipe"]


def test_configured_high_precision_products_are_accepted():
    spec = recipes.FP8RecipeKwargs(backend="native", override_linear_precision=(True, False, True))
    model, optimizer = prepared(spec)
    step(model, optimizer)
    found = proof_of(model)
    assert not found.idle and not found.other_wgrad
    assert found.layers == {"Linear": 3} and found.products == ["dgrad"]
    assert found.flops.share == pytest.approx(1 / 3)


@pytest.mark.parametrize("spec", BACKENDS)
@pytest.mark.parametrize("kind", ["reentrant", "saved tensors", "selective"])
def test_recomputed_products_are_counted_separately(kind, spec):
    model, optimizer = prepared(spec, checkpointed=kind)
    step(model, optimizer)
    for found in counts(model).values():
        assert found == {"fprop": 1, "dgrad": 1, "wgrad": 1, "recomputed": 1}


@pytest.mark.parametrize("spec", BACKENDS)
def test_a_single_layer_is_proven(spec):
    layer = nn.Linear(32, 16)
    layer, optimizer = preparation.prepare(layer, torch.optim.AdamW(layer.parameters()), spec)
    step(layer, optimizer)
    assert is_whole(layer, layers=1)


@pytest.mark.parametrize("emulate", [False, True], ids=["own products", "emulated"])
def test_dispatch_mode_around_first_step_hides_no_product(emulate):
    from torchao.float8 import Float8LinearConfig

    model, optimizer = prepared(recipes.AORecipeKwargs(config=Float8LinearConfig(emulate=emulate)))
    with FlopCounterMode(display=False):
        step(model, optimizer)
    assert is_whole(model)
    for found in counts(model).values():
        assert found == {"fprop": 1, "dgrad": 1, "wgrad": 1, "recomputed": 0}


def test_a_compiled_part_is_counted_in_the_second_step(capfd):
    """A profiler with shapes in the first would trigger PyTorch's warning about each tensor in the
    compiler."""
    torch._dynamo.reset()
    model, optimizer = prepared()
    model.last.compile(backend="aot_eager")
    step(model, optimizer)
    assert capfd.readouterr().err == "" and proof_of(model) is None
    step(model, optimizer)
    assert is_whole(model) and proof_of(model).notes == ["compiled, counted by shape"]


@pytest.mark.parametrize("tokens", [24, 32], ids=["shapes differ", "shapes coincide"])
def test_compiled_steps_count_like_eager_steps(tokens):
    torch._dynamo.reset()
    model, optimizer = prepared()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    step(compiled, optimizer, tokens=tokens)
    # a compiled forward cannot start the profiler: the next step is profiled
    assert proof_of(model) is None
    step(compiled, optimizer, tokens=tokens)
    assert is_whole(model) and proof_of(model).notes == ["compiled, counted by shape"]
    eager, optimizer = prepared()
    step(eager, optimizer, tokens=tokens)
    assert counts(model) == counts(eager)


def test_individually_compiled_layers_share_code_during_proof():
    """Dynamo compiles a function at most eight times: with a separate hook in each layer, the ninth
    would run eagerly."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(10)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    preparation.prepare(model, optimizer, "ao:tensorwise")
    for block in model:
        block.compile(backend="aot_eager")
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for _ in range(2):
        step(model, optimizer)
    made = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
    assert made <= 2  # with the hooks and, after the proof, without them
    assert is_whole(model, layers=10)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("spec", "whole"), [*((spec, True) for spec in BACKENDS), ("native:dynamic", False)]
)
def test_the_proof_recompiles_nothing(spec, whole):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    # compiled with its own hooks inside
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    _, optimizer = preparation.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3), spec)
    if whole:
        model = torch.compile(model, fullgraph=True, backend="aot_eager")
    else:
        model.forward = torch.compile(model.forward, backend="aot_eager")
    for _ in range(4):
        step(model, optimizer)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("spec", BACKENDS)
def test_no_product_at_all_is_an_error_at_the_first_step(spec):
    model, optimizer = prepared(spec, used=False)
    backward(model)
    with pytest.raises(FP8BackendError, match=f"{spec}: no FP8 product ran"):
        optimizer.step()
    step(model, optimizer)  # once


@pytest.mark.parametrize("spec", ["native:dynamic", "msamp:O2"])
def test_evaluation_mode_is_named_as_reason(spec):
    model, optimizer = prepared(spec)
    model.eval()
    backward(model)
    with pytest.raises(
        FP8BackendError, match=r"(?s)no FP8 product ran.*evaluation mode.*call model.train\(\)"
    ):
        optimizer.step()


@pytest.mark.parametrize("spec", BACKENDS)
def test_no_product_at_all_warns_if_configured(spec):
    model, optimizer = prepared({"backend": spec, "on_unproven": "warn"}, used=False)
    with pytest.warns(UserWarning, match="no FP8 product ran"):
        step(model, optimizer)


def test_step_before_any_forward_defers_the_proof():
    model, optimizer = prepared("native:dynamic")
    optimizer.step()  # as checkpoint loaders do to create optimizer states
    assert proof_of(model) is None
    step(model, optimizer)
    assert is_whole(model)


def test_idle_layers_are_named(caplog):
    model, optimizer = prepared("native:dynamic")
    model.run = lambda x: model.second(model.first(x))
    step(model, optimizer)
    assert proof_of(model).idle == ["last"]
    assert "layers without products: last" in caplog.text


def test_foreign_weight_gradient_is_named(caplog):
    model, optimizer = prepared("native:dynamic")
    model.run = lambda x: model.last(
        model.second(model.first(x).detach()) + F.linear(x, model.first.weight)
    )
    step(model, optimizer)
    assert proof_of(model).other_wgrad == ["first"]
    assert "did not come from an FP8 product: first" in caplog.text


def test_another_profiler_delays_the_proof(caplog):
    model, optimizer = prepared()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        step(model, optimizer)
        step(model, optimizer)
    assert caplog.text.count("another profiler is active") == 1 and proof_of(model) is None
    step(model, optimizer)
    step(model, optimizer)
    assert is_whole(model)


@pytest.mark.parametrize("spec", BACKENDS)
def test_two_models_with_two_optimizers_are_proven_separately(spec, capfd):
    (one, first), (two, second) = prepared(spec), prepared(spec)
    for _ in range(2):
        two(F.pad(one(torch.randn(8, 32)), (0, 16))).sum().backward()
        first.step()
        second.step()
        first.zero_grad()
        second.zero_grad()
    assert capfd.readouterr().err.count("weight FLOPs") == 2
    assert is_whole(one) and is_whole(two)
    assert all(
        found["fprop"] and found["wgrad"]
        for model in (one, two)
        for found in counts(model).values()
    )


@pytest.mark.parametrize("spec", BACKENDS)
def test_two_models_with_one_optimizer_are_proven_together(spec, capfd):
    one, two = Net(), Net()
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=1e-3)
    recipe = recipes.resolve(spec)
    for model in (one, two):
        preparation.prepare_model(model, recipe)
    optimizer_steps.watch_optimizer([one, two], optimizer, recipe)
    (one(torch.randn(8, 32)) + two(torch.randn(8, 32))).sum().backward()
    optimizer.step()
    assert capfd.readouterr().err.count("weight FLOPs") == 2
    assert is_whole(one) and is_whole(two)


@pytest.mark.parametrize("when", ["before the step", "inside the step"])
@pytest.mark.parametrize("spec", BACKENDS)
def test_model_and_optimizer_copy_and_pickle_before_proof(spec, when, capfd):
    model, optimizer = prepared(spec)
    if when == "inside the step":
        backward(model)
    copies = [copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
    if when == "before the step":
        backward(model)
    for other, own_optimizer in copies:
        step(other, own_optimizer)
    assert capfd.readouterr().err == ""  # a copy is another model, unwatched
    optimizer.step()
    assert capfd.readouterr().err.count("weight FLOPs") == 1 and is_whole(model)
    assert not model._forward_pre_hooks and not model.first._forward_hooks


def test_abandoned_model_releases_the_profiler():
    given_up, _ = prepared()
    for _ in range(3):
        # forwards without a backward, such as an evaluation that records gradients
        given_up(torch.randn(8, 32))
    model, optimizer = prepared()
    step(model, optimizer)
    assert is_whole(model)
    other = prepared()
    other[0](torch.randn(8, 32))
    del other, given_up
    gc.collect()
    assert not torch._C._autograd._profiler_enabled()


def test_a_model_without_a_step_does_not_fill_the_memory(monkeypatch, capfd):
    """PyTorch keeps 3 kB for each operator of whatever the thread runs after a first forward."""
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(profiling, "MAXIMUM_GROWTH", 0)
    model, optimizer = prepared()
    model(torch.randn(8, 32))
    gc.collect()
    assert torch._C._autograd._profiler_enabled()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB
    torch.ones(peak << 10, dtype=torch.int8)
    gc.collect()
    assert not torch._C._autograd._profiler_enabled()
    step(model, optimizer)
    step(model, optimizer)
    assert "3/3 Linear" in capfd.readouterr().err


@pytest.mark.parametrize("spec", BACKENDS)
def test_optimizer_releases_its_model_after_proof(spec):
    model, optimizer = prepared(spec)
    step(model, optimizer)
    model = weakref.ref(model)
    gc.collect()
    assert model() is None


@pytest.mark.parametrize("after_forward", [False, True])
@pytest.mark.parametrize("spec", BACKENDS)
def test_model_restored_before_first_step_needs_no_proof(spec, after_forward, capfd):
    model, optimizer = prepared(spec)
    if after_forward:
        backward(model)
    conversion.restore(model)
    step(model, optimizer)
    assert (
        capfd.readouterr().err == ""
        and not model._forward_pre_hooks
        and not model.first._forward_hooks
    )
    preparation.prepare(model, optimizer, "native:delayed")
    step(model, optimizer)
    assert is_whole(model) and proof_of(model).recipe == "native:delayed"


def test_failed_first_step_releases_profiled_weights():
    """Storing a weight swaps its tensor, and needs the only reference."""
    failed, optimizer = prepared("ao")
    failed(torch.randn(8, 32))  # and no later step: an error, with its model still alive
    new = Net()
    new(torch.randn(8, 32))
    new, own_optimizer = preparation.prepare(new, torch.optim.AdamW(new.parameters()), "msamp:O2")
    step(new, own_optimizer)
    step(failed, optimizer)
    step(failed, optimizer)
    assert is_whole(new) and is_whole(failed)


def test_profiling_changes_no_bit():
    model, optimizer = prepared()
    other, own_optimizer = prepared()
    torch.manual_seed(1)
    step(model, optimizer)
    # keeps ours away
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        torch.manual_seed(1)
        step(other, own_optimizer)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )


def test_forwards_without_a_step_do_not_count():
    model, optimizer = prepared("ao:tensorwise")
    for _ in range(3):
        backward(model)
        optimizer.zero_grad()
    step(model, optimizer)
    assert is_whole(model)
    products = auditing.audit(model).products  # only of the last forward and its backward
    assert {count["fprop"] for count in products.values()} == {1}


def test_failed_forward_ends_profile_and_later_step_proves():
    model, optimizer = prepared("ao:tensorwise")
    failing = model.last.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        backward(model)
    assert not torch._C._autograd._profiler_enabled()
    failing.remove()
    with torch.autograd.profiler.profile() as profiler:  # somebody else's may start at once
        torch.ones(1).add_(1)
    assert any("add_" in event.name for event in profiler.function_events)
    step(model, optimizer)
    assert is_whole(model)


def test_a_model_without_outputs_is_proven():
    model, optimizer = prepared("ao:tensorwise")
    run = model.run
    model.run = lambda x: setattr(model, "loss", run(x).square().sum())
    model(torch.randn(24, 32))
    model.loss.backward()
    optimizer.step()
    assert is_whole(model)


def test_proof_waits_for_foreign_profiler():
    model, optimizer = prepared("ao:tensorwise")
    backward(model)  # the proof's profile runs
    assert torch._C._autograd._profiler_enabled()
    with proof.profiler_elsewhere([model]):
        assert not torch._C._autograd._profiler_enabled()
        for _ in range(2):
            step(model, optimizer)
            assert not torch._C._autograd._profiler_enabled()
    assert proof_of(model) is None
    step(model, optimizer)
    step(model, optimizer)
    assert is_whole(model)
    with proof.profiler_elsewhere([model]):
        step(model, optimizer)  # proven already
