"""Saved activations in FP8: the packed tensors, errors of gradients, and combinations with other
features."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import threading
import weakref

import model_families
import pytest
import torch
from conversion_steps import take_steps
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

import fp8_backends
from fp8_backends.convert import saved_activations
from fp8_backends.convert.saved_activations import (
    FEWEST_TO_SAVE,
    NODES,
    ValuesFunction,
    packed,
    saved_bytes,
)
from fp8_backends.errors import FP8BackendError, RecipeError
from fp8_backends.recipes.handlers import resolve

WIDTH, LENGTH = 64, 64
SIZES = {
    "llama": {"hidden_size": WIDTH, "intermediate_size": 128, "max_position_embeddings": LENGTH},
    "mixtral": {"hidden_size": WIDTH, "intermediate_size": 128, "max_position_embeddings": LENGTH},
    "bert": {"hidden_size": WIDTH, "intermediate_size": 128, "max_position_embeddings": LENGTH},
    "gpt2": {"n_embd": WIDTH, "n_positions": LENGTH},
}
IDS = torch.randint(128, (2, LENGTH), generator=torch.Generator().manual_seed(0))


def prepared(
    family: str = "llama", value: str = "fp8", backend: str = "native:dynamic", config=(), **fields
):
    """Return a tiny model in training mode, with activations large enough to pack."""
    model = model_families.build(family, **{**SIZES[family], **dict(config)})
    recipe = fp8_backends.FP8RecipeKwargs(backend=backend, saved_activations=value, **fields)
    fp8_backends.prepare(model, None, recipe)
    return model


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(input_ids=IDS, labels=IDS).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def in_force():
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


class Product(nn.Module):
    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(gate) * up


class Gated(nn.Module):
    """A norm, a gated product and a residual branch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.product = nn.LayerNorm(WIDTH), Product()
        self.gate, self.up = nn.Linear(WIDTH, 128), nn.Linear(WIDTH, 128)
        self.down = nn.Linear(128, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.down(self.product(self.gate(h), self.up(h)))


def blocks(value: str = "fp8", kind: type[nn.Module] = Gated, **fields) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(kind(), kind())
    return fp8_backends.prepare(
        model, None, fp8_backends.NativeRecipeKwargs(saved_activations=value, **fields)
    )[0]


def rows(seed: int = 0) -> torch.Tensor:
    return torch.randn(
        128, WIDTH, generator=torch.Generator().manual_seed(seed), requires_grad=True
    )


class Computes(nn.Module):
    """Compute a test's function as part of a model."""

    def __init__(self, function) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.function(*inputs)


def computes(function) -> nn.Sequential:
    return blocks(kind=functools.partial(Computes, function))


# errors of gradients


@pytest.mark.parametrize(
    ("family", "value"), [("llama", "fp8+attention"), ("gpt2", "fp8"), ("bert", "fp8+attention")]
)
def test_layer_gradients_are_within_a_sixteenth_of_exact(family, value):
    """Run all but the last layer in FP32, so only packing changes gradients."""
    head = {"bert": "cls.predictions.transform.dense"}.get(family, "lm_head")
    exact, packed = (gradients(prepared(family, each, include=[head])) for each in ("off", value))
    for layer in ("0.", "1."):
        names = [name for name in exact if f".{layer}" in name]
        off = torch.stack([(packed[name] - exact[name]).norm() for name in names]).norm()
        assert 0 < off <= 2**-4 * torch.stack([exact[name].norm() for name in names]).norm()


def test_floating_point_dropout_mask_is_not_packed():
    model, found = computes(lambda x: nn.functional.dropout(x, 0.05)), []
    for hooks in (saved_tensors_hooks(lambda x: x.detach(), lambda x: x), contextlib.nullcontext()):
        x = rows()
        torch.manual_seed(0)
        with hooks:  # hooks of others win: exact
            y = model[0](x)
        y.square().sum().backward()
        found.append(x.grad)
    assert saved_bytes(model).tensors == 0 and torch.equal(*found)


# selected tensors


def long_llama(value: str, backend: str | None):
    """A Llama of the usual proportions with a sequence of 512 tokens, its head left out."""
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    model = LlamaModel(
        LlamaConfig(vocab_size=64, use_cache=False, max_position_embeddings=512, **sizes)
    )
    if backend is not None:
        fp8_backends.prepare(
            model, None, fp8_backends.FP8RecipeKwargs(backend=backend, saved_activations=value)
        )
    return model, torch.randint(64, (1, 512))


def kept_bytes(value: str = "off", backend: str | None = None) -> int:
    """Return the bytes alive between forward and backward under bf16 autocast, as counted by the
    allocator, without copies of weights: autocast's in bf16, or their codes."""
    model, ids = long_llama(value, backend)
    with torch.autocast("cpu", torch.bfloat16):
        model(ids)  # objects loaded by a first forward stay
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(ids).last_hidden_state
    events = profiled.profiler.kineto_results.events()
    weights = sum(layer.weight.numel() for layer in model.modules() if isinstance(layer, nn.Linear))
    kept = sum(event.nbytes() for event in events if event.name() == "[memory]")
    assert output.requires_grad
    return kept - weights * (2 if backend is None else 1)


def test_llama_saves_at_most_half_the_bytes_of_bf16():
    bf16 = kept_bytes()
    assert kept_bytes(backend="msamp:O2") > 0.8 * bf16
    assert kept_bytes("fp8", "msamp:O2") < 0.44 * bf16
    assert kept_bytes("fp8+attention", "msamp:O2") < 0.39 * bf16


@pytest.mark.parametrize("activation", [nn.SiLU(), nn.GELU(), nn.GELU("tanh")], ids=str)
def test_activation_result_is_recomputed_from_input_codes(activation):
    """The result takes no memory: backward recomputes the function from the decoded input."""

    class Gates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.activation = activation

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.kept = self.gate(x), self.up(x)
            return self.down(self.activation(self.kept[0]) * self.kept[1])

    model = nn.Sequential(Gates())
    fp8_backends.prepare(model, None, fp8_backends.NativeRecipeKwargs(saved_activations="fp8"))
    y = model(rows())
    assert (
        saved_bytes(model).tensors == 3 and saved_bytes(model).bytes == 2 * 128 * WIDTH * 33 // 32
    )
    gate, up = model[0].kept
    (came_in,) = torch.autograd.grad(y.sum(), [up], retain_graph=True)
    # but for the casts of the product
    incoming = torch.ones(len(y), WIDTH) @ model[0].down.weight.detach()
    read = packed(gate.detach()).unpacked(gate.shape)
    cosine = torch.cosine_similarity(
        came_in.flatten(), (incoming * activation(read)).flatten(), dim=0
    )
    assert cosine > 0.999


def saved_by_nodes(result: torch.Tensor) -> list[tuple[str, torch.Tensor | saved_activations.Held]]:
    """Every tensor between forward and backward, or the codes in its place, with the name of its
    node."""
    found, seen, left = [], set(), [result.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        left += [each for each, _ in node.next_functions]
        fields = [getattr(node, name) for name in dir(node) if name.startswith("_raw_saved_")]
        tensors = [
            raw for field in fields for raw in (field if isinstance(field, tuple) else (field,))
        ]
        found += [
            (node.name(), raw.data) for raw in tensors if getattr(raw, "data", None) is not None
        ]
    return found


def test_statistics_masks_weights_and_expanded_tensors_are_not_packed():
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 48)
            self.table = nn.Parameter(torch.randn(128, WIDTH))
            self.register_buffer("mask", torch.randn(128, WIDTH))

        def forward(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
            routed = self.router(x).softmax(-1)
            x = (
                x * self.table
                + self.table * self.mask
                + x * self.table.t().reshape(-1, WIDTH)[:128]
            )
            x = x * x.norm(dim=-1, keepdim=True) * given * x[:1].expand(128, -1)
            return x * routed.sum(-1, keepdim=True) + self.linear(x)

    model, given, x = blocks(kind=Mixed), torch.randn(128, WIDTH), rows() * 1
    kept = [data for name, data in saved_by_nodes(model[0](x, given)) if name == "MulBackward0"]
    whole = [data for data in kept if isinstance(data, torch.Tensor)]
    storages = {data.data_ptr() for data in whole}
    assert {each.data_ptr() for each in (model[0].table, model[0].mask, given)} <= storages
    assert any(0 in data.stride() for data in whole) and {data.shape[-1:] for data in whole} >= {
        (1,),
        (WIDTH,),
    }
    packed = [data for data in kept if not isinstance(data, torch.Tensor)]
    assert len(packed) > 3 and {tuple(data.shape) for data in packed} == {(128, WIDTH)}


@pytest.mark.parametrize(
    ("family", "value"),
    [("llama", "fp8"), ("bert", "fp8"), ("gpt2", "fp8+attention"), ("mixtral", "fp8+attention")],
)
def test_models_pack_listed_nodes_and_attention_on_request(family, value):
    result = prepared(family, value)(input_ids=IDS, labels=IDS).loss
    packed = {
        name for name, data in saved_by_nodes(result) if isinstance(data, saved_activations.Held)
    }
    listed = {
        name for name, kept in NODES.items() if value == "fp8+attention" or not kept.attention
    }
    norms = "NativeLayerNormBackward0" if family in ("bert", "gpt2") else "PowBackward0"
    assert norms in packed <= listed
    assert any(name.startswith("ScaledDotProduct") for name in packed) == (value == "fp8+attention")


# compatible settings


def test_graph_without_backward_is_freed():
    """A kept result references its node, and the node its saved tensors."""
    results = []

    def notes(x: torch.Tensor) -> torch.Tensor:
        y = x.mean(-1, keepdim=True).exp()
        results.append(weakref.ref(y))
        return x * y

    computes(notes)[0](rows())
    gc.collect()
    assert results[0]() is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations_are_not_packed(reentrant):
    off, on = prepared(value="off"), prepared()
    for model in (off, on):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    gradients(on)
    assert saved_bytes(on).tensors == 2  # of the last norm, never recomputed
    for model in (off, on):
        model.model.norm = nn.Identity()
    assert equal(gradients(off), gradients(on)) and saved_bytes(on).tensors == 0


@pytest.mark.nightly
@pytest.mark.parametrize("what,backend,tensors", [("block", "eager", 0), ("gate", "aot_eager", 2)])
def test_compiled_code_is_not_packed(what, backend, tensors):
    """Leave tensors saved by AOTAutograd unchanged, pack eager code around it, and share code among
    equal blocks."""
    found, graphs = {}, {}
    for value in ("off", "fp8"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model, x = blocks(value, include=["down"]), rows()
        for part in model if what == "block" else [block.product for block in model]:
            part.compile(backend=backend)
        model(x * 1).sum().backward()
        found[value] = {name: p.grad for name, p in model.named_parameters()}
        graphs[value] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs["off"] == graphs["fp8"] == 1
    assert saved_bytes(model).tensors == tensors
    assert equal(found["off"], found["fp8"]) == (tensors == 0)
    for name, exact in found["off"].items():
        assert (found["fp8"][name] - exact).norm() <= 2**-4 * exact.norm(), name


def test_foreign_saved_tensor_hooks_take_precedence():
    off, on = blocks("off"), blocks()
    found = []
    for model in (off, on):
        x = rows()
        with save_on_cpu():
            y = model(x)
        y.sum().backward()
        found.append(x.grad)
    assert torch.equal(*found) and saved_bytes(on).tensors == 0


def test_backward_runs_twice_through_a_retained_graph():
    model, x = blocks(), rows()
    y = model(x).sum()
    first, second = (torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_second_derivative_is_refused_in_training_and_exact_in_evaluation():
    model, x = computes(lambda x: x.sin() * x), rows()
    with pytest.raises(FP8BackendError, match="create_graph=True: what was kept in FP8"):
        torch.autograd.grad(model[0](x).sum(), x, create_graph=True)
    model.eval()
    (first,) = torch.autograd.grad(model[0](x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.allclose(second, 2 * x.cos() - x * x.sin(), atol=1e-5)


def test_fp64_is_not_packed_for_gradcheck():
    model = computes(lambda x: nn.functional.silu(x.expand(FEWEST_TO_SAVE // 4, -1) * 1)[:2])
    x = torch.randn(1, WIDTH, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(model[0], x, fast_mode=True)
    assert saved_bytes(model).tensors == 0


def test_transforms_and_gradientless_forwards_are_not_packed():
    model, x = computes(lambda x: (x * 1).square()), rows().detach()
    assert torch.allclose(torch.func.grad(lambda x: model[0](x).sum())(x), 2 * x)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            model(x)
    assert saved_bytes(model).tensors == 0 and in_force() is None


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_failed_forward_leaves_no_hooks(error):
    def fail(x: torch.Tensor) -> torch.Tensor:
        raise error

    model, twin, x = blocks(), blocks(), rows()
    model[1].down.register_forward_pre_hook(lambda _, args: fail(*args) if failing else None)
    failing = True
    with pytest.raises(error):
        model(rows())
    failing = False
    assert in_force() is None
    assert torch.equal(*(torch.autograd.grad(each(x).sum(), x)[0] for each in (model, twin)))
    assert saved_bytes(model) == saved_bytes(twin)


def test_codes_are_freed_as_backward_reads_them():
    """Codes of one large part: autograd keeps its tensors to the end of backward."""
    codes, left, packed = [], [], saved_activations.packed

    def deep(x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = (0.1 * x).square()
            x.register_hook(lambda _: left.append(sum(each() is not None for each in codes)))
        return x

    def noted(tensor, centers):
        values = packed(tensor, centers)
        codes.append(weakref.ref(values.quantized.codes))
        return values

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved_activations, "packed", noted)
        result = computes(deep)[0](rows() * 1).sum()
    result.backward()
    assert len(codes) == 8 and left == sorted(left, reverse=True) and left[-1] <= 2


def test_threads_pack_independently():
    model, found = blocks(), {}
    (alone,) = torch.autograd.grad(model(x := rows()).sum(), x)

    def train(number: int) -> None:
        for _ in range(5):
            (found[number],) = torch.autograd.grad(model(x := rows()).sum(), x)

    threads = [threading.Thread(target=train, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(gradient, alone) for gradient in found.values()) and len(found) == 3


def test_copy_packs_independently_and_restore_removes_hooks():
    model = prepared()
    twin = copy.deepcopy(model)
    assert equal(gradients(model), gradients(twin))
    assert saved_bytes(twin) == saved_bytes(model) and saved_bytes(twin) is not saved_bytes(model)
    fp8_backends.restore(twin)
    assert saved_bytes(twin) is None
    tables = (
        "_forward_pre_hooks",
        "_forward_hooks",
        "_forward_hooks_always_called",
        "_forward_pre_hooks_with_kwargs",
    )
    assert not any(getattr(module, table) for module in twin.modules() for table in tables)
    assert saved_bytes(model).tensors > 0


def test_saved_activations_off_costs_nothing():
    modules = prepared(value="off").modules()
    assert not [module for module in modules if module._forward_hooks or module._forward_pre_hooks]


def test_preparing_again_packs_added_layers():
    model = blocks()
    model.append(Gated())
    recipe = fp8_backends.NativeRecipeKwargs(saved_activations="fp8")
    fp8_backends.prepare(model, None, recipe)
    model(rows() * 1)
    three = saved_bytes(model).tensors
    fp8_backends.prepare(model, None, recipe)
    model(rows() * 1)
    (two := blocks())(rows() * 1)
    assert saved_bytes(model).tensors == three == 3 * saved_bytes(two).tensors // 2


def test_custom_function_is_packed_on_request():
    class Square:
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, grad):
            return 2 * ctx.saved_tensors[0] * grad

    class Exact(Square, torch.autograd.Function):
        pass

    class Says(Square, ValuesFunction):
        pass

    found = {}
    for function in (Exact, Says):
        model, x = computes(function.apply), rows()
        model[0](x * 1).sum().backward()
        found[function] = (saved_bytes(model).tensors, torch.equal(x.grad, 2 * x.detach()))
    assert found == {Exact: (0, True), Says: (1, False)}


@pytest.mark.parametrize("backend", ["ao:tensorwise", "msamp:O3"])
def test_any_backend_and_level_trains(backend):
    model = model_families.build("llama", **SIZES["llama"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    recipe = fp8_backends.FP8RecipeKwargs(backend=backend, saved_activations="fp8")
    fp8_backends.prepare(model, optimizer, recipe)
    losses = take_steps(lambda: model(input_ids=IDS, labels=IDS).loss, optimizer, 4)
    assert losses[-1] < losses[0]
    assert saved_bytes(model).tensors > 0


@pytest.mark.parametrize("value", ["", "none", False, "OFF", "off", "false"])
def test_off_accepts_every_spelling(value):
    assert resolve({"backend": "native", "saved_activations": value}).saved_activations == "off"


def test_other_values_are_refused_by_name():
    with pytest.raises(RecipeError, match="saved_activations must be one of off, fp8, fp8"):
        resolve({"backend": "native", "saved_activations": "int4"})


def test_audit_reports_saved_bytes():
    model = prepared()
    assert fp8_backends.audit(model).saved_activations == {
        "tensors": 0,
        "bytes": 0,
        "plain_bytes": 0,
    }
    gradients(model)
    audit = fp8_backends.audit(model)
    # again, in backward
    computed = model.config.num_hidden_layers * IDS.numel() * model.config.intermediate_size * 4
    packed_bytes = audit.saved_activations["plain_bytes"] - computed
    assert packed_bytes * 33 == audit.saved_activations["bytes"] * 32 * 4  # all were FP32
    assert "activations kept in FP8: 16 tensors, 152.1 kB in place of 720.9 kB" in str(audit)
    assert fp8_backends.audit(prepared(value="off")).saved_activations == {}
