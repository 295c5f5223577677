"""Craft states with right checksums and wrong contents: each must be refused by an error of this
package, before a byte of models, optimizers or scales changes. Genuine states must load."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate_state import fresh_accelerate
from safetensors.torch import load_file, save_file
from stress.harness import Training, changed
from torch import nn
from unsealed import unseal
from widths import nightly

import fp8_backends
from fp8_backends.errors import FP8BackendError
from fp8_backends.tensors.scaled_tensor import Kind, Partial, ScaledTensor, quantize

__all__ = ["fresh_accelerate"]
NAN, INF = math.nan, math.inf
SCALING = "fp8_scaling"
Case = tuple[tuple, str, Any]
"""Place in nested dicts and lists, name of the fault, and another value or a function of it."""
MISSING = object()


def trained(backend: str, models: int = 1) -> Training:
    run = Training(backend, models=models)
    run.step(1)
    run.step(2)
    return run


def inject(state: Any, case: Case) -> None:
    (*way, last), _, value = case
    for key in way:
        state = state[key]
    if value is MISSING:
        del state[last]
    else:
        state[last] = value(state[last]) if callable(value) else value


# Faults


def element(number: float, *place: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Change the last element of a tensor, or the FP32 number at a place of a scaling state."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        copied = tensor.clone()
        numbers = copied.view(torch.float32) if place else copied.view(-1)
        numbers[place or -1] = number
        return copied

    return change


def refilled(part: str, number: float) -> Callable[[ScaledTensor], ScaledTensor]:
    """Fill codes or scale with another number."""

    def change(scaled: ScaledTensor) -> ScaledTensor:
        stored = getattr(scaled, part)
        stored.copy_(torch.full(stored.shape, number))
        return scaled

    return change


def marked(name: str, value: Any) -> Callable[[ScaledTensor], ScaledTensor]:
    def change(scaled: ScaledTensor) -> ScaledTensor:
        setattr(scaled, name, value)
        return scaled

    return change


TENSORS = {
    "of int64": lambda t: t.long(),
    "of bool": lambda t: t > 0,
    "complex": lambda t: t.to(torch.complex64),
    "FP8 without a scale": lambda t: t.float().to(torch.float8_e4m3fn),
    "without its last row": lambda t: t[:-1],
    "flat": lambda t: t.reshape(-1),
    "one number": lambda t: t.float().mean(),
    "without values": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
    "beyond FP32": lambda t: t.double() + 1e300,
    "a list": lambda t: t.tolist(),
    "None": None,
    **{f"one element {number}": element(number) for number in (NAN, INF, -INF)},
}
TWO, ONE = torch.ones(2), torch.ones(1)
STEPS = (NAN, INF, -1.0, 2.5, "2", None, TWO, ONE, torch.tensor(True), torch.tensor(1j))
NUMBERS = (NAN, INF, -1.0, "0.1", None, True, [0.1], TWO, torch.tensor(NAN), MISSING)
OPTIONS = {
    **dict.fromkeys(("lr", "eps", "weight_decay"), NUMBERS),
    "betas": (0.9, (0.9,), (0.9, 1.0), (NAN, 0.9), (-0.1, 0.9), ("0.9", "0.9"), None),
    "maximize": ("yes",),
    "fused": (1,),
    "foreach": ("auto",),
    "capturable": (None,),
    "amsgrad": (True,),
    "params": (lambda keys: keys[:-1], lambda keys: [*keys[:-1], keys[0]], None),
}


def of_optimizer(state: dict[str, Any]) -> Iterator[Case]:
    """Yield faults of an optimizer's state dict, in the last parameter with a state of each
    kind."""
    last = max(state["state"])
    matrix = max(key for key, each in state["state"].items() if each["exp_avg"].dim() == 2)
    for value in (*STEPS, MISSING):
        yield ("state", last, "step"), repr(value), value
    for name in {"exp_avg", "exp_avg_sq", "master_weight"} & state["state"][matrix].keys():
        for fault, change in TENSORS.items():
            yield ("state", matrix, name), fault, change
    for name in ("exp_avg", "exp_avg_sq"):
        yield ("state", last, name), "NaN", element(NAN)
        yield ("state", last, name), "missing", MISSING
    yield ("state", matrix, "exp_avg_sq"), "negative", element(-1e-30)
    yield ("state", last, "exp_avg_sq"), "negative", element(-1.0)
    for name, values in OPTIONS.items():
        for value in values:
            yield ("param_groups", 0, name), repr(value), value
    for names in (3, ["weight"]):
        group = state["param_groups"][0] | {"param_names": names}
        yield ("param_groups", 0), f"param_names {names}", group
    yield ("param_groups",), "one too many", lambda groups: groups * 2
    yield ("param_groups",), "none", []
    yield ("param_groups",), "missing", MISSING
    yield ("state",), "missing", MISSING
    yield ("state",), "a list", lambda states: [*states.values()]
    yield ("state",), "of an unknown parameter", lambda states: {**states, 99: states[last]}
    yield ("state", last), "a list", lambda each: [*each.values()]


def of_scaled(state: dict[str, Any]) -> Iterator[Case]:
    """Yield faults of states in their stored form, as written by version 0.1."""
    key, states = max((k, v) for k, v in state["state"].items() if v["exp_avg"].dim() == 2)
    for name in ("exp_avg", "exp_avg_sq"):
        if not isinstance(states[name], ScaledTensor):
            continue
        place = "state", key, name
        for number in (0.0, -1.0, NAN, INF, 3e38):  # the last is beyond FP32 with its values
            yield place, f"scale {number}", refilled("scale_inv", number)
        if states[name].codes.dtype != torch.uint8:  # all of whose codes are numbers
            yield place, "codes NaN", refilled("codes", NAN)
            if name == "exp_avg_sq":
                yield place, "codes negative", refilled("codes", -1.0)
        yield place, "a scaled gradient", marked("kind", Kind.GRADIENT)
        rest = torch.ones(states[name].shape, dtype=torch.int8)
        yield place, "a residual", marked("rest", rest)
        yield place, "a view of its first column", lambda t: t.view_of(t.codes.t()[:1])


def of_scaling(state: dict[str, Any]) -> Iterator[Case]:
    """Yield faults of the scaling state in an optimizer's state dict."""
    tensors = (SCALING, "tensors")
    last = (*tensors, [*state[SCALING]["tensors"]][-1])
    window = last[-1].endswith("fp8_window")
    for value in (NAN, INF, 0.0, -1.0):
        yield last, f"scale {value}", element(value, 2, 0)
    for value in (-1.0, -INF) if window else (NAN, -1.0, -INF):
        yield last, f"newest amax {value}", element(value, 0, 2)
    for value in (NAN, -1.0, INF) if window else (NAN, -1.0):
        yield last, f"amax history {value}", element(value, 0, 5)
    yield last, "counter -1", lambda t: t.clone().index_fill_(1, torch.tensor([1]), -1)
    for dtype in (torch.float32, torch.int64, torch.int16, torch.bfloat16):
        yield last, f"of {dtype}", lambda t, dtype=dtype: t.to(dtype)
    yield last, "a shorter history", lambda t: t[:, :-1]
    yield last, "two tensors", lambda t: t[:2]
    yield last, "without values", lambda t: t.to("meta")
    yield last, "a list", lambda t: t.tolist()
    yield last, "missing", MISSING
    yield tensors, "all missing", {}
    yield tensors, "an unknown layer", lambda t: {**t, "0.0/head.fp8": t[last[-1]]}
    for name in ("backends", "tensors", "recipes"):
        yield (SCALING, name), "a list", [1]
        yield (SCALING, name), "of numbers", {"0.0": 1}


