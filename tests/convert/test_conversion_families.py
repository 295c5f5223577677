"""Conversion and training of five families of transformers, small configurations."""

import pytest
import torch
from conversion_steps import convert
from model_families import LAYERS, WIDTH, batch, build, loss_of, train

from fp8_backends.errors import FP8BackendError

BACKENDS = {
    "gpt_neox": "native:delayed",
    "llama": "ao:tensorwise",
    "bert": "native:rowwise",
    "gpt2": "ao:tensorwise",
    "mixtral": "native:dynamic",
}
STEPS = 8

# per block: converted layers by name, and forward FLOPs per token of all weights
CONVERTED = {
    "gpt_neox": [
        "attention.query_key_value",
        "attention.dense",
        "mlp.dense_h_to_4h",
        "mlp.dense_4h_to_h",
    ],
    "llama": [f"self_attn.{x}_proj" for x in "qkvo"]
    + [f"mlp.{x}_proj" for x in ("gate", "up", "down")],
    "bert": [f"attention.self.{x}" for x in ("query", "key", "value")]
    + ["attention.output.dense", "intermediate.dense", "output.dense"],
    "gpt2": ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"],
    "mixtral": [f"self_attn.{x}_proj" for x in "qkvo"]
    + ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
BLOCKS = {"gpt_neox": "gpt_neox.layers", "bert": "bert.encoder.layer", "gpt2": "transformer.h"}
BLOCKS |= dict.fromkeys(("llama", "mixtral"), "model.layers")


def names_in_blocks(family, names):
    return [f"{BLOCKS[family]}.{i}.{name}" for i in range(LAYERS) for name in names]


def assert_trained(model, before, losses):
    """The loss fell and every parameter moved: none was lost to the optimizer."""
    assert losses[-1] < losses[0] - 0.2
    for name, parameter in model.named_parameters():
        assert not torch.equal(parameter, before[name]), f"{name} did not move"


def assert_products(prepared, model, steps=STEPS):
    layers = prepared.compute.converted_layers(model)
    assert sorted(layers) == sorted(prepared.report.converted)
    for name in prepared.report.converted:
        if prepared.compute.name == "native":
            assert layers[name].fp8_products.tolist() == [steps, steps, steps, 0], name


@pytest.mark.parametrize(("family", "backend"), BACKENDS.items())
def test_model_family_trains_with_converted_blocks(family, backend):
    """Losses near the high-precision ones and not equal to them; every parameter moves; ties, names
    and keys stay."""
    model, plain = build(family), build(family)
    keys, parameters = list(model.state_dict()), list(map(id, model.parameters()))
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    prepared = convert(model, backend)

    expected = names_in_blocks(family, CONVERTED[family])
    extra = ["cls.predictions.transform.dense"] if family == "bert" else []
    assert prepared.report.converted == expected + extra
    assert (
        "output head"
        in prepared.report.high_precision[
            "cls.predictions.decoder" if family == "bert" else "lm_head"
        ]
    )
    losses = train(model, optimizer, family, STEPS)
    assert_trained(model, before, losses)
    assert_products(prepared, model)
    reference = train(plain, torch.optim.AdamW(plain.parameters(), lr=3e-3), family, STEPS)
    assert losses != reference
    assert max(abs(a - b) for a, b in zip(losses, reference, strict=True)) < 0.05
    assert list(model.state_dict()) == keys and list(map(id, model.parameters())) == parameters
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
    assert tied == (family in ("bert", "gpt2"))


@pytest.mark.parametrize("backend", ["native:delayed", "ao:tensorwise"])
def test_included_tied_head_runs_in_fp8_and_stays_tied(backend):
    model = build("gpt2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    prepared = convert(model, backend, include=["lm_head"])
    kinds = {product.name: product.kind for product in prepared.report.products}
    assert prepared.report.converted == ["lm_head"] and kinds["lm_head"] == "head"
    convs = names_in_blocks("gpt2", ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"])
    assert prepared.report.high_precision == dict.fromkeys(convs, "not named in include")
    assert {kinds[name] for name in convs} == {"Conv1D"}
    sizes = {
        p.name.split(".", 3)[-1]: (p.in_features, p.out_features) for p in prepared.report.products
    }
    assert sizes["attn.c_attn"] == (WIDTH, 3 * WIDTH) and sizes["mlp.c_proj"] == (4 * WIDTH, WIDTH)
    losses = train(model, optimizer, "gpt2", STEPS)
    assert_trained(model, before, losses)
    assert_products(prepared, model)
    assert model.lm_head.weight is model.transformer.wte.weight


def test_including_unsupported_weights_is_an_error_with_reason():
    model, plain = build("mixtral"), build("mixtral")
    with pytest.raises(
        FP8BackendError, match="include: 'gate' .*multiplies by this Parameter itself"
    ):
        convert(model, include=["q_proj", "gate"])
    assert loss_of(model, batch()).item() == loss_of(plain, batch()).item()
    prepared = convert(model, include=["q_proj"], exclude=["*.1.*"])
    assert prepared.report.converted == ["model.layers.0.self_attn.q_proj"]
    losses = train(model, torch.optim.AdamW(model.parameters(), lr=3e-3), "mixtral", STEPS)
    assert losses[-1] < losses[0]
    assert_products(prepared, model)


def test_a_sequence_classifier_converts_all_but_its_head():
    """A sequence classifier: the head is found by its name, the pooler converts."""
    import transformers

    config = build("bert").config
    config.num_labels = 3
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config).train()
    prepared = convert(model)
    assert list(prepared.report.high_precision) == ["classifier"]
    data = batch("bert")
    data["labels"] = torch.arange(4) % 3
    loss_of(model, data).backward()
    assert_products(prepared, model, steps=1)
