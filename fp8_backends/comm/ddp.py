"""Gradients under `DistributedDataParallel`: what DDP does not do for FP8.

    level O1 to O4   weights in scaled precision are on DDP's ignore list; `reducer.GradientReducer` takes their
                     gradients to the other ranks, and DDP takes those of all other parameters
    level O0         DDP takes all gradients; with gradient_comm="fp8" a communication hook lets them travel by the
                     two-shot all-reduce
    stateful rules   the ranks agree on scaling states after each backward pass whose gradients travel

All of it happens in one process group of its own: collectives of a group must start in the same order on all ranks, and
the order of DDP's depends on when gradients arrive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel

from ..errors import FP8BackendError
from ..numerics.block_codes import BlockCodes
from ..numerics.scaled_tensor import ScaledTensor, stored_parts
from .backward import Agreement, BackwardPass, States, agree_after_backward
from .reducer import GradientReducer, HookState, fp8_all_reduce, nothing
from .zero import SharedOut

ATTRIBUTES = (
    "parameters_to_ignore",
    "_module_parameters",
    "require_backward_grad_sync",
    "process_group",
    "bucket_bytes_cap",
    "_comm_hooks",
    "register_comm_hook",
    "require_forward_param_sync",
    "_match_all_reduce_for_bwd_pass",
)
"""What this file reads or extends of DDP."""

HOOK_AT_A_LEVEL = (
    "a communication hook of DDP sees no gradient of the weights in scaled precision (levels O1 to O4): these travel "
    "by themselves, in E4M3 or in FP32 as gradient_comm says",
    "leave the hook out (Accelerate: comm_hook of DistributedDataParallelKwargs), since gradients of a level travel at "
    "a quarter of FP32's bytes already; or use the same backend without +msamp, whose gradients all pass the hook",
)
"""Reason and fix."""

Watch = Callable[[nn.Parameter, Callable[[nn.Parameter], None]], None]
"""Gives a weight the one hook that sees its complete gradient, in the place of the one that it had."""


def connect(ddp: DistributedDataParallel, gradient_comm: str, watch: Watch, scaling_states: States = list) -> None:
    """Let the gradients of an FP8 model under DDP travel. Every rank calls it. Idempotent; it is called again after
    `requires_grad` of a weight has changed.

    The first call makes scaled weights and scaling states equal to rank 0's, as DDP does with what it reduces.

    Args:
        gradient_comm: "fp8" or "plain" (FP32), for scaled weights; for a model without any, "fp8" gives DDP a
            communication hook and "plain" leaves it alone.
        scaling_states: the live states of stateful scaling rules.

    Raises:
        FP8BackendError: DDP was made before the weights were stored in scaled precision, it has another
            communication hook, or this version of torch has another DDP.
    """
    _check(ddp)
    weights = dict(_scaled_weights(ddp))
    by_hook = gradient_comm == "fp8" and not weights
    if not (weights or by_hook or scaling_states()):
        return
    connection = Connection.find(ddp)
    if connection is None:
        connection = _install(ddp)
        codes = [part for each in weights.values() if isinstance(each, BlockCodes) for part in each.parts]
        scaled = [each for each in weights.values() if isinstance(each, ScaledTensor)]
        connection.make_equal([*scaled, *codes, *scaling_states()], source=0)
    if by_hook:
        _register_hook(ddp, connection)
    connection.reduce(ddp, weights, gradient_comm, watch)
    if connection.reducer is not None and ddp._comm_hooks:
        _refuse_hooks(hook for hook, _ in ddp._comm_hooks)
    agree_after_backward(ddp, scaling_states, [connection.group], _travels)


def follow(optimizer: torch.optim.Optimizer) -> None:
    """Tell each connected DDP whose scaled weights this optimizer trains about it. Repeating it does nothing.

    With uneven inputs, a rank that has run out of them makes no steps, and takes over the others' states in the end.
    """
    for weight in (p for group in optimizer.param_groups for p in group["params"]):
        if (connection := connection_of(weight)) is not None:
            connection.optimizers.add(optimizer)


class DDPBackward(BackwardPass):
    """The backward passes of one DDP whose gradients travel."""

    def __init__(self) -> None:
        super().__init__(_travels)

    @property
    def triggered(self) -> bool:
        """Whether DDP itself reduces after a forward under `no_sync`: both flags are up then, as Accelerate's
        `trigger_sync_in_backward` leaves them. A forward under `no_sync` takes the second down."""
        ddp = self.stayed()
        return ddp is not None and ddp.require_backward_grad_sync and ddp.require_forward_param_sync


class Connection(DDPBackward):
    """The hook that connects one DDP. It has the process group in which all FP8 traffic happens."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.reducer: GradientReducer | None = None
        self.owners: SharedOut | None = None
        """Who owns optimizer states, masters and residuals, where each lies on one rank."""
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """The optimizers that train the scaled weights."""

    def reduce(self, ddp: DistributedDataParallel, weights: dict[str, nn.Parameter], comm: str, watch: Watch) -> None:
        """Take the gradients of those of these weights that train, from now on."""
        trained = {name: weight for name, weight in weights.items() if weight.requires_grad}
        if not trained or (self.reducer is not None and self.reducer.serves(trained, comm)):
            return
        if self.reducer is not None:
            self.collectives.remove(self.reducer)
        self.reducer = GradientReducer(trained, self.group, comm, ddp.bucket_bytes_cap)
        self.collectives.insert(0, self.reducer)
        for index, weight in enumerate(self.reducer.parameters):
            watch(weight, GradientArrives(self, index))

    @torch.no_grad()
    def make_equal(self, tensors: Iterable[torch.Tensor], source: int) -> None:
        """Copy everything that these tensors store on rank `source` of the group to all its ranks."""
        for tensor in tensors:
            if isinstance(tensor, ScaledTensor):
                tensor.settle()
            is_whole = not getattr(tensor, "shared_out", False)  # else ranks differ in what they have of it
            for stored in stored_parts(tensor, exact=is_whole):
                _broadcast(stored, source, self.group)

    def make_states_equal(self, source: int) -> None:
        """Copy the optimizers' states from rank `source` of the group to all its ranks, as they are stored; learning
        rates stay."""
        is_source = dist.get_rank(self.group) == source
        for optimizer in self.optimizers:
            stored = torch.optim.Optimizer.state_dict(optimizer)  # that of a level's own optimizer has plain values
            message = [stored["state"] if is_source else None]
            dist.broadcast_object_list(message, dist.get_global_rank(self.group, source), group=self.group)
            if not is_source:
                optimizer.load_state_dict({**stored, "state": message[0]})

    def _end(self) -> None:
        super()._end()
        if self.owners is not None:
            self.owners.at_home = False

    def joined_state(self) -> list[torch.Tensor]:
        """What a rank that has run out of inputs no longer changes."""
        agreements = [each for each in self.collectives if isinstance(each, Agreement)]
        weights = self.reducer.parameters if self.reducer else ()
        return [*weights, *(state for agreement in agreements for state in agreement.states())]


