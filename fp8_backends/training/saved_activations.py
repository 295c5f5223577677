"""What a model keeps from forward to backward, in FP8 (the recipe's `saved_activations`).

Converted layers keep the codes that their products read. What else is kept are the inputs and results of norms,
activation functions, elementwise products and the like, in the dtype in which they were computed, and mostly in FP32
where a norm is written in Python. Here hooks of PyTorch (`torch.autograd.graph.saved_tensors_hooks`) keep E4M3 codes of
these (`numerics.saved_values`), and backward reads the values that the codes stand for. Nothing of a model is patched,
and its forward computes what it did.

Which modules: hooks of modules say where PyTorch's hooks are in force (`Role`). Which tensors: those whose last
dimension is one of the model's feature sizes, so neither statistics of a norm nor the logits of a router, with these
exceptions: what has no gradient (masks, rotary tables), Parameters and buffers, and what a custom
`torch.autograd.Function` keeps, compiled code included, unless it is a `ValuesFunction`.

Hooks that others have put in force win: activation checkpointing's, `save_on_cpu`. Nothing is packed in what is
recomputed, in evaluation, without gradients, under transforms of `torch.func`, and in compiled code.
"""

from __future__ import annotations

import functools
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from ..compute.counts import inside_backward
from ..errors import FP8BackendError
from ..numerics.kernels.eager import PLAIN
from ..numerics.modules import CONTAINER, is_traced, renumber
from ..numerics.saved_values import DTYPES, PackedValues, ValuesFunction, packed, with_sum_of_one
from ..recipes.fields import SAVED_ACTIVATIONS
from . import fused_head
from .weight_products import NEVER_IN_FP8, Found, find_weight_products

if TYPE_CHECKING:
    from .conversion import Prepared

OFF, _, WITH_ATTENTION = SAVED_ACTIVATIONS

FEWEST = 2**12
"""Elements of the smallest tensor that is packed."""


class Role(Enum):
    """What the forward of a module means to the hooks."""

    PACKS = auto()
    """What its own operations keep is packed."""
    PAUSES = auto()
    """Neither it nor a module inside of it is touched: layers with weights, which keep what their products read,
    routers, embeddings, losses, recurrences; attention, but for `fp8+attention`."""
    ATTENDS = auto()
    """Attention with `fp8+attention`: queries, keys, values and results are packed, one head a row."""


_PAUSES = re.compile(
    "Embedding|Router|TopK|Loss|Softmax|BatchNorm|GroupNorm|InstanceNorm|Mamba|SSM|RWKV|Recurrent|RNN|LSTM|GRU|DeltaNet"
)
"""Names of classes that are left alone: exact values matter there, or errors add up from token to token. A norm over
other dimensions than the last reads small differences between large numbers."""
_ATTENTION = re.compile("attention|attn", re.IGNORECASE)
_HEAD_SIZES = ("head_dim", "head_size", "attention_head_size", "key_value_proj_dim", "d_kv", "dim_head")
"""Attributes of attention modules that hold the size of a head."""
_WITHOUT_FEATURES = ("head", "router", "adapter", *NEVER_IN_FP8)
"""Kinds of weight products whose sizes are not those of activations."""


@dataclass
class SavedBytes:
    """What the last training forward of a model has packed."""

    tensors: int = 0
    bytes: int = 0
    """Bytes that the codes take, scales included."""
    plain_bytes: int = 0
    """Bytes that the same tensors would have taken."""


def install(root: nn.Module, prepared: Prepared) -> None:
    """Let a prepared model keep activations as its recipe says. Repeated, it follows modules that were added."""
    remove(root)
    if prepared.recipe.saved_activations == OFF:
        return
    found = find_weight_products(root)
    with_attention = prepared.recipe.saved_activations == WITH_ATTENTION
    packing = Packing(_feature_sizes(found))
    root.register_forward_pre_hook(Start(packing))
    end, begins, numbers = End(packing), {role: Begin(packing, role) for role in Role}, {}
    for module, role in _roles(root, found, with_attention):
        before = module.register_forward_pre_hook(begins[role])
        after = module.register_forward_hook(end, always_call=True)
        number, end_number = numbers.setdefault(role, before.id), numbers.setdefault(end, after.id)
        renumber(before, number, module._forward_pre_hooks)
        renumber(after, end_number, module._forward_hooks, module._forward_hooks_always_called)
    if remove not in prepared.undo:
        prepared.undo.append(remove)


def remove(root: nn.Module) -> None:
    """Take the hooks away."""
    for module in root.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if isinstance(hook, _Hook)]:
                del hooks[key]
                module._forward_hooks_always_called.pop(key, None)


