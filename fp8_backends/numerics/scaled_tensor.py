"""`ScaledTensor`: low-precision data times a scale, as one `torch.Tensor`.

    value = data * scale_inv        data: E4M3, E5M2 or FP16; scale_inv: FP32, a power of two when quantized

It is what MS-AMP's levels store: FP16 weights, E4M3 weight gradients, E4M3 and FP16 optimizer states. A power of two
multiplies without rounding, so a loss scale, an average or a clip touches the scale alone. Two further forms take fewer
bytes: E4M3 data with a `residual` of eight bits, which together are exact to twelve (`formats.E4M11`), and uint8 data
that are roots of values that are not negative, value = (data * scale_inv)**2 (`formats.ROOT8`).

A ScaledTensor is a view of a `ScaledStorage`, as a plain tensor is of its memory: `p.data`, `p.detach()`, `p[0]` and
`p.t()` share it with `p`. Any function of PyTorch reads the values. An operation in place changes them, through any
view, or raises. `scaled_operations.py` says how.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ..errors import FP8BackendError
from . import pairs
from .formats import E4M3, E4M11, E5M2, FORMAT_OF, ROOT8, Format, saturating_cast
from .kernels import quantize as quantization
from .kernels import rounding
from .kernels.layouts import POWER_OF_TWO
from .kernels.triton_gate import is_eager
from .meshes import agreed_over, shard_groups
from .scaling import power_of_two_scale, scale_inv_of, tensor_amax
from .state_dict_copies import StateDictCopies

STORED = ("stored", "_view")
"""The attributes that each ScaledTensor is made of."""
SHARD, FRESH = "shard", "fresh"
FEWEST_ON_A_CPU = 2**17
"""Elements from which on the cast that works in a CPU's cache is faster than a few operations on whole tensors."""

OPERATIONS: dict[Any, Callable] = {}
"""Operation of PyTorch -> what it does with ScaledTensors; None -> what any other does."""


class Elsewhere(NamedTuple):
    """What makes a weight exact lies on another rank, which makes its optimizer steps."""

    rank: int
    storage: torch.dtype
    """The dtype in which it is stored there: FP16 of a master, int8 of a residual."""
    unread: bool = False
    """Values with all their precision are asked for by something that will not read them here."""

    def exact(self, tensor: ScaledTensor) -> torch.Tensor:
        if self.unread:  # a placeholder that takes no memory, and that nobody takes for values
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        raise _owned(tensor)


def _owned(tensor: ScaledTensor) -> FP8BackendError:
    return FP8BackendError(
        f"one rank owns the full-precision values of a weight of shape {tuple(tensor.shape)} (levels O3 and O4 shard "
        f"masters, residuals and optimizer states): read accelerator.get_state_dict(model), called on all ranks; or "
        f"enter fp8_backends.checkpoints.whole_states(optimizer) on all ranks around the read; or prepare with "
        f"shard_states=False. weight.dequantize() returns the FP8 values, which products read"
    )


class KnownAmax(NamedTuple):
    """max |x| of stored data, and what tells whether something has written to them since."""

    amax: torch.Tensor
    """FP32, 0-dimensional."""
    data: weakref.ref
    version: int
    """Autograd's count of writes to the data."""

    @classmethod
    def of(cls, data: torch.Tensor, amax: torch.Tensor) -> KnownAmax:
        return cls(amax, weakref.ref(data), data._version)


