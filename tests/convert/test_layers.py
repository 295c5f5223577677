"""`layers`: another backend or bf16 by name patterns. The oracle is a model whose layers are
prepared one by one."""

import copy

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import fp8_backends
from fp8_backends import FP8RecipeKwargs, resolve
from fp8_backends.errors import RecipeError

LAYERS = {
    "*.down_proj": "native:mxfp8",
    "first": 1,
    "*.[qk]_proj": "native:rowwise",
    "lm_head": "native:blockwise",
}


def llama(blocks: int = 3) -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=blocks, **shape))


def train(model: nn.Module, optimizer, steps: int = 3, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 64, (2, 16), generator=generator)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def prepared(spec, blocks: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = llama(blocks)
    return fp8_backends.prepare(model, torch.optim.AdamW(model.parameters(), 1e-3), spec)


def expected_backend(name: str, base: str, layers: dict) -> str | None:
    """Return the backend of a Llama's layer by `LAYERS`, written by hand."""
    if name.endswith("down_proj"):
        return layers["*.down_proj"]
    if ".layers.0." in name:
        return None
    if name.endswith(("q_proj", "k_proj")):
        return layers["*.[qk]_proj"]
    return layers["lm_head"] if name == "lm_head" else base


@pytest.mark.parametrize(
    ("base", "other"),
    [
        ("native:window", "ao:rowwise"),
        ("native:delayed", "native:rowwise"),
        ("ao:tensorwise", "native:rowwise"),
    ],
)
def test_mixed_layers_equal_layers_prepared_one_by_one(base, other):
    layers = {**LAYERS, "*.[qk]_proj": other}
    by_hand = llama()
    optimizer = torch.optim.AdamW(by_hand.parameters(), 1e-3)
    for name, module in list(by_hand.named_modules()):
        if (
            isinstance(module, nn.Linear)
            and (backend := expected_backend(name, base, layers)) is not None
        ):
            include = {"include": ["*"]} if name == "lm_head" else {}
            fp8_backends.prepare(module, optimizer, {"backend": backend, **include})
    mixed = prepared({"backend": base, "layers": layers})
    assert train(*mixed) == train(by_hand, optimizer)
    assert all(
        torch.equal(a, b) for a, b in zip(mixed[0].parameters(), by_hand.parameters(), strict=True)
    )


def test_report_proof_and_audit_name_the_layers(capsys):
    model, optimizer = prepared({"backend": "native:dynamic", "layers": LAYERS})
    train(model, optimizer, 1)
    name = "native:dynamic + 3 layers mxfp8 + 4 rowwise + 1 blockwise + 6 bf16"
    assert f"{name}: 16/22 Linear" in capsys.readouterr().err
    audit = fp8_backends.audit(model)
    assert audit.recipe == name
    assert audit.high_precision["model.layers.0.self_attn.q_proj"] == "in bf16 by layers"
    assert "native:mxfp8" in repr(model.model.layers[0].mlp.down_proj)
    assert "native:blockwise" in repr(model.lm_head)


@pytest.mark.parametrize("level", ["O2", "O4"])
def test_layers_share_the_level_of_the_model(level):
    """Weights of all rules are stored alike, and the run resumes to the bit."""
    spec = {"backend": f"native:delayed+msamp:{level}", "layers": LAYERS}
    model, optimizer = prepared(spec)
    plain = [
        name
        for name, p in model.named_parameters()
        if p.dim() == 2 and type(p.data) is torch.Tensor
    ]
    assert len([name for name in plain if "embed" not in name]) == 6
    train(model, optimizer, 2)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    losses = train(model, optimizer, 2, first=2)
    resumed, its_optimizer = prepared(spec)
    resumed.load_state_dict(saved[0])
    its_optimizer.load_state_dict(saved[1])
    assert train(resumed, its_optimizer, 2, first=2) == losses


def test_another_choice_of_layers_is_another_recipe():
    model, optimizer = prepared({"backend": "native:delayed", "layers": {"last": 1}})
    with pytest.raises(RecipeError, match="they differ in layers"):
        fp8_backends.prepare(model, optimizer, "native:delayed")
    saved = optimizer.state_dict()
    other, its_optimizer = prepared({"backend": "native:delayed", "layers": {"first": 1}})
    with pytest.raises(
        fp8_backends.FP8BackendError, match="layers was {'last': 1} and is {'first': 1} now"
    ):
        its_optimizer.load_state_dict(saved)


def test_wide_pattern_leaves_heads_and_routers_in_high_precision():
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 64}
    model = MixtralForCausalLM(
        MixtralConfig(num_hidden_layers=2, num_local_experts=2, num_key_value_heads=2, **shape)
    )
    wide = copy.deepcopy(model)
    fp8_backends.prepare(wide, None, {"backend": "native", "layers": {"*": "native:rowwise"}})
    assert set(fp8_backends.audit(wide).high_precision) == {
        "lm_head",
        "model.layers.0.mlp.gate.weight",
        "model.layers.1.mlp.gate.weight",
    }
    with pytest.raises(RecipeError, match="experts of one module share one backend"):
        fp8_backends.prepare(
            model, None, {"backend": "native", "layers": {"*.gate_up_proj": "native:mxfp8"}}
        )


