"""`ScaledTensor`: low-precision data times a scale, as one `torch.Tensor`.

    value = data * scale_inv        data: E4M3, E5M2 or FP16; scale_inv: FP32, a power of two when quantized

It is what MS-AMP's levels store: FP16 weights, E4M3 weight gradients, E4M3 and FP16 optimizer states. A power of two
multiplies without rounding, so a loss scale, an average or a clip touches the scale alone.

What is implemented below works on data and scale. Everything else gets the plain values, so that any function of
PyTorch reads a ScaledTensor correctly; an in-place operation without an implementation raises, since on a copy it
would change nothing, in silence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_iter, tree_map

from ..errors import FP8BackendError
from .formats import FORMAT_OF, saturating_cast
from .scaling import power_of_two_scale, scale_inv_of, tensor_amax

aten = torch.ops.aten

STORED = ("_data", "_scale_inv", "block_size", "accumulates", "partial")
"""The attributes that each ScaledTensor is made of."""
SHARD = "shard"
_UNAGREED = "_fp8_unagreed"
"""The attribute that marks the scale of a shard which this rank has found without the others."""


class Elsewhere(NamedTuple):
    """The master of a weight lies on another rank, which makes its optimizer steps."""

    rank: int
    storage: torch.dtype
    """The dtype in which the master is stored."""
    unread: bool = False
    """Values with all their precision are asked for by something that will not read them here."""

    def exact(self, tensor: ScaledTensor) -> torch.Tensor:
        if self.unread:  # a placeholder that takes no memory, and that nobody takes for values
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        raise FP8BackendError(
            f"the values of a weight of shape {tuple(tensor.shape)} lie with all their precision on rank {self.rank} "
            f"(level O3 shares masters and optimizer states out between the ranks): save with Accelerator.save_state, "
            f"save_model or get_state_dict, called on all ranks; or enter fp8_backends.whole_states(optimizer) "
            f"on all ranks around state_dict(); or prepare with shard_states=False"
        )

    def as_master(self, source: torch.Tensor) -> torch.Tensor:
        """New values as the owner rounds them before it makes the weight of them."""
        if isinstance(source, ScaledTensor):
            source = (source if source.master is None else source.master).dequantize(torch.float32)
        return quantize(source.float(), self.storage).dequantize(torch.float32)


class ScaledTensor(torch.Tensor):
    """A tensor stored as low-precision data and FP32 scales. To PyTorch it has the dtype of the values it stands for.

    Attributes, read-only by convention:
        _data: E4M3, E5M2 or FP16 (FP32 while a gradient accumulates), of the tensor's shape.
        _scale_inv: FP32, 0-dimensional, or [ceil(numel / block_size)]. NaN where the quantized values were not finite.
        block_size: elements of the flattened tensor that share a scale; 0: all.
        accumulates: `add_` is allowed and turns the data into FP32 (gradients; `finish_accumulation` turns it back).
        partial: True for a slice, whose scale is that of elements outside of it too: nothing changes it in place, but
            for a copy of elements of the very same scale. `SHARD` for the rows that FSDP2 leaves on a rank: a copy
            into it waits for the ranks to agree on a scale, which they do before they gather it.
        master: the same values with more precision, another ScaledTensor; or None (level O3 has one).
        elsewhere: where the master lies, if that is another rank; or None.
    """

    master: ScaledTensor | None = None
    elsewhere: Elsewhere | None = None

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, data, scale_inv, dtype=torch.float32, block_size=0, accumulates=False, partial=False):
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, strides=data.stride(), dtype=dtype, device=data.device, layout=data.layout
        )

    def __init__(self, data, scale_inv, dtype=torch.float32, block_size=0, accumulates=False, partial=False):
        self._data, self._scale_inv = data, scale_inv
        self.block_size, self.accumulates, self.partial = block_size, accumulates, partial

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The plain values, in the tensor's dtype or the one given. Not differentiable."""
        data, scale_inv = self._data.float(), self._scale_inv
        if self.block_size:
            scale_inv = _of_each_element(scale_inv, self)
        return (data * scale_inv).to(dtype or self.dtype)

    def exact(self) -> torch.Tensor:
        """The plain values with all the precision that is stored: the master's, if there is one.

        Raises:
            FP8BackendError: the master lies on another rank.
        """
        if self.elsewhere is not None:
            return self.elsewhere.exact(self)
        return (self if self.master is None else self.master).dequantize(self.dtype)

    def to(self, *args, **kwargs) -> torch.Tensor:
        """Does what `torch.Tensor.to` does. With a dtype, a Parameter keeps its storage and takes that as the dtype it
        stands for (`module.to(dtype)`); any other ScaledTensor becomes plain, as stock `load_state_dict` wants its
        states."""
        given = (*args, kwargs.get("dtype"), kwargs.get("other"))
        changes_dtype = any(isinstance(each, (torch.dtype, torch.Tensor)) for each in given)
        if not changes_dtype or getattr(self, "_is_param", False) or self.requires_grad:
            return super().to(*args, **kwargs)
        return self.dequantize().to(*args, **kwargs)

    def finish_accumulation(self) -> None:
        """Turn an accumulated gradient's FP32 data into E4M3 again, with the scale of its amax. In place."""
        if self.accumulates and self._data.dtype == torch.float32:
            rounded = quantize(self._data * self._scale_inv, torch.float8_e4m3fn)
            self._data, self._scale_inv = rounded._data, rounded._scale_inv

    @property
    def context(self) -> tuple[torch.dtype, int, bool, bool | str]:
        """What makes the tensor besides data and scale_inv, as its constructor takes it."""
        return self.dtype, self.block_size, self.accumulates, self.partial

    @property
    def unagreed(self) -> bool:
        """Whether this is a shard that was copied into, and has a scale of its own until the ranks agree on one."""
        return getattr(self._scale_inv, _UNAGREED, False)

    @unagreed.setter
    def unagreed(self, value: bool) -> None:
        setattr(self._scale_inv, _UNAGREED, value)  # where all views of the shard see it

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        """FSDP2's extension point: what travels of a shard is its data, FP8 as bytes. Every rank has the scale."""
        if self.unagreed:
            agree_on_scale(self, [mesh.get_group()])
        data = self._data.view(torch.uint8) if self._data.dtype.itemsize == 1 else self._data
        if self.shape[1:] == outer_size[1:]:  # rows are sharded, and of the last shards some may be missing
            missing = -(-outer_size[0] // mesh.size()) - self.shape[0]
            data = torch.cat([data, data.new_zeros(missing, *outer_size[1:])]) if missing else data
        return (data,), (self._scale_inv, outer_size)

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        """FSDP2's extension point: the whole tensor, standing for `param_dtype`, around what was gathered."""
        (gathered,), (scale_inv, size) = all_gather_outputs, metadata
        if out is not None:
            out._scale_inv = scale_inv  # its data are a view of what was gathered
            return None
        data = gathered.reshape(-1)[: size.numel()].view(self._data.dtype).view(size)
        return ScaledTensor(data, scale_inv, param_dtype), (gathered,)

    def __tensor_flatten__(self):
        return ["_data", "_scale_inv"], self.context

    @staticmethod
    def __tensor_unflatten__(inner_tensors, context, outer_size, outer_stride):
        return ScaledTensor(inner_tensors["_data"], inner_tensors["_scale_inv"], *context)

    def __repr__(self) -> str:
        fmt = FORMAT_OF.get(self._data.dtype)
        stored = fmt.name.upper() if fmt else str(self._data.dtype).removeprefix("torch.")
        if self.block_size:
            scales = f"{self._scale_inv.numel()} scales, one for {self.block_size} elements"
        elif self._scale_inv.is_meta or isinstance(self._scale_inv, torch._subclasses.FakeTensor):
            scales = "one scale"
        else:
            scales = f"scale_inv {self._scale_inv.item():.4g}"
        trains = ", requires_grad" if self.requires_grad else ""
        return f"ScaledTensor({list(self.shape)} {self.dtype}, stored as {stored}, {scales}{trains})"

    def __reduce_ex__(self, protocol):
        others = {name: value for name, value in self.__dict__.items() if name not in STORED}
        data = self._data.view(torch.uint8) if self._data.dtype.itemsize == 1 else self._data  # pickle knows no FP8
        return _rebuild, (data, self._data.dtype, self._scale_inv, self.context, self.requires_grad, others)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        implementation = _IMPLEMENTED.get(func)
        result = NotImplemented if implementation is None else implementation(func, *args, **kwargs)
        return _on_plain_values(func, args, kwargs) if result is NotImplemented else result


def _rebuild(data, storage, scale_inv, context: tuple, requires_grad: bool, others: dict[str, Any]) -> ScaledTensor:
    tensor = ScaledTensor(data.view(storage), scale_inv, *context)
    tensor.__dict__.update(others)
    return tensor.requires_grad_(requires_grad)


# PyTorch's protocol for subclasses in files that `torch.load(weights_only=True)` may read
torch.serialization.add_safe_globals([ScaledTensor, _rebuild])
# the names by which checkpoints of version 0.1 know them (`fp8_backends/__init__.py` has the module's)
torch.serialization.add_safe_globals(
    [(ScaledTensor, "fp8_backends.scaled_tensor.ScaledTensor"), (_rebuild, "fp8_backends.scaled_tensor._rebuild")]
)


def stored_parts(tensor: torch.Tensor, with_master: bool = False) -> tuple[torch.Tensor, ...]:
    """The tensors that a tensor stores: data and scale_inv of a ScaledTensor, and then those of its master where they
    are asked for; any other tensor itself."""
    if not isinstance(tensor, ScaledTensor):
        return (tensor,)
    master = stored_parts(tensor.master) if with_master and tensor.master is not None else ()
    return tensor._data, tensor._scale_inv, *master


def quantize(
    values: torch.Tensor,
    storage: torch.dtype,
    dtype: torch.dtype | None = None,
    block_size: int = 0,
    amax: torch.Tensor | None = None,
) -> ScaledTensor:
    """Values rounded to nearest into `storage`, with power-of-two scales from their amax (MS-AMP's rule).

    Args:
        values: any floating-point tensor, contiguous where blocks are asked for.
        storage: E4M3, E5M2, FP16, or FP32 (which has no need of a scale).
        dtype: what the tensor stands for (default: the dtype of `values`, FP32 for FP16).
        block_size: 0 for one scale, else one for each so many elements of the flattened tensor.
        amax: FP32, 0-dimensional; takes the place of the amax of `values` where these are only a part of a tensor.
    """
    values = values.detach()
    if dtype is None:
        dtype = torch.float32 if values.dtype == torch.float16 else values.dtype
    if storage not in FORMAT_OF:
        return ScaledTensor(values.to(storage).clone(), torch.ones((), device=values.device), dtype)
    fmt = FORMAT_OF[storage]
    if amax is None:
        amax = block_amax(values, block_size) if block_size else tensor_amax_of(values)
    scale = power_of_two_scale(amax, fmt)
    tensor = ScaledTensor(values, scale_inv_of(scale, amax), dtype, block_size)
    tensor._data = saturating_cast(values.float() * (_of_each_element(scale, tensor) if block_size else scale), fmt)
    return tensor


def tensor_amax_of(values: torch.Tensor) -> torch.Tensor:
    """max |x| of a tensor that may be empty; FP32, 0-dimensional."""
    return tensor_amax(values) if values.numel() else values.new_zeros((), dtype=torch.float32)


def block_amax(values: torch.Tensor, block_size: int) -> torch.Tensor:
    """max |x| of each block of the flattened tensor; FP32, [ceil(numel / block_size)]."""
    flat = values.detach().float().abs().reshape(-1)
    missing = -flat.numel() % block_size
    if missing:
        flat = torch.cat([flat, flat.new_zeros(missing)])
    return flat.view(-1, block_size).amax(1)


def agreed_over(amax: torch.Tensor, groups: list[dist.ProcessGroup]) -> torch.Tensor:
    """The maximum of what each rank of these groups saw, any shape, FP32; what is not finite comes out as inf."""
    if amax.is_meta:
        return amax
    agreed = torch.nan_to_num(amax.detach().float(), nan=float("inf"))  # a maximum may lose a NaN
    for group in groups:
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group)
    return agreed


