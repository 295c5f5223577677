"""Keep saved activations in FP8 until backward reads them (the recipe's `saved_activations`).

Converted layers keep the codes of their operands. Norms, activation functions and elementwise
products keep inputs and results in the dtype of their computation, mostly FP32 for a norm written
in Python. After the forward of a module, a hook walks the autograd nodes made since the module's
inputs (`Packer`), and registers E4M3 codes (`PackedValues`) with the saved tensors of the nodes in
`NODES`, by the public `SavedTensor.register_hooks`. The forward itself is unchanged, and every node
outside the table keeps its tensors.

Left alone in listed nodes: leaves (Parameters, buffers, masks), small tensors, rows shorter than a
block, tensors changed in place since, and tensors with hooks of others (activation checkpointing,
`save_on_cpu`). Nothing is packed in recomputed forwards, in evaluation, without gradients, under
transforms of `torch.func`, and in compiled code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

from ..errors import FP8BackendError
from ..formats.formats import COMPUTE_DTYPES, E4M3
from ..formats.scaling import MX, Quantized
from ..kernels.quantize import dequantize_blocks, quantize_blocks
from ..kernels.triton_gate import PLAIN_TYPES, is_eager
from ..torch_tools.backward_end import inside_backward
from ..torch_tools.modules import CONVERSION, is_traced, renumber

if TYPE_CHECKING:
    from .conversion import Prepared

WITH_ATTENTION = "fp8+attention"

SAVED_AT_ONCE = 2**24
"""Elements unpacked at a time: eager operations copy them in FP32."""

FEWEST_TO_SAVE = 2**12
"""Elements of the smallest packed tensor."""
SHORTEST_ROW = 32
"""Elements of a block: a shorter row would not pay for its scale."""
MOST_FACTORS = 16
"""Packed factors in a row by which the operations of one module multiply a gradient. Their errors
add up: a recurrence written in Python, which multiplies by one gate for each token, keeps all
others whole."""


class Kept(NamedTuple):
    """Saved tensors of an autograd node to pack."""

    fields: tuple[str, ...]
    bound: str
    """Error of the node's results for an exact incoming gradient; for the guide's table."""
    factors: tuple[str, ...] = ()
    """For each input of the node, the field that multiplies the gradient on its way to it."""
    attention: bool = False
    """Packed by `fp8+attention` only."""


_ATTENTION = Kept(
    ("query", "key", "value", "output"),
    "none: an error of queries or keys is one of an exponent",
    attention=True,
)
_NORM = Kept(("input",), "1/16 for each normed value in a term")

NODES = {
    "MulBackward0": Kept(("self", "other"), "1/16 of each term", ("other", "self")),
    "PowBackward0": Kept(
        ("self",), "1/16 of each term; exponents other than 2 are left alone", ("self",)
    ),
    "SiluBackward0": Kept(("self",), "0.02 of the incoming gradient", ("self",)),
    "GeluBackward0": Kept(("self",), "0.022 of the incoming gradient", ("self",)),
    "ReluBackward0": Kept(("result",), "exact: codes keep zeros and signs"),
    "NativeLayerNormBackward0": _NORM,
    "FusedRmsNormBackward0": _NORM,
    "ScaledDotProductFlashAttentionBackward0": _ATTENTION,
    "ScaledDotProductFlashAttentionForCpuBackward0": _ATTENTION,
    "ScaledDotProductEfficientAttentionBackward0": _ATTENTION,
    "ScaledDotProductCudnnAttentionBackward0": _ATTENTION,
}
"""Name of an autograd node -> the saved tensors to pack, in which its derivative is linear or
changes slowly. Any other node is left alone."""

_VALUES = Kept((), "its own; all tensors that it saves")
"""For every `ValuesFunction`."""

_ACTIVATIONS: dict[str, Callable[[Any], Callable[[torch.Tensor], torch.Tensor]]] = {
    "SiluBackward0": lambda node: nn.functional.silu,
    "GeluBackward0": lambda node: functools.partial(
        nn.functional.gelu, approximate=node._saved_approximate
    ),
}
"""Name of a node -> its function; backward computes its result again from the codes of the
input."""


@dataclass
class SavedBytes:
    """Sizes of the tensors packed in the last training forward of a model."""

    tensors: int = 0
    bytes: int = 0
    """Bytes of the codes and their scales."""
    plain_bytes: int = 0
    """Bytes of the same tensors unpacked."""


def install(root: nn.Module, prepared: Prepared) -> None:
    """Hook the modules of a prepared model. Repeated, it hooks modules added since."""
    remove(root)
    if not hasattr(torch._C._autograd.SavedTensor, "unpack_hook"):
        raise FP8BackendError(
            f"saved_activations: PyTorch {torch.__version__} does not say whether a saved tensor "
            "has hooks (SavedTensor.unpack_hook); use a version that this package is tested with, "
            "or leave saved_activations out"
        )
    packer = Packer(prepared.recipe.saved_activations == WITH_ATTENTION)
    number = None
    root.register_forward_pre_hook(Start(packer))
    for module in _hooked_modules(root):
        handle = module.register_forward_hook(packer, with_kwargs=True)
        number = handle.id if number is None else number
        renumber(handle, number, module._forward_hooks, module._forward_hooks_with_kwargs)
    if remove not in prepared.undo:
        prepared.undo.append(remove)


def remove(root: nn.Module) -> None:
    """Remove the hooks."""
    for module in root.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if isinstance(hook, (Start, Packer))]:
                del hooks[key]
                module._forward_hooks_with_kwargs.pop(key, None)


def saved_bytes(root: nn.Module) -> SavedBytes | None:
    """Return the sizes packed in the last training forward of a prepared root; None if its recipe
    packs nothing."""
    hooks = root._forward_pre_hooks.values()
    return next((hook.packer.counted for hook in hooks if isinstance(hook, Start)), None)


def add_sizes(total: dict[str, int], root: nn.Module) -> None:
    """Add the sizes packed in the last training forward of a prepared root."""
    for key, number in asdict(saved_bytes(root)).items():
        total[key] = total.get(key, 0) + number


def _hooked_modules(root: nn.Module) -> list[nn.Module]:
    """Return the modules with hooks: neither the root nor modules with an embedding, whose own
    operations may compute a loss. An activation function leaves its nodes to the module around it,
    for `_is_result`.
    """
    outer = {root}
    outer.update(
        m
        for m in root.modules()
        if any(isinstance(p, (nn.Embedding, nn.EmbeddingBag)) for p in m.modules())
    )
    modules = {
        child: None
        for parent in root.modules()
        for child in parent.children()
        if child not in outer and (parent in outer or next(child.parameters(), None) is not None)
    }
    return [module for module in modules if CONVERSION not in module.__dict__]


# hooks of modules


class Mark(NamedTuple):
    """Note in `Node.metadata` of a module's result: the nodes of this module are done."""

    before: tuple[Node, ...]
    """The nodes of the module's inputs, at which walks of outer modules continue."""
    module: int
    """`id` of the module."""
    factors: int
    """Packed factors in a row up to this node (`MOST_FACTORS`), for a module that reads its own
    result."""


