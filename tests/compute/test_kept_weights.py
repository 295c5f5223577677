"""Reuse weight codes over microbatches: same numbers, one cast a step, and never stale codes."""

import copy
import pickle

import pytest
import torch
from accelerate_state import fresh_accelerate
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint
from widths import nightly

import fp8_backends
from fp8_backends import prepare
from fp8_backends.compute.native import layer_rule
from fp8_backends.compute.native.backend import NativeCompute
from fp8_backends.compute.native.linear import FP8Linear
from fp8_backends.convert.stored_weights import keep_weight_casts
from fp8_backends.errors import FP8BackendError

__all__ = ["fresh_accelerate"]  # each test has Accelerate's state for itself

BACKENDS = [
    "native:dynamic",
    nightly("native:window"),
    "native:rowwise",
    nightly("native:blockwise"),
    nightly("native:mxfp8"),
    "msamp:O2",
]
COMPUTE = NativeCompute()


@pytest.fixture
def casts(monkeypatch):
    """The data of the weights cast in forwards, in order."""
    seen = []
    original = layer_rule.Stored.quantized

    def watched(self, *args, **kwargs):
        seen.append(self.data)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(layer_rule.Stored, "quantized", watched)
    return seen


def made(backend="native:dynamic", keep=True, optimizer=torch.optim.AdamW, watched=True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))
    optimizer = optimizer(model.parameters(), lr=0.1)
    prepare(model, optimizer if watched else None, backend)
    if keep:
        keep_codes(model)
    return model, optimizer


def keep_codes(model):
    """Keep codes as after a first step: only weights that an optimizer trains have any."""
    keep_weight_casts(model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    COMPUTE.after_optimizer_step(model)
    model.zero_grad()


def batch(number):
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(number), requires_grad=True)


def microbatch(model, number=0):
    x = batch(number)
    loss = model(x).float().pow(2).mean()
    loss.backward()
    return [loss.detach(), x.grad]


def trained(model, optimizer, steps=3, microbatches=3):
    found = []
    for step in range(steps):
        for number in range(microbatches):
            found += microbatch(model, 10 * step + number)
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_kept_codes_change_no_bit_and_cast_once_per_step(backend, casts):
    expected = trained(*made(backend, keep=False))
    assert len(casts) == 2 * 3 * 3
    casts.clear()
    assert all(map(torch.equal, trained(*made(backend)), expected))
    assert len(casts) == 2 * 3


@pytest.mark.parametrize("backend", ["native:delayed", "msamp:O3"])
def test_delayed_scales_and_stored_codes_are_not_kept(backend, casts):
    """Delayed scales move with every forward; at O3 the weight is its own codes."""
    expected = trained(*made(backend, keep=False))
    count = len(casts)
    assert all(map(torch.equal, trained(*made(backend)), expected)) and len(casts) == 2 * count


def test_codes_are_kept_only_on_request(casts):
    model, _ = made(keep=False)
    microbatch(model)
    keep_codes(model)
    microbatch(model)
    keep_weight_casts(model, False)
    microbatch(model)
    assert len(casts) == 6 and COMPUTE.transient_bytes_per_element(model[0]) == 1


class Taught(nn.Module):
    """A student with a momentum teacher inside, which forward averages through `.data`."""

    def __init__(self, write, differentiable) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student, self.teacher = nn.Linear(32, 32), nn.Linear(32, 32)
        self.write, self.differentiable, self.taught = write, differentiable, []

    def forward(self, x):
        if self.training:
            self.write(self.teacher.weight.data, self.student.weight.detach())
        with torch.set_grad_enabled(self.differentiable):
            self.taught.append(self.teacher(x).detach())
        return self.student(x) - self.taught[-1]


AVERAGES = {
    "mul_": lambda data, new: data.mul_(0.5).add_(new, alpha=0.5),
    "copy_": lambda data, new: data.copy_(0.5 * data + 0.5 * new),
}


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("trains", ["student", "requires gradients", "all"])
def test_a_momentum_teacher_written_through_data_is_cast_in_each_forward(trains, average):
    outputs = []
    for keep in (False, True):
        model = Taught(AVERAGES[average], differentiable=trains == "all")
        model.teacher.requires_grad_(trains == "all")
        optimizer = torch.optim.SGD(
            (model.student if trains == "student" else model).parameters(), lr=0.1
        )
        prepare(model, optimizer, "native:dynamic")
        keep_weight_casts(model, keep)
        trained(model, optimizer)
        outputs.append(model.taught)
    assert all(map(torch.equal, *outputs))


