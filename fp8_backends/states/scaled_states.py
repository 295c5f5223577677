"""Optimizers with states stored at a level: everything but their formulas.

`ScaledStates` is a base class in front of a stock class of `torch.optim`: the object keeps its
groups, options, hooks, schedulers and state. A subclass declares its states (`Declaration`) and
makes the steps of plain and of scaled parameters; `optimizers.py` converts.

On several ranks a step works on the local part of each parameter (`LocalView`): shards under FSDP2,
with scales agreed on by the ranks (`sharding.py`); whole weights under DDP, at O3 and O4 those of
this rank.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..errors import FP8BackendError
from ..formats.formats import FORMAT_OF, Range
from ..tensors.scaled_tensor import Kind, Partial, ScaledTensor, quantize
from ..tensors.sharded_tensor import is_distributed, local_part, placed_as, with_local
from ..words import counted
from . import checkpoint, sharding
from .levels import StateRule, cast_equal_gradient, finish_accumulation

MIN_SCALED_STATES = 4096
"""Smaller plain parameters keep FP32 states: norms and biases take little memory and are
sensitive."""


class Declaration(NamedTuple):
    """Properties of a stock optimizer class."""

    stock: type[torch.optim.Optimizer]
    """The class of converted objects, without subclasses."""
    roles: Mapping[str, str]
    """Name of an elementwise state -> its storage, one of `ROLES`."""
    ranges: Mapping[str, Range]
    """Option -> allowed numbers in a checkpoint; every other number must be finite."""
    refused: tuple[str, ...] = ()
    """Options that scaled weights and states do not support."""
    counts: bool = True
    """The stock class counts a parameter's steps in a state `step`; here every optimizer does."""
    elementwise: bool = True
    """Elements step independently, so a parameter can be stepped in parts."""
    has_states: Callable[[Mapping[str, Any]], bool] = lambda group: True
    """Returns True if parameters of a group with these options have the states in `roles`."""
    exact_states: Callable[[torch.Size], Mapping[str, tuple[int, ...]]] = lambda shape: {}
    """Returns the shapes of further states of a parameter: small ones, in FP32, and whole on each
    rank."""

    def check_options(self, group: Mapping[str, Any]) -> None:
        """Raise `FP8BackendError` for refused options."""
        if given := [option for option in self.refused if group.get(option)]:
            raise FP8BackendError(
                f"{given[0]}=True is not supported with scaled weights and states: leave it out"
            )


class Member(NamedTuple):
    parameter: torch.Tensor
    group: dict[str, Any]
    index: int
    """Place among all parameters of the optimizer: the seed of its random bits."""


class LocalView(NamedTuple):
    """This rank's part of a parameter in a step."""

    parameter: torch.Tensor
    group: dict[str, Any]
    index: int
    """As in `Member`."""
    weight: torch.Tensor
    """Read and written by the step: a plain tensor, a `ScaledTensor`, or the master of one."""
    copy: ScaledTensor | None
    """The E4M3 weight of a master."""
    gradient: torch.Tensor
    first: int
    """Index of the first element in the whole parameter."""
    is_shard: bool
    state: dict[str, Any] | None = None
    """Its state in the optimizer, filled; None until the step."""
    finite: torch.Tensor | None = None
    """For a shard, whether its gradient is finite on all ranks; bool, 0-dim."""


def view_of(p: torch.Tensor, group: dict[str, Any], index: int) -> LocalView:
    """Return this rank's part of a parameter with a gradient. Raises `FP8BackendError` if the
    master is elsewhere."""
    weight, copy = local_part(p), None
    gradient = local_part(placed_as(p, p.grad))
    # a view of another gradient was assigned
    if isinstance(gradient, ScaledTensor) and gradient._view is not None:
        gradient = gradient.values(torch.float32)
    if isinstance(weight, ScaledTensor):
        if weight.elsewhere is not None:
            weight.exact()  # in a copied model, without its owners: raise
        if weight.master is not None:
            weight, copy = weight.master, weight
    is_shard = is_distributed(p)
    return LocalView(
        p,
        group,
        index,
        weight,
        copy,
        gradient,
        sharding.first_element(p) if is_shard else 0,
        is_shard,
    )


