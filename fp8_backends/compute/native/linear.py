"""`FP8Linear`, one layer of `native`, and the autograd function that makes its three products. `FP8Products` is what it
shares with `FP8Conv1D`."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

from ...numerics import gathered_codes
from ...numerics.block_codes import BlockCodes
from ...numerics.gathered_codes import GatheredCodes, WithoutTokens
from ...numerics.kernels.quantize.layouts import Layouts
from ...numerics.parameter_swap import belongings_kept
from ...numerics.scaled_tensor import ScaledTensor, quantize
from ...numerics.scaling import GRAD_OUTPUT, INPUT, WEIGHT, Quantized
from ...numerics.sharded_tensor import is_distributed
from ..conv1d import conv1d_form
from ..derivatives import refuse_second_derivative, refuse_transforms
from ..frozen_weights import check_running
from ..interface import COMPUTE_DTYPES
from ..layer_parts import note_whether_cut, refuse_cut_since
from ..products import plain_product, scaled_product, wgrad_dtype
from .layer_rule import LayerRule, Stored, known_amax, new_state, quantized, record
from .ledger import KeepsLedger, Ledger
from .shared_codes import SharedCodes
from .tensor_parallel import Cut, Operands, Split, arrived, gathered, local_operands, split_of

FPROP, DGRAD, WGRAD = range(3)
"""Elements of a rule's `high_precision`."""

FROZEN = (ScaledTensor, BlockCodes)
"""Types of frozen FP8 weights (`fp8_params`), whose codes products read as they lie. A ScaledTensor has E4M3 codes with
one scale, a power of two: FP32 and bf16 hold every value exactly, and a saved weight is loaded to the bit. BlockCodes
keep the codes of an FP8 checkpoint, with a scale for 128 x 128 values."""


def frozen(weight: torch.Tensor) -> ScaledTensor:
    """Quantize a weight to a frozen one of the same dtype."""
    return quantize(weight.detach(), torch.float8_e4m3fn, weight.dtype)


