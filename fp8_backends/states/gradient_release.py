"""Gradient release: an optimizer steps a parameter inside backward, and drops its gradient there
(docs/levels.rst).

`GradientRelease` is a post-accumulate-grad hook of each parameter. Each step equals the usual one
to the bit, as it depends only on its parameter, its group's options and its place in the optimizer.
`optimizer.step()` steps the remaining gradients, sends weights from their owners to all ranks, and
runs schedulers and step hooks.

A gradient that ranks share is taken once it is averaged. FSDP2 calls the hooks of its shards after
its reduce-scatter. Under DDP the reducer of scaled weights calls `take`; parameters reduced by DDP
itself get no hook, which would run too early, and are stepped in `step()`.
"""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from ..errors import FP8BackendError
from ..tensors.scaled_tensor import ScaledTensor
from ..tensors.sharded_tensor import local_part, with_local
from ..torch_tools.backward_end import call_when_backward_ends
from ..torch_tools.optimizers import has_closure
from .levels import cast_gradient
from .scaled_states import Member, ScaledStates, changed_options, options_of

PENDING = 2**22
"""Elements of gradients that are stepped together, so that small parameters need few steps."""


class DroppedGradient(torch.Tensor):
    """Placeholder in `.grad` for a gradient stepped in backward. Takes no memory; any use
    raises."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(
        cls,
        like: torch.Tensor,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ):
        dtype, device = dtype or like.dtype, device or like.device
        return torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=dtype, device=device
        )

    def __repr__(self) -> str:
        return f"DroppedGradient({list(self.shape)} {self.dtype})"

    def __deepcopy__(self, memo: dict) -> None:
        return None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in _MOVES:
            kwargs = kwargs or {}
            return DroppedGradient(args[0], kwargs.get("dtype"), kwargs.get("device"))
        (shape, *_) = (
            tuple(leaf.shape)
            for leaf in tree_iter((args, kwargs))
            if isinstance(leaf, DroppedGradient)
        )
        if func in (aten.add_.Tensor, aten.add.Tensor):
            raise _second(shape)
        raise FP8BackendError(
            f"gradient_release: {func} needs the gradient of a parameter of shape {shape}, and "
            "backward has stepped with it and dropped it: gradients cannot be read, scaled or "
            "clipped. zero_grad() with set_to_none=True clears it. Or prepare with "
            "gradient_release=False"
        )


aten = torch.ops.aten
_MOVES = (aten.detach.default, aten.alias.default, aten.view.default, aten._to_copy.default)


def is_dropped(gradient: torch.Tensor | None) -> bool:
    """Return True for a gradient stepped in backward."""
    return gradient is not None and isinstance(local_part(gradient), DroppedGradient)


class GradientRelease:
    """Post-accumulate-grad hook of an optimizer's parameters, with the gradients taken since the
    last `step()`."""

    def __init__(self, optimizer: ScaledStates) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.reset()

    def reset(self, *_) -> None:
        """Step post-hook: accept another gradient of each parameter."""
        self._members: dict[int, Member] | None = None
        """The optimizer's parameters by id, from the first gradient on."""
        self._taken: set[int] = set()
        """Ids of parameters with a gradient."""
        self._pending: list[Member] = []
        """Taken parameters before their step, with this many elements."""
        self._elements = 0
        self._options: list[dict[str, Any]] = []
        """Options of each group at the last of these steps."""
        self._waits_for_end = False
        for p in self.__dict__.pop("_dropped", ()):
            if p.grad is None:
                _drop(p)

    def __call__(self, p: torch.Tensor) -> None:
        """Take a complete gradient, unless it has to be averaged over ranks first."""
        reduces = [
            hook
            for hook in p._post_accumulate_grad_hooks.values()
            if getattr(hook, "reduces", False)
        ]
        if not reduces:
            self.take(p)
        elif not all(hook.travels for hook in reduces):
            raise FP8BackendError(
                "gradient_release: the gradients of this backward pass stay on their ranks "
                "(no_sync, which gradient accumulation and LocalSGD use), and steps are made of "
                "averages alone: let every backward synchronize, or prepare with "
                "gradient_release=False"
            )

    def take(self, p: torch.Tensor) -> None:
        """Step a parameter with its complete gradient, now or together with others of this backward
        pass. Raises `FP8BackendError` for a second gradient since the last `step()`."""
        optimizer = self._optimizer()
        if optimizer is None or p.grad is None:
            return
        if self._members is None:
            self._members = {id(member.parameter): member for member in optimizer.members()}
        member = self._members.get(id(p))
        if member is None:
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

    def _end(self) -> None:
        """Callback at the end of a backward pass, also of an inner one by re-entrant
        checkpointing."""
        self._waits_for_end = False
        if self._pending:
            self._step_pending()

    def _step_pending(self) -> None:
        pending, self._pending, self._elements = self._pending, [], 0
        optimizer = self._optimizer()
        # as outside of backward
        with torch.autocast(local_part(pending[0].parameter).device.type, enabled=False):
            optimizer.make_steps(pending)
        for p, _, _ in pending:
            _drop(p)
        self._options = [options_of(group) for group in optimizer.param_groups]

    def before_step(self, optimizer: ScaledStates, args: tuple, kwargs: dict[str, Any]) -> None:
        """Hide each `DroppedGradient` during the step: a step pre-hook. Raises `FP8BackendError`
        for a closure, options changed since backward, a new gradient of a stepped parameter, or a
        dropped one that was cleared."""
        if has_closure(args, kwargs):
            raise FP8BackendError(
                "gradient_release: step(closure) runs backward inside the step, and backward makes "
                "the steps here: call loss.backward() and then optimizer.step(), or prepare with "
                "gradient_release=False"
            )
        for number, (before, group) in enumerate(
            zip(self._options, optimizer.param_groups, strict=False)
        ):
            # groups added since have no steps
            if changed := changed_options(before, group):
                raise FP8BackendError(
                    f"gradient_release: {', '.join(changed)} of parameter group {number} changed "
                    "between backward, which has made its steps, and step(): change options "
                    "before backward, or after step()"
                )
        stepped = self._taken.difference(id(member.parameter) for member in self._pending)
        parameters = [p for p, _, _ in optimizer.members() if p.grad is not None]
        self._dropped = [p for p in parameters if is_dropped(p.grad)]
        for p in parameters:
            if id(p) in stepped and not is_dropped(p.grad):
                raise _second(p.shape)
        if len(stepped) > len(self._dropped):
            self.reset()
            raise FP8BackendError(
                "gradient_release: gradients were cleared between backward, which has stepped with "
                "them, and step(): no parameter can be left out of a step. Call zero_grad() after "
                "step(), freeze parameters with requires_grad_(False) before backward, or prepare "
                "with gradient_release=False"
            )
        for p in self._dropped:
            p.grad = None


