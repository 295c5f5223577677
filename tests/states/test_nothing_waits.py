"""A training step at a level never waits for the device: no number is read from it or copied to it.
Outside the layers, the number of PyTorch calls is independent of depth, or a few for each weight.

Meta tensors stand for the device, CPU tensors for the host; autograd, hooks, reducer and optimizer
are real. Reading a number from a meta tensor is an error, too.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import fp8_backends
from fp8_backends.comm.backward import Agreement, BackwardPass
from fp8_backends.comm.ddp import Connection, GradientArrives
from fp8_backends.comm.reducer import GradientReducer
from fp8_backends.formats.scaling import new_window_state
from fp8_backends.states.levels import swap_gradient_hook
from fp8_backends.tensors.scaled_tensor import Kind, ScaledTensor, quantize

LEVELS = ("O2", "O3")
NUMBERS = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2"}
"""Operations with a result awaited by the host."""


class Meter(TorchDispatchMode):
    """Record operations with a host synchronization, and count device operations except views."""

    def __init__(self):
        super().__init__()
        self.waits: list[str] = []
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, ScaledTensor) for kind in types):
            return NotImplemented  # it first reports its own work on stored values
        name, kwargs = func._schema.name.removeprefix("aten::"), kwargs or {}
        on_device = "meta" in devices((args, kwargs))
        if name in NUMBERS and on_device:
            self.waits.append(name)
        out = func(*args, **kwargs)
        made = devices(out)
        if name in ("copy_", "_to_copy") and len(made | devices((args, kwargs))) > 1:
            self.waits.append(name)
        self.calls += (on_device or "meta" in made) and not func.is_view
        return out


@contextlib.contextmanager
def metered() -> Iterator[Meter]:
    """Yield a meter that also sees tensors made from Python's numbers, which bypass the
    dispatcher."""

    def noting(function):
        def noted(*args, **kwargs):
            made = function(*args, **kwargs)
            if made.is_meta:
                meter.waits.append(function.__name__)
            return made

        return noted

    with (
        Meter() as meter,
        mock.patch.multiple(torch, tensor=noting(torch.tensor), as_tensor=noting(torch.as_tensor)),
    ):
        yield meter


def devices(values) -> set[str]:
    return {each.device.type for each in tree_iter(values) if isinstance(each, torch.Tensor)}


@pytest.fixture(autouse=True)
def autocast_is_off_on_meta(monkeypatch):
    """Disable autocast on meta, where PyTorch raises."""
    asked = torch.is_autocast_enabled
    monkeypatch.setattr(
        torch, "is_autocast_enabled", lambda *device: device != ("meta",) and asked(*device)
    )


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


def prepared(backend: str, layers: int, dtype: torch.dtype = torch.bfloat16):
    model = nn.Sequential(*(Block() for _ in range(layers))).to("meta", dtype)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    if "msamp" in backend:
        # counters on the device; its constructor would refuse meta tensors
        optimizer.param_groups[0]["fused"] = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fp8_backends.prepare(model, optimizer, {"backend": backend, "on_unproven": "warn"})


def loss_of(model: nn.Module) -> torch.Tensor:
    return (
        model(torch.empty(32, 64, dtype=next(model.parameters()).dtype, device="meta"))
        .float()
        .square()
        .mean()
    )


def first_step(model, optimizer) -> None:
    """Make the states, and let the proof read counts from the device."""
    loss_of(model).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nothing runs on meta tensors
        optimizer.step()
    optimizer.zero_grad()


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["native:dynamic", *(f"msamp:{level}" for level in LEVELS)])
def test_step_never_synchronizes(backend):
    """Run two microbatches, a clip and the optimizer's step; in FP32, since then PyTorch steps the
    norms."""
    model, optimizer = prepared(backend, layers=1, dtype=torch.float32)
    first_step(model, optimizer)
    with metered() as meter:
        for _ in range(2):
            loss_of(model).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert meter.calls and not meter.waits


def test_plain_number_needs_no_host_copy():
    gradient = quantize(torch.empty(32, 64, device="meta"), torch.float8_e4m3fn)
    gradient.kind = Kind.GRADIENT
    with metered() as meter:
        gradient.mul_(0.3).div_(3.0)
        torch._foreach_mul_([gradient], 0.3)
        torch._foreach_div_([gradient], 3.0)
        gradient * 0.3
    assert meter.calls and not meter.waits


@pytest.mark.parametrize("wait", ["number", "copy", "list"])
def test_meter_detects_synchronization(wait):
    """The wait is planted in a hook, inside backward."""
    model, optimizer = prepared("msamp:O2", layers=1)
    first_step(model, optimizer)

    def plant(weight):
        if wait == "number":
            weight.grad.scale_inv.item()
        elif wait == "copy":
            weight.grad.mul_(torch.ones(()).to("meta"))
        else:
            weight.grad.mul_(torch.tensor(0.5, device="meta"))

    model[0].up.weight.register_post_accumulate_grad_hook(plant)
    refused = (
        pytest.raises(RuntimeError, match="meta") if wait == "number" else contextlib.nullcontext()
    )
    with metered() as meter, refused:
        loss_of(model).backward()
    assert len(meter.waits) == 1


# Several ranks


@pytest.fixture
def two_ranks():
    """Create a process group with an imaginary other rank: collectives return at once."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


