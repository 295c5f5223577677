"""`TELinear`, one layer of `te`. `TEProducts` is what it has in common with `conv1d.TEConv1D`.

Imports TransformerEngine, so it is imported only when a layer is converted or unpickled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
import transformer_engine.pytorch as te
from torch import nn

from ...numerics.scaled_tensor import ScaledTensor
from ..counts import inside_backward
from ..frozen_weights import check_running
from ..interface import COMPUTE_DTYPES
from ..saved_weights import saved_by_name
from . import weights
from .recipes import FP8GlobalStateManager
from .region import ModelState, Region, remember_scales

DIRECTIONS = {"forward": "scaling_fwd", "backward": "scaling_bwd"}
"""Our names of the two halves of a delayed scaling state, and TransformerEngine's."""


class TEProducts(te.Linear):
    """`te.Linear` on the Parameters of the layer that it was, and correct where `te.Linear` is not: for any number of
    rows, outside of an FP8 region, and recomputed by plain `torch.utils.checkpoint`.

    Input: [..., in_features] in bf16, fp16 or fp32. Output: [..., out_features] in the autocast dtype if autocast is
    on, else in the input's dtype. In eval mode, unless the recipe says `use_autocast_during_eval`, it is `F.linear`.

    A recomputed layer uses the scales of its last training forward, and changes none. `torch.compile` leaves the FP8
    part of the layer out of its graphs: TransformerEngine's delayed scaling cannot be traced.
    """

    transposed_weight = False
    """Whether the Parameter holds the weight as [in, out] (`Conv1DForm`)."""

    # a checkpoint holds weight and bias; scales are in `Compute.scaling_state`
    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state

    @classmethod
    def around(cls, plain: nn.Module, in_features: int, out_features: int, state: ModelState) -> TEProducts:
        """A layer that holds the Parameter objects of `plain`."""
        layer = te.Linear(
            in_features, out_features, bias=plain.bias is not None, params_dtype=plain.weight.dtype, device="meta"
        )
        layer.__class__ = cls
        layer.__dict__.pop("bias", None)  # an empty tensor in a layer without one, where others expect None
        layer._parameters.update(weight=plain.weight, bias=plain.bias)
        layer.__dict__.update(_RUNTIME, te_state=state, **layer._fresh_meta())
        return layer

    def _get_weight_tensors(self) -> list[torch.Tensor]:
        """What TransformerEngine multiplies: `matrix`, or one of its own quantized tensors in the place of it."""
        weight = self.matrix
        if isinstance(weight, ScaledTensor):
            (quantizer,) = self._get_weight_quantizers()
            scaling, known = self.te_state.recipe.scaling, self.te_cast_weight
            cast = weights.for_te(self.weight, self.transposed_weight, quantizer, scaling, known)
            if not self.is_fsdp2:  # which gathers the next weight into the same memory
                self.te_cast_weight = cast
            weight = weights.differentiable(weight, cast)
        return [weight.detach() if self.te_state.plain_wgrad else weight]

    @property
    def matrix(self) -> torch.Tensor:
        """The weight as [out, in], on the memory of the Parameter."""
        if not self.transposed_weight:
            return self.weight
        return weights.transposed(self.weight) if weights.is_frozen(self.weight) else self.weight.t()

    # forward

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        device = input.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype
        in_fp8 = self.training or self.te_state.in_eval
        if not in_fp8 or dtype not in COMPUTE_DTYPES or not input.is_floating_point() or input.numel() == 0:
            return F.linear(input, weights.plain(self.matrix), self.bias)
        if input.shape[-1] != self.in_features:
            raise ValueError(
                f"an FP8 linear layer of {self.in_features} input features got an input of shape {tuple(input.shape)}; "
                f"its last dimension must be {self.in_features}"
            )
        return self._forward_in_fp8(input)

    @torch.compiler.disable
    def _forward_in_fp8(self, x: torch.Tensor, kind: type[nn.Module] = te.Linear) -> torch.Tensor:
        """The output, as TransformerEngine's class `kind` computes it of the rows of x."""
        matrix = x.reshape(-1, self.in_features)
        rows = matrix.shape[0]
        if padding := -rows % self.te_state.rows_multiple:
            matrix = self._padded(matrix, padding, kind)
        y = self._in_region(matrix, kind)
        # no view, as with `F.linear`: autograd refuses to change a view of a function with two outputs in place
        return torch.ops.aten._unsafe_view(y[:rows] if padding else y, (*x.shape[:-1], self.out_features))

    def _padded(self, matrix: torch.Tensor, rows: int, kind: type[nn.Module]) -> torch.Tensor:
        return F.pad(matrix, (0, 0, 0, rows))

    def _in_region(self, x: torch.Tensor, kind: type[nn.Module]) -> torch.Tensor:
        """The products, in the region of the root's forward, or in one of its own."""
        state = self.te_state
        if inside_backward():
            return self._recomputed(x, kind)
        if state.region is not None:
            return self._first_time(x, kind, state.region.records)
        with Region(state, records=self.training and torch.is_grad_enabled()) as region:
            y = self._first_time(x, kind, region.records)
            if region.records:
                remember_scales([self])
            return y

    def _first_time(self, x: torch.Tensor, kind: type[nn.Module], records: bool) -> torch.Tensor:
        self.ensure_state()
        self.te_recorded, self.te_had_gradients = records, torch.is_grad_enabled()
        with contextlib.nullcontext() if records else self._state_unchanged():
            return self._products(x, kind)

    def _recomputed(self, x: torch.Tensor, kind: type[nn.Module]) -> torch.Tensor:
        """The products of a recomputed forward, inside backward."""
        state = self.te_state
        unchanged = self._state_unchanged(self.te_used_scale if state.region is None else None)
        with Region(state, records=False), unchanged if self.te_recorded else contextlib.nullcontext():
            # the layer whose backward updates the scales was chosen in the first forward
            FP8GlobalStateManager.is_first_fp8_module()
            if not self.te_had_gradients and torch.is_grad_enabled() and self.te_used_scale is not None:
                state.update_after_backward(forward=not self.te_recorded)
            return self._products(x, kind)

    def _products(self, x: torch.Tensor, kind: type[nn.Module]) -> torch.Tensor:
        if self.te_state.recipe.fp8_params:
            check_running(self, weights.is_frozen(self.weight) and not self.is_fsdp2)
        watchers = self.te_state.watchers
        for watcher in watchers:
            watcher.enter(self)
        try:
            with saved_by_name(self.weight) if self.transposed_weight else contextlib.nullcontext():
                y = kind.forward(self, x)
        finally:
            for watcher in watchers:
                watcher.leave()
        for watcher in watchers:
            watcher.follow(self, y)
        return PlainWgrad.apply(y, x.detach(), self.matrix) if self.te_state.plain_wgrad else y

    # scaling state

    def ensure_state(self) -> None:
        """Make the layer's scaling state, inside a region, where TransformerEngine has not made it yet."""
        if "scaling_fwd" in self.fp8_meta or not self.te_state.te_recipe.delayed():
            return
        with torch.inference_mode(False):  # else training could never write to it
            self.init_fp8_metadata()
            FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(self.fp8_meta)
            if self.te_loaded is not None:
                self._copy_state(self.te_loaded)
                self.te_loaded = None
            self.te_used_scale = self.delayed_state("forward").scale.clone()

    def delayed_state(self, direction: str) -> Any:
        """TransformerEngine's recipe state of `forward` or `backward`, with `scale` [n] and `amax_history` [L, n]; None
        before the first forward."""
        return self.fp8_meta.get(DIRECTIONS[direction])

    @contextlib.contextmanager
    def _state_unchanged(self, scale: torch.Tensor | None = None) -> Iterator[None]:
        """Forget amaxes that are recorded inside. The forward scales are `scale` inside, if given."""
        if self.te_used_scale is None:
            yield
            return
        state = self.delayed_state("forward")
        with torch.no_grad():
            recorded, current = state.amax_history[0].clone(), state.scale.clone()
            if scale is not None:
                state.scale.copy_(scale)
        try:
            yield
        finally:
            with torch.no_grad():
                state.amax_history[0].copy_(recorded)
                state.scale.copy_(current)

    def scaling_state(self) -> dict[str, torch.Tensor]:
        """Copies of scales [n] and amax histories [L, n], FP32: n is 3 forward (input, weight, output) and 2 backward
        (output's gradient, input's gradient). Empty for a rule without state."""
        if not self.te_state.te_recipe.delayed():
            return {}
        if self.te_loaded is not None:
            return {name: tensor.clone() for name, tensor in self.te_loaded.items()}
        state, length = {}, self.te_state.recipe.amax_history_len
        for direction, size in (("forward", 3), ("backward", 2)):
            live = self.delayed_state(direction)
            scale = torch.ones(size) if live is None else live.scale.clone()
            history = torch.zeros(length, size) if live is None else live.amax_history.clone()
            state |= {f"{direction}_scale": scale, f"{direction}_amax_history": history}
        return state

    def load_scaling_state(self, state: dict[str, torch.Tensor]) -> None:
        """Take what `scaling_state` returned."""
        if not state:
            return
        if "scaling_fwd" in self.fp8_meta:
            self._copy_state(state)
        else:
            self.te_loaded = {name: tensor.clone() for name, tensor in state.items()}

    @torch.no_grad()
    def _copy_state(self, state: dict[str, torch.Tensor]) -> None:
        for direction in DIRECTIONS:
            live = self.delayed_state(direction)
            live.scale.copy_(state[f"{direction}_scale"])
            live.amax_history.copy_(state[f"{direction}_amax_history"])

    # what a module does beside computing

    @property
    def is_fsdp2(self) -> bool:
        """TransformerEngine's answer, under a name that goes when the layer is restored."""
        if self.te_fsdp2 is None:
            known = getattr(te.Linear, "is_fsdp2", None)  # from 2.10 on
            self.te_fsdp2 = known is not None and known.fget(self)
            self.__dict__.pop("_is_fsdp2", None)
        return self.te_fsdp2

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if weights.is_frozen(self.weight):
            destination[f"{prefix}weight"] = weights.plain(self.weight)

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        state_dict.pop(f"{prefix}_extra_state", None)  # in checkpoints of plain TransformerEngine modules
        frozen = weights.is_frozen(self.weight)
        super()._load_from_state_dict(state_dict, prefix, *args)
        if frozen and not weights.is_frozen(self.weight):  # `assign=True`, with a Parameter of its own
            self.weight = nn.Parameter(weights.quantized(self.weight, self), requires_grad=False)

    def _fresh_meta(self) -> dict[str, Any]:
        """TransformerEngine's own part of a layer that has not run, but for what its constructor was given."""
        recipe = {"recipe": self.fp8_meta["recipe"]} if "recipe" in self.fp8_meta else {}
        return {
            "fp8_meta": {**recipe, "fp8_checkpoint": False, "fp8_group": None},
            "quantizers": {key: type(quantizers)() for key, quantizers in self.quantizers.items()},
            "param_init_meta": {},
            "_fp8_workspaces": {},
            "fp8_initialized": False,
            "fp8_meta_tensors_initialized": False,
        }

    def __getstate__(self) -> dict[str, Any]:
        # a copy has a scaling state of its own, equal to this one; TransformerEngine registers each in a global table
        state = {**self.__dict__, **_RUNTIME, **self._fresh_meta()}
        state["te_loaded"] = self.scaling_state() or None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        weights.revive(self)

    @property
    def rule_in_words(self) -> str:
        """Such as `te:delayed i:E4M3,w:E4M3,go:E5M2`."""
        recipe, high = self.te_state.recipe, ",high:wgrad" if self.te_state.plain_wgrad else ""
        gradient = "E5M2" if recipe.fp8_format == "HYBRID" else "E4M3"
        return f"te:{recipe.scaling} i:E4M3,w:E4M3,go:{gradient}{high}"