@torch.no_grad()
def agree_on_scale(shard: ScaledTensor, groups: list[dist.ProcessGroup]) -> None:
    """Give a shard that was copied into, and its master, the scale of the whole tensor, in place. All ranks of the
    groups call it. What it holds was rounded by the rank's own amax, which is the finer grid, or the same."""
    source = shard if shard.master is None else shard.master
    for part in (source,) if source is shard else (source, shard):
        values = source.dequantize(torch.float32)
        rounded = quantize(values, part._data.dtype, amax=agreed_over(tensor_amax_of(values), groups))
        part._data.copy_(rounded._data)
        part._scale_inv.copy_(rounded._scale_inv)
        part.unagreed = False


def _of_each_element(scales: torch.Tensor, tensor: ScaledTensor) -> torch.Tensor:
    """Block scales [blocks] spread over the tensor's shape."""
    return scales.repeat_interleave(tensor.block_size)[: tensor.numel()].view(tensor.shape)


def _with_parts(tensor: ScaledTensor, data: torch.Tensor, scale_inv: torch.Tensor, **changes) -> ScaledTensor:
    context = {name: getattr(tensor, name) for name in ("dtype", "block_size", "accumulates", "partial")}
    return ScaledTensor(data, scale_inv, **{**context, **changes})


def _plain(value: Any) -> Any:
    return value.dequantize() if isinstance(value, ScaledTensor) else value


