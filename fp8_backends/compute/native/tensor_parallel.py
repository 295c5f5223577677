"""Multiply by a weight cut over the ranks of a tensor-parallel mesh: PyTorch's
`parallelize_module`, transformers' `tp_plan`.

The Parameter is a DTensor, and each rank multiplies its part. An operand in parts gets its scale
from the amax of the whole, by a maximum over the ranks: its codes are those of one process, to the
bit. Outputs are columns (colwise) or partial sums (rowwise); the styles' own hooks, or
transformers' wrappers, do the rest.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from ...errors import FP8BackendError
from ...formats.scaling import INPUT, Blocks
from ...kernels.layouts import Layouts
from ...tensors.sharded_tensor import is_distributed
from ..refusals import part_obstacle
from .layer_rule import Operands, Split, split_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

COLWISE, ROWWISE, REPLICATED, OF_TOKENS = "colwise", "rowwise", "replicated", "of tokens"
"""Cuts of a layer. OF_TOKENS: every rank has the whole weight, and its own tokens."""

_CUTS: dict[str, tuple[int | None, int | None, int | None]] = {
    COLWISE: (None, 0, 1),
    ROWWISE: (1, 1, None),
    REPLICATED: (None, None, None),
    OF_TOKENS: (0, None, 0),
}
"""The cut dimension of input [tokens, in], weight [out, in] and output's gradient [tokens, out]."""


class Cut(NamedTuple):
    """The cut of a layer over a mesh of one dimension."""

    mesh: DeviceMesh
    style: str

    def split(self, tensor: int) -> Split | None:
        """Return the split of INPUT, WEIGHT or GRAD_OUTPUT; None if it is whole on each rank."""
        dim = _CUTS[self.style][tensor]
        return None if dim is None or self.mesh.size() == 1 else Split(dim, self.mesh.get_group())

    @property
    def adds_bias(self) -> bool:
        """True if this rank adds the bias; for partial sums only the first does."""
        return self.style != ROWWISE or self.mesh.get_local_rank() == 0

    def wrapped(self, y: torch.Tensor, x: Any, features: int) -> torch.Tensor:
        """Wrap this rank's part y of the layer's output, for the input x, in a DTensor."""
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

        placed = {COLWISE: [Shard(y.dim() - 1)], ROWWISE: [Partial()], REPLICATED: [Replicate()]}
        placed = placed.get(self.style, x.placements)
        shape = torch.Size((*x.shape[:-1], features))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(y, self.mesh, placed, run_check=False, shape=shape, stride=stride)


def cut_of(layer: nn.Module, weight: torch.Tensor, is_transposed: bool) -> Cut | None:
    """Read the cut of a layer's matrix, by a mesh of one dimension, or of each matrix in a 3-D
    weight."""
    mesh, matrix = weight.device_mesh, weight.dim() - 2
    if not matrix and mesh.ndim != 1:
        return None
    for index, placed in enumerate(weight.placements):
        if placed.is_replicate() or (matrix and (placed.dim == 0 or mesh.size(index) == 1)):
            continue
        # negative dimensions stand for several weights packed in one
        along_in = (placed.dim % weight.dim() == matrix + 1) != is_transposed
        of_mesh = mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[index]]
        return Cut(of_mesh, ROWWISE if along_in else COLWISE)
    return None if matrix else Cut(mesh, REPLICATED)


def cut_obstacle(layer: nn.Module, weight: torch.Tensor, blocks: Blocks | None) -> str | None:
    """Return the reason to keep the parts in high precision, or None: one is empty, or ranks share
    a block."""
    length = (blocks and blocks.columns) or 1
    instead = "use a scaling rule without blocks (dynamic, rowwise, delayed, window)"
    return part_obstacle(layer, weight, length, f"which cuts a block of {length} in two: {instead}")


