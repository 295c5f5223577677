"""`BlockCodes`: a frozen matrix of a checkpoint, or those of experts in squares, codes with scales
of blocks, as one `torch.Tensor`.

    value = code * scale_inv                                E4M3: 128 x 128 values under an FP32 scale, or all of them
    value = code * (scale_inv / or * tensor_scale)          NVFP4: E2M1, 16 values of a row under an E4M3 scale
    value = code * 2**(scale_inv - 127)                     MXFP4: E2M1, 32 values of a row under an E8M0 scale
    value = code                                            raw float8: E4M3 or E5M2, under the scale 1

It keeps the checkpoint's codes to the bit. Products read E4M3 codes in squares, or raw; every other
operation reads plain values. Copying a whole matrix into it is the only write; operations in place
raise, also through views (`FrozenView`).
"""

import importlib
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map

from ..errors import FP8BackendError
from ..formats.formats import E2M1, E4M3, E5M2
from ..formats.scaling import MX, NVFP4, SQUARES, Blocks, Quantized, e8m0_values
from ..kernels import nvfp4
from .gathered_codes import is_whole
from .scaled_operations import UNSAFE_VIEWS, returns_view, written_to
from .scaled_tensor import WithoutMemory
from .state_dict_copies import StateDictCopies

aten = torch.ops.aten
CODE_PARTS = ("codes", "scale_inv", "tensor_scale")
_STORED = (*CODE_PARTS, "code_layout", "state_dict_copies")
REFUSAL = (
    "would change the frozen codes of a checkpoint in place: fp8_backends.restore(model) makes "
    "weights plain, to merge adapters or to train them, "
    "fp8_backends.checkpoints.dequantize(model) also those of adapted experts, and `weight + 0` "
    "is a plain copy"
)