def saved_bytes(root: nn.Module) -> SavedBytes | None:
    """What the last training forward of a prepared root has packed; None where its recipe asks for nothing."""
    hooks = root._forward_pre_hooks.values()
    return next((hook.packing.counted for hook in hooks if isinstance(hook, Start)), None)


# choosing modules


def _feature_sizes(found: list[Found]) -> frozenset[int]:
    """The sizes along which activations lie: of inputs and outputs of the model's layers."""
    products = (each.product for each in found if each.product.kind not in _WITHOUT_FEATURES)
    return frozenset(size for product in products for size in product.sizes)


def _roles(root: nn.Module, found: list[Found], with_attention: bool) -> Iterator[tuple[nn.Module, Role]]:
    """The modules that get hooks. A module that holds an embedding or an output head has none for itself, since its own
    operations may be those of a loss, nor has the root."""
    # converted experts compute activations between their products
    with_weights = {each.module for each in found if not (each.part and each.conversion is not None)}
    heads = {fused_head.output_head(root), *(each.module for each in found if each.product.kind == "head")}
    outer = {root, *(module for module in root.modules() if _holds_an_end(module, heads))}
    seen = set()

    def walk(module: nn.Module, name: str) -> Iterator[tuple[nn.Module, Role]]:
        if module in seen:
            return
        seen.add(module)
        attends = _is_attention(module, name, with_weights)
        if module in with_weights or _PAUSES.search(type(module).__name__) or (attends and not with_attention):
            yield module, Role.PAUSES
            return
        if attends:
            yield module, Role.ATTENDS
        elif module not in outer and not isinstance(module, (nn.ModuleList, nn.ModuleDict)):  # nobody calls these
            yield module, Role.PACKS
        for child_name, child in module.named_children():
            if child_name != CONTAINER:
                yield from walk(child, child_name)

    return walk(root, "")


def _holds_an_end(module: nn.Module, heads: set[nn.Module]) -> bool:
    """Whether there is an embedding or an output head in a module."""
    return any(isinstance(part, (nn.Embedding, nn.EmbeddingBag)) or part in heads for part in module.modules())


def _is_attention(module: nn.Module, name: str, with_weights: set[nn.Module]) -> bool:
    """Whether a module is the innermost that is called attention and has layers with weights."""
    return _is_called_attention(module, name, with_weights) and not any(
        _is_called_attention(part, path.rpartition(".")[2], with_weights)
        for path, part in module.named_modules()
        if part is not module
    )


def _is_called_attention(module: nn.Module, name: str, with_weights: set[nn.Module]) -> bool:
    is_called = _ATTENTION.search(type(module).__name__) or _ATTENTION.search(name)
    return bool(is_called) and module not in with_weights and not with_weights.isdisjoint(module.modules())


# hooks of modules


class _Hook:
    changes_nothing = True
    """What pairs of layers ask of hooks (`numerics.modules.changes_nothing`)."""

    def __init__(self, packing: Packing) -> None:
        self.packing = packing


class Start(_Hook):
    """Pre-hook of the root: a forward begins."""

    def __call__(self, root: nn.Module, args) -> None:
        if not _is_watched() or inside_backward():
            return
        self.packing.unwind()
        if root.training and torch.is_grad_enabled():
            self.packing.counted = SavedBytes()


class Begin(_Hook):
    """Pre-hook of a module with a role."""

    def __init__(self, packing: Packing, role: Role) -> None:
        super().__init__(packing)
        self.role = role

    def __call__(self, module: nn.Module, args) -> None:
        if _is_watched():
            self.packing.begin(module, self.role)


class End(_Hook):
    """Forward hook of the same module."""

    def __call__(self, module: nn.Module, args, output) -> None:
        if _is_watched():
            self.packing.end(module)


def _is_watched() -> bool:
    return not (is_traced() or torch.jit.is_tracing())


