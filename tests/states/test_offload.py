"""Optimizer states in the memory of the host: equal bits, the order of copies, bytes, refusals.

`StandInStream` stands in for CUDA's streams: a copy runs only when something waits for it, and its
target is full of NaN until then, so a read before its copy fails.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator, checkpointing
from accelerate.state import AcceleratorState, GradientState
from accelerate_state import fresh_accelerate  # noqa: F401
from level_steps import (
    LEVELS,
    assert_same,
    loss_of,
    mlp,
    parameters_of,
    prepared,
    train,
)
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._pytree import tree_leaves

import fp8_backends
from fp8_backends.errors import FP8BackendError, RecipeError
from fp8_backends.states import gradient_release, levels, link, offload, optimizers
from fp8_backends.states.adamw import ScaledAdamW
from fp8_backends.tensors.scaled_tensor import ScaledTensor, quantize, stored_parts

STEPS = 6
WAYS = {
    "plain": {},
    "clipped": {"max_norm": 0.05},
    "accumulated": {"microbatches": 3},
    "both": {"microbatches": 2, "max_norm": 0.05},
}


def fit(model, optimizer, steps=range(STEPS), microbatches=1, max_norm=None) -> list[float]:
    """Train with a scheduler; return losses."""
    scheduler, losses = LambdaLR(optimizer, lambda step: 0.9**step), []
    for step in steps:
        for number in range(microbatches):
            loss = loss_of(model, 100 * step + number)
            (loss / microbatches).backward()
            losses.append(loss.item())
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return losses


def scaled(model: nn.Module) -> list[ScaledTensor]:
    return [p for p in model.parameters() if isinstance(p, ScaledTensor)]


@pytest.mark.parametrize(("level", "way"), [*zip(LEVELS, WAYS, strict=True), ("O2", "both")])
def test_steps_in_the_host_equal_steps_on_the_device(level, way):
    usual, ours = prepared(level), prepared(level, offload="states")
    assert fit(*ours, **WAYS[way]) == fit(*usual, **WAYS[way])
    assert_same(ours, usual)
    for weight, other in zip(scaled(ours[0]), scaled(usual[0]), strict=True):
        amax, expected = weight.known_amax(), other.known_amax()
        assert amax is expected is None or torch.equal(amax, expected)


@pytest.mark.parametrize(("level", "pending"), list(zip(LEVELS, 2 * (1, 2**40), strict=True)))
def test_released_gradients_step_in_the_host(level, pending, monkeypatch):
    monkeypatch.setattr(gradient_release, "PENDING", pending)
    usual = prepared(level)
    ours = prepared(level, offload="states", gradient_release=True)
    assert fit(*ours) == fit(*usual)
    assert_same(ours, usual)


# Streams


class StandInStream:
    """Queue copies until somebody waits for them."""

    compute: StandInStream
    """The thread's current stream. PyTorch runs its work at once, as this is a CPU."""
    lock = threading.RLock()

    def __init__(self, device=None) -> None:
        self.queued, self.done = [], 0

    def wait_stream(self, other: StandInStream) -> None:
        self.put(partial(other.run, len(other.queued)))
        if self is StandInStream.compute:
            self.run(len(self.queued))

    def record_event(self) -> StandInEvent:
        return StandInEvent(self, len(self.queued))

    def put(self, action) -> None:
        with self.lock:
            self.queued.append(action)

    def run(self, upto: int) -> None:
        with self.lock:
            while self.done < upto:
                self.done += 1
                self.queued[self.done - 1]()


class StandInEvent:
    def __init__(self, stream: StandInStream, place: int) -> None:
        self.stream, self.place = stream, place

    def synchronize(self) -> None:
        self.stream.run(self.place)


