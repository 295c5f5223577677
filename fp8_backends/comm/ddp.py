"""Train FP8 models under `DistributedDataParallel` (docs/distributed.rst).

At levels O1 to O4, weights in scaled precision are on DDP's ignore list (`ignore`), and
`reducer.GradientReducer` reduces their gradients; at O3 and O4 each rank owns the optimizer states
of some (`SharedOut`). At O0, DDP reduces all gradients, with gradient_comm="fp8" by a communication
hook. FP8 traffic has a process group of its own: collectives of a group must start in the same
order on all ranks, and DDP's order depends on the arrival of gradients.
"""

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel

from ..announcement import announce
from ..errors import FP8BackendError
from ..recipes.handlers import Recipe
from ..recipes.precision_plan import plan
from ..tensors.block_codes import BlockCodes
from ..tensors.scaled_tensor import Elsewhere, Kind, ScaledTensor, stored_parts
from ..torch_tools.modules import TemporaryHook
from .backward import Agreement, BackwardPass, States, agree_after_backward
from .reducer import GradientReducer, HookState, fp8_all_reduce
from .two_shot import all_gather

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
"""Attributes of DDP used here."""

HOOK_AT_A_LEVEL = (
    "a communication hook of DDP sees no gradient of the weights in scaled precision (levels O1 to "
    "O4): these travel by themselves, in E4M3 or in FP32 as gradient_comm says",
    "leave the hook out (Accelerate: comm_hook of DistributedDataParallelKwargs), since gradients "
    "of a level travel at a quarter of FP32's bytes already; or use the same backend without "
    "+msamp, whose gradients all pass the hook",
)
"""Reason and fix."""

IGNORE_LIST = "_ddp_params_and_buffers_to_ignore"
"""Attribute of a module with the names ignored by DDP."""
MESSAGE = 2**24
"""Bytes sent by a rank in one all-gather of weights, at most; each rank receives as many from every
other."""

Watch = Callable[[nn.Parameter, Callable[[nn.Parameter], None]], None]
"""Replace the hook for the complete gradient of a weight."""


def connect(
    ddp: DistributedDataParallel, recipe: Recipe, watch: Watch, scaling_states: States
) -> None:
    """Connect the gradients of an FP8 model under DDP, on every rank. Idempotent; call it again
    after a change of `requires_grad`.

    The first call copies scaled weights and scaling states from rank 0, as DDP does with its
    parameters.

    Args:
        recipe: its `comm`, "fp8" or "plain" (FP32), is for scaled weights; at level O0, where none
            trains, "fp8" gives DDP a communication hook and "plain" leaves it alone.
        scaling_states: returns the live states of stateful scaling rules; `list` itself: no rule
        keeps any.

    Raises:
        FP8BackendError: DDP was made before the weights were stored in scaled precision, it has
            another communication hook, or this version of torch has a different DDP.
    """
    _check(ddp)
    weights = dict(_scaled_weights(ddp))
    by_hook = recipe.comm == "fp8" and recipe.level == "O0"
    if not (weights or by_hook or scaling_states is not list):
        return
    connection = Connection.find(ddp)
    if connection is None:
        connection = _install(ddp)
        connection.start([*weights.values(), *scaling_states()])
    if by_hook:
        _register_hook(ddp, connection)
    connection.reduce(weights, recipe.comm, watch, ddp.bucket_bytes_cap)
    if connection.reducer is not None and ddp._comm_hooks:
        _refuse_hooks(hook for hook, _ in ddp._comm_hooks)
    agree_after_backward([ddp], scaling_states, [connection.group])


def follow(optimizer: torch.optim.Optimizer) -> None:
    """Register an optimizer with the connected DDP of each of its scaled weights. Idempotent.

    With uneven inputs, a rank without inputs makes no steps, and copies the states of the others in
    the end.
    """
    for weight in (p for group in optimizer.param_groups for p in group["params"]):
        if (connection := connection_of(weight)) is not None:
            connection.optimizers[optimizer] = None


