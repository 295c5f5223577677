"""Families of transformers, small configurations, trained at a level next to high precision."""

import pytest
import torch
from model_families import FAMILIES, build, train

import fp8_backends
from fp8_backends.tensors.scaled_tensor import ScaledTensor

STEPS = 8


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "level"),
    list(zip(FAMILIES, ("O2", "O4", "O3", "O3", "O2"), strict=True)),
)
def test_model_family_trains_at_level(family, level):
    """GPT-2 with its tied head: the embedding reads the scaled weight too."""
    model, plain = build(family), build(family)
    keys, parameters = list(model.state_dict()), list(map(id, model.parameters()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    fields = {"include": ["*"]} if family == "gpt2" else {}
    fp8_backends.prepare(model, optimizer, {"backend": f"msamp:{level}", **fields})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    losses = train(model, optimizer, family, STEPS)
    reference = train(plain, torch.optim.AdamW(plain.parameters(), lr=3e-3), family, STEPS)
    assert max(abs(a - b) for a, b in zip(losses, reference, strict=True)) < 0.06
    assert losses[-1] < losses[0] - 0.2
    assert list(model.state_dict()) == keys and list(map(id, model.parameters())) == parameters
    after = model.state_dict()
    assert not [
        name for name, p in model.named_parameters() if torch.equal(after[name], before[name])
    ]
    scaled = [name for name, p in model.named_parameters() if isinstance(p, ScaledTensor)]
    assert scaled and len(scaled) <= len(fp8_backends.audit(model).products)
    if family == "gpt2":
        assert model.lm_head.weight is model.transformer.wte.weight and isinstance(
            model.lm_head.weight, ScaledTensor
        )
