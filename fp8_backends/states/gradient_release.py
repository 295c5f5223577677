"""Gradient release: an optimizer makes a parameter's step inside backward, and drops the gradient there.

`GradientRelease` is a post-accumulate-grad hook of each parameter. A gradient waits in `.grad` until `PENDING` elements
are there, or the backward pass ends; then these parameters are stepped together. So `PENDING` elements and the gradient
that exceeds them is all that lies in memory. Each step is that of the usual order, to the bit: it depends on its
parameter, the options of its group and the parameter's place in the optimizer alone.

A `DroppedGradient` stays in `.grad` until `zero_grad()`: code that reads, clips or accumulates gradients there gets an
error.

`optimizer.step()` stays in the loop. It makes the steps of what has a gradient then, shares weights out between the
ranks where they have owners, and is what schedulers and step hooks follow.

Where other ranks have a part in a gradient, it is taken when the average is there. FSDP2 calls these hooks for its
shards after its reduce-scatter. Under DDP the reducer of scaled weights calls `take`; parameters that DDP reduces
itself get no hook, since theirs would run too early, and are stepped in `step()`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_iter

from ..errors import FP8BackendError
from ..numerics.engine import call_when_backward_ends
from ..numerics.scaled_tensor import ScaledTensor
from ..numerics.sharded_tensor import local_part, with_local
from .levels import cast_gradient
from .scaled_states import Member, ScaledStates

PENDING = 2**22
"""Elements of parameters whose gradients wait for each other, so that few steps are made of many parameters."""


class DroppedGradient(torch.Tensor):
    """Stands in `.grad` for a gradient that backward has stepped with. It takes no memory, and any use raises."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, like: torch.Tensor, dtype: torch.dtype | None = None, device: torch.device | None = None):
        dtype, device = dtype or like.dtype, device or like.device
        return torch.Tensor._make_wrapper_subclass(cls, like.shape, strides=like.stride(), dtype=dtype, device=device)

    def __repr__(self) -> str:
        return f"DroppedGradient({list(self.shape)} {self.dtype})"

    def __deepcopy__(self, memo: dict) -> None:
        return None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in _MOVES:
            kwargs = kwargs or {}
            return DroppedGradient(args[0], kwargs.get("dtype"), kwargs.get("device"))
        (shape, *_) = (tuple(each.shape) for each in tree_iter((args, kwargs)) if isinstance(each, DroppedGradient))
        if func in (aten.add_.Tensor, aten.add.Tensor):
            raise _second(shape)
        raise FP8BackendError(
            f"gradient_release: {func} needs the gradient of a parameter of shape {shape}, and backward has stepped "
            f"with it and dropped it: gradients cannot be read, scaled or clipped. zero_grad() with set_to_none=True "
            f"clears it. Or prepare with gradient_release=False"
        )


aten = torch.ops.aten
_MOVES = (aten.detach.default, aten.alias.default, aten.view.default, aten._to_copy.default)


def is_dropped(gradient: torch.Tensor | None) -> bool:
    """Whether backward has stepped with this gradient and dropped it."""
    return gradient is not None and isinstance(local_part(gradient), DroppedGradient)


class _Place(NamedTuple):
    """Where a parameter stands in its optimizer."""

    group: int
    in_group: int
    index: int


