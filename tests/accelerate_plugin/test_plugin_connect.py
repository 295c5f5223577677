"""Give FP8 to calls of the patched `Accelerator` that request it, and the stock class to all
others."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle

import accelerate.state
import accelerate.utils
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from plugin_training import assert_all_moved, batches, copied_parameters, mlp, train

import fp8_backends
from fp8_backends.errors import BackendUnavailableError, FP8BackendError, RecipeError


@pytest.mark.parametrize("precision", [None, "no", "bf16"])
def test_other_precisions_get_the_stock_class(precision):
    assert type(Accelerator(mixed_precision=precision)) is Accelerator


def test_connecting_again_changes_nothing():
    before = Accelerator.__init__
    fp8_backends.connect()
    assert Accelerator.__init__ is before


def test_connection_is_found_beneath_third_party_patch(monkeypatch):
    ours = Accelerator.__init__

    @functools.wraps(ours)
    def theirs(self, *args, **kwargs):
        ours(self, *args, **kwargs)

    monkeypatch.setattr(Accelerator, "__init__", theirs)
    fp8_backends.connect()
    assert Accelerator.__init__ is theirs


def test_import_warns_about_earlier_accelerator(monkeypatch, caplog):
    monkeypatch.setattr(Accelerator, "__init__", inspect.unwrap(Accelerator.__init__))
    Accelerator(mixed_precision="fp8", kwargs_handlers=[accelerate.utils.AORecipeKwargs()])
    fp8_backends.connect()
    assert "was set before fp8_backends was imported" in caplog.text
    model = mlp()
    accelerator = Accelerator(
        mixed_precision="fp8", kwargs_handlers=[fp8_backends.NativeRecipeKwargs()]
    )
    train(
        accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters())), batches(1)
    )
    assert fp8_backends.audit(model).products


def test_earlier_accelerator_without_fp8_stays_unchanged(monkeypatch, caplog):
    monkeypatch.setattr(Accelerator, "__init__", inspect.unwrap(Accelerator.__init__))
    accelerator = Accelerator(mixed_precision="bf16")
    fp8_backends.connect()
    assert type(accelerator) is Accelerator and not caplog.records


def test_disable_variable_leaves_accelerate_unchanged(monkeypatch):
    def untouched(self):
        pass

    monkeypatch.setattr(Accelerator, "__init__", untouched)
    monkeypatch.setenv("FP8_BACKENDS_DISABLE", "1")
    fp8_backends.connect()
    assert Accelerator.__init__ is untouched


@pytest.mark.parametrize(
    "handler, name",
    [
        (fp8_backends.NativeRecipeKwargs(), "native:dynamic"),
        (fp8_backends.AORecipeKwargs(), "ao:tensorwise"),
        (fp8_backends.MSAMPRecipeKwargs(opt_level="O1"), "msamp:O1"),
        (fp8_backends.FP8RecipeKwargs(backend="native:delayed"), "native:delayed"),
    ],
)
def test_our_handlers_reach_the_registry(handler, name):
    accelerator = Accelerator(
        mixed_precision="fp8", kwargs_handlers=[DistributedDataParallelKwargs(), handler]
    )
    assert accelerator.fp8_recipe.name == name
    assert isinstance(accelerator, Accelerator) and accelerator.mixed_precision == "fp8"
    assert isinstance(accelerator.ddp_handler, DistributedDataParallelKwargs)


@pytest.mark.parametrize("precision, name", [("fp8", "native:rowwise"), ("bf16", None)])
def test_handlers_of_an_iterator_are_read_by_both(precision, name):
    recipes = [fp8_backends.NativeRecipeKwargs(scaling="rowwise")] * (precision == "fp8")
    accelerator = Accelerator(
        mixed_precision=precision,
        kwargs_handlers=iter([DistributedDataParallelKwargs(static_graph=True), *recipes]),
    )
    assert accelerator.ddp_handler.static_graph
    assert name is None or accelerator.fp8_recipe.name == name


@pytest.mark.parametrize(
    "value, name",
    [("ao", "ao:tensorwise"), ("AO", "ao:tensorwise"), ("Native:Delayed", "native:delayed")],
)
def test_environment_selects_backend(monkeypatch, value, name):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", value)
    assert Accelerator().fp8_recipe.name == name


@pytest.mark.parametrize(
    "recipe, said",
    [
        (
            fp8_backends.TERecipeKwargs(),
            "te:delayed cannot run here.*native:delayed for te:delayed",
        ),
        (fp8_backends.FP8RecipeKwargs("te+msamp:O3"), "te:delayed.msamp:O3 cannot run here"),
        (
            fp8_backends.MSAMPRecipeKwargs(implementation="original"),
            "the package msamp is not installed",
        ),
    ],
)
def test_unavailable_backend_is_refused_before_construction(recipe, said):
    with pytest.raises(BackendUnavailableError, match=said):
        Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe])
    # the next Accelerator of this process may have another precision
    assert Accelerator(mixed_precision="bf16").mixed_precision == "bf16"


def test_fp8_alone_means_auto():
    assert Accelerator(mixed_precision="fp8").fp8_recipe == fp8_backends.resolve("auto")


def test_positional_arguments():
    accelerator = Accelerator(True, False, "fp8", 4)
    assert accelerator.gradient_accumulation_steps == 4 and accelerator.fp8_recipe is not None


def test_wrong_arguments_raise_the_stock_error():
    with pytest.raises(TypeError, match="kwarg_handlers"):
        Accelerator(mixed_precision="fp8", kwarg_handlers=[fp8_backends.AORecipeKwargs()])


@pytest.mark.parametrize(
    "given", ["native:delayed", "Native:Delayed", "ao", "msamp:O1", "torchao", "auto"]
)
def test_mixed_precision_accepts_backend_string(given, monkeypatch):
    accelerator = Accelerator(mixed_precision=given)
    assert (
        accelerator.fp8_recipe == fp8_backends.resolve(given)
        and accelerator.mixed_precision == "fp8"
    )
    accelerate.state.AcceleratorState._reset_state()
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", given)
    assert [Accelerator().fp8_recipe for _ in range(2)] == [accelerator.fp8_recipe] * 2
    assert Accelerator(mixed_precision="fp8").mixed_precision == "fp8"


def test_mixed_precision_refuses_second_recipe_and_unknown_strings():
    with pytest.raises(
        RecipeError, match="two FP8 recipes, NativeRecipeKwargs and FP8Recipe.*mixed_precision"
    ):
        Accelerator(mixed_precision="native", kwargs_handlers=[fp8_backends.NativeRecipeKwargs()])
    with pytest.raises(RecipeError, match="unknown backend 'nativ:dynamic' .did you mean 'native'"):
        Accelerator(mixed_precision="nativ:dynamic")
    with pytest.raises(ValueError, match="Unknown mixed_precision mode: off"):
        Accelerator(mixed_precision="off")


@pytest.mark.parametrize(
    ("handlers", "said"),
    [
        (fp8_backends.NativeRecipeKwargs(), r"write kwargs_handlers=\[NativeRecipeKwargs"),
        (accelerate.utils.AORecipeKwargs(), r"write kwargs_handlers=\[AORecipeKwargs"),
        ("native:dynamic", r"Write Accelerator\(mixed_precision='native:dynamic'\)"),
        (["ao"], r"Write Accelerator\(mixed_precision='ao'\)"),
        ([{"backend": "ao"}], r"Write kwargs_handlers=\[FP8RecipeKwargs"),
        ({"backend": "ao"}, r"Write kwargs_handlers=\[FP8RecipeKwargs"),
    ],
)
def test_invalid_handler_list_is_refused_with_fix(handlers, said):
    with pytest.raises(RecipeError, match=said):
        Accelerator(mixed_precision="fp8", kwargs_handlers=handlers)


def test_handler_with_backend_repr_is_not_a_backend_string(monkeypatch):
    monkeypatch.setattr(DistributedDataParallelKwargs, "__str__", lambda self: "cuda:0")
    accelerator = Accelerator(
        mixed_precision="fp8", kwargs_handlers=[DistributedDataParallelKwargs()]
    )
    assert accelerator.fp8_recipe.name == "native:dynamic"


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_recipe_without_fp8_is_refused(precision):
    with pytest.raises(RecipeError, match='set Accelerator\\(mixed_precision="fp8"\\)'):
        Accelerator(mixed_precision=precision, kwargs_handlers=[fp8_backends.NativeRecipeKwargs()])


def test_accelerates_checks_are_disabled_only_during_construction():
    before = accelerate.state.is_fp8_available, accelerate.state.check_cuda_fp8_capability
    Accelerator(mixed_precision="fp8")
    with pytest.raises(RecipeError):
        Accelerator(mixed_precision="fp8", kwargs_handlers=[fp8_backends.NativeRecipeKwargs()] * 2)
    assert (accelerate.state.is_fp8_available, accelerate.state.check_cuda_fp8_capability) == before


def test_fp8_needs_none_of_accelerates_libraries(monkeypatch):
    monkeypatch.setattr(accelerate.state, "is_fp8_available", lambda: False)
    assert Accelerator(mixed_precision="fp8").mixed_precision == "fp8"


def test_gpu_without_fp8_does_not_turn_it_into_fp16(monkeypatch):
    monkeypatch.setattr(accelerate.state, "check_cuda_fp8_capability", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    accelerator, model = Accelerator(mixed_precision="native:dynamic"), mlp()
    assert accelerator.mixed_precision == "fp8"
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(accelerator, *accelerator.prepare(model, optimizer), batches(1))
    products = fp8_backends.audit(model).products.values()
    assert products and all(counts["fprop"] for counts in products)


def test_incompatible_accelerate_is_an_error_only_with_fp8(monkeypatch):
    monkeypatch.setattr(Accelerator, "__init__", Accelerator.__init__.__wrapped__)
    monkeypatch.delattr(Accelerator, "unscale_gradients")
    monkeypatch.setattr(Accelerator, "autocast", lambda self: None)
    fp8_backends.connect()
    assert type(Accelerator()) is Accelerator
    with pytest.raises(
        FP8BackendError,
        match="unscale_gradients does not exist; Accelerator.autocast takes no autocast_handler",
    ):
        Accelerator(mixed_precision="fp8")


class CountingAccelerator(Accelerator):
    """Subclass Accelerator as libraries do."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.prepared = 0

    def prepare(self, *args, **kwargs):
        self.prepared += 1
        return super().prepare(*args, **kwargs)


