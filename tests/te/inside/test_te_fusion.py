"""`fuse_norms`: a norm and the Linear that alone reads it in one kernel of TransformerEngine's."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
import transformer_engine.pytorch as te
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from te_fusion_models import (
    Between,
    LinearTwice,
    Model,
    N,
    NormTwice,
    Noting,
    Peeking,
    ResidualAfterNorm,
    SometimesRead,
    ToAnActivation,
    TransformersStyle,
    Two,
    TwoReaders,
    Untraceable,
    settled,
)
from te_models import adamw
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import ViTConfig, ViTModel
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import fp8_backends
from fp8_backends import FP8BackendError, RecipeError, TERecipeKwargs, prepare, resolve
from fp8_backends.compute.te.fusion import TENormLinear
from fp8_backends.compute.te.linear import TELinear
from fp8_backends.recipes.handlers import from_environment
from fp8_backends.training.conversion import prepared_roots, restore

# 12 rows: all layers pad them to 16
BATCHES = [torch.randn(4, 3, N, generator=torch.Generator().manual_seed(i)) for i in range(4)]
NORMS = {
    "LayerNorm": lambda: nn.LayerNorm(N, eps=1e-3),
    "RMSNorm": lambda: nn.RMSNorm(N, eps=1e-5),
    "Llama": lambda: LlamaRMSNorm(N),
    "Gemma": lambda: GemmaRMSNorm(N),
}


def made_with(fuse: bool, spec="te:delayed", norm=NORMS["LayerNorm"]):
    torch.manual_seed(0)
    model = settled(Model(norm))
    spec = spec if isinstance(spec, dict) else {"backend": spec}
    return prepare(model, adamw(model), {**spec, "fuse_norms": fuse})


def train(model, optimizer, batches=BATCHES, autocast=False) -> list[torch.Tensor]:
    """Every loss, and the gradients of all Parameters that took part."""
    found = []
    for step, batch in enumerate(batches):
        torch.manual_seed(step)  # of stochastic rounding
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = (model(batch).float() - batch).square().mean()
        loss.backward()
        found += [loss.detach(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return found


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def report_of(model):
    ((_, _, known),) = prepared_roots(model)
    return known.report


def two(kind=Two, **fields):
    torch.manual_seed(0)
    model = settled(kind())
    prepare(model, None, {"backend": "te:dynamic", "fuse_norms": True, **fields})
    return model


def apart(model):
    """The same model, its modules one after the other."""
    model = copy.deepcopy(model)
    restore(model)
    prepare(model, None, "te:dynamic")
    return model


# The numbers


@pytest.mark.parametrize(("spec", "autocast"), [("te:delayed", False), ("te:dynamic", True), ("te:blockwise", True)])
@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_losses_and_gradients_equal_those_of_the_two_apart(norm, spec, autocast):
    """Bit for bit where both cast the same values to FP8: all but delayed scaling under bf16 (next test)."""
    fused, separate = made_with(True, spec, norm), made_with(False, spec, norm)
    assert [each.fused_with for each in report_of(fused[0]).norms] == ["block.fn.0", "last.out"]
    found = train(*fused, autocast=autocast)
    assert equal(found, train(*separate, autocast=autocast))
    assert len(found) == len(BATCHES) * (1 + len(list(fused[0].parameters())))
    assert all(value.isfinite().all() and value.any() for value in found)


def test_delayed_scaling_casts_normed_values_that_were_not_rounded_to_bf16():
    """The kernel's own behaviour: codes are made of FP32 values. Products with ones on the diagonal show the codes."""
    results = {}
    for fuse in (True, False):
        model = nn.Sequential(nn.LayerNorm(N), nn.Linear(N, N, bias=False))
        nn.init.eye_(model[1].weight)
        prepare(model, None, {"backend": "te:delayed", "fuse_norms": fuse})
        x = torch.randn(256, N, generator=torch.Generator().manual_seed(0)).bfloat16().float()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            results[fuse] = model(x)
        normed = model[0].in_te(x) if not fuse else None  # FP32 without autocast
    codes, of_rounded = (each.to(torch.float8_e4m3fn).bfloat16() for each in (normed, normed.bfloat16()))
    assert not torch.equal(codes, of_rounded)
    assert torch.equal(results[True], codes) and torch.equal(results[False], of_rounded)