class GradientArrives:
    """Post-accumulate-grad hook of a scaled weight under DDP."""

    def __init__(self, connection: Connection, index: int) -> None:
        self.connection, self.index = weakref.ref(connection), index

    @property
    def reduces(self) -> bool:
        """Whether gradients travel: they do as long as the DDP lives."""
        return self.connection() is not None

    @property
    def travels(self) -> bool:
        """Whether the gradients of the backward pass that is running travel."""
        connection = self.connection()
        return connection is not None and (connection.running or connection.expected or connection.triggered)

    def __call__(self, weight: torch.Tensor) -> None:
        connection = self.connection()
        if self.travels:
            connection.begin()
        if connection is not None and connection.running:
            connection.reducer.add(self.index)
            return
        if connection is not None and connection.owners is not None:
            connection.owners.at_home = True
        if not isinstance(weight.grad, ScaledTensor):
            # a microbatch whose gradient does not travel stays in FP32 until the last one is there: one rounding
            values, dtype = weight.grad.float(), weight.grad.dtype
            weight.grad = ScaledTensor(values, torch.ones((), device=values.device), dtype, accumulates=True)

    def __reduce__(self):
        return nothing, ()


def connection_of(weight: torch.Tensor) -> Connection | None:
    """The connection of the DDP that takes the gradients of this weight to other ranks."""
    hooks = (weight._post_accumulate_grad_hooks or {}).values()
    return next((hook.connection() for hook in hooks if isinstance(hook, GradientArrives)), None)


