"""Whole models on the native compute: training steps, checkpointing, compiled code, copies, with
weights plain or stored in scaled precision."""

import copy
import functools
import pickle

import pytest
import torch
from gpu_rules import GPURules
from model_families import batch, build, loss_of
from test_scaled_weights import (
    AUTOCASTS,
    COMPUTE,
    DTYPES,
    LAYERS,
    SCALINGS,
    STORED,
    autocast,
    prepared,
)
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from widths import nightly, nightly_but, one_each

from fp8_backends import prepare
from fp8_backends.compute.native.linear import FP8Linear
from fp8_backends.formats.scaling import WINDOW
from fp8_backends.tensors.scaled_tensor import ScaledTensor


class Block(nn.Module):
    """Feed two layers the same input, and one layer their output; optionally checkpointed."""

    def __init__(self, use_reentrant=None):
        super().__init__()
        self.use_reentrant = use_reentrant
        self.up, self.side, self.down = nn.Linear(32, 48), nn.Linear(32, 48), nn.Linear(48, 32)

    def inner(self, x):
        h = x * 1
        return x + self.down(torch.relu(self.up(h)) * self.side(h))

    def forward(self, x):
        return (
            self.inner(x)
            if self.use_reentrant is None
            else checkpoint(self.inner, x, use_reentrant=self.use_reentrant)
        )


class Gate(Block):
    """Keep only the two layers with the same input, since tracing takes time for each layer."""

    def __init__(self, use_reentrant=None):
        super().__init__(use_reentrant)
        del self.down

    def inner(self, x):
        h = x * 1
        return torch.relu(self.up(h)) * self.side(h)


def made(scaling, stored="plain", use_reentrant=None, kind=Block):
    torch.manual_seed(0)
    return prepared(kind(use_reentrant), scaling, STORED.get(stored))


