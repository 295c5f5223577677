"""Load crafted states: each must be refused, with model and optimizer unchanged.

Every field of a checkpoint gets every fault of its kind: the optimizer's state dict at each level,
plain and as scaled tensors; scaling states of `native:delayed` and of the window rule; pickled
scaled tensors; and the files of `load_state` for two models with an optimizer each, with the fault
in the last. Each must be refused by an `FP8BackendError` without a changed byte. Genuine states,
and states from other programs, must load.

Exits with 1 otherwise. Faults are only in the contents: no checksum here reveals them.
"""

from __future__ import annotations

import argparse
import copy
import io
import itertools
import json
import math
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402
from measuring import cpu_features, interleaved, interval, ratio, summary, table, write_json  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch import nn  # noqa: E402

import fp8_backends  # noqa: E402
from fp8_backends.accelerate_plugin import checkpoints  # noqa: E402
from fp8_backends.convert.conversion import prepared_roots  # noqa: E402
from fp8_backends.tensors import scaled_tensor  # noqa: E402
from fp8_backends.tensors.scaled_tensor import Kind, Partial, ScaledTensor, stored_parts  # noqa: E402

NAN, INF = math.nan, math.inf
SCALING = "fp8_scaling"
LEVELS = (*(f"msamp:O{number}" for number in range(1, 5)), "native:dynamic+msamp:O2")


class Case(NamedTuple):
    """Describe one crafted state."""

    field: str
    fault: str
    damage: Callable[[Any], Any]
    """Puts the fault into a copy of a sound state, in place."""


# Runs


class Run:
    """Prepare one or two small models together, with an optimizer each, and train them for two
    steps."""

    def __init__(
        self, backend: str, models: int = 1, made: list[nn.Module] | None = None, **fields: Any
    ) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        recipe = fp8_backends.FP8RecipeKwargs(backend=backend, **fields)
        self.accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe], cpu=True)
        torch.manual_seed(0)
        made = made or [
            nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64))
            for _ in range(models)
        ]
        optimizers = [torch.optim.AdamW(model.parameters(), 1e-3) for model in made]
        prepared = self.accelerator.prepare(*made, *optimizers)
        self.models, self.optimizers = (
            prepared[: len(made)],
            [each.optimizer for each in prepared[len(made) :]],
        )
        for _ in range(2):
            for model in self.models:
                self.accelerator.backward(
                    model(torch.randn(32, model[0].in_features)).square().mean()
                )
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()

    def stored(self) -> list[tuple[str, Any]]:
        """Return every byte stored by models, scaling states and optimizers, and the optimizers'
        options."""
        found: list[tuple[str, Any]] = []
        for model in self.models:
            found += [
                (name, bytes_of(p))
                for name, p in (*model.named_parameters(), *model.named_buffers())
            ]
            for name, root, known in prepared_roots(model):
                if hasattr(known.compute, "scaling_state"):
                    state = known.compute.scaling_state(root)
                    found += [(f"{name}.{key}", bytes_of(tensor)) for key, tensor in state.items()]
        for optimizer in self.optimizers:
            groups = [
                {k: v for k, v in group.items() if k != "params"}
                for group in optimizer.param_groups
            ]
            found.append(("options", repr(groups)))
            for group in optimizer.param_groups:
                for p in group["params"]:
                    found += [(name, bytes_of(value)) for name, value in optimizer.state[p].items()]
            found.append(("parameters with a state", len(optimizer.state)))
        return found


