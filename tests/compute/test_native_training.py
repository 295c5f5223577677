"""Whole native models: compiled, checkpointed, traced for a GPU; the proof by counters holds in each."""

import copy

import pytest
import torch
from gpu_rules import GPURules
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8_backends import prepare
from fp8_backends.compute.native.backend import NativeCompute
from fp8_backends.compute.native.linear import FP8Linear

SCALINGS = ["native:dynamic", "native:delayed", "native:rowwise", "native:blockwise", "native:mxfp8"]


class Block(nn.Module):
    """A feed-forward block whose two first layers read the same input; optionally checkpointed."""

    def __init__(self, use_reentrant=None):
        super().__init__()
        self.use_reentrant = use_reentrant
        self.norm = nn.LayerNorm(64)
        self.up, self.side = nn.Linear(64, 96), nn.Linear(64, 96)
        self.down = nn.Linear(96, 64)

    def inner(self, x):
        h = self.norm(x)
        return x + self.down(torch.relu(self.up(h)) * self.side(h))

    def forward(self, x):
        if self.use_reentrant is None:
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


class Gate(Block):
    """The layers that read the same input alone: tracing takes as long as there are layers."""

    def __init__(self, use_reentrant=None):
        super().__init__(use_reentrant)
        del self.down

    def inner(self, x):
        h = self.norm(x)
        return torch.relu(self.up(h)) * self.side(h)


