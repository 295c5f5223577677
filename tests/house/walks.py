"""Print the files of the package through which four things pass, and those that name a feature:
`python tests/house/walks.py`.

The tracer lists, in order, each file with a function that receives the thing as an argument (`self`
is none); "in all" counts every file that ran. A return is a call from another file into a file that
has handed the thing on to a third one. A pair of files counts once, however many layers, parameters
and functions it serves: a reader learns it once. A file that only answers, as with
`is_distributed`, was never left. Each call by PyTorch or the user (a forward, a hook of backward, a
step) starts a leg of its own, and returns are counted within a leg. This is a report and no test.
"""

from __future__ import annotations

import functools
import re
import sys
import tempfile
import tokenize
from collections import Counter
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
    """Count the identifiers that match a pattern by package file. The room of rules is left out: a
    rule refuses features by name."""
    counts = {}
    for name, words in identifiers().items():
        matching = [word for word in words if re.search(pattern, word, re.IGNORECASE)]
        if matching or re.search(pattern, name, re.IGNORECASE):
            counts[name] = sum(words[word] for word in matching)
    return counts


@functools.cache
def identifiers() -> dict[str, Counter[str]]:
    """Count the identifiers of each package file, without strings, comments and docstrings."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if name.split("/")[0] in ("rules", "docs", "examples"):
            continue
        with tokenize.open(path) as file:
            tokens = tokenize.generate_tokens(file.readline)
            found[name] = Counter(token.string for token in tokens if token.type == tokenize.NAME)
    return found


class Walk:
    """Run an action, and record the way of the arguments that `follows` accepts."""

    def __init__(self, action: Callable[[], object], follows: Callable[[object], bool]) -> None:
        self.follows = follows
        self.files: dict[str, None] = {}
        self.every: set[str] = set()
        self.returns: dict[tuple[str, str], None] = {}
        self._left: set[str] = set()
        """Files that handed the thing on, in this leg."""
        self._pairs: set[tuple[str, str]] = set()
        sys.setprofile(self._profile)
        try:
            action()
        finally:
            sys.setprofile(None)

    def _profile(self, frame, event, _) -> None:
        code = frame.f_code
        if event != "call" or _file(frame) is None or code.co_name.startswith("<"):
            return
        file, caller = _file(frame), frame.f_back
        while caller is not None and _file(caller) is None:
            caller = caller.f_back
        if caller is None:
            self._left, self._pairs = set(), set()
        self.every.add(file)
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        values = [frame.f_locals.get(name) for name in names if name != "self"]
        values += [
            item for value in values if isinstance(value, (list, tuple)) for item in value[:64]
        ]
        if not any(self.follows(value) for value in values):
            return
        self.files[file] = None
        if caller is None or (pair := (_file(caller), file)) in self._pairs or pair[0] == file:
            return
        if file in self._left:
            self.returns[pair] = None
        self._left.add(pair[0])
        self._pairs.add(pair)

    def report(self, title: str) -> None:
        print(
            f"{title}: {len(self.files)} files, {len(self.returns)} returns, {len(self.every)} in "
            "all"
        )
        print("   ", " -> ".join(self.files))
        for caller, file in self.returns:
            print(f"    return: {caller} -> {file}")


def _file(frame) -> str | None:
    """Return the frame's file in the package."""
    name = frame.f_code.co_filename
    return str(Path(name).relative_to(ROOT)) if name.startswith(str(ROOT)) else None


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))


def recipe_to_product() -> Walk:
    backend, x, net = "native:delayed", torch.randn(32, 64), model()

    def action():
        fp8_backends.prepare(net, None, backend)
        net(x)

    return Walk(
        action,
        lambda value: (
            value is backend or value is x or isinstance(value, (FP8RecipeKwargs, LayerRule))
        ),
    )


def weight_to_step() -> Walk:
    net = model()
    weights = {id(net[0].weight)}
    optimizer = torch.optim.AdamW(net.parameters())

    def action():
        fp8_backends.prepare(net, optimizer, "msamp:O2")
        weights.add(id(net[0].weight))
        net(torch.randn(32, 64)).sum().backward()
        optimizer.step()

    return Walk(action, lambda value: id(value) in weights)


def checkpoint(load: bool) -> Walk:
    """Follow the folder of `save_state` or `load_state`, as text or Path, and files in it."""
    accelerator = Accelerator(
        mixed_precision="fp8", kwargs_handlers=[FP8RecipeKwargs(backend="msamp:O2")], cpu=True
    )
    net = model()
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
    accelerator.backward(net(torch.randn(32, 64)).sum())
    optimizer.step()
    with tempfile.TemporaryDirectory() as temporary:
        folder = f"{temporary}/checkpoint"
        if load:
            accelerator.save_state(folder)
        action = accelerator.load_state if load else accelerator.save_state
        return Walk(
            lambda: action(folder),
            lambda value: isinstance(value, (str, Path)) and str(value).startswith(folder),
        )


if __name__ == "__main__":
    for feature, pattern in FEATURES.items():
        counts = named_in(pattern)
        rooms = {name.split("/")[0] for name in counts}
        print(f"{feature}: named by {len(counts)} files in {len(rooms)} rooms")
        print("   ", ", ".join(f"{name} {count}" for name, count in counts.items()))
    recipe_to_product().report("a backend string to its first product")
    weight_to_step().report("a weight to its O2 step")
    checkpoint(load=False).report("a checkpoint to the disk")
    checkpoint(load=True).report("a checkpoint to its model")