def genuine(state: dict[str, Any]) -> Iterator[Case]:
    """Yield states from trainings, or from other programs."""
    first = ("param_groups", 0, "lr")
    yield ("state",), "as it was saved", lambda states: states
    yield ("state",), "none yet", {}
    yield ("state", 0, "step"), "a Python number", int
    yield ("state", 0, "exp_avg"), "BF16", lambda t: t.bfloat16()
    yield ("state", 0, "exp_avg_sq"), "FP64", lambda t: t.double()
    yield first, "a tensor", torch.tensor
    yield first, "0", 0
    yield ("param_groups", 0), "a scheduler's", lambda group: {**group, "initial_lr": 1e-3}
    if SCALING in state:
        yield (SCALING,), "missing", MISSING
    for name in [*state.get(SCALING, {"tensors": ()})["tensors"]][:1]:
        place = (SCALING, "tensors", name)
        yield place, "newest amax inf", element(INF, 2, 2)
        if name.endswith("fp8_window"):
            yield place, "newest amax NaN", element(NAN, 2, 2)
        else:
            yield place, "amax history inf", element(INF, 2, 5)


# State dicts


def check_refused(case: Any, load: Callable[[], Any]) -> None:
    try:
        load()
    except FP8BackendError:
        return
    except Exception as error:
        raise AssertionError(f"{case}: raw {error!r}") from error
    raise AssertionError(f"{case}: loaded")