@dataclass(eq=False)
class ScaledStorage:
    """What all views of one ScaledTensor share. `ScaledTensor` describes the attributes.

    Attributes:
        residual: int8, shape and strides as `data`; or None.
        edited: FP32, strides as `data`: the values as operations in place have left them, before they were rounded
            into what is stored. The optimizer's next step drops them; so does a copy of whole values.
        known: `KnownAmax` of the data, as the optimizer's last step left them.
        copied: this is a weight of a model that was copied deeply, which no optimizer has stepped, such as an average
            of weights. Plain values that are copied into it stay exact.
        unagreed: this is a shard that was written to, and has a scale of its own until the ranks agree on one.
        gathered: ranks share the exact values of this weight, and they are here for a while.
        state_dict_copies: the plain copies of this weight that state dicts hold.
    """

    data: torch.Tensor
    scale_inv: torch.Tensor
    block_size: int = 0
    accumulates: bool = False
    partial: bool | str = False
    is_state: bool = False
    master: ScaledTensor | None = None
    residual: torch.Tensor | None = None
    elsewhere: Elsewhere | None = None
    shared_out: bool = False
    edited: torch.Tensor | None = None
    unagreed: bool = False
    copied: bool = False
    gathered: bool = False
    known: KnownAmax | None = None
    state_dict_copies: StateDictCopies = field(default_factory=StateDictCopies)

    def count_write(self) -> None:
        """Count a write to data and scales, as autograd does. It sees none that an operation's own implementation
        makes."""
        if is_eager(self.data) and not self.data.is_inference():
            torch.autograd.graph.increment_version([self.data, self.scale_inv])


def _stored(name: str) -> property:
    """A property that is the same for all views."""

    def get(tensor: ScaledTensor) -> Any:
        return getattr(tensor.stored, name)

    def put(tensor: ScaledTensor, value: Any) -> None:
        setattr(tensor.stored, name, value)

    return property(get, put)


class WithoutMemory(torch.Tensor):
    """A tensor whose values lie in no memory: for what reads a tensor's memory past PyTorch."""

    def numpy(self, *, force: bool = False):
        """The values as a NumPy array, a read-only copy: a write to it would change nothing here."""
        array = self.values().detach().requires_grad_(self.requires_grad).numpy(force=force)
        array.setflags(write=False)
        return array

    def __dlpack__(self, *args, **kwargs):
        raise FP8BackendError(
            f"the memory of a {type(self).__name__} holds no values that another library could share: give it the "
            "plain copy that values() returns, or make weights plain for a while: "
            "fp8_backends.checkpoints.plain_weights(model)"
        )

    def tolist(self) -> list:
        """The values as nested lists."""
        return self.values().tolist()


