"""Subclasses of Linear that only multiply, taken by their class's name in `include`."""

from __future__ import annotations

import pytest
import torch
from conversion_steps import take_steps
from torch import nn
from transformers import FalconConfig, FalconForCausalLM
from transformers.models.falcon.modeling_falcon import FalconLinear

import fp8_backends
from fp8_backends import RecipeError


def falcon() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return FalconForCausalLM(FalconConfig(**sizes, alibi=False)).train()


def with_plain_linears() -> nn.Module:
    model = falcon()
    for module in model.modules():
        if type(module) is FalconLinear:
            module.__class__ = nn.Linear
    return model


IDS = torch.arange(32).reshape(2, 16) * 5 % 64


def losses(model: nn.Module, **fields) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    fp8_backends.prepare(model, optimizer, {"backend": "native:dynamic", **fields})
    return take_steps(lambda: model(input_ids=IDS, labels=IDS).loss, optimizer, 4)


def test_named_class_trains_as_linear_and_audit_names_it():
    model = falcon()
    names = {name for name, module in model.named_modules() if type(module) is FalconLinear}
    found = losses(model, include="+FalconLinear")
    assert found == losses(with_plain_linears())
    audit = fp8_backends.audit(model)
    assert len(names) == 8 and audit.products.keys() == names
    assert audit.notes == dict.fromkeys(names, "a FalconLinear, multiplied as nn.Linear by include")
    assert "multiplied as nn.Linear by include" in str(audit)
    assert audit.high_precision.keys() == {"lm_head"}
    fp8_backends.prepare(model, None, {"backend": "native:dynamic", "include": "+FalconLinear"})
    fp8_backends.restore(model)
    assert {name for name, m in model.named_modules() if type(m) is FalconLinear} == names


def test_class_stays_in_high_precision_with_the_way_in_unless_named():
    model = nn.Sequential(falcon(), nn.Linear(32, 32))
    fp8_backends.prepare(model, None, {"backend": "native:dynamic", "include": ["*", "1"]})
    reasons = fp8_backends.audit(model).high_precision
    assert sum("include='+FalconLinear'" in reason for reason in reasons.values()) == 8


def test_class_without_include_of_others_converts_only_itself():
    model = nn.Sequential(falcon(), nn.Linear(32, 32))
    fp8_backends.prepare(model, None, {"backend": "native:dynamic", "include": "FalconLinear"})
    audit = fp8_backends.audit(model)
    assert len(audit.products) == 8 and audit.high_precision["1"] == "not named in include"


def test_named_class_keeps_other_obstacles():
    named = {"backend": "native:dynamic", "include": "+FalconLinear"}
    model = nn.Sequential(FalconLinear(32, 32), nn.Linear(32, 32))
    model[0].forward = lambda x: x
    with pytest.raises(RecipeError, match=r"FalconLinear' matches only .*forward was replaced"):
        fp8_backends.prepare(model, None, named)
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(FalconLinear(32, 32)), nn.ReLU())
    with pytest.raises(RecipeError, match="no weight of this model matches 'FalconLinear'"):
        fp8_backends.prepare(model, None, named)
    with pytest.raises(RecipeError, match="no weight of this model matches 'FalconLinaer'"):
        fp8_backends.prepare(falcon(), None, {"backend": "native", "include": "+FalconLinaer"})