def bytes_of(value: Any) -> Any:
    """Return all bytes stored by a tensor; another value unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    parts = stored_parts(value.detach(), exact=True)
    return [
        (part.dtype, part.shape, bytes(part.reshape(-1).view(torch.uint8).numpy()))
        for part in parts
    ]


# Faults


def put(value: Any, at: tuple) -> Callable[[Any], None]:
    """Return a damage: this value at this place of nested dicts, lists and tensors."""

    def damage(state: Any) -> None:
        *way, last = at
        for key in way:
            state = state[key]
        state[last] = value(state[last]) if callable(value) else value

    return damage


def drop(*at: Any) -> Callable[[Any], None]:
    def damage(state: Any) -> None:
        *way, last = at
        for key in way:
            state = state[key]
        del state[last]

    return damage


def with_element(number: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """The tensor with its last element another number."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor.clone()
        changed.view(-1)[-1] = number
        return changed

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
    "None": lambda t: None,
    **{f"one element {number}": with_element(number) for number in (NAN, INF, -INF)},
}
STEPS = (
    NAN,
    INF,
    -1.0,
    2.5,
    "2",
    None,
    True,
    torch.ones(2),
    torch.ones(1),
    torch.tensor(True),
    torch.tensor(1j),
)
NUMBERS = (NAN, INF, -1.0, "0.1", None, True, [0.1], torch.ones(2), torch.tensor(NAN))
BETAS = (0.9, (0.9,), (0.9, 1.0), (NAN, 0.9), (-0.1, 0.9), ("0.9", "0.9"), None)
SCALES = {"0": 0.0, "negative": -1.0, "NaN": NAN, "inf": INF, "beyond FP32 with its values": 3e38}


def of_optimizer(state: dict[str, Any]) -> Iterator[Case]:
    """Yield faults of an optimizer's state dict, in the last parameter with a state of each
    kind."""
    last = max(state["state"])
    matrix = max(key for key, each in state["state"].items() if each["exp_avg"].dim() == 2)
    for value in STEPS:
        yield Case("step", repr(value), put(lambda _, v=value: v, ("state", last, "step")))
    for name in ("exp_avg", "exp_avg_sq", "master_weight"):
        if name in state["state"][matrix]:
            for fault, change in TENSORS.items():
                yield Case(name, fault, put(change, ("state", matrix, name)))
    for name in ("exp_avg", "exp_avg_sq"):
        yield Case(name, "NaN in the last parameter", put(with_element(NAN), ("state", last, name)))
    yield Case("exp_avg_sq", "negative", put(with_element(-1e-30), ("state", matrix, "exp_avg_sq")))
    yield Case(
        "exp_avg_sq",
        "negative, last parameter",
        put(with_element(-1.0), ("state", last, "exp_avg_sq")),
    )
    for name in ("step", "exp_avg", "exp_avg_sq"):
        yield Case(name, "missing", drop("state", last, name))
    for name in ("lr", "eps", "weight_decay"):
        for value in NUMBERS:
            yield Case(name, repr(value), put(lambda _, v=value: v, ("param_groups", 0, name)))
        yield Case(name, "missing", drop("param_groups", 0, name))
    for value in BETAS:
        yield Case("betas", repr(value), put(lambda _, v=value: v, ("param_groups", 0, "betas")))
    switches = {
        "maximize": "yes",
        "fused": 1,
        "foreach": "auto",
        "capturable": None,
        "amsgrad": True,
    }
    for name, value in switches.items():
        yield Case(name, repr(value), put(value, ("param_groups", 0, name)))
    params = ("param_groups", 0, "params")
    yield Case("params", "one too few", put(lambda keys: keys[:-1], params))
    yield Case("params", "one twice", put(lambda keys: [*keys[:-1], keys[0]], params))
    yield Case("params", "None", put(None, params))
    for value in (3, ["weight"]):
        yield Case(
            "param_names",
            repr(value),
            put(lambda groups, v=value: [groups[0] | {"param_names": v}], params[:1]),
        )
    yield Case("param_groups", "one too many", put(lambda groups: groups * 2, ("param_groups",)))
    yield Case("param_groups", "none", put([], ("param_groups",)))
    yield Case("param_groups", "missing", drop("param_groups"))
    yield Case("state", "missing", drop("state"))
    yield Case("state", "a list", put(lambda states: [*states.values()], ("state",)))
    yield Case(
        "state",
        "of an unknown parameter",
        put(lambda states: {**states, 99: states[last]}, ("state",)),
    )
    yield Case(
        "state", "of a parameter is a list", put(lambda each: [*each.values()], ("state", last))
    )