class Connection(BackwardPass):
    """Connect one DDP: a forward hook with the process group of all FP8 traffic."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.reducer: GradientReducer | None = None
        self.optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, None] = (
            weakref.WeakKeyDictionary()
        )
        """Optimizers of the scaled weights, in the same order on all ranks."""
        self.at_home = False
        """Gradients of this rank have not been reduced."""
        self.keeps_whole = False
        """Optimizer states are no longer sharded."""

    def start(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy weights, codes of a checkpoint and scaling states from the first rank."""
        parts = (tensor.parts if isinstance(tensor, BlockCodes) else [tensor] for tensor in tensors)
        self.make_equal(itertools.chain.from_iterable(parts), source=0)

    def reduce(
        self, weights: dict[str, nn.Parameter], comm: str, watch: Watch, bucket_bytes: int
    ) -> None:
        """Reduce the gradients of the trainable weights from now on, in buckets of so many bytes in
        FP32."""
        trained = {name: weight for name, weight in weights.items() if weight.requires_grad}
        if not trained or (self.reducer is not None and self.reducer.serves(trained, comm)):
            return
        if self.reducer is not None:
            self.collectives.remove(self.reducer)
        self.reducer = GradientReducer(trained, self.group, comm, bucket_bytes)
        self.collectives.insert(0, self.reducer)
        for index, weight in enumerate(self.reducer.parameters):
            watch(weight, GradientArrives(self, index))

    @torch.no_grad()
    def make_equal(self, tensors: Iterable[torch.Tensor], source: int) -> None:
        """Copy the storage of these tensors from rank `source` of the group to all its ranks."""
        for tensor in tensors:
            if isinstance(tensor, ScaledTensor):
                tensor.settle()
            # otherwise one rank alone has the master or residual
            is_whole = not getattr(tensor, "shared_out", False)
            for stored in stored_parts(tensor, exact=is_whole):
                sent = stored.contiguous()
                # gloo refuses float8
                message = sent.view(torch.uint8) if sent.element_size() == 1 else sent
                dist.broadcast(message, dist.get_global_rank(self.group, source), group=self.group)
                # not done by a collective; invalidates caches
                torch.autograd.graph.increment_version([stored])
                if sent is not stored:
                    stored.copy_(sent)

    def make_states_equal(self, source: int) -> None:
        """Copy the stored optimizer states from rank `source` of the group to all its ranks;
        learning rates stay."""
        is_source = dist.get_rank(self.group) == source
        for optimizer in self.optimizers:
            # a level's own state dict has plain values
            stored = torch.optim.Optimizer.state_dict(optimizer)
            message = [stored["state"] if is_source else None]
            dist.broadcast_object_list(
                message, dist.get_global_rank(self.group, source), group=self.group
            )
            if not is_source:
                optimizer.load_state_dict({**stored, "state": message[0]})

    def keep_whole_states(self, use: str) -> None:
        """Give each rank all masters, residuals and optimizer states, for good, and log the reason.
        All ranks call it, between two steps. Raises `FP8BackendError` if the recipe was given
        `shard_states=True`."""
        sharded = [optimizer for optimizer in self.optimizers if optimizer.fp8_owners is not None]
        recipes = [optimizer.fp8_owners.recipe for optimizer in sharded]
        for recipe in recipes:
            if "shard_states" in recipe.given:
                raise FP8BackendError(
                    f"{recipe.name}: {use}, and shard_states=True leaves each weight to the steps "
                    "of one rank: leave shard_states out, or set it to False"
                )
        for optimizer in sharded:
            optimizer.keep_all()
        self.keeps_whole = True
        for recipe in recipes[:1]:
            announce(
                f"{recipe.name}: {use}, so from now on each rank keeps all of {recipe.level}'s "
                f"states: {plan(recipe).bytes_per_element:g} bytes a weight element"
            )

    def _end(self) -> None:
        super()._end()
        self.at_home = False

    def joined_state(self) -> list[torch.Tensor]:
        """Return the tensors a rank without inputs no longer changes."""
        tensors = list(self.reducer.parameters if self.reducer else ())
        for collective in self.collectives:
            if isinstance(collective, Agreement):
                tensors += collective.states()
        return tensors