def _like(tensor: ScaledTensor, result: ScaledTensor) -> ScaledTensor:
    """`result`, from elements of `tensor`: its master lies where that of `tensor` does."""
    if tensor.elsewhere is not None:
        result.elsewhere = tensor.elsewhere
    return result


def _on_plain_values(func, args, kwargs):
    """Run any operation on the dequantized values. It is refused where it would write into a ScaledTensor."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            if any(isinstance(each, ScaledTensor) for each in tree_iter(value)):
                raise NotImplementedError(
                    f"{func} would change a ScaledTensor in place, which it cannot: a weight in scaled precision "
                    f"is trained by torch.optim.Adam or AdamW as fp8_backends.prepare(model, optimizer, spec) converts "
                    f"it; a copy of the model that keeps an average is given plain weights by "
                    f"fp8_backends.states.levels.plain_weights(copy); before adapters are merged into it, "
                    f"fp8_backends.conversion.restore(model) makes weights and layers plain; write with copy_(), read "
                    f"with dequantize()"
                )
    return func(*tree_map(_plain, args), **tree_map(_plain, kwargs))


# What works on data and scale

_IMPLEMENTED: dict[Any, Callable] = {}


def _implements(*operations):
    def register(function):
        _IMPLEMENTED.update(dict.fromkeys(operations, function))
        return function

    return register


@_implements(aten.detach.default, aten.alias.default, aten.view.default, aten._unsafe_view.default)
def _same_elements(func, tensor, *args, **kwargs):
    """The same elements in the same order, in another view, with the very same scale."""
    result = _with_parts(tensor, func(tensor._data, *args, **kwargs), tensor._scale_inv)
    if tensor.master is not None:  # `nn.Parameter(tensor)` detaches, and is to have the very same master
        seen_anew = func not in (aten.detach.default, aten.alias.default)
        result.master = _same_elements(func, tensor.master, *args, **kwargs) if seen_anew else tensor.master
    return _like(tensor, result)


@_implements(aten.t.default, aten.transpose.int, aten.permute.default)
@_implements(aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim)
def _other_order(func, tensor, *args, **kwargs):
    if tensor.block_size:
        return NotImplemented
    return _with_parts(tensor, func(tensor._data, *args, **kwargs), tensor._scale_inv)


@_implements(aten.slice.Tensor, aten.select.int, aten.as_strided.default, aten.split.Tensor, aten.chunk.default)
def _some_elements(func, tensor, *args, **kwargs):
    if tensor.block_size:
        return NotImplemented
    data = func(tensor._data, *args, **kwargs)
    partial = tensor.partial or True  # SHARD stays: FSDP2 cuts a shard out of a padded one
    parts = tree_map(lambda each: _like(tensor, _with_parts(tensor, each, tensor._scale_inv, partial=partial)), data)
    if tensor.master is not None:
        masters = _some_elements(func, tensor.master, *args, **kwargs)
        for part, master in zip(tree_iter(parts), tree_iter(masters), strict=True):
            part.master = master
    return parts


@_implements(aten.new_zeros.default, aten.new_empty.default)
def _new(func, tensor, size, *, dtype=None, device=None, **kwargs):
    """Memory for elements of the very same scale: FSDP2 makes its shards so, padded and empty ones too."""
    if dtype is not None or device is not None or tensor.block_size:
        return NotImplemented
    result = _with_parts(tensor, func(tensor._data, size), tensor._scale_inv, partial=SHARD)
    if tensor.master is not None:
        result.master = _new(func, tensor.master, size)
    return result


@_implements(aten.clone.default)
def _clone(func, tensor, *, memory_format=None):
    if tensor.block_size and memory_format not in (None, torch.preserve_format, torch.contiguous_format):
        return NotImplemented
    data = tensor._data.clone(memory_format=memory_format)
    return _with_parts(tensor, data, tensor._scale_inv.clone(), partial=False)


@_implements(aten._to_copy.default)
def _to_copy(func, tensor, *, dtype=None, device=None, non_blocking=False, **kwargs):
    if dtype is not None and not dtype.is_floating_point:
        return NotImplemented
    moved = [aten._to_copy.default(part, device=device, non_blocking=non_blocking) for part in stored_parts(tensor)]
    result = _with_parts(tensor, *moved, dtype=dtype or tensor.dtype)
    if tensor.master is not None:
        result.master = _to_copy(func, tensor.master, device=device, non_blocking=non_blocking)
    return _like(tensor, result)


@_implements(aten.empty_like.default)
def _empty_like(func, tensor, *, dtype=None, device=None, **kwargs):
    """Memory for a tensor stored likewise: `module.to_empty` must not change what a weight is stored as."""
    empty = [torch.empty_like(part, device=device) for part in stored_parts(tensor)]
    result = _with_parts(tensor, *empty, dtype=dtype or tensor.dtype, partial=False)
    if tensor.master is not None:
        result.master = _empty_like(func, tensor.master, device=device)
    return result


@_implements(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default)
def _plain_like(func, tensor, *args, **kwargs):
    like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return func(like, *args, **kwargs)


@_implements(aten.is_pinned.default)
def _is_pinned(func, tensor, *args, **kwargs):
    return tensor._data.is_pinned() and tensor._scale_inv.is_pinned()


@_implements(aten._pin_memory.default, aten.pin_memory.default)
def _pin_memory(func, tensor, *args, **kwargs):
    return _with_parts(tensor, *(part.pin_memory() for part in stored_parts(tensor)), partial=False)


# Scalars touch the scale alone: exact for a power of two, else one FP32 rounding


def _scalar(value: Any) -> bool:
    plain = isinstance(value, torch.Tensor) and not isinstance(value, ScaledTensor)
    return isinstance(value, (int, float)) or (plain and value.dim() == 0)


@_implements(aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)
def _times(func, tensor, other):
    if not isinstance(tensor, ScaledTensor):
        tensor, other = other, tensor  # number * tensor
        if func in (aten.div.Tensor, aten.div.Scalar):
            return NotImplemented
    if not _scalar(other) or not isinstance(tensor, ScaledTensor):
        return NotImplemented
    return _with_parts(tensor, tensor._data.clone(), _scaled(func, tensor._scale_inv, other), partial=False)


@_implements(aten.mul_.Tensor, aten.mul_.Scalar, aten.div_.Tensor, aten.div_.Scalar)
def _times_(func, tensor, other):
    if not _scalar(other) or not isinstance(tensor, ScaledTensor) or tensor.partial:
        return NotImplemented
    tensor._scale_inv.copy_(_scaled(func, tensor._scale_inv, other))
    return tensor


_DIVISIONS = (aten.div.Tensor, aten.div.Scalar, aten.div_.Tensor, aten.div_.Scalar)


def _scaled(func, scale_inv: torch.Tensor, other) -> torch.Tensor:
    """`scale_inv` times or over a scalar, on a tensor: a number divided by its reciprocal would round twice."""
    if not isinstance(other, torch.Tensor):
        other = torch.tensor(other, dtype=torch.float32, device=scale_inv.device)
    other = other.to(device=scale_inv.device, dtype=torch.float32)
    return scale_inv / other if func in _DIVISIONS else scale_inv * other


@_implements(aten.neg.default)
def _neg(func, tensor):
    return _with_parts(tensor, tensor._data.clone(), -tensor._scale_inv, partial=False)


# Writing


@_implements(aten.copy_.default)
def _copy_(func, target, source, non_blocking=False):
    """Write new values with the scale of their amax; from an equally stored tensor, bits and scales as they are."""
    if not isinstance(target, ScaledTensor):
        return NotImplemented
    of_same_scale = isinstance(source, ScaledTensor) and source._scale_inv is target._scale_inv
    if target.partial and (of_same_scale or target.partial != SHARD):
        return _copy_elements(target, source, non_blocking) if of_same_scale else NotImplemented
    if target.master is not None:
        if getattr(source, "elsewhere", None) is not None:
            source = source.exact()
        _copy_(func, target.master, source if getattr(source, "master", None) is None else source.master)
        source = target.master
    elif target.elsewhere is not None and getattr(source, "elsewhere", None) is None:
        source = target.elsewhere.as_master(source)
    storage = (target.shape, target._data.dtype, target.block_size)
    if not isinstance(source, ScaledTensor) or (source.shape, source._data.dtype, source.block_size) != storage:
        values = source.dequantize(torch.float32) if isinstance(source, ScaledTensor) else source
        values = values.to(target.device, torch.float32).expand(target.shape)
        source = quantize(values.contiguous(), target._data.dtype, target.dtype, target.block_size)
    target._data.copy_(source._data, non_blocking)
    target._scale_inv.copy_(source._scale_inv, non_blocking)
    if target.partial == SHARD:
        target.unagreed = True
    return target


def _copy_elements(target: ScaledTensor, source: ScaledTensor, non_blocking: bool) -> ScaledTensor:
    """Write into a part of a tensor, from elements of the very same scale, which stays as it is."""
    target._data.copy_(source._data, non_blocking)
    if target.master is not None:
        target.master._data.copy_(source.master._data, non_blocking)
    return target


@_implements(aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.normal_.default, aten.uniform_.default)
def _fill_(func, tensor, *args, **kwargs):
    """Initialize in the plain dtype, then store."""
    if tensor.partial and tensor.partial != SHARD:
        return NotImplemented
    values = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return _copy_(aten.copy_.default, tensor, func(values, *args, **kwargs))


@_implements(aten._foreach_zero_.default)
def _foreach_zero_(func, tensors):
    """What `zero_grad(set_to_none=False)` of a fused or foreach optimizer calls."""
    for tensor in tensors:
        tensor.zero_()


@_implements(aten.add_.Tensor)
def _accumulate_(func, total, other, *, alpha=1):
    """Add gradients up. The sum is in FP32 until `finish_accumulation`, so that many microbatches round once."""
    if not isinstance(total, ScaledTensor):
        return func(total, _plain(other), alpha=alpha)
    if not total.accumulates or total.partial:
        return NotImplemented
    if total._data.dtype != torch.float32:
        total._data = total.dequantize(torch.float32)
        total._scale_inv = total._scale_inv.new_ones(())  # one for all, also where there was one a block
        total.block_size = 0
    addend = (_plain(other) if isinstance(other, torch.Tensor) else other) * alpha
    total._data.add_(addend / total._scale_inv if isinstance(addend, torch.Tensor) else addend)
    return total


# Norms, and what a loss scaler and a gradient clip call


@_implements(aten.linalg_vector_norm.default)
def _vector_norm(func, tensor, ord=2, dim=None, keepdim=False, *, dtype=None):
    if not isinstance(tensor, ScaledTensor) or tensor.block_size or dim is not None or ord == 0:
        return NotImplemented
    norm = func(tensor._data.float(), ord, None, keepdim) * tensor._scale_inv.abs()
    return norm.to(dtype or tensor.dtype)


@_implements(aten._foreach_norm.Scalar)
def _foreach_norm(func, tensors, ord=2, dtype=None):
    return [torch.linalg.vector_norm(tensor, ord, dtype=dtype) for tensor in tensors]


def _scaled_and_plain(tensors) -> tuple[list[ScaledTensor], list[torch.Tensor]]:
    scaled = [tensor for tensor in tensors if isinstance(tensor, ScaledTensor)]
    return scaled, [tensor for tensor in tensors if not isinstance(tensor, ScaledTensor)]


@_implements(aten._foreach_mul_.Scalar, aten._foreach_mul_.Tensor, aten._foreach_div_.Scalar, aten._foreach_div_.Tensor)
def _foreach_times_(func, tensors, other):
    if not _scalar(other):
        return NotImplemented
    divides = func in (aten._foreach_div_.Scalar, aten._foreach_div_.Tensor)
    scaled, plain = _scaled_and_plain(tensors)
    if plain:
        func(plain, other)
    for tensor in scaled:
        tensor.div_(other) if divides else tensor.mul_(other)


@_implements(aten._amp_foreach_non_finite_check_and_unscale_.default)
def _unscale_(func, tensors, found_inf, inv_scale):
    """What `GradScaler.unscale_` calls. A scale that is not finite tells of a gradient that was not."""
    scaled, plain = _scaled_and_plain(tensors)
    if plain:
        func(plain, found_inf, inv_scale)
    for tensor in scaled:
        tensor.mul_(inv_scale.squeeze())
        found = ~torch.isfinite(tensor._scale_inv).all()
        if tensor._data.dtype not in FORMAT_OF:
            found = found | ~torch.isfinite(tensor._data).all()
        found_inf.copy_(torch.maximum(found_inf, found.to(found_inf)))
