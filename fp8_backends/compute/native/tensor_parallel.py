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
from ...numerics.kernels.quantize.layouts import Layouts
from ...numerics.meshes import agreed_over
from ...numerics.scaling import INPUT, Blocks
from ...numerics.sharded_tensor import is_distributed
from ..refusals import part_obstacle

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
        if placed.is_replicate():
            return cls(weight.device_mesh, REPLICATED)
        along_in = placed.dim % 2 != layer.transposed_weight  # also of a weight packed of several
        return cls(weight.device_mesh, ROWWISE if along_in else COLWISE)

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
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

        placed = {COLWISE: [Shard(y.dim() - 1)], ROWWISE: [Partial()], REPLICATED: [Replicate()]}
        placed = placed.get(self.style, x.placements)
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
    origin: Any
    """What the inputs of layers have in common if they are the same."""
    view: tuple = ()
    """Which part of it this input is."""
    is_gathered: bool = False
    """Whether the codes of all tokens are to be gathered from the ranks that have them, those of `origin`. `input` then
    stands for all of it, and has no values."""

    @property
    def values(self) -> torch.Tensor:
        """The values of the input that this rank has."""
        return arrived(self.origin.to_local() if self.is_gathered else self.input)

    @property
    def input_split(self) -> Split | None:
        """How the values of the input are cut."""
        return split_of(self.cut._replace(style=OF_TOKENS) if self.is_gathered else self.cut, INPUT)


def cut_obstacle(layer: nn.Module, blocks: Blocks | None) -> str | None:
    """Why the parts of a layer cannot be multiplied, or None: one of them is empty, or a block of its weight lies on
    two ranks, which would give it two scales. `blocks`: those of the weight by the rule."""
    length = (blocks and blocks.columns) or 1
    return part_obstacle(layer, length, cut_of_a_block(length))


def cut_of_a_block(length: int) -> str:
    """What is wrong with a part that is no multiple of `length` features, and what to do."""
    instead = "use a scaling rule without blocks (dynamic, rowwise, delayed, window)"
    return f"which cuts a block of {length} in two: {instead}"


def local_operands(layer: nn.Module, x: torch.Tensor) -> Operands:
    """This rank's parts of a layer's input, weight and bias.

    Raises:
        FP8BackendError: the weight is a DTensor, and the input is none, the mesh has more dimensions, or there is a
            `cut_obstacle`.
    """
    weight, bias, rule = layer.weight, layer.bias, layer.fp8_rule
    if not is_distributed(weight):
        # transformers calls some layers with local tensors, and wraps what comes out
        whole = (layer.out_features, layer.in_features)
        is_part = layer.fp8_cut is not None and weight.shape != (whole[::-1] if layer.transposed_weight else whole)
        return Operands(x, weight, bias, layer.fp8_cut if is_part else None, x)
    cut = Cut.of_weight(layer)
    obstacle = cut_obstacle(layer, rule.weight_blocks)
    if cut is None or obstacle or not is_distributed(x):
        raise FP8BackendError(
            f"an FP8 layer {layer.in_features} -> {layer.out_features} whose weight is a DTensor cannot run: "
            f"{obstacle or f'the weight lies as {weight.placements}, and the input is a {type(x).__name__}'}. Prepare "
            "the model after parallelize_module or tp_plan, on a mesh of one dimension, or name the layer in exclude"
        )
    if not torch.compiler.is_compiling():
        layer.fp8_cut = cut
    from torch.distributed.tensor import Partial, Replicate, Shard

    (placed,), last, sums = x.placements, x.dim() - 1, [Partial()]  # gradients of which each rank has one summand
    has_tokens = placed.is_shard() and placed.dim % x.dim() != last
    if cut.style == COLWISE and has_tokens and rule.gathers_codes:
        input = layer.fp8_shared.of_input(x, ("gathered",), lambda: _WithoutValues.apply(x))
        return Operands(input, weight.to_local(), None if bias is None else bias.to_local(), cut, x, is_gathered=True)
    if cut.style == REPLICATED and has_tokens and not rule.has_blocks:
        cut = cut._replace(style=OF_TOKENS)
    else:
        wanted = Shard(last) if cut.style == ROWWISE else Replicate()
        x = x if placed == wanted else x.redistribute(placements=[wanted])
    of_weight = sums if cut.style == OF_TOKENS else None
    local = x.to_local(grad_placements=sums if cut.style == COLWISE else None)
    bias = None if bias is None else bias.to_local(grad_placements=of_weight)
    return Operands(local, weight.to_local(grad_placements=of_weight), bias, cut, *_origin(x, local))


def _origin(x: Any, local: torch.Tensor) -> tuple[Any, tuple]:
    """A style makes a DTensor of its own of each layer's input, with a view of the one plain tensor that there is. What
    came as a DTensor is the same for all layers."""
    plain = None if torch.compiler.is_compiling() else local._base
    if plain is None or plain.grad_fn is None:
        return x, ()
    return plain, (local.shape, local.stride(), local.storage_offset())


def arrived(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, once the collective that makes it is over."""
    wait = getattr(tensor, "trigger_wait", None)
    return tensor if wait is None else wait()


class _WithoutValues(torch.autograd.Function):
    """A tensor of the whole shape of a DTensor of tokens, whose gradient finds the way back: each rank has one summand
    of it for all tokens, and gets the sum for its own."""

    @staticmethod
    def forward(ctx, x):
        ctx.mesh, ctx.placements, ctx.shape, ctx.strides = x.device_mesh, x.placements, x.shape, x.stride()
        return x.to_local().new_empty(()).expand(x.shape)

    @staticmethod
    def backward(ctx, grad):
        from torch.distributed.tensor import DTensor, Partial

        summand = DTensor.from_local(grad, ctx.mesh, [Partial()], run_check=False)
        return summand.redistribute(placements=ctx.placements)


def gathered(tokens: Any, part: Layouts) -> Layouts:
    """The codes of a DTensor whose tokens lie on several ranks, as [all tokens, in], from those of this rank's part.
    They travel as one byte an element; the scale is the same on all ranks."""
    from torch.distributed.tensor import DTensor, Replicate

    local = part.codes.view(torch.uint8).view(tokens.to_local().shape)
    shape = {"shape": tokens.shape, "stride": tokens.stride()}
    codes = DTensor.from_local(local, tokens.device_mesh, tokens.placements, run_check=False, **shape)
    codes = codes.redistribute(placements=[Replicate()]).to_local().reshape(-1, tokens.shape[-1])
    return part._replace(codes=codes.view(part.codes.dtype), transposed=None, transposed_scale_inv=None)
