"""Layers whose weight is cut over the ranks of a tensor-parallel mesh: PyTorch's `parallelize_module`, transformers'
`tp_plan`.

The Parameter is a DTensor, and each rank multiplies its part:

==========  ===============  =========  ===========  ============
style       weight           input      output       input's grad
==========  ===============  =========  ===========  ============
colwise     rows, Shard(0)   whole      columns      partial sum
rowwise     columns, (1)     columns    partial sum  columns
replicated  whole            as it is   as it is     as it is
==========  ===============  =========  ===========  ============

An operand of which the ranks hold parts gets its scale from the amax of all of it, on which they agree by a maximum. So
its codes are those of one process, to the bit. The styles' own hooks, or transformers' wrappers, do the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ...errors import FP8BackendError
from ...numerics.scaled_tensor import agreed_over
from ...numerics.sharded_tensor import is_distributed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

COLWISE, ROWWISE, REPLICATED, OF_TOKENS = "colwise", "rowwise", "replicated", "of tokens"
"""How a layer is cut. The last: every rank has the whole weight, and tokens of its own."""

_CUTS: dict[str, tuple[int | None, int | None, int | None]] = {
    COLWISE: (None, 0, 1),
    ROWWISE: (1, 1, None),
    REPLICATED: (None, None, None),
    OF_TOKENS: (0, None, 0),
}
"""Along which dimension the input [tokens, in], the weight [out, in] and the output's gradient [tokens, out] are cut,
in the order of INPUT, WEIGHT and GRAD_OUTPUT."""


class Split(NamedTuple):
    """How a matrix is cut over the ranks of a group."""

    dim: int
    group: dist.ProcessGroup

    def agreed(self, amax: torch.Tensor) -> torch.Tensor:
        """The largest that a rank found, FP32; all ranks of the group call it."""
        return agreed_over(amax, [self.group])


class Cut(NamedTuple):
    """How a layer is cut over a mesh of one dimension."""

    mesh: DeviceMesh
    style: str

    @classmethod
    def of_weight(cls, layer: nn.Module) -> Cut | None:
        """By the weight of a layer, where that is a DTensor of a mesh with one dimension."""
        weight = layer._parameters.get("weight")
        if weight is None or not is_distributed(weight) or weight.device_mesh.ndim != 1:
            return None
        (placed,) = weight.placements
        if not placed.is_shard():
            return cls(weight.device_mesh, REPLICATED) if placed.is_replicate() else None
        return cls(weight.device_mesh, ROWWISE if placed.dim % 2 != layer.transposed_weight else COLWISE)

    def split(self, tensor: int) -> Split | None:
        """How one of INPUT, WEIGHT and GRAD_OUTPUT is cut, where several ranks have parts of it."""
        dim = _CUTS[self.style][tensor]
        return None if dim is None or self.mesh.size() == 1 else Split(dim, self.mesh.get_group())

    @property
    def adds_bias(self) -> bool:
        """Whether this rank adds the bias: of partial sums the first alone."""
        return self.style != ROWWISE or self.mesh.get_local_rank() == 0

    def wrapped(self, y: torch.Tensor, x: Any, features: int) -> torch.Tensor:
        """The output of the layer, from this rank's part y and the input x, as a DTensor."""
        from torch.distributed.tensor import DTensor, Partial, Shard

        placed = {COLWISE: [Shard(y.dim() - 1)], ROWWISE: [Partial()]}.get(self.style, x.placements)
        shape = torch.Size((*x.shape[:-1], features))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(y, self.mesh, placed, run_check=False, shape=shape, stride=stride)


def split_of(cut: Cut | None, tensor: int) -> Split | None:
    """`Cut.split`; None for a layer that is whole."""
    return None if cut is None else cut.split(tensor)


class Operands(NamedTuple):
    """What one rank multiplies."""

    input: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    cut: Cut | None


def is_parallel(layer: nn.Module) -> bool:
    """Whether PyTorch's styles or transformers' have made this layer a part of several ranks' work."""
    return any(getattr(layer, mark, False) for mark in ("_distribute_module_applied", "_is_hooked"))


def local_operands(layer: nn.Module, x: torch.Tensor) -> Operands:
    """This rank's parts of a layer's input, weight and bias.

    Raises:
        FP8BackendError: the weight is a DTensor and the input is none, or the mesh has more dimensions.
    """
    weight, bias = layer.weight, layer.bias
    if not is_distributed(weight):
        # transformers calls some layers with local tensors, and wraps what comes out
        whole = (layer.out_features, layer.in_features)
        is_part = layer.fp8_cut is not None and weight.shape != (whole[::-1] if layer.transposed_weight else whole)
        return Operands(x, weight, bias, layer.fp8_cut if is_part else None)
    cut = Cut.of_weight(layer)
    if cut is None or not is_distributed(x):
        raise FP8BackendError(
            f"an FP8 layer {layer.in_features} -> {layer.out_features} has a weight that lies as {weight.placements} "
            f"on {weight.device_mesh}, and got {type(x).__name__}: it multiplies a DTensor by a weight on a mesh of "
            "one dimension, as parallelize_module and tp_plan make them; use these, or name the layer in exclude"
        )
    if not torch.compiler.is_compiling():
        layer.fp8_cut = cut
    from torch.distributed.tensor import Partial, Replicate, Shard

    (placed,), last = x.placements, x.dim() - 1
    if cut.style == REPLICATED and placed.is_shard() and placed.dim % x.dim() != last:
        cut = cut._replace(style=OF_TOKENS)
    else:
        wanted = Shard(last) if cut.style == ROWWISE else Replicate()
        x = x if placed == wanted else x.redistribute(placements=[wanted])
    sums = [Partial()]  # a gradient of which each rank has one summand
    of_bias = None if bias is None else bias.to_local(grad_placements=sums if cut.style == OF_TOKENS else None)
    return Operands(
        x.to_local(grad_placements=sums if cut.style == COLWISE else None),
        weight.to_local(grad_placements=sums if cut.style == OF_TOKENS else None),
        of_bias,
        cut,
    )


def arrived(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, once the collective that makes it is over."""
    wait = getattr(tensor, "trigger_wait", None)
    return tensor if wait is None else wait()
