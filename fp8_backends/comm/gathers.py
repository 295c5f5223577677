"""FSDP2 with weights that travel as the FP8 codes that products read, by its extension points for a shard's tensor.

A shard is what it was, plain or a `ScaledTensor`, and so are the Parameter, optimizers, state dicts and loading. The
tensor only gets the two functions by which FSDP2 asks what to gather and what to make of it (`WeightShard`). FSDP2 puts
`GatheredCodes` in the place of the weight then.

`Gathers` is a hook before each forward. The ranks agree there on the amaxes of all weights, by one all-reduce: the
optimizer's step is not the only thing that changes weights, and an amax that is too small would clip. A layer that is
about to run in high precision, as in evaluation, has its weight gathered as it is stored. FSDP2 knows one form of a
gathered weight, with buffers of fixed sizes, so those of the other are put aside.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ..errors import FP8BackendError
from ..numerics.engine import inside_backward
from ..numerics.formats import E4M3
from ..numerics.gathered_codes import AMAX, DGRAD, FPROP, GatheredCodes
from ..numerics.modules import TemporaryHook
from ..numerics.scaled_tensor import ScaledTensor, agree_on_scale
from ..numerics.sharded_tensor import agreed_over
from ..words import counted
from .fsdp2 import fsdp_modules

logger = logging.getLogger("fp8_backends")

_GATHERS = "_fp8_gathers"
"""Attribute of a connected FSDP2 module: the `Gathers` of all."""
_BUFFERS = ("all_gather_outputs", "_unsharded_param", "_unsharded_inner_tensors")
"""What FSDP2 keeps of a weight in the form in which it gathers it."""

Place = tuple[nn.Module, str]
"""A module and the name of one of its Parameters."""


class Travelling(Protocol):
    """The codes of one layer's weight, of which each rank has some rows: of a 3-D weight some experts."""

    wanted: bool
    """Whether the layer's next forward reads codes, and nothing else of the weight."""
    change_in_forward: bool
    """Whether a weight that does not change may have other codes in the next forward."""
    recomputed: bool
    """Whether backward runs the layer's forward again."""
    products: tuple[str, ...]
    """The products that have codes of their own: FPROP, whose codes serve dgrad too, or FPROP and DGRAD."""
    agreed: dict[str, torch.Tensor]
    """For each of `products` what the ranks have agreed on."""
    amax: torch.Tensor | None
    """max |x| of the whole weight, for a rule that records it; FP32, 0-dimensional, or [experts]."""

    def can_make(self, shard: torch.Tensor) -> bool:
        """Whether there are codes to be made of this shard."""

    def amaxes(self, shard: torch.Tensor, first: int, shape: torch.Size) -> list[torch.Tensor]:
        """What the ranks are to agree on by a maximum, for each of `products`: FP32 or uint8, of the same shapes on
        every rank. `shard`: rows from `first` on of a weight of this shape."""

    def agree(self, maxima: list[torch.Tensor]) -> None:
        """Take over what `amaxes` became over all ranks."""

    def codes(self, shard: torch.Tensor, first: int, shape: torch.Size, product: str) -> torch.Tensor:
        """The codes of the shard for a product."""

    def scale_inv(self, agreed: torch.Tensor) -> torch.Tensor:
        """The scales of the whole weight, of what the ranks agreed on for a product."""


def connect(root: nn.Module, travelling: Mapping[Place, Travelling]) -> None:
    """Let FSDP2 gather these weights as codes. Repeating it does nothing, and without any all are gathered as they are
    stored again.

    Raises:
        FP8BackendError: this torch's FSDP2 is another.
    """
    modules = list(fsdp_modules(root).values())
    if not modules or not (travelling or any(_GATHERS in module.__dict__ for module in modules)):
        return
    shards, plain = _shards(modules, travelling)
    if plain:
        reasons = ", ".join(sorted(set(plain)))
        logger.info("FSDP2 gathers the weights of %s as they are stored: %s", counted(len(plain), "layer"), reasons)
    gathers = next((m.__dict__[_GATHERS] for m in modules if _GATHERS in m.__dict__), None) or Gathers()
    gathers.take(shards)
    for module in modules:
        if _GATHERS not in module.__dict__:
            module.__dict__[_GATHERS] = gathers
            module.register_forward_pre_hook(gathers, prepend=True)
            module.register_forward_hook(AfterForward(gathers), always_call=True)


def _shards(
    modules: Iterable[nn.Module], travelling: Mapping[Place, Travelling]
) -> tuple[list[WeightShard], list[str]]:
    """Those of the weights that can travel as codes, and for each other one why it cannot."""
    shards, plain = [], []
    try:
        for module in modules:
            for group in _groups(module):
                for parameter in group.fsdp_params:
                    info = parameter._module_info
                    codes = travelling.get((info.module, info.param_name))
                    if codes is None or not codes.can_make(parameter._sharded_local_tensor):
                        continue
                    if reason := _stays_plain(group, parameter):
                        plain.append(reason)
                    else:
                        shards.append(WeightShard(parameter, group, codes))
    except AttributeError as error:
        raise FP8BackendError(
            f"enable_fsdp_float8_all_gather reads how FSDP2 keeps its parameters, and torch {torch.__version__} keeps "
            f"them in another way ({error}): use enable_fsdp_float8_all_gather=False, or torch 2.13"
        ) from error
    return shards, plain


