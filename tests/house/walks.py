"""Print the files of the package through which four things pass, and those that name a feature: `python
tests/house/walks.py`.

The tracer lists, in order, each file with a function that receives the thing as an argument; "returns" counts the
calls that enter such a file again from another one, and "in all" every file that ran. This is a report and no test.
"""

from __future__ import annotations

import re
import sys
import tempfile
import tokenize
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

import fp8_backends
from fp8_backends import FP8RecipeKwargs
from fp8_backends.compute.native.layer_rule import LayerRule

ROOT = Path(fp8_backends.__file__).parent

FEATURES = {
    "experts": r"expert",
    "tensor parallelism": r"tensor_?parallel|(^|_)tp(_|$)",
    "saved activations": r"saved_?activations|saved_values",
    "fused head": r"fused_?head|deferred_?logits|defers_?(head|logits)",
    "Conv1D": r"conv_?1d",
    "guard": r"(^|_)guard",
    "monitor": r"(^|_)monitor",
}
"""Feature -> pattern of its identifiers, in any case."""


def named_in(pattern: str) -> dict[str, int]:
    """Count the identifiers that match a pattern by package file, without strings, comments and docstrings. The room of
    rules is left out: a rule refuses features by name."""
    counts = {}
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if name.split("/")[0] in ("rules", "docs", "examples"):
            continue
        with tokenize.open(path) as file:
            tokens = tokenize.generate_tokens(file.readline)
            words = [token.string for token in tokens if token.type == tokenize.NAME]
        count = sum(bool(re.search(pattern, word, re.IGNORECASE)) for word in words)
        if count or re.search(pattern, name, re.IGNORECASE):
            counts[name] = count
    return counts


def walk(action: Callable[[], object], follows: Callable[[object], bool]) -> tuple[list[str], set[str]]:
    """Run `action`; return the files with an argument that `follows` accepts, in the order of calls, and all files."""
    files: list[str] = []
    every: set[str] = set()

    def profile(frame, event, _):
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(str(ROOT)) or code.co_name.startswith("<"):
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        values = [frame.f_locals.get(name) for name in names]
        values += [item for value in values if isinstance(value, (list, tuple)) for item in value[:64]]
        file = str(Path(code.co_filename).relative_to(ROOT))
        every.add(file)
        if (not files or files[-1] != file) and any(follows(value) for value in values):
            files.append(file)

    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
    return files, every


def report(title: str, walked: tuple[list[str], set[str]]) -> None:
    files, every = walked
    distinct = list(dict.fromkeys(files))
    print(f"{title}: {len(distinct)} files, {len(files) - len(distinct)} returns, {len(every)} in all")
    print("   ", " -> ".join(distinct))


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))


def recipe_to_product() -> tuple[list[str], set[str]]:
    backend, x, net = "native:delayed", torch.randn(32, 64), model()

    def action():
        fp8_backends.prepare(net, None, backend)
        net(x)

    return walk(action, lambda value: value is backend or value is x or isinstance(value, (FP8RecipeKwargs, LayerRule)))


def weight_to_step() -> tuple[list[str], set[str]]:
    net = model()
    weights = {id(net[0].weight)}
    optimizer = torch.optim.AdamW(net.parameters())

    def action():
        fp8_backends.prepare(net, optimizer, "msamp:O2")
        weights.add(id(net[0].weight))
        net(torch.randn(32, 64)).sum().backward()
        optimizer.step()

    return walk(action, lambda value: id(value) in weights)


def checkpoint(load: bool) -> tuple[list[str], set[str]]:
    """Follow the folder of `save_state` or `load_state`, as text or Path, and files in it."""
    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[FP8RecipeKwargs(backend="msamp:O2")], cpu=True)
    net = model()
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
    accelerator.backward(net(torch.randn(32, 64)).sum())
    optimizer.step()
    with tempfile.TemporaryDirectory() as temporary:
        folder = f"{temporary}/checkpoint"
        if load:
            accelerator.save_state(folder)
        action = accelerator.load_state if load else accelerator.save_state
        return walk(
            lambda: action(folder), lambda value: isinstance(value, (str, Path)) and str(value).startswith(folder)
        )


if __name__ == "__main__":
    for feature, pattern in FEATURES.items():
        counts = named_in(pattern)
        rooms = {name.split("/")[0] for name in counts}
        print(f"{feature}: named by {len(counts)} files in {len(rooms)} rooms")
        print("   ", ", ".join(f"{name} {count}" for name, count in counts.items()))
    report("a backend string to its first product", recipe_to_product())
    report("a weight to its O2 step", weight_to_step())
    report("a checkpoint to the disk", checkpoint(load=False))
    report("a checkpoint to its model", checkpoint(load=True))