def release_gradients(optimizer: ScaledStates, parameters: Iterable[torch.Tensor]) -> None:
    """Let an optimizer step these parameters of its own inside backward. Further calls add
    parameters."""
    owners = (
        getattr(hook, "__self__", None) for hook in optimizer._optimizer_step_pre_hooks.values()
    )
    release = next((owner for owner in owners if isinstance(owner, GradientRelease)), None)
    if release is None:
        release = GradientRelease(optimizer)
        optimizer.register_step_pre_hook(release.before_step)
        optimizer.register_step_post_hook(release.reset)
    for p in parameters:
        if p.requires_grad and not is_released(p):
            p.register_post_accumulate_grad_hook(release)


def is_released(p: torch.Tensor) -> bool:
    """Return True if an optimizer steps this parameter inside backward."""
    return any(
        isinstance(hook, GradientRelease) for hook in (p._post_accumulate_grad_hooks or {}).values()
    )


def _drop(p: torch.Tensor) -> None:
    p.grad = with_local(p, DroppedGradient(local_part(p)))


def _second(shape: Iterable[int]) -> FP8BackendError:
    return FP8BackendError(
        f"gradient_release: a second gradient of a parameter of shape {tuple(shape)} since the "
        "last optimizer.step() and zero_grad(), and backward has stepped with the first one and "
        "dropped it. Call both after each backward(): microbatches cannot accumulate, and no step "
        "can be left out. Where re-entrant activation checkpointing meets a weight that several "
        "layers share, use use_reentrant=False. Or prepare with gradient_release=False"
    )