def test_subclasses_keep_their_methods():
    accelerator = CountingAccelerator(
        mixed_precision="fp8", kwargs_handlers=[fp8_backends.NativeRecipeKwargs()]
    )
    model = mlp()
    before = copied_parameters(model)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    train(accelerator, model, optimizer, batches(2))
    assert isinstance(accelerator, CountingAccelerator)
    assert accelerator.prepared >= 1
    assert_all_moved(model, before)


def test_each_accelerator_class_gets_one_subclass():
    assert type(Accelerator(mixed_precision="fp8")) is type(Accelerator(mixed_precision="fp8"))


def test_second_accelerator_may_have_another_recipe():
    first = Accelerator(mixed_precision="fp8", kwargs_handlers=[fp8_backends.AORecipeKwargs()])
    second = Accelerator(mixed_precision="fp8", kwargs_handlers=[fp8_backends.NativeRecipeKwargs()])
    assert first.fp8_recipe.compute == "ao" and second.fp8_recipe.compute == "native"
    for accelerator in (first, second):
        model = mlp()
        before = copied_parameters(model)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        train(accelerator, model, optimizer, batches(2))
        assert_all_moved(model, before)


def test_plain_accelerator_after_fp8_inherits_fp8_with_auto():
    """Accelerate keeps one precision a process; stock then picks TorchAO silently."""
    Accelerator(mixed_precision="fp8", kwargs_handlers=[fp8_backends.AORecipeKwargs()])
    assert Accelerator().fp8_recipe == fp8_backends.resolve("auto")