def of_scaled(state: dict[str, Any]) -> Iterator[Case]:
    """Yield faults of a state dict with states in their stored form, as written by version 0.1."""
    for key, states in state["state"].items():
        for name in ("exp_avg", "exp_avg_sq"):
            if key == 4 and isinstance(states[name], ScaledTensor):
                for fault, number in SCALES.items():
                    yield Case(f"scale of {name}", fault, _refilled(key, name, "scale_inv", number))
                if states[name].codes.dtype != torch.uint8:  # all of whose codes are numbers
                    yield Case(f"codes of {name}", "NaN", _refilled(key, name, "codes", NAN))
                gradient = put(
                    lambda scaled: _marked(scaled, "kind", Kind.GRADIENT), ("state", key, name)
                )
                yield Case(name, "a scaled gradient", gradient)
                rest = torch.ones(states[name].shape, dtype=torch.int8)
                residual = put(
                    lambda scaled, rest=rest: _marked(scaled, "rest", rest),
                    ("state", key, name),
                )
                yield Case(name, "a residual", residual)
                inverted = put(
                    lambda scaled: scaled.view_of(scaled.codes.t()[:1]), ("state", key, name)
                )
                yield Case(name, "a view of its first column", inverted)
    if stored_parts(state["state"][4]["exp_avg_sq"])[0].dtype != torch.uint8:
        yield Case("codes of exp_avg_sq", "negative", _refilled(4, "exp_avg_sq", "codes", -1.0))


def _refilled(key: int, name: str, part: str, number: float) -> Callable[[Any], None]:
    def damage(state: Any) -> None:
        target = getattr(state["state"][key][name], part)
        target.copy_(torch.full(target.shape, number))

    return damage


def _marked(scaled: ScaledTensor, mark: str, value: Any) -> ScaledTensor:
    setattr(scaled, mark, value)
    return scaled


def of_scaling(state: dict[str, Any]) -> Iterator[Case]:
    """Faults of the scaling state in an optimizer's state dict."""
    tensors = (SCALING, "tensors")
    names = state[SCALING]["tensors"]
    last = (*tensors, [*names][-1])
    window = last[-1].endswith("fp8_window")
    for value in (NAN, INF, 0.0, -1.0):
        yield Case("scale", repr(value), put(as_bits(2, 0, value), last))
    for value in (NAN, -1.0, -INF) if not window else (-1.0, -INF):
        yield Case("newest amax", repr(value), put(as_bits(0, 2, value), last))
    for value in (NAN, -1.0, *((INF,) if window else ())):
        yield Case("amax history", repr(value), put(as_bits(0, 5, value), last))
    yield Case(
        "counter", "-1", put(lambda t: t.clone().index_fill_(1, torch.tensor([1]), -1), last)
    )
    for dtype in (torch.float32, torch.int64, torch.int16, torch.bfloat16):
        yield Case("state", f"of {dtype}", put(lambda t, d=dtype: t.to(d), last))
    yield Case("state", "of a shorter history", put(lambda t: t[:, :-1], last))
    yield Case("state", "of two tensors", put(lambda t: t[:2], last))
    yield Case("state", "without values", put(lambda t: t.to("meta"), last))
    yield Case("state", "a list", put(lambda t: t.tolist(), last))
    yield Case("state", "missing", drop(*last))
    yield Case("state", "all missing", put({}, tensors))
    yield Case(
        "state", "of an unknown layer", put(lambda t: {**t, "0.0/head.fp8": t[last[-1]]}, tensors)
    )
    for name in ("backends", "tensors", "recipes"):
        yield Case(name, "a list", put([1], (SCALING, name)))
        yield Case(name, "of numbers", put({"0.0": 1}, (SCALING, name)))