def trained(model, compiler=None, steps=5):
    """(losses and gradient norms of steps with new weights, product counts, scaling states, graphs
    by step)"""
    layers = [layer for layer in model.modules() if isinstance(layer, FP8Linear)]
    graphs, compiled, numbers = [], [], []

    def count(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend(compiler)(graph, inputs)

    torch._dynamo.reset()
    forward = torch.compile(model, fullgraph=True, backend=count) if compiler else model
    for i in range(steps):
        x = torch.randn(4, 8, 32, generator=torch.Generator().manual_seed(i)).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = forward(x).float().pow(2).mean()
        loss.backward()
        numbers += [loss.item(), x.grad.norm().item()]
        with torch.no_grad():
            for layer in layers:
                assert (
                    type(layer.weight.grad) is torch.Tensor
                    and layer.weight.grad.dtype == torch.float32
                )
                numbers.append(layer.weight.grad.norm().item())
                values = layer.weight.detach()
                values = values.dequantize() if isinstance(values, ScaledTensor) else values
                layer.weight.copy_(values - 0.1 * layer.weight.grad)
        model.zero_grad()
        COMPUTE.after_optimizer_step(model)
        compiled.append(len(graphs))
    return (
        numbers,
        [layer.fp8_products.tolist() for layer in layers],
        COMPUTE.scaling_state(model),
        compiled,
    )


def update(loss, optimizer):
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def assert_same_states(states, others):
    assert states.keys() == others.keys() and all(
        torch.equal(state, others[name]) for name, state in states.items()
    )


@pytest.mark.nightly
@pytest.mark.parametrize("use_reentrant", [False, nightly(True)])
@LAYERS
def test_recomputation_uses_same_scales(scaling, stored, use_reentrant):
    """Match bitwise; count recomputation separately. The window rule reaches its delayed scales."""
    steps = WINDOW + 2 if scaling == "window" else 5
    numbers, counts, states, _ = trained(made(scaling, stored), steps=steps)
    again, again_counts, again_states, _ = trained(
        made(scaling, stored, use_reentrant), steps=steps
    )
    assert again == numbers
    assert_same_states(again_states, states)
    assert all(
        other[:3] == one[:3] and other[3] > 0
        for one, other in zip(counts, again_counts, strict=True)
    )


def gradients(model, training, then=lambda model: None):
    """The gradients of a forward in a mode, with a call between forward and backward."""
    model.train(training)
    model.zero_grad()
    x = torch.randn(4, 8, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    loss = model(x).float().pow(2).mean()
    then(model)
    loss.backward()
    return [x.grad, *(p.grad for p in model.parameters())]


def validate(model):
    model.eval()
    with torch.no_grad():
        model(torch.randn(8, 32))


@pytest.mark.parametrize("then", [nn.Module.eval, validate])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("scaling", nightly_but(["window", "blockwise"], SCALINGS))
def test_recomputation_runs_in_the_mode_of_the_first_forward(scaling, use_reentrant, then):
    wanted, recomputed = made(scaling), made(scaling, use_reentrant=use_reentrant)
    for _ in range(2):
        expected, found = gradients(wanted, True), gradients(recomputed, True, then)
        assert all(map(torch.equal, found, expected))
        assert_same_states(COMPUTE.scaling_state(recomputed), COMPUTE.scaling_state(wanted))
        for model in (wanted, recomputed):
            COMPUTE.after_optimizer_step(model)
    # and a forward in evaluation, after training
    expected = gradients(wanted, False)
    assert all(map(torch.equal, gradients(recomputed, False), expected))
    if not use_reentrant:
        assert all(map(torch.equal, gradients(recomputed, False, nn.Module.train), expected))


@pytest.mark.parametrize(
    "scaling,stored,use_reentrant",
    [
        ("window", "FP16", None),
        nightly("mxfp8", "plain", True),
        nightly("delayed", "E4M3", None),
        nightly("rowwise", "E4M3", None),
        nightly("dynamic", "FP16", None),
        nightly("blockwise", "FP16", None),
        nightly("mxfp8", "E4M3", None),
        nightly("delayed", "plain", False),
    ],
)
def test_compiled_training_matches_eager(scaling, stored, use_reentrant):
    """Match bitwise, without a graph break, and into the window rule's delayed scales. Compiled
    code counts each forward once, recomputed or not."""
    steps = WINDOW + 2 if scaling == "window" else 5
    numbers, counts, states, _ = trained(made(scaling, stored, kind=Gate), steps=steps)
    compiled = trained(made(scaling, stored, use_reentrant, kind=Gate), "aot_eager", steps)
    assert compiled[0] == numbers and compiled[1] == counts == [[steps, steps, steps, 0]] * 2
    assert_same_states(compiled[2], states)
    assert compiled[3][1] == compiled[3][-1], "compiled again in a later step"


@pytest.mark.nightly
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, nightly(lambda model: pickle.loads(pickle.dumps(model)))]
)
@LAYERS
def test_copies_train_independently(scaling, stored, copied):
    model = made(scaling, stored)
    other, before = copied(model), model.up.weight.detach().clone()
    found = trained(other)
    assert torch.equal(model.up.weight, before) and not model.up.fp8_products.any()
    expected = trained(model)
    assert found[:2] == expected[:2] and found[1] == [[5, 5, 5, 0]] * 3
    assert_same_states(found[2], expected[2])


@pytest.mark.nightly
@LAYERS
def test_meta_model_keeps_weight_form_and_starts_fresh(scaling, stored):
    torch.manual_seed(0)
    weights = Block().state_dict()
    with torch.device("meta"):
        model = Block()
    prepared(model, scaling, STORED.get(stored))
    COMPUTE.after_optimizer_step(model)  # does nothing yet
    assert all(layer.weight.is_meta for layer in (model.up, model.side, model.down))
    model.to_empty(device="cpu").load_state_dict(weights)
    if stored != "plain":
        assert (
            isinstance(model.up.weight, ScaledTensor)
            and model.up.weight.codes.dtype == STORED[stored]
        )
    numbers, counts, *_ = trained(model)
    assert numbers == trained(made(scaling, stored))[0] and counts == [[5, 5, 5, 0]] * 3


@pytest.mark.nightly
@pytest.mark.parametrize("dtype, autocast_dtype", one_each(DTYPES, AUTOCASTS))
@LAYERS
def test_whole_training_steps_are_valid_on_a_gpu(
    scaling, stored, dtype, autocast_dtype, monkeypatch
):
    model = prepared(Block(use_reentrant=False).to(dtype), scaling, STORED.get(stored))
    with GPURules(monkeypatch) as gpu:
        for _ in range(2):
            # 21 tokens: padded for wgrad
            x = torch.randn(3, 7, 32, dtype=dtype, requires_grad=True)
            with autocast(autocast_dtype):
                y = model(x)
            y.float().sum().backward()
            for p in model.parameters():
                assert (
                    type(p.grad) is torch.Tensor
                    and p.grad.shape == p.shape
                    and p.grad.dtype == dtype
                )
            model.zero_grad()
            COMPUTE.after_optimizer_step(model)
    # two steps of three layers: fprop, dgrad, wgrad, and fprop recomputed (not needed again for the
    # last layer)
    assert len(gpu.products) >= 2 * (3 * 3 + 2)


