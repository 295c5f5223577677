"""The experts of a mixture in FP8: what `FP8Linear` does for one matrix, for a 3-D Parameter that holds many.

Tokens are sorted by expert, and grouped products multiply each with its expert's weight. Every expert has scales of its
own, so its numbers are those of a Linear layer with its weight that gets its tokens. Grouped products take E4M3 alone:
where a recipe gives gradients E5M2 for its range (`HYBRID`), they have E4M3 and a scale for each row of a product
instead, made just in time.
"""

from __future__ import annotations

import torch
from torch import nn

from ...numerics.formats import E4M3
from ...numerics.kernels.quantize.layouts import Layouts
from ...numerics.scaling import new_delayed_state
from ...numerics.sharded_tensor import full_shape
from ..expert_functions import ExpertWeight, ExpertWeights
from ..interface import COMPUTE_DTYPES, Recipe
from .grouped_function import GroupedFunction, gradient_by_rows, quantized_weight
from .grouped_products import Groups
from .layer_rule import LayerRule
from .ledger import KeepsLedger, Ledger
from .shared_codes import SharedCodes

SCALINGS = ("dynamic", "delayed", "rowwise")
"""Rules that grouped products follow."""

_PLAIN = LayerRule("dynamic", E4M3, E4M3, (True, True, True), True)
"""The rule of a weight beside a converted one, which stays in high precision."""


def unfit(weight: nn.Parameter, recipe: Recipe) -> str | None:
    """Why experts with this weight cannot run in FP8 by the recipe, or None."""
    if weight.dtype not in COMPUTE_DTYPES:
        return f"weight dtype {weight.dtype} is not one of fp32, bf16, fp16"
    if 0 in full_shape(weight):
        return "experts of size zero have no product"
    if recipe.level != "O0":
        return f"level {recipe.level} stores 2-D weights, and leaves those of experts in high precision"
    if recipe.scaling not in SCALINGS:
        return f"experts have no products with {recipe.scaling} scales ({', '.join(SCALINGS)} have)"
    if recipe.fp8_params:
        return "fp8_params stores 2-D weights in FP8, and leaves those of experts in high precision"
    return None


def note(rule: LayerRule) -> str | None:
    """How experts differ from Linears of this rule, or None."""
    if rule.gradient_format == E4M3:
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
        return next(iter(self.values())).fp8_rule.fp8_in_eval

    def groups(self, ids: torch.Tensor, experts: int) -> Groups:
        return Groups.of(ids, experts)

    def product(self, experts: nn.Module, part: str, x, groups: Groups, out_dtype: torch.dtype) -> torch.Tensor:
        weight, transposed = getattr(experts, part), experts.is_transposed
        if part in self:
            y = self[part](x, weight, groups, out_dtype)
        else:
            keep = torch.is_grad_enabled()
            y = GroupedFunction.apply(
                x, weight, None, None, _PLAIN, transposed, out_dtype, keep, False, *groups, *Layouts()
            )
        if experts.has_bias:
            y = y + getattr(experts, f"{part}_bias").index_select(0, groups.ids).to(out_dtype)
        return y


class FP8ExpertWeight(KeepsLedger, ExpertWeight):
    """One 3-D weight whose products run in FP8.

    The ledger counts a product of all experts as one. A buffer, not in the state dict: `fp8_scaling`, the delayed
    rule's states, int32 [experts, 3, 2 + history length].
    """

    def set_rule(self, rule: LayerRule, shared: SharedCodes, history_len: int) -> None:
        """Attach a scaling rule with fresh state."""
        self.fp8_rule, self.fp8_shared, self.fp8_history_len = rule, shared, history_len
        self._reset_state(self.weight.device)

    def _reset_state(self, device: torch.device) -> None:
        self.fp8_ledger = Ledger(device, self.sizes[0])
        if self.fp8_rule.scaling == "delayed":
            states = new_delayed_state(self.fp8_history_len, device).repeat(self.sizes[0], 1, 1)
            self.register_buffer("fp8_scaling", states, persistent=False)

    def forward(self, x: torch.Tensor, weight: torch.Tensor, groups: Groups, out_dtype: torch.dtype) -> torch.Tensor:
        """[rows, out] from x [rows, in], whose rows lie as `groups` says. `weight` is what the experts module gives for
        its Parameter at this time."""
        self._follow(weight.device)
        keep, state = torch.is_grad_enabled(), self.fp8_scaling if self.fp8_rule.scaling == "delayed" else None
        with torch.no_grad():
            w8 = self._quantized(weight, state, keep and x.requires_grad)
        return GroupedFunction.apply(
            x,
            weight,
            self.fp8_ledger,
            state,
            self.fp8_rule,
            self.fp8_transposed,
            out_dtype,
            keep,
            keep and self.training,
            *groups,
            *w8,
        )

    def _quantized(self, weight: torch.Tensor, state: torch.Tensor | None, for_dgrad: bool) -> Layouts:
        rule, transposed = self.fp8_rule, self.fp8_transposed
        for_dgrad = for_dgrad or self.fp8_shared.keeps_weights  # codes that are kept serve all forwards to come
        if state is not None or weight is not self.weight:  # its scales move with every forward; or it is made anew
            return quantized_weight(rule, weight, state, transposed, for_dgrad)
        return self.fp8_shared.of_weight(
            self, (rule,), lambda: quantized_weight(rule, weight, state, transposed, for_dgrad)
        )

    def extra_repr(self) -> str:
        experts, outputs, inputs = self.sizes
        rows = " by rows" if gradient_by_rows(self.fp8_rule) else ""
        rule = self.fp8_rule._replace(gradient_format=E4M3)
        return f"{experts} experts, {inputs} -> {outputs}, {rule!r}{rows}"