class FP8Products(KeepsLedger):
    """The FP8 products of a layer, mixed into the class that it was. Made by conversion, which keeps the Parameters of
    the layer it replaces.

    Input: [..., in_features] in bf16, fp16 or fp32. Output: [..., out_features] in the autocast dtype if autocast is
    on, else in the input's dtype. Products have the output's dtype, those of gradients too (`wgrad_dtype` names the
    exception). In eval mode the layer computes in high precision unless the recipe says `use_autocast_during_eval`.

    The weight may be a `ScaledTensor` with one scale: FP16 data is cast to FP8 from its exact values, E4M3 data is
    multiplied as it is. Its gradient is plain and of the dtype that the weight stands for.
    """

    transposed_weight = False
    """Whether the Parameter holds the weight as [in, out] (`Conv1DForm`)."""
    fp8_recomputed = False
    """Whether backward may run the last forward again."""

    @property
    def rule_in_words(self) -> str:
        return repr(self.fp8_rule)

    def set_rule(self, rule: LayerRule, shared: SharedCodes, history_len: int) -> None:
        """Attach a scaling rule with fresh state."""
        self.fp8_rule, self.fp8_shared, self.fp8_history_len = rule, shared, history_len
        self.fp8_out_dtype = torch.bfloat16
        self.fp8_cut: Cut | None = None
        """How the weight is cut over ranks, where it is: as it was found last."""
        note_whether_cut(self)
        self._reset_state(self.weight.device)

    def _reset_state(self, device: torch.device) -> None:
        self.fp8_ledger = Ledger(device)
        self.fp8_scaling = new_state(self.fp8_rule, self.fp8_history_len, device)

    def _apply(self, fn, recurse=True):
        with belongings_kept(self):
            return super()._apply(fn, recurse)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        device = input.device.type
        out_dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype
        in_fp8 = self.training or self.fp8_rule.fp8_in_eval
        if in_fp8 and input.numel() == 0 and isinstance(self.weight, GatheredCodes):
            return WithoutTokens.apply(input, self.out_features, out_dtype, self.weight, self.bias)
        if not in_fp8 or out_dtype not in COMPUTE_DTYPES or not input.is_floating_point() or input.numel() == 0:
            return super().forward(input)
        refuse_transforms()
        if self.fp8_rule.frozen_weight:
            check_running(self, isinstance(self.weight, FROZEN))
        refuse_cut_since(self, input)
        self._follow(self.weight.device)
        if not torch.compiler.is_compiling():
            self.fp8_out_dtype = out_dtype
        differentiable = torch.is_grad_enabled()
        operands = local_operands(self, input)
        x, weight, bias, cut = operands[:4]
        stored = Stored.of(weight)
        matrix = self._matrix(stored)
        in_features = matrix.data.shape[1]
        if x.shape[-1] != in_features:
            raise ValueError(
                f"an FP8 linear layer of {in_features} input features got an input of shape {tuple(x.shape)}; "
                f"its last dimension must be {in_features}"
            )
        state = self.fp8_scaling
        recorded = state if differentiable and self.training else None
        x8 = self._quantized_input(operands, differentiable and weight.requires_grad, recorded)
        w8 = self._quantized_weight(matrix, cut, differentiable and input.requires_grad, recorded)
        constants = self.fp8_ledger, state, self.fp8_rule, out_dtype, self.transposed_weight, cut
        noted = () if recorded is None else (x8.amax, None if self.fp8_rule.scaling == "window" else w8.amax)
        # before the product: checkpointing's second forward ends with the last tensor that it saves
        self.fp8_ledger.forward(self.fp8_rule, not self.fp8_rule.high_precision[FPROP], *noted)
        y = LinearFunction.apply(x, weight, bias, *constants, x8, w8, stored)
        return cut.wrapped(y, input, self.out_features) if is_distributed(input) else y

    def _matrix(self, stored: Stored) -> Stored:
        """The weight as [out, in]."""
        return stored.t() if self.transposed_weight else stored

    def _quantized_input(self, operands: Operands, for_wgrad: bool, recorded: torch.Tensor | None) -> Layouts:
        """x as [tokens, in], for fprop, and for wgrad where it will run. `recorded`: the state that keeps its amax."""
        rule, fmt, state = self.fp8_rule, self.fp8_rule.forward_format, self.fp8_scaling
        for_wgrad = for_wgrad and not rule.high_precision[WGRAD]
        newest, made, x, split = self.fp8_ledger.newest(rule, recorded, INPUT), [], operands.input, operands.input_split

        def make() -> Layouts:
            matrix = operands.values.detach().reshape(-1, x.shape[-1])
            columns = for_wgrad and not operands.is_gathered
            codes = quantized(matrix, fmt, rule, state, INPUT, columns=columns, record=newest, split=split)
            made.append(gathered(operands.origin, codes) if operands.is_gathered else codes)
            return made[0]

        x8 = self.fp8_shared.of_input(operands.origin, (rule.scaling, fmt, for_wgrad, split, operands.view), make)
        if newest is not None and not made:  # another layer's cast
            record(rule, recorded, INPUT, x8.amax)
        return x8

    def _quantized_weight(
        self, weight: Stored, cut: Cut | None, for_dgrad: bool, recorded: torch.Tensor | None
    ) -> Layouts:
        """w [out, in], for fprop, and for dgrad where it will run by the same codes; empty if they are stored.
        `recorded`: the state that keeps its amax."""
        rule, fmt, state = self.fp8_rule, self.fp8_rule.forward_format, self.fp8_scaling
        # codes that are kept serve all forwards to come
        for_dgrad = (for_dgrad or self.fp8_shared.keeps_weights) and not rule.high_precision[DGRAD]
        if weight.is_in(fmt):
            return self._gathered_weight(recorded) if isinstance(self.weight, GatheredCodes) else Layouts()
        if rule.scaling == "delayed":  # its scale moves with every forward
            return weight.quantized(fmt, rule, state, for_dgrad, self.fp8_ledger.newest(rule, recorded, WEIGHT))
        amax, split = known_amax(self.weight), split_of(cut, WEIGHT)
        return self.fp8_shared.of_weight(
            self, (rule, fmt), lambda: weight.quantized(fmt, rule, state, for_dgrad, amax=amax, split=split)
        )

    def _gathered_weight(self, recorded: torch.Tensor | None) -> Layouts:
        """No codes but those that are gathered. What a cast of the weight would have kept of it is kept."""
        self.fp8_recomputed = self.training and is_checkpointed()
        amax = self.weight.parts.get(gathered_codes.AMAX)
        if self.fp8_ledger.newest(self.fp8_rule, recorded, WEIGHT) is not None:
            record(self.fp8_rule, recorded, WEIGHT, amax)
        return Layouts(amax=amax)

    @torch.no_grad()
    def weight_codes(self) -> Quantized | None:
        """The codes [out, in] that forward multiplies by now; None where the recipe keeps it in high precision, or the
        weight is sharded."""
        rule, weight = self.fp8_rule, self.weight
        if rule.high_precision[FPROP] or is_distributed(weight) or isinstance(weight, GatheredCodes):
            return None
        stored = self._matrix(Stored.of(weight))
        if stored.is_in(rule.forward_format):
            return Quantized(*stored)
        return stored.quantized(rule.forward_format, rule, self.fp8_scaling, columns=False).along_columns()

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.fp8_rule.frozen_weight and isinstance(self.weight, FROZEN):
            destination[f"{prefix}weight"] = values = self.weight.exact()
            self.weight.state_dict_copies.add(values, f"{prefix}weight")

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        if self.fp8_rule.frozen_weight and not isinstance(self.weight, FROZEN):  # `assign=True`: another Parameter
            self.weight = nn.Parameter(frozen(self.weight), requires_grad=False)