def as_bits(row: int, column: int, number: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a scaling state with another FP32 number at this place."""

    def change(state: torch.Tensor) -> torch.Tensor:
        changed = state.clone()
        changed.view(torch.float32)[row, column] = number
        return changed

    return change


class Pickled:
    """Pickle as a ScaledTensor of these parts."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __reduce__(self) -> tuple:
        return scaled_tensor._rebuild, self.parts


def pickles() -> Iterator[tuple[str, str, Pickled]]:
    """Yield field, fault, and an object that pickles with it."""
    codes, scale, fp8 = torch.zeros(4, 4, dtype=torch.uint8), torch.ones(()), torch.float8_e4m3fn
    plain = Kind.WEIGHT, Partial.WHOLE
    context = (torch.float32, 0, *plain)
    sound = [codes, fp8, scale, context, False, {}]
    other = ScaledTensor(torch.zeros(2, 2, dtype=torch.float16), torch.ones(()))
    for place, field, faults in (
        (0, "data", (codes.long(), codes.float(), codes.to_sparse(), [1, 2], None)),
        (1, "storage", (torch.int64, torch.float16, torch.bfloat16, torch.complex64, "fp8", None)),
        (
            2,
            "scale_inv",
            (
                torch.ones(2),
                torch.ones(1),
                torch.ones((), dtype=torch.int64),
                scale.double(),
                1.0,
                None,
            ),
        ),
        (
            3,
            "context",
            (
                (torch.int64, 0, *plain),
                (torch.float32, -8, *plain),
                (torch.float32, 8, *plain),
                (torch.float32, 0.5, *plain),
                (torch.float32, 0, "yes", Partial.WHOLE),
                (torch.float32, 0),
                None,
            ),
        ),
        (
            5,
            "attribute",
            (
                {"stored": None},
                {"_view": (codes, codes)},
                {"dequantize": None},
                {"data": torch.ones(4, 4)},
                {"grad": torch.ones(4, 4)},
                {"master": other},
                {"rest": other},
                {"rest": torch.ones(4, 4)},
                {"edited": torch.ones(2, 2)},
                {"rest": 1},
                {"kind": "yes"},
                {"block_size": 3},
            ),
        ),
    ):
        for fault in faults:
            crafted = Pickled(*[fault if i == place else part for i, part in enumerate(sound)])
            described = (
                f"{fault.dtype} {tuple(fault.shape)}"
                if isinstance(fault, torch.Tensor)
                else repr(fault)
            )
            yield field, described.replace("\n", " ")[:60], crafted


FILES = {
    "fp8_backend.json": (
        "",
        "{",
        "[]",
        '{"format": 2}',
        '{"format": 99, "models": {}}',
        '{"format": 2, "models": [1]}',
    ),
    "fp8_scaling_0.safetensors": ("", "{", None),
    "optimizer_1.bin": ("", "PK", None),
}
"""Contents without meaning; None: the file is missing."""


def of_files(folder: Path) -> Iterator[Case]:
    """Yield faults in the files of `load_state`: state faults belong to the second model."""
    for name, texts in FILES.items():
        for text in texts:
            yield Case(
                name,
                "missing" if text is None else repr(text),
                lambda at, n=name, t=text: _write(at / n, t),
            )
    optimizer = torch.load(folder / "optimizer_1.bin")
    for case in of_optimizer(optimizer):
        yield case._replace(
            field=f"optimizer_1.bin: {case.field}", damage=_in_file("optimizer_1.bin", case.damage)
        )
    names = [*load_file(folder / "fp8_scaling_0.safetensors")]
    for value in (NAN, -1.0):
        damage = put(as_bits(2, 0, value), (max(names),))
        yield Case(
            "fp8_scaling_0: scale", repr(value), _in_file("fp8_scaling_0.safetensors", damage)
        )


def _write(path: Path, text: str | None) -> None:
    path.unlink()
    if text is not None:
        path.write_text(text)


def _in_file(name: str, damage: Callable[[Any], None]) -> Callable[[Path], None]:
    load, save = (torch.load, torch.save) if name.endswith(".bin") else (load_file, save_file)

    def in_file(folder: Path) -> None:
        state = load(folder / name)
        damage(state)
        save(state, folder / name)

    return in_file


def without_manifest(folder: Path) -> None:
    """Remove checksums, so that only the contents reveal a changed file."""
    (folder / "fp8_manifest.json").unlink(missing_ok=True)
    metadata = json.loads((folder / "fp8_backend.json").read_text())
    metadata.pop("manifest", None)
    (folder / "fp8_backend.json").write_text(json.dumps(metadata))


# Valid states


def sound(state: dict[str, Any]) -> Iterator[Case]:
    """Yield states from trainings, or from other programs."""
    yield Case("state", "as it was saved", lambda state: None)
    yield Case("state", "none yet", put({}, ("state",)))
    yield Case("step", "a Python number", put(lambda step: int(step), ("state", 0, "step")))
    yield Case("exp_avg", "BF16", put(lambda t: t.bfloat16(), ("state", 0, "exp_avg")))
    yield Case("exp_avg_sq", "FP64", put(lambda t: t.double(), ("state", 0, "exp_avg_sq")))
    yield Case("lr", "a tensor", put(lambda lr: torch.tensor(lr), ("param_groups", 0, "lr")))
    yield Case("lr", "0", put(0, ("param_groups", 0, "lr")))
    yield Case(
        "options",
        "a scheduler's",
        put(lambda groups: [{**groups[0], "initial_lr": 1e-3}], ("param_groups",)),
    )
    if SCALING in state and state[SCALING]["tensors"]:
        name = [*state[SCALING]["tensors"]][0]
        last = (SCALING, "tensors", name)
        yield Case("newest amax", "inf", put(as_bits(2, 2, INF), last))
        if name.endswith("fp8_window"):
            yield Case("newest amax", "NaN", put(as_bits(2, 2, NAN), last))
        else:
            yield Case("amax history", "inf", put(as_bits(2, 5, INF), last))
    yield Case("scaling state", "none", lambda state: state.pop(SCALING, None))


# Attempts


def outcome(run: Run, load: Callable[[], Any], before: list[tuple[str, Any]]) -> str:
    """Return the outcome of a crafted state: empty if it was refused and nothing changed."""
    try:
        load()
    except fp8_backends.FP8BackendError:
        pairs = itertools.zip_longest(before, run.stored(), fillvalue=("more", None))
        changed = [old[0] for old, new in pairs if old != new]
        return f"refused, and {changed[0]} was changed" if changed else ""
    except Exception as error:
        return f"raw {type(error).__name__}: {error}"
    return "loaded"


def crafted(backend: str) -> Iterator[dict[str, str]]:
    """Every crafted state dict of a backend."""
    run = Run(backend)
    (optimizer,) = run.optimizers
    saved, before = copy.deepcopy(optimizer.state_dict()), run.stored()
    raw = torch.optim.Optimizer.state_dict(optimizer)
    cases: list[tuple[dict, Case]] = []
    if "msamp" in backend:
        cases += [(saved, case) for case in of_optimizer(saved)]
    if any(isinstance(state["exp_avg"], ScaledTensor) for state in raw["state"].values()):
        cases += [(raw, case) for case in of_scaled(raw)]
    if saved.get(SCALING, {}).get("tensors"):
        cases += [(saved, case) for case in of_scaling(saved)]
    for state, case in cases:
        damaged = copy.deepcopy(state)
        case.damage(damaged)
        found = outcome(run, lambda: optimizer.load_state_dict(damaged), before)  # noqa: B023
        yield {"of": backend, "field": case.field, "fault": case.fault, "wrong": found}
        if found:
            run = Run(backend)
            (optimizer,), before = run.optimizers, run.stored()


def crafted_folders(backend: str) -> Iterator[dict[str, str]]:
    """Every crafted folder of two models with an optimizer each."""
    run = Run(backend, models=2)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "saved")
        run.accelerator.save_state(str(folder))
        without_manifest(folder)
        contents = {path: path.read_bytes() for path in folder.iterdir()}
        for model in run.models:  # a partial load would be detected
            with torch.no_grad():
                model[1].weight.mul_(2)
        before = run.stored()
        for case in of_files(folder):
            case.damage(folder)
            found = outcome(run, lambda: run.accelerator.load_state(str(folder)), before)
            yield {
                "of": f"load_state, {backend}",
                "field": case.field,
                "fault": case.fault,
                "wrong": found,
            }
            for path, data in contents.items():
                path.write_bytes(data)
            if found:
                before = run.stored()