@pytest.mark.parametrize(
    "written",
    [
        '{"*.mlp.*": "native:mxfp8", "first": 1}',
        "{'*.mlp.*': 'Native:MXFP8', 'first': '1'}",
        " *.mlp.* = native:mxfp8 , first=1 ",
        {"*.mlp.*": "native:mxfp8", "first": 1},
    ],
)
def test_spellings_of_layers(written):
    recipe = resolve({"backend": "native", "layers": written})
    assert recipe.layers == {"*.mlp.*": "native:mxfp8", "first": 1}
    assert recipe == FP8RecipeKwargs(backend="native", layers=recipe.layers) != resolve("native")


@pytest.mark.parametrize(
    ("backend", "layers", "said"),
    [
        ("native", "lm_head", "must have COMPUTE.* for 'lm_head', not ''"),
        ("native", "a=bf16, a=native", "must name each key once"),
        ("native", {}, "must be a mapping such as"),
        ("native", {"a": 1}, "must have COMPUTE.* for 'a', not 1"),
        ("native", {"first": 0}, "whole number of at least 1"),
        ("native", {"a": "nativ"}, "unknown backend 'nativ'.*did you mean"),
        ("native", {"a": "auto"}, "must have COMPUTE"),
        ("native", {"a": "msamp:O2"}, "backend names the level, one for the whole model"),
        ("msamp:O2", {"a": "ao"}, "layers: .*ao goes with O0 only"),
        (
            "native:delayed",
            {"a": "native:window"},
            "keep scales from step to step; a model has one such rule",
        ),
        ("te", {"a": "te:mxfp8"}, "TransformerEngine runs a forward under one recipe"),
        ("ao:rowwise", {"a": "ao:rowwise_with_gw_hp"}, "same products in high precision"),
        (
            {"backend": "native", "use_autocast_during_eval": True},
            {"a": "ao"},
            "layers: use_autocast_during_eval is not",
        ),
    ],
)
def test_contradictory_layers_are_refused_by_name(backend, layers, said):
    fields = backend if isinstance(backend, dict) else {"backend": backend}
    with pytest.raises(RecipeError, match=said):
        resolve({**fields, "layers": layers})


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        (
            {"*.dawn_proj": "bf16"},
            "layers: no weight of this model matches '\\*.dawn_proj'.*down_proj",
        ),
        ({"first": 3}, "layers: first=3, and this model has 3 numbered blocks"),
        ({"*": "bf16"}, "no layer of this model can run in FP8"),
    ],
)
def test_layers_without_a_match_are_refused_and_change_nothing(layers, said):
    model = llama()
    with pytest.raises(fp8_backends.FP8BackendError, match=said):
        fp8_backends.prepare(model, None, {"backend": "native", "layers": layers})
    assert type(model.lm_head) is nn.Linear is type(model.model.layers[0].mlp.up_proj)


def test_layers_named_first_and_last_are_named_by_backend_and_blocks_by_number():
    model = nn.ModuleDict(
        {"first": nn.Linear(32, 32), "0": nn.Linear(32, 32), "1": nn.Linear(32, 32)}
    )
    recipe = {"backend": "native", "layers": {"first": "native:mxfp8", "last": 1}}
    assert resolve(recipe).layers == {"first": "native:mxfp8", "last": 1}
    fp8_backends.prepare(model, None, recipe)
    assert (
        "mxfp8" in repr(model["first"])
        and type(model["1"]) is nn.Linear
        and "dynamic" in repr(model["0"])
    )


def test_exclude_overrides_layers_and_layers_override_include():
    fields = {
        "include": ["*.q_proj"],
        "exclude": ["*.v_proj"],
        "layers": {"*.[kv]_proj": "native:rowwise"},
    }
    model, _ = prepared({"backend": "native", **fields})
    converted = {name.rpartition(".")[2] for name in fp8_backends.audit(model).products}
    assert converted == {"q_proj", "k_proj"}


def test_a_layer_keeps_fields_that_its_rule_reads():
    recipe = resolve(
        {
            "backend": "native:delayed",
            "amax_history_len": 4,
            "fp8_format": "E4M3",
            "layers": {"a": "native"},
        }
    )
    of_layers = recipe.by_backend["native"]
    assert (
        of_layers.name == "native:dynamic"
        and of_layers.fp8_format == "E4M3"
        and of_layers.layers is None
    )
    assert resolve({"backend": "native", "layers": {"lm_head": "native:dynamic"}}).recipes[1:] == ()
