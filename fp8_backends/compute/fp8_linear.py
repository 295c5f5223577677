"""`FP8Linear`: one layer of the native compute, and the autograd function behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ..formats import Format, saturating_cast
from ..parameter_exchange import belongings_kept
from ..scaled_tensor import ScaledTensor
from ..scaling import (
    GRAD_OUTPUT,
    INPUT,
    MX,
    ROWS,
    SQUARES,
    VECTORS,
    WEIGHT,
    Blocks,
    Quantized,
    delayed_scale,
    new_delayed_state,
    new_window_state,
    power_of_two_scale,
    quantize_with,
    record_amax,
    record_window_amax,
    scale_from_amax,
    scale_inv_of,
    tensor_amax,
    window_scale,
    without_nan,
)
from . import COMPUTE_DTYPES, native_params
from .block_products import block_scaled_product
from .products import scaled_product

FPROP, DGRAD, WGRAD, RECOMPUTED = range(4)
"""Elements of the counter `fp8_products`."""

STATEFUL = ("delayed", "window")
"""Scaling rules with state from step to step."""


class AlongContraction(NamedTuple):
    """A rule whose scales lie along the contraction, so that each product needs codes of its own."""

    blocks: Blocks
    """Of activations and gradients."""
    weight_blocks: Blocks

    def product(
        self, a: Quantized, b: Quantized, b_blocks: Blocks, out_dtype: torch.dtype, fast_accumulation: bool = False
    ) -> torch.Tensor:
        """a [m, k] @ b [n, k].T of codes that were made in `blocks` and in `b_blocks`. [m, n] of out_dtype."""
        if self.blocks is ROWS:
            return scaled_product(a, b, out_dtype, fast_accumulation)
        return block_scaled_product(a, self.blocks, b, b_blocks, out_dtype)  # never faster at the cost of bits


ALONG_CONTRACTION = {
    "rowwise": AlongContraction(ROWS, ROWS),
    "blockwise": AlongContraction(VECTORS, SQUARES),
    "mxfp8": AlongContraction(MX, MX),
}
"""All other rules have one scale for a tensor, and one cast of it serves both its products."""


class LayerRule(NamedTuple):
    """How the layers of one prepared model run. Plain values, so that `torch.compile` takes them as constants."""

    scaling: str
    forward_format: Format
    gradient_format: Format
    high_precision: tuple[bool, bool, bool]
    """fprop, dgrad, wgrad kept in high precision (`override_linear_precision`)."""
    fp8_in_eval: bool
    keeps_weight: bool = False
    """The weight does not train, and lies in FP8 (`fp8_params`)."""

    @property
    def along(self) -> AlongContraction | None:
        """How the operands are cut into blocks; None: one scale for a tensor."""
        return ALONG_CONTRACTION.get(self.scaling)

    def __repr__(self) -> str:
        i, go = self.forward_format.name, self.gradient_format.name
        kept = [kind for kind, high in zip(("fprop", "dgrad", "wgrad"), self.high_precision, strict=True) if high]
        stored = " stored" if self.keeps_weight else ""
        return f"native:{self.scaling} i:{i},w:{i}{stored},go:{go}" + (f",high:{'+'.join(kept)}" if kept else "")


class SharedInputs:
    """The codes of an activation that several layers read, held for as long as the activation itself lives.

    Only tensors that autograd made are shared: a leaf, such as a batch that lies in a numpy array or in a CUDA
    graph's static input, can change without a trace.
    """

    def __init__(self) -> None:
        self._made: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def get(self, x: torch.Tensor, key: tuple, quantize: Callable):
        """quantize(), or what an earlier layer got from it for this very tensor under the same key."""
        if torch.compiler.is_compiling() or x.grad_fn is None:
            return quantize()  # a compiler finds equal casts by itself
        version, made = self._made.get(x, (None, None))
        if version != x._version:
            made = {}
            self._made[x] = (x._version, made)
        if key not in made:
            made[key] = quantize()
        return made[key]

    def __deepcopy__(self, memo) -> SharedInputs:
        return SharedInputs()

    def __reduce__(self):
        return SharedInputs, ()


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

    def set_rule(self, rule: LayerRule, shared: SharedInputs, history_len: int) -> None:
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
        keep_input, record = differentiable and weight.requires_grad, differentiable and self.training
        with torch.no_grad():
            x8, xt8, w8 = self._quantize(x, stored, keep_input, record)
        return _LinearFunction.apply(
            x, weight, self.bias, *x8, *xt8, *w8, *stored, self.fp8_products, self._state, self.fp8_rule, out_dtype
        )

    def _quantize(
        self, x: torch.Tensor, weight: Stored, keep_input: bool, record: bool
    ) -> tuple[Quantized, Quantized, Quantized]:
        """x8 for fprop, x8 for wgrad where that is another copy, w8 where it is made. Codes of x: [tokens, in], or
        [in, tokens]."""
        rule, fmt, shared = self.fp8_rule, self.fp8_rule.forward_format, self.fp8_shared
        matrix = x.detach().reshape(-1, self.in_features)
        if rule.along is not None:
            blocks, xt8 = rule.along.blocks, _NOTHING
            x8 = shared.get(x, ("rows", fmt), lambda: blocks.quantize(matrix, fmt))
            if keep_input and not rule.high_precision[WGRAD]:
                xt8 = shared.get(x, ("columns", fmt), lambda: blocks.quantize(matrix.t(), fmt))
            return x8, xt8, _NOTHING if weight.is_in(fmt) else weight.in_blocks(rule.along.weight_blocks, fmt)
        state = self._state
        x8, x_amax = shared.get(x, (rule.scaling, fmt), lambda: _quantize_tensor(matrix, fmt, rule, state, INPUT))
        if state is not None and record:
            _record(rule, state, INPUT, x_amax)
        if weight.is_in(fmt):
            return x8, _NOTHING, _NOTHING
        w8, w_amax = weight.quantized(fmt, rule, state)
        if state is not None and record:
            _record(rule, state, WEIGHT, w_amax)
        return x8, _NOTHING, w8

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.fp8_rule.keeps_weight and native_params.is_kept(self.weight):
            destination[f"{prefix}weight"] = self.weight.dequantize().detach()

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        if self.fp8_rule.keeps_weight and not native_params.is_kept(self.weight):  # `assign=True`: another Parameter
            self.weight = nn.Parameter(native_params.quantised(self.weight), requires_grad=False)

    @property
    def _state(self) -> torch.Tensor | None:
        return self.fp8_scaling if self.fp8_rule.scaling in STATEFUL else None

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.fp8_rule!r}"


_NOTHING = (None, None)


def _quantize_tensor(matrix, fmt, rule, state, tensor) -> tuple[Quantized, torch.Tensor]:
    """One scale for the whole matrix, by the rule, and its amax."""
    amax = _amax(rule, matrix)
    return quantize_with(matrix, _scale(rule, state, tensor, amax, fmt), amax, fmt), amax


def _amax(rule: LayerRule, matrix: torch.Tensor) -> torch.Tensor:
    """NaN counts for the window rule, whose history starts anew then."""
    return tensor_amax(matrix if rule.scaling == "window" else without_nan(matrix))


def _scale(rule: LayerRule, state: torch.Tensor | None, tensor: int, amax: torch.Tensor, fmt: Format) -> torch.Tensor:
    """The scale of a rule with one scale for a tensor. FP32, 0-dimensional."""
    if rule.scaling == "delayed":
        return delayed_scale(state, tensor)
    if rule.scaling == "dynamic":
        return scale_from_amax(amax, fmt)
    # MS-AMP takes a weight's amax at the optimizer step: the same number
    return power_of_two_scale(amax, fmt) if tensor == WEIGHT else window_scale(state, tensor, amax, fmt)


def _record(rule: LayerRule, state: torch.Tensor, tensor: int, amax: torch.Tensor) -> None:
    """Keep the amax of this step in the state of the rule, where it has a use for it."""
    if rule.scaling == "delayed":
        record_amax(state, tensor, amax)
    elif tensor != WEIGHT:
        record_window_amax(state, tensor, amax)


class Stored(NamedTuple):
    """A weight [out, in] as it lies in memory: `data * scale_inv`, without a graph. What backward keeps of it is no
    copy."""

    data: torch.Tensor
    """FP32, bf16 or fp16; of a `ScaledTensor` FP16 or FP8."""
    scale_inv: torch.Tensor | None
    """FP32, 0-dimensional; None: the data are the values."""

    @classmethod
    def of(cls, weight: torch.Tensor) -> Stored:
        if not isinstance(weight, ScaledTensor):
            return cls(weight.detach(), None)
        assert not weight.block_size, "a weight has one scale"
        return cls(weight._data, weight._scale_inv)

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        return self.data.to(dtype) if self.scale_inv is None else (self.data.float() * self.scale_inv).to(dtype)

    def is_in(self, fmt: Format) -> bool:
        """Whether these are FP8 codes already, which are multiplied as they are."""
        return self.data.dtype == fmt.dtype

    def quantized(self, fmt: Format, rule: LayerRule, state: torch.Tensor | None) -> tuple[Quantized, torch.Tensor]:
        """With one scale, by the rule; and the amax."""
        amax = self._scaled(_amax(rule, self.data))
        scale = _scale(rule, state, WEIGHT, amax, fmt)
        codes = saturating_cast(self.data.float() * self._scaled(scale), fmt)
        return Quantized(codes, scale_inv_of(scale, amax)), amax

    def in_blocks(self, blocks: Blocks, fmt: Format) -> Quantized:
        """With a scale for each block of `data`. FP8 codes keep the scale that they are stored with, in every block."""
        if self.is_in(fmt):
            codes = self.data.contiguous()  # of w.T, no longer row-major
            return Quantized(codes, blocks.repeated(self.scale_inv, codes.shape))
        amax = self._scaled(blocks.amax(self.data))
        scale = blocks.scale(amax, fmt)
        return Quantized(blocks.cast(self.data, self._scaled(scale), fmt), blocks.inverse(scale, amax))

    def t(self) -> Stored:
        return Stored(self.data.t(), self.scale_inv)

    def _scaled(self, number: torch.Tensor) -> torch.Tensor:
        """An amax of the data as one of the values; a scale of the values as the factor of the data, exact since the
        stored scale is a power of two: no copy of the values is made."""
        return number if self.scale_inv is None else number * self.scale_inv


def _transposed(q: Quantized) -> Quantized:
    """The same codes as the operand of a product that contracts the other dimension. For one scale per tensor."""
    return Quantized(q.codes.t().contiguous(), q.scale_inv)


class _LinearFunction(torch.autograd.Function):
    """y = x @ w.T + b. The operands come quantised; x and w themselves only carry the gradients, unless the recipe
    keeps a product in high precision, or the rule quantises the weight again. A weight that is stored in FP8 comes
    without other codes (`torch.compile` takes no tensor twice)."""

    @staticmethod
    def forward(
        ctx, x, weight, bias, x8, x_scale, xt8, xt_scale, w8, w_scale, w_data, w_inv, counts, state, rule, out_dtype
    ):
        stored = Stored(w_data, w_inv)
        if rule.high_precision[FPROP]:
            y = _plain_product(x.reshape(-1, x.shape[-1]), stored.values(out_dtype), out_dtype)
        else:
            y = _fprop(rule, Quantized(x8, x_scale), Quantized(w8, w_scale), stored, out_dtype)
            counts.select(0, RECOMPUTED if inside_backward() else FPROP).add_(1)
        if bias is not None:
            y = y + bias.to(out_dtype)

        saved_for_wgrad = saved_for_dgrad = ()
        if ctx.needs_input_grad[1]:
            if rule.high_precision[WGRAD]:
                saved_for_wgrad = (x, None)
            else:
                saved_for_wgrad = (x8, x_scale) if rule.along is None else (xt8, xt_scale)
        if ctx.needs_input_grad[0]:
            quantise_again = rule.high_precision[DGRAD] or rule.along is not None
            saved_for_dgrad = _kept(weight, stored) if quantise_again or w8 is None else (w8, w_scale)
        ctx.save_for_backward(*saved_for_wgrad, *saved_for_dgrad)
        ctx.counts, ctx.state, ctx.rule, ctx.out_dtype = counts, state, rule, out_dtype
        ctx.x_shape, ctx.x_dtype, ctx.weight_dtype = x.shape, x.dtype, weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        # no view, as with `F.linear`: FSDP2 warns of an output that is one, since changing it in place loses its hooks
        return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], weight.shape[0]))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        rule, saved = ctx.rule, ctx.saved_tensors
        needs_dgrad, needs_wgrad, needs_bias = ctx.needs_input_grad[:3]
        dy = dy.reshape(-1, dy.shape[-1])
        dx = dw = db = dy8 = None
        fp8_dgrad = needs_dgrad and not rule.high_precision[DGRAD]
        fp8_wgrad = needs_wgrad and not rule.high_precision[WGRAD]
        if rule.along is None and (fp8_dgrad or fp8_wgrad):
            dy8, amax = _quantize_tensor(dy, rule.gradient_format, rule, ctx.state, GRAD_OUTPUT)
            if ctx.state is not None:
                _record(rule, ctx.state, GRAD_OUTPUT, amax)
        if needs_dgrad:
            dx = _dgrad(rule, dy, dy8, *saved[-2:], ctx.out_dtype).to(ctx.x_dtype).reshape(ctx.x_shape)
        if needs_wgrad:
            dw = _wgrad(rule, dy, dy8, *saved[:2], ctx.out_dtype).to(ctx.weight_dtype)
        if needs_bias:
            db = dy.sum(0, dtype=ctx.bias_dtype)  # of the unquantised gradient
        if fp8_dgrad:
            ctx.counts.select(0, DGRAD).add_(1)
        if fp8_wgrad:
            ctx.counts.select(0, WGRAD).add_(1)
        return dx, dw, db, *(None,) * 12


def _kept(weight: torch.Tensor, stored: Stored) -> Stored:
    """A weight as backward shall find it. A plain one is kept as the Parameter, not as its data: DeepSpeed's ZeRO-3
    takes the gathered data out of it after forward and puts new data in for backward, which frees nothing while
    someone holds the old."""
    return Stored(weight, None) if stored.scale_inv is None else stored


def _fprop(rule, x8, w8, stored, out_dtype) -> torch.Tensor:
    """y [tokens, out] from x [tokens, in] and w [out, in]; w8 is empty for a weight that is stored in FP8."""
    if rule.along is None:
        w8 = Quantized(*stored) if w8.codes is None else w8
        return scaled_product(x8, w8, out_dtype, fast_accumulation=True)
    if w8.codes is None:
        w8 = stored.in_blocks(rule.along.weight_blocks, rule.forward_format)
    return rule.along.product(x8, w8, rule.along.weight_blocks, out_dtype, fast_accumulation=True)


def _dgrad(rule, dy, dy8, weight, weight_scale, out_dtype) -> torch.Tensor:
    """dx [tokens, in] from dy [tokens, out] and w [out, in]; `weight` is w as stored, or its codes with one scale."""
    if rule.high_precision[DGRAD]:
        return _plain_product(dy, Stored(weight, weight_scale).values(out_dtype).t(), out_dtype)
    if rule.along is None:
        return scaled_product(dy8, _transposed(Quantized(weight, weight_scale)), out_dtype)
    blocks, weight_blocks = rule.along
    w8 = Stored(weight, weight_scale).t().in_blocks(weight_blocks, rule.forward_format)
    return rule.along.product(blocks.quantize(dy, rule.gradient_format), w8, weight_blocks, out_dtype)


def _wgrad(rule, dy, dy8, x, x_scale, out_dtype) -> torch.Tensor:
    """dw [out, in] from dy [tokens, out] and x; `x` is x itself, its codes, or with blocks the codes of x.T."""
    if rule.high_precision[WGRAD]:
        return _plain_product(dy.t(), x.reshape(-1, x.shape[-1]).t(), out_dtype)
    if rule.along is None:
        return scaled_product(_transposed(dy8), _transposed(Quantized(x, x_scale)), out_dtype)
    blocks = rule.along.blocks
    dyt8 = blocks.quantize(dy.t(), rule.gradient_format)
    return rule.along.product(dyt8, Quantized(x, x_scale), blocks, out_dtype)


def _plain_product(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """a [m, k] @ b [n, k].T in the output's dtype."""
    return torch.mm(a.to(out_dtype), b.to(out_dtype).t())


def inside_backward() -> bool:
    """Whether this forward is a recomputation: activation checkpointing runs it inside a backward pass.

    Compiled code counts each forward once, also where its partitioner recomputes.
    """
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