def connect(model: nn.Module, group, comm: str) -> None:
    """Connect a model's weights like `comm.ddp.connect`, without DDP: its C++ reducer reads
    memory."""
    connection = Connection(group)
    model.require_backward_grad_sync = model.require_forward_param_sync = True  # as a DDP has them
    weights = {name: p for name, p in model.named_parameters() if isinstance(p, ScaledTensor)}
    connection.reducer = GradientReducer(weights, group, comm, 40_000)
    states = [new_window_state("meta") for _ in weights]
    connection.collectives += [connection.reducer, Agreement(lambda: states, [group])]
    for index, weight in enumerate(connection.reducer.parameters):
        swap_gradient_hook(weight, GradientArrives(connection, index))
    model.register_forward_hook(connection)


@pytest.mark.nightly
@pytest.mark.parametrize("level, comm", [("O2", "plain"), ("O3", "fp8")])
def test_gradient_reduction_never_synchronizes(level, comm, two_ranks):
    model, optimizer = prepared(f"msamp:{level}", layers=2)
    connect(model, two_ranks, comm)
    connection = BackwardPass.find(model)
    assert len(connection.reducer.buckets) > 1
    first_step(model, optimizer)
    with metered() as meter:
        model.require_backward_grad_sync = False
        loss_of(model).backward()
        model.require_backward_grad_sync = True
        loss_of(model).backward()
        optimizer.step()
    assert not connection.reducer.in_flight  # the end of backward was reached
    assert all(isinstance(p.grad, ScaledTensor) for p in connection.reducer.parameters)
    assert meter.calls and not meter.waits


# Calls that do not grow with the model


def calls(layers: int, what: str, group=None) -> int:
    model, optimizer = prepared("msamp:O2", layers, torch.float32)
    if what == "agreement":
        states = [new_window_state("meta") for _ in range(layers)]
        with metered() as meter:
            Agreement(lambda: states, [group]).finish()
        return meter.calls
    loss_of(model).backward()
    gradients = [p.grad for p in model.parameters() if isinstance(p.grad, ScaledTensor)]
    with metered() as meter:
        if what == "unscale":
            number = torch.ones((), device="meta")
            torch._amp_foreach_non_finite_check_and_unscale_(
                gradients, torch.zeros_like(number), number
            )
        elif what == "scale":
            torch._foreach_mul_(gradients, torch.ones((), device="meta"))
        elif what == "zero":
            optimizer.zero_grad()
        elif what == "norms and clip":
            torch.nn.utils.clip_grad_norm_(
                [p for p in model.parameters() if isinstance(p, ScaledTensor)], 1.0
            )
    return meter.calls


@pytest.mark.parametrize("what", ["agreement", "unscale", "scale", "zero"])
def test_number_of_calls_is_independent_of_layers(what, two_ranks):
    assert calls(2, what, two_ranks) == calls(4, what, two_ranks)


def test_clip_needs_few_calls_per_weight():
    """`clip_grad_norm_` works tensor by tensor for subclasses: a norm of codes in FP32, times the
    scale's magnitude, and the scale times the factor. On a GPU a norm is two launches."""
    few, many = calls(2, "norms and clip"), calls(4, "norms and clip")
    assert many - few == 4 * 4  # 4 weights more