class Frame(NamedTuple):
    """A module whose forward is running."""

    module: nn.Module
    undo: Callable[[], None] | None
    """What its end does."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.region: Region | None = None


class Packing:
    """What the hooks of one prepared model share. A copy of it begins anew."""

    def __init__(self, features: frozenset[int]) -> None:
        self.features = features
        self.counted = SavedBytes()
        self.thread = _Thread()

    def __reduce__(self):
        return type(self), (self.features,)

    def begin(self, module: nn.Module, role: Role) -> None:
        """Note that the forward of a module begins."""
        region, undo = self.thread.region, None
        if region is None:
            _end_interrupted()
            if role is Role.PACKS and _may_pack(module):
                region = self.thread.region = Region(self, module)
                region.hooks.__enter__()
                undo = self._leave
        elif region.is_in_force():
            if role is Role.PAUSES:
                region.hooks.__exit__()
                undo = region.hooks.__enter__
            else:
                region.learn(module._parameters, module._buffers)
                undo = region.enter(module, role)
        self.thread.frames.append(Frame(module, undo))

    def end(self, module: nn.Module) -> None:
        """Note that it has ended, or failed: maybe before `begin` was called."""
        frames = self.thread.frames
        if frames and frames[-1].module is module:
            undo = frames.pop().undo
            if undo is not None:
                undo()

    def unwind(self) -> None:
        """End what an interrupt has left open in this thread: hooks of modules are called after an `Exception`, and not
        after a `KeyboardInterrupt`."""
        while self.thread.frames:
            self.end(self.thread.frames[-1].module)

    def _leave(self) -> None:
        region, self.thread.region = self.thread.region, None
        if region.is_in_force():
            region.hooks.__exit__()
        region.close()


def _may_pack(module: nn.Module) -> bool:
    """Whether what this forward keeps is for a backward to come, and nobody else has hooks in force."""
    return (
        module.training
        and torch.is_grad_enabled()
        and not inside_backward()
        and _hooks_in_force() is None
        and torch._C._autograd._saved_tensors_hooks_is_enabled()
        and not torch._C._are_functorch_transforms_active()
    )


def _hooks_in_force() -> tuple[Callable, Callable] | None:
    """The hooks (pack, unpack) that PyTorch would call now."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _end_interrupted() -> None:
    """End a region that is in force in this thread and runs no more."""
    hooks = _hooks_in_force()
    region = None if hooks is None else getattr(hooks[0], "__self__", None)
    if isinstance(region, Region) and not region.is_running(sys._getframe(1)):
        region.packing.unwind()


# hooks of saved tensors


class Region:
    """The forward of a module in which tensors are packed. A tensor that several operations keep is packed once."""

    def __init__(self, packing: Packing, module: nn.Module) -> None:
        self.packing = packing
        self.call: FrameType | None = sys._getframe(1)
        """The call of the module, in Python."""
        while self.call is not None and self.call.f_code is not nn.Module._call_impl.__code__:
            self.call = self.call.f_back
        self.pack_hook = self.pack
        self.hooks = saved_tensors_hooks(self.pack_hook, _unpack)
        self.centers = isinstance(module, nn.LayerNorm)
        """Whether a LayerNorm runs, which reads how far values are from the mean of their row."""
        self.head_size: int | None = None
        """The size of a head, inside attention; 0 where it is not known."""
        self.packed: dict[tuple, tuple[StorageWeakRef, PackedValues | ComputedValues]] = {}
        """What was packed, by the place in memory, which the weak references keep from being given to others."""
        self.own: set[int | None] = set()
        """Storages of Parameters and buffers of the module and its parts."""
        self.learn(dict(module.named_parameters()), dict(module.named_buffers()))

    def close(self) -> None:
        """Let go of what was packed: autograd holds the hook of each tensor that it keeps, and so the region, until the
        last of these is freed."""
        self.packed.clear()
        self.call = None

    def is_running(self, frame: FrameType | None) -> bool:
        """Whether the module's call is among those that have led to this frame. An interrupt leaves hooks behind."""
        while frame is not None and frame is not self.call:
            frame = frame.f_back
        return frame is not None

    def learn(self, *own: Mapping[str, torch.Tensor | None]) -> None:
        """Note these Parameters and buffers: of a part when it begins, since FSDP2 has gathered them only then."""
        tensors = (tensor for each in own for tensor in each.values() if tensor is not None and tensor.dim() > 1)
        self.own.update(map(_storage, tensors))

    def is_in_force(self) -> bool:
        hooks = _hooks_in_force()
        return hooks is not None and hooks[0] is self.pack_hook

    def enter(self, module: nn.Module, role: Role) -> Callable[[], None]:
        """Note that a part of the module begins. Returns what its end does."""
        before = self.head_size, self.centers
        self.centers = isinstance(module, nn.LayerNorm)
        if role is Role.ATTENDS:
            self.head_size = next((getattr(module, name) for name in _HEAD_SIZES if hasattr(module, name)), 0)

        def end() -> None:
            self.head_size, self.centers = before

        return end

    def pack(self, tensor: torch.Tensor) -> Held:
        """What is kept in place of a tensor."""
        caller = sys._getframe(1)
        if not self.is_running(caller):
            self.packing.unwind()
        elif self._lies_along_features(tensor) and self._may_change(tensor, caller):
            return Held(self._packed(tensor), tensor.shape)
        # a result that names its own node would keep it alive for good
        return Held(tensor.detach(), tensor.shape, tensor._version)

    def _packed(self, tensor: torch.Tensor) -> PackedValues | ComputedValues:
        storage = tensor.untyped_storage()
        layout = () if tensor.is_contiguous() else (tensor.shape, tensor.stride())
        place = (storage._cdata, tensor.storage_offset(), tensor.numel(), tensor.shape[-1], tensor.dtype, layout)
        key = (*place, tensor._version, self.centers)
        if key not in self.packed:
            computed = None if self.centers else _computed(tensor)
            self.packed[key] = StorageWeakRef(storage), computed or packed(tensor, self.centers)
            self._count(tensor, self.packed[key][1])
        return self.packed[key][1]

    def _lies_along_features(self, tensor: torch.Tensor) -> bool:
        if type(tensor) not in PLAIN or tensor.dtype not in DTYPES or tensor.numel() < FEWEST:
            return False
        # probabilities of attention have a row and a column for each token
        if tensor.dim() < 2 or (tensor.dim() == 4 and tensor.shape[-2] == tensor.shape[-1]):
            return False
        if self.head_size is None:
            return tensor.shape[-1] in self.packing.features
        return tensor.dim() == 4 and tensor.shape[-1] == self.head_size

    def _may_change(self, tensor: torch.Tensor, caller: FrameType) -> bool:
        """Whether backward may read something near this tensor's values, and the tensor's own memory is freed then."""
        if caller.f_code.co_filename == torch.utils.checkpoint.__file__:  # the inputs of what is recomputed
            return False
        if caller.f_code is _APPLY and not _is_called_by(caller, _VALUES_APPLY):
            return False
        # masks have no gradient; a tensor that was expanded is smaller than its codes
        return tensor.requires_grad and _storage(tensor) not in self.own and 0 not in tensor.stride()

    def _count(self, tensor: torch.Tensor, values: PackedValues | ComputedValues) -> None:
        counted = self.packing.counted
        counted.tensors += 1
        counted.bytes += values.nbytes
        counted.plain_bytes += tensor.numel() * tensor.element_size()


