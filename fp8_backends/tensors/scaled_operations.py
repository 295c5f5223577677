"""PyTorch operations on a `ScaledTensor`.

Functions read its exact values; if one of several ranks owns these, products and lookups read the
FP8 values, and any other function raises. Views are views of the storage. Operations in place run
on FP32 values of the whole: a weight keeps these (`ScaledStorage.edited`) until the optimizer's
next step, and stores them rounded; a gradient takes them as its codes. `copy_` and other writes of
all values store them rounded at once, except in a weight without an optimizer.

The implementations registered below work on codes and scale directly, or do not compute values.
"""

import math
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import float32
from torch.utils._pytree import tree_iter, tree_map

from ..errors import FP8BackendError
from ..formats.formats import E4M3, FORMAT_OF, ROOT8
from ..kernels import backward as gradients
from .scaled_tensor import (
    Kind,
    Partial,
    ScaledTensor,
    quantize,
    quantize_like,
    stored_parts,
)

aten = torch.ops.aten

UNWRITABLE = (Partial.PART, Partial.FRESH)
"""Tensors that cannot take another scale."""


def _implements(*operations):
    def register(function):
        ScaledTensor.operations.update(dict.fromkeys(operations, function))
        return function

    return register


def _any_other(func, args, kwargs):
    if func.namespace == "c10d":
        return _collective(func, args, kwargs)
    # composite operations arrive whole: `to`, `reshape`, `linear`
    if torch.is_inference_mode_enabled():
        parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
    written = list(written_to(func, args, kwargs, ScaledTensor))
    if written:
        return _in_place(func, args, kwargs, written)
    if returns_view(func) and isinstance(args[0], ScaledTensor):
        return _view(func, *args, **kwargs)
    read = _read_by_products if func in PRODUCT_OPERATIONS else _values
    return func(*tree_map(read, args), **tree_map(read, kwargs))


ScaledTensor.on_values = staticmethod(_any_other)

PRODUCT_OPERATIONS = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.linear.default,
    aten._grouped_mm.default,
    aten.embedding.default,
}
"""Operations of layers. If one rank owns the exact values of a weight, all ranks read its FP8
values here."""


def _values(value: Any) -> Any:
    return value.values() if isinstance(value, ScaledTensor) else value


def _read_by_products(value: Any) -> Any:
    return (
        value.dequantize()
        if isinstance(value, ScaledTensor) and value.shared_out
        else _values(value)
    )


def returns_view(func) -> bool:
    """Return True if an operation without writes returns a view of its first argument."""
    return bool(func._schema.arguments) and func._schema.arguments[0].alias_info is not None


