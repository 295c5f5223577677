"""Reduce gradients in FP8 under FSDP2, let it gather weights as codes, and agree on scaling states
over meshes.

`FP8ReduceScatter` reduces gradients by an all-to-all of E4M3, with a scale for every 128 elements
of FSDP2's flat buffer, without regard to parameters. FSDP2 itself copies with one shard, and
reduces between the replicas of a hybrid mesh (HSDP) without an extension point: both stay plain.
Under tensor parallelism gradients are whole on each rank or sharded as the weights, so that only
scaling states travel after backward.

`connect_weights` gives the tensor of a shard the two functions of FSDP2's protocol (`WeightShard`),
and FSDP2 then puts `GatheredCodes` in place of the weight. Before each forward (`Gathers`) the
ranks agree on all amaxes: weights change outside of optimizer steps, too, and a small amax would
clip. A layer about to run in high precision gathers its weight as stored. FSDP2 has one form of a
gathered weight, so the buffers of the other form are put aside.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ..announcement import logger
from ..errors import FP8BackendError
from ..formats.formats import E4M3
from ..tensors.gathered_codes import DGRAD, FPROP, WEIGHT_AMAX, GatheredCodes
from ..tensors.scaled_tensor import Partial, ScaledTensor, WithoutMemory
from ..tensors.sharded_tensor import agreed_over, is_distributed
from ..torch_tools.backward_end import inside_backward
from ..torch_tools.modules import TemporaryHook
from ..words import counted
from .backward import States, agree_after_backward, mesh_groups
from .two_shot import reduce_scatter

CONNECTED = "_fp8_gradient_comm"
"""Attribute of a connected FSDP2 module: its `gradient_comm`."""


def connect(root: nn.Module, gradient_comm: str, scaling_states: States) -> None:
    """Reduce the gradients of all FSDP2 modules in `root` in "fp8" or "plain" (FSDP2's own
    reduce-scatter), and reshard their parameters. Idempotent.

    Args:
        scaling_states: returns the live states of scaling rules, for agreement after each backward
        pass.

    Raises:
        FP8BackendError: this torch lacks the extension point, or the parameters of a module are on
        several meshes.
    """
    modules = fsdp_modules(root)
    reshard(root)
    for name, module in modules.items():
        if CONNECTED not in module.__dict__:
            # loading needs shards, also after a forward has gathered them
            module.register_load_state_dict_pre_hook(_reshard)
        if gradient_comm == "fp8" and module.__dict__.get(CONNECTED) != "fp8":
            try:
                module.set_custom_reduce_scatter(_reduce_scatter_class()())
            except ValueError as error:
                raise FP8BackendError(
                    'gradient_comm="fp8": FSDP2 does not let the reduce-scatter of '
                    f'{name or "the model"} be chosen ({error}); use gradient_comm="plain"'
                ) from error
        module.__dict__[CONNECTED] = gradient_comm
    # also under `no_sync`: the message is small, and FSDP2 has no flag for a reduction
    agree(root, scaling_states)


def agree(model: nn.Module, scaling_states: States) -> None:
    """Let the ranks of a model's meshes agree on scaling states after each backward pass.
    Idempotent."""
    if scaling_states is not list:
        agree_after_backward(outermost(model) or [model], scaling_states, mesh_groups(model))


def ranks_sharing_layers(model: nn.Module) -> int:
    """Return the number of ranks that share a layer by tensor parallelism; 1 without.

    Under FSDP2 every weight is a DTensor: there tensor parallelism is the mesh dimension named "tp"
    by transformers and Accelerate.
    """
    meshes = [p.device_mesh for p in model.parameters() if is_distributed(p)]
    if not fsdp_modules(model):
        return max((mesh.size() for mesh in meshes), default=1)
    named = [dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False)) for mesh in meshes]
    return max((sizes.get("tp", 1) for sizes in named), default=1)


def fsdp_modules(root: nn.Module) -> dict[str, nn.Module]:
    """Map names to the modules of `fully_shard`."""
    loaded = sys.modules.get("torch.distributed.fsdp")  # not loaded for those who do not shard
    if loaded is None:
        return {}
    return {
        name: module
        for name, module in root.named_modules()
        if isinstance(module, loaded.FSDPModule)
    }


def outermost(root: nn.Module) -> list[nn.Module]:
    """Return the FSDP2 modules inside no other one. Some of them may be frozen."""
    found, inside = [], set()
    for module in fsdp_modules(root).values():  # parents first
        if module not in inside:
            found.append(module)
        inside.update(module.modules())
    return found


def reshard(root: nn.Module) -> None:
    """Reshard the parameters of all FSDP2 modules in `root`."""
    for module in fsdp_modules(root).values():
        module.reshard()


def make_plain(root: nn.Module) -> None:
    """Give FSDP2 plain shards in place of frozen ones in FP8 or FP4, to train them or to merge
    adapters."""
    reshard(root)
    for _, parameter in _sharded_parameters(fsdp_modules(root).values()):
        shard = parameter._sharded_local_tensor
        if isinstance(shard, WithoutMemory):
            parameter.sharded_param._local_tensor = shard.exact()
            parameter.__dict__.pop("_unsharded_param", None)
            parameter.all_gather_outputs = []
            parameter._init_extensions()
            parameter.reset_sharded_param()


def _reshard(module: nn.Module, *_) -> None:
    module.reshard()


@functools.cache
def _reduce_scatter_class() -> type:
    """Derive `FP8ReduceScatter` from FSDP2's base class, in a private module of torch."""
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

        arguments = ["self", "output_tensor", "input_tensor", "group", "op", "async_op"]
        is_supported = list(
            inspect.signature(ReduceScatter.__call__).parameters
        ) == arguments and ReduceScatter.__abstractmethods__ == {"allocate", "__call__"}
    except ImportError:
        is_supported = False
    if not is_supported:
        raise FP8BackendError(
            'gradient_comm="fp8" under FSDP2 needs torch\'s interface for a custom reduce-scatter '
            f"(FSDPModule.set_custom_reduce_scatter), and torch {torch.__version__} has none or "
            "another: "
            'use gradient_comm="plain", or torch 2.11 to 2.15'
        )
    return type(
        "FP8ReduceScatter", (FP8ReduceScatter, ReduceScatter), {"__doc__": FP8ReduceScatter.__doc__}
    )