_MARK = "fp8_backends.saved_activations"

Saved = dict[Any, tuple[Any, torch.Tensor]]
"""Fields of a node -> (PyTorch's saved tensor, its value)."""


class Packer:
    """Forward hook of modules: pack tensors saved by the nodes made since the module's inputs."""

    def __init__(self, with_attention: bool) -> None:
        self.with_attention = with_attention
        self.counted = SavedBytes()

    def __call__(self, module: nn.Module, args, kwargs, output) -> None:
        if is_traced() or torch.jit.is_tracing() or not _may_pack(module):
            return
        results = _nodes_of(output)
        made, before = _walk(results, _nodes_of((args, kwargs)))
        marks = [(node, node.metadata.get(_MARK)) for node in before]
        factors = {
            node: mark.factors
            for node, mark in marks
            if mark is not None and mark.module == id(module)
        }
        saved: dict[Node, Saved] = {}
        for node, inputs in made.items():
            kept = None if _MARK in node.metadata else self._kept(node)
            if kept is None:
                factors[node] = max(
                    (factors[each] for each in inputs if each in factors), default=0
                )
                continue
            path = [
                (factors.get(each, 0), field) for each, field in zip_longest(inputs, kept.factors)
            ]
            longest = max(count for count, _ in path)
            saved[node] = {} if kept.factors and longest >= MOST_FACTORS else _saved(node, kept)
            factors[node] = max(count + (field in saved[node]) for count, field in path)
        self._pack(saved)
        for node in results:
            if node in made and _MARK not in node.metadata:
                node.metadata[_MARK] = Mark(before, id(module), factors[node])

    def _kept(self, node: Node) -> Kept | None:
        kept = NODES.get(node.name())
        if kept is None:
            has_values = issubclass(getattr(type(node), "_forward_cls", object), ValuesFunction)
            return _VALUES if has_values else None
        if kept.attention and not self.with_attention:
            return None
        if node.name() == "PowBackward0" and node._saved_exponent != 2:
            return None
        return kept

    @torch.no_grad()
    def _pack(self, saved: dict[Node, Saved]) -> None:
        """Register codes with saved tensors."""
        codes: dict[tuple, Codes] = {}
        packed_tensors = [
            (raw, Held(self._packed_once(node, tensor, saved, codes), tensor.shape))
            for node, tensors in saved.items()
            for raw, tensor in tensors.values()
        ]
        for raw, held in packed_tensors:
            raw.register_hooks(lambda _, held=held: held, _unpack)

    def _packed_once(
        self, node: Node, tensor: torch.Tensor, saved: dict[Node, Saved], codes: dict[tuple, Codes]
    ) -> Codes:
        """Return the codes of a tensor, the same ones for all nodes that save it."""
        centers = node.name() == "NativeLayerNormBackward0"
        layout = tensor.shape, tensor.stride()
        if tensor.is_contiguous():
            layout = tensor.numel(), tensor.shape[-1]
        place = (
            tensor.untyped_storage()._cdata,
            tensor.storage_offset(),
            tensor.dtype,
            layout,
            centers,
        )
        if place not in codes:
            computed = None if centers else self._computed(tensor, saved, codes)
            codes[place] = computed or packed(tensor, centers)
            self.counted.tensors += 1
            self.counted.bytes += codes[place].nbytes
            self.counted.plain_bytes += tensor.numel() * tensor.element_size()
        return codes[place]

    def _computed(
        self, tensor: torch.Tensor, saved: dict[Node, Saved], codes: dict[tuple, Codes]
    ) -> ComputedValues | None:
        """Return a tensor as the result of an activation function of this walk; None for any
        other."""
        node = tensor.grad_fn
        if node not in saved or "self" not in saved[node] or node.name() not in _ACTIVATIONS:
            return None
        function = _ACTIVATIONS[node.name()](node)
        _, read = saved[node]["self"]
        if not _is_result(tensor, function, read):
            return None
        values = self._packed_once(node, read, saved, codes)
        return ComputedValues(function, values) if isinstance(values, PackedValues) else None


