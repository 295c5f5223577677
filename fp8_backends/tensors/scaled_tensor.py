"""`ScaledTensor`: low-precision codes times a scale, as one `torch.Tensor`.

    value = codes * scale_inv       codes: E4M3, E5M2 or FP16; scale_inv: FP32, a power of two when quantized

MS-AMP's levels store FP16 weights, E4M3 weight gradients, and E4M3 and FP16 optimizer states.
Multiplying by a power of two does not round, so a loss scale, an average or a clip changes only the
scale. Two more forms take fewer bytes: E4M3 codes with an eight-bit `residual`, together exact to
twelve bits (`formats.E4M11`), and uint8 roots of non-negative values, value = (codes *
scale_inv)**2 (`formats.ROOT8`).

A ScaledTensor is a view of a `ScaledStorage`, like a plain tensor of its memory: `p.data`,
`p.detach()`, `p[0]` and `p.t()` share it with `p`. PyTorch functions read the values. Operations in
place change them, through any view, or raise (`scaled_operations.py`).
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ..errors import FP8BackendError, NoMemoryError
from ..formats.formats import E4M3, FORMAT_OF, ROOT8
from ..kernels.triton_gate import is_eager
from .encoding import amax_of, decode, decode_pair, encode, encode_pair, encode_sum
from .sharded_tensor import agreed_over, is_distributed, local_part, shard_groups, with_local
from .state_dict_copies import StateDictCopies

OBJECT_ATTRIBUTES = ("stored", "_view")
"""Attributes of a ScaledTensor object."""


class Kind(Enum):
    """The use of a ScaledTensor. It decides what a write stores."""

    WEIGHT = "weight"
    """Edits stay in FP32 until the optimizer's next step. Writes of all values are rounded."""
    UNTRAINED = "untrained"
    """A weight without an optimizer: frozen, or of a deep-copied model, such as an average of
    weights. Writes of plain values stay in FP32, too."""
    GRADIENT = "gradient"
    """Adding or writing turns the codes into FP32 until `finish_accumulation`."""
    STATE = "state"
    """A state of an optimizer, otherwise like a weight."""


class Partial(IntEnum):
    """The tensor's share of the elements under its scale."""

    WHOLE = 0
    PART = 1
    """Elements outside of the tensor share its scale, or FSDP2 has gathered it for one forward:
    operations in place raise."""
    FRESH = 2
    """Memory that FSDP2 allocates and then copies a shard into."""
    SHARD = 3
    """A rank's rows under FSDP2, with the scale of all rows."""
    WRITTEN = 4
    """A shard with a scale of its own after a write, until the ranks agree on one."""


class Elsewhere(NamedTuple):
    """The rank with a weight's master or residual. It makes the optimizer steps."""

    rank: int
    storage: torch.dtype
    """FP16 of a master, int8 of a residual."""
    unread: bool = False
    """The next reader of exact values discards them: give it a placeholder."""


def _owned(tensor: ScaledTensor) -> FP8BackendError:
    return FP8BackendError(
        f"one rank owns the full-precision values of a weight of shape {tuple(tensor.shape)} "
        "(levels O3 and O4 shard masters, residuals and optimizer states): read "
        "accelerator.get_state_dict(model), called on all ranks; or enter "
        "fp8_backends.checkpoints.whole_states(optimizer) on all ranks around the read; or "
        "prepare with shard_states=False. weight.dequantize() returns the FP8 values, which "
        "products read"
    )