def test_accelerator_copies():
    accelerator = Accelerator(mixed_precision="fp8")
    assert copy.deepcopy(accelerator) is accelerator
    assert type(copy.copy(accelerator)) is type(accelerator)


@pytest.mark.parametrize("backend", ["native:delayed", "ao:tensorwise", "msamp:O2"])
def test_pickled_accelerator_continues_training_identically(backend):
    """Restore optimizer hooks after unpickling: PyTorch pickles none, and they roll and save
    scaling states."""
    torch.manual_seed(0)
    accelerator = Accelerator(
        mixed_precision="fp8", kwargs_handlers=[fp8_backends.FP8RecipeKwargs(backend)]
    )
    model = mlp()
    accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2))

    def step(accelerator, seed: int) -> float:
        torch.manual_seed(seed)
        model, optimizer = accelerator._models[0], accelerator._optimizers[0]
        loss = model(torch.randn(16, model[0].in_features)).float().square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    # stock Accelerate's pickle leaves autocast behind
    accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    step(accelerator, 0)
    loaded = pickle.loads(pickle.dumps(accelerator))
    losses = [[step(each, seed) for seed in range(1, 20)] for each in (accelerator, loaded)]
    assert losses[0] == losses[1]
    states = [each._optimizers[0].state_dict().keys() for each in (accelerator, loaded)]
    assert states[0] == states[1]


def test_accelerator_that_ignores_the_backend_variable_pickles(monkeypatch):
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "ao")
    loaded = pickle.loads(pickle.dumps(Accelerator(mixed_precision="bf16")))
    assert loaded.fp8_backend == "NO" and type(loaded).__name__ == "Accelerator"
