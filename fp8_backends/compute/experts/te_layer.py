"""The experts of a mixture in `te`: the products of `te.GroupedLinear` on the model's 3-D
Parameters.

Each expert's tokens are padded with rows of zeros, and quantized by quantizers of its own. Imports
TransformerEngine, so it is imported when a layer is converted or unpickled.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import transformer_engine.pytorch as te
from torch import nn

from ...tensors.scaled_tensor import ScaledTensor
from ..interface import Recipe
from ..te import weights
from ..te.layer import ModelState, TELayer
from ..te.linear import PlainWgrad
from ..te.recipes import check_version
from . import ExpertWeight, ExpertWeights, own_experts, own_part, sizes_of


def build(experts: nn.Module, parts: list[str], recipe: Recipe, shared: ModelState) -> TEExperts:
    """Do as `Compute.parts`."""
    instead = f"native:{recipe.scaling}, or exclude them"
    check_version(
        f"{recipe.name} of experts", instead, te.GroupedLinear, "_get_bias_tensors", "2.14"
    )
    return TEExperts({part: TEExpertWeight(experts, part, shared) for part in parts})


class TEExperts(ExpertWeights):
    """Grouped products of all experts of a module."""

    def has_fp8_products(self, experts: nn.Module) -> bool:
        state = next(iter(self.values())).te_state
        return state.runs_in_fp8(state.is_training(experts))

    def groups(self, ids: torch.Tensor, experts: int) -> list[int]:
        """Count the rows of each expert, on the host: TransformerEngine splits by them."""
        return torch.bincount(ids, minlength=experts)[:experts].tolist()

    def product(
        self,
        experts: nn.Module,
        part: str,
        x: torch.Tensor,
        groups: list[int],
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        rows = sum(groups)
        foreign, x = len(x) - rows, x[:rows]
        if part in self:
            y = self[part](x, groups)
        else:
            matrices, biases = (
                matrices_of(experts, part),
                biases_of(experts, part) or [None] * len(groups),
            )
            y = torch.cat(
                [
                    F.linear(*operands)
                    for operands in zip(x.split(groups), matrices, biases, strict=True)
                ]
            )
        return F.pad(y, (0, 0, 0, foreign)) if foreign else y


class TEExpertWeight(TELayer, ExpertWeight, te.GroupedLinear):
    """One 3-D weight with products in FP8. The product of all experts counts as one."""

    def __init__(self, experts: nn.Module, part: str, state: ModelState) -> None:
        local = own_experts(experts, part)
        count = local.stop - local.start
        _, out_features, in_features = sizes_of(experts, part)
        super().__init__(
            experts,
            part,
            num_gemms=count,
            in_features=in_features,
            out_features=out_features,
            bias=experts.has_bias,
            params_dtype=experts._parameters[part].dtype,
            device="meta",
        )
        for name in [f"{kind}{i}" for kind in ("weight", "bias") for i in range(count)]:
            delattr(self, name)  # the experts module's Parameters take their place
        self.__dict__.update(te_state=state, **self._fresh())

    @property
    def matrices(self) -> int:
        return self.num_gemms

    def _get_weight_tensors(self) -> list[torch.Tensor]:
        """Return TransformerEngine's operands, as in `TEProducts`."""
        weight = own_part(*self.fp8_owner)
        if isinstance(weight, ScaledTensor):
            quantizers, scaling = self._get_weight_quantizers(), self.te_state.recipe.scaling
            parts, is_transposed = (
                zip(weight.codes.unbind(), quantizers, strict=True),
                self.transposed_weight,
            )
            casts = [
                weights.cast(weight, data, is_transposed, quantizer, scaling)
                for data, quantizer in parts
            ]
            matrices = weights.differentiable(weight, casts, is_transposed)
        else:
            matrices = matrices_of(*self.fp8_owner)
        return [matrix.detach() for matrix in matrices] if self.te_state.plain_wgrad else matrices

    def _get_bias_tensors(self) -> list[torch.Tensor]:
        biases = biases_of(*self.fp8_owner)
        # as te.GroupedLinear without any
        return biases or [torch.empty(0, device=self.weight.device)] * self.num_gemms

    @torch.compiler.disable
    def forward(self, x: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """Return [rows, out] from sorted x [rows, in], given the rows of each expert."""
        multiple = self.te_state.rows_multiple
        # the padding kernel reads rows of x in memory order
        padded, padded_rows = te.Fp8Padding(self.num_gemms, multiple)(x.contiguous(), rows)
        y = self._in_region(padded, padded_rows)
        return te.Fp8Unpadding(self.num_gemms, multiple)(y, rows)

    def _products(self, x: torch.Tensor, rows: list[int]) -> torch.Tensor:
        y = super()._products(x, rows)
        if not self.te_state.plain_wgrad:
            return y
        parts = zip(
            y.split(rows), x.detach().split(rows), matrices_of(*self.fp8_owner), strict=True
        )
        return torch.cat([PlainWgrad.apply(*part) for part in parts])

    def _multiply(self, x: torch.Tensor, rows: list[int]) -> torch.Tensor:
        return te.GroupedLinear.forward(self, x, rows)

    def extra_repr(self) -> str:
        return f"{self.num_gemms} experts, {self.in_features} -> {self.out_features}, {self.rule_in_words}"


def matrices_of(experts: nn.Module, part: str) -> list[torch.Tensor]:
    """Return each expert's weight as [out, in], on the memory of the Parameter."""
    weight = own_part(experts, part)
    return list((weight.transpose(1, 2) if experts.is_transposed else weight).unbind())


def biases_of(experts: nn.Module, part: str) -> list[torch.Tensor]:
    """Return each expert's bias [out]; empty without biases."""
    return list(own_part(experts, f"{part}_bias").unbind()) if experts.has_bias else []