SAVED = [
    torch.ops.aten._scaled_mm.default,
    torch.ops.aten._scaled_mm_v2.default,
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]
"""The operators of the guide, with a CPU's attention."""


@pytest.mark.parametrize(
    "family, scaling",  # Conv1D and Linear, with biases
    nightly_but(
        [("gpt2", "window"), ("bert", "rowwise")],
        [(family, scaling) for family in ("gpt2", "bert") for scaling in SCALINGS],
    ),
)
def test_selective_checkpointing_saves_products(family, scaling, monkeypatch):
    """Products run once, and gradients do not change."""

    def run(selective):
        model = build(family)
        model, _ = prepare(model, None, f"native:{scaling}")
        if selective:
            contexts = functools.partial(create_selective_checkpoint_contexts, SAVED)
            model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
        with GPURules(monkeypatch) as gpu, torch.autocast("cpu", torch.bfloat16):
            loss_of(model, batch(family)).backward()
        return gpu.products, [p.grad for p in model.parameters()], COMPUTE.scaling_state(model)

    expected, wanted, states = run(False)
    products, gradients, other_states = run(True)
    assert len(products) == len(expected) > 0
    assert all(map(torch.equal, gradients, wanted))
    assert_same_states(other_states, states)


def test_selective_checkpointing_keeps_30_bytes(monkeypatch):
    """For each token and hidden feature of a Llama layer, as the guide says."""
    model, _ = prepare(
        build("llama", intermediate_size=128, num_key_value_heads=2), None, "native:dynamic"
    )
    saved = []

    def contexts():
        caching, cached = create_selective_checkpoint_contexts(SAVED)
        saved.append(caching.storage)
        return caching, cached

    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
    with GPURules(monkeypatch):
        loss_of(model, batch())
    tensors = [getattr(leaf, "val", None) for leaf in tree_leaves(saved)]
    kept = sum(
        tensor.nbytes
        for tensor in tensors
        if isinstance(tensor, torch.Tensor) and tensor.dim() != 3
    )
    tokens = batch()["input_ids"].numel()
    layers, hidden = model.config.num_hidden_layers, model.config.hidden_size
    # its input in bf16, too
    assert kept + 2 * layers * tokens * hidden == 30 * layers * tokens * hidden


@pytest.mark.parametrize(
    "backend",
    ["native:blockwise+msamp:O2", "native:mxfp8+msamp:O3"]
    + [f"native:{scaling}+msamp:O4" for scaling in ("rowwise", "blockwise", "mxfp8")],
)
def test_block_casts_read_stored_weights(backend):
    """Use sizes not divisible by a block. Losses equal those with one power of two per tensor to 2
    %."""
    losses = {}
    for each in (backend, "msamp" + backend[-3:]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(272, 303), nn.ReLU(), nn.Linear(303, 40))
        model, optimizer = prepare(model, torch.optim.AdamW(model.parameters(), 3e-3), each)
        x, target = torch.randn(77, 272), torch.randn(77, 40)
        for _ in range(10):
            loss = (model(x) - target).pow(2).mean()
            update(loss, optimizer)
        losses[each] = loss.item()
        assert model[0].fp8_products.tolist() == [10, 0, 10, 0] and model[
            2
        ].fp8_products.tolist() == [10, 10, 10, 0]
        assert model[0].weight.codes.dtype == (
            torch.float16 if each.endswith("O2") else torch.float8_e4m3fn
        )
    ours, others = losses.values()
    assert ours < 0.5 and abs(ours - others) < 0.02 * others


def test_scaling_state_rolls_once_per_training_forward():
    model, _ = prepare(nn.Sequential(nn.Linear(16, 16)), None, "native:delayed")
    layer, x = model[0], torch.randn(4, 16)
    rolls = []
    for training, grad in (
        (True, True),
        (True, True),
        (False, True),
        (True, False),
        (False, False),
        (True, True),
    ):
        model.train(training)
        before = layer.fp8_scaling.clone()
        with torch.set_grad_enabled(grad):
            y = model(x)
        if training and grad:
            y.sum().backward()
        else:
            assert torch.equal(layer.fp8_scaling, before)
        rolls.append(layer.fp8_scaling[0, 1].item())
    assert rolls == [0, 1, 1, 1, 1, 2]