@pytest.mark.parametrize("spec", ["te:delayed+msamp:O1", "te:delayed+msamp:O2", "te:dynamic+msamp:O3"])
def test_levels_store_the_weights_of_fused_layers(spec):
    assert equal(train(*made_with(True, spec)), train(*made_with(False, spec)))


def test_weights_that_te_keeps_in_fp8_are_fused_too():
    found = []
    for fuse in (True, False):
        torch.manual_seed(0)
        model = settled(Two())
        model.linear.requires_grad_(False), model.other.requires_grad_(False)
        prepare(model, None, {"backend": "te:dynamic", "fp8_params": True, "fuse_norms": fuse})
        model(BATCHES[0]).square().sum().backward()
        found.append([model.norm.weight.grad, model.norm.bias.grad])
    assert equal(*found)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_changes_no_number(reentrant):
    plain, recomputed = made_with(True), made_with(True)
    block = recomputed[0].block
    block.forward = lambda x, run=block.forward: checkpoint(run, x, use_reentrant=reentrant)
    assert equal(train(*recomputed), train(*plain))
    counts = fp8_backends.audit(recomputed[0]).products["block.fn.0"]
    assert counts == {"fprop": 1, "dgrad": 1, "wgrad": 1, "recomputed": 1}


def test_a_compiled_model_trains_as_an_eager_one():
    compiled, eager = two(), two()
    whole = torch.compile(compiled, backend="eager")
    assert equal(*(train(each, adamw(each), BATCHES[:2]) for each in (whole, eager)))


def test_evaluation_is_plain_unless_the_recipe_says_otherwise():
    model, _ = made_with(True)
    plain = settled(Model(NORMS["LayerNorm"]))
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(BATCHES[0]), plain.eval()(BATCHES[0]))
    spec = {"backend": "te:dynamic", "use_autocast_during_eval": True}
    in_fp8, separate = made_with(True, spec)[0].eval(), made_with(False, spec)[0].eval()
    assert torch.equal(in_fp8(BATCHES[0]), separate(BATCHES[0]))
    assert not torch.equal(in_fp8(BATCHES[0]), plain(BATCHES[0]))


@pytest.mark.parametrize("part", ["norm", "linear"])
def test_a_part_that_evaluates_leaves_the_other_as_it_is(part):
    model = two()
    separate = apart(model)
    for each in (model, separate):
        getattr(each, part).eval()
    assert torch.equal(model(BATCHES[0]), separate(BATCHES[0]))


# Which pairs


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (SometimesRead, "2 operations read its output"),
        (TwoReaders, "2 operations read its output"),
        (ResidualAfterNorm, "2 operations read its output"),
        (Between, "its output goes to mul, which is no module of one input"),
        (Untraceable, "the forward of Untraceable could not be traced: TraceError"),
        (LinearTwice, "the Linear that reads its output is called more than once"),
        (NormTwice, "NormTwice calls it 2 times"),
        (ToAnActivation, "its output goes to a GELU, which is no FP8 layer"),
    ],
)
def test_what_the_graph_does_not_show_to_be_one_function_stays_apart(kind, reason):
    model = two(kind)
    (norm,) = report_of(model).norms
    assert norm.swapped and norm.fused_with is None and norm.apart.startswith(reason)
    assert f"1 of 1 norm swapped; 0 fused with the layers that read them; norm apart: {norm.apart}" in str(
        report_of(model)
    )
    assert type(model.linear) is TELinear
    assert torch.equal(model(BATCHES[0]), apart(model)(BATCHES[0]))


def test_the_reader_must_be_an_fp8_layer_held_once_without_hooks():
    assert report_of(two(exclude=["linear"])).norms[0].apart == "its output goes to a Linear, which is no FP8 layer"
    assert report_of(two(exclude=["norm"])).norms[0].apart is None  # not swapped at all
    for change, reason in (
        (lambda model: setattr(model, "again", model.linear), "the model holds linear more than once"),
        (lambda model: model.norm.register_forward_hook(print), "norm has hooks, which see what lies between"),
    ):
        model = Two()
        change(model)
        prepare(model, None, {"backend": "te:dynamic", "fuse_norms": True})
        assert report_of(model).norms[0].apart.startswith(reason)