class FP8Linear(FP8Products, nn.Linear):
    """`nn.Linear` whose products run in FP8."""

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.fp8_rule!r}"


def __getattr__(name: str) -> Any:
    """Make `FP8Conv1D` at its first use, which may unpickle it: it imports transformers."""
    if name == "FP8Conv1D":
        return conv1d_form(FP8Products, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class LinearFunction(torch.autograd.Function):
    """y = x @ w.T + b. The operands come quantized; x and w themselves only carry the gradients, unless the recipe
    keeps a product in high precision, or the rule quantizes the weight again.

    x8 and w8 are `Layouts` of x and of w, and `stored` is the Parameter as it lies in memory. A weight that is stored
    in FP8 comes without other codes. `transposed`: the Parameter holds w.T. `cut`: x and w are parts that one rank
    of several has, and y may be a partial sum.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, ledger, state, rule, out_dtype, transposed, cut, x8, w8, stored):
        matrix = stored.t() if transposed else stored
        if rule.high_precision[FPROP]:
            y = plain_product(x.reshape(-1, x.shape[-1]).to(out_dtype), matrix.values(out_dtype))
        else:
            y = _fprop(rule, x8.along_columns(), w8.along_columns(), matrix, out_dtype)
        if bias is not None:
            bias = bias.to(out_dtype)  # also where it is not added: all ranks sum its gradient alike
        if bias is not None and (cut is None or cut.adds_bias):
            y = y.add_(bias) if y.is_contiguous() else y + bias  # of a padded product, whose rows have gaps

        saved_for_wgrad = saved_for_dgrad = ()
        if ctx.needs_input_grad[1]:
            saved_for_wgrad = (x, None) if rule.high_precision[WGRAD] else x8.along_rows()
        if ctx.needs_input_grad[0]:
            gathered = isinstance(weight, GatheredCodes)
            if gathered or rule.dgrad_reads_weight:
                # a plain weight as the Parameter, not as its data: DeepSpeed's ZeRO-3 takes the gathered data out of it
                # after forward and puts new data in for backward, which frees nothing while someone holds the old
                is_anew = gathered or stored.scale_inv is None
                saved_for_dgrad = Stored(weight, None) if is_anew else stored
            else:
                saved_for_dgrad = (Layouts(*matrix) if w8.codes is None else w8).along_rows()
        ctx.save_for_backward(*saved_for_wgrad, *saved_for_dgrad)
        ctx.ledger, ctx.state, ctx.rule, ctx.out_dtype, ctx.transposed = ledger, state, rule, out_dtype, transposed
        ctx.cut, ctx.x_shape, ctx.x_dtype, ctx.weight_dtype = cut, x.shape, x.dtype, weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        # no view, as with `F.linear`: FSDP2 warns of an output that is one, since changing it in place loses its hooks
        return torch.ops.aten._unsafe_view.default(y, (*x.shape[:-1], y.shape[-1]))

    @staticmethod
    def backward(ctx, dy):
        refuse_second_derivative()
        rule, saved = ctx.rule, ctx.saved_tensors
        needs_dgrad, needs_wgrad, needs_bias = ctx.needs_input_grad[:3]
        dy = arrived(dy).detach().reshape(-1, dy.shape[-1])
        dx = dw = db = dy8 = None
        fp8_dgrad = needs_dgrad and not rule.high_precision[DGRAD]
        fp8_wgrad = needs_wgrad and not rule.high_precision[WGRAD]
        if fp8_dgrad or fp8_wgrad:
            newest = ctx.ledger.newest(rule, ctx.state, GRAD_OUTPUT)
            split = split_of(ctx.cut, GRAD_OUTPUT)
            layouts = fp8_dgrad, fp8_wgrad
            dy8 = quantized(dy, rule.gradient_format, rule, ctx.state, GRAD_OUTPUT, *layouts, newest, split)
            ctx.ledger.backward(rule, fp8_dgrad, fp8_wgrad, None if ctx.state is None else dy8.amax)
        if needs_dgrad:
            weight = _weight_for_dgrad(rule, *saved[-2:], ctx.transposed)
            dx = _dgrad(rule, dy, dy8, weight, ctx.out_dtype, split_of(ctx.cut, WEIGHT))
            dx = dx.to(ctx.x_dtype).reshape(ctx.x_shape)
        if needs_wgrad:
            dw_dtype = wgrad_dtype(rule.along is not None, dy.device, ctx.weight_dtype, ctx.out_dtype)
            dw = _wgrad(rule, dy, dy8, *saved[:2], dw_dtype).to(ctx.weight_dtype)
            dw = dw.t() if ctx.transposed else dw
        if needs_bias:
            db = dy.sum(0, dtype=ctx.bias_dtype)  # of the unquantized gradient
        return dx, dw, db, *(None,) * 9


def _weight_for_dgrad(rule, weight, scale_inv, transposed) -> Stored:
    """What was saved for dgrad, as `_dgrad` takes it."""
    if isinstance(weight, GatheredCodes):
        stored = Stored.of(weight, gathered_codes.DGRAD)
        return stored.t() if transposed == rule.dgrad_reads_weight else stored
    stored = Stored(weight, scale_inv)
    return stored.t() if transposed and rule.dgrad_reads_weight else stored


def is_checkpointed() -> bool:
    """Whether a forward that runs now may be run again by backward. A checkpoint with `use_reentrant` looks like any
    other forward without gradients."""
    if torch.compiler.is_compiling():
        return False
    if not torch.is_grad_enabled():
        return True
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    code = None if hooks is None else getattr(hooks[0], "__code__", None)
    return code is not None and code.co_filename == torch.utils.checkpoint.__file__


def _fprop(rule, x8, w8, stored, out_dtype) -> torch.Tensor:
    """y [tokens, out] from x [tokens, in] and w [out, in]; w8 is empty for a weight that is stored in FP8."""
    if rule.along is None:
        w8 = Quantized(*stored) if w8.codes is None else w8
        return scaled_product(x8, w8, out_dtype, fast_accumulation=True)
    if w8.codes is None:
        w8 = stored.in_blocks(rule.along.weight_blocks, rule.forward_format)
    return rule.along.product(x8, w8, rule.along.weight_blocks, out_dtype, fast_accumulation=True)


def _dgrad(rule, dy, dy8, weight: Stored, out_dtype, split: Split | None) -> torch.Tensor:
    """dx [tokens, in] from dy [tokens, out]; `weight` is w [out, in] as stored, or codes of w.T with one scale.
    `split`: how w is cut."""
    if rule.high_precision[DGRAD]:
        return plain_product(dy.to(out_dtype), weight.values(out_dtype).t())
    if rule.along is None:
        return scaled_product(dy8.along_columns(), Quantized(*weight), out_dtype)
    w8 = weight.in_blocks(rule.along.weight_blocks, rule.forward_format, transposed=True, split=split)
    return rule.along.product(dy8.along_columns(), w8, rule.along.weight_blocks, out_dtype)


def _wgrad(rule, dy, dy8, x, x_scale, out_dtype) -> torch.Tensor:
    """dw [out, in] from dy [tokens, out] and x; `x` is x itself, or codes of x.T."""
    if rule.high_precision[WGRAD]:
        return plain_product(dy.to(out_dtype).t(), x.reshape(-1, x.shape[-1]).to(out_dtype).t())
    if rule.along is None:
        return scaled_product(dy8.along_rows(), Quantized(x, x_scale), out_dtype)
    return rule.along.product(dy8.along_rows(), Quantized(x, x_scale), rule.along.blocks, out_dtype)