@dataclass(eq=False)
class ScaledStorage:
    """Memory shared by all views of one ScaledTensor. `ScaledTensor` describes the other
    attributes.

    Attributes:
        rest: the master, the residual, or the rank with it; None for weights without one.
        edited: FP32, strides of `codes`: values after operations in place, before rounding. The
            optimizer's next step or a copy of whole values drops them.
        known: (amax, weak reference to the codes, their version) from the optimizer's last step,
            for `known_amax`.
        gathered: this rank has the exact values of a sharded weight for a while.
        offloaded: moves values of a state dict to the host, if it has the exact values: a device
            may have no room for those of all weights.
        state_dict_copies: plain copies of this weight in state dicts.
    """

    codes: torch.Tensor
    scale_inv: torch.Tensor
    block_size: int = 0
    kind: Kind = Kind.WEIGHT
    partial: Partial = Partial.WHOLE
    rest: torch.Tensor | Elsewhere | None = None
    shared_out: bool = False
    edited: torch.Tensor | None = None
    gathered: bool = False
    offloaded: Callable[[torch.Tensor], torch.Tensor] | None = None
    known: tuple[torch.Tensor, weakref.ref, int] | None = None
    state_dict_copies: StateDictCopies = field(default_factory=StateDictCopies)

    def count_write(self) -> None:
        """Count a write to codes and scales for autograd, which does not see writes of
        implementations."""
        if is_eager(self.codes) and not self.codes.is_inference():
            torch.autograd.graph.increment_version([self.codes, self.scale_inv])


def _stored(name: str, seen: Callable[[ScaledTensor, Any], Any] | None = None) -> property:
    """Return a property with one value for all views; `seen` returns a view's part of it."""

    def get(tensor: ScaledTensor) -> Any:
        value = getattr(tensor.stored, name)
        return value if seen is None or value is None else seen(tensor, value)

    def put(tensor: ScaledTensor, value: Any) -> None:
        setattr(tensor.stored, name, value)

    return property(get, put)


def _partial_of(tensor: ScaledTensor, partial: Partial) -> Partial:
    # nothing is copied into an empty shard
    return Partial.SHARD if partial is Partial.FRESH and not tensor.numel() else partial


def _rest_of(tensor: ScaledTensor, rest: torch.Tensor | Elsewhere) -> torch.Tensor | None:
    if isinstance(rest, ScaledTensor):
        return rest.view_of(tensor.in_whole(rest.codes))
    return None if isinstance(rest, Elsewhere) else tensor.in_whole(rest)


