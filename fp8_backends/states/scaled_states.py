"""An optimizer whose states are stored as a level says: all that does not depend on its formula.

`ScaledStates` stands in front of a stock class of `torch.optim`: the same object, with its groups, options, hooks,
schedulers and state. A class of it declares what its states are (`Declaration`), and makes the steps of plain and of
scaled parameters; `optimizers.py` has the table of these classes, and converts.

On several ranks a step works on what lies there (`LocalView`): its shards under FSDP2, with scales that the ranks agree
on (`sharding.py`); all weights under DDP, but at O3 and O4 those that this rank owns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..errors import FP8BackendError
from ..numerics.faults import Range
from ..numerics.formats import FORMAT_OF
from ..numerics.kernels.adam import Slot
from ..numerics.scaled_tensor import ScaledTensor, quantize
from ..numerics.sharded_tensor import is_distributed, local_part, placed_as, with_local
from ..words import counted
from . import checkpoint, checks, sharding
from .levels import StateRule, cast_equal_gradient, finish_accumulation

MIN_SCALED_STATES = 4096
"""A plain parameter with fewer elements keeps FP32 states: norms and biases weigh nothing and are sensitive."""


class Declaration(NamedTuple):
    """What a converted optimizer says of its stock class."""

    stock: type[torch.optim.Optimizer]
    """The class whose objects are converted; subclasses of it are others."""
    roles: Mapping[str, str]
    """Name of a state that has a number for each element -> the one of `ROLES` that says how it is stored."""
    ranges: Mapping[str, Range]
    """Option -> the numbers that a checkpoint may have there; every other number must be finite."""
    refused: tuple[str, ...] = ()
    """Options that scaled weights and states do not take."""
    counts: bool = True
    """Whether the stock class counts a parameter's steps in a state `step`; here each optimizer does."""
    elementwise: bool = True
    """Whether the step of an element needs no other: parts of a parameter can be stepped one by one."""
    has_states: Callable[[Mapping[str, Any]], bool] = lambda group: True
    """Whether parameters of a group with these options have the states that `roles` names."""
    exact_states: Callable[[torch.Size], Mapping[str, tuple[int, ...]]] = lambda shape: {}
    """The shapes of further states of a parameter of this shape: small ones, in FP32, and whole on each rank."""


class Member(NamedTuple):
    """A parameter of an optimizer."""

    parameter: torch.Tensor
    group: dict[str, Any]
    index: int
    """Place among all parameters of the optimizer: the seed of its random bits."""


class LocalView(NamedTuple):
    """This rank's part of a parameter that takes part in a step."""

    parameter: torch.Tensor
    group: dict[str, Any]
    index: int
    """As in `Member`."""
    weight: torch.Tensor
    """What the step reads and writes: a plain tensor, a `ScaledTensor`, or the master of one."""
    copy: ScaledTensor | None
    """The weight in E4M3 that is made of its master."""
    gradient: torch.Tensor
    is_shard: bool
    """Whether the parameter is a DTensor, of which other ranks have other elements."""
    first: int
    """Index of the first element in the whole parameter."""
    finite: torch.Tensor | None = None
    """Whether the gradient is finite on all ranks, where it is a shard; bool, 0-dim."""


def view_of(p: torch.Tensor, group: dict[str, Any], index: int) -> LocalView:
    """This rank's part of a parameter that has a gradient.

    Raises:
        FP8BackendError: the master of a weight lies on another rank.
    """
    weight, copy, is_shard = local_part(p), None, is_distributed(p)
    gradient = local_part(placed_as(p, p.grad))
    if isinstance(gradient, ScaledTensor) and gradient._view is not None:  # somebody has put a view of another there
        gradient = gradient.values(torch.float32)
    if isinstance(weight, ScaledTensor):
        if weight.elsewhere is not None:
            weight.exact()  # a copied model's weight whose master another rank owns: this raises and says what to do
        if weight.master is not None:
            weight, copy = weight.master, weight
    first = sharding.first_element(p) if is_shard else 0
    return LocalView(p, group, index, weight, copy, gradient, is_shard, first)