class FP8ReduceScatter:
    """FSDP2's reduce-scatter with E4M3 contributions and an FP32 sum."""

    def allocate(self, size, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate the input or the result."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False) -> None:
        """Reduce `input_tensor`, [ranks * n], a row for each rank, into `output_tensor`, [n], on
        the current stream."""
        if op == dist.ReduceOp.AVG:
            factor = 1.0 / group.size()
        elif op == dist.ReduceOp.SUM:
            factor = 1.0
        elif op == dist.ReduceOp.PREMUL_SUM:
            factor = float(op.__getstate__()[1])  # the only access to the factor
        else:
            raise FP8BackendError(
                f'gradient_comm="fp8" sums and averages, FSDP2 wants {op}: use '
                'gradient_comm="plain"'
            )
        reduce_scatter(input_tensor.view(group.size(), -1), group, out=output_tensor, factor=factor)


# Weights gathered as codes

_GATHERS = "_fp8_gathers"
"""Attribute of a connected FSDP2 module: the `Gathers` shared by all."""
_BUFFERS = ("all_gather_outputs", "_unsharded_param", "_unsharded_inner_tensors")
"""FSDP2's buffers of a gathered weight."""

Place = tuple[nn.Module, str]
"""A module and the name of one of its Parameters."""


class Travelling(Protocol):
    """Codes of one layer's weight. Each rank has some rows, or some experts of a 3-D weight."""

    wanted: bool  # the layer's next forward reads codes, and nothing else of the weight
    change_in_forward: bool  # a constant weight may have other codes in the next forward
    recomputed: bool  # backward runs the layer's forward again
    products: tuple[str, ...]  # with codes of their own: FPROP, shared by dgrad, or FPROP and DGRAD
    agreed: dict[str, torch.Tensor]  # results of the agreement by product
    amax: torch.Tensor | None
    """max |x| of the whole weight, for a rule that records it; FP32, 0-dimensional, or
    [experts]."""

    def can_make(self, shard: torch.Tensor) -> bool:
        """Return True if this shard can be cast to codes."""

    def amaxes(self, shard: torch.Tensor, first: int, shape: torch.Size) -> list[torch.Tensor]:
        """Return the inputs of the agreement by maximum for each of `products`: FP32 or uint8, of
        the same shapes on every rank. `shard`: rows from `first` on of a weight of this shape."""

    def agree(self, maxima: list[torch.Tensor]) -> None:
        """Store the maxima over all ranks."""

    def codes(
        self, shard: torch.Tensor, first: int, shape: torch.Size, product: str
    ) -> torch.Tensor:
        """Return the codes of the shard for a product."""

    def scale_inv(self, agreed: torch.Tensor) -> torch.Tensor:
        """Return the scales of the whole weight from the result of the agreement for a product."""


def connect_weights(root: nn.Module, travelling: Mapping[Place, Travelling]) -> None:
    """Let FSDP2 gather these weights as codes, all others as stored. Idempotent. Raises
    `FP8BackendError` if this torch has a different FSDP2."""
    modules = list(fsdp_modules(root).values())
    if not modules or not (travelling or any(_GATHERS in module.__dict__ for module in modules)):
        return
    shards, plain = _shards(modules, travelling)
    if plain:
        reasons = ", ".join(sorted(set(plain)))
        logger.info(
            "FSDP2 gathers the weights of %s as they are stored: %s",
            counted(len(plain), "layer"),
            reasons,
        )
    gathers = (
        next((m.__dict__[_GATHERS] for m in modules if _GATHERS in m.__dict__), None) or Gathers()
    )
    gathers.take(shards)
    for module in modules:
        if _GATHERS not in module.__dict__:
            module.__dict__[_GATHERS] = gathers
            module.register_forward_pre_hook(gathers, prepend=True)
            module.register_forward_hook(gathers, always_call=True)


def _shards(
    modules: Iterable[nn.Module], travelling: Mapping[Place, Travelling]
) -> tuple[list[WeightShard], list[str]]:
    """Return the shards of weights gathered as codes, and a reason for each other weight."""
    shards, plain = [], []
    try:
        for group, parameter in _sharded_parameters(modules):
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
            "enable_fsdp_float8_all_gather reads how FSDP2 keeps its parameters, and torch "
            f"{torch.__version__} keeps them in another way ({error}): use "
            "enable_fsdp_float8_all_gather=False, or torch 2.13"
        ) from error
    return shards, plain