_APPLY = torch.autograd.Function.apply.__func__.__code__
"""The Python code that calls a custom function, and from which what that one keeps comes."""
_VALUES_APPLY = ValuesFunction.apply.__func__.__code__


def _is_called_by(frame: FrameType, code: CodeType) -> bool:
    return frame.f_back is not None and frame.f_back.f_code is code


class ComputedValues(NamedTuple):
    """The result of an activation function, which backward computes anew from the codes of what the function read."""

    function: Callable[[torch.Tensor], torch.Tensor]
    read: PackedValues

    @property
    def nbytes(self) -> int:
        return 0  # the codes are the function's own

    def unpacked(self, shape: torch.Size) -> torch.Tensor:
        """What the function makes of the values that the codes stand for."""
        return self.function(self.read.unpacked(shape))


_ACTIVATIONS: dict[str, Callable[[Any], Callable]] = {
    "SiluBackward0": lambda node: nn.functional.silu,
    "GeluBackward0": lambda node: functools.partial(nn.functional.gelu, approximate=node._saved_approximate),
}
"""Name of a node that keeps what its function read -> the function, which has a result of the same shape."""


def _computed(tensor: torch.Tensor) -> ComputedValues | None:
    """A tensor as the result of an activation function that keeps codes of what it read; None for any other."""
    node = tensor.grad_fn
    function = None if node is None else _ACTIVATIONS.get(node.name())
    held = None if function is None else getattr(node._raw_saved_self, "data", None)
    if not isinstance(held, Held) or not isinstance(held.values, PackedValues):
        return None
    return ComputedValues(function(node), held.values)


class Held(NamedTuple):
    """What is kept of a saved tensor."""

    values: PackedValues | ComputedValues | torch.Tensor
    shape: torch.Size
    version: int | None = None
    """Of a tensor that is kept as it is: the number of changes in place when it was kept."""


def _unpack(held: Held) -> torch.Tensor:
    """What backward reads.

    Raises:
        RuntimeError: a tensor that is kept as it is was changed in place, as PyTorch raises without hooks.
        FP8BackendError: backward is to be differentiated itself.
    """
    if isinstance(held.values, torch.Tensor):
        if held.values._version != held.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{held.values.dtype} {list(held.shape)}] is at version {held.values._version}; expected version "
                f"{held.version} instead"
            )
        return held.values
    if torch.is_grad_enabled() and inside_backward():
        raise FP8BackendError(
            "create_graph=True: what was kept in FP8 (saved_activations) has no exact derivative; compute it in "
            "evaluation mode (model.eval()), in which nothing is packed, or leave saved_activations out"
        )
    values = held.values.unpacked(held.shape)
    node = torch._C._current_autograd_node()
    if node is not None and node.name() == "SoftmaxBackward0":
        return with_sum_of_one(values, node._saved_dim)
    return values


def _storage(tensor: torch.Tensor) -> int | None:
    """Which memory a plain tensor lies in."""
    return tensor.untyped_storage()._cdata if type(tensor) in PLAIN else None