class StandInStreams(link.Streams):
    """The package's streams, with copies that wait."""

    active = threading.local()

    def empty(self, shape, dtype):
        return torch.empty(shape, dtype=dtype)

    def _copy(self, pairs) -> None:
        for target, source in pairs:
            if target.numel():
                target.view(-1).view(torch.uint8).fill_(0xFF)  # NaN, and a count of the write
            self.active.stream.put(partial(late, target, source))


def late(target: torch.Tensor, source: torch.Tensor) -> None:
    with torch.autograd._unsafe_preserve_version_counter(target), torch.no_grad():
        target.copy_(source)


@contextlib.contextmanager
def stand_in_stream(stream: StandInStream):
    StandInStreams.active.stream = stream
    yield


@pytest.fixture
def streams(monkeypatch):
    StandInStream.compute = StandInStream()
    monkeypatch.setattr(torch.cuda, "Stream", StandInStream)
    monkeypatch.setattr(torch.cuda, "stream", stand_in_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: StandInStream.compute)
    monkeypatch.setattr(offload, "link_to", lambda codes: StandInStreams(codes.device))
    monkeypatch.setattr(gradient_release, "PENDING", 1)


@pytest.mark.parametrize(
    ("level", "released"), [*zip(LEVELS, 2 * (False, True), strict=True), ("O4", False)]
)
def test_streams_copy_before_each_read(level, released, streams):
    usual = prepared(level)
    ours = prepared(level, offload="states", gradient_release=released)
    way = {} if released else WAYS["both"]
    assert fit(*ours, **way) == fit(*usual, **way)
    assert_same(ours, usual)


@pytest.mark.parametrize("forgotten", ["wait", "finish"])
def test_stand_in_finds_a_read_before_its_copy(forgotten, streams, monkeypatch):
    monkeypatch.setattr(StandInStreams, forgotten, lambda *_: None)
    ours = prepared("O4", offload="states", gradient_release=True)
    usual = prepared("O4")
    expected = train(*usual, range(3))
    assert train(*ours, range(3)) != expected


def test_next_forward_may_come_before_the_step(streams):
    model, optimizer = prepared("O4", offload="states", gradient_release=True)
    usual = prepared("O4", gradient_release=True)
    for each in (model, usual[0]):
        loss_of(each, 0).backward()
    assert loss_of(model, 1).item() == loss_of(usual[0], 1).item()
    optimizer.step()