def _sharded_parameters(modules: Iterable[nn.Module]) -> Iterator[tuple[Any, Any]]:
    """Yield FSDP2's parameters of these modules, without their children, after the group of
    each."""
    for module in modules:
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # torch 2.12 and before have one
            groups = filter(None, [state._fsdp_param_group])
        for group in groups:
            for parameter in group.fsdp_params:
                yield group, parameter


def _stays_plain(group: Any, parameter: Any) -> str | None:
    """Return the reason to gather a weight as stored, if any."""
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
    """This rank's rows of one weight under FSDP2, and the two functions of FSDP2's protocol for
    them."""

    def __init__(self, parameter: Any, group: Any, codes: Travelling) -> None:
        self.parameter, self.group, self.codes = parameter, group, codes
        self.travels = False
        """FSDP2 gathers codes, not the stored weight."""
        self.put_aside: dict[str, Any] = {}
        """FSDP2's buffers of the other form."""

    @property
    def tensor(self) -> torch.Tensor:
        """The stored rows."""
        return self.parameter._sharded_local_tensor

    @property
    def process_group(self) -> dist.ProcessGroup:
        return self.group.mesh_info.shard_process_group

    @property
    def place(self) -> tuple[torch.Tensor, int, torch.Size]:
        """The rows, the index of the first, and the shape of the weight."""
        shape = self.parameter._orig_size
        return (
            self.tensor,
            self.process_group.rank() * self.parameter.padded_sharded_param_size[0],
            shape,
        )

    def settle(self, travels: bool) -> None:
        """Let FSDP2 gather codes from now on, or the stored weight; reshard a weight whose form
        changes."""
        if self.travels != travels or (travels and self.codes.change_in_forward):
            self.group.wait_for_unshard()
            for module in self.group.modules:
                if hasattr(module, "reshard"):
                    module.reshard()
        if self.travels != travels:
            kept = self.parameter.__dict__
            other = {"all_gather_outputs": [], "_unsharded_inner_tensors": []} | self.put_aside
            self.put_aside = {name: kept.pop(name) for name in _BUFFERS if name in kept}
            kept.update(other)
            self.travels = travels
        functions = self.tensor.__dict__  # a new tensor after the shard was moved or loaded
        if not travels:
            functions.pop("fsdp_pre_all_gather", None)
            functions.pop("fsdp_post_all_gather", None)
        elif "fsdp_pre_all_gather" not in functions:
            functions.update(
                fsdp_pre_all_gather=_Function(self.inputs),
                fsdp_post_all_gather=_Function(self.gathered),
            )
            self.parameter._init_extensions()

    def products(self) -> tuple[str, ...]:
        """Return the products whose codes are gathered now."""
        every, state = self.codes.products, self.group._training_state.name
        if state == "PRE_BACKWARD" and not self.codes.recomputed:
            return every[-1:]
        if state == "FORWARD" and self.group._reshard_after_forward and not inside_backward():
            return every[:1]
        return every  # gathered once for both; a recomputed forward may end before it is resharded

    def inputs(
        self, mesh, outer_size, outer_stride, module, mp_policy
    ) -> tuple[tuple[torch.Tensor, ...], dict]:
        """Return the message, uint8 of equal size on all ranks, and the agreed amaxes by product.
        FSDP2 may call it in its own stream, so no tensor allocated here outlives the gathering."""
        if self.group._training_state.name == "IDLE":  # `unshard()` outside of a forward
            _agree_on_amaxes([self])
        missing = self.parameter.padded_sharded_param_size[0] - len(self.tensor)
        agreed = {product: self.codes.agreed[product] for product in self.products()}
        codes = (self.codes.codes(*self.place, product).view(torch.uint8) for product in agreed)
        inputs = tuple(F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing)) for rows in codes)
        if len(self.parameter.all_gather_outputs) != len(inputs):
            self.parameter.all_gather_outputs = []
        return inputs, agreed

    def gathered(
        self,
        gathered: tuple[torch.Tensor, ...],
        agreed: dict[str, torch.Tensor],
        dtype,
        *,
        out=None,
    ):
        """Return a gathered message as codes, or put them into `out`."""
        parts = {} if self.codes.amax is None else {WEIGHT_AMAX: self.codes.amax}
        for (product, amaxes), codes in zip(agreed.items(), gathered, strict=True):
            whole, scale_inv = (
                codes.narrow(0, 0, self.parameter._orig_size[0]),
                self.codes.scale_inv(amaxes),
            )
            for reader in (product,) if len(self.codes.products) > 1 else (FPROP, DGRAD):
                parts |= {
                    f"{reader}_codes": whole.view(E4M3.dtype),
                    f"{reader}_scale_inv": scale_inv,
                }
        if out is None:
            return GatheredCodes(parts, dtype), ()
        out.parts.clear()
        out.parts.update(parts)
        return None