class CodeLayout(NamedTuple):
    """Codes and scales of a matrix, and their names in a checkpoint after the layer's."""

    name: str
    blocks: Blocks | None
    """Values under one scale; None: all."""
    parts: dict[str, torch.dtype]
    """Codes, scales and the tensor's scale, if there is one."""

    def __deepcopy__(self, memo: dict) -> "CodeLayout":
        return self

    @property
    def is_packed(self) -> bool:
        """Return True for E2M1 codes, two to a byte, the first in the low bits."""
        return next(iter(self.parts.values())) == torch.uint8

    def shape(self, codes: torch.Tensor) -> torch.Size:
        return torch.Size((codes.shape[0], codes.shape[1] * 2)) if self.is_packed else codes.shape

    def values(self, parts: tuple[torch.Tensor, ...], dtype: torch.dtype) -> torch.Tensor:
        """Dequantize, with the roundings of compressed-tensors and ModelOpt: the scale and the
        product in FP32."""
        codes, scales, *tensor_scale = parts
        scales = e8m0_values(scales) if scales.dtype == torch.uint8 else scales.float()
        if self.blocks is not None and not self.is_packed:
            return self.blocks.dequantize(Quantized(codes, scales), dtype)
        numbers = nvfp4.unpacked(codes) if self.is_packed else codes.float()
        if tensor_scale:
            scales = (
                scales * tensor_scale[0] if self is MODELOPT_NVFP4 else scales / tensor_scale[0]
            )
        if self.is_packed:  # in place: FP32 takes eight times the codes
            return (
                numbers.unflatten(1, (scales.shape[1], -1))
                .mul_(scales.unsqueeze(2))
                .flatten(1)
                .to(dtype)
            )
        return (numbers * scales).to(dtype)

    def unfit(self, parts: tuple[torch.Tensor, ...], shape: tuple[int, ...]) -> str | None:
        """Return the reason why these parts hold no weight of this shape, or None."""
        codes, *scales = parts
        *number, rows, columns = shape
        sides = self.blocks[:2] if self.blocks else (rows, columns)
        grid = torch.Size((*number, -(-rows // sides[0]), -(-columns // sides[1])))
        alone = scales[1:] if self.blocks else scales
        fits = self.shape(codes) == torch.Size(shape) and (
            scales[0].shape == grid or alone == scales
        )
        if (
            fits
            and all(scale.numel() == 1 for scale in alone)
            and not (self.is_packed and columns % sides[1])
        ):
            return None
        shapes = ", ".join(str(tuple(part.shape)) for part in parts)
        return f"{self.name} codes and scales of shapes {shapes} hold no weight of shape {tuple(shape)}"


SQUARE_CODES = CodeLayout(
    "E4M3", SQUARES, {"weight": E4M3.dtype, "weight_scale_inv": torch.float32}
)
TENSOR_CODES = CodeLayout(
    "E4M3 with one scale", None, {"weight": E4M3.dtype, "scale_weight": torch.float32}
)
PACKED_NVFP4 = CodeLayout(
    "NVFP4",
    NVFP4,
    {
        "weight_packed": torch.uint8,
        "weight_scale": E4M3.dtype,
        "weight_global_scale": torch.float32,
    },
)
MODELOPT_NVFP4 = CodeLayout(
    "NVFP4 of ModelOpt",
    NVFP4,
    {"weight": torch.uint8, "weight_scale": E4M3.dtype, "weight_scale_2": torch.float32},
)
PACKED_MXFP4 = CodeLayout("MXFP4", MX, {"weight_packed": torch.uint8, "weight_scale": torch.uint8})
RAW_CODES = {
    fmt.dtype: CodeLayout(f"raw {fmt.name}", None, {"weight": fmt.dtype, "one": torch.float32})
    for fmt in (E4M3, E5M2)
}
"""The layouts of `module.to(torch.float8_e4m3fn)`, by dtype. No checkpoint has their second part."""
LAYOUTS = {
    each.name: each
    for each in (
        *(SQUARE_CODES, TENSOR_CODES, PACKED_NVFP4, MODELOPT_NVFP4, PACKED_MXFP4),
        *RAW_CODES.values(),
    )
}


def layout_of(tensors: Mapping[str, torch.Tensor | None]) -> CodeLayout | None:
    """Return the layout of a layer's tensors by their names and dtypes; None for any other
    layer."""

    def has(layout: CodeLayout) -> bool:
        return all(
            getattr(tensors.get(name), "dtype", None) == dtype
            for name, dtype in layout.parts.items()
        )

    return next(filter(has, LAYOUTS.values()), None)


def e4m3_layout(scales: torch.Tensor, sides: Sequence[int]) -> CodeLayout:
    """Return the layout of E4M3 codes with one scale, with those of MXFP8, or one for a block."""
    blocks = SQUARES._replace(rows=sides[0], columns=sides[1])
    if scales.numel() == 1:
        blocks = None
    elif scales.dtype == torch.uint8:
        blocks = MX
    return CodeLayout("E4M3", blocks, {"weight": E4M3.dtype, "scales": scales.dtype})


def is_decoded(weight: torch.Tensor) -> bool:
    """Return True for codes that products read as values: all but E4M3 in squares, or raw."""
    multiplied = SQUARE_CODES, RAW_CODES[E4M3.dtype]
    return isinstance(weight, BlockCodes) and weight.code_layout not in multiplied


def dequantize_bias(layer: torch.nn.Linear) -> None:
    """Store a raw float8 bias in bf16, which has its values: PyTorch adds no float8."""
    bias = layer._parameters.get("bias")
    if bias is not None and bias.dtype in RAW_CODES:
        bias.data = bias.data.to(torch.bfloat16)


class Frozen(WithoutMemory):
    """A read-only tensor: operations read its plain values, `exact()`."""

    def values(self) -> torch.Tensor:
        return self.exact()

    def assign(self, values: torch.Tensor) -> None:
        """Refuse all values but the tensor's own, as after `p.data = p.data`."""
        if type(values) is not type(self) or any(
            a is not b for a, b in zip(values.parts, self.parts, strict=True)
        ):
            raise FP8BackendError(f"an assignment to `.data` {REFUSAL}")

    @staticmethod
    def on_values(func, args, kwargs):
        if next(written_to(func, args, kwargs, Frozen), None) is not None:
            raise FP8BackendError(f"{func} {REFUSAL}")
        result = func(*tree_map(_plain, args), **tree_map(_plain, kwargs))
        is_view = isinstance(args[0], Frozen) and (returns_view(func) or func in UNSAFE_VIEWS)
        return tree_map(FrozenView, result) if is_view else result


class BlockCodes(Frozen):
    """A frozen matrix stored as codes and scales. PyTorch sees the shape and dtype of its
    values."""

    @staticmethod
    def __new__(
        cls,
        parts: Sequence[torch.Tensor],
        dtype: torch.dtype,
        layout: CodeLayout = SQUARE_CODES,
        place: Sequence[int] = (),
    ):
        shape = layout.shape(parts[0])
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=parts[0].device)

    def __init__(
        self,
        parts: Sequence[torch.Tensor],
        dtype: torch.dtype,
        layout: CodeLayout = SQUARE_CODES,
        place: Sequence[int] = (),
    ) -> None:
        self.__dict__.update(zip(CODE_PARTS, parts, strict=False))
        self.code_layout, self.state_dict_copies = layout, StateDictCopies()
        self.place = place

    @classmethod
    def of(
        cls, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, layout: CodeLayout
    ) -> "BlockCodes":
        """Hold the tensors of a checkpoint's layer, by their names in `layout.parts`."""
        return cls([tensors[name].detach().contiguous() for name in layout.parts], dtype, layout)

    @classmethod
    def of_raw(cls, weight: torch.Tensor) -> "BlockCodes":
        """Hold float8 values as codes under the scale 1. They read as bf16, which has all of
        them."""
        one = torch.ones((), device=weight.device)
        return cls((weight.detach(), one), torch.bfloat16, RAW_CODES[weight.dtype])

    @classmethod
    def encoded(cls, values: torch.Tensor, layout: CodeLayout) -> "BlockCodes":
        """Round values [rows, columns] to NVFP4 or MXFP4."""
        if layout is PACKED_NVFP4:
            return cls(nvfp4.quantized(values), values.dtype, layout)
        amax = MX.amax(values)
        scale = MX.scale(amax, E2M1)
        codes = nvfp4.cast(
            (MX.tiles(values).float() * scale.unsqueeze(1).unsqueeze(3)).view(values.shape)
        )
        return cls((nvfp4.packed(codes), MX.inverse(scale, amax)), values.dtype, layout)

    def exact(self) -> torch.Tensor:
        """Return the plain values, in the tensor's dtype."""
        self.state_dict_copies.check()
        return self.decoded()

    def decoded(self) -> torch.Tensor:
        return self.code_layout.values(self.parts, self.dtype)

    def like(self, parts: Sequence[torch.Tensor], dtype: torch.dtype | None = None) -> "BlockCodes":
        """Return a tensor of the same layout with other parts, or another presented dtype."""
        return type(self)(parts, dtype or self.dtype, self.code_layout, self.place)

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """Codes, scales, and the tensor's scale if there is one."""
        return tuple(self.__dict__[name] for name in CODE_PARTS[: len(self.code_layout.parts)])

    def __tensor_flatten__(self):
        return CODE_PARTS[: len(self.parts)], (self.dtype, self.code_layout.name, *self.place)

    @classmethod
    def __tensor_unflatten__(cls, inner_tensors, context, outer_size, outer_stride):
        dtype, layout, *place = context
        parts = [inner_tensors[name] for name in CODE_PARTS if name in inner_tensors]
        return cls(parts, dtype, LAYOUTS[layout], place)

    def __repr__(self) -> str:
        blocks = self.code_layout.blocks
        one = f"one scale for {blocks.rows} x {blocks.columns} elements" if blocks else "one scale"
        return (
            f"BlockCodes({list(self.shape)} {self.dtype}, stored as {self.code_layout.name}, {one})"
        )

    def __reduce_ex__(self, protocol):
        others = {name: value for name, value in self.__dict__.items() if name not in _STORED}
        parts = [part.view(torch.uint8) if part.itemsize == 1 else part for part in self.parts]
        return _rebuild, (parts, self.dtype, others, self.code_layout.name, type(self))


def _rebuild(
    parts: list[torch.Tensor],
    dtype: torch.dtype,
    others: dict[str, Any],
    layout: str,
    kind: type[BlockCodes],
) -> BlockCodes:
    layout = LAYOUTS[layout]
    dtypes = layout.parts.values()
    parts = [part.view(own) for part, own in zip(parts, dtypes, strict=True)]
    tensor = kind(parts, dtype, layout)
    tensor.__dict__.update(others)
    return tensor


class FrozenView(Frozen):
    """A view of a `BlockCodes`: a copy of plain values. Writes raise, since the codes would not
    change."""

    @staticmethod
    def __new__(cls, values: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=values.device,
        )

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def exact(self) -> torch.Tensor:
        return self._values

    @property
    def parts(self) -> tuple[torch.Tensor]:
        return (self._values,)

    def __tensor_flatten__(self):
        return ["_values"], None

    @staticmethod
    def __tensor_unflatten__(inner_tensors, context, outer_size, outer_stride):
        return FrozenView(inner_tensors["_values"])

    def __repr__(self) -> str:
        return f"FrozenView({self._values})"

    def __reduce_ex__(self, protocol):
        return self._values.clone().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        return memo.setdefault(id(self), self._values.clone())


def _plain(value: Any) -> Any:
    return value.exact() if isinstance(value, Frozen) else value


def _same(func, tensor, *args, **kwargs):
    return tensor.like(tensor.parts)


def _as_strided(func, tensor, size, stride, storage_offset=None):
    """FSDP2 asks for a gathered matrix in the matrix's own geometry."""
    if is_whole(tensor, size, stride, storage_offset):
        return _same(func, tensor)
    return NotImplemented


def _part_by_part(func, tensor, *, dtype=None, **kwargs):
    if dtype is not None and not dtype.is_floating_point:
        return NotImplemented
    options = {name: kwargs[name] for name in ("device", "non_blocking") if name in kwargs}
    return tensor.like([func(part, **options) for part in tensor.parts], dtype)


def _copy_(func, target, source, non_blocking=False):
    """Copy codes, or plain values: E4M3 in squares encodes them with the present scales, so that
    saved values of these codes give the same codes again, and a block with larger values gets a new
    scale; other codes only keep their own.
    """
    if not isinstance(target, BlockCodes):
        return NotImplemented
    if not isinstance(source, BlockCodes) or source.code_layout is not target.code_layout:
        values = _plain(source).to(target.device).expand(target.shape)
        # the first: a shard's rows may be some of a block's
        encodes = type(target) is BlockCodes and target.code_layout is SQUARE_CODES
        encodes = encodes and target.dim() == 2
        source = _encoded(values, target) if encodes else _own(values, target)
    target.state_dict_copies.accept()
    for part, new in zip(target.parts, source.parts, strict=True):
        part.copy_(new, non_blocking)
    return target


def _encoded(values: torch.Tensor, target: BlockCodes) -> BlockCodes:
    values = values.to(torch.float32)
    amax, scale_inv = SQUARES.amax(values), target.scale_inv
    # values up to half a step above 448 round to it
    fits = amax <= scale_inv * (E4M3.max + 16)
    scale_inv = torch.where(fits, scale_inv, SQUARES.inverse(SQUARES.scale(amax, E4M3), amax))
    factor = torch.where(scale_inv > 0, scale_inv.reciprocal(), torch.zeros_like(scale_inv))
    return BlockCodes((SQUARES.cast(values, factor, E4M3), scale_inv), target.dtype)


def _own(values: torch.Tensor, target: BlockCodes) -> BlockCodes:
    """Return the target itself if these are its values, in the narrower of both dtypes."""
    narrower = min(values.dtype, target.dtype, key=lambda dtype: dtype.itemsize)
    if not torch.equal(values.to(narrower), target.decoded().to(narrower)):
        raise FP8BackendError(
            f"frozen {target.code_layout.name} codes cannot take other values without a loss: load "
            "the checkpoint of these codes, or make the weights plain first "
            "(fp8_backends.restore(model), or fp8_backends.checkpoints.dequantize(model))"
        )
    return target


def _cut_by_fsdp2(func, tensor, *args, **kwargs):
    """Run as an operation of a `CodeShard` in `_init_sharded_param`, FSDP2's own function;
    elsewhere return plain values."""
    if all(
        frame.f_code.co_name != "_init_sharded_param" for frame, _ in traceback.walk_stack(None)
    ):
        return NotImplemented
    shards = importlib.import_module(f"{__package__}.code_shards")  # only for models under FSDP2
    whole = shards.CodeShard(tensor.parts, tensor.dtype, tensor.code_layout, [0, len(tensor)])
    return func(whole, *args, **kwargs)


BlockCodes.operations = {
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.lift_fresh.default: _same,
    aten.clone.default: _part_by_part,
    aten._to_copy.default: _part_by_part,
    aten.empty_like.default: _part_by_part,
    aten.copy_.default: _copy_,
    aten.as_strided.default: _as_strided,
    aten.split.Tensor: _cut_by_fsdp2,
    aten.new_zeros.default: _cut_by_fsdp2,
}

# PyTorch's protocol for subclasses in files that `torch.load(weights_only=True)` may read
torch.serialization.add_safe_globals([BlockCodes, _rebuild])