def _check(ddp: DistributedDataParallel) -> None:
    missing = [name for name in ATTRIBUTES if not hasattr(ddp, name)]
    if missing:
        raise FP8BackendError(
            f"DistributedDataParallel of torch {torch.__version__} has no {', '.join(missing)}: its gradients cannot "
            f'travel in FP8; use a version of torch that this package is tested with, or gradient_comm="plain" '
            f"with a backend of level O0"
        )
    if getattr(ddp, "_use_python_reducer", False):
        raise FP8BackendError(
            "DDP was made under torch._dynamo.config.optimize_ddp = 'python_reducer', where compiled autograd reduces "
            "all gradients: set it back to True (its default) before the model is wrapped"
        )


def _scaled_weights(ddp: DistributedDataParallel) -> Iterable[tuple[str, nn.Parameter]]:
    """(name, weight) of each weight in scaled precision, and codes of a checkpoint. Raises for one that DDP does not
    ignore."""
    reduced = set(map(id, ddp._module_parameters))  # by identity: layers may have been wrapped since
    for name, parameter in ddp.module.named_parameters():
        if isinstance(parameter, (ScaledTensor, BlockCodes)):
            if id(parameter) in reduced:
                raise FP8BackendError(
                    f"{name} is stored in scaled precision, and DDP was not told to leave it alone: prepare the very "
                    f"module that DDP wraps, as the last step before DDP wraps it: prepare(model, None, spec), then "
                    f"ddp = DistributedDataParallel(model), then prepare(ddp, optimizer, spec)"
                )
            yield name, parameter


def _travels(ddp: nn.Module) -> bool:
    return ddp.require_backward_grad_sync


def _install(ddp: DistributedDataParallel) -> Connection:
    connection, cls = Connection(_own_group(ddp)), type(ddp)
    ddp.register_forward_hook(connection)
    if cls is DistributedDataParallel:
        ddp.__class__ = ConnectedDDP
    elif not isinstance(ddp, _Connected):
        ddp.__class__ = type(cls.__name__, (_Connected, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})
    return connection


def _own_group(ddp: DistributedDataParallel) -> dist.ProcessGroup:
    """A new group of DDP's ranks, with its backend and its time limit."""
    ranks = dist.get_process_group_ranks(ddp.process_group)
    try:
        timeout = ddp.process_group._get_backend(ddp.device).options._timeout
    except (AttributeError, RuntimeError):
        timeout = None  # the backend's default
    return dist.new_group(
        ranks,
        timeout=timeout,
        backend=dist.get_backend(ddp.process_group),
        use_local_synchronization=len(ranks) < dist.get_world_size(),
        group_desc="fp8_backends",
    )


def _broadcast(tensor: torch.Tensor, source: int, group: dist.ProcessGroup) -> None:
    sent = tensor.contiguous()
    message = sent.view(torch.uint8) if sent.element_size() == 1 else sent  # gloo refuses float8
    dist.broadcast(message, dist.get_global_rank(group, source), group=group)
    torch.autograd.graph.increment_version([tensor])  # a collective does not: what is known of the tensor ends here
    if sent is not tensor:
        tensor.copy_(sent)


