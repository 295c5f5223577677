"""Replace the tensor inside a Parameter object: optimizers, ties and references stay valid.

`torch.utils.swap_tensors` also swaps the user's attributes and hooks, and drops the gradient; they
are kept here.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..errors import FP8BackendError
from .scaled_tensor import OBJECT_ATTRIBUTES, ScaledTensor

_STORAGE = {*OBJECT_ATTRIBUTES, "_is_param"}
"""Attributes of a Parameter's tensor; the last is `nn.Parameter`'s own."""


def swap(parameter: nn.Parameter, tensor: torch.Tensor, name: str) -> None:
    """Replace the tensor of `parameter` by `tensor`, plain or scaled. Its gradient stays unchanged.
    Raises `FP8BackendError`, without a change, if something else holds the parameter's tensor."""
    refuse_if_held(parameter, name)
    gradient, belongings = parameter.grad, _belongings(parameter)
    parameter.grad = None
    new = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
    try:
        torch.utils.swap_tensors(parameter, new)
    except RuntimeError as error:
        parameter.grad = gradient
        raise FP8BackendError(_held(name, str(error))) from error
    _give_back(parameter, *belongings)
    parameter.grad = gradient


def refuse_if_held(parameter: nn.Parameter, name: str) -> None:
    """Raise `FP8BackendError` if a weak reference or an autograd graph would prevent `swap`."""
    if weakref.getweakrefs(parameter):
        raise FP8BackendError(_held(name, "a weak reference to it exists"))
    if parameter._use_count() > 2:  # itself, and the node that accumulates its gradient
        raise FP8BackendError(_held(name, "a graph saved it for backward"))


def _held(name: str, why: str) -> str:
    return (
        f"{name}: its storage cannot be swapped while something else holds the tensor ({why}): "
        "prepare the model and move it to its device before torch.compile runs it, before it is "
        "wrapped, when no loss of an earlier forward is kept and no profiler runs"
    )


@contextlib.contextmanager
def belongings_kept(
    module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    """Keep hooks and attributes where they are during `module.to(…)`, which swaps the tensors of
    scaled Parameters. Weights that `fn` would leave on their device in their dtype stay out: others
    may hold them, and forbid a swap."""
    scaled = {name: p for name, p in module._parameters.items() if isinstance(p, ScaledTensor)}
    unchanged = {name: p for name, p in scaled.items() if _leaves(fn, p)}
    for name, parameter in scaled.items():
        if name not in unchanged:
            refuse_if_held(parameter, name)
    before = [(p, _belongings(p)) for p in scaled.values()]
    module._parameters.update(dict.fromkeys(unchanged))
    try:
        yield
    finally:
        module._parameters.update(unchanged)
        for parameter, belongings in before:
            _give_back(parameter, *belongings)


def _leaves(fn: Callable[[torch.Tensor], torch.Tensor], parameter: torch.Tensor) -> bool:
    probe = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    return fn(probe) is probe and not (probe.device.type == "cpu" and probe.is_shared())


class KeepsBelongings:
    """`_apply` of a foreign module class with `belongings_kept` around it. Picklable, unlike a
    closure."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, fn, recurse: bool = True) -> nn.Module:
        with belongings_kept(self.module, fn):
            return type(self.module)._apply(self.module, fn, recurse)


def _belongings(parameter: torch.Tensor) -> tuple[dict[str, Any], Any, Any]:
    attributes = {name: value for name, value in parameter.__dict__.items() if name not in _STORAGE}
    return attributes, parameter._backward_hooks, parameter._post_accumulate_grad_hooks


def _give_back(
    parameter: torch.Tensor, attributes: dict[str, Any], hooks: Any, gradient_hooks: Any
) -> None:
    parameter.__dict__.update(attributes)
    # the same dictionaries, so that users' handles can still remove their hooks
    if hooks is not None:
        parameter._backward_hooks = hooks
    if gradient_hooks is not None:
        parameter._post_accumulate_grad_hooks = gradient_hooks
