"""Store frozen weights as TransformerEngine's FP8 tensors (`fp8_params`), over the stand-in for its
kernels."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from accelerate import Accelerator
from te_models import BATCHES, Adapted, losses
from torch import nn

import fp8_backends
from fp8_backends import FP8BackendError, RecipeError, TERecipeKwargs, prepare
from fp8_backends.compute.te.weights import is_frozen
from fp8_backends.convert import conversion


def prepared(made=None, **fields):
    made = Adapted() if made is None else made
    optimizer = torch.optim.AdamW(made.adapter.parameters(), lr=1e-2)
    return prepare(made, optimizer, TERecipeKwargs(exclude=["adapter"], **fields))


def weights(made) -> list[torch.Tensor]:
    return [layer.weight for layer in made.base.modules() if isinstance(layer, nn.Linear)]


@pytest.mark.parametrize("scaling", ["dynamic", "blockwise"])
def test_frozen_weights_are_cast_once_and_losses_stay_unchanged(scaling):
    made, optimizer = prepared(scaling=scaling, fp8_params=True)
    assert all(map(is_frozen, weights(made)))
    assert losses(made, optimizer) == losses(*prepared(scaling=scaling))


def test_delayed_scaling_uses_scales_of_the_weight_amax():
    """The first step without fp8_params casts every weight by the scale 1, later ones as fp8_params
    does."""
    made, optimizer = prepared(fp8_params=True)
    found = losses(made, optimizer)
    gaps = [abs(a - b) for a, b in zip(found, losses(*prepared()), strict=True)]
    assert max(gaps) < 0.01 and found[-1] < found[0]


def test_frozen_parameters_stay_and_take_two_bytes():
    made = Adapted()
    made.base.blocks[1].up.weight = made.base.blocks[0].up.weight
    before, values = list(made.parameters()), copy.deepcopy(made.state_dict())
    _, optimizer = prepared(made, fp8_params=True)
    assert all(a is b for a, b in zip(before, made.parameters(), strict=True))
    assert all(
        isinstance(weight, nn.Parameter) and not weight.requires_grad for weight in weights(made)
    )
    assert made.base.blocks[1].up.weight is made.base.blocks[0].up.weight
    losses(made, optimizer, BATCHES[:1])
    measured = fp8_backends.audit(made, optimizer)
    # codes, the transposed copy for Hopper's dgrad, and a scale
    assert 2 < measured.bytes_per_element["weight"] < 2.01
    assert measured.dtypes["weight"] == "uint8"
    frozen = values["base.first.weight"]
    # steps of E4M3, and of its smallest numbers
    half_a_step = frozen.abs() * 2**-4 + frozen.abs().max() / 448 * 2**-10
    assert ((made.base.first.weight.dequantize() - frozen).abs() <= half_a_step).all()


def test_checkpoints_are_plain_and_load_both_ways():
    made, _ = prepared(scaling="dynamic", fp8_params=True)
    saved = made.state_dict()
    assert {type(tensor) for tensor in saved.values()} == {torch.Tensor}
    Adapted().load_state_dict(saved, strict=True)
    larger = {name: 10 * tensor for name, tensor in saved.items()}
    made.load_state_dict(larger)
    assert all(map(is_frozen, weights(made)))
    assert torch.allclose(made.state_dict()["base.first.weight"], larger["base.first.weight"])
    made.load_state_dict(saved, assign=True)
    assert all(map(is_frozen, weights(made)))
    assert torch.equal(made.state_dict()["base.first.weight"], saved["base.first.weight"])


def test_writes_to_state_dict_copies_raise_at_next_read():
    made, optimizer = prepared(fp8_params=True)
    for read in (
        lambda: losses(made, optimizer, BATCHES[:1]),
        made.state_dict,
        lambda: conversion.restore(made),
    ):
        made.state_dict()["base.first.weight"].zero_()
        with pytest.raises(
            FP8BackendError, match="base.first.weight: a tensor of state_dict.. was written to"
        ):
            read()
    state = made.state_dict()
    state["base.first.weight"].mul_(0.5)
    made.load_state_dict(state)
    assert losses(made, optimizer)


def test_copies_train_like_the_original():
    made, optimizer = prepared(scaling="dynamic", fp8_params=True)
    copies = copy.deepcopy(made), pickle.loads(pickle.dumps(made))
    expected = losses(made, optimizer)
    for other in copies:
        assert all(is_frozen(w) and isinstance(w, nn.Parameter) for w in weights(other))
        own = torch.optim.AdamW(other.adapter.parameters(), lr=1e-2)
        assert losses(other, own) == expected


def test_evaluation_and_restore_use_code_values():
    made, _ = prepared(fp8_params=True)
    plain = Adapted()
    plain.load_state_dict(made.state_dict())
    assert torch.equal(made.eval()(BATCHES[0]), plain.eval()(BATCHES[0]))
    before, codes = weights(made), [weight.dequantize() for weight in weights(made)]
    with fp8_backends.checkpoints.plain_weights(made):
        assert all(type(weight) is nn.Parameter for weight in weights(made))
        assert torch.equal(made(BATCHES[0]), plain(BATCHES[0]))
    assert all(map(is_frozen, weights(made))) and all(
        map(torch.equal, codes, (w.dequantize() for w in weights(made)))
    )
    assert all(a is b for a, b in zip(before, weights(made), strict=True))
    conversion.restore(made)
    assert all(a is b for a, b in zip(before, weights(made), strict=True))
    assert all(type(weight) is nn.Parameter for weight in before)
    assert torch.equal(made(BATCHES[0]), plain(BATCHES[0]))


def test_trainable_weight_is_refused_without_changing_model():
    made = Adapted()
    made.base.last.requires_grad_(True)
    with pytest.raises(RecipeError, match=r"32 -> 32 trains.*te\+msamp:O4.*exclude"):
        prepared(made, fp8_params=True)
    assert type(made.base.first) is nn.Linear and not made._forward_hooks
    frozen, optimizer = prepared(fp8_params=True)
    frozen.base.last.weight.requires_grad_(True)
    with pytest.raises(RecipeError, match="32 -> 32 trains"):
        losses(frozen, optimizer)


def test_unsupported_fp8_weights_are_refused_by_name():
    with torch.device("meta"):
        on_meta = Adapted()
    with pytest.raises(RecipeError, match="meta device"):
        prepared(on_meta, fp8_params=True)
    tied = Adapted()
    tied.base.embedding = nn.Embedding(32, 32)
    tied.base.embedding.weight = tied.base.first.weight
    with pytest.raises(FP8BackendError, match="base.first is that of base.embedding.*exclude"):
        prepared(tied, fp8_params=True, include=["base.*"])


def test_fp8_params_train_through_accelerate(monkeypatch, tmp_path):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    fp8_backends.connect()
    handler = TERecipeKwargs(scaling="dynamic", fp8_params=True, exclude=["adapter"])
    acc = Accelerator(mixed_precision="fp8", kwargs_handlers=[handler])
    made = Adapted()
    made, optimizer = acc.prepare(made, torch.optim.AdamW(made.adapter.parameters(), lr=1e-2))
    found = []
    for batch in BATCHES:
        loss = (made(batch) - batch).square().mean()
        acc.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    assert found == losses(*prepared(scaling="dynamic"))
    acc.save_state(str(tmp_path))
    acc.load_state(str(tmp_path))
    assert all(map(is_frozen, weights(made)))