def test_recomputed_submodule_rolls_its_state_once():
    """A checkpoint around a prepared part runs its forward again, inside backward."""
    part, _ = prepare(nn.Sequential(nn.Linear(16, 16)), None, "native:delayed")
    for step in range(3):
        x = torch.randn(4, 16, requires_grad=True)
        checkpoint(part, x, use_reentrant=False).sum().backward()
        assert part[0].fp8_scaling[0, 1].item() == step


def test_two_models_with_different_recipes_train_together():
    def make(backend):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
        return prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), backend)

    def step(model, optimizer, seed):
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(seed))
        loss = model(x).pow(2).mean()
        update(loss, optimizer)
        return loss.item()

    backends = ["native:delayed", "native:dynamic"]
    alone = [[step(*pair, seed) for seed in range(5)] for pair in map(make, backends)]
    pairs = [make(backend) for backend in backends]
    together = list(zip(*[[step(*pair, seed) for pair in pairs] for seed in range(5)], strict=True))
    assert [list(losses) for losses in together] == alone and alone[0] != alone[1]


@pytest.mark.nightly
@pytest.mark.parametrize("spec", [nightly("native:dynamic"), "msamp:O2"])
def test_dynamic_shapes_match_eager_bitwise(spec):
    """`dynamic=True` turns numbers in objects into variables, too, and a backward cannot lift
    them."""

    def train(compiled):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 48))
        model, optimizer = prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), spec)
        run = (
            torch.compile(model, dynamic=True, fullgraph=True, backend="aot_eager")
            if compiled
            else model
        )
        for tokens in (16, 7):
            loss = run(torch.linspace(-1, 1, 32 * tokens).view(tokens, 32)).square().mean()
            update(loss, optimizer)
        return model.state_dict()

    eager, compiled = train(False), train(True)
    assert all(torch.equal(value, eager[name]) for name, value in compiled.items())


class TwoParts(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = (
            nn.Sequential(nn.Linear(32, 32), nn.ReLU()),
            nn.Sequential(nn.Linear(32, 32)),
        )

    def forward(self, x):
        return self.decoder(self.encoder(x))


def states_of_three_steps(call, microbatches=1, compiler=None, backend="native:delayed"):
    """Losses and scaling states of three steps with gradients too small for scale 1."""
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
    return [loss.item() for loss in losses], COMPUTE.scaling_state(model)


def by_parts(model, x):
    return model.decoder(model.encoder(x))


@pytest.mark.nightly
@pytest.mark.parametrize("compiler", [None, "aot_eager"])
def test_scales_roll_when_a_loop_calls_submodules(compiler):
    losses, states = states_of_three_steps(nn.Module.__call__)
    found, found_states = states_of_three_steps(by_parts, compiler=compiler)
    assert found == losses and losses[2] < losses[0] < 1
    assert states.keys() == found_states.keys() and len(states) == 2
    assert all(torch.equal(state, found_states[name]) for name, state in states.items())


@pytest.mark.parametrize("whole", [False, True])
def test_a_frozen_part_without_gradients_keeps_its_scales_up_to_date(whole, monkeypatch):
    def run(differentiable):
        def forward(model, x):
            model.encoder.requires_grad_(False)
            with torch.set_grad_enabled(differentiable):
                h = model.encoder(x.detach())
            return model.decoder(h)

        monkeypatch.setattr(TwoParts, "forward", forward)
        return states_of_three_steps(nn.Module.__call__ if whole else forward)

    (losses, states), (expected, wanted) = run(False), run(True)
    assert losses == expected
    assert_same_states(states, wanted)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_microbatches_through_submodules_roll_once_per_step(checkpointed):
    """Recomputed or not, all microbatches of a step have the same scales."""

    def call(model, x):
        return (
            checkpoint(by_parts, model, x, use_reentrant=False)
            if checkpointed
            else by_parts(model, x)
        )

    _, states = states_of_three_steps(call, microbatches=2)
    assert [state[0, 1].item() for state in states.values()] == [3, 3]
    _, of_model = states_of_three_steps(nn.Module.__call__, microbatches=2)
    assert [state[0, 1].item() for state in of_model.values()] == [6, 6]