@pytest.mark.parametrize(
    "backend", ["msamp:O1", nightly("msamp:O2"), "msamp:O3", "msamp:O4", "native:delayed"]
)
def test_crafted_state_is_refused_without_changing_a_byte(backend):
    run = trained(backend)
    optimizer = run.optimizers[0].optimizer
    saved, before = copy.deepcopy(optimizer.state_dict()), run.stored()
    raw = torch.optim.Optimizer.state_dict(optimizer)
    cases = []
    if "msamp" in backend:
        cases += [(saved, case) for case in of_optimizer(saved)]
    if any(isinstance(state["exp_avg"], ScaledTensor) for state in raw["state"].values()):
        cases += [(raw, case) for case in of_scaled(raw)]
    if saved.get(SCALING, {}).get("tensors"):
        cases += [(saved, case) for case in of_scaling(saved)]
    for state, case in cases:
        damaged = copy.deepcopy(state)
        inject(damaged, case)
        check_refused(case, lambda: optimizer.load_state_dict(damaged))  # noqa: B023
        assert changed(before, run.stored()) == [], case
    assert len(cases) >= (120 if "msamp" in backend else 25)


@pytest.mark.parametrize(
    "backend", ["msamp:O4", "native:delayed", nightly("msamp:O2"), nightly("msamp:O3")]
)
def test_genuine_and_third_party_states_load(backend):
    optimizer = trained(backend).optimizers[0].optimizer
    saved = copy.deepcopy(optimizer.state_dict())
    cases = [*genuine(saved)]
    assert len(cases) >= 8
    for case in cases:
        state = copy.deepcopy(saved)
        inject(state, case)
        optimizer.load_state_dict(state)


def test_comparison_detects_one_changed_byte():
    """Justify the tests above: the comparison covers all stored bytes."""
    run = trained("msamp:O3")
    before, weight = run.stored(), run.bare[0][4].weight
    state = run.optimizers[0].state[weight]
    parts = (
        weight.codes,
        weight.master.codes,
        state["exp_avg"].scale_inv,
        state["exp_avg_sq"].codes,
        state["step"],
    )
    for stored in (part.reshape(-1).view(torch.uint8) for part in parts):
        kept = stored.clone()
        stored[-1] += 1
        assert changed(before, run.stored())
        stored.copy_(kept)
        assert not changed(before, run.stored())


# Folders

FILES = {
    "fp8_backend.json": (
        "",
        "{",
        "[]",
        '{"format": 2}',
        '{"format": 99, "models": {}}',
        '{"format": 2, "models": [1]}',
    ),
    "fp8_scaling_0.safetensors": ("", "{", MISSING),
    "optimizer_1.bin": ("", "PK", MISSING),
}
"""Contents without meaning."""


def test_load_state_refuses_before_loading_any_model(tmp_path):
    """The second model's state has the fault, so a partial load would show."""
    run = trained("msamp:O3", models=2)
    run.accelerator.save_state(str(tmp_path))
    contents = {path: path.read_bytes() for path in unseal(tmp_path).iterdir()}
    for model in run.bare:
        model[0].bias.data.add_(1)
    before = run.stored()
    for file, case in of_folder(tmp_path):
        if case is MISSING:
            file.unlink()
        elif isinstance(case, str):
            file.write_text(case)
        else:
            load, save = (torch.load, torch.save)
            if file.suffix == ".safetensors":
                load, save = load_file, save_file
            state = load(file)
            inject(state, case)
            save(state, file)
        check_refused((file.name, case), lambda: run.accelerator.load_state(str(tmp_path)))
        assert changed(before, run.stored()) == [], (file.name, case)
        for path, data in contents.items():
            path.write_bytes(data)