class GradientArrives(TemporaryHook):
    """Post-accumulate-grad hook of a scaled weight under DDP."""

    def __init__(self, connection: Connection, index: int) -> None:
        self.connection, self.index = weakref.ref(connection), index

    @property
    def reduces(self) -> bool:
        """True as long as the DDP lives."""
        return self.connection() is not None

    @property
    def travels(self) -> bool:
        """True if the running backward pass reduces gradients."""
        connection = self.connection()
        return connection is not None and (
            connection.running or connection.expected or connection.triggered
        )

    def __call__(self, weight: torch.Tensor) -> None:
        connection = self.connection()
        if self.travels:
            connection.begin()
        if connection is not None:
            if connection.running:  # DeepSpeed's engine may not have reached its last microbatch
                connection.reducer.add(self.index)
                return
            connection.at_home = True
        if not isinstance(weight.grad, ScaledTensor):
            # without a reduction, the gradient stays in FP32 until the last microbatch: one
            # rounding
            values, dtype = weight.grad.float(), weight.grad.dtype
            weight.grad = ScaledTensor(
                values, torch.ones((), device=values.device), dtype, kind=Kind.GRADIENT
            )


def wrappers(model: nn.Module) -> list[DistributedDataParallel]:
    """Return the DDP modules around a model or inside it."""
    return [module for module in model.modules() if isinstance(module, DistributedDataParallel)]


def connection_of(weight: torch.Tensor) -> Connection | None:
    """Return the connection of the DDP for the gradients of this weight, if any."""
    hooks = (weight._post_accumulate_grad_hooks or {}).values()
    return next((hook.connection() for hook in hooks if isinstance(hook, GradientArrives)), None)


def _check(ddp: DistributedDataParallel) -> None:
    missing = [name for name in ATTRIBUTES if not hasattr(ddp, name)]
    if missing:
        raise FP8BackendError(
            f"DistributedDataParallel of torch {torch.__version__} has no {', '.join(missing)}: "
            "its gradients cannot "
            "travel in FP8; use a version of torch that this package is tested with, or "
            'gradient_comm="plain" '
            "with a backend of level O0"
        )
    if ddp._use_python_reducer:
        raise FP8BackendError(
            "DDP was made under torch._dynamo.config.optimize_ddp = 'python_reducer', where "
            "compiled autograd reduces all gradients: set it back to True (its default) before the "
            "model is wrapped"
        )


def _scaled_weights(ddp: DistributedDataParallel) -> Iterable[tuple[str, nn.Parameter]]:
    """Yield (name, weight) of scaled weights and checkpoint codes, except those that the user lets
    DDP ignore, as they differ between ranks. Raises if DDP does not ignore one."""
    # by identity: layers may have been wrapped since
    reduced = set(map(id, ddp._module_parameters))
    theirs = getattr(ddp.module.__dict__.get(IGNORE_LIST), "theirs", ())
    for name, parameter in ddp.module.named_parameters():
        if isinstance(parameter, (ScaledTensor, BlockCodes)) and name not in theirs:
            if id(parameter) in reduced:
                raise FP8BackendError(
                    f"{name} is stored in scaled precision, and DDP was not told to leave it "
                    "alone: prepare the very module that DDP wraps, as the last step before DDP "
                    "wraps it: prepare(model, None, spec), then ddp = "
                    "DistributedDataParallel(model), then prepare(ddp, optimizer, spec)"
                )
            yield name, parameter