class ScaledStates:
    """The step, the states and the state dicts of a converted optimizer. A class of one stands in front of its stock
    class, has its `Declaration`, and defines `_step_plain` and `_step_scaled`."""

    fp8_declared: Declaration
    fp8_states: StateRule
    fp8_owners: sharding.Owners | None = None
    """Which ranks keep the states of which parameters, where not every rank keeps all."""
    fp8_whole: bool = False
    """Whether the states of all parameters are here for a while, although other ranks own them."""
    fp8_unread: bool = False
    """Whether nobody reads the values in this rank's state dicts for a while: they are placeholders."""
    fp8_checked: bool = False
    """Whether the state dict that comes next was looked at already, in the file that it is loaded from."""

    @torch.no_grad()
    def step(self, closure=None):
        """Make one step, as the stock class does. A gradient that holds an inf or a NaN counts as zero."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.make_steps(self.members())
        if self.fp8_owners is not None:
            self.fp8_owners.share()
        return loss

    def members(self) -> list[Member]:
        """All parameters, in order."""
        in_order = ((group, p) for group in self.param_groups for p in group["params"])
        return [Member(p, group, index) for index, (group, p) in enumerate(in_order)]

    @torch.no_grad()
    def make_steps(self, members: Sequence[Member]) -> None:
        """Make the steps of those of these parameters that have a gradient, on this rank."""
        refuse_gradients_that_stay(member.parameter for member in members)
        views = self._views(members)
        plain, scaled = [], []
        for view in views:
            (plain if self._is_plain(view.group, view.parameter) else scaled).append(view)
        _zero_what_is_not_finite(plain)
        for group in self.param_groups:
            if of_group := [view for view in plain if view.group is group]:
                self._step_plain(of_group)
        if scaled:
            finish_accumulation(view.parameter for view in scaled)
            self._step_scaled(scaled)

    def _step_plain(self, views: Sequence[LocalView]) -> None:
        """Make the steps of parameters of one group about which nothing is scaled or rounded, with PyTorch's own
        arithmetic and implementations. Their gradients are finite."""
        raise NotImplementedError

    def _step_scaled(self, views: Sequence[LocalView]) -> None:
        """Make the steps of parameters that are rounded, or whose states are, all together."""
        raise NotImplementedError

    def _views(self, members: Sequence[Member]) -> list[LocalView]:
        """This rank's part of those of these parameters whose steps it makes now."""
        for group in self.param_groups:
            checks.check_options(group, self.fp8_declared.refused)
        views = []
        for p, group, index in members:
            if p.grad is not None and p.grad.is_sparse:
                name = self.fp8_declared.stock.__name__
                raise FP8BackendError(
                    f"{name} over scaled states cannot use sparse gradients: make the embedding with sparse=False"
                )
            if p.grad is not None and self.owns(p):
                views.append(view_of(p, group, index))
        if any(view.is_shard for view in views):
            gradients = [slot_of(view.gradient) for view in views]
            finite = sharding.finite_everywhere(gradients, [view.parameter for view in views])
            views = [view._replace(finite=known) for view, known in zip(views, finite, strict=True)]
        return views

    def owns(self, p: torch.Tensor) -> bool:
        """Whether this rank keeps the states of `p` and makes its steps."""
        return self.fp8_owners is None or self.fp8_owners.owns(p)

    def roles_of(self, group: Mapping[str, Any]) -> Mapping[str, str]:
        """`Declaration.roles` of the states that parameters of a group have."""
        return self.fp8_declared.roles if self.fp8_declared.has_states(group) else {}

    def _is_plain(self, group: Mapping[str, Any], p: torch.Tensor) -> bool:
        """Whether PyTorch's own step serves: nothing about the parameter or its states is scaled or rounded."""
        if p.is_complex() or p.dtype == torch.float64:
            return True
        rounded = any(self.moment_format(p, name)[0] != torch.float32 for name in self.roles_of(group))
        return not (rounded or _is_scaled(p)) and p.dtype == torch.float32

    def state_of(self, group: dict[str, Any], p: torch.Tensor) -> dict[str, Any]:
        """The parameter's state. It is filled before the first step."""
        state = self.state[p]
        if "step" not in state:
            state["step"] = self.new_counter(group, p)
        for name in self.roles_of(group):
            if name not in state:
                dtype, block_size = self.moment_format(p, name)
                scaled = dtype in FORMAT_OF
                local = local_part(p)
                zeros = torch.zeros(local.shape, dtype=torch.float32 if scaled else dtype, device=local.device)
                if scaled:
                    zeros = quantize(zeros, dtype, block_size=block_size)
                    zeros.partial, zeros.is_state = is_distributed(p), True
                state[name] = with_local(p, zeros)
        for name, shape in self.fp8_declared.exact_states(p.shape).items():
            if name not in state:
                state[name] = torch.zeros(shape, dtype=torch.float32, device=local_part(p).device)
        self.show_master(p)
        return state

    def new_counter(self, group: dict[str, Any], p: torch.Tensor) -> torch.Tensor:
        """A step counter of 0, where PyTorch has it."""
        on_device = group.get("capturable") or group.get("fused")
        return torch.zeros((), dtype=torch.float32, device=p.device if on_device else "cpu")

    def moment_format(self, p: torch.Tensor, name: str) -> tuple[torch.dtype, int]:
        """(dtype, block size) in which a state of `p` is stored: one of those that are declared."""
        if p.is_complex() or p.dtype == torch.float64:
            return p.dtype, 0
        if not _is_scaled(p) and p.numel() < MIN_SCALED_STATES:
            return torch.float32, 0
        return getattr(self.fp8_states, self.fp8_declared.roles[name])

    def show_master(self, p: torch.Tensor) -> None:
        """Put the master of a weight into its state, where audits and checkpoints see it."""
        master = getattr(local_part(p), "master", None)
        if master is not None:
            self.state[p][checkpoint.MASTER] = with_local(p, master)

    def forget_others(self) -> None:
        """Drop the states of parameters that other ranks own."""
        for p in [p for p in self.state if not self.owns(p)]:
            del self.state[p]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "fp8_states": self.fp8_states}

    def state_dict(self) -> dict[str, Any]:
        """PyTorch's state dict, with scaled states as plain values: BF16 or FP32 ones on the CPU, those of DTensors as
        DTensors of FP32.

        Raises:
            FP8BackendError: other ranks own some of the states, and `whole_states` is not entered.
        """
        if self.fp8_owners is not None and not self.fp8_whole:
            raise FP8BackendError(
                f"this optimizer's states are shared out between the ranks (level {self.fp8_states.level}): save with "
                "Accelerator.save_state, called on all ranks; or enter "
                "fp8_backends.checkpoints.whole_states(optimizer) on all ranks around state_dict(); or prepare with "
                "shard_states=False"
            )
        return checkpoint.export_states(self, super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of any level or of the stock class, by value. Group dictionaries are updated in place, so
        that schedulers keep acting on them.

        Raises:
            FP8BackendError: training could not go on from it (`checks.check_states`). Nothing has changed then.
        """
        if not self.fp8_checked:
            checks.check_states(self, state_dict)
        checkpoint.load_states(self, state_dict, super().load_state_dict)

    def lost_updates(self) -> float | None:
        """The share, 0 to 1, of the next update that the rounding of weights would lose; None where that is not known
        before the step."""
        return None


def refuse_gradients_that_stay(parameters: Iterable[torch.Tensor]) -> None:
    """Raise `FP8BackendError` where the gradient of a scaled weight is this rank's own, though it trains together with
    others: the ranks would drift apart.

    Gradients travel under FSDP2, whose parameters are DTensors, and by a hook of the parameter that says `reduces`.
    They need not where a hook says that the ranks compute them alike.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return
    alone = []
    for p in parameters:
        hooks = (p._post_accumulate_grad_hooks or {}).values()
        settled = any(hook is cast_equal_gradient or getattr(hook, "reduces", False) for hook in hooks)
        if type(p) is ScaledTensor and p.grad is not None and not settled:
            alone.append(p)
    if alone:
        shapes = ", ".join(sorted({str(tuple(p.shape)) for p in alone}))
        raise FP8BackendError(
            f"the gradients of {counted(len(alone), 'scaled weight')} of shape {shapes} do not travel between ranks "
            f"and would drift apart: prepare the DDP-wrapped model again, with its optimizer, so that its gradients "
            f"are reduced; or, where other ranks have other weights (a pipeline), shard the model with fully_shard "
            f"over the ranks that have these"
        )


def _is_scaled(p: torch.Tensor) -> bool:
    return isinstance(local_part(p), ScaledTensor)


def slot_of(tensor: torch.Tensor) -> Slot:
    """This rank's part of a tensor, as a step reads and writes it."""
    tensor = local_part(tensor)
    if isinstance(tensor, ScaledTensor):
        tensor.settle()
        return Slot(tensor._data, tensor._scale_inv, tensor.block_size, tensor.residual)
    return Slot(tensor.detach())


def _zero_what_is_not_finite(views: Sequence[LocalView]) -> None:
    """Set a gradient that holds an inf or a NaN to zero, in place and without asking the device."""
    spoiled = {i: ~view.finite for i, view in enumerate(views) if view.finite is not None}
    unknown: dict[torch.device, list[int]] = {}
    for i in range(len(views)):
        if i not in spoiled and views[i].gradient.numel():
            unknown.setdefault(views[i].gradient.device, []).append(i)
    for members in unknown.values():
        largest = torch._foreach_norm([views[i].gradient for i in members], float("inf"))
        spoiled |= zip(members, torch.isfinite(torch.stack(largest)).logical_not_().unbind(), strict=True)
    for i, is_spoiled in spoiled.items():
        views[i].gradient.masked_fill_(is_spoiled, 0)
