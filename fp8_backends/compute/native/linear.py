"""`FP8Linear`: one layer of the native compute."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ...numerics.kernels.quantize.layouts import Layouts
from ...numerics.parameter_swap import belongings_kept
from ...numerics.scaling import INPUT, WEIGHT, new_delayed_state, new_window_state
from ..interface import COMPUTE_DTYPES
from . import frozen as native_params
from .layer_rule import STATEFUL, LayerRule, Stored, quantized, record
from .linear_function import DGRAD, WGRAD, LinearFunction
from .shared_codes import SharedCodes


class FP8Linear(nn.Linear):
    """`nn.Linear` whose products run in FP8. Made by conversion, which keeps the Parameters of the layer it replaces.

    Input: [..., in_features] in bf16, fp16 or fp32. Output: [..., out_features] in the autocast dtype if autocast is
    on, else in the input's dtype. Products have the output's dtype, gradients too, as in TransformerEngine. In eval
    mode the layer computes in high precision unless the recipe says `use_autocast_during_eval`.

    The weight may be a `ScaledTensor` with one scale: FP16 data is cast to FP8 from its exact values, E4M3 data is
    multiplied as it is. Its gradient is plain and of the dtype that the weight stands for.

    Buffers, all integers (wrappers cast floating-point buffers) and none in the state dict: `fp8_products`, int64
    [4], counts fprop, dgrad, wgrad and recomputed fprop; `fp8_scaling`, the delayed or the window rule's state.
    """

    def set_rule(self, rule: LayerRule, shared: SharedCodes, history_len: int) -> None:
        """Attach a scaling rule with fresh state."""
        self.fp8_rule, self.fp8_shared, self.fp8_history_len = rule, shared, history_len
        self.fp8_out_dtype = torch.bfloat16
        self._reset_state(self.weight.device)

    def _reset_state(self, device: torch.device) -> None:
        self.register_buffer("fp8_products", torch.zeros(4, dtype=torch.int64, device=device), persistent=False)
        if self.fp8_rule.scaling in STATEFUL:
            delayed = self.fp8_rule.scaling == "delayed"
            state = new_delayed_state(self.fp8_history_len, device) if delayed else new_window_state(device)
            self.register_buffer("fp8_scaling", state, persistent=False)

    def _apply(self, fn, recurse=True):
        was_meta = self.fp8_products.is_meta
        with belongings_kept(self):
            super()._apply(fn, recurse)
        if was_meta and not self.fp8_products.is_meta:
            self._reset_state(self.fp8_products.device)  # `to_empty` leaves random bits
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        device = x.device.type
        out_dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        in_fp8 = self.training or self.fp8_rule.fp8_in_eval
        if not in_fp8 or out_dtype not in COMPUTE_DTYPES or not x.is_floating_point() or x.numel() == 0:
            return F.linear(x, self.weight, self.bias)
        if x.shape[-1] != self.in_features:
            raise ValueError(
                f"an FP8 linear layer of {self.in_features} input features got an input of shape {tuple(x.shape)}; "
                f"its last dimension must be {self.in_features}"
            )
        if self.fp8_rule.keeps_weight:
            native_params.check_kept(self)
        if self.fp8_products.device != self.weight.device:
            self._reset_state(self.weight.device)  # real weights were assigned into a model prepared on meta
        if not torch.compiler.is_compiling():
            self.fp8_out_dtype = out_dtype
        weight, differentiable = self.weight, torch.is_grad_enabled()
        stored = Stored.of(weight)
        with torch.no_grad():
            x8 = self._quantized_input(x, differentiable and weight.requires_grad)
            w8 = self._quantized_weight(stored, differentiable and x.requires_grad)
            if self._state is not None and differentiable and self.training:
                self._record(INPUT, x8)
                self._record(WEIGHT, w8)
        return LinearFunction.apply(
            x, weight, self.bias, self.fp8_products, self._state, self.fp8_rule, out_dtype, *x8[:4], *w8[:4], *stored
        )

    def _quantized_input(self, x: torch.Tensor, for_wgrad: bool) -> Layouts:
        """x as [tokens, in], for fprop, and for wgrad where it will run."""
        rule, fmt, state = self.fp8_rule, self.fp8_rule.forward_format, self._state
        for_wgrad = for_wgrad and not rule.high_precision[WGRAD]
        matrix = x.detach().reshape(-1, self.in_features)
        key = (rule.scaling, fmt, for_wgrad)
        return self.fp8_shared.of_input(x, key, lambda: quantized(matrix, fmt, rule, state, INPUT, columns=for_wgrad))

    def _quantized_weight(self, weight: Stored, for_dgrad: bool) -> Layouts:
        """w [out, in], for fprop, and for dgrad where it will run by the same codes; empty if they are stored."""
        rule, fmt, state = self.fp8_rule, self.fp8_rule.forward_format, self._state
        # what is kept serves all forwards to come
        for_dgrad = (for_dgrad or self.fp8_shared.keeps_weights) and not rule.high_precision[DGRAD]
        if weight.is_in(fmt):
            return Layouts()
        if rule.scaling == "delayed":
            return weight.quantized(fmt, rule, state, for_dgrad)  # its scale moves with every forward
        return self.fp8_shared.of_weight(self, (rule, fmt), lambda: weight.quantized(fmt, rule, state, for_dgrad))

    def _record(self, tensor: int, made: Layouts) -> None:
        if made.amax is not None:
            record(self.fp8_rule, self._state, tensor, made.amax)

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.fp8_rule.keeps_weight and native_params.is_kept(self.weight):
            destination[f"{prefix}weight"] = self.weight.dequantize().detach()

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        if self.fp8_rule.keeps_weight and not native_params.is_kept(self.weight):  # `assign=True`: another Parameter
            self.weight = nn.Parameter(native_params.quantized(self.weight), requires_grad=False)

    @property
    def _state(self) -> torch.Tensor | None:
        return self.fp8_scaling if self.fp8_rule.scaling in STATEFUL else None

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.fp8_rule!r}"