def _install(ddp: DistributedDataParallel) -> Connection:
    connection, cls = Connection(own_group(ddp.process_group, ddp.device)), type(ddp)
    ddp.register_forward_hook(connection)
    if cls is DistributedDataParallel:
        ddp.__class__ = ConnectedDDP
    elif not isinstance(ddp, _Connected):
        ddp.__class__ = type(
            cls.__name__, (_Connected, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__}
        )
    return connection


def own_group(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Create a new group of the same ranks, with the same backend and timeout on the device."""
    ranks = dist.get_process_group_ranks(group)
    try:
        timeout = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        timeout = None  # the backend's default
    return dist.new_group(
        ranks,
        timeout=timeout,
        backend=dist.get_backend(group),
        use_local_synchronization=len(ranks) < dist.get_world_size(),
        group_desc="fp8_backends",
    )


def _register_hook(ddp: DistributedDataParallel, connection: Connection) -> None:
    if sparse := [name for name, m in ddp.module.named_modules() if getattr(m, "sparse", False)]:
        raise FP8BackendError(
            f'gradient_comm="fp8" cannot send the sparse gradients of {", ".join(sparse)}: make '
            "them with sparse=False, or leave gradient_comm out"
        )
    ours = [state for hook, state in ddp._comm_hooks if hook is fp8_all_reduce]
    if any(isinstance(state, HookState) for state in ours):
        return
    if len(ddp._comm_hooks) > len(ours):
        names = ", ".join(hook.__qualname__ for hook, _ in ddp._comm_hooks)
        raise FP8BackendError(
            f'gradient_comm="fp8": DDP has a communication hook already ({names}), and takes one: '
            "leave it out "
            "(Accelerate: comm_hook of DistributedDataParallelKwargs), or leave gradient_comm out"
        )
    ddp.register_comm_hook(HookState(connection.group, ddp.device), fp8_all_reduce)


# A connected DDP: communication hooks, and uneven inputs


def _refuse_hooks(hooks: Iterable[Callable]) -> NoReturn:
    reason, fix = HOOK_AT_A_LEVEL
    raise FP8BackendError(f"{', '.join(hook.__qualname__ for hook in hooks)}: {reason}. Fix: {fix}")


class _Connected:
    """Extend a connected DDP: refuse other communication hooks, and join FP8 collectives of a rank
    without inputs."""

    def register_comm_hook(self, state: Any, hook: Callable) -> None:
        """Register as DDP does. Raises `FP8BackendError` if a level's gradients would bypass the
        hook."""
        connection = Connection.find(self)
        if connection is not None and connection.reducer is not None:
            _refuse_hooks([hook])
        super().register_comm_hook(state, hook)

    def join_hook(self, **kwargs) -> JoinHook:
        """Return DDP's hook, extended. Raises `FP8BackendError` if FP8 traffic does not support
        uneven inputs."""
        stock, connection = super().join_hook(**kwargs), Connection.find(self)
        if connection is None:
            return stock
        if not kwargs.get("divide_by_initial_world_size", True):
            raise FP8BackendError(
                "divide_by_initial_world_size=False: gradients that travel in FP8 are divided by "
                "the number of all ranks; leave it at True (its default)"
            )
        connection.keep_whole_states("with uneven inputs a rank without a batch makes no step")
        return _Join(self, stock, connection)

    def _match_all_reduce_for_bwd_pass(self) -> None:
        """Take part in the collectives of the others' backward pass, on a rank without inputs.

        The order is that of the others: buckets of the reducer during backward, DDP's at its end,
        then agreements.
        """
        connection = Connection.find(self)
        if connection is not None and connection.reducer is not None:
            connection.reducer.finish(contributes=False)
        super()._match_all_reduce_for_bwd_pass()
        for collective in connection.collectives if connection is not None else ():
            if collective is not connection.reducer:
                collective.finish(contributes=False)


class ConnectedDDP(_Connected, DistributedDataParallel):
    """`DistributedDataParallel` with FP8 gradients, made by `connect`."""


class _Join(JoinHook):
    """Run DDP's own hook, then copy the tensors and states a rank without inputs has missed."""

    def __init__(
        self, ddp: DistributedDataParallel, stock: JoinHook, connection: Connection
    ) -> None:
        self.ddp, self.stock, self.connection = ddp, stock, connection

    def main_hook(self) -> None:
        self.stock.main_hook()

    def post_hook(self, is_last_joiner: bool) -> None:
        self.stock.post_hook(is_last_joiner)
        source = self.ddp._authoritative_rank
        self.connection.make_equal(self.connection.joined_state(), source)
        self.connection.make_states_equal(source)


# DDP's ignore list


class IgnoreList(dict):
    """Names for DDP, as keys for its many look-ups."""

    theirs: tuple[str, ...] = ()
    """Names from elsewhere."""


def ignore(module: nn.Module) -> None:
    """Put weights in scaled precision on the ignore list of `module`, besides names from elsewhere.

    Repeated calls renew the list: a weight that is plain again leaves it.
    """
    setter = getattr(DistributedDataParallel, "_set_params_and_buffers_to_ignore_for_model", None)
    if setter is None:
        raise FP8BackendError(
            f"torch {torch.__version__} has no "
            "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model, by which DDP "
            "leaves FP8 weights alone: use a version of torch that is tested"
        )
    theirs = _clear(module)
    names = IgnoreList.fromkeys([*theirs, *scaled_names(module)])
    names.theirs = theirs
    if names:
        setter(module, names)


def forget(module: nn.Module) -> None:
    """Undo `ignore`."""
    if theirs := _clear(module):
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, list(theirs))