def operands(layer: nn.Module, x: torch.Tensor) -> Operands:
    """Return this rank's parts of a layer's input, weight and bias. Raises `FP8BackendError` for a
    distributed weight with a plain input, on a mesh of more dimensions, or with a
    `cut_obstacle`."""
    weight, bias, rule = layer.weight, layer.bias, layer.fp8_rule
    if not is_distributed(weight):
        # transformers calls some layers with local tensors, and wraps their output
        whole = (layer.out_features, layer.in_features)
        is_part = weight.shape != (whole[::-1] if layer.transposed_weight else whole)
        cut = layer.fp8_cut if is_part else None
        return Operands(x, weight, bias, cut, x, x, split_of(cut, INPUT))
    cut, obstacle = (
        cut_of(layer, weight, layer.transposed_weight),
        cut_obstacle(layer, weight, rule.scales.weight_blocks),
    )
    if cut is None or obstacle or not is_distributed(x):
        reason = (
            obstacle
            or f"the weight is placed as {weight.placements}, and the input is a {type(x).__name__}"
        )
        raise FP8BackendError(
            f"an FP8 layer {layer.in_features} -> {layer.out_features} whose weight is a DTensor "
            f"cannot run: {reason}. Prepare after parallelize_module or tp_plan, on a mesh of one "
            "dimension, or name the layer in exclude"
        )
    if not torch.compiler.is_compiling():
        layer.fp8_cut = cut
    from torch.distributed.tensor import Partial, Replicate, Shard

    # gradients with one summand on each rank
    (placed,), last, sums = x.placements, x.dim() - 1, [Partial()]
    has_tokens = placed.is_shard() and placed.dim % x.dim() != last
    if cut.style == COLWISE and has_tokens and rule.gathers_codes:
        input = layer.fp8_shared.of_input(x, ("gathered",), lambda: _WithoutValues.apply(x))
        parts = weight.to_local(), None if bias is None else bias.to_local()
        split = cut._replace(style=OF_TOKENS).split(INPUT)
        return Operands(
            input, *parts, cut, x, x.to_local(), split, gather=functools.partial(gathered, x)
        )
    if cut.style == REPLICATED and has_tokens and not rule.scales.cuts_contraction:
        cut = cut._replace(style=OF_TOKENS)
    else:
        placement = Shard(last) if cut.style == ROWWISE else Replicate()
        x = x if placed == placement else x.redistribute(placements=[placement])
    of_weight = sums if cut.style == OF_TOKENS else None
    local = x.to_local(grad_placements=sums if cut.style == COLWISE else None)
    bias = None if bias is None else bias.to_local(grad_placements=of_weight)
    weight, (origin, view) = weight.to_local(grad_placements=of_weight), _origin(x, local)
    return Operands(local, weight, bias, cut, origin, local, cut.split(INPUT), view)


def _origin(x: Any, local: torch.Tensor) -> tuple[Any, tuple]:
    """Return the source of an input and its view. A style wraps each layer's input in a new
    DTensor, with a view of one plain tensor; an original DTensor is the same for all layers."""
    plain = None if torch.compiler.is_compiling() else local._base
    if plain is None or plain.grad_fn is None:
        return x, ()
    return plain, (local.shape, local.stride(), local.storage_offset())


class _WithoutValues(torch.autograd.Function):
    """A DTensor's whole shape, without values. Backward sums the ranks' gradients for their own
    tokens."""

    @staticmethod
    def forward(ctx, x):
        ctx.mesh, ctx.placements, ctx.shape, ctx.strides = (
            x.device_mesh,
            x.placements,
            x.shape,
            x.stride(),
        )
        return x.to_local().new_empty(()).expand(x.shape)

    @staticmethod
    def backward(ctx, grad):
        from torch.distributed.tensor import DTensor, Partial

        summand = DTensor.from_local(grad, ctx.mesh, [Partial()], run_check=False)
        return summand.redistribute(placements=ctx.placements)


def gathered(tokens: Any, part: Layouts) -> Layouts:
    """Gather the codes [all tokens, in] of a DTensor split by tokens, a byte an element; ranks
    share the scale."""
    from torch.distributed.tensor import DTensor, Replicate

    local = part.codes.view(torch.uint8).view(tokens.to_local().shape)
    shape = {"shape": tokens.shape, "stride": tokens.stride()}
    codes = DTensor.from_local(
        local, tokens.device_mesh, tokens.placements, run_check=False, **shape
    )
    codes = codes.redistribute(placements=[Replicate()]).to_local().reshape(-1, tokens.shape[-1])
    return part._replace(
        codes=codes.view(part.codes.dtype), transposed=None, transposed_scale_inv=None
    )