class _Function(TemporaryHook):
    """A function of FSDP2's protocol for one shard. FSDP2 counts its parameters."""

    def __init__(self, function: Callable) -> None:
        self.__wrapped__ = function

    def __call__(self, *args, **kwargs):
        return self.__wrapped__(*args, **kwargs)


@torch.no_grad()
def _agree_on_amaxes(shards: Iterable[WeightShard]) -> None:
    """Agree on the amaxes of these weights among their ranks: one all-reduce of FP32, and one of
    exponents (uint8)."""
    by_group: dict[dist.ProcessGroup, list[WeightShard]] = {}
    for shard in shards:
        by_group.setdefault(shard.process_group, []).append(shard)
    for group, members in by_group.items():
        for shard in members:
            if isinstance(shard.tensor, ScaledTensor) and shard.tensor.partial is Partial.WRITTEN:
                shard.tensor.agree_on_scale([group])
        amaxes = [shard.codes.amaxes(*shard.place) for shard in members]
        flat = [tensor for shard_amaxes in amaxes for tensor in shard_amaxes]
        maxima: dict[int, torch.Tensor] = {}
        for dtype in (torch.float32, torch.uint8):
            if indices := [i for i, tensor in enumerate(flat) if tensor.dtype == dtype]:
                message = agreed_over(torch.cat([flat[i].flatten() for i in indices]), [group])
                parts = message.split([flat[i].numel() for i in indices])
                maxima |= {
                    i: part.view(flat[i].shape) for i, part in zip(indices, parts, strict=True)
                }
        remaining = iter([maxima[i] for i in range(len(flat))])
        for shard, shard_amaxes in zip(members, amaxes, strict=True):
            shard.codes.agree([next(remaining) for _ in shard_amaxes])