class ScaledTensor(WithoutMemory):
    """A tensor stored as low-precision data and FP32 scales. To PyTorch it has the dtype of the values it stands for.

    Attributes:
        _data: E4M3, E5M2, FP16 or uint8 (FP32 while a gradient accumulates), of the tensor's shape. Read-only.
        _scale_inv: FP32, 0-dimensional, or [ceil(numel / block_size)]. NaN where the quantized values were not finite.
        block_size: elements of the flattened tensor that share a scale; 0: all.
        accumulates: it is a gradient: what is added or written to it turns the data into FP32, until
            `finish_accumulation`.
        is_state: it is an optimizer's state.
        partial: True where the scale is that of elements outside of it too, and for a weight that FSDP2 has gathered
            and will forget: nothing changes it in place. `SHARD` for the rows that FSDP2 leaves on a rank: what is
            written to it waits for the ranks to agree on a scale, which they do before they gather it. `FRESH` for
            memory that FSDP2 has asked for, and copies a shard into.
        master: the same values with more precision, another ScaledTensor; or None (level O3 has one).
        residual: int8, what E4M3 data and it, together E4M11, have in more precision; or None (level O4 has one).
        rest: the master or the residual, what `exact` reads besides data and scale; or None.
        elsewhere: where the rest lies, if that is another rank; or None.
        shared_out: the rest lies on one of several ranks. Products read data and scale on all of them.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    block_size, accumulates, is_state = _stored("block_size"), _stored("accumulates"), _stored("is_state")
    elsewhere, shared_out, unagreed = _stored("elsewhere"), _stored("shared_out"), _stored("unagreed")
    edited, state_dict_copies = _stored("edited"), _stored("state_dict_copies")

    @staticmethod
    def __new__(cls, data, scale_inv=None, *context, requires_grad=True, **named):
        if scale_inv is None:  # libraries that move a Parameter make it anew as type(parameter)(values, requires_grad=)
            return nn.Parameter(data, requires_grad)
        dtype = context[0] if context else named.get("dtype", torch.float32)
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, strides=data.stride(), dtype=dtype, device=data.device, layout=data.layout
        )

    def __init__(
        self,
        data,
        scale_inv=None,
        dtype=torch.float32,
        block_size=0,
        accumulates=False,
        partial=False,
        *,
        requires_grad=True,
    ):
        if scale_inv is not None:
            self.stored = ScaledStorage(data, scale_inv, block_size, accumulates, partial)
            self._view = None

    def view_of(self, seen: torch.Tensor) -> ScaledTensor:
        """Another ScaledTensor over what this one stores; `seen` is `_data` or a view of it."""
        offset = seen.storage_offset() - self.stored.data.storage_offset()
        # in inference mode a view of a tensor that was made outside of it counts versions, as that one does
        with torch.inference_mode(seen.is_inference()) if torch.is_inference_mode_enabled() else nullcontext():
            alias = torch.Tensor._make_wrapper_subclass(
                ScaledTensor,
                seen.shape,
                strides=seen.stride(),
                storage_offset=offset,
                dtype=self.dtype,
                device=seen.device,
                layout=seen.layout,
            )
        alias.stored = self.stored
        alias._view = None if seen is self.stored.data else (self.stored.data, seen)
        return alias

    def in_whole(self, whole: torch.Tensor) -> torch.Tensor:
        """This view's place in a tensor that has the strides of the stored data."""
        if self._view is None:
            return whole
        return whole.as_strided(self.shape, self.stride(), whole.storage_offset() + self.storage_offset())

    @property
    def _data(self) -> torch.Tensor:
        if self._view is None:
            return self.stored.data
        data, seen = self._view
        if data is not self.stored.data:  # a gradient has begun to accumulate in FP32, or is rounded again
            seen = self.in_whole(self.stored.data)
            self._view = (self.stored.data, seen)
        return seen

    @property
    def _scale_inv(self) -> torch.Tensor:
        return self.stored.scale_inv

    @property
    def partial(self) -> bool | str:
        partial = self.stored.partial
        return SHARD if partial == FRESH and not self.numel() else partial  # nothing is copied into an empty shard

    @partial.setter
    def partial(self, partial: bool | str) -> None:
        self.stored.partial = partial

    @property
    def master(self) -> ScaledTensor | None:
        master = self.stored.master
        return master if master is None or self._view is None else master.view_of(self.in_whole(master._data))

    @master.setter
    def master(self, master: ScaledTensor | None) -> None:
        self.stored.master = master

    @property
    def residual(self) -> torch.Tensor | None:
        residual = self.stored.residual
        return None if residual is None else self.in_whole(residual)

    @residual.setter
    def residual(self, residual: torch.Tensor | None) -> None:
        self.stored.residual = residual

    @property
    def rest(self) -> torch.Tensor | None:
        return self.residual if self.stored.master is None else self.master

    @rest.setter
    def rest(self, rest: torch.Tensor | None) -> None:
        is_master = isinstance(rest, ScaledTensor)
        self.stored.master, self.stored.residual = (rest, None) if is_master else (None, rest)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The plain values of data and scale, in the tensor's dtype or the one given. Not differentiable."""
        if not self.block_size:
            return _times(self._data, self._scale_inv).to(dtype or self.dtype)
        data = self.stored.data
        values = _times(data, _spread(self._scale_inv, self.block_size, data.shape))
        return self.in_whole(values).to(dtype or self.dtype)

    def _dequantize_pair(self, dtype: torch.dtype) -> torch.Tensor:
        """The plain values of data, residual and scale."""
        residual = self.residual.to(self._data.device)  # gathered for a checkpoint, it is on the CPU
        return pairs.decode(self._data, residual, self._scale_inv).to(dtype)

    def exact(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The plain values with all the precision that is stored: as an operation in place has left them, or the
        master's, if there is one, or those of data and residual. In the tensor's dtype or the one given.

        Raises:
            FP8BackendError: the master or the residual lies on another rank, or a copy in a state dict was written to.
        """
        self.stored.state_dict_copies.check()
        if self.elsewhere is not None:
            return self.elsewhere.exact(self)
        if self.stored.edited is not None:
            return self.in_whole(self.stored.edited).to(dtype or self.dtype, copy=True)
        if self.stored.residual is not None:
            return self._dequantize_pair(dtype or self.dtype)
        master = self.master
        return (self if master is None else master).dequantize(dtype or self.dtype)

    def values(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The plain values as functions of PyTorch read them: the exact ones.

        Raises:
            FP8BackendError: on all ranks, where one of them owns these.
        """
        if self.shared_out and not self.stored.gathered:
            raise _owned(self)
        return self.exact(dtype)

    def known_amax(self) -> torch.Tensor | None:
        """max |x| of all stored data (with their residual, where there is one) without their scale, if the optimizer's
        last step left it and nothing has written since; else None. FP32, 0-dimensional."""
        known, data = self.stored.known, self.stored.data
        return known.amax if known and known.data() is data and known.version == data._version else None

    def settle(self) -> None:
        """Drop what operations in place have left in FP32. What is stored are those values, rounded."""
        self.stored.state_dict_copies.check()
        self.stored.edited, self.stored.copied = None, False

    @property
    def data(self) -> torch.Tensor:
        """A view that autograd knows nothing of. Plain values of the same shape and dtype are stored when they are
        assigned; `torch.Tensor.data` would change nothing."""
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        if isinstance(values, ScaledTensor) and values.stored is self.stored and values._view is None:
            return  # such as after `p.data += change`
        wanted = {name: getattr(self, name) for name in ("shape", "dtype", "device")}
        differing = [name for name, value in wanted.items() if getattr(values, name) != value]
        if differing:
            raise FP8BackendError(
                f"a weight in scaled precision takes values of its own shape, dtype and device as `.data`: they differ "
                f"in {' and '.join(differing)} ({_described(values)}, and the weight is {_described(self)}). Move or "
                f"cast it with its module (module.to(...)), or make it plain first: "
                f"fp8_backends.restore(model)"
            )
        with torch.no_grad():
            self.detach().copy_(values)

    def share_memory_(self) -> ScaledTensor:
        """Move what is stored to memory that other processes can see."""
        edited = () if self.edited is None else (self.edited,)
        for part in (*stored_parts(self, exact=True), *edited):
            part.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether other processes can see what is stored."""
        return all(part.is_shared() for part in stored_parts(self, exact=True))

    def to(self, *args, **kwargs) -> torch.Tensor:
        """Does what `torch.Tensor.to` does. With another dtype, a Parameter keeps its storage and takes that as the
        dtype it stands for (`module.to(dtype)`), and any other ScaledTensor becomes plain. An optimizer's state becomes
        plain with any dtype, as stock `load_state_dict` wants it."""
        given = [*args, kwargs.get("dtype"), kwargs.get("other")]
        dtypes = {getattr(each, "dtype", each) for each in given if isinstance(each, (torch.dtype, torch.Tensor))}
        stays = dtypes <= {self.dtype} and not (dtypes and self.is_state)
        if stays or getattr(self, "_is_param", False) or self.requires_grad:
            return super().to(*args, **kwargs)
        return self.values().to(*args, **kwargs)

    def finish_accumulation(self) -> None:
        """Turn an accumulated gradient's FP32 data into E4M3 again, with the scale of its amax. In place."""
        stored = self.stored
        if stored.accumulates and stored.data.dtype == torch.float32:
            if _serves(stored.data):  # the scale may be anything by now: a loss scale and a clip have multiplied it
                codes, scale_inv = _codes(stored.data, E4M3, stored.scale_inv.abs())
                stored.data, stored.scale_inv = codes, torch.copysign(scale_inv, stored.scale_inv)
            else:
                rounded = quantize(stored.data * stored.scale_inv, E4M3.dtype)
                stored.data, stored.scale_inv = rounded._data, rounded._scale_inv

    @property
    def context(self) -> tuple[torch.dtype, int, bool, bool | str]:
        """What makes the tensor besides data and scale_inv, as its constructor takes it."""
        whole = self.stored.data
        if self.block_size and (self.shape, self.stride()) != (whole.shape, whole.stride()):
            raise FP8BackendError(
                f"a view of shape {tuple(self.shape)} of a ScaledTensor with a scale for each {self.block_size} "
                f"elements cannot be taken apart: read it with dequantize()"
            )
        is_part = self.numel() < whole.numel()
        return self.dtype, self.block_size, self.accumulates, self.partial or is_part

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        """FSDP2's extension point: what travels of a shard is its data, FP8 as bytes. Every rank has the scale; a
        residual stays where it is."""
        self.stored.state_dict_copies.check()
        if self.unagreed:
            sharded = (p for p in module._parameters.values() if getattr(p, "_local_tensor", None) is self)
            agree_on_scale(self, shard_groups(next(sharded)))  # over the ranks of tensor parallelism, too
        data = self._data.view(torch.uint8) if self._data.dtype.itemsize == 1 else self._data
        if self.shape[1:] == outer_size[1:]:  # rows are sharded, and of the last shards some may be missing
            missing = -(-outer_size[0] // mesh.size()) - self.shape[0]
            data = torch.cat([data, data.new_zeros(missing, *outer_size[1:])]) if missing else data
        return (data,), (self._scale_inv, outer_size)

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        """FSDP2's extension point: the whole tensor, standing for `param_dtype`, around what was gathered."""
        (gathered,), (scale_inv, size) = all_gather_outputs, metadata
        if out is not None:
            out = getattr(out, "_local_tensor", out)  # under tensor parallelism it is a DTensor
            out.stored.scale_inv = scale_inv  # its data are a view of what was gathered
            return None
        data = gathered.reshape(-1)[: size.numel()].view(self._data.dtype).view(size)
        return ScaledTensor(data, scale_inv, param_dtype, partial=True), (gathered,)

    def __tensor_flatten__(self):
        # what compiled code reads: data and scale, as products do
        return ["_data", "_scale_inv"], self.context

    @staticmethod
    def __tensor_unflatten__(inner_tensors, context, outer_size, outer_stride):
        return ScaledTensor(inner_tensors["_data"], inner_tensors["_scale_inv"], *context)

    def __repr__(self) -> str:
        fmt = FORMAT_OF.get(self._data.dtype)
        stored = fmt.name.upper() if fmt else str(self._data.dtype).removeprefix("torch.")
        stored += " and a residual" if self.residual is not None else ""
        if self.block_size:
            scales = f"{self._scale_inv.numel()} scales, one for {self.block_size} elements"
        elif self._scale_inv.is_meta or isinstance(self._scale_inv, torch._subclasses.FakeTensor):
            scales = "one scale"
        else:
            scales = f"scale_inv {self._scale_inv.item():.4g}"
        trains = ", requires_grad" if self.requires_grad else ""
        owned = ", exact on one rank" if self.shared_out else ""
        return f"ScaledTensor({list(self.shape)} {self.dtype}, stored as {stored}, {scales}{owned}{trains})"

    def __reduce_ex__(self, protocol):
        others = {name: value for name, value in self.__dict__.items() if name not in STORED}
        more = {name: getattr(self, name) for name in _PICKLED}
        more["edited"] = None if self.edited is None else self.in_whole(self.edited)
        others |= {name: value for name, value in more.items() if value is not None and value is not False}
        data = self._data.view(torch.uint8) if self._data.dtype.itemsize == 1 else self._data  # pickle knows no FP8
        return _rebuild, (data, self._data.dtype, self._scale_inv, self.context, self.requires_grad, others)

    def __deepcopy__(self, memo: dict) -> ScaledTensor:
        if not self.is_leaf:
            raise RuntimeError("only a ScaledTensor that is a leaf of autograd's graph can be copied deeply")
        copied = memo.get(id(self))
        if copied is None:
            self.state_dict_copies.check()
            attributes = copy.deepcopy({name: each for name, each in self.__dict__.items() if name != "_view"}, memo)
            whole = self.view_of(self.stored.data)
            whole.stored = attributes["stored"]
            whole.stored.copied = not (self.is_state or self.accumulates)
            copied = whole.view_of(self.in_whole(whole.stored.data)).requires_grad_(self.requires_grad)
            copied.__dict__.update(attributes)
            memo[id(self)] = copied
            if self.grad is not None:
                copied.grad = copy.deepcopy(self.grad, memo)
        return copied

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        implementation = OPERATIONS.get(func)
        result = NotImplemented if implementation is None else implementation(func, *args, **kwargs)
        return OPERATIONS[None](func, args, kwargs) if result is NotImplemented else result


def _rebuild(data, storage, scale_inv, context: tuple, requires_grad: bool, others: dict[str, Any]) -> ScaledTensor:
    """The tensor that was pickled. Raises `FP8BackendError` where its parts do not go together: a file may hold
    anything."""
    _check_parts(data, storage, scale_inv, context)
    tensor = ScaledTensor(data.view(storage), scale_inv, *context)
    for name, value in others.items():
        if not _may_have(tensor, name, value):
            raise FP8BackendError(f"{_DAMAGED}: its {name} is {_in_words(value)}")
        setattr(tensor, name, value)
    return tensor.requires_grad_(requires_grad)


_DAMAGED = "a scaled tensor in the file is damaged, or was made up, and is not loaded"


def _check_parts(data: Any, storage: Any, scale_inv: Any, context: Any) -> None:
    """Raise `FP8BackendError` for data and scale that are not those of one ScaledTensor."""
    if storage not in (*FORMAT_OF, torch.float32):
        raise FP8BackendError(f"{_DAMAGED}: it is stored as {storage}, which has no scale")
    stored_as = torch.uint8 if storage.itemsize == 1 else storage  # what `__reduce_ex__` writes
    if not isinstance(data, torch.Tensor) or data.dtype != stored_as or data.layout != torch.strided:
        raise FP8BackendError(f"{_DAMAGED}: its data are {_in_words(data)}, and it is stored as {storage}")
    if not isinstance(context, tuple) or len(context) != 4 or not all(map(isinstance, context, _CONTEXT)):
        raise FP8BackendError(f"{_DAMAGED}: it says {context!r} of itself")
    dtype, block_size = context[:2]
    shape = (-(-data.numel() // block_size),) if block_size > 0 else ()
    wants_blocks = storage == ROOT8.dtype and not block_size
    if not dtype.is_floating_point or block_size < 0 or (block_size and not data.is_contiguous()) or wants_blocks:
        raise FP8BackendError(f"{_DAMAGED}: it stands for {dtype}, with a scale for each {block_size} elements")
    if not isinstance(scale_inv, torch.Tensor) or scale_inv.dtype != torch.float32 or scale_inv.shape != shape:
        raise FP8BackendError(f"{_DAMAGED}: its scale is {_in_words(scale_inv)}, and must be float32 {list(shape)}")


_CONTEXT = (torch.dtype, int, bool, (bool, str))
"""The types of `ScaledTensor.context`."""
_PICKLED = ("master", "residual", "elsewhere", "shared_out", "is_state")
"""What else is stored of a ScaledTensor."""


def _may_have(tensor: ScaledTensor, name: str, value: Any) -> bool:
    """Whether a pickled ScaledTensor may have such an attribute. The names that PyTorch and this class use are theirs,
    but for those that `ScaledTensor.__reduce_ex__` writes."""
    if name in ("shared_out", "is_state"):
        return isinstance(value, bool)
    if name == "elsewhere":
        return isinstance(value, Elsewhere)
    if name == "master":
        fits = isinstance(value, ScaledTensor) and value.shape == tensor.shape and value.rest is None
        return fits and tensor.residual is None
    if name == "residual":
        return _fits_as_residual(tensor, value)
    if name == "edited":
        return isinstance(value, torch.Tensor) and value.dtype == torch.float32 and value.shape == tensor.shape
    return isinstance(name, str) and name not in STORED and not hasattr(ScaledTensor, name)


def _fits_as_residual(tensor: ScaledTensor, value: Any) -> bool:
    """Whether a value can be the residual of this pickled ScaledTensor: it lies as the data do."""
    data = tensor._data
    if data.dtype != E4M3.dtype or tensor.block_size or tensor.accumulates or tensor.master is not None:
        return False
    if not isinstance(value, torch.Tensor) or value.dtype != torch.int8 or value.layout != torch.strided:
        return False
    return (value.shape, value.stride(), value.device) == (data.shape, data.stride(), data.device)


def _in_words(value: Any) -> str:
    return _described(value) if isinstance(value, torch.Tensor) else repr(value)


# PyTorch's protocol for subclasses in files that `torch.load(weights_only=True)` may read
torch.serialization.add_safe_globals([ScaledTensor, _rebuild])


def stored_parts(tensor: torch.Tensor, exact: bool = False) -> tuple[torch.Tensor, ...]:
    """The tensors that a tensor stores: data and scale_inv of a ScaledTensor, and what its exact values are made of
    besides where that is asked for, the parts of its master or its residual; any other tensor itself."""
    if not isinstance(tensor, ScaledTensor):
        return (tensor,)
    rest = stored_parts(tensor.rest) if exact and tensor.rest is not None else ()
    return tensor._data, tensor._scale_inv, *rest


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
        storage: E4M3, E5M2, FP16, or FP32 (which has no need of a scale); uint8 for the roots of `values`, in blocks.
        dtype: what the tensor stands for (default: the dtype of `values`, FP32 for FP16).
        block_size: 0 for one scale, else one for each so many elements of the flattened tensor.
        amax: FP32, 0-dimensional; takes the place of the amax of `values` where these are only a part of a tensor.
    """
    values = values.detach()
    dtype = dtype or _stands_for(values)
    if storage not in FORMAT_OF:
        return ScaledTensor(values.to(storage).clone(), torch.ones((), device=values.device), dtype)
    fmt = FORMAT_OF[storage]
    if not block_size and amax is None and fmt in (E4M3, E5M2) and _serves(values):
        return ScaledTensor(*_codes(values, fmt), dtype)
    if fmt is ROOT8:
        values = values.float().sqrt()
    if amax is None:
        amax = block_amax(values, block_size) if block_size else tensor_amax_of(values)
    scale = power_of_two_scale(amax, fmt)
    of_each = _spread(scale, block_size, values.shape) if block_size else scale
    data = _root_codes(values * of_each) if fmt is ROOT8 else saturating_cast(values.float() * of_each, fmt)
    return ScaledTensor(data, scale_inv_of(scale, amax), dtype, block_size)


def _stands_for(values: torch.Tensor) -> torch.dtype:
    """The dtype of what is made of `values`, if none is given."""
    return torch.float32 if values.dtype == torch.float16 else values.dtype


def _root_codes(scaled: torch.Tensor) -> torch.Tensor:
    """ROOT8 codes of FP32 values that are not negative; no positive one becomes 0."""
    return rounding.codes_of(scaled, ROOT8, above_zero=True)[0]


def quantize_pair(
    values: torch.Tensor, dtype: torch.dtype | None = None, amax: torch.Tensor | None = None
) -> ScaledTensor:
    """Values rounded to nearest as E4M3 codes with a residual (`formats.E4M11`), with one power-of-two scale.

    A value of at least 2**-13 of the amax is exact to 2**-12 of itself, and a smaller one to 2**-25 of the amax.

    Args:
        values, dtype, amax: as in `quantize`.
    """
    values = values.detach().contiguous()
    amax = tensor_amax_of(values) if amax is None else amax
    scale = power_of_two_scale(amax, E4M11)
    codes, lower_bits = pairs.encode(values, scale)
    pair = ScaledTensor(codes, scale_inv_of(scale, amax), dtype or _stands_for(values))
    pair.residual = lower_bits
    return pair


def quantize_like(
    values: torch.Tensor, stored: ScaledStorage | ScaledTensor, amax: torch.Tensor | None = None
) -> ScaledTensor:
    """Values rounded to nearest into the form in which something is stored, but for its master. `amax`: as in
    `quantize`."""
    stored = getattr(stored, "stored", stored)
    if stored.residual is not None:
        return quantize_pair(values, amax=amax)
    return quantize(values, stored.data.dtype, block_size=stored.block_size, amax=amax)


def _serves(values: torch.Tensor) -> bool:
    """Whether the cast that FP8 products have takes these values, and is the faster one."""
    if values.dtype not in (torch.float32, torch.bfloat16, torch.float16) or not values.dim():
        return False
    return values.numel() >= (FEWEST_ON_A_CPU if values.device.type == "cpu" else 1)


def _codes(
    values: torch.Tensor, fmt: Format, stored_scale_inv: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scale_inv of `values`, or of `values * stored_scale_inv`, by the power-of-two rule: on a GPU two passes
    over memory. The stored scale is not negative. Since the new one is a power of two, the product is rounded to FP32
    once whichever comes first."""
    matrix = values.reshape(-1, values.shape[-1])
    layouts = quantization.quantize(matrix, fmt, columns=False, rule=POWER_OF_TWO, stored_scale_inv=stored_scale_inv)
    return layouts.codes.view(values.shape), layouts.scale_inv


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


@torch.no_grad()
def agree_on_scale(shard: ScaledTensor, groups: list[dist.ProcessGroup]) -> None:
    """Give a shard that was copied into, and its master, the scale of the whole tensor, in place. All ranks of the
    groups call it. What it holds was rounded by the rank's own amax, which is the finer grid, or the same."""
    values = shard.exact(torch.float32)
    for part in (shard.master, shard):
        if part is not None:
            rounded = quantize_like(values, part, agreed_over(tensor_amax_of(values), groups))
            part.unagreed = False
            write_parts(part, rounded)
            values = rounded.exact(torch.float32)


def write_parts(target: ScaledTensor, rounded: ScaledTensor) -> None:
    """Copy data, scale and residual of a ScaledTensor into those of one that is stored in the same form."""
    for part in ("_data", "_scale_inv", "residual"):
        if (written := getattr(target, part)) is not None:
            written.copy_(getattr(rounded, part))


def _times(data: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    """The FP32 values of data and scales, which broadcast."""
    if data.dtype == ROOT8.dtype:
        return (rounding.decoded(data, ROOT8) * scale_inv).square_()
    return data.float() * scale_inv


def _spread(scales: torch.Tensor, block_size: int, shape: torch.Size) -> torch.Tensor:
    """Block scales [blocks] spread over the elements of a tensor of that shape."""
    return scales.repeat_interleave(block_size)[: shape.numel()].view(shape)


def _described(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}".replace("torch.", "")