def crafted_pickles() -> Iterator[dict[str, str]]:
    for field, fault, pickled in pickles():
        file = io.BytesIO()
        torch.save(pickled, file)
        file.seek(0)
        try:
            torch.load(file, weights_only=True)
        except fp8_backends.FP8BackendError:
            found = ""
        except Exception as error:
            found = f"raw {type(error).__name__}: {error}"
        else:
            found = "loaded"
        yield {"of": "pickled ScaledTensor", "field": field, "fault": fault, "wrong": found}


def loaded(backend: str) -> Iterator[dict[str, str]]:
    """Load every sound state of a backend, and return failures."""
    run = Run(backend)
    (optimizer,) = run.optimizers
    saved = copy.deepcopy(optimizer.state_dict())
    for case in sound(saved):
        state = copy.deepcopy(saved)
        case.damage(state)
        try:
            optimizer.load_state_dict(state)
        except Exception as error:
            yield {"of": backend, "field": case.field, "fault": case.fault, "wrong": f"{error!r}"}
        else:
            yield {"of": backend, "field": case.field, "fault": case.fault, "wrong": ""}


def cost(backend: str, width: int = 2048, layers: int = 8) -> dict[str, Any]:
    """Return the time of checking an optimizer's file, and of `load_state` as a whole. Files are in
    memory."""
    run = Run(
        backend, made=[nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])]
    )
    with tempfile.TemporaryDirectory() as folder:
        run.accelerator.save_state(folder)
        functions = {
            "look": lambda: checkpoints._check_optimizer_files(run.accelerator, Path(folder)),
            "load_state": lambda: run.accelerator.load_state(folder),
        }
        seconds = interleaved(functions, runs=5, warmup=1)
        size = Path(folder, "optimizer.bin").stat().st_size
    share = ratio(seconds["look"], seconds["load_state"])
    return {"of": backend, "bytes": size, "share": share} | {
        name: summary(each) for name, each in seconds.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one backend of each kind")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where to write the record")
    args = parser.parse_args()
    began = time.perf_counter()
    levels = LEVELS[1:2] if args.quick else LEVELS
    refused = [row for backend in (*levels, "native:delayed") for row in crafted(backend)]
    refused += crafted_pickles()
    for backend in ("msamp:O2",) if args.quick else ("msamp:O1", "msamp:O2", "msamp:O3"):
        refused += crafted_folders(backend)
    accepted = [row for backend in (*levels, "native:delayed") for row in loaded(backend)]
    rows = [
        [of, tried, sum(row["of"] == of and row["wrong"] != "" for row in refused)]
        for of, tried in Counter(row["of"] for row in refused).items()
    ]
    print(table(["crafted states of", "tried", "not refused, or changed something"], rows))
    print(
        f"{len(accepted)} sound states tried, {sum(row['wrong'] != '' for row in accepted)} not "
        "loaded"
    )
    costs = (
        [] if args.quick else [cost(backend) for backend in ("msamp:O1", "msamp:O2", "msamp:O3")]
    )
    for each in costs:
        print(
            f"{each['of']}: the look at the optimizer's file takes {interval(each['share'])} of "
            "load_state"
        )
    failures = [row for row in (*refused, *accepted) if row["wrong"]]
    print(
        "\n".join(f"{row['of']}: {row['field']} {row['fault']}: {row['wrong']}" for row in failures)
    )
    if args.out:
        counts = Counter((row["of"], row["field"]) for row in refused)
        record = {
            "seconds": round(time.perf_counter() - began),
            "crafted": [
                {"of": of, "field": field, "tried": tried} for (of, field), tried in counts.items()
            ],
            "sound": len(accepted),
            "failures": failures,
            "cost": costs,
        }
        write_json(str(args.out / f"crafted_cpu_{cpu_features()}.json"), record)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