class Gathers(TemporaryHook):
    """Choose the form of each gathered weight for a forward of the outermost FSDP2 module: hook
    before and after it."""

    def __init__(self) -> None:
        self.shards: list[WeightShard] = []
        self.beneath: weakref.WeakKeyDictionary[nn.Module, list[WeightShard]] = (
            weakref.WeakKeyDictionary()
        )
        """Weights gathered by a module and its children."""
        self.outermost: nn.Module | None = None
        """The running module."""
        self.for_a_while: list[WeightShard] = []
        """Weights gathered as stored while it runs."""
        # no decorators: importing the compiler takes a second
        self._begin, self._end = torch.compiler.disable(_begin), torch.compiler.disable(_end)

    def take(self, shards: list[WeightShard]) -> None:
        """Replace the weights gathered as codes."""
        for shard in self.shards:
            shard.settle(False)
        self.shards = shards
        self.beneath.clear()

    def __call__(self, module: nn.Module, args: tuple, *output: Any) -> None:
        (self._end if output else self._begin)(self, module)


def _begin(gathers: Gathers, module: nn.Module) -> None:
    if gathers.outermost is not None or inside_backward():  # recomputed: settled in forward
        return
    gathers.outermost = module
    module._get_fsdp_state()._lazy_init()  # FSDP2's next action, which may replace shards
    if module not in gathers.beneath:
        inside = set(module.modules())
        gathers.beneath[module] = [
            shard for shard in gathers.shards if inside.intersection(shard.group.modules)
        ]
    shards = gathers.beneath[module]
    for shard in shards:
        if shard.travels and not shard.codes.wanted:
            gathers.for_a_while.append(shard)
        shard.settle(shard.codes.wanted)
    _agree_on_amaxes(shard for shard in shards if shard.travels)


def _end(gathers: Gathers, module: nn.Module) -> None:
    if gathers.outermost is not module or inside_backward():
        return
    if not torch.is_grad_enabled():  # otherwise backward needs the form of forward
        for shard in gathers.for_a_while:  # and an earlier forward's backward the codes
            shard.settle(True)
    gathers.outermost, gathers.for_a_while = None, []