def _clear(module: nn.Module) -> tuple[str, ...]:
    """Remove the list and its marks. Return the names from elsewhere."""
    for parameter in module.parameters():
        parameter.__dict__.pop("_ddp_ignored", None)
    names = module.__dict__.pop(IGNORE_LIST, ())
    if isinstance(names, IgnoreList):
        return names.theirs
    # their list may be ours and more
    return tuple(name for name in names if f"_orig_mod.{name}" not in names)


def leaves_nothing(module: nn.Module) -> bool:
    """Return True if DDP would refuse a module because all its trainable weights are on the ignore
    list."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return bool(trained) and all(isinstance(parameter, ScaledTensor) for parameter in trained)


def scaled_names(module: nn.Module) -> Iterator[str]:
    """Yield DDP's names of weights in scaled precision and codes of a checkpoint: those of
    `named_parameters`, those behind `torch.compile`, and those joined by DDP's reducer from the
    names of a module and a parameter."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if isinstance(parameter, (ScaledTensor, BlockCodes)):
            yield from (name, f"_orig_mod.{name}")
            if "." not in name:
                yield f".{name}"


# Optimizer states, masters and residuals on one rank each


class SharedOut:
    """Assign each weight's rest (`ScaledTensor.rest`) and optimizer states to one rank, as in
    ZeRO-1.

    Each rank owns whole weights, about as many elements as any other. It alone keeps their FP16
    master (level O3) or residual (O4) and their Adam states, and makes their steps; then the new
    weights and their scales travel to all ranks. A rank holds 3 + 8/N bytes an element at O1, 3 +
    3/N at O2, 2 + 5/N at O3, 2 + 3/N at O4.

    All ranks create it, with the same weights in the same order. It drops the rest of other ranks'
    weights at once.

    Args:
        weights: scaled weights, equal on all ranks.
        group: the ranks; used by nothing else while an optimizer steps.
        recipe: for messages.
    """

    def __init__(
        self, weights: Sequence[torch.Tensor], group: dist.ProcessGroup, recipe: Recipe
    ) -> None:
        self.group, self.rank, self.recipe = group, dist.get_rank(group), recipe
        self.weights = list(weights)
        load = [0] * dist.get_world_size(group)
        self._owner: dict[int, int] = {}
        for weight in sorted(self.weights, key=lambda weight: -weight.numel()):
            owner = self._owner[id(weight)] = load.index(min(load))
            load[owner] += weight.numel()
        for weight in self.weights:
            weight.settle()
            weight.shared_out = weight.rest is not None
            self.drop(weight)

    def owns(self, weight: torch.Tensor) -> bool:
        return self._owner.get(id(weight), self.rank) == self.rank

    def refuse_local_step(self, *_) -> None:
        """Refuse a step with gradients that were not reduced: an owner would lose the other ranks'.
        A pre-hook."""
        connections = [connection_of(weight) for weight in self.weights if weight.grad is not None]
        if any(connection is not None and connection.at_home for connection in connections):
            raise FP8BackendError(
                "the gradients of this step have not travelled between the ranks (no_sync), and "
                "each rank makes the steps of the weights that it owns (shard_states): prepare "
                "with shard_states=False, where every rank makes all of them; or let the last "
                "backward before each step synchronize; or use Accelerate's LocalSGD, which "
                "gathers the states"
            )

    def drop(self, weight: torch.Tensor) -> None:
        if self.owns(weight) or not weight.shared_out:
            return
        storage = (
            weight.elsewhere.storage if weight.rest is None else stored_parts(weight.rest)[0].dtype
        )
        weight.rest = Elsewhere(dist.get_global_rank(self.group, self._owner[id(weight)]), storage)

    @torch.no_grad()
    def share(self) -> None:
        streams: list[list[torch.Tensor]] = [[] for _ in range(dist.get_world_size(self.group))]
        for weight in self.weights:
            if weight.requires_grad:
                streams[self._owner[id(weight)]] += _bytes_of(weight.detach())
        longest = max(sum(map(len, stream)) for stream in streams)
        for start in range(0, longest, MESSAGE):
            self._all_gather(streams, start, min(MESSAGE, longest - start))

    def _all_gather(self, streams: list[list[torch.Tensor]], start: int, length: int) -> None:
        sent = torch.zeros(length, dtype=torch.uint8, device=self.weights[0].device)
        _copy(
            [
                (sent[place], stored)
                for stored, place in _overlaps(streams[self.rank], start, length)
            ]
        )
        received = sent.new_empty(len(streams) * length)
        all_gather(received, sent, group=self.group)
        _copy(
            [
                (stored, message[place])
                for rank, message in enumerate(received.view(len(streams), length))
                if rank != self.rank
                for stored, place in _overlaps(streams[rank], start, length)
            ]
        )

    @torch.no_grad()
    def send_to_all(self, weight: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        stored = [part for tensor in tensors for part in _bytes_of(tensor)]
        message = torch.cat([part.to(weight.device) for part in stored])
        dist.broadcast(
            message, dist.get_global_rank(self.group, self._owner[id(weight)]), group=self.group
        )
        if not self.owns(weight):
            for part, received in zip(
                stored, message.split([len(part) for part in stored]), strict=True
            ):
                part.copy_(received)


def _copy(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second tensor of each pair into the first, in a few launches."""
    if pairs:
        torch._foreach_copy_(*map(list, zip(*pairs, strict=True)))


def _bytes_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return views of a tensor's storage as uint8, [n] each."""
    return [part.reshape(-1).view(torch.uint8) for part in stored_parts(tensor)]


def _overlaps(
    stream: list[torch.Tensor], start: int, length: int
) -> Iterator[tuple[torch.Tensor, slice]]:
    """Yield views of a stream's bytes from `start` on, and the place of each in a message of
    `length`."""
    begin = 0
    for stored in stream:
        first, last = max(start, begin), min(start + length, begin + len(stored))
        if first < last:
            yield stored[first - begin : last - begin], slice(first - start, last - start)
        begin += len(stored)