class Raw(torch.optim.SGD):
    """Write past autograd's version counter, as an optimizer in another language would."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.data.mul_(2)


def by_data_and_step(model, optimizer):
    weight = model[0].weight
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=0.0).step()
    weight.data.mul_(2)


def by_data(model, optimizer):
    model[0].weight.data = model[0].weight.data * 2


def by_loading(model, optimizer, assign=False):
    model.load_state_dict(
        {name: 2 * value.clone() for name, value in model.state_dict().items()}, assign=assign
    )


CHANGES = {
    "in place": torch.no_grad()(lambda model, optimizer: model[0].weight.mul_(2)),
    "behind autograd": by_data_and_step,
    "new memory": by_data,
    "watched step": lambda model, optimizer: optimizer.step(),
    "loading": by_loading,
    "assigning": lambda model, optimizer: by_loading(model, optimizer, assign=True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_weight_is_cast_again(change):
    model, optimizer = made(optimizer=Raw, watched=change == "watched step")
    microbatch(model)
    CHANGES[change](model, optimizer)
    plain, _ = made(keep=False, watched=False)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(microbatch(model)[0], microbatch(plain)[0])


def test_new_parameter_at_same_address_is_cast_again(casts):
    """Another weight may reuse address and version of a deleted one."""
    model, _ = made()
    memory = torch.ones(48, 32).numpy()
    for _ in range(3):
        model[0].weight = nn.Parameter(torch.from_numpy(memory))
        casts.clear()
        microbatch(model)
        assert (48, 32) in [data.shape for data in casts]
        casts.clear()
        model[0].weight = None
        memory *= 2


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_reads_the_kept_codes(use_reentrant, casts):
    model, _ = made()
    x = batch(0)
    checkpoint(model, x, use_reentrant=use_reentrant).sum().backward()
    again = x.grad
    assert len(casts) == 2 and model[0].fp8_products[3] == 1
    plain, _ = made(keep=False)
    x = batch(0)
    plain(x).sum().backward()
    assert torch.equal(x.grad, again)


def test_evaluation_neither_reads_nor_keeps_codes(casts):
    """Averaged weights are often swapped in for it."""
    model, _ = made()
    for layer in (model[0], model[2]):
        layer.fp8_rule = layer.fp8_rule._replace(fp8_in_eval=True)
    model.eval()
    with torch.no_grad():
        model(batch(0))
        model(batch(0))
    assert len(casts) == 4 and model[0].fp8_shared.held(model[0]) is None


def test_forward_without_gradients_keeps_codes_for_later_ones(casts):
    """Like the first forward of a checkpoint, it keeps the codes for dgrad as well."""
    model, _ = made()
    with torch.no_grad():
        model(batch(0))
    microbatch(model)
    assert len(casts) == 2


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_keep_their_own_codes(copied, casts):
    model, _ = made()
    microbatch(model)
    size = len(pickle.dumps(model))
    other = copied(model)
    assert other[0].fp8_shared.keeps_weights and other[0].fp8_shared.held(other[0]) is None
    with torch.no_grad():
        other[0].weight.mul_(2)
    casts.clear()
    microbatch(other)
    assert len(casts) == 2
    microbatch(model)
    assert len(casts) == 2, "the first model's codes are still good"
    model[0].fp8_shared.forget_weights()
    assert len(pickle.dumps(model)) == size, "codes are not pickled"


def test_moved_model_frees_kept_codes():
    model, _ = made()
    microbatch(model)
    memory = StorageWeakRef(model[0].weight.untyped_storage())
    model.bfloat16()
    assert memory.expired()


@pytest.mark.nightly
def test_compiled_code_casts_inside_its_graph(casts):
    torch._dynamo.reset()
    model, optimizer = made()
    plain, _ = made(keep=False)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for number in range(2):
        assert all(map(torch.equal, microbatch(compiled, number), microbatch(plain, number)))
        assert model[0].fp8_shared.held(model[0]) is None


def test_audit_counts_bytes_of_kept_codes():
    """Keep one code per weight element; tensorwise rules hold it from forward to backward
    anyway."""
    for backend, before, after in (
        ("native:dynamic", 1, 1),
        ("native:rowwise", 0, 1),
        ("native:delayed", 1, 1),
    ):
        model, optimizer = made(backend, keep=False)
        assert COMPUTE.transient_bytes_per_element(model[0]) == before
        keep_codes(model)
        assert COMPUTE.transient_bytes_per_element(model[0]) == after
        microbatch(model)
        held = model[0].fp8_shared.held(model[0])
        assert (
            held is None
            if backend == "native:delayed"
            else held.codes.numel() == model[0].weight.numel()
        )
        total = sum(p.numel() for p in model.parameters())
        weights = model[0].weight.numel() + model[2].weight.numel()
        grown = fp8_backends.audit(model, optimizer).bytes_per_parameter["total"]
        keep_weight_casts(model, False)
        plain = fp8_backends.audit(model, optimizer).bytes_per_parameter["total"]
        assert grown - plain == pytest.approx((after - before) * weights / total)


def test_sharded_and_unprepared_models_are_refused():
    with pytest.raises(FP8BackendError, match="no model here is prepared"):
        keep_weight_casts(nn.Linear(4, 4))
    model, _ = made(keep=False)
    model[0].weight.ds_id = 0
    with pytest.raises(FP8BackendError, match="sharding saves"):
        keep_weight_casts(model)


def test_weights_gathered_by_deepspeed_are_not_kept(casts):
    model, _ = made()
    model[0].weight.ds_id = 0
    microbatch(model)
    microbatch(model)
    assert len(casts) == 3 and model[0].fp8_shared.held(model[0]) is None


@pytest.mark.parametrize("steps", [1, 2])
def test_accumulating_accelerator_keeps_codes(steps, casts):
    from accelerate import Accelerator

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="fp8",
        gradient_accumulation_steps=steps,
        kwargs_handlers=[fp8_backends.FP8RecipeKwargs(backend="native:dynamic")],
    )
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    layers = [layer for layer in model.modules() if isinstance(layer, FP8Linear)]
    assert {layer.fp8_shared.keeps_weights for layer in layers} == {steps > 1}
    for number in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch(number)).float().sum())
            optimizer.step()
            optimizer.zero_grad()
    assert len(casts) == (8 if steps == 1 else 6)  # the first step shows which weights train