class TELinear(TEProducts, nn.Linear):
    """`te.Linear` on the Parameters of the `nn.Linear` that it was."""

    reset_parameters = nn.Linear.reset_parameters

    def extra_repr(self) -> str:
        return f"{nn.Linear.extra_repr(self)}, {self.rule_in_words}"


class PlainWgrad(torch.autograd.Function):
    """The weight gradient in high precision: `override_linear_precision=(False, False, True)`.

    TransformerEngine had this until version 2.1. Here it gets the weight as one that needs no gradient, so it makes
    fprop, dgrad and the bias gradient, and keeps no codes of the input. This function returns y as it is. Its backward
    makes the gradient of `weight` [out, in] from the unquantized x [tokens, in] and dy [tokens, out], in the dtype of
    y, as TransformerEngine made it.
    """

    @staticmethod
    def forward(ctx, y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight_dtype, ctx.dtype = weight.dtype, y.dtype
        return y.view_as(y)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor | None]:
        (x,) = ctx.saved_tensors
        dw = torch.mm(dy.to(ctx.dtype).t(), x.to(ctx.dtype)).to(ctx.weight_dtype) if ctx.needs_input_grad[2] else None
        return dy, None, dw


_RUNTIME: dict[str, Any] = {
    "te_used_scale": None,  # the forward scales of the last training forward; None for rules without state
    "te_recorded": True,  # whether the last forward's amaxes count
    "te_had_gradients": True,  # whether it ran with gradients
    "te_loaded": None,  # a scaling state that waits for the first forward
    "te_fsdp2": None,
    "te_cast_weight": None,  # what is multiplied for a weight in scaled precision, until the optimizer's step
    # what TransformerEngine's forward would add to the layer
    "allow_different_data_and_param_types": False,
    "forwarded_at_least_once": False,
    "fp8_parameters": False,
    "debug_last_iteration": None,
    "debug_enabled_in_this_iteration": False,
    "_te_cached_parent_fsdp_state": None,
}
