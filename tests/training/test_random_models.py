"""Random models are prepared, trained, saved, loaded into plain PyTorch and restored: all of it is right, or an error
of this package says what to do.

`FP8_BACKENDS_RANDOM_MODELS=1000` tries so many; `FP8_BACKENDS_RANDOM_SEED=412` one alone.
"""

from __future__ import annotations

import io
import os
import random
import traceback
import warnings

import pytest
import torch
from random_models import RandomModel
from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

import fp8_backends
from fp8_backends import FP8BackendError
from fp8_backends.numerics.scaled_tensor import ScaledTensor
from fp8_backends.training import conversion

SPECS = ("native:dynamic", "native:delayed", "ao:tensorwise", "msamp:O1", "msamp:O2", "msamp:O3")
COUNT = int(os.environ.get("FP8_BACKENDS_RANDOM_MODELS", "60"))
GROUPS = 6

REFUSED, DONE = "refused", "done"


def adamw(model):
    # eps: FP16 states that are zero would divide by zero
    return torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-3)


def train(model, optimizer, steps=2):
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(model.inputs()).square().mean().backward()
        optimizer.step()


def output(model):
    model.eval()
    with torch.no_grad():
        torch.manual_seed(0)
        return model(model.inputs())


def exact(tensor):
    return tensor.exact() if isinstance(tensor, ScaledTensor) else tensor.detach()


def same(a, b):
    return a.dtype == b.dtype and torch.equal(a.nan_to_num(nan=7.0), b.nan_to_num(nan=7.0))


def try_model(seed):
    """(outcome, [what is wrong], words)."""
    draw = random.Random(seed)
    spec = draw.choice(SPECS)
    plain = RandomModel(seed)
    words = f"seed {seed}, {spec}: {'; '.join(plain.described)}\n{plain}"
    model, moving = RandomModel(seed), RandomModel(seed)
    wrong = []
    try:
        train(moving, adamw(moving))
        plain_error = None
    except Exception as error:
        plain_error = error
    before = {}
    try:
        optimizer = adamw(model)
        fp8_backends.prepare(model, optimizer, fp8_backends.FP8RecipeKwargs(backend=spec, on_unproven="warn"))
        before = {n: exact(p).clone() for n, p in model.named_parameters() if not is_lazy(p)}
        train(model, optimizer)
    except FP8BackendError as error:
        return REFUSED, [], f"{words}\n{error}"
    except Exception as error:
        if plain_error is not None and type(error) is type(plain_error):
            return "plain fails too", [], f"{words}\n{plain_error}"
        return DONE, [traceback.format_exc()], words
    return DONE, wrong + list(faults(plain, model, moving, before, spec)), words


def is_lazy(p):
    return nn.parameter.is_lazy(p)


def faults(plain, model, moving, before, spec):
    start = dict(plain.named_parameters())
    for name, now in model.named_parameters():
        if name not in before:
            continue
        moved = not same(exact(now), before[name])
        if not now.requires_grad and moved and same(start[name], dict(moving.named_parameters())[name]):
            yield f"{name} is frozen and moved"
        if now.requires_grad and not moved and not same(start[name], dict(moving.named_parameters())[name]):
            yield f"{name} does not train"
    for (name, ours), theirs, began in zip(model.named_parameters(), moving.parameters(), plain.parameters(), strict=True):
        if name in before and ours.requires_grad:
            a, b = exact(ours).float() - before[name].float(), theirs.detach().float() - began.detach().float()
            DIFF.append((((a - b).norm() / b.norm()).item(), (a - b).abs().max().item(), b.norm().item() / b.numel() ** 0.5, spec, name, plain.seed))
    states = model.state_dict()
    reference = moving.state_dict()
    if list(states) != list(reference):
        yield f"keys {set(states) ^ set(reference)}"
    for name, value in states.items():
        if type(value) is not torch.Tensor:
            yield f"state_dict()[{name!r}] is a {type(value).__name__}"
        elif name in reference and value.dtype != reference[name].dtype:
            yield f"state_dict()[{name!r}] is {value.dtype}, and {reference[name].dtype} in the plain model"
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not same(exact(parameter), states[name]):
            yield f"state_dict()[{name!r}] differs from the live weight"
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    loaded = RandomModel(plain.seed)
    if any(is_lazy(p) for p in loaded.parameters()):
        output(loaded)
    values = torch.load(file, weights_only=True)
    try:
        loaded.load_state_dict(values, strict=True)
    except RuntimeError as error:
        if "more than one element" not in str(error) and "single memory" not in str(error):
            raise
        loaded.load_state_dict(values, strict=True, assign=True)
    for name, value in loaded.state_dict().items():
        if not same(value, values[name]):
            yield f"{name} differs once it is loaded"
    ours, theirs = output(model), output(loaded)
    error = ((ours - theirs).norm() / theirs.norm()).item()
    if not error < 0.3 and output(moving).isfinite().all():
        yield f"forward differs by {error:.2g}"
    live = {n: exact(p).clone() for n, p in model.named_parameters(remove_duplicate=False)}
    conversion.restore(model)
    for (name, module), was in zip(model.named_modules(), plain.modules(), strict=True):
        if type_before_parametrizations(module) is not type_before_parametrizations(was) and not is_lazy_class(was):
            yield f"{name} is restored as {type(module).__name__}"
    for name, p in model.named_parameters(remove_duplicate=False):
        if type(p) is not nn.Parameter:
            yield f"{name} is restored as {type(p).__name__}"
        if not same(p.detach(), live[name]):
            yield f"{name} has other values once restored"
    again = output(model)
    loaded = dict(loaded.named_parameters())
    alike = all(p.stride() == loaded[name].stride() for name, p in model.named_parameters())
    if not (same(again, theirs) if alike else torch.allclose(again, theirs, 1e-5, 1e-5)):
        yield f"restored, the output differs by {((again - theirs).norm() / theirs.norm()).item():.2g}"
    ERR.append((spec, error))


ERR = []
DIFF = []


def is_lazy_class(m):
    return isinstance(m, nn.modules.lazy.LazyModuleMixin)