class Ungated(Block):
    """A layer behind the norm, and one whose input comes out of the middle of the block."""

    def __init__(self, use_reentrant=None):
        super().__init__(use_reentrant)
        del self.side

    def inner(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def train(backend, use_reentrant=None, compiler=None, steps=6, blocks=1, kind=Block):
    """Losses, counters by layer, delayed states by layer, and how many graphs were compiled after each step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*[kind(use_reentrant) for _ in range(blocks)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer = prepare(model, optimizer, backend)
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend(compiler)(graph, inputs)

    run = torch.compile(model, fullgraph=True, backend=count) if compiler else model
    losses, compiled = [], []
    for step in range(steps):
        x = torch.randn(4, 8, 64, generator=torch.Generator().manual_seed(step)).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = run(x).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        compiled.append(len(graphs))
    layers = {name: m for name, m in model.named_modules() if isinstance(m, FP8Linear)}
    counts = {name: m.fp8_products.tolist() for name, m in layers.items()}
    states = NativeCompute().scaling_state(model)
    return losses, counts, states, compiled


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend,use_reentrant",
    [("native:delayed", False), ("native:rowwise", None), ("native:mxfp8", True)],  # others: test_scaled_weights.py
)
def test_counts_and_losses_under_compile_equal_eagers(backend, use_reentrant):
    """Fullgraph, so no graph breaks; compiled code counts each forward once, eager counts recomputation apart."""
    losses, counts, states, _ = train(backend, kind=Gate)
    assert all(count == [6, 6, 6, 0] for count in counts.values()) and len(counts) == 2
    compiled_losses, compiled_counts, compiled_states, compiled = train(backend, use_reentrant, "aot_eager", kind=Gate)
    assert compiled_losses == losses
    assert compiled_counts == counts
    assert all(torch.equal(states[name], compiled_states[name]) for name in states)
    assert compiled[1] == compiled[-1], "recompiled as steps went by"


@pytest.mark.slow
def test_inductor_trains_alike():
    """Delayed scaling: test_compiled_orders.py. Blocks: test_scaling_blocks.py."""
    losses, counts, _, _ = train("native:dynamic", kind=Ungated)
    inductor_losses, inductor_counts, _, compiled = train("native:dynamic", None, "inductor", kind=Ungated)
    assert inductor_counts == counts and len(counts) == 2 and compiled[1] == compiled[-1]
    # other orders of summation in LayerNorm and in the products: bf16 losses agree to 1 %
    assert torch.allclose(torch.tensor(losses), torch.tensor(inductor_losses), rtol=1e-2)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("backend", SCALINGS)
def test_checkpointing_recomputes_with_the_same_scales(backend, use_reentrant):
    """Losses, and so gradients, equal those without checkpointing to the bit; recomputation is counted apart."""
    losses, counts, states, _ = train(backend, blocks=2)
    again_losses, again_counts, again_states, _ = train(backend, use_reentrant, blocks=2)
    assert again_losses == losses
    assert all(torch.equal(states[name], again_states[name]) for name in states)
    for name, count in again_counts.items():
        assert count[:3] == counts[name][:3] and count[3] > 0


@pytest.mark.parametrize(
    "backend",
    ["native:blockwise+msamp:O2", "native:mxfp8+msamp:O3"]
    + [f"native:{scaling}+msamp:O4" for scaling in ("rowwise", "blockwise", "mxfp8")],
)
def test_blocks_are_made_of_the_weights_that_a_level_stores(backend):
    """On sizes that no block fits. The losses are those of one power of two for a tensor, to 2 %: all values but the
    smallest are the same."""
    losses = {}
    for each in (backend, "msamp" + backend[-3:]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(272, 303), nn.ReLU(), nn.Linear(303, 40))
        model, optimizer = prepare(model, torch.optim.AdamW(model.parameters(), 3e-3), each)
        x, target = torch.randn(77, 272), torch.randn(77, 40)
        for _ in range(10):
            loss = (model(x) - target).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses[each] = loss.item()
        assert model[0].fp8_products.tolist() == [10, 0, 10, 0] and model[2].fp8_products.tolist() == [10, 10, 10, 0]
        assert model[0].weight._data.dtype == (torch.float16 if each.endswith("O2") else torch.float8_e4m3fn)
    ours, others = losses.values()
    assert ours < 0.5 and abs(ours - others) < 0.02 * others


def test_scaling_state_rolls_once_a_training_forward_and_never_in_evaluation():
    model, _ = prepare(nn.Sequential(nn.Linear(16, 16)), None, "native:delayed")
    layer, x = model[0], torch.randn(4, 16)
    rolls = []
    for training, grad in ((True, True), (True, True), (False, True), (True, False), (False, False), (True, True)):
        model.train(training)
        with torch.set_grad_enabled(grad):
            y = model(x)
        if training and grad:
            y.sum().backward()
        rolls.append(layer.fp8_scaling[0, 1].item())
    assert rolls == [0, 1, 1, 1, 1, 2]


def test_a_prepared_part_that_is_recomputed_rolls_its_state_once():
    """Checkpointing around a prepared part runs its forward again, inside backward: not another training forward."""
    part, _ = prepare(nn.Sequential(nn.Linear(16, 16)), None, "native:delayed")
    for step in range(3):
        x = torch.randn(4, 16, requires_grad=True)
        checkpoint(part, x, use_reentrant=False).sum().backward()
        assert part[0].fp8_scaling[0, 1].item() == step


def test_two_models_with_two_recipes_train_side_by_side():
    """No process-wide state: interleaving two models changes neither."""

    def make(backend):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
        return prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), backend)

    def step(model, optimizer, seed):
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(seed))
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    backends = ["native:delayed", "native:dynamic"]
    alone = [[step(*pair, seed) for seed in range(5)] for pair in map(make, backends)]
    pairs = [make(backend) for backend in backends]
    together = list(zip(*[[step(*pair, seed) for pair in pairs] for seed in range(5)], strict=True))
    assert [list(losses) for losses in together] == alone and alone[0] != alone[1]


def test_an_ema_copy_and_a_teacher_keep_their_own_state():
    student = nn.Sequential(nn.Linear(16, 16))
    student, optimizer = prepare(student, torch.optim.SGD(student.parameters(), 0.1), "native:delayed")
    x = torch.randn(8, 16)
    student(x).sum().backward()
    optimizer.step()
    teacher = copy.deepcopy(student).eval()
    state = teacher[0].fp8_scaling.clone()
    for _ in range(3):
        with torch.no_grad():
            target = teacher(x)
        (student(x) - target).pow(2).mean().backward()
        optimizer.step()
    assert torch.equal(teacher[0].fp8_scaling, state) and not torch.equal(student[0].fp8_scaling, state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast_dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", SCALINGS)
def test_whole_training_steps_are_valid_on_a_gpu(backend, autocast_dtype, dtype, monkeypatch):
    model = Block(use_reentrant=False).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = prepare(model, optimizer, backend)
    with GPURules(monkeypatch) as gpu:
        for _ in range(2):
            x = torch.randn(3, 7, 64, dtype=dtype, requires_grad=True)  # 21 tokens: padded for wgrad
            with torch.autocast("cpu", dtype=autocast_dtype, enabled=autocast_dtype is not None):
                y = model(x)
            y.float().sum().backward()
            assert all(p.grad.shape == p.shape and p.grad.dtype == dtype for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
    # two steps of three layers: fprop, dgrad, wgrad, and fprop recomputed (the last layer's is not needed again)
    assert len(gpu.products) >= 2 * (3 * 3 + 2)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["native:dynamic", "msamp:O2"])
def test_compiled_code_with_sizes_as_variables_equals_eager_code_to_the_bit(spec):
    """`dynamic=True` makes variables of numbers that lie in objects, too, and a backward can lift none of them."""

    def train(compiled):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 48))
        model, optimizer = prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), spec)
        run = torch.compile(model, dynamic=True, fullgraph=True, backend="aot_eager") if compiled else model
        for tokens in (16, 7):
            loss = run(torch.linspace(-1, 1, 32 * tokens).view(tokens, 32)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    eager, compiled = train(False), train(True)
    assert all(torch.equal(value, eager[name]) for name, value in compiled.items())


class TwoParts(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Sequential(nn.Linear(32, 32), nn.ReLU()), nn.Sequential(nn.Linear(32, 32))

    def forward(self, x):
        return self.decoder(self.encoder(x))


def states_of_three_steps(call, microbatches=1, compiler=None, backend="native:delayed"):
    """Losses and scaling states of three steps, whose gradients are too small for scale 1."""
    torch.manual_seed(0)
    model = TwoParts()
    model, optimizer = prepare(model, torch.optim.SGD(model.parameters(), 1e3), backend)
    if compiler:
        torch._dynamo.reset()
        for part in (model.encoder, model.decoder):
            part.compile(fullgraph=True, backend=compiler)
    losses, data = [], torch.randn(3, microbatches, 16, 32)
    for step in data:
        for x in step:
            losses.append(call(model, x.requires_grad_()).square().mean() * 1e-4)
            losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses], NativeCompute().scaling_state(model)


def by_parts(model, x):
    return model.decoder(model.encoder(x))


@pytest.mark.parametrize("compiler", [None, "aot_eager"])
def test_scales_follow_the_layers_where_a_loop_calls_parts_of_the_model(compiler):
    losses, states = states_of_three_steps(nn.Module.__call__)
    found, found_states = states_of_three_steps(by_parts, compiler=compiler)
    assert found == losses and losses[2] < losses[0] < 1
    assert states.keys() == found_states.keys() and len(states) == 2
    assert all(torch.equal(state, found_states[name]) for name, state in states.items())


@pytest.mark.parametrize("checkpointed", [False, True])
def test_microbatches_through_parts_of_the_model_roll_once_an_optimizer_step(checkpointed):
    """All microbatches of a step see the same scales, also recomputed."""

    def call(model, x):
        return checkpoint(by_parts, model, x, use_reentrant=False) if checkpointed else by_parts(model, x)

    _, states = states_of_three_steps(call, microbatches=2)
    assert [state[0, 1].item() for state in states.values()] == [3, 3]
    _, of_model = states_of_three_steps(nn.Module.__call__, microbatches=2)
    assert [state[0, 1].item() for state in of_model.values()] == [6, 6]
