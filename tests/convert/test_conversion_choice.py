"""Choose layers for FP8, leave others in high precision, and report the reasons."""

import copy

import pytest
import torch
import torch.nn.utils.prune
from conversion_steps import BACKENDS, assert_ran_in_fp8, convert, counts, learns, train
from torch import nn

from fp8_backends.compute.native.scaling_states import Ledger
from fp8_backends.convert.conversion import prepared_roots
from fp8_backends.errors import FP8BackendError, RecipeError


class Language(nn.Module):
    """A model with an embedding, a router, look-alikes of routers, and a head under a chosen
    name."""

    def __init__(self, head="lm_head", tie=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(32, 32)
        self.block = nn.ModuleDict(
            {name: nn.Linear(32, 32) for name in ("gate", "gate_proj", "router_proj", "up")}
        )
        self.head_name = head
        setattr(self, head, nn.Linear(32, 32, bias=False))
        if tie:
            getattr(self, head).weight = self.embed.weight

    def forward(self, x):
        x = x.float().softmax(-1) @ self.embed.weight
        for layer in self.block.values():
            x = x + torch.tanh(layer(x))
        return getattr(self, self.head_name)(x)


class Declared(Language):
    def get_output_embeddings(self):
        return self.anything


HIDDEN = ["block.gate_proj", "block.router_proj", "block.up"]


@pytest.mark.parametrize(
    "model",
    [
        Language("lm_head"),
        Language("score"),
        Language("output"),
        Language("anything", tie=True),
        Declared("anything"),
        nn.Sequential(Declared("anything")),
    ],
    ids=[
        "name",
        "sequence classification",
        "child of the root",
        "tied",
        "declared",
        "declared inside a wrapper",
    ],
)
def test_head_and_router_stay_in_high_precision(model):
    prepared = convert(model)
    prefix = "0." if isinstance(model, nn.Sequential) else ""
    assert prepared.report.converted == [prefix + name for name in HIDDEN]
    kinds = {
        product.name: product.kind for product in prepared.report.products if product.state != "fp8"
    }
    assert sorted(kinds.values()) == ["head", "router"] and kinds[f"{prefix}block.gate"] == "router"
    assert all(
        "kept in high precision" in reason for reason in prepared.report.high_precision.values()
    )
    learns(model)
    assert_ran_in_fp8(prepared, model, 8)


def test_head_names_count_only_for_children_of_root():
    model = nn.Sequential(Language("output"))
    assert "0.output" in convert(model).report.converted
    learns(model)
    assert counts(model[0].output) == [8, 8, 8, 0]


@pytest.mark.parametrize(
    "fields, converted",
    [
        ({"include": ["*"]}, ["block.gate", *HIDDEN, "lm_head"]),
        ({"include": ["*"], "exclude": ["gate"]}, [*HIDDEN, "lm_head"]),
        ({"include": ["lm_head", "block.u*"]}, ["block.up", "lm_head"]),
        ({"exclude": ["block.gate_*"]}, ["block.router_proj", "block.up"]),
        ({"exclude": ["*_proj"]}, ["block.up"]),
        ({"include": ["block.up"], "exclude": ["lm_head"]}, ["block.up"]),
        ({"include": ["+lm_head"]}, [*HIDDEN, "lm_head"]),
        (
            {"include": ["+gate", "+up"], "exclude": ["block.router_proj"]},
            ["block.gate", "block.gate_proj", "block.up"],
        ),
        ({"include": ["+*"], "exclude": ["lm_head"]}, ["block.gate", *HIDDEN]),
        ({"module_filter_func": lambda module, name: name.endswith("head")}, ["lm_head"]),
        (
            {"module_filter_func": lambda module, name: "_" in name, "exclude": ["lm_head"]},
            HIDDEN[:2],
        ),
        (
            {"module_filter_func": lambda module, name: "_" in name, "include": ["*head"]},
            ["lm_head"],
        ),
    ],
)
def test_the_users_choice_of_layers_is_followed(fields, converted):
    """Patterns and filter override the default exclusions; `exclude` wins. All layers train, chosen
    or not."""
    model = Language()
    before = copy.deepcopy(model.state_dict())
    prepared = convert(model, **fields)
    assert prepared.report.converted == converted
    learns(model)
    assert_ran_in_fp8(prepared, model, 8)
    assert all(not torch.equal(before[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("field, added", [("include", ""), ("include", "+"), ("exclude", "")])
def test_a_pattern_without_a_match_is_an_error_with_close_names(field, added):
    model = Language()
    with pytest.raises(RecipeError, match=rf"{field}: .*'gate_prj'.*'gate_proj'"):
        convert(model, **{field: [f"{added}up", f"{added}gate_prj"]})
    assert not any("_fp8_conversion" in module.__dict__ for module in model.modules())
    plain = Language()
    assert train(model) == train(plain), "a refused conversion leaves the model as it was"


# unconvertible layers


class OwnLinear(nn.Linear):
    pass


def double():
    """Return an FP64 layer, out of reach of autocast."""
    linear = nn.Linear(32, 32, dtype=torch.float64)
    linear.register_forward_pre_hook(lambda module, args: (args[0].double(),))
    return linear


def with_attribute_in_the_way():
    linear = nn.Linear(32, 32)
    linear.fp8_rule = "mine"
    return linear


UNCONVERTIBLE = {
    "subclass": (lambda: OwnLinear(32, 32), "OwnLinear is a subclass"),
    "parametrized": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(32, 32)),
        "parametrized",
    ),
    "pruned": (
        lambda: nn.utils.prune.random_unstructured(nn.Linear(32, 32), "weight", 0.5),
        "no Parameter",
    ),
    "lazy": (lambda: nn.LazyLinear(32), "no size yet"),
    "double": (double, "float64"),
    "attribute": (with_attribute_in_the_way, "fp8_rule of its own"),
}


@pytest.mark.parametrize("case", UNCONVERTIBLE)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_high_precision_is_the_fallback_layer_by_layer(case):
    """House rule 4: an unsupported layer is named, keeps its behaviour and trains; its siblings
    convert."""
    build, reason = UNCONVERTIBLE[case]
    torch.manual_seed(0)
    odd = build()
    odd_type, attributes = type(odd), set(odd.__dict__)
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), odd, nn.Tanh(), nn.Linear(32, 16))
    prepared = convert(model)
    assert prepared.report.converted == ["0", "4"]
    assert (
        list(prepared.report.high_precision) == ["2"]
        and reason in prepared.report.high_precision["2"]
    )
    assert type(odd) is odd_type and set(odd.__dict__) == attributes
    if case == "lazy":
        model(torch.zeros(1, 32))
        assert type(odd) is nn.Linear
        for layer in (model[0], model[4]):
            layer.fp8_ledger = Ledger(layer.weight.device)
    weights = [p.detach().clone() for p in model.parameters()]
    learns(model)
    assert all(not torch.equal(p, old) for p, old in zip(model.parameters(), weights, strict=True))
    assert_ran_in_fp8(prepared, model, 8)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_integer_and_empty_layers_are_named_and_skipped():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 16)
            self.integer = nn.Linear(32, 32)
            self.integer.weight = nn.Parameter(
                torch.ones(32, 32, dtype=torch.int8), requires_grad=False
            )
            self.to_nothing, self.from_nothing = nn.Linear(32, 0), nn.Linear(0, 16)

        def forward(self, x):
            x = torch.tanh(self.up(x)) + self.integer.weight.float().mean()
            return self.down(x) + self.from_nothing(self.to_nothing(x))

    model = Model()
    prepared = convert(model)
    assert prepared.report.converted == ["up", "down"]
    assert "int8" in prepared.report.high_precision["integer"]
    assert "size zero" in prepared.report.high_precision["to_nothing"]
    assert "size zero" in prepared.report.high_precision["from_nothing"]
    learns(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01))
    assert counts(model.up) == [8, 0, 8, 0]


