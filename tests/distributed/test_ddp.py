"""The parameters of a level that DDP ignores, on one process."""

from __future__ import annotations

import copy

import torch
from torch import nn

import fp8_backends
from fp8_backends.comm.ddp import IGNORE_LIST, leaves_nothing
from fp8_backends.convert.conversion import restore


def prepared(spec: str = "msamp:O2") -> nn.Sequential:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32, bias=False))
    return fp8_backends.prepare(model, None, spec)[0]


def test_prepared_model_lists_parameters_ignored_by_ddp():
    of_level = getattr(prepared(), IGNORE_LIST)
    assert {"0.weight", "1.weight"} <= set(of_level) and "0.bias" not in of_level
    assert not hasattr(prepared("native:delayed"), IGNORE_LIST)


def test_restored_model_clears_parameters_ignored_by_ddp():
    model = prepared()
    restore(model)
    assert not hasattr(model, IGNORE_LIST) and not any(
        hasattr(p, "_ddp_ignored") for p in model.parameters()
    )
    with_a_list = nn.Sequential(nn.Linear(32, 32))
    setattr(with_a_list, IGNORE_LIST, ["0.bias"])
    fp8_backends.prepare(with_a_list, None, "msamp:O2")
    assert {"0.bias", "0.weight"} <= set(copy.deepcopy(getattr(with_a_list, IGNORE_LIST)))
    restore(with_a_list)
    assert getattr(with_a_list, IGNORE_LIST) == ["0.bias"]


def test_model_without_plain_parameters_leaves_ddp_nothing():
    model = prepared()
    assert not leaves_nothing(model), "a bias is left"
    model[0].bias.requires_grad_(False)
    assert leaves_nothing(model)
    assert not leaves_nothing(model.requires_grad_(False)), "nothing trains: no DDP"


def test_one_process_needs_no_connection():
    model = prepared()
    optimizer = torch.optim.AdamW(model.parameters())
    fp8_backends.prepare(model, optimizer, "msamp:O2")
    model(torch.randn(4, 32)).sum().backward()
    optimizer.step()