def test_inputs_that_may_be_left_out_and_a_model_of_transformers_are_followed():
    assert report_of(two(TransformersStyle)).norms[0].fused_with == "linear"
    config = ViTConfig(hidden_size=N, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, image_size=32)
    model = ViTModel(config)
    prepare(model, None, {"backend": "te:dynamic", "fuse_norms": True})
    fused = {norm.name: norm.fused_with for norm in report_of(model).norms}
    assert fused == {
        "layers.0.layernorm_before": None,
        "layers.0.layernorm_after": "layers.0.mlp.fc1",
        "layernorm": None,
    }
    model(torch.zeros(1, 3, 32, 32))


def test_tracing_leaves_the_modules_as_they_were():
    made, state = settled(Noting()), torch.get_rng_state()
    model, _ = prepare(made, None, {"backend": "te:dynamic", "fuse_norms": True})
    assert type(model.linear) is TENormLinear and model.seen is None and not hasattr(model, "noise")
    assert torch.equal(torch.get_rng_state(), state)
    model(BATCHES[0])
    assert type(model.seen) is torch.Tensor


def test_without_the_field_nothing_is_fused_and_other_computes_refuse_it():
    assert resolve("te").fuse_norms is False
    assert from_environment({"ACCELERATE_FP8_BACKEND": "te", "ACCELERATE_FP8_FUSE_NORMS": "yes"}).fuse_norms is True
    assert resolve({"backend": "native:dynamic", "fuse_norms": False}) == resolve("native:dynamic")
    with pytest.raises(RecipeError, match="fuse_norms is not read by native:dynamic"):
        resolve({"backend": "native:dynamic", "fuse_norms": True})
    with pytest.raises(RecipeError, match=r"fuse_norms=True leaves no normed values .*override_linear_precision"):
        resolve({"backend": "te:dynamic", "fuse_norms": True, "override_linear_precision": (False, False, True)})
    assert report_of(made_with(False)[0]).norms[0].apart is None


# Never other numbers in silence


def test_a_norm_that_something_else_calls_is_an_error():
    model = two(Peeking)
    with pytest.raises(FP8BackendError, match=r"two.norm was used other than as the input of two.linear.*fuse_norms"):
        model(BATCHES[0])
    pending = model.two.norm(BATCHES[0])
    x = BATCHES[0]
    for use in (
        lambda: pending.shape,
        lambda: pending * 2,
        lambda: pending == 1,
        lambda: x + pending,
        lambda: torch.stack([x, pending]),
        lambda: pending[0],
        lambda: model.two.other(pending),
        lambda: nn.functional.gelu(input=pending),
    ):
        with pytest.raises(FP8BackendError, match="used other than"):
            use()


def test_the_linear_of_another_norm_is_no_reader():
    model, _ = made_with(True)
    with pytest.raises(FP8BackendError, match=r"block.norm was used other than as the input of block.fn.0"):
        model.last["out"](model.block.norm(BATCHES[0]))


def test_a_linear_that_is_called_alone_is_a_linear():
    model = two()
    separate = apart(model)
    assert torch.equal(model.linear(BATCHES[0]), separate.linear(BATCHES[0]))
    assert torch.equal(model(BATCHES[0]), separate(BATCHES[0]))


def test_a_linear_in_another_autocast_gets_what_the_norm_would_have_made():
    model = two()

    def inside(model):
        y = model.norm(BATCHES[0])  # FP32
        with torch.autocast("cpu", torch.bfloat16):
            return model.linear(y)

    found = inside(model)
    assert torch.equal(found, inside(apart(model)))
    with torch.autocast("cpu", torch.bfloat16):
        assert not torch.equal(found, model(BATCHES[0]))


def test_an_input_of_another_dtype_gives_the_dtype_that_the_norm_would_have_given():
    """Without autocast a norm of TransformerEngine's returns its weight's."""
    model = two()
    found = model(BATCHES[0].bfloat16())
    assert found.dtype == torch.float32 and torch.equal(found, apart(model)(BATCHES[0].bfloat16()))


def test_gradients_are_stopped_where_they_would_be():
    model, grads = two(), []
    for each in (model, apart(model)):
        with torch.no_grad():
            y = each.norm(BATCHES[0])
        each.linear(y).square().sum().backward()
        assert each.norm.weight.grad is None
        grads.append(each.linear.weight.grad)
    assert torch.equal(*grads)