class WithoutMemory(torch.Tensor):
    """A tensor without memory for its values: base class with the methods of readers that bypass
    PyTorch.

    Attributes:
        operations: PyTorch operation -> its implementation. For all others, and where it returns
            NotImplemented, `on_values` runs.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl
    operations: dict[Any, Callable] = {}

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        operation = cls.operations.get(func)
        result = NotImplemented if operation is None else operation(func, *args, **kwargs)
        return cls.on_values(func, args, kwargs) if result is NotImplemented else result

    @property
    def data(self) -> torch.Tensor:
        """A view outside of autograd. Assigning calls `assign`: assigning to `torch.Tensor.data`
        would change nothing."""
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        self.assign(values)

    def numpy(self, *, force: bool = False):
        """Return the values as a read-only NumPy copy: a write to it would change nothing here."""
        array = self.values().detach().requires_grad_(self.requires_grad).numpy(force=force)
        array.setflags(write=False)
        return array

    def _refuse_memory(self, *args, **kwargs):
        raise NoMemoryError(
            f"the memory of a {type(self).__name__} holds no values that another library could "
            "share: give it the plain copy that values() returns, or make weights plain for a "
            "while: fp8_backends.checkpoints.plain_weights(model)"
        )

    __dlpack__ = apply_ = _refuse_memory

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return a storage without memory to compilers, which only compare storages. Raises
        `NoMemoryError` elsewhere: PyTorch would read and write at a null pointer."""
        if torch._guards.TracingContext.try_get() is None:
            self._refuse_memory()
        return super().untyped_storage()

    def tolist(self) -> list:
        return self.values().tolist()

    def share_memory_(self) -> torch.Tensor:
        """Move the stored tensors, `parts`, to memory shared with other processes."""
        for part in self.parts:
            part.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Return True if other processes can see the stored tensors."""
        return all(part.is_shared() for part in self.parts)


class ScaledTensor(WithoutMemory):
    """A tensor stored as low-precision codes and FP32 scales. PyTorch sees the dtype of its values.

    Attributes:
        codes: E4M3, E5M2, FP16 or uint8 (FP32 while a gradient accumulates), of the tensor's shape.
            Read-only.
        scale_inv: FP32, 0-dimensional, or [ceil(numel / block_size)]. NaN if the quantized values
            were not finite.
        block_size: elements of the flattened tensor that share a scale; 0: all.
        kind: a `Kind`.
        partial: a `Partial`.
        master: a ScaledTensor with the same values in more precision; or None (used at level O3).
        residual: int8, the lower bits of E4M3 codes, together E4M11; or None (used at level O4).
        rest: the master or the residual, read by `exact` besides codes and scale; or None.
        elsewhere: the rank with the rest, if it is another one; or None.
        shared_out: one of several ranks has the rest. Products read codes and scale on all of them.
    """

    operations: dict[Any, Callable] = {}
    ds_optim_param = True
    """DeepSpeed's engine broadcasts the bytes of no Parameter with this attribute: codes are copied
    by `comm`."""

    block_size = _stored("block_size")
    kind = _stored("kind")
    scale_inv = _stored("scale_inv")
    shared_out = _stored("shared_out")
    state_dict_copies = _stored("state_dict_copies")
    edited = _stored("edited", lambda tensor, edited: tensor.in_whole(edited))
    partial = _stored("partial", _partial_of)
    rest = _stored("rest", _rest_of)

    @staticmethod
    def __new__(cls, data, scale_inv=None, *context, requires_grad=True, **named):
        # libraries that move a Parameter call type(parameter)(values, requires_grad=)
        if scale_inv is None:
            return nn.Parameter(data, requires_grad)
        dtype = context[0] if context else named.get("dtype", torch.float32)
        return torch.Tensor._make_wrapper_subclass(
            cls,
            data.shape,
            strides=data.stride(),
            dtype=dtype,
            device=data.device,
            layout=data.layout,
        )

    def __init__(
        self,
        data,
        scale_inv=None,
        dtype=torch.float32,
        block_size=0,
        kind=Kind.WEIGHT,
        partial=Partial.WHOLE,
        *,
        requires_grad=True,
    ):
        if scale_inv is not None:
            self.stored = ScaledStorage(data, scale_inv, block_size, kind, partial)
            self._view = None

    def view_of(self, seen: torch.Tensor) -> ScaledTensor:
        """Return another view of this storage. `seen` is `codes` or a view of it."""
        offset = seen.storage_offset() - self.stored.codes.storage_offset()
        # in inference mode, a view of a tensor from outside counts versions like that tensor
        with (
            torch.inference_mode(seen.is_inference())
            if torch.is_inference_mode_enabled()
            else nullcontext()
        ):
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
        alias._view = None if seen is self.stored.codes else (self.stored.codes, seen)
        return alias

    def in_whole(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this view's elements of a tensor with the strides of the stored codes."""
        if self._view is None:
            return whole
        return whole.as_strided(
            self.shape, self.stride(), whole.storage_offset() + self.storage_offset()
        )

    @property
    def codes(self) -> torch.Tensor:
        if self._view is None:
            return self.stored.codes
        # kept: a compiler that traced `as_strided` here would ask for the codes again
        codes, seen = self._view
        # a gradient has begun to accumulate in FP32, or was rounded again
        if codes is not self.stored.codes:
            seen = self.in_whole(self.stored.codes)
            self._view = (self.stored.codes, seen)
        return seen

    @property
    def master(self) -> ScaledTensor | None:
        rest = self.rest
        return rest if isinstance(rest, ScaledTensor) else None

    @property
    def residual(self) -> torch.Tensor | None:
        rest = self.rest
        return None if isinstance(rest, ScaledTensor) else rest

    @property
    def elsewhere(self) -> Elsewhere | None:
        rest = self.stored.rest
        return rest if isinstance(rest, Elsewhere) else None

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the plain values of codes and scale, in `dtype` (default: the tensor's). Not
        differentiable."""
        if self.block_size:
            values = self.in_whole(decode(self.stored.codes, self.scale_inv, self.block_size))
        else:
            values = decode(self.codes, self.scale_inv)
        return values.to(dtype or self.dtype)

    def exact(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the plain values in full precision, in `dtype` (default: the tensor's): after
        operations in place, or with the master or residual.

        Raises:
            FP8BackendError: another rank has the master or residual, or a copy in a state dict was
            written to.
        """
        dtype, rest = dtype or self.dtype, self.rest
        self.state_dict_copies.check()
        if self.elsewhere is not None:
            if self.elsewhere.unread:  # takes no memory, and cannot be mistaken for values
                return torch.empty(self.shape, dtype=self.dtype, device="meta")
            raise _owned(self)
        if self.edited is not None:
            return self.edited.to(dtype, copy=True)
        if isinstance(rest, ScaledTensor):
            # offloaded, the master is on the CPU
            return rest.dequantize(dtype).to(self.codes.device)
        if rest is None:
            return self.dequantize(dtype)
        # offloaded, or gathered for a checkpoint, the residual is on the CPU
        return decode_pair(self.codes, rest.to(self.codes.device), self.scale_inv).to(dtype)

    def values(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the exact values, as PyTorch functions read them.

        Raises:
            FP8BackendError: one rank owns them. Raised on all ranks.
        """
        if self.shared_out and not self.stored.gathered:
            raise _owned(self)
        return self.exact(dtype)

    def remember_amax(self, amax: torch.Tensor) -> None:
        """Keep max |x| of the codes without their scale, until a write to them. FP32,
        0-dimensional."""
        codes = self.stored.codes
        self.stored.known = amax, weakref.ref(codes), codes._version

    def known_amax(self) -> torch.Tensor | None:
        """Return the amax from `remember_amax`; None after a write to the codes. FP32,
        0-dimensional."""
        if self.stored.known is None:
            return None
        amax, codes, version = self.stored.known
        return (
            amax if codes() is self.stored.codes and version == self.stored.codes._version else None
        )

    def settle(self) -> None:
        """Drop the FP32 values after operations in place. The stored codes are these values,
        rounded."""
        self.state_dict_copies.check()
        self.edited = None
        if self.kind is Kind.UNTRAINED:
            self.kind = Kind.WEIGHT

    def drop_exact_edits(self) -> None:
        """Drop the FP32 values after operations in place, such as a load, if the stored parts hold
        them exactly."""
        edited, whole = self.edited, self.stored.edited
        self.edited = None
        if edited is not None and not torch.equal(edited, self.exact(torch.float32)):
            self.edited = whole

    def assign(self, values: torch.Tensor) -> None:
        """Store plain values of the same shape and dtype."""
        if (
            isinstance(values, ScaledTensor)
            and values.stored is self.stored
            and values._view is None
        ):
            return  # after `p.data += change`
        differing = [
            name
            for name in ("shape", "dtype", "device")
            if getattr(values, name) != getattr(self, name)
        ]
        if differing:
            raise FP8BackendError(
                "a weight in scaled precision takes values of its own shape, dtype and device as "
                f"`.data`: they differ in {' and '.join(differing)} ({_described(values)}, and the "
                f"weight is {_described(self)}). Move or cast it with its module (module.to(...)), "
                "turn bf16 off in a DeepSpeed configuration, or make it plain first: "
                "fp8_backends.restore(model)"
            )
        with torch.no_grad():
            self.detach().copy_(values)

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        edited = () if self.edited is None else (self.edited,)
        return *stored_parts(self, exact=True), *edited

    def to(self, *args, **kwargs) -> torch.Tensor:
        """Move or cast like `torch.Tensor.to`. A new dtype makes a tensor plain, but a Parameter
        (`module.to(dtype)`) keeps its storage and presents the new dtype. Any dtype makes an
        optimizer state plain, as stock `load_state_dict` needs it."""
        arguments = [*args, kwargs.get("dtype"), kwargs.get("other")]
        dtypes = {
            getattr(x, "dtype", x) for x in arguments if isinstance(x, (torch.dtype, torch.Tensor))
        }
        stays = dtypes <= {self.dtype} and not (dtypes and self.kind is Kind.STATE)
        if stays or getattr(self, "_is_param", False) or self.requires_grad:
            return super().to(*args, **kwargs)
        return self.values().to(*args, **kwargs)

    def finish_accumulation(self) -> None:
        """Round an accumulated gradient's FP32 sum to E4M3, with the scale of its amax. In
        place."""
        stored = self.stored
        if stored.kind is Kind.GRADIENT and stored.codes.dtype == torch.float32:
            stored.codes, stored.scale_inv = encode_sum(stored.codes, stored.scale_inv)

    @property
    def context(self) -> tuple[torch.dtype, int, Kind, Partial]:
        """Arguments of the constructor after codes and scale_inv."""
        whole = self.stored.codes
        if self.block_size and (self.shape, self.stride()) != (whole.shape, whole.stride()):
            raise FP8BackendError(
                f"a view of shape {tuple(self.shape)} of a ScaledTensor with a scale for each "
                f"{self.block_size} elements cannot be taken apart: read it with dequantize()"
            )
        return (
            self.dtype,
            self.block_size,
            self.kind,
            self.partial or Partial(self.numel() < whole.numel()),
        )

    def agree_on_scale(self, groups: list[dist.ProcessGroup]) -> None:
        """Give a written shard, and its master, the scale of the whole tensor, in place. All ranks
        of the groups call it. The rank's own scale, in use until then, has the same or a finer
        grid."""
        self.write_shard(self.exact(torch.float32), groups)

    @torch.no_grad()
    def write_shard(self, values: torch.Tensor, groups: list[dist.ProcessGroup]) -> None:
        """Write plain values into a shard and its master or residual, with scales agreed on by the
        ranks of the groups."""
        if self.master is not None:
            self.master.write_shard(values, groups)
            values = self.master.exact(torch.float32)
        self.take(quantize_like(values, self, agreed_over(amax_of(values), groups)))
        if self.partial is Partial.WRITTEN:
            self.partial = Partial.SHARD

    def take(self, rounded: ScaledTensor, non_blocking: bool = False) -> None:
        """Copy the bits of a tensor in the same form, without a master."""
        self.codes.copy_(rounded.codes, non_blocking)
        self.scale_inv.copy_(rounded.scale_inv, non_blocking)
        if self.residual is not None:
            self.residual.copy_(rounded.residual, non_blocking)

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        """Return the tensors that FSDP2 sends for a shard: its codes, FP8 as bytes. Every rank has
        the scale; residuals stay on their ranks."""
        self.state_dict_copies.check()
        if self.partial is Partial.WRITTEN:
            sharded = (
                p for p in module._parameters.values() if getattr(p, "_local_tensor", None) is self
            )
            # over the ranks of tensor parallelism, too
            self.agree_on_scale(shard_groups(next(sharded)))
        codes = self.codes.view(torch.uint8) if self.codes.dtype.itemsize == 1 else self.codes
        if self.shape[1:] == outer_size[1:]:
            # sharded by rows, the last shards may be shorter; replicas are whole
            missing = max(0, -(-outer_size[0] // mesh.size()) - self.shape[0])
            codes = (
                torch.cat([codes, codes.new_zeros(missing, *outer_size[1:])]) if missing else codes
            )
        return (codes,), (self.scale_inv, outer_size)

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        """Return FSDP2's gathered codes as the whole tensor, presenting `param_dtype`."""
        (gathered,), (scale_inv, size) = all_gather_outputs, metadata
        if out is not None:
            # its codes are a view of the gathered ones
            local_part(out).stored.scale_inv = scale_inv
            return None
        codes = gathered.reshape(-1)[: size.numel()].view(self.codes.dtype).view(size)
        return ScaledTensor(codes, scale_inv, param_dtype, partial=Partial.PART), (gathered,)

    def __tensor_flatten__(self):
        # compiled code reads codes and scale, as products do
        return ["codes", "scale_inv"], self.context

    @staticmethod
    def __tensor_unflatten__(inner_tensors, context, outer_size, outer_stride):
        return ScaledTensor(inner_tensors["codes"], inner_tensors["scale_inv"], *context)

    def __repr__(self) -> str:
        fmt = FORMAT_OF.get(self.codes.dtype)
        stored = fmt.name.upper() if fmt else str(self.codes.dtype).removeprefix("torch.")
        stored += " and a residual" if self.residual is not None else ""
        if self.block_size:
            scales = f"{self.scale_inv.numel()} scales, one for {self.block_size} elements"
        elif self.scale_inv.is_meta or isinstance(self.scale_inv, torch._subclasses.FakeTensor):
            scales = "one scale"
        else:
            scales = f"scale_inv {self.scale_inv.item():.4g}"
        trains = ", requires_grad" if self.requires_grad else ""
        owned = ", exact on one rank" if self.shared_out else ""
        return f"ScaledTensor({list(self.shape)} {self.dtype}, stored as {stored}, {scales}{owned}{trains})"

    def __reduce_ex__(self, protocol):
        others = {
            name: value for name, value in self.__dict__.items() if name not in OBJECT_ATTRIBUTES
        }
        more = {"rest": self.stored.rest if self.rest is None else self.rest, "edited": self.edited}
        others |= {name: value for name, value in more.items() if value is not None}
        if self.shared_out:
            others["shared_out"] = True
        # pickle knows no FP8
        codes = self.codes.view(torch.uint8) if self.codes.dtype.itemsize == 1 else self.codes
        return _rebuild, (
            codes,
            self.codes.dtype,
            self.scale_inv,
            self.context,
            self.requires_grad,
            others,
        )

    def __deepcopy__(self, memo: dict) -> ScaledTensor:
        if not self.is_leaf:
            raise RuntimeError(
                "only a ScaledTensor that is a leaf of autograd's graph can be copied deeply"
            )
        copied = memo.get(id(self))
        if copied is None:
            self.state_dict_copies.check()
            attributes = copy.deepcopy(
                {name: value for name, value in self.__dict__.items() if name != "_view"}, memo
            )
            whole = self.view_of(self.stored.codes)
            whole.stored = attributes["stored"]
            if self.kind is Kind.WEIGHT:
                whole.kind = Kind.UNTRAINED
            copied = whole.view_of(self.in_whole(whole.stored.codes)).requires_grad_(
                self.requires_grad
            )
            copied.__dict__.update(attributes)
            memo[id(self)] = copied
            if self.grad is not None:
                copied.grad = copy.deepcopy(self.grad, memo)
        return copied


# Pickled tensors: a file may hold anything


def _rebuild(
    data, storage, scale_inv, context: tuple, requires_grad: bool, others: dict[str, Any]
) -> ScaledTensor:
    """Return the pickled tensor. Raise `FP8BackendError` if its parts do not match."""
    if not _belong_together(data, storage, scale_inv, context):
        raise _damaged("codes, scale and form do not belong together")
    tensor = ScaledTensor(data.view(storage), scale_inv, *context)
    for name, value in others.items():
        if not _may_have(tensor, name, value):
            raise _damaged(f"its {name} does not belong to it")
        setattr(tensor, name, value)
    return tensor.requires_grad_(requires_grad)


def _damaged(fault: str) -> FP8BackendError:
    return FP8BackendError(
        f"a scaled tensor in the file is damaged, or was made up, and is not loaded: {fault}"
    )


def _belong_together(data: Any, storage: Any, scale_inv: Any, context: Any) -> bool:
    kinds = (torch.dtype, int, Kind, Partial)
    tensors = (
        isinstance(data, torch.Tensor)
        and isinstance(scale_inv, torch.Tensor)
        and data.layout == torch.strided
    )
    if not (tensors and storage in (*FORMAT_OF, torch.float32) and isinstance(context, tuple)):
        return False
    # as `__reduce_ex__` writes it
    pickled_dtype = torch.uint8 if storage.itemsize == 1 else storage
    if data.dtype != pickled_dtype or len(context) != 4 or not all(map(isinstance, context, kinds)):
        return False
    dtype, block_size = context[:2]
    shape = (-(-data.numel() // block_size),) if block_size > 0 else ()
    fits = block_size >= 0 and scale_inv.dtype == torch.float32 and scale_inv.shape == shape
    in_blocks = data.is_contiguous() if block_size else storage != ROOT8.dtype
    return dtype.is_floating_point and fits and in_blocks


def _may_have(tensor: ScaledTensor, name: str, value: Any) -> bool:
    """Return True if a pickled ScaledTensor may have such an attribute. Names of PyTorch and this
    class are reserved, except those that `ScaledTensor.__reduce_ex__` writes."""
    if name == "shared_out":
        return isinstance(value, bool)
    if name == "rest":
        return isinstance(value, Elsewhere) or _completes(tensor, value)
    if name == "edited":
        fits = isinstance(value, torch.Tensor) and value.dtype == torch.float32
        return fits and value.shape == tensor.shape
    return (
        isinstance(name, str) and name not in OBJECT_ATTRIBUTES and not hasattr(ScaledTensor, name)
    )


def _completes(tensor: ScaledTensor, rest: Any) -> bool:
    """Return True if `rest` can be the master or the residual of a pickled tensor."""
    if isinstance(rest, ScaledTensor):
        return rest.shape == tensor.shape and rest.stored.rest is None
    codes = tensor.codes
    if not isinstance(rest, torch.Tensor) or (rest.dtype, rest.layout) != (
        torch.int8,
        codes.layout,
    ):
        return False
    is_pair = codes.dtype == E4M3.dtype and not tensor.block_size
    same_place = (rest.shape, rest.stride(), rest.device) == (
        codes.shape,
        codes.stride(),
        codes.device,
    )
    return is_pair and tensor.kind is not Kind.GRADIENT and same_place


def _described(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}".replace("torch.", "")


# PyTorch's protocol for subclasses in files that `torch.load(weights_only=True)` may read
torch.serialization.add_safe_globals([ScaledTensor, Kind, Partial, _rebuild])


def stored_parts(tensor: torch.Tensor, exact: bool = False) -> tuple[torch.Tensor, ...]:
    """Return `(codes, scale_inv)` of a ScaledTensor, plus the parts of its master or its residual
    if `exact`; `(tensor,)` for any other tensor."""
    if not isinstance(tensor, ScaledTensor):
        return (tensor,)
    rest = stored_parts(tensor.rest) if exact and tensor.rest is not None else ()
    return tensor.codes, tensor.scale_inv, *rest


# Quantizing


def quantize(
    values: torch.Tensor,
    storage: torch.dtype,
    dtype: torch.dtype | None = None,
    block_size: int = 0,
    amax: torch.Tensor | None = None,
) -> torch.Tensor:
    """Round values to nearest into `storage`, with power-of-two scales from their amax (MS-AMP's
    rule).

    Args:
        values: any floating-point tensor, contiguous if `block_size` is given. The ranks of a
            DTensor agree on a single scale, so all of them call this; the result is a DTensor.
        storage: E4M3, E5M2, FP16, or FP32 (with scale 1); uint8 for the roots of `values`, in
            blocks; int8 for E4M3 with a residual (`formats.E4M11`), whose values of at least 2**-13
            of the amax are exact to 2**-12 of themselves, and smaller ones to 2**-25 of the amax.
        dtype: presented dtype (default: the dtype of `values`, FP32 for FP16).
        block_size: elements of the flattened tensor that share a scale; 0: all.
        amax: FP32, 0-dimensional; replaces the amax of `values`, such as a part of a tensor.
    """
    local, lower_bits = local_part(values.detach()), None
    if amax is None and not block_size and is_distributed(values):
        amax = agreed_over(amax_of(local), shard_groups(values))
    if storage == torch.int8:
        codes, lower_bits, scale_inv = encode_pair(local.contiguous(), amax)
    else:
        codes, scale_inv = encode(local, storage, block_size, amax)
    if dtype is None:
        dtype = torch.float32 if local.dtype == torch.float16 else local.dtype
    result = ScaledTensor(codes, scale_inv, dtype, block_size)
    result.rest = lower_bits
    return with_local(values, result)


def quantize_like(
    values: torch.Tensor, stored: ScaledTensor, amax: torch.Tensor | None = None
) -> torch.Tensor:
    """Round values to nearest into the form of a stored tensor, without a master. `values`, `amax`:
    as in `quantize`."""
    storage = stored.codes.dtype if stored.residual is None else torch.int8
    return quantize(values, storage, block_size=stored.block_size, amax=amax)


def dequantize_shards(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the exact plain values of a ScaledTensor or of a DTensor of ScaledTensors; any other
    tensor detached. Not differentiable."""
    local = local_part(tensor.detach())
    if isinstance(local, ScaledTensor):
        local = local.exact(dtype or tensor.dtype)
    return with_local(tensor, local)
