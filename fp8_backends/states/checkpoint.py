"""Save and load optimizers with scaled states, and reject state dicts that would break training.

A state dict holds plain BF16 or FP32 tensors, so that any program can read it. Loading gives the
same scaled values again: the grid of their own amax holds all of them. A state of a DTensor is
saved as a DTensor, which `torch.distributed.checkpoint` can reshard. States sharded over the ranks
(levels O3 and O4 under DDP) are whole while a checkpoint is written (`whole_states`).
"""

import contextlib
import copy
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import torch

from ..errors import FP8BackendError
from ..formats import formats
from ..formats.formats import FORMAT_OF, Range, check_values
from ..tensors.encoding import amax_of
from ..tensors.scaled_tensor import Kind, Partial, ScaledTensor, dequantize_shards, quantize
from ..tensors.sharded_tensor import is_distributed, local_part, with_local
from ..torch_tools.optimizers import check_is_optimizer, parameters_by_key, unwrapped
from ..words import counted
from .levels import write_weight_shards
from .sharding import agree, shard_of

MASTER_KEY, STEP = "master_weight", "step"


# State dicts


def export_states(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Turn PyTorch's state dict of an optimizer into plain tensors. Add a weight with a master, or
    with more precision than its dtype (scaled FP16 for BF16), as `master_weight`, so that a resumed
    run is equal to the bit."""
    for key, p in parameters_by_key(optimizer, state_dict).items():
        if key not in state_dict["state"]:
            continue
        state, local = dict(state_dict["state"][key]), local_part(p)
        if isinstance(local, ScaledTensor) and (
            local.master is not None or p.dtype != torch.float32
        ):
            state[MASTER_KEY] = p.detach()
        state_dict["state"][key] = {
            name: _exported(value, optimizer) for name, value in state.items()
        }
    return state_dict


def _exported(value: torch.Tensor, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Return one state as a plain tensor: scaled ones on the CPU, in BF16 if it represents them
    exactly."""
    if is_distributed(value):
        return dequantize_shards(value, torch.float32)
    if not isinstance(value, ScaledTensor):
        return value
    if optimizer.fp8_unread:
        return torch.empty(value.shape, dtype=torch.float32, device="meta")
    values = value.exact(torch.float32).cpu()
    narrow = values.bfloat16()
    if torch.equal(narrow.float(), values):
        values = narrow
    if optimizer.fp8_offload is not None:
        values = optimizer.fp8_offload.for_files(values)
    return values


def load_states(
    optimizer: torch.optim.Optimizer, state_dict: dict[str, Any], load: Callable[[dict], None]
) -> None:
    """Load a state dict that has passed `check_states`: declared states and masters, all else by
    PyTorch's `load`."""
    groups, parameters = list(optimizer.param_groups), parameters_by_key(optimizer, state_dict)
    heavy, light = {}, {}
    for key, state in state_dict["state"].items():
        names = (
            *optimizer.fp8_declared.roles,
            *optimizer.fp8_declared.exact_states(parameters[key].shape),
            MASTER_KEY,
        )
        heavy[key] = {name: state[name] for name in names if name in state}
        # a copy: PyTorch would keep the step counter itself, shared by two optimizers
        light[key] = copy.deepcopy(
            {name: value for name, value in state.items() if name not in heavy[key]}
        )
    load({**state_dict, "state": light})
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        group.clear()
        group.update(loaded)
    optimizer.param_groups[:] = groups
    for key, p in parameters.items():
        _load_heavy(optimizer, p, heavy.get(key, {}))


@torch.no_grad()
def _load_heavy(
    optimizer: torch.optim.Optimizer, p: torch.Tensor, saved: dict[str, torch.Tensor]
) -> None:
    if optimizer.owns(p):
        store_states(optimizer, p, saved)
    if MASTER_KEY in saved and isinstance(local_part(p), ScaledTensor):
        if is_distributed(p):
            place = local_part(p).device
            write_weight_shards(p, _placed_as(p, saved[MASTER_KEY], torch.float32, place))
        else:
            p.copy_(_whole(saved[MASTER_KEY]))
    if not optimizer.owns(p):
        optimizer.state.pop(p, None)


def store_states(
    optimizer: torch.optim.Optimizer, p: torch.Tensor, values: Mapping[str, torch.Tensor]
) -> None:
    """Store declared states of `p`, plain or scaled, whole or DTensors. With a DTensor, all ranks
    call this."""
    for name in optimizer.fp8_declared.roles:
        if name in values:
            optimizer.state[p][name] = _stored_moment(
                p, values[name], *optimizer.moment_format(p, name), optimizer.place_of(p)
            )
    for name in optimizer.fp8_declared.exact_states(p.shape):
        if name in values:
            value = _whole(values[name])
            optimizer.state[p][name] = value.to(local_part(p).device, torch.float32, copy=True)


def is_stored(state: torch.Tensor, dtype: torch.dtype, block_size: int) -> bool:
    """Return True if a state has this format."""
    local = local_part(state)
    if isinstance(local, ScaledTensor):
        return (local.codes.dtype, local.block_size) == (dtype, block_size)
    return local.dtype == dtype and dtype not in FORMAT_OF


def _stored_moment(
    p: torch.Tensor, value: torch.Tensor, dtype: torch.dtype, block_size: int, place: torch.device
) -> torch.Tensor:
    if not is_distributed(p):
        value = _whole(value)
    moment = local_part(value)
    stored_alike = isinstance(moment, ScaledTensor) and is_stored(moment, dtype, block_size)
    if stored_alike and moment.codes.is_contiguous() and _lies_as(value, p):
        moment = copy.deepcopy(moment.to(place))
    elif dtype not in FORMAT_OF:
        moment = local_part(_placed_as(p, value, dtype, place)).clone()
    else:
        local, amax = local_part(_placed_as(p, value, torch.float32, place)), None
        if is_distributed(p) and not block_size:
            (amax,) = agree([amax_of(local)], [p])
        moment = quantize(local, dtype, torch.float32, block_size, amax)
    if isinstance(moment, ScaledTensor):
        moment.kind = Kind.STATE
        moment.partial = Partial(is_distributed(p))
    return with_local(p, moment)


def _placed_as(
    p: torch.Tensor, value: torch.Tensor, dtype: torch.dtype, place: torch.device
) -> torch.Tensor:
    """Return plain values placed as `p`, on a device: a DTensor for a DTensor."""
    if is_distributed(value):
        value = dequantize_shards(value, dtype)
        value = value if _lies_as(value, p) else value.redistribute(p.device_mesh, p.placements)
    elif isinstance(value, ScaledTensor):
        value = value.dequantize(dtype)
    if is_distributed(p) and not is_distributed(value):
        value = shard_of(p, value.to(p.device_mesh.device_type, dtype))
    return with_local(p, local_part(value).to(place, dtype).contiguous())


def _lies_as(value: torch.Tensor, p: torch.Tensor) -> bool:
    if not is_distributed(p) or not is_distributed(value):
        return is_distributed(p) == is_distributed(value)
    return (value.device_mesh, tuple(value.placements)) == (p.device_mesh, tuple(p.placements))


def _whole(value: torch.Tensor) -> torch.Tensor:
    return dequantize_shards(value, torch.float32).full_tensor() if is_distributed(value) else value


# Whole states on all ranks


@contextlib.contextmanager
def whole_states(
    optimizer: torch.optim.Optimizer, receives: bool = True, moments: bool = True
) -> Iterator[None]:
    """Gather masters, residuals and optimizer states that ranks shard for as long as a checkpoint
    is written on several ranks: inside, `state_dict()` of model and optimizer holds them
    bit-exactly.

    All ranks enter and leave it. Optimizers without a level are left unchanged. Load a checkpoint
    without it: every rank loads the whole, and keeps its own part.

    Args:
        receives: gather on this rank: up to 5 bytes an element on the CPU, and 12 more in the
            optimizer's `state_dict()`. On other ranks `state_dict()` has placeholders on the meta
            device for this rank's scaled states and for weights of other ranks, whose states are
            left out.
        moments: False for weights only, 2 bytes an element at most.
    """
    check_is_optimizer(optimizer)
    optimizer = unwrapped(optimizer)
    with _outermost(optimizer, receives) as weights:
        if weights:  # on the CPU: a GPU with some of the states has no room for all
            gather(optimizer, weights, "cpu", receives, moments)
        yield


@contextlib.contextmanager
def unread_states(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Give placeholders from `state_dict()` while a checkpoint is loaded: some loaders read its
    names and shapes."""
    with _outermost(unwrapped(optimizer), receives=False) as weights:
        for p in weights:
            _put_placeholder(p)
        yield


@contextlib.contextmanager
def _outermost(optimizer: torch.optim.Optimizer, receives: bool) -> Iterator[list[torch.Tensor]]:
    """Let the optimizer return a state dict inside, and drop other ranks' states at the end. Yield
    the weights with sharded states; none inside another such context."""
    if getattr(optimizer, "fp8_whole", True):  # or it has no level
        yield []
        return
    shards = any(is_distributed(p) for group in optimizer.param_groups for p in group["params"])
    # each rank saves its own shards
    optimizer.fp8_whole, optimizer.fp8_unread = True, not (receives or shards)
    weights = [] if optimizer.fp8_owners is None else optimizer.fp8_owners.weights
    try:
        yield weights
    finally:
        optimizer.fp8_whole = optimizer.fp8_unread = optimizer.fp8_checked = False
        optimizer.forget_others()
        for p in weights:
            optimizer.fp8_owners.drop(p)
            p.stored.gathered = False


def _put_placeholder(p: torch.Tensor) -> None:
    if p.elsewhere is not None:
        p.rest = p.elsewhere._replace(unread=True)


@torch.no_grad()
def gather(
    optimizer: torch.optim.Optimizer,
    weights: Sequence[torch.Tensor],
    device: torch.device | str | None = None,
    receives: bool = True,
    moments: bool = True,
) -> None:
    """Send moments, and masters or residuals, from their owners to a device of all ranks (default:
    the weight's), one weight at a time. `receives`, `moments`: as in `whole_states`."""
    owners, ids = optimizer.fp8_owners, set(map(id, weights))
    for p, group, _ in (member for member in optimizer.members() if id(member.parameter) in ids):
        state, place = optimizer.state.get(p, {}), device or optimizer.place_of(p)
        owners.drop(p)
        if owners.owns(p):
            rest = p.rest
            step = torch.as_tensor(state.get(STEP, -1.0), dtype=torch.float32, device="cpu").clone()
        else:
            rest = (
                torch.empty(p.shape, dtype=p.elsewhere.storage, device=place)
                if p.shared_out
                else None
            )
            step = torch.empty((), dtype=torch.float32, device="cpu")
            if rest is not None and rest.dtype != torch.int8:  # a master, and no residual
                rest = ScaledTensor(
                    rest, torch.empty((), dtype=torch.float32, device=place), p.dtype
                )
        roles, exact = optimizer.roles_of(group), optimizer.fp8_declared.exact_states(p.shape)
        buffers = {name: optimizer.new_moment(p, name, place) for name in roles if moments}
        for name in exact if moments else ():
            buffers[name] = torch.zeros(exact[name], dtype=torch.float32, device=place)
        gathered = {name: state.get(name, buffer) for name, buffer in buffers.items()}
        owners.send_to_all(p, [step, *([rest] if p.shared_out else []), *gathered.values()])
        p.stored.gathered = True
        if not receives:
            _put_placeholder(p)
        elif not owners.owns(p):
            if p.shared_out:
                p.rest = rest
            if moments and step >= 0:
                optimizer.state[p] = {STEP: optimizer.new_counter(group, p).copy_(step), **gathered}


# Checks before anything changes

_STORED = (*FORMAT_OF, torch.float32)
_PLAIN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MOMENTS = {
    "first_moment": (formats.FINITE, formats.FINITE_IN_FP64),
    "direction": (formats.FINITE, formats.FINITE_IN_FP64),
    "second_moment": (formats.NOT_NEGATIVE, formats.NOT_NEGATIVE_IN_FP64),
}
"""Role of a state -> its range in FP32, and for a parameter in FP64."""
_CHOICES = ("foreach", "fused")
"""Options with the values True, False, and None for PyTorch's own choice."""
_OF_ANOTHER = "The checkpoint is of another model or optimizer"
_DAMAGED = "The file is damaged"
_LOST = (
    "Training had diverged when this was saved, or the file is damaged. Load an earlier "
    "checkpoint; or load only the model's weights, and continue with a fresh optimizer"
)


def check_states(
    optimizer: torch.optim.Optimizer,
    state_dict: Mapping[str, Any],
    names: Mapping[int, str] | None = None,
) -> None:
    """Reject a state dict that would break this optimizer. All ranks call this if parameters are
    DTensors, and all reject it if one does.

    Args:
        names: names of parameters by their id, for groups without `param_names`.

    Raises:
        FP8BackendError: names the parameter, its state, the fault and the way out. Nothing has
        changed.
    """
    fault = None
    try:
        _check(optimizer, state_dict, names or {})
    except FP8BackendError as error:
        fault = str(error)
    shards = [p for group in optimizer.param_groups for p in group["params"] if is_distributed(p)]
    refused = agree([torch.tensor(float(fault is not None), device="cpu")] * len(shards), shards)
    if fault is None and any(map(bool, refused)):
        fault = "another rank refuses its part of it, and says why"
    if fault is not None:
        raise FP8BackendError(
            f"the optimizer's state cannot be loaded, and nothing was changed: {fault}"
        )


def _check(optimizer: torch.optim.Optimizer, state_dict: Any, names: Mapping[int, str]) -> None:
    _check_structure(optimizer.param_groups, state_dict)
    for number, (group, saved) in enumerate(
        zip(optimizer.param_groups, state_dict["param_groups"], strict=True)
    ):
        optimizer.fp8_declared.check_options(saved)
        _check_numbers(optimizer, saved, f"parameter group {number}")
        named = (
            saved.get("param_names")
            or group.get("param_names")
            or [names.get(id(p)) for p in group["params"]]
        )
        for key, p, name in zip(saved["params"], group["params"], named, strict=True):
            if state := state_dict["state"].get(key):  # a parameter without a step has none
                words = f"{name}, of shape" if name else "of shape"
                _check_state(
                    optimizer, saved, p, state, f"parameter {key} ({words} {tuple(p.shape)})"
                )


def _check_structure(own_groups: list[dict[str, Any]], state_dict: Any) -> None:
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise FP8BackendError(
            "it is no state dict of an optimizer, which has state and param_groups (DeepSpeed "
            "finds none where ZeRO trained without a level: load the weights only, with "
            "load_optimizer_states=False)"
        )
    groups, states = state_dict["param_groups"], state_dict["state"]
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        raise FP8BackendError(f"its param_groups are no list of dicts. {_DAMAGED}")
    if len(groups) != len(own_groups):
        counts = f"{counted(len(groups), 'parameter group')}, and the optimizer {len(own_groups)}"
        raise FP8BackendError(f"it has {counts}. {_OF_ANOTHER}")
    keys = []
    for number, (group, own_group) in enumerate(zip(groups, own_groups, strict=True)):
        saved, where = group.get("params"), f"parameter group {number}"
        if not isinstance(saved, list) or not all(isinstance(key, Hashable) for key in saved):
            raise FP8BackendError(f"{where} has no list of parameters. {_DAMAGED}")
        if len(saved) != len(own_group["params"]):
            counts = f"{counted(len(saved), 'parameter')}, and the optimizer's {len(own_group['params'])}"
            raise FP8BackendError(f"{where} has {counts}. {_OF_ANOTHER}")
        named = group.get("param_names", saved)
        if not isinstance(named, list) or len(named) != len(saved):
            raise FP8BackendError(
                f"param_names of {where} are not a name for each parameter. {_DAMAGED}"
            )
        keys += saved
    if len(set(keys)) != len(keys):
        raise FP8BackendError(f"its groups name a parameter twice. {_DAMAGED}")
    if not isinstance(states, Mapping) or not all(
        isinstance(state, Mapping) for state in states.values()
    ):
        raise FP8BackendError(f"its state is no dict of dicts. {_DAMAGED}")
    if unknown := states.keys() - set(keys):
        raise FP8BackendError(
            f"it has a state of parameter {next(iter(unknown))!r}, which is in no group. {_DAMAGED}"
        )


def _check_numbers(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], where: str) -> None:
    """Check a group's saved options against the kinds of the optimizer's defaults."""
    for name, default in optimizer.defaults.items():
        value, allowed = group.get(name), optimizer.fp8_declared.ranges.get(name, formats.FINITE)
        if name in _CHOICES or isinstance(default, bool):
            value = group.get(name, False)
            if not isinstance(value, bool) and not (name in _CHOICES and value is None):
                raise FP8BackendError(f"{name} of {where} is {value!r}, and must be True or False")
        elif isinstance(default, (tuple, list)):
            if not isinstance(value, (tuple, list)) or len(value) != len(default):
                raise FP8BackendError(
                    f"{name} of {where} are not {counted(len(default), 'number')}. {_OF_ANOTHER}"
                )
            for number, default_number in zip(value, default, strict=True):
                if number is not None or default_number is not None:
                    _check_number(number, allowed, f"{name} of {where}")
        elif isinstance(default, (Real, torch.Tensor)):
            _check_number(value, allowed, f"{name} of {where}")


def _check_number(number: Any, allowed: Range, name: str) -> None:
    is_tensor = isinstance(number, torch.Tensor)
    number = local_part(number) if is_tensor else number
    if (
        is_tensor
        and not number.dim()
        and not (number.is_complex() or number.dtype == torch.bool or number.is_meta)
    ):
        check_values(number, allowed, name, _LOST)
    elif not is_tensor and isinstance(number, Real) and not isinstance(number, bool):
        check_values(float(number), allowed, name, _LOST)
    else:
        described = (
            f"a tensor of {number.dtype} {tuple(number.shape)}" if is_tensor else repr(number)
        )
        raise FP8BackendError(f"{name} is {described}, and must be one number. {_OF_ANOTHER}")


def _check_state(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    p: torch.Tensor,
    state: Mapping[str, Any],
    where: str,
) -> None:
    declared, is_wide = optimizer.fp8_declared, p.is_complex() or p.dtype == torch.float64
    exact = declared.exact_states(p.shape)
    tensors = {
        name: (p.shape, _MOMENTS[role][is_wide]) for name, role in optimizer.roles_of(group).items()
    }
    tensors |= {name: (shape, _MOMENTS["second_moment"][is_wide]) for name, shape in exact.items()}
    if missing := [name for name in (*[STEP] * declared.counts, *tensors) if name not in state]:
        raise FP8BackendError(f"{where} has no {' and no '.join(missing)}. {_OF_ANOTHER}")
    if STEP in state:
        _check_number(state[STEP], formats.COUNT, f"{STEP} of {where}")
    if MASTER_KEY in state and isinstance(local_part(p), ScaledTensor):
        tensors[MASTER_KEY] = (p.shape, formats.FINITE)
    for name, (shape, allowed) in tensors.items():
        _check_tensor(p, state[name], shape, allowed, f"{name} of {where}")


def _check_tensor(
    p: torch.Tensor, value: Any, shape: Sequence[int], allowed: Range, name: str
) -> None:
    if not isinstance(value, torch.Tensor):
        raise FP8BackendError(f"{name} is {type(value).__name__} and no tensor. {_DAMAGED}")
    local = local_part(value)
    scaled = isinstance(local, ScaledTensor)
    dtypes = (p.dtype,) if p.is_complex() else _PLAIN
    if value.shape != torch.Size(shape):
        raise FP8BackendError(f"{name} was saved with shape {tuple(value.shape)}. {_OF_ANOTHER}")
    if (
        local.layout != torch.strided
        or local.is_quantized
        or (not scaled and local.dtype not in dtypes)
    ):
        described = f"a tensor of {local.dtype} ({local.layout})"
        raise FP8BackendError(f"{name} is {described}, and must hold floating-point numbers")
    if local.is_meta:
        raise FP8BackendError(
            f"{name} holds no values: it is on the meta device, as on a rank that does not save"
        )
    if scaled:
        is_gradient = local.kind is Kind.GRADIENT
        if is_gradient or local.stored.rest is not None or local.codes.dtype not in _STORED:
            raise FP8BackendError(
                f"{name} is a scaled tensor of another kind than optimizer states are. {_DAMAGED}"
            )
        check_values(local.scale_inv, formats.POSITIVE, f"the scale of {name}", _LOST)
    check_values(local.exact(torch.float32) if scaled else local, allowed, name, _LOST)