class GradientRelease:
    """Post-accumulate-grad hook of parameters of one optimizer, and what it has taken since the last `step()`."""

    def __init__(self, optimizer: ScaledStates) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._places: dict[int, _Place] = {}
        self.begin_anew()

    def begin_anew(self, *_) -> None:
        """Step post-hook: a further gradient of each parameter may come."""
        self._taken: set[int] = set()
        """Identities of the parameters whose gradient has come."""
        self._pending: list[Member] = []
        """Those of them that are not stepped yet."""
        self._elements = 0
        """How many elements these have."""
        self._options: list[dict[str, Any]] = []
        """Of each group, as the last of these steps has left them."""
        self._waits_for_end = False
        for p in self.__dict__.pop("_dropped", ()):
            if p.grad is None:
                _drop(p)

    def follow(self, parameters: Iterable[torch.Tensor]) -> None:
        """Take the gradients of these parameters of the optimizer, where they train. Repeating it does nothing."""
        groups = [group["params"] for group in self._optimizer().param_groups]
        places = [(number, i) for number, members in enumerate(groups) for i in range(len(members))]
        self._places = {id(groups[g][i]): _Place(g, i, index) for index, (g, i) in enumerate(places)}
        for p in parameters:
            known = (p._post_accumulate_grad_hooks or {}).values()
            if p.requires_grad and not any(hook is self for hook in known):
                p.register_post_accumulate_grad_hook(self)

    def __call__(self, p: torch.Tensor) -> None:
        """Take a gradient that is complete, unless it has to travel to other ranks first."""
        reduces = [hook for hook in p._post_accumulate_grad_hooks.values() if getattr(hook, "reduces", False)]
        if not reduces:
            self.take(p)
        elif not all(hook.travels for hook in reduces):
            raise FP8BackendError(
                "gradient_release: the gradients of this backward pass stay on their ranks (no_sync, which gradient "
                "accumulation and LocalSGD use), and steps are made of averages alone: let every backward synchronize, "
                "or prepare with gradient_release=False"
            )

    def take(self, p: torch.Tensor) -> None:
        """Step a parameter with its gradient, which is complete, now or together with others of this backward pass.

        Raises:
            FP8BackendError: it is the second one since the last `step()`.
        """
        member = self._member(p)
        if member is None or p.grad is None:
            return
        if id(p) in self._taken:
            raise _second(p.shape)
        self._taken.add(id(p))
        if isinstance(local_part(p), ScaledTensor):
            cast_gradient(p)
        self._pending.append(member)
        self._elements += p.numel()  # of the whole parameter: all ranks step the same ones together
        if self._elements >= PENDING:
            self._step_pending()
        elif not self._waits_for_end:
            self._waits_for_end = True
            call_when_backward_ends(self._end)

    def _member(self, p: torch.Tensor) -> Member | None:
        """A parameter as its optimizer has it; None where it is there no more."""
        optimizer, place = self._optimizer(), self._places.get(id(p))
        if optimizer is None or place is None:
            return None
        group = optimizer.param_groups[place.group]
        return Member(p, group, place.index) if group["params"][place.in_group] is p else None

    def _end(self) -> None:
        """End of a backward pass, or of one that re-entrant checkpointing makes inside it."""
        self._waits_for_end = False
        if self._pending:
            self._step_pending()

    def _step_pending(self) -> None:
        pending, self._pending, self._elements = self._pending, [], 0
        optimizer = self._optimizer()
        with torch.autocast(local_part(pending[0].parameter).device.type, enabled=False):  # as outside of a backward
            optimizer.make_steps(pending)
        for p, _, _ in pending:
            _drop(p)
        self._options = [_options(group) for group in optimizer.param_groups]

    def before_step(self, optimizer: ScaledStates, args: tuple, kwargs: dict[str, Any]) -> None:
        """Step pre-hook. Nobody sees a `DroppedGradient` during the step.

        Raises:
            FP8BackendError: with a closure, with options that have changed since backward, with a gradient where
                one was stepped with already, or without the gradient that was.
        """
        if any(each is not None for each in (*args[1:], *kwargs.values())):  # args begins with the optimizer
            raise FP8BackendError(
                "gradient_release: step(closure) runs backward inside the step, and backward makes the steps here: "
                "call loss.backward() and then optimizer.step(), or prepare with gradient_release=False"
            )
        for number, (before, group) in enumerate(zip(self._options, optimizer.param_groups, strict=False)):
            now = _options(group)  # of further groups nobody was stepped
            if changed := sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name)):
                raise FP8BackendError(
                    f"gradient_release: {', '.join(changed)} of parameter group {number} changed between backward, "
                    f"which has made its steps, and step(): change options before backward, or after step()"
                )
        stepped = self._taken.difference(id(member.parameter) for member in self._pending)
        parameters = [p for p, _, _ in optimizer.members() if p.grad is not None]
        self._dropped = [p for p in parameters if is_dropped(p.grad)]
        for p in parameters:
            if id(p) in stepped and not is_dropped(p.grad):
                raise _second(p.shape)
        if len(stepped) > len(self._dropped):
            self.begin_anew()
            raise FP8BackendError(
                "gradient_release: gradients were cleared between backward, which has stepped with them, and step(): "
                "no parameter can be left out of a step. Call zero_grad() after step(), freeze parameters with "
                "requires_grad_(False) before backward, or prepare with gradient_release=False"
            )
        for p in self._dropped:
            p.grad = None


def release_gradients(optimizer: ScaledStates, parameters: Iterable[torch.Tensor]) -> None:
    """Let an optimizer step these of its parameters inside backward. Repeating it adds parameters."""
    owners = (getattr(hook, "__self__", None) for hook in optimizer._optimizer_step_pre_hooks.values())
    release = next((owner for owner in owners if isinstance(owner, GradientRelease)), None)
    if release is None:
        release = GradientRelease(optimizer)
        optimizer.register_step_pre_hook(release.before_step)
        optimizer.register_step_post_hook(release.begin_anew)
    release.follow(parameters)


def is_released(p: torch.Tensor) -> bool:
    """Whether an optimizer steps this parameter inside backward."""
    return any(isinstance(hook, GradientRelease) for hook in (p._post_accumulate_grad_hooks or {}).values())


def _drop(p: torch.Tensor) -> None:
    p.grad = with_local(p, DroppedGradient(local_part(p)))


def _second(shape: Iterable[int]) -> FP8BackendError:
    return FP8BackendError(
        f"gradient_release: a second gradient of a parameter of shape {tuple(shape)} since the last optimizer.step() "
        f"and zero_grad(), and backward has stepped with the first one and dropped it. Call both after each "
        f"backward(): microbatches cannot accumulate, and no step can be left out. Where re-entrant activation "
        f"checkpointing meets a weight that several layers share, use use_reentrant=False. Or prepare with "
        f"gradient_release=False"
    )


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """The options of a group, comparable without asking a device."""
    return {
        name: (id(value), value._version) if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name not in ("params", "param_names")
    }