def test_error_of_the_host_step_is_raised(streams, monkeypatch):
    model, optimizer = prepared("O2", offload="states")
    loss_of(model, 0).backward()
    monkeypatch.setattr(type(optimizer), "step_scaled", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()


# Writes by others


@pytest.mark.parametrize("level", LEVELS)
def test_writes_to_weights_and_states_reach_the_host(level):
    usual, ours = prepared(level), prepared(level, offload="states")
    for run in (usual, ours):
        fit(*run, range(2))
        with torch.no_grad():
            run[0][0].weight.mul_(0.3)
            run[0][3].weight.mul_(2.0)
        fit(*run, range(2, 4))
        run[0].load_state_dict(mlp(seed=3).state_dict())
        moments = run[1].state[run[0][0].weight]
        moments["exp_avg"] = torch.full((128, 64), 1e-3)
        fit(*run, range(4, 6))
    assert_same(ours, usual)


@pytest.mark.parametrize("level", LEVELS)
def test_resumes_with_and_without_offload(level):
    before, after = {}, {"offload": "states"}
    if level in ("O2", "O4"):
        before, after = after, before
    model, optimizer = prepared(level, **before)
    train(model, optimizer, range(5))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    expected = train(model, optimizer, range(5, 10))
    resumed = prepared(level, model=mlp(seed=1), **after)
    resumed[0].load_state_dict(saved[0])
    resumed[1].load_state_dict(saved[1])
    assert train(*resumed, range(5, 10)) == expected
    assert_same(resumed, (model, optimizer))


def test_lost_updates_are_those_of_the_device():
    usual, ours = prepared("O3"), prepared("O3", offload="states")
    for run in (usual, ours):
        train(*run, range(2))
    assert ours[1].lost_updates() == usual[1].lost_updates()


# Memory


def held(weights: list[ScaledTensor], optimizer) -> dict[str, float]:
    """Count bytes an element of the weights by device; twins count as the optimizer's."""
    tensors = {}
    for p in weights:
        twin = optimizer.stepped(p)
        grad = () if p.grad is None else stored_parts(p.grad)
        states = [s for value in optimizer.state[p].values() for s in stored_parts(value)]
        for part in (*stored_parts(p), *stored_parts(twin, exact=True), *grad, *states):
            tensors[id(part)] = part
    total = sum(p.numel() for p in weights)
    found = dict.fromkeys(("cuda", "cpu"), 0)
    for part in tensors.values():
        found[part.device.type] += part.nbytes
    return {name: size / total for name, size in found.items()}


def on_a_card(level: str) -> ScaledTensor:
    """Return a weight of a level as fake CUDA tensors."""
    codes = torch.empty(512, 512, dtype=levels.STORED_WEIGHTS[level], device="cuda")
    weight = ScaledTensor(codes, torch.empty((), device="cuda"))
    if level == "O4":
        weight.rest = torch.empty(512, 512, dtype=torch.int8, device="cuda")
    return weight


@pytest.mark.parametrize(("level", "device", "host"), [("O4", 1.0, 4.1), ("O2", 2.0, 5.1)])
def test_bytes_on_a_card_and_in_the_host(level, device, host, monkeypatch):
    """Fake CUDA tensors, as this machine has no card, and a step that only looks at its tensors."""
    stepped = []
    sent = []
    monkeypatch.setattr(ScaledAdamW, "step_scaled", lambda _, views: stepped.extend(views))
    # this build of PyTorch copies to no fake card
    monkeypatch.setattr(link.Link, "send", lambda _, pairs: sent.extend(pairs))
    recipe = fp8_backends.resolve({"backend": f"msamp:{level}", "offload": "states"})
    with FakeTensorMode():
        weights = [nn.Parameter(on_a_card(level)) for _ in range(2)]
        optimizer = torch.optim.AdamW(weights)
        optimizers.convert(optimizer, levels.state_rule(recipe))
        offload.install(optimizer)
        for p in weights:
            p.grad = quantize(torch.empty(512, 512, device="cuda"), torch.float8_e4m3fn)
        with_gradients = held(weights, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        found = held(weights, optimizer)
        layer = nn.Linear(1, 1, device="meta")
        layer.weight = weights[0]
        saved = {"weight": weights[0].detach()}
        levels.export_plain(layer, saved, "", {})
        assert (type(saved["weight"]), saved["weight"].device.type) == (FakeTensor, "cpu")
    assert device <= found["cuda"] <= device + 0.01 and found["cpu"] <= host
    assert device + 1 <= with_gradients["cuda"] <= device + 1.01
    assert [p.device.type for p in weights] == ["cuda", "cuda"]
    tensors = [tensor for v in stepped for tensor in (v.weight, v.gradient, *v.state.values())]
    assert len(tensors) == 10 and {tensor.device.type for tensor in tensors} == {"cpu"}
    assert len(sent) == 4
    assert all((card.device.type, twin.device.type) == ("cuda", "cpu") for card, twin in sent)
    assert sum(twin.nbytes for _, twin in sent) / (2 * 512**2) <= device + 0.1


def test_buffers_are_few(monkeypatch):
    made = []
    empty = link.Link.empty

    def noted(self, shape, dtype):
        made.append((tuple(shape), dtype))
        return empty(self, shape, dtype)

    monkeypatch.setattr(link.Link, "empty", noted)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))
    run = prepared("O4", model=model, offload="states")
    train(*run, range(5))
    buffers = [shape for shape, dtype in made if dtype == torch.uint8 and shape != (0,)]
    assert len(buffers) <= offload.MOST_BUFFERS