def _groups(module: nn.Module) -> list:
    """FSDP2's groups of parameters of this module itself, which travel together."""
    state = module._get_fsdp_state()
    several = getattr(state, "_fsdp_param_groups", None)  # torch 2.12 and before know one
    if several is not None:
        return several
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def _stays_plain(group: Any, parameter: Any) -> str | None:
    """Why a weight is gathered as it is stored, or None."""
    if getattr(group.mesh_info, "shard_mesh_size", 1) == 1:
        return "one rank has all rows"
    if parameter.is_dtensor:
        return "they are shared by tensor parallelism, too"
    if parameter.fsdp_placement.dim != 0:
        return "they are not sharded by rows"
    if parameter.offload_to_cpu:
        return "they are offloaded to the CPU"
    if parameter._module_info.shared_modules:
        return "they are tied"
    if group._use_post_forward_mesh:
        return "they are sharded over other ranks after forward"
    return None


class WeightShard:
    """The rows that FSDP2 has given this rank of one weight, and the two functions of FSDP2's protocol for them."""

    def __init__(self, parameter: Any, group: Any, codes: Travelling) -> None:
        self.parameter, self.group, self.codes = parameter, group, codes
        self.travels = False
        """Whether FSDP2 gathers codes, and not the weight as it is stored."""
        self.put_aside: dict[str, Any] = {}
        """What FSDP2 keeps of the weight in the other of the two forms."""

    @property
    def tensor(self) -> torch.Tensor:
        """The rows as they are stored."""
        return self.parameter._sharded_local_tensor

    @property
    def process_group(self) -> dist.ProcessGroup:
        return self.group.mesh_info.shard_process_group

    @property
    def place(self) -> tuple[torch.Tensor, int, torch.Size]:
        """The rows, the number of the first one, and the shape of the weight."""
        shape = self.parameter._orig_size
        return self.tensor, self.process_group.rank() * self.parameter.padded_sharded_param_size[0], shape

    def settle(self, travels: bool) -> None:
        """Let FSDP2 gather codes from now on, or the weight as it is stored. What has another form, or may have other
        codes by now, is gathered again."""
        if self.travels != travels or (travels and self.codes.change_in_forward):
            self._reshard()
        if self.travels != travels:
            kept = self.parameter.__dict__
            other = {"all_gather_outputs": [], "_unsharded_inner_tensors": []} | self.put_aside
            self.put_aside = {name: kept.pop(name) for name in _BUFFERS if name in kept}
            kept.update(other)
            self.travels = travels
        functions = self.tensor.__dict__  # another tensor where somebody has moved or loaded the shard
        if not travels:
            functions.pop("fsdp_pre_all_gather", None)
            functions.pop("fsdp_post_all_gather", None)
        elif "fsdp_pre_all_gather" not in functions:
            functions.update(fsdp_pre_all_gather=_Before(self), fsdp_post_all_gather=_After(self))
            self.parameter._init_extensions()

    def _reshard(self) -> None:
        self.group.wait_for_unshard()
        for module in self.group.modules:
            if hasattr(module, "reshard"):
                module.reshard()

    def products(self) -> tuple[str, ...]:
        """The products whose codes are gathered now."""
        every, state = self.codes.products, self.group._training_state.name
        if state == "PRE_BACKWARD" and not self.codes.recomputed:
            return every[-1:]
        if state == "FORWARD" and self.group._reshard_after_forward and not inside_backward():
            return every[:1]
        return every  # gathered once for both; a forward that backward runs again may end before it is resharded

    def inputs(self) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
        """What travels, uint8 of equal size on all ranks, and what its scales are made of, by product. FSDP2 may ask
        for it in a stream of its own, so nothing that is allocated here outlives the gathering."""
        if self.group._training_state.name == "IDLE":  # `unshard()` outside of a forward
            agree([self])
        missing = self.parameter.padded_sharded_param_size[0] - len(self.tensor)
        agreed = {product: self.codes.agreed[product] for product in self.products()}
        codes = (self.codes.codes(*self.place, product).view(torch.uint8) for product in agreed)
        inputs = tuple(F.pad(each, (0, 0) * (each.dim() - 1) + (0, missing)) for each in codes)
        if len(self.parameter.all_gather_outputs) != len(inputs):
            self.parameter.all_gather_outputs = []
        return inputs, agreed

    def parts(self, gathered: tuple[torch.Tensor, ...], agreed: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """`GatheredCodes.parts` of what was gathered."""
        parts = {}
        for (product, of_product), codes in zip(agreed.items(), gathered, strict=True):
            whole, scale_inv = codes.narrow(0, 0, self.parameter._orig_size[0]), self.codes.scale_inv(of_product)
            for reader in (product,) if len(self.codes.products) > 1 else (FPROP, DGRAD):
                parts |= {f"{reader}_codes": whole.view(E4M3.dtype), f"{reader}_scale_inv": scale_inv}
        return parts if self.codes.amax is None else parts | {AMAX: self.codes.amax}


class _Before(TemporaryHook):
    """`fsdp_pre_all_gather` of one shard."""

    def __init__(self, shard: WeightShard) -> None:
        self.shard = shard

    def __call__(self, mesh, outer_size, outer_stride, module, mp_policy):
        return self.shard.inputs()


class _After(TemporaryHook):
    """`fsdp_post_all_gather` of one shard."""

    def __init__(self, shard: WeightShard) -> None:
        self.shard = shard

    def __call__(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        parts = self.shard.parts(all_gather_outputs, metadata)
        if out is None:
            return GatheredCodes(parts, param_dtype), ()
        out.parts.clear()
        out.parts.update(parts)
        return None


@torch.no_grad()
def agree(shards: Iterable[WeightShard]) -> None:
    """Let the ranks that share these weights agree on their amaxes: one all-reduce of FP32, and one of exponents."""
    by_group: dict[dist.ProcessGroup, list[WeightShard]] = {}
    for shard in shards:
        by_group.setdefault(shard.process_group, []).append(shard)
    for group, members in by_group.items():
        for shard in members:
            if isinstance(shard.tensor, ScaledTensor) and shard.tensor.unagreed:
                agree_on_scale(shard.tensor, [group])
        amaxes = [shard.codes.amaxes(*shard.place) for shard in members]
        maxima = iter(_maxima([each for of_one in amaxes for each in of_one], group))
        for shard, of_one in zip(members, amaxes, strict=True):
            shard.codes.agree([next(maxima) for _ in of_one])


def _maxima(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """The maxima over the ranks. FP32 or uint8, any shapes."""
    agreed: dict[int, torch.Tensor] = {}
    for dtype in (torch.float32, torch.uint8):
        of_dtype = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
        if not of_dtype:
            continue
        message = torch.cat([tensors[i].flatten() for i in of_dtype])
        parts = agreed_over(message, [group]).split([tensors[i].numel() for i in of_dtype])
        agreed |= {i: part.view(tensors[i].shape) for i, part in zip(of_dtype, parts, strict=True)}
    return [agreed[i] for i in range(len(tensors))]


class Gathers(TemporaryHook):
    """Forward pre-hook of FSDP2 modules: settles, before the outermost of them runs, what is gathered of each weight
    beneath it."""

    def __init__(self) -> None:
        self.shards: list[WeightShard] = []
        self.beneath: weakref.WeakKeyDictionary[nn.Module, list[WeightShard]] = weakref.WeakKeyDictionary()
        self.outermost: nn.Module | None = None
        """The module that runs now."""
        self.for_a_while: list[WeightShard] = []
        """Weights that are gathered as they are stored while it runs."""
        # no decorators, since importing the compiler takes a second
        self._begin, self._end = torch.compiler.disable(_begin), torch.compiler.disable(_end)

    def take(self, shards: list[WeightShard]) -> None:
        """Settle these from now on, and no others."""
        for shard in self.shards:
            shard.settle(False)
        self.shards = shards
        self.beneath.clear()

    def __call__(self, module: nn.Module, args: tuple) -> None:
        self._begin(self, module)

    def shards_beneath(self, module: nn.Module) -> list[WeightShard]:
        """The weights that a module and those in it gather."""
        if module not in self.beneath:
            inside = set(module.modules())
            self.beneath[module] = [shard for shard in self.shards if inside.intersection(shard.group.modules)]
        return self.beneath[module]


class AfterForward(TemporaryHook):
    """Forward hook of FSDP2 modules: ends what `Gathers` has begun."""

    def __init__(self, gathers: Gathers) -> None:
        self.gathers = gathers

    def __call__(self, module: nn.Module, args: tuple, output: Any) -> None:
        self.gathers._end(self.gathers, module)


def _begin(gathers: Gathers, module: nn.Module) -> None:
    if gathers.outermost is not None or inside_backward():  # recomputed: settled in forward
        return
    gathers.outermost = module
    module._get_fsdp_state()._lazy_init()  # what FSDP2 does next, and may make new shards
    shards = gathers.shards_beneath(module)
    for shard in shards:
        if shard.travels and not shard.codes.wanted:
            gathers.for_a_while.append(shard)
        shard.settle(shard.codes.wanted)
    agree(shard for shard in shards if shard.travels)


def _end(gathers: Gathers, module: nn.Module) -> None:
    if gathers.outermost is not module or inside_backward():
        return
    if not torch.is_grad_enabled():  # else backward is to find what forward has read
        for shard in gathers.for_a_while:  # and that of an earlier forward, too
            shard.settle(True)
    gathers.outermost, gathers.for_a_while = None, []