def test_recomputation_that_begins_between_the_two_is_right_or_refused():
    model = two()
    separate, grads = apart(model), []
    for each in (model, separate):
        checkpoint(each.linear, each.norm(BATCHES[0]), use_reentrant=False).square().sum().backward()
        grads.append([parameter.grad for parameter in (*each.norm.parameters(), *each.linear.parameters())])
    assert equal(*grads)
    with pytest.raises(FP8BackendError, match="let it begin before the norm"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's: no input is a tensor
        checkpoint(model.linear, model.norm(BATCHES[0]), use_reentrant=True)


def test_hooks_that_come_later_see_what_lies_between():
    model, seen = two(), []
    separate = apart(model)
    for each in (model, separate):
        each.norm.register_forward_hook(lambda _, args, output: seen.append(output))
    with pytest.warns(UserWarning, match="norm and linear run one after the other, since hooks"):
        found = model(BATCHES[0])
    assert torch.equal(found, separate(BATCHES[0])) and torch.equal(*seen)


def test_a_norm_whose_weight_is_gone_when_its_linear_runs_is_an_error():
    """As where each is sharded on its own by a wrapper, which frees what it gathered when its forward ends."""
    model = two()
    pending = model.norm(BATCHES[0])
    model.norm.weight.untyped_storage().resize_(0)
    with pytest.raises(FP8BackendError, match="the weight of norm was taken away"):
        model.linear(pending)
    model = Two()
    model.norm.weight.ds_id = 0
    with pytest.raises(RecipeError, match="ZeRO-3"):
        prepare(model, None, {"backend": "te:dynamic", "fuse_norms": True})
    assert type(model.linear) is nn.Linear and type(model.norm) is nn.LayerNorm


# Modules, copies, checkpoints


def test_both_are_turned_back_without_a_trace():
    model, optimizer = made_with(True)
    plain = settled(Model(NORMS["LayerNorm"]))
    before = {name: set(module.__dict__) for name, module in plain.named_modules()}
    train(model, optimizer, BATCHES[:2])
    assert model.state_dict().keys() == plain.state_dict().keys()
    plain.load_state_dict(model.state_dict(), strict=True)
    assert isinstance(model.last["out"], nn.Linear) and not model.last["out"]._modules
    restore(model)
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == before
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]
    assert torch.equal(model(BATCHES[0]), plain(BATCHES[0]))


@pytest.mark.parametrize("part", ["norm", "linear"])
def test_either_may_be_turned_back_alone(part):
    model = two()
    restore(getattr(model, part))
    separate = apart(model)
    restore(getattr(separate, part))
    assert torch.equal(model(BATCHES[0]), separate(BATCHES[0]))


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))], ids=["copy", "pickle"])
def test_a_copy_norms_by_its_own_parameters(twin):
    model, optimizer = made_with(True)
    train(model, optimizer, BATCHES[:2])
    other = twin(model)
    assert other.last["out"].layer_norm_weight is other.last["norm"].weight is not model.last["norm"].weight
    sgd = [torch.optim.SGD(each.parameters(), lr=1e-2) for each in (model, other)]
    assert equal(train(other, sgd[1]), train(model, sgd[0]))


def test_a_run_resumes_to_the_bit_and_parameters_may_be_swapped():
    model, optimizer = made_with(True)
    train(model, optimizer, BATCHES[:2])
    ((_, root, known),) = prepared_roots(model)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict())), known.compute.scaling_state(root)
    unbroken = train(model, optimizer, BATCHES[2:])
    again, its_optimizer = made_with(True)
    again.load_state_dict(saved[0][0], assign=True)
    its_optimizer = adamw(again)
    its_optimizer.load_state_dict(saved[0][1])
    known.compute.load_scaling_state(again, saved[1])
    assert equal(train(again, its_optimizer, BATCHES[2:]), unbroken)


def test_accelerate_trains_and_proves_fused_layers(monkeypatch, capfd):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    fp8_backends.connect()
    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs(fuse_norms=True)])
    torch.manual_seed(0)
    model = settled(Model(NORMS["LayerNorm"]))
    model, optimizer = accelerator.prepare(model, adamw(model))
    for batch in BATCHES:
        accelerator.backward((model(batch) - batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    assert "te:delayed: 4/4 Linear, 100 % of weight FLOPs in FP8, fprop dgrad wgrad (te)" in capfd.readouterr().err
    products = fp8_backends.audit(model).products
    assert products["last.out"] == {"fprop": 1, "dgrad": 1, "wgrad": 1, "recomputed": 0}
    assert isinstance(model.last["out"], TENormLinear) and isinstance(model.last["norm"], te.LayerNorm)
    assert "norm=last.norm" in repr(model.last["out"])