def of_folder(folder: Path) -> list[tuple[Path, Any]]:
    found = [(folder / name, text) for name, texts in FILES.items() for text in texts]
    optimizer, scales = folder / "optimizer_1.bin", folder / "fp8_scaling_0.safetensors"
    # all of them are refused above, by the optimizer itself
    found += [(optimizer, case) for case in [*of_optimizer(torch.load(optimizer))][::6]]
    last = (max(load_file(scales)),)
    return [*found, *((scales, (last, f"scale {x}", element(x, 2, 0))) for x in (NAN, -1.0))]


# Pickles


class Pickled:
    """Pickle as a ScaledTensor of these parts."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __reduce__(self) -> tuple:
        return self.parts


def test_crafted_pickle_of_scaled_tensor_is_refused():
    codes, scale = torch.zeros(4, 4, dtype=torch.float8_e4m3fn), torch.ones(())
    rebuild, sound = ScaledTensor(codes, scale).__reduce_ex__(4)
    codes, plain = codes.view(torch.uint8), sound[3][2:]
    other = ScaledTensor(torch.zeros(2, 2, dtype=torch.float16), torch.ones(()))
    matrix = torch.ones(4, 4)
    wrong = [
        *((0, data) for data in (codes.long(), codes.float(), codes.to_sparse(), [1, 2], None)),
        *(
            (1, storage)
            for storage in (torch.int64, torch.bfloat16, torch.complex64, torch.uint8, "fp8", None)
        ),
        *((2, inverse) for inverse in (TWO, ONE, scale.long(), scale.double(), 1.0, None)),
        *((3, (torch.float32, exponent, *plain)) for exponent in (-8, 8, 0.5)),
        (3, (torch.int64, 0, *plain)),
        (3, (torch.float32, 0, "yes", Partial.WHOLE)),
        (3, (torch.float32, 0)),
        (3, None),
        *((5, {name: None}) for name in ("stored", "dequantize", "kind", "block_size")),
        *((5, {name: matrix}) for name in ("data", "grad", "rest")),
        (5, {"edited": TWO}),
        *((5, {name: other}) for name in ("master", "rest")),
        (5, {"_view": (codes, codes)}),
    ]
    _, pair = quantize(matrix, torch.int8).__reduce_ex__(4)
    residual = pair[5]["rest"]
    unfit = (residual.short(), [1, 2], residual[:2], residual.t().contiguous().t(), other)
    of_pair = [
        *({5: {"rest": rest}} for rest in unfit),
        {0: matrix.half(), 1: torch.float16},
        {1: torch.float8_e5m2},
        {2: TWO, 3: (torch.float32, 8, *plain)},
        {3: (torch.float32, 0, Kind.GRADIENT, Partial.WHOLE)},
    ]
    cases = [(sound, {place: value}) for place, value in wrong]
    for parts, changes in (*cases, *((pair, each) for each in of_pair)):
        file = io.BytesIO()
        damaged = [changes.get(place, part) for place, part in enumerate(parts)]
        torch.save(Pickled(rebuild, tuple(damaged)), file)
        file.seek(0)
        check_refused(changes, lambda: torch.load(file, weights_only=True))  # noqa: B023


# Messages


def test_refusal_names_file_parameter_state_and_fix(tmp_path):
    run = trained("msamp:O2")
    run.accelerator.save_state(str(tmp_path))
    saved = torch.load(unseal(tmp_path) / "optimizer.bin")
    saved["state"][4]["exp_avg_sq"][3, 5] = torch.nan
    torch.save(saved, tmp_path / "optimizer.bin")
    with pytest.raises(FP8BackendError) as refusal:
        run.accelerator.load_state(str(tmp_path))
    said = str(refusal.value)
    for part in (
        "optimizer.bin",
        "exp_avg_sq of parameter 4 (4.weight, of shape (16, 64))",
        "nan",
        "earlier checkpoint",
    ):
        assert part in said


def test_refusal_names_parameters_of_named_groups():
    model = nn.Sequential(nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.named_parameters())
    model, optimizer = fp8_backends.prepare(model, optimizer, "msamp:O2")
    model(torch.ones(32, 64)).sum().backward()
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["step"] = torch.tensor(-1.0)
    with pytest.raises(
        FP8BackendError, match=r"step of parameter 0 \(0.weight, .* holds -1, and must be whole"
    ):
        optimizer.load_state_dict(state)
