"""The experts of a mixture in FP8: what `FP8Linear` does for one matrix, for a 3-D Parameter that holds many.

Tokens are sorted by expert, and grouped products multiply each with its expert's weight. Every expert has scales of its
own, so its numbers are those of a Linear layer with its weight that gets its tokens. Grouped products take E4M3 alone:
where a recipe gives gradients E5M2 for its range (`HYBRID`), they have E4M3 and a scale for each row of a product
instead, made just in time. Rules with blocks multiply expert by expert (`grouped_blocks`), in the recipe's own formats.

A level stores the 3-D Parameter as one `ScaledTensor`. FP16 data get a scale for each expert, E4M3 data are multiplied
as they lie, with their one scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from ...errors import FP8BackendError
from ...numerics.formats import E4M3
from ...numerics.gathered_codes import AMAX, GatheredCodes
from ...numerics.kernels.layouts import Layouts
from ...numerics.scaling import ROWS, Blocks, Quantized
from ...numerics.sharded_tensor import is_distributed
from .. import expert_functions
from ..expert_functions import ExpertWeight, ExpertWeights, first_weight, own_part
from ..interface import Recipe
from ..layer_parts import is_parallel
from .grouped_function import GroupedFunction, gradient_by_rows, quantized_weight
from .grouped_products import Groups
from .layer_rule import ALONG_CONTRACTION, LayerRule, Stored, new_state
from .ledger import KeepsLedger, Ledger
from .linear import FPROP, is_checkpointed
from .shared_codes import SharedCodes
from .tensor_parallel import COLWISE, ROWWISE, Cut, cut_of_a_block

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_ARRIVED = ("arrived",)
"""The key of codes in which tokens came from other ranks, among those of inputs that `SharedCodes` holds."""

_PLAIN = LayerRule("dynamic", E4M3, E4M3, (True, True, True), True)
"""The rule of a weight beside a converted one, which stays in high precision."""


def unfit(experts: nn.Module, part: str, recipe: Recipe) -> str | None:
    """Why experts with this weight cannot run in FP8 by the recipe, or None."""
    if reason := expert_functions.unfit(experts, part, recipe.fp8_params):
        return reason
    along = ALONG_CONTRACTION.get(recipe.scaling)
    length = along and along.weight_blocks.columns
    for mesh, _, size in cuts_of(experts, experts._parameters[part]):
        own = size // mesh.size()
        if length and own % length:
            return f"tensor parallelism gives each rank {own} of {size} features, {cut_of_a_block(length)}"
    return None


def cuts_of(experts: nn.Module, weight: torch.Tensor) -> Iterator[tuple[DeviceMesh, int, int]]:
    """(mesh, dimension of the weight, its size in each of the weights that are packed there) for each mesh over which a
    tensor-parallel plan has cut every expert."""
    if not (is_parallel(experts) and is_distributed(weight)):
        return
    mesh = weight.device_mesh
    for index, placed in enumerate(weight.placements):
        if not placed.is_replicate() and placed.dim and mesh.size(index) > 1:
            size = weight.shape[placed.dim] // getattr(placed, "split_factor", 1)
            yield mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[index]], placed.dim, size


def note(rule: LayerRule) -> str | None:
    """How experts differ from Linears of this rule, or None."""
    if rule.has_blocks or rule.gradient_format == E4M3:
        return None
    return "gradients in E4M3 with a scale a row: no GPU has grouped products with E5M2"


def build(experts: nn.Module, parts: list[str], rule: LayerRule, shared: SharedCodes, history_len: int) -> FP8Experts:
    """What stands for these weights of an experts module."""
    weights = FP8Experts()
    for part in parts:
        weights[part] = FP8ExpertWeight(experts, part)
        weights[part].set_rule(rule, shared, history_len)
    return weights


class FP8Experts(ExpertWeights):
    """Grouped products of all experts of a module."""

    @property
    def fp8_in_eval(self) -> bool:
        return self._rule.fp8_in_eval

    def groups(self, ids: torch.Tensor, experts: int) -> Groups:
        return Groups.of(ids, experts)

    def product(
        self,
        experts: nn.Module,
        part: str,
        x: torch.Tensor,
        groups: Groups,
        out_dtype: torch.dtype,
        arrived: Quantized | None = None,
    ) -> torch.Tensor:
        weight, transposed = own_part(experts, part), experts.is_transposed
        if part in self:
            y = self[part](x, weight, groups, out_dtype, arrived)
        else:
            keep = torch.is_grad_enabled()
            y = GroupedFunction.apply(
                x,
                weight,
                *(None, None, _PLAIN, None, transposed, out_dtype, keep, False),
                *(*groups, *Layouts(), *Stored.of(weight), None, None),
            )
        if experts.has_bias:
            y = y + own_part(experts, f"{part}_bias").index_select(0, groups.ids).to(out_dtype)
        return y

    def blocks_of_tokens(self, experts: nn.Module, hidden_states: torch.Tensor) -> Blocks | None:
        weight = self._modules.get(first_weight(experts))
        in_fp8 = weight is not None and not weight.fp8_rule.high_precision[FPROP]
        if not in_fp8 or not self.runs_in_fp8(experts, hidden_states):
            return None
        return ROWS if weight.fp8_rule.along is None else weight.fp8_rule.along.blocks

    def take_codes(self, tokens: torch.Tensor, codes: Quantized) -> None:
        if self._rule.along is not None:  # else the scales are others
            self._shared.of_input(tokens, _ARRIVED, lambda: codes)

    def codes_taken(self, tokens: torch.Tensor) -> Quantized | None:
        return None if self._rule.along is None else self._shared.of_input(tokens, _ARRIVED, lambda: None)

    @property
    def _rule(self) -> LayerRule:
        return next(iter(self.values())).fp8_rule

    @property
    def _shared(self) -> SharedCodes:
        return next(iter(self.values())).fp8_shared


class FP8ExpertWeight(KeepsLedger, ExpertWeight):
    """One 3-D weight whose products run in FP8.

    The ledger counts a product of all experts as one. Under expert parallelism `fp8_scaling` has the states of all
    ranks' experts, and a rank records amaxes of its own: the others' arrive when the ranks agree, after backward.
    """

    fp8_recomputed = False
    """As of `FP8Products`."""

    def set_rule(self, rule: LayerRule, shared: SharedCodes, history_len: int) -> None:
        """Attach a scaling rule with fresh state."""
        self.fp8_rule, self.fp8_shared, self.fp8_history_len = rule, shared, history_len
        self.fp8_own, self.fp8_cut = self.own_experts, self.cut
        self.fp8_out_dtype = torch.bfloat16
        self._reset_state(self.weight.device)

    @property
    def cut(self) -> Cut | None:
        """How ranks share the matrix of each expert, as transformers' tensor-parallel plans let them; None where it is
        whole. To be asked outside of a forward."""
        for mesh, dim, _ in cuts_of(self.fp8_experts[0], self.weight):
            return Cut(mesh, ROWWISE if (dim == 2) != self.fp8_transposed else COLWISE)
        return None

    def _reset_state(self, device: torch.device) -> None:
        self.fp8_ledger = Ledger(device, self.sizes[0], self.fp8_own.start)
        state = new_state(self.fp8_rule, self.fp8_history_len, device)
        self.fp8_scaling = None if state is None else state.repeat(self.sizes[0], 1, 1)

    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        groups: Groups,
        out_dtype: torch.dtype,
        arrived: Quantized | None = None,
    ) -> torch.Tensor:
        """[rows, out] from x [rows, in], whose rows lie as `groups` says. `weight` is what the experts module gives for
        its Parameter at this time; `arrived` has the codes of x for fprop, where somebody made them before."""
        self._follow(weight.device)
        if not torch.compiler.is_compiling():
            self.fp8_out_dtype = out_dtype
        if len(weight) != self.fp8_own.stop - self.fp8_own.start:
            raise FP8BackendError(
                f"{self.fp8_part}: its experts were shared out to ranks after the model was prepared: apply the "
                f"expert-parallel plan first, then fp8_backends.prepare(model, optimizer, spec)"
            )
        keep = torch.is_grad_enabled()
        state = None if self.fp8_scaling is None else self.fp8_scaling[self.fp8_own]
        if isinstance(weight, GatheredCodes):
            self.fp8_recomputed = self.training and is_checkpointed()
        with torch.no_grad():
            stored = Stored.of(weight)
            w8 = self._quantized(weight, stored, state, keep and x.requires_grad)
        return GroupedFunction.apply(
            x,
            weight,
            self.fp8_ledger,
            state,
            self.fp8_rule,
            self.fp8_cut,
            self.fp8_transposed,
            out_dtype,
            keep,
            keep and self.training,
            *groups,
            *w8,
            *stored,
            *(arrived or (None, None)),
        )

    def _quantized(self, weight: torch.Tensor, stored: Stored, state: torch.Tensor | None, for_dgrad: bool) -> Layouts:
        rule, transposed = self.fp8_rule, self.fp8_transposed
        for_dgrad = for_dgrad or self.fp8_shared.keeps_weights  # codes that are kept serve all forwards to come

        def quantize() -> Layouts:
            return quantized_weight(rule, stored, state, transposed, for_dgrad, self.fp8_cut)

        if isinstance(weight, GatheredCodes):
            return quantized_weight(rule, stored, state, transposed, False)._replace(amax=weight.parts.get(AMAX))
        # delayed scales move with every forward; a weight that is not the Parameter is made anew; codes lie as they are
        if rule.scaling == "delayed" or weight is not self.weight or stored.is_in(rule.forward_format):
            return quantize()
        return self.fp8_shared.of_weight(self, (rule,), quantize)

    def extra_repr(self) -> str:
        experts, outputs, inputs = self.sizes
        rows = " by rows" if gradient_by_rows(self.fp8_rule) else ""
        rule = self.fp8_rule._replace(gradient_format=E4M3) if rows else self.fp8_rule
        return f"{experts} experts, {inputs} -> {outputs}, {rule!r}{rows}"