def memory_of_unnamed_files(folder: Path) -> list[range]:
    """Return the addresses of mapped files that have no name any more."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = [line.split()[0] for line in lines if str(folder) in line and "(deleted)" in line]
    return [range(*(int(each, 16) for each in addresses.split("-"))) for addresses in mapped]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
@pytest.mark.parametrize("level", ["O2", "O3", "O4"])
def test_saved_values_take_no_second_copy_of_memory(level, tmp_path, monkeypatch):
    in_memory, in_files = {}, {}
    save = checkpointing.save

    def noted(values, path, **options):
        name = Path(path).name
        in_memory[name] = in_files[name] = 0
        places = memory_of_unnamed_files(tmp_path)
        for tensor in filter(torch.is_tensor, tree_leaves(values)):
            is_in_file = any(tensor.data_ptr() in place for place in places)
            (in_files if is_in_file else in_memory)[name] += tensor.nbytes
        save(values, path, **options)

    def run(**fields):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        recipe = fp8_backends.FP8RecipeKwargs(backend=f"msamp:{level}", **fields)
        accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[recipe])
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return accelerator, *accelerator.prepare(model, optimizer)

    monkeypatch.setattr(checkpointing, "save", noted)
    accelerator, model, optimizer = run(offload="states")
    train(model, optimizer, range(3))
    accelerator.save_state(str(tmp_path / "saved"))
    elements = sum(p.numel() for p in scaled(model))
    plain = sum(p.numel() for p in model.parameters()) - elements
    assert in_files["model.safetensors"] == 4 * elements
    assert in_files["optimizer.bin"] >= 4 * elements
    assert in_memory["model.safetensors"] == 4 * plain
    assert in_memory["optimizer.bin"] <= 8 * plain + 1000
    gc.collect()
    assert not memory_of_unnamed_files(tmp_path)
    expected = train(model, optimizer, range(3, 6))
    resumed, model, optimizer = run()
    resumed.load_state(str(tmp_path / "saved"))
    assert train(model, optimizer, range(3, 6)) == expected


def test_too_little_memory_is_found_at_prepare(monkeypatch):
    monkeypatch.setattr(offload, "free_memory", lambda: 20_000.0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    model = mlp()
    with pytest.raises(
        FP8BackendError, match=r"needs .* kB .* each of 2 ranks.* 20\.0 kB are free"
    ):
        prepared("O4", model=model, offload="states")


# Refusals


def test_elsewhere_it_is_refused_by_name():
    with pytest.raises(RecipeError, match=r"offload is not read by native.*level.*msamp:O2"):
        fp8_backends.resolve({"backend": "native:dynamic", "offload": "states"})
    with pytest.raises(RecipeError, match="offload"):
        fp8_backends.resolve({"backend": "msamp:O2", "offload": "weights"})
    model = mlp()
    with pytest.raises(FP8BackendError, match=r"offload=.*AdamW and Adam.*not of SGD"):
        prepared("O2", lambda p: torch.optim.SGD(p, 0.1), model, offload="states")
    assert not scaled(model)


def test_late_parameters_join():
    usual, ours = prepared("O4"), prepared("O4", offload="states")
    for model, optimizer in (usual, ours):
        train(model, optimizer, range(2))
        new = nn.Linear(64, 64)
        new.load_state_dict({"weight": torch.eye(64), "bias": torch.zeros(64)})
        model.append(new)
        optimizer.add_param_group({"params": list(new.parameters())})
        fields = {"offload": "states"} if optimizer is ours[1] else {}
        fp8_backends.prepare(model, optimizer, {"backend": "msamp:O4", **fields})
        train(model, optimizer, range(2, 5))
    assert_same(ours, usual)
    assert len(parameters_of(ours[1])) == 7


def test_copies_and_pickles_are_refused():
    _, optimizer = prepared("O2", offload="states")
    with pytest.raises(FP8BackendError, match="make a new one, prepare it, and load this one's"):
        copy.deepcopy(optimizer)