def written_to(func, args, kwargs, kind: type[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the tensors of this class that an operation writes to."""
    if func.namespace == "c10d" and func.name() != "c10d::send":  # missing in their schemas
        yield from (leaf for leaf in tree_iter(args[0]) if isinstance(leaf, kind))
        return
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_iter(value) if isinstance(leaf, kind))


# Views


UNSAFE_VIEWS = (
    aten._unsafe_view.default,
    aten.unsafe_chunk.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
)
"""Operations with views as results, unknown to autograd."""


@_implements(*UNSAFE_VIEWS)
def _view(func, tensor, *args, **kwargs):
    return tree_map(tensor.view_of, func(tensor.codes, *args, **kwargs))


@_implements(aten.view.dtype, aten.view_as_complex.default, aten._neg_view.default)
def _other_bytes(func, tensor, dtype=None):
    if dtype == tensor.dtype:
        return tensor.view_of(tensor.codes)
    raise FP8BackendError(
        f"{func} reads the bytes of a tensor, and a ScaledTensor stores {tensor.codes.dtype}: take "
        "a plain copy of its values first, with dequantize()"
    )


@_implements(aten.detach.default, aten.alias.default, aten.lift_fresh.default)
def _same(func, tensor):
    return tensor.view_of(tensor.codes)


@_implements(aten.as_strided.default)
def _as_strided(func, tensor, size, stride, storage_offset=None):
    offset = tensor.storage_offset() if storage_offset is None else storage_offset
    codes = tensor.stored.codes
    return tensor.view_of(codes.as_strided(size, stride, codes.storage_offset() + offset))


# New tensors


def _moved(
    tensor: ScaledTensor, move: Callable[[torch.Tensor], torch.Tensor], dtype=None
) -> ScaledTensor:
    """Return a new ScaledTensor after applying `move` to each stored part."""
    tensor.state_dict_copies.check()
    codes, scale_inv = map(move, stored_parts(tensor))
    result = ScaledTensor(
        codes, scale_inv, dtype or tensor.dtype, tensor.block_size, tensor.kind, tensor.partial
    )
    result.rest = tensor.elsewhere if tensor.rest is None else move(tensor.rest)
    result.edited = None if tensor.edited is None else move(tensor.edited)
    result.shared_out = tensor.shared_out
    return result


@_implements(aten._to_copy.default)
def _to_copy(func, tensor, *, dtype=None, device=None, non_blocking=False, **kwargs):
    if (dtype is not None and not dtype.is_floating_point) or (
        tensor._view is not None and tensor.block_size
    ):
        return NotImplemented
    return _moved(tensor, lambda part: func(part, device=device, non_blocking=non_blocking), dtype)


@_implements(aten._pin_memory.default, aten.pin_memory.default)
def _pin_memory(func, tensor, *args, **kwargs):
    return _moved(tensor, torch.Tensor.pin_memory)


@_implements(aten.is_pinned.default)
def _is_pinned(func, tensor, *args, **kwargs):
    return all(part.is_pinned() for part in stored_parts(tensor, exact=True))


@_implements(aten.empty_like.default)
def _empty_like(func, tensor, *, dtype=None, device=None, **kwargs):
    """Allocate the same form: `module.to_empty` must not change the storage of a weight."""
    result = _moved(tensor, lambda part: torch.empty_like(part, device=device), dtype)
    result.partial = Partial.WHOLE
    result.edited = None
    return result


@_implements(aten.new_zeros.default, aten.new_empty.default)
def _new(func, tensor, size, *, dtype=None, device=None, **kwargs):
    """Allocate elements with the same scale object. FSDP2 makes shards this way, with zeros or
    without elements."""
    filled = func == aten.new_empty.default and torch.Size(size).numel()
    if filled or dtype is not None or device is not None or tensor.block_size:
        return NotImplemented
    kind = Kind.GRADIENT if tensor.kind is Kind.GRADIENT else Kind.WEIGHT
    codes = func(tensor.codes, size)
    result = ScaledTensor(codes, tensor.scale_inv, tensor.dtype, kind=kind, partial=Partial.FRESH)
    if tensor.rest is not None:
        result.rest = func(tensor.rest, size)
    return result


@_implements(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default)
def _plain_like(func, tensor, *args, **kwargs):
    like = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return func(like, *args, **kwargs)


# Writing


def _in_place(func, args, kwargs, written: list[ScaledTensor]):
    """Run an operation on the FP32 values of the written tensors, and store the results."""
    if torch.Tag.inplace_view in func.tags:
        raise FP8BackendError(
            f"{func} would change the shape or the memory of a ScaledTensor: take a plain copy of "
            "its values with dequantize(), or make the weight plain with "
            "fp8_backends.restore(model)"
        )
    if func.name().startswith("aten::_foreach_") and len(args[0]) > 1:
        return _one_by_one(func, args, kwargs)
    with torch.inference_mode(False):  # the storage outlives inference mode
        wholes = {tensor.stored: tensor.view_of(tensor.stored.codes) for tensor in written}
        edited = {stored: _editable(whole, func) for stored, whole in wholes.items()}

    def place(tensor: ScaledTensor) -> torch.Tensor | None:
        return tensor.in_whole(edited[tensor.stored]) if tensor.stored in edited else None

    narrow = {tensor.dtype for tensor in written} - {float32}
    result, work = _on_stand_ins(func, args, kwargs, place, narrow)
    for values, tensor in work:
        if values.shape != tensor.shape:  # `out=` resizes
            raise FP8BackendError(
                f"{func} would write a result of shape {tuple(values.shape)} to a ScaledTensor of "
                f"shape {tuple(tensor.shape)}"
            )
    for stored, whole in wholes.items():
        _keep(whole, edited[stored])
    return result


def _on_stand_ins(
    func,
    args,
    kwargs,
    stand_in: Callable[[ScaledTensor], torch.Tensor | None],
    narrow: Collection[torch.dtype] = (),
) -> tuple[Any, list[tuple[torch.Tensor, ScaledTensor]]]:
    """Run an operation on plain tensors: `stand_in` of each ScaledTensor, or its values where that
    is None. Dtypes in `narrow` become FP32. Return the result, with the ScaledTensors in place of
    their stand-ins, and the pairs of both."""
    work: list[tuple[torch.Tensor, ScaledTensor]] = []

    def operand(value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return float32 if value in narrow else value
        if not isinstance(value, torch.Tensor):
            return value
        if isinstance(value, ScaledTensor):
            plain = stand_in(value)
            if plain is not None:
                work.append((plain, value))
                return plain
            value = value.values()
        return value.to(float32) if value.dtype in narrow else value

    def owner(value: Any) -> Any:
        return next((tensor for plain, tensor in work if plain is value), value)

    result = func(*tree_map(operand, args), **tree_map(operand, kwargs))
    return tree_map(owner, result), work


def _one_by_one(func, args, kwargs) -> None:
    count = len(args[0])

    def part(value: Any, i: int) -> Any:
        return [value[i]] if isinstance(value, (list, tuple)) and len(value) == count else value

    for i in range(count):
        func(
            *(part(value, i) for value in args),
            **{name: part(value, i) for name, value in kwargs.items()},
        )


def _editable(tensor: ScaledTensor, func) -> torch.Tensor:
    """Copy the exact values of a tensor's whole storage: FP32, strides of the stored codes. Raises
    `FP8BackendError` if they are not all on this rank."""
    _require_all(tensor, func)
    codes = tensor.stored.codes
    whole = torch.empty_strided(codes.shape, codes.stride(), dtype=float32, device=codes.device)
    return whole.copy_(tensor.view_of(codes).exact(float32))


def _require_all(tensor: ScaledTensor, func) -> None:
    stored = tensor.stored
    if stored.shared_out or tensor.elsewhere is not None:
        raise FP8BackendError(
            f"{func} would change a weight of shape {tuple(tensor.shape)} in place, but one rank "
            "owns its full-precision values (levels O3 and O4 shard masters, residuals and "
            "optimizer states). Write whole values with copy_(), or prepare with "
            "shard_states=False"
        )
    if stored.partial is Partial.FRESH:  # no shard was copied in: hold FP32 values
        stored.kind = Kind.GRADIENT
        stored.partial = Partial.WHOLE
        stored.rest = None
        _keep(tensor, torch.zeros_like(stored.codes, dtype=float32))
    if stored.partial is Partial.PART:
        raise FP8BackendError(
            f"{func} would change a ScaledTensor of shape {tuple(tensor.shape)} in place, but "
            "elements outside of it share its scale, or FSDP2 has gathered it for one forward: "
            "take a plain copy of its values with dequantize(), or change the sharded parameter "
            "when no forward runs"
        )


def _keep(tensor: ScaledTensor, whole: torch.Tensor) -> None:
    """Store the FP32 values of a tensor's whole storage, from `_editable`."""
    stored = tensor.stored
    if stored.kind is Kind.GRADIENT:
        stored.codes = whole
        stored.scale_inv = torch.ones((), dtype=float32, device=whole.device)
        stored.block_size = 0
    else:
        stored.edited = whole
        _replace(tensor.view_of(stored.codes), whole)


@_implements(aten.copy_.default)
def _copy_(func, target, source, non_blocking=False):
    """Write new values with the scale of their amax; copy bits and scales from a tensor of the same
    form."""
    if not isinstance(target, ScaledTensor):
        return NotImplemented
    if source.shape != target.shape:
        source = _values(source)
        try:
            source = source.expand(target.shape)
        except RuntimeError as error:
            raise FP8BackendError(
                f"values of shape {tuple(source.shape)} cannot be copied into a ScaledTensor of "
                f"shape {tuple(target.shape)}"
            ) from error
    stored = target.stored
    stored.partial = target.partial
    same_scale = isinstance(source, ScaledTensor) and source.scale_inv is target.scale_inv
    if same_scale and stored.partial not in (Partial.WHOLE, Partial.PART):
        return _copy_elements(target, source, non_blocking)
    stays_exact = stored.kind is Kind.UNTRAINED and not isinstance(source, ScaledTensor)
    if target._view is None and stored.partial not in UNWRITABLE:
        stored.state_dict_copies.accept()
        if not stays_exact:
            stored.edited = None
            _replace(target, source, non_blocking)
            return target
    whole = _editable(target, func)
    target.in_whole(whole).copy_(_values(source))
    if stays_exact or stored.kind is Kind.GRADIENT or stored.edited is not None:
        _keep(target, whole)
    else:
        _replace(target.view_of(stored.codes), whole)
    return target


def _copy_elements(target: ScaledTensor, source: ScaledTensor, non_blocking: bool) -> ScaledTensor:
    target.codes.copy_(source.codes, non_blocking)
    target.stored.count_write()
    if target.partial is Partial.FRESH:
        # a written shard keeps a scale of its own when FSDP2 copies it into padded memory
        target.partial = source.partial or Partial.SHARD
    if target.rest is not None:  # a master has the source's scale, too
        target.rest.copy_(source.rest, non_blocking)
    return target


def _replace(target: ScaledTensor, source: torch.Tensor, non_blocking: bool = False) -> None:
    """Store all values of `source`, of the shape of the whole `target`: first in the master, then
    from there in the codes. Copy bits if both are stored in the same form."""
    if isinstance(source, ScaledTensor) and (source.edited is not None or source._view is not None):
        source = source.values(float32)
    is_scaled = isinstance(source, ScaledTensor)
    if target.master is not None:
        if is_scaled and source.stored.rest is not None:
            source = source.exact(float32) if source.master is None else source.master
        _replace(target.master, source, non_blocking)
        source = target.master
        is_scaled = True
    elif target.residual is not None and is_scaled and source.residual is None:
        source = source.exact(float32)
        is_scaled = False
    elif target.elsewhere is not None and not (is_scaled and source.elsewhere is not None):
        source = _as_owner_rounds(source, target.elsewhere.storage)
        is_scaled = isinstance(source, ScaledTensor)
    form = (source.codes.dtype, source.block_size) if is_scaled else None
    if form != (target.codes.dtype, target.block_size):
        values = source.values(float32) if is_scaled else source
        source = quantize_like(values.to(target.device, float32).contiguous(), target)
    target.take(source, non_blocking)
    target.stored.count_write()
    if target.partial is Partial.SHARD:
        target.partial = Partial.WRITTEN


def _as_owner_rounds(source: torch.Tensor, storage: torch.dtype) -> torch.Tensor:
    """Round new values like the owner of the master or residual does first, so that all ranks get
    the same codes."""
    is_scaled = isinstance(source, ScaledTensor)
    if storage == torch.int8 and is_scaled and source.residual is not None:
        return source
    rounded = quantize(source.exact(float32) if is_scaled else source.float(), storage)
    return rounded if storage == torch.int8 else rounded.dequantize(float32)


@_implements(aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor)
def _fill_(func, tensor, *args):
    return tensor.copy_(func(torch.empty(tensor.shape, dtype=float32, device=tensor.device), *args))


@_implements(aten.set_.source_Tensor)
def _set_(func, tensor, source):
    if not isinstance(tensor, ScaledTensor):
        return func(tensor, _values(source))
    tensor.data = source
    return tensor


@_implements(aten._foreach_zero_.default)
def _foreach_zero_(func, tensors):  # zero_grad(set_to_none=False) of a fused or foreach optimizer
    for tensor in tensors:
        tensor.zero_()


@_implements(aten._foreach_copy_.default)
def _foreach_copy_(func, tensors, sources, non_blocking=False):
    for tensor, source in zip(tensors, sources, strict=True):
        tensor.copy_(source, non_blocking)


@_implements(aten.add_.Tensor)
def _accumulate_(func, total, other, *, alpha=1):
    """Add gradients in FP32 until `finish_accumulation`, so that many microbatches round once."""
    if (
        not isinstance(total, ScaledTensor)
        or total.kind is not Kind.GRADIENT
        or total._view is not None
        or total.partial
    ):
        return NotImplemented
    stored = total.stored
    addend = _values(other)
    if alpha != 1:
        addend = addend * alpha
    whole = isinstance(addend, torch.Tensor) and addend.shape == total.shape
    if stored.codes.dtype == E4M3.dtype and whole and not stored.block_size:
        _keep(total, gradients.accumulate(stored.codes, stored.scale_inv, addend))
        return total
    # a clip may have changed the scale of an FP32 sum, even to zero
    _keep(total, total.dequantize(float32).add_(addend))
    return total


@_implements(aten.detach_.default)
def _detach_(func, tensor):
    return tensor  # autograd has detached it


@_implements(aten.record_stream.default)
def _record_stream(func, tensor, stream):
    for part in stored_parts(tensor, exact=True):
        part.record_stream(stream)


# Scalars touch the scale alone


def _scales(tensor: Any, other: Any) -> bool:
    """Return True if multiplying by `other` or dividing by it changes only the scale. Powers of two
    are exact; for gradients any positive number or 0-dimensional tensor rounds once in FP32
    (clipping, unscaling, averaging)."""
    if not isinstance(tensor, ScaledTensor) or tensor.partial in UNWRITABLE:
        return False
    if tensor._view is not None and not tensor.codes.is_contiguous():
        return False
    if tensor.codes.dtype == ROOT8.dtype:  # the scale multiplies the root
        return False
    is_gradient = tensor.kind is Kind.GRADIENT
    if isinstance(other, torch.Tensor):
        fits = is_gradient and not isinstance(other, ScaledTensor) and other.dim() == 0
    else:
        fits = isinstance(other, (int, float)) and 0 < other < float("inf")
        fits = fits and (is_gradient or math.frexp(other)[0] == 0.5)
    return fits and tensor.numel() == tensor.stored.codes.numel()


def _rescale(func, tensors: list[ScaledTensor], other: Any) -> None:
    """Multiply or divide tensors in place by their scales."""
    operation = torch._foreach_div_ if "div" in func.name() else torch._foreach_mul_
    scales: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        scales.setdefault(tensor.device, []).append(tensor.scale_inv)
        tensor.stored.count_write()
        for part in (tensor.master, tensor.stored.edited):
            if part is not None:
                operation([part], other)
    for device, together in scales.items():
        operation(together, _factor(other, device))


@_implements(aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)
def _times(func, tensor, other):
    if not isinstance(tensor, ScaledTensor) and "mul" in func.name():
        tensor, other = other, tensor  # number * tensor
    if not _scales(tensor, other) or tensor.kind is not Kind.GRADIENT or tensor._view is not None:
        return NotImplemented
    result = ScaledTensor(
        tensor.codes.clone(),
        tensor.scale_inv.clone(),
        tensor.dtype,
        tensor.block_size,
        tensor.kind,
    )
    _rescale(func, [result], other)
    return result


@_implements(aten.mul_.Tensor, aten.mul_.Scalar, aten.div_.Tensor, aten.div_.Scalar)
def _times_(func, tensor, other):
    if not _scales(tensor, other):
        return NotImplemented
    _rescale(func, [tensor], other)
    return tensor


def _factor(other, device: torch.device) -> torch.Tensor:
    """Return a scalar as an FP32 tensor on the device: dividing by a number would round its
    reciprocal."""
    if isinstance(other, torch.Tensor) and (other.device == device or other.device.type != "cpu"):
        return other.to(device=device, dtype=float32)
    return torch.full((), float(other), dtype=float32, device=device)


def _scaled_and_plain(tensors) -> tuple[list[ScaledTensor], list[torch.Tensor]]:
    scaled = [tensor for tensor in tensors if isinstance(tensor, ScaledTensor)]
    return scaled, [tensor for tensor in tensors if not isinstance(tensor, ScaledTensor)]


@_implements(
    aten._foreach_mul_.Scalar,
    aten._foreach_mul_.Tensor,
    aten._foreach_div_.Scalar,
    aten._foreach_div_.Tensor,
)
def _foreach_times_(func, tensors, other):
    if isinstance(other, ScaledTensor):
        return NotImplemented
    scaled, plain = _scaled_and_plain(tensors)
    if plain:
        func(plain, other)
    fitting = []
    for tensor in scaled:
        if _scales(tensor, other):
            fitting.append(tensor)
        elif "div" in func.name():
            tensor.div_(other)
        else:
            tensor.mul_(other)
    _rescale(func, fitting, other)


@_implements(aten._amp_foreach_non_finite_check_and_unscale_.default)
def _unscale_(func, tensors, found_inf, inv_scale):
    """Implement `GradScaler.unscale_`. A gradient with a non-finite value has a non-finite
    scale."""
    scaled, plain = _scaled_and_plain(tensors)
    if plain:
        func(plain, found_inf, inv_scale)
    if not scaled:
        return
    _foreach_times_(aten._foreach_mul_.Tensor, scaled, inv_scale.squeeze())
    unrounded = [
        tensor.codes for tensor in scaled if tensor.codes.dtype not in FORMAT_OF and tensor.numel()
    ]
    largest = torch._foreach_norm(unrounded, math.inf) if unrounded else []
    numbers = torch.cat(
        [part.reshape(-1) for part in (*(tensor.scale_inv for tensor in scaled), *largest)]
    )
    found_inf.copy_(torch.maximum(found_inf, (~torch.isfinite(numbers).all()).to(found_inf)))


# Norms and collectives


@_implements(aten.linalg_vector_norm.default)
def _vector_norm(func, tensor, ord=2, dim=None, keepdim=False, *, dtype=None):
    if (
        not isinstance(tensor, ScaledTensor)
        or tensor.kind is not Kind.GRADIENT
        or tensor.block_size
        or dim is not None
        or ord == 0
    ):
        return NotImplemented
    if ord == 2 and not keepdim:
        norm = gradients.norm(tensor.codes, tensor.scale_inv)
    else:
        norm = func(tensor.codes.float(), ord, None, keepdim) * tensor.scale_inv.abs()
    return norm.to(dtype or tensor.dtype)


@_implements(aten._foreach_norm.Scalar)
def _foreach_norm(func, tensors, ord=2, dtype=None):
    return [torch.linalg.vector_norm(tensor, ord, dtype=dtype) for tensor in tensors]


def _collective(func, args, kwargs):
    """Run a collective on plain values, wait, and store the results: in the first argument, except
    for `send`."""
    plain: dict[int, torch.Tensor] = {}
    for tensor in written_to(func, args, kwargs, ScaledTensor):
        _require_all(tensor, func)
        plain[id(tensor)] = tensor.values().contiguous()
    result, work = _on_stand_ins(func, args, kwargs, lambda tensor: plain.get(id(tensor)))
    if not work:
        return result
    for handle in tree_iter(result):
        if hasattr(handle, "wait"):
            handle.wait()
    for values, tensor in work:
        tensor.copy_(values)
    return result