def test_attention_with_functional_products_is_named_and_trains():
    """`nn.MultiheadAttention` never calls its out_proj, and multiplies by in_proj_weight itself."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(32, 2, dim_feedforward=64, dropout=0.0, batch_first=True)
    prepared = convert(model)
    assert prepared.report.converted == ["linear1", "linear2"]
    kinds = {
        product.name: (product.kind, product.out_features) for product in prepared.report.products
    }
    assert kinds["self_attn.in_proj_weight"] == ("parameter", 96) and kinds[
        "self_attn.out_proj"
    ] == ("Linear", 32)
    assert prepared.report.flops_share == pytest.approx(2 * 32 * 64 / (2 * 32 * 64 + 4 * 32 * 32))
    weights = [p.detach().clone() for p in model.parameters()]
    learns(model)
    assert all(not torch.equal(p, old) for p, old in zip(model.parameters(), weights, strict=True))
    assert_ran_in_fp8(prepared, model, 8)


def test_listed_experts_count_by_the_visits_of_a_token():
    class Mixture(nn.Module):
        def __init__(self, config=None):
            super().__init__()
            self.config = config
            self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

        def forward(self, x):
            return x + self.experts[0](x) + self.experts[3](x)

    class Config:
        num_experts_per_tok = 2

    for config, flops in ((None, 2 * 32 * 32), (Config(), 2 * 32 * 32 * 2 / 4)):
        model = nn.Sequential(nn.Linear(32, 32), Mixture(config))
        prepared = convert(model)
        assert [product.flops for product in prepared.report.products] == [
            2 * 32 * 32,
            *[flops] * 4,
        ]
        learns(model)
        experts = model[1].experts
        assert [counts(expert)[0] for expert in experts] == [8, 0, 0, 8]


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_to_convert_raises_or_warns_with_reasons(backend):
    model = nn.Sequential(OwnLinear(32, 32))
    with pytest.raises(FP8BackendError, match="OwnLinear is a subclass"):
        convert(model, backend)
    assert prepared_roots(model) == []
    with pytest.warns(UserWarning, match="OwnLinear is a subclass"):
        convert(model, backend, on_unproven="warn")
    learns(model)
    with pytest.raises(FP8BackendError, match="no Linear"):
        convert(nn.Embedding(4, 4), backend)


# the report


def test_the_report_lists_states_and_reasons():
    model = nn.Sequential(Language())
    prepared = convert(model, exclude=["up"])
    text = str(prepared.report)
    assert text.splitlines() == [
        "2 of 5 weights in FP8, 40 % of weight FLOPs",
        "  in FP8: 0.block.gate_proj, 0.block.router_proj",
        f"  {prepared.report.high_precision['0.block.gate']}: 0.block.gate",
        "  left out by exclude='up': 0.block.up",
        f"  {prepared.report.high_precision['0.lm_head']}: 0.lm_head",
    ]
    assert prepared.report.flops_share == pytest.approx(0.4)
    train(model, steps=1)
    assert (
        sum(
            counts(layer)[0] > 0
            for layer in model.modules()
            if prepared.compute.is_converted(layer)
        )
        == 2
    )


def test_report_groups_repeated_layers():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32)) for _ in range(100)])
    text = str(convert(model).report)
    assert "*.0 (x100)" not in text and "*.* (x100)" in text and len(text) < 200