class Start:
    """Pre-hook of the root: count the bytes of a new forward."""

    def __init__(self, packer: Packer) -> None:
        self.packer = packer

    def __call__(self, root: nn.Module, args) -> None:
        if not is_traced() and root.training and torch.is_grad_enabled() and not inside_backward():
            self.packer.counted = SavedBytes()


def _may_pack(module: nn.Module) -> bool:
    """Return True if a backward may read the tensors saved by this forward."""
    return (
        module.training
        and torch.is_grad_enabled()
        and not inside_backward()
        and torch._C._autograd._saved_tensors_hooks_is_enabled()
        and not torch._C._are_functorch_transforms_active()
    )


# autograd nodes


def _nodes_of(values: Any) -> list[Node]:
    """Return the nodes that made these tensors, in any nesting."""
    leaves = (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
    return [leaf.grad_fn for leaf in leaves if leaf.grad_fn is not None]


def _walk(
    results: list[Node], inputs: list[Node]
) -> tuple[dict[Node, list[Node | None]], tuple[Node, ...]]:
    """Return the nodes made between inputs and results, oldest first, each with the nodes of its
    inputs; and the nodes before them. Marked modules are passed over."""
    start = max((node._sequence_nr() for node in inputs), default=-1)
    made = {}
    before = {}
    remaining = list(results)
    while remaining:
        node = remaining.pop()
        if node is None or node in made or node in before:
            continue
        if node._sequence_nr() <= start:
            before[node] = None
        else:
            mark = node.metadata.get(_MARK)
            made[node] = (
                [parent for parent, _ in node.next_functions] if mark is None else list(mark.before)
            )
            remaining += made[node]
    return {node: made[node] for node in sorted(made, key=lambda node: node._sequence_nr())}, tuple(
        before
    )


def _saved(node: Node, kept: Kept) -> Saved:
    """Map the fields of a node that can be packed to (PyTorch's saved tensor, its value)."""
    saved = {}
    all_fields = kept is _VALUES
    if all_fields:
        raws = dict(enumerate(node._raw_saved_tensors))
    else:
        raws = {field: getattr(node, f"_raw_saved_{field}") for field in kept.fields}
    for field, raw in raws.items():
        # others have hooks, or None
        if raw.unpack_hook is not None or not isinstance(raw.data, torch.Tensor):
            continue
        try:
            tensor = node.saved_tensors[field] if all_fields else getattr(node, f"_saved_{field}")
        except RuntimeError:  # changed in place since: PyTorch raises in backward
            continue
        if _is_packable(tensor):
            saved[field] = raw, tensor
    return saved


def _is_packable(tensor: torch.Tensor) -> bool:
    """Return True if codes save memory: the tensor is large, not a leaf and not expanded."""
    if (
        type(tensor) not in PLAIN_TYPES
        or tensor.dtype not in COMPUTE_DTYPES
        or tensor.numel() < FEWEST_TO_SAVE
    ):
        return False
    owner = tensor if tensor._base is None else tensor._base
    return (
        tensor.shape[-1] >= SHORTEST_ROW and owner.grad_fn is not None and 0 not in tensor.stride()
    )


def _is_result(
    tensor: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor], read: torch.Tensor
) -> bool:
    """Return True if a tensor is still the result of the activation function. Changes without
    autograd leave no other trace: `tensor.data` has its own version. On a GPU, the comparison waits
    for the device."""
    if tensor.shape != read.shape or (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    return not is_eager(tensor) or torch.equal(function(read), tensor)


# saved tensors


class PackedValues(NamedTuple):
    """Values in E4M3, in blocks of 32 along the last dimension.

        value = code * 2**(scale - 127)        1 byte an element, and 1 byte (E8M0) a block: 33/32 bytes an element

    The blocks are those of `mxfp8`. The error of a value is at most 2**-4 of itself or 2**-16 of
    its block's largest, whichever is more. Zeros, signs, NaN and inf are kept, and nonzero values
    stay nonzero: backward may divide by them. (Other values of a block with an inf become the
    smallest.) If backward reads distances from row means, the codes store these distances, next to
    the mean in FP32.
    """

    quantized: Quantized
    """E4M3 [rows, columns] and the bits of E8M0, uint8 [rows, columns / 32, rounded up]."""
    dtype: torch.dtype
    """dtype of the values."""
    mean: torch.Tensor | None = None
    """Row means, FP32 [rows, 1], if the codes store distances from them."""

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (*self.quantized, self.mean) if part is not None)

    def unpacked(self, shape: torch.Size) -> torch.Tensor:
        """Return the values, in their dtype, contiguous."""
        codes = self.quantized.codes
        rows = max(1, SAVED_AT_ONCE // codes.shape[1])
        if self.mean is not None:
            beyond = dequantize_blocks(self.quantized, MX, torch.float32)
            return beyond.add_(self.mean).to(self.dtype).view(shape)
        if len(codes) <= rows:
            return _values(self.quantized, self.dtype).view(shape)
        values = torch.empty(codes.shape, dtype=self.dtype, device=codes.device)
        for out, *part in zip(
            values.split(rows), *(stored.split(rows) for stored in self.quantized), strict=True
        ):
            out.copy_(_values(Quantized(*part), self.dtype))
        return values.view(shape)


def _values(quantized: Quantized, dtype: torch.dtype) -> torch.Tensor:
    if dtype != torch.float16:
        return dequantize_blocks(quantized, MX, dtype)
    # in FP32, rounding up does not overflow
    values = dequantize_blocks(quantized, MX, torch.float32)
    largest = torch.finfo(dtype).max
    return values.where(values.isinf(), values.clamp(-largest, largest)).to(dtype)


def packed(values: torch.Tensor, centers: bool = False) -> PackedValues:
    """Pack a tensor.

    Args:
        values: [..., columns] of any strides; one of COMPUTE_DTYPES.
        centers: backward reads distances from row means.
    """
    dtype = values.dtype
    mean = None
    matrix = values.contiguous().view(-1, values.shape[-1])
    if centers:
        mean = matrix.mean(-1, keepdim=True, dtype=torch.float32)
        matrix = matrix - mean
    quantized = quantize_blocks(matrix, MX, E4M3, columns=False).along_columns()
    bits = quantized.codes.view(torch.uint8)
    bits |= matrix.bool() > bits << 1  # a nonzero value with a code of ±0
    return PackedValues(quantized, dtype, mean)


class ValuesFunction(torch.autograd.Function):
    """Base of functions with saved tensors that may be packed: their backward tolerates errors of
    2**-4."""


class ComputedValues(NamedTuple):
    """Result of an activation function, computed again in backward from the codes of its input."""

    function: Callable[[torch.Tensor], torch.Tensor]
    read: PackedValues

    @property
    def nbytes(self) -> int:
        return 0  # the codes belong to the input

    def unpacked(self, shape: torch.Size) -> torch.Tensor:
        return self.function(self.read.unpacked(shape))


Codes = PackedValues | ComputedValues


class Held(NamedTuple):
    """Codes in place of a saved tensor."""

    values: Codes
    shape: torch.Size


def _unpack(held: Held) -> torch.Tensor:
    """Return the values for backward.

    Raises:
        FP8BackendError: backward is to be differentiated itself.
    """
    if torch.is_grad_enabled() and inside_backward():
        raise FP8BackendError(
            "create_graph=True: what was kept in FP8 (saved_activations) has no exact derivative; "
            "compute it in evaluation mode (model.eval()), in which nothing is packed, or leave "
            "saved_activations out"
        )
    return held.values.unpacked(held.shape)
