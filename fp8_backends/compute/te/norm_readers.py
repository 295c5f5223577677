"""Which Linear reads the output of a norm, and whether anything else does: by the graph of the module that calls both.

The forward of the norm's parent is traced by `torch.fx`, its children as they are. Where the output goes to a child
that is a container, that one's forward is followed as well. Names say nothing here.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Container
from typing import Any

import torch
from torch import fx, nn


def only_reader(root: nn.Module, norm: nn.Module, linears: Container[int]) -> nn.Module | str:
    """The one Linear that reads the output of `norm`, where nothing else reads it and nothing lies between the two.
    Else the reason, in words.

    Args:
        linears: the ids of the layers that may be the answer.
    """
    parent = _calling_parent(root, norm)
    if parent is None:
        return "no module of the model calls it"
    # a forward may take another way where an input that it can do without is given
    answers = [_answer(parent, norm, linears, optional) for optional in (True, False)]
    readers = [answer for answer in answers if isinstance(answer, nn.Module)]
    reasons = [answer for answer in answers if isinstance(answer, str)]
    failures = [str(answer) for answer in answers if isinstance(answer, _Untraced)]
    if len({id(reader) for reader in readers}) > 1:
        reasons.append("which layer reads its output depends on inputs that may be left out")
    if readers and not reasons:
        return readers[0]
    return (reasons or failures or [f"the forward of {type(parent).__name__} does not call it"])[0]


def _calling_parent(root: nn.Module, norm: nn.Module) -> nn.Module | None:
    """The innermost module around `norm` that has a forward (a ModuleList has none)."""
    found = None
    for module in root.modules():  # from the outside in
        has_forward = type(module).forward is not nn.Module.forward
        if module is not norm and has_forward and any(part is norm for part in module.modules()):
            found = module
    return found


class _Untraced(Exception):
    """A forward could not be traced."""


def _answer(parent: nn.Module, norm: nn.Module, linears: Container[int], optional: bool) -> Any:
    """The only reader, the reason why there is none, `_Untraced`, or None where the norm is not called."""
    followed = [parent]
    while True:
        try:
            reader = _reader(followed, norm, optional)
        except Exception as error:  # of any kind: a forward that meets symbols in place of tensors
            sentence = f"{type(error).__name__}: {error}".splitlines()[0].split(". ")[0]
            return _Untraced(f"the forward of {type(followed[-1]).__name__} could not be traced: {sentence}")
        if not isinstance(reader, nn.Module) or id(reader) in linears:
            return reader
        if isinstance(reader, nn.Linear) or not any(id(part) in linears for part in reader.modules()):
            return f"its output goes to a {type(reader).__name__}, which is no FP8 layer"
        followed.append(reader)


def _reader(followed: list[nn.Module], norm: nn.Module, optional: bool) -> nn.Module | str | None:
    """The module that alone reads the output of `norm`, once, when `followed[0]` runs; or what is in its way."""
    tracer = _Tracer(followed, optional)
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_initialized() else []):
        graph = tracer.trace(tracer.copied(followed[0]))
    calls = [node for node in graph.nodes if node.op == "call_module" and tracer.module(node) is norm]
    if not calls:
        return None
    if len(calls) > 1:
        return f"{type(followed[0]).__name__} calls it {len(calls)} times"
    readers = list(calls[0].users)
    if len(readers) != 1:
        return f"{len(readers)} operations read its output"
    (node,) = readers
    if node.op != "call_module" or node.args != (calls[0],) or node.kwargs:
        return f"its output goes to {node.name}, which is no module of one input"
    reader = tracer.module(node)
    if sum(tracer.module(other) is reader for other in graph.nodes if other.op == "call_module") != 1:
        return f"the {type(reader).__name__} that reads its output is called more than once"
    return reader


class _Tracer(fx.Tracer):
    """Follows the forward of some modules, on copies, so that what a forward notes on its module is lost. Its random
    numbers are given back (`_reader`).

    Args:
        optional: whether inputs with a default are given. What is not named (*args, **kwargs) is left out.
    """

    def __init__(self, followed: list[nn.Module], optional: bool) -> None:
        super().__init__()
        self.followed = {id(module) for module in followed}
        self.optional = optional
        self.originals: dict[int, nn.Module] = {}
        """Of each copy, keyed by its id."""

    def create_args_for_root(self, root_fn: Callable, is_module: bool, concrete_args: Any = None) -> tuple:
        _, *inputs = inspect.signature(root_fn).parameters.values()
        given = [
            each
            for each in inputs
            if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
            and (each.default is each.empty or self.optional)
        ]
        symbols = {each.name: self.create_proxy("placeholder", each.name, (), {}) for each in given}
        return functools.partial(root_fn, **symbols), [self.root]

    def copied(self, module: nn.Module) -> nn.Module:
        """A copy that holds the same children, but for those that are followed or lead to such."""
        copied = object.__new__(type(module))
        copied.__dict__.update(module.__dict__)
        for name in ("_parameters", "_buffers"):
            copied.__dict__[name] = dict(module.__dict__[name])
        copied.__dict__["_modules"] = {
            name: self.copied(child) if self._leads_to_followed(child) else child
            for name, child in module._modules.items()
        }
        self.originals[id(copied)] = module
        return copied

    def _leads_to_followed(self, child: nn.Module | None) -> bool:
        return child is not None and any(id(part) in self.followed for part in child.modules())

    def module(self, node: fx.Node) -> nn.Module:
        called = self.root.get_submodule(node.target)
        return self.originals.get(id(called), called)

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return id(self.originals.get(id(module))) not in self.followed