class ScaledStates:
    """Step and save a converted optimizer: base class in front of a stock class, with its
    `Declaration`."""

    fp8_declared: Declaration
    fp8_states: StateRule
    fp8_owners: Any = None
    """The `comm.ddp.SharedOut` that assigns states to ranks; None if every rank has all."""
    fp8_offload: Any = None
    """The `offload.Offload` with states in the memory of the host; None if they are on the weights'
    devices."""
    fp8_whole: bool = False
    """All states are on this rank for a while."""
    fp8_unread: bool = False
    """Values in this rank's state dicts are not read for a while: return placeholders."""
    fp8_checked: bool = False
    """The next state dict was checked already, in its file."""

    @torch.no_grad()
    def step(self, closure=None):
        """Make one step like the stock class. A gradient with an inf or a NaN counts as zero."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        make_steps = self.make_steps
        if torch.compiler.is_dynamo_compiling():  # a compiled step: kernels are eager code
            make_steps = torch.compiler.disable(make_steps)
        make_steps(self.members())
        if self.fp8_offload is not None:
            self.fp8_offload.link.finish()
        if self.fp8_owners is not None:
            self.fp8_owners.share()
        return loss

    def members(self) -> list[Member]:
        in_order = ((group, p) for group in self.param_groups for p in group["params"])
        return [Member(p, group, index) for index, (group, p) in enumerate(in_order)]

    @torch.no_grad()
    def make_steps(self, members: Sequence[Member]) -> None:
        """Step the parameters with a gradient, on this rank."""
        refuse_gradients_that_stay(member.parameter for member in members)
        views = self._views(members)
        plain, scaled = [], []
        for view in views:
            (plain if self._is_plain(view.group, view.parameter) else scaled).append(view)
        _zero_what_is_not_finite(plain)
        for group in self.param_groups:
            if of_group := [view for view in plain if view.group is group]:
                self._step_plain(self._with_states(of_group))
        if scaled:
            finish_accumulation(view.parameter for view in scaled)
            scaled = self._with_states(scaled)
            if self.fp8_offload is not None:
                scaled = self.fp8_offload.take(self, scaled)
        if scaled:
            self.step_scaled(scaled)

    def _with_states(self, views: Sequence[LocalView]) -> list[LocalView]:
        return [view._replace(state=self.state_of(view.group, view.parameter)) for view in views]

    def _step_plain(self, views: Sequence[LocalView]) -> None:
        """Step plain parameters of one group with PyTorch's implementations. Their gradients are
        finite."""
        raise NotImplementedError

    def step_scaled(self, views: Sequence[LocalView]) -> None:
        """Step all scaled parameters, and parameters with scaled states, together."""
        raise NotImplementedError

    def _views(self, members: Sequence[Member]) -> list[LocalView]:
        """Return this rank's part of the parameters that it steps now."""
        for group in self.param_groups:
            self.fp8_declared.check_options(group)
        views = []
        for p, group, index in members:
            if p.grad is not None and p.grad.is_sparse:
                name = self.fp8_declared.stock.__name__
                raise FP8BackendError(
                    f"{name} over scaled states cannot use sparse gradients: make the embedding "
                    "with sparse=False"
                )
            if p.grad is not None and self.owns(p):
                views.append(view_of(p, group, index))
        if any(view.is_shard for view in views):
            gradients = [sharding.slot_of(view.gradient) for view in views]
            finite = sharding.finite_everywhere(gradients, [view.parameter for view in views])
            views = [view._replace(finite=flag) for view, flag in zip(views, finite, strict=True)]
        return views

    def owns(self, p: torch.Tensor) -> bool:
        """Return True if this rank keeps the states of `p` and steps it."""
        return self.fp8_owners is None or self.fp8_owners.owns(p)

    def place_of(self, p: torch.Tensor) -> torch.device:
        """Return the device of a parameter's states."""
        if self.fp8_offload is not None and type(p) is ScaledTensor:
            return torch.device("cpu")
        return local_part(p).device

    def stepped(self, p: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a parameter, where its states are."""
        if self.fp8_offload is not None and type(p) is ScaledTensor:
            return self.fp8_offload.twin_of(p)
        return local_part(p)

    def roles_of(self, group: Mapping[str, Any]) -> Mapping[str, str]:
        """Return `Declaration.roles` if parameters of this group have such states."""
        return self.fp8_declared.roles if self.fp8_declared.has_states(group) else {}

    def _is_plain(self, group: Mapping[str, Any], p: torch.Tensor) -> bool:
        """Return True if neither the parameter nor its states are scaled: PyTorch's own step
        applies."""
        if p.is_complex() or p.dtype == torch.float64:
            return True
        rounded = any(
            self.moment_format(p, name)[0] != torch.float32 for name in self.roles_of(group)
        )
        return not (rounded or _is_scaled(p)) and p.dtype == torch.float32

    def state_of(self, group: dict[str, Any], p: torch.Tensor) -> dict[str, Any]:
        """Return the parameter's state, filled before the first step."""
        state = self.state[p]
        if "step" not in state:
            state["step"] = self.new_counter(group, p)
        for name in self.roles_of(group):
            if name not in state:
                state[name] = with_local(p, self.new_moment(p, name, self.place_of(p)))
            # somebody replaced it
            elif not checkpoint.is_stored(state[name], *self.moment_format(p, name)):
                checkpoint.store_states(self, p, {name: state[name]})
        for name, shape in self.fp8_declared.exact_states(p.shape).items():
            if name not in state:
                state[name] = torch.zeros(shape, dtype=torch.float32, device=local_part(p).device)
        return state

    def new_moment(self, p: torch.Tensor, name: str, device: torch.device | str) -> torch.Tensor:
        """Return zeros for the local part of a declared state of `p`."""
        dtype, block_size = self.moment_format(p, name)
        scaled = dtype in FORMAT_OF
        zeros = torch.zeros(
            local_part(p).shape, dtype=torch.float32 if scaled else dtype, device=device
        )
        if scaled:
            zeros = quantize(zeros, dtype, block_size=block_size)
            zeros.kind = Kind.STATE
            zeros.partial = Partial(is_distributed(p))
        return zeros

    def new_counter(self, group: dict[str, Any], p: torch.Tensor) -> torch.Tensor:
        """Return a step counter of 0 on PyTorch's device for it."""
        on_device = group.get("capturable") or group.get("fused")
        place = self.place_of(p) if on_device else "cpu"
        return torch.zeros((), dtype=torch.float32, device=place)

    def moment_format(self, p: torch.Tensor, name: str) -> tuple[torch.dtype, int]:
        """Return (dtype, block size) of a declared state of `p`."""
        if p.is_complex() or p.dtype == torch.float64:
            return p.dtype, 0
        if not _is_scaled(p) and p.numel() < MIN_SCALED_STATES:
            return torch.float32, 0
        return getattr(self.fp8_states, self.fp8_declared.roles[name])

    def keep_all(self) -> None:
        """End the sharding by `fp8_owners`: gather masters, residuals and states on each rank. All
        ranks call it."""
        weights = self.fp8_owners.weights
        checkpoint.gather(self, weights)
        for p in weights:
            p.shared_out = p.stored.gathered = False
        weights.clear()  # a `whole_states` around this drops none
        self.fp8_owners = None

    def forget_others(self) -> None:
        """Drop the states of other ranks' parameters."""
        for p in [p for p in self.state if not self.owns(p)]:
            del self.state[p]

    def __getstate__(self) -> dict[str, Any]:
        if self.fp8_offload is not None:
            raise FP8BackendError(
                "a copy or a pickle of this optimizer would lose its states in the host "
                '(offload="states"): make a new one, prepare it, and load this one\'s state_dict()'
            )
        return {**super().__getstate__(), "fp8_states": self.fp8_states}

    def state_dict(self) -> dict[str, Any]:
        """Return PyTorch's state dict with plain values: BF16 or FP32 on the CPU, for DTensors FP32
        DTensors. Raises `FP8BackendError` if other ranks own some of the states, outside of
        `whole_states`."""
        if self.fp8_owners is not None and not self.fp8_whole:
            raise FP8BackendError(
                "this optimizer's states are shared out between the ranks (level "
                f"{self.fp8_states.level}): save with Accelerator.save_state, called on all ranks; "
                "or enter fp8_backends.checkpoints.whole_states(optimizer) on all ranks around "
                "state_dict(); or prepare with shard_states=False"
            )
        return checkpoint.export_states(self, super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of any level or of the stock class, by value, into the group
        dictionaries that schedulers hold. Raises `FP8BackendError`, without a change, if
        `checkpoint.check_states` rejects it."""
        if not self.fp8_checked:
            checkpoint.check_states(self, state_dict)
        checkpoint.load_states(self, state_dict, super().load_state_dict)

    def lost_updates(self) -> float | None:
        """Return the share, 0 to 1, of the next update that rounding the weights would lose; None
        if unknown."""
        return None


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group, or attributes, comparable without waiting for a device."""
    return {
        name: (id(value), value._version) if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name not in ("params", "param_names")
    }


def changed_options(before: Mapping[str, Any], group: Mapping[str, Any]) -> list[str]:
    """Return the names of options that have changed since `options_of`."""
    now = options_of(group)
    # lists compare the same object as equal
    return sorted(
        name for name in before.keys() | now.keys() if [before.get(name)] != [now.get(name)]
    )


def refuse_gradients_that_stay(parameters: Iterable[torch.Tensor]) -> None:
    """Raise `FP8BackendError` if the gradient of a scaled weight is not reduced over the ranks:
    they would drift apart.

    FSDP2 reduces gradients of its DTensors, and hooks with the attribute `reduces` those of whole
    weights. Ranks with `cast_equal_gradient` compute equal gradients.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return
    unreduced = []
    for p in parameters:
        hooks = (p._post_accumulate_grad_hooks or {}).values()
        settled = any(
            hook is cast_equal_gradient or getattr(hook, "reduces", False) for hook in hooks
        )
        if type(p) is ScaledTensor and p.grad is not None and not settled:
            unreduced.append(p)
    if unreduced:
        shapes = ", ".join(sorted({str(tuple(p.shape)) for p in unreduced}))
        raise FP8BackendError(
            f"the gradients of {counted(len(unreduced), 'scaled weight')} of shape {shapes} do not "
            "travel between ranks and would drift apart: prepare the DDP-wrapped model again, "
            "with its optimizer, so that its gradients are reduced; or, where other ranks have "
            "other weights (a pipeline), shard the model with fully_shard over the ranks that "
            "have these; or name layers that DDP or FSDP2 ignores in exclude"
        )


def _is_scaled(p: torch.Tensor) -> bool:
    return isinstance(local_part(p), ScaledTensor)


def _zero_what_is_not_finite(views: Sequence[LocalView]) -> None:
    """Set gradients with an inf or a NaN to zero, in place and without waiting for the device."""
    spoiled = {i: ~view.finite for i, view in enumerate(views) if view.finite is not None}
    unknown: dict[torch.device, list[int]] = {}
    for i in range(len(views)):
        if i not in spoiled and views[i].gradient.numel():
            unknown.setdefault(views[i].gradient.device, []).append(i)
    for members in unknown.values():
        largest = torch._foreach_norm([views[i].gradient for i in members], float("inf"))
        spoiled |= zip(
            members, torch.isfinite(torch.stack(largest)).logical_not_().unbind(), strict=True
        )
    for i, is_spoiled in spoiled.items():
        views[i].gradient.masked_fill_(is_spoiled, 0)