# Level O0


def _register_hook(ddp: DistributedDataParallel, connection: Connection) -> None:
    ours = [state for hook, state in ddp._comm_hooks if hook is fp8_all_reduce]
    if any(isinstance(state, HookState) for state in ours):
        return
    if len(ddp._comm_hooks) > len(ours):
        names = ", ".join(hook.__qualname__ for hook, _ in ddp._comm_hooks)
        raise FP8BackendError(
            f'gradient_comm="fp8": DDP has a communication hook already ({names}), and takes one: leave it out '
            f"(Accelerate: comm_hook of DistributedDataParallelKwargs), or leave gradient_comm out"
        )
    ddp.register_comm_hook(HookState(connection.group, ddp.device), fp8_all_reduce)


# A connected DDP: communication hooks, and uneven inputs


def _refuse_hooks(hooks: Iterable[Callable]) -> NoReturn:
    reason, fix = HOOK_AT_A_LEVEL
    raise FP8BackendError(f"{', '.join(hook.__qualname__ for hook in hooks)}: {reason}. Fix: {fix}")


class _Connected:
    """What differs in a connected DDP: it takes no communication hook beside weights in scaled precision, and has
    the methods that `torch.distributed.algorithms.Join` calls on a rank that has run out of inputs."""

    def register_comm_hook(self, state: Any, hook: Callable) -> None:
        """Do what DDP does. Raises `FP8BackendError` where a level's gradients would go round the hook."""
        connection = Connection.find(self)
        if connection is not None and connection.reducer is not None:
            _refuse_hooks([hook])
        super().register_comm_hook(state, hook)

    def join_hook(self, **kwargs) -> JoinHook:
        """Make DDP's hook. Raises `FP8BackendError` where FP8 traffic does not go with uneven inputs."""
        stock, connection = super().join_hook(**kwargs), Connection.find(self)
        if connection is None:
            return stock
        if connection.owners is not None:
            raise FP8BackendError(
                "uneven inputs: a rank that has run out of them takes no optimizer steps, and each rank makes those "
                "of the weights that it owns (shard_states): prepare with shard_states=False, or give all ranks as "
                "many batches (Accelerate: even_batches=True)"
            )
        if not kwargs.get("divide_by_initial_world_size", True):
            raise FP8BackendError(
                "divide_by_initial_world_size=False: gradients that travel in FP8 are divided by the number of all "
                "ranks; leave it at True (its default)"
            )
        return _Join(self, stock, connection)

    def _match_all_reduce_for_bwd_pass(self) -> None:
        """Take part in the collectives of the others' backward pass, on a rank that has run out of inputs.

        The others wait for buckets of the reducer while they run backward, and for DDP's when it ends: so DDP's come
        later on this rank, too. What happens at the end of backward comes last.
        """
        connection = Connection.find(self)
        if connection is not None and connection.reducer is not None:
            connection.reducer.finish(contributes=False)
        super()._match_all_reduce_for_bwd_pass()
        for collective in connection.collectives if connection is not None else ():
            if collective is not connection.reducer:
                collective.finish(contributes=False)


class ConnectedDDP(_Connected, DistributedDataParallel):
    """A `DistributedDataParallel` that `connect` made carry FP8 gradients."""


class _Join(JoinHook):
    """DDP's own hook, and what a rank that has run out of inputs takes over from the others in the end."""

    def __init__(self, ddp: DistributedDataParallel, stock: JoinHook, connection: Connection) -> None:
        self.ddp, self.stock, self.connection = ddp, stock, connection

    def main_hook(self) -> None:
        self.stock.main_hook()

    def post_hook(self, is_last_joiner: bool) -> None:
        self.stock.post_hook(is_last_joiner)
        source = self.ddp._authoritative_rank
        self.connection.make_equal(self.connection.joined_state(), source)
        self.connection.make_states_equal(source)
