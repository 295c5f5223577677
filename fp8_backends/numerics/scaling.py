"""How a scale is chosen.

A scale `s` (FP32) maps a tensor into the range of an FP8 format: `codes = saturate(round(x * s))`, and
`x ≈ codes * scale_inv` with `scale_inv = 1 / s`.

=========  =============================================================  ==============  =====
rule       scale                                                          one scale per   state
=========  =============================================================  ==============  =====
dynamic    from the tensor's own amax (TransformerEngine: current)        tensor          none
delayed    from the amaxes of earlier steps (TransformerEngine: delayed)  tensor          yes
rowwise    from each row's own amax                                       row             none
blockwise  a power of two, from each block's own amax                     1 x 128 values  none
           (TransformerEngine: Float8BlockScaling)                        (w: 128 x 128)
mxfp8      a power of two in eight bits, from each block's own amax       1 x 32 values   none
           (TransformerEngine: MXFP8BlockScaling; OCP Microscaling)
window     a power of two, from the tensor's own amax for 16 steps, then  tensor          yes
           from the largest amax of the last 16 steps (MS-AMP)
=========  =============================================================  ==============  =====

Codes, scales and histories of TransformerEngine's rules are its own to the bit, with one difference. A tensor, row or
block that holds an inf gets the scale_inv NaN, where TransformerEngine stores the finite number (`scale_inv_of` says
why); the codes are the same. A block of mxfp8 keeps TransformerEngine's number, 2**127: with it, products with all but
small values (below 1/224 for E4M3) overflow to inf, which shows as well.
(Compiled for a GPU, a scale that is a quotient may differ in its last bit, since Inductor's division does, unless
`torch._inductor.config.eager_numerics.division_rounding` is set. Powers of two are made of bits, and exact.)

The state of one layer is an int32 tensor that holds FP32 bits: wrappers such as FSDP1's `buffer_dtype` or DeepSpeed's
bf16 engine cast every floating-point buffer of a module, and a scale in bf16 is a wrong scale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .faults import AMAX, COUNT, NOT_NEGATIVE, POSITIVE, check_values
from .formats import FP32, Format, saturating_cast

INPUT, WEIGHT, GRAD_OUTPUT = 0, 1, 2
"""Rows of a state, one for each tensor of the layer."""
SCALE, ROLLS, HISTORY = 0, 1, 2
"""Columns of a state: the scale, how often it rolled (an integer), and where the amax history begins."""

WINDOW = 16
"""Optimizer steps that the `window` rule looks back, and for which it first takes each tensor's own amax."""


class Quantized(NamedTuple):
    """FP8 codes and what turns them back: `codes * scale_inv`."""

    codes: torch.Tensor
    """FP8, [rows, columns], row-major."""
    scale_inv: torch.Tensor
    """FP32, 0-dimensional (one scale) or [rows of blocks, blocks in a row]; the blocks of mxfp8 have uint8, the bits of
    E8M0. NaN where there was an inf (mxfp8: 2**127)."""


def tensor_amax(x: torch.Tensor) -> torch.Tensor:
    """max |x| over all elements, FP32, 0-dimensional. NaN when x has one."""
    low, high = torch.aminmax(x)
    return torch.maximum(-low, high).float()


def without_nan(x: torch.Tensor) -> torch.Tensor:
    """x with zeros for NaN. TransformerEngine's amax leaves NaN out; it has a code of its own, which shows it."""
    if torch.compiler.is_compiling():  # one pass there, and `nan_to_num` compares with both infinities, too
        return torch.where(x == x, x, torch.zeros_like(x))
    return torch.nan_to_num(x, nan=0.0, posinf=float("inf"), neginf=float("-inf"))


def scale_from_amax(amax: torch.Tensor, fmt: Format, margin: int = 0) -> torch.Tensor:
    """`fmt.max * 2**-margin / amax` in FP32; 1 for an amax of 0, inf or NaN; at most the largest FP32.

    TransformerEngine's `compute_scale_from_amax` (common/recipe/recipe_common.cuh).
    """
    # tensor by tensor: a Python number divided by a tensor is a multiplication by the reciprocal, rounded twice
    scale = torch.clamp(torch.full_like(amax, fmt.max * 2.0**-margin) / amax, max=FP32.max)
    return torch.where((amax > 0) & torch.isfinite(amax), scale, torch.ones_like(scale))


def power_of_two_scale(amax: torch.Tensor, fmt: Format) -> torch.Tensor:
    """`2**floor(log2(fmt.max / amax))` in FP32; 1 for an amax of 0, inf or NaN; at most 2**126.

    MS-AMP's rule (FP8-LM, arXiv:2310.18313): multiplying by such a scale rounds nothing. 2**126 is the largest whose
    inverse is a normal FP32 number.
    """
    return _power_of_two_scale(amax, fmt, largest=126)


def block_scale(amax: torch.Tensor, fmt: Format) -> torch.Tensor:
    """`2**floor(log2(fmt.max / amax))` as in `power_of_two_scale`, but at most 2**127: TransformerEngine's
    `compute_scale_from_amax` with powers of two, its default for blocks. What overflows FP32 becomes the largest number
    of the input's dtype there, whose exponent is 127."""
    return _power_of_two_scale(amax, fmt, largest=127)


def _power_of_two_scale(amax: torch.Tensor, fmt: Format, largest: int) -> torch.Tensor:
    # on the bits: exact also where a compiler's division is not. fmt.max / amax never rounds up to a power of two
    bits, max_bits = amax.view(torch.int32), fmt.max_bits
    quotient = (max_bits >> 23) - (bits >> 23) - ((bits & 0x7FFFFF) > (max_bits & 0x7FFFFF)).to(torch.int32)
    scale = ((quotient.clamp(max=largest) + 127) << 23).view(torch.float32)
    return torch.where((amax > 0) & torch.isfinite(amax), scale, torch.ones_like(scale))


def scale_inv_of(scale: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """`1 / scale`, or NaN where the amax was not finite.

    The saturating cast turns an inf into the format's maximum. Without the NaN a loss scaler, a gradient clip or a
    user would never learn of the overflow. The scale itself stays finite, so the next step is not affected.
    """
    return torch.where(torch.isfinite(amax), scale.reciprocal(), torch.full_like(scale, float("nan")))


def times(number: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
    """Their product; the number itself where there is no factor."""
    return number if factor is None else number * factor


# blocks: parts of a matrix with a scale each; at the right and lower edge a block may be cut off


class Blocks(NamedTuple):
    """The blocks of a matrix, and how each gets its scale. Scales are [rows of blocks, blocks in a row]."""

    rows: int
    """Rows of one block."""
    columns: int | None
    """Columns of one block; None: all columns."""
    scale: Callable[[torch.Tensor, Format], torch.Tensor]
    """FP32 scales from amaxes."""
    inverse: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """What is stored of (scales, amaxes): FP32, or the bits of E8M0 as uint8."""

    def quantize(self, x: torch.Tensor, fmt: Format, stored_scale_inv: torch.Tensor | None = None) -> Quantized:
        """Codes and scales of x, or of `x * stored_scale_inv`. x: [rows, columns] of any strides, bf16, fp16 or fp32;
        stored_scale_inv: FP32, 0-dimensional, a power of two, so that nothing is rounded twice."""
        amax = times(self.amax(x), stored_scale_inv)
        scale = self.scale(amax, fmt)
        return Quantized(self.cast(x, times(scale, stored_scale_inv), fmt), self.inverse(scale, amax))

    def amax(self, x: torch.Tensor) -> torch.Tensor:
        """max |x| of each block, NaN left out. FP32."""
        return without_nan(self.tiles(x)).abs_().amax((1, 3)).float()

    def cast(self, x: torch.Tensor, factor: torch.Tensor, fmt: Format) -> torch.Tensor:
        """x times the factor of its block, cast. FP8, row-major."""
        return self._matrix(saturating_cast(self.tiles(x).float() * factor.unsqueeze(1).unsqueeze(3), fmt), x.shape)

    def repeated(self, scale_inv: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """One scale_inv, a power of two, for every block of a matrix of that shape, as `inverse` stores it."""
        down, across = -(-shape[0] // self.rows), -(-shape[1] // (self.columns or shape[1]))
        return self.inverse(scale_inv.reciprocal(), scale_inv).repeat(down, across)

    def dequantize(self, q: Quantized, dtype: torch.dtype) -> torch.Tensor:
        """The values of the codes: bf16, fp16 or fp32, [rows, columns], rounded once. Scales that are powers of two
        round nothing, as long as the values are normal numbers of the dtype."""
        scale_inv = e8m0_values(q.scale_inv) if q.scale_inv.dtype == torch.uint8 else q.scale_inv
        values = self.tiles(q.codes.float()) * scale_inv.unsqueeze(1).unsqueeze(3)
        return self._matrix(values.to(dtype), q.codes.shape)

    def tiles(self, x: torch.Tensor) -> torch.Tensor:
        """[rows of blocks, rows of a block, blocks in a row, columns of a block]: as if x went on with zeros."""
        width = self.columns or x.shape[1]
        missing = -x.shape[0] % self.rows, -x.shape[1] % width
        if any(missing):
            x = F.pad(x, (0, missing[1], 0, missing[0]))
        return x.reshape(x.shape[0] // self.rows, self.rows, x.shape[1] // width, width)

    def _matrix(self, tiles: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        a, b, c, d = tiles.shape
        matrix = tiles.reshape(a * b, c * d).narrow(0, 0, shape[0]).narrow(1, 0, shape[1])
        return matrix if matrix.is_contiguous() else matrix.clone(memory_format=torch.contiguous_format)


def mx_scale(amax: torch.Tensor, fmt: Format) -> torch.Tensor:
    """`2**ceil(log2(amax / fmt.max))`, inverted: FP32 from 2**-127 (an amax of inf) to 2**127 (0 and the smallest).

    TransformerEngine's `float_to_e8m0` of `amax * (1 / fmt.max)`, whose two roundings to FP32 are part of the rule.
    """
    bits = (amax * torch.full_like(amax, 1.0 / fmt.max)).view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # a subnormal number is rounded up only above 2**-127, which is the value of exponent 0
    upwards = (mantissa > 0) & ((exponent > 0) | (mantissa > 1 << 22))
    exponent = (exponent + upwards.to(torch.int32)).clamp(max=254)  # biased, of the inverse
    # 2**-127, the inverse of the largest, is the one power of two here that FP32 stores without an exponent
    bits = torch.where(exponent == 254, torch.full_like(exponent, 1 << 22), (254 - exponent) << 23)
    return bits.view(torch.float32)


def e8m0_bits(scale: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """The inverse of a power of two from `mx_scale`, as a biased exponent of eight bits: uint8. The amax is in it."""
    return (254 - (scale.view(torch.int32) >> 23)).to(torch.uint8)


def e8m0_values(bits: torch.Tensor) -> torch.Tensor:
    """`2**(bits - 127)` of uint8, and NaN of 255. FP32."""
    exponent = bits.to(torch.int32)
    ends = ((exponent == 0) | (exponent == 255)).to(torch.int32)  # 2**-127, which is subnormal, and NaN: the same bit
    return (exponent << 23 | ends << 22).view(torch.float32)


ROWS = Blocks(1, None, scale_from_amax, scale_inv_of)
"""The blocks of `rowwise`."""
VECTORS, SQUARES = Blocks(1, 128, block_scale, scale_inv_of), Blocks(128, 128, block_scale, scale_inv_of)
"""The blocks of `blockwise`: VECTORS of activations and gradients, along the contraction; SQUARES of weights, whose
transpose has the same blocks."""
MX = Blocks(1, 32, mx_scale, e8m0_bits)
"""The blocks of `mxfp8`."""


# delayed scaling: the state of one layer is int32 [3, 2 + history length], viewed as FP32


def new_delayed_state(history_len: int, device: torch.device | str | None = None) -> torch.Tensor:
    """A fresh state: scale 1 (TransformerEngine's first step), an empty history. int32 [3, 2 + history_len]."""
    state = torch.zeros(3, HISTORY + history_len, dtype=torch.int32, device=device)
    state.view(torch.float32).select(1, SCALE).fill_(1.0)
    return state


def delayed_scale(state: torch.Tensor, tensor: int) -> torch.Tensor:
    """The scale in force for INPUT, WEIGHT or GRAD_OUTPUT. FP32, 0-dimensional."""
    return state.view(torch.float32).select(0, tensor).select(0, SCALE)


def record_amax(state: torch.Tensor, tensor: int, amax: torch.Tensor) -> None:
    """history[0] = max(history[0], amax), in place. Idempotent, so recomputation may record again; NaN is ignored."""
    newest = state.view(torch.float32).select(0, tensor).select(0, HISTORY)
    newest.copy_(torch.fmax(newest, amax))


def rolled_delayed_states(
    states: torch.Tensor, format_max: torch.Tensor, margin: int, algorithm: str, interval: int
) -> torch.Tensor:
    """The states after one step, from states of any number of layers. int32 [layers, 3, 2 + L] in and out.

    TransformerEngine's fused update (common/recipe/delayed_scaling.cu). With the recorded amax `a = history[0]`:
    nothing changes when a is 0; else `A` is a (`most_recent`) or the largest of the history (`max`), the history
    shifts with a at its end, and a finite A gives the scale `format_max * 2**-margin / A`. `interval` recomputes the
    scale on every interval-th roll only. format_max: FP32, broadcastable to [layers, 3].
    """
    bits, length = states.view(torch.float32), states.shape[-1] - HISTORY
    scale, history, rolls = bits.select(-1, SCALE), bits.narrow(-1, HISTORY, length), states.select(-1, ROLLS)
    recorded = history.select(-1, 0)
    seen = recorded != 0
    amax = recorded if algorithm == "most_recent" else history.amax(dim=-1)
    due = seen & (amax > 0) & (amax < torch.inf)
    due = due if interval == 1 else due & (rolls % interval == 0)
    new_scale = torch.where(due, torch.clamp(format_max * 2.0**-margin / amax, max=FP32.max), scale)
    room = torch.zeros_like(recorded.unsqueeze(-1))  # where the next step records
    shifted = torch.cat([room, history.narrow(-1, 2, length - 2), recorded.unsqueeze(-1)], -1) if length > 1 else room
    new_history = torch.where(seen.unsqueeze(-1), shifted, history)
    return torch.cat(
        [
            new_scale.unsqueeze(-1).view(torch.int32),
            (rolls + seen).to(torch.int32).unsqueeze(-1),
            new_history.view(torch.int32),
        ],
        dim=-1,
    )


def check_state(state: torch.Tensor, scaling: str, name: str, advice: str) -> None:
    """Raise `FP8BackendError` if a saved state holds numbers that the `delayed` or the `window` rule does not make.

    Args:
        state: int32 [3, 2 + history length], or [experts, 3, 2 + history length].
        scaling: the rule's name.
        name: the state's name in the error.
        advice: what to do about it.
    """
    bits, first = state.view(torch.float32), HISTORY
    check_values(bits.select(-1, SCALE), POSITIVE, f"a scale of {name}", advice)
    check_values(state.select(-1, ROLLS), COUNT, f"a counter of {name}", advice)
    if scaling == "window":  # an overflow that the step's end has not seen yet, as after a step that was skipped
        newest, first = bits.select(-1, HISTORY).nan_to_num(nan=torch.inf, posinf=torch.inf), HISTORY + 1
        check_values(newest, AMAX, f"the newest amax of {name}", advice)
    history = bits.narrow(-1, first, bits.shape[-1] - first)
    check_values(history, AMAX if scaling == "delayed" else NOT_NEGATIVE, f"the amax history of {name}", advice)


# the window rule: a state of the delayed rule's layout with a history of WINDOW; its WEIGHT row stays unused


def new_window_state(device: torch.device | str | None = None) -> torch.Tensor:
    """A fresh state: WINDOW steps of just-in-time scales lie ahead. int32 [3, 2 + WINDOW]."""
    return new_delayed_state(WINDOW, device)


def window_scale(state: torch.Tensor, tensor: int, amax: torch.Tensor, fmt: Format) -> torch.Tensor:
    """The scale in force for INPUT or GRAD_OUTPUT, chosen on the device. FP32, 0-dimensional.

    Just in time, from `amax`, the tensor's own, in the first WINDOW steps; afterwards the state's.
    """
    warm = state.select(0, tensor).select(0, ROLLS) >= WINDOW
    return torch.where(warm, delayed_scale(state, tensor), power_of_two_scale(amax, fmt))


def record_window_amax(state: torch.Tensor, tensor: int, amax: torch.Tensor) -> None:
    """history[0] = max(history[0], amax), in place. Idempotent. A NaN stays: the step's end must see it."""
    newest = state.view(torch.float32).select(0, tensor).select(0, HISTORY)
    newest.copy_(torch.maximum(newest, amax))


def rolled_window_states(states: torch.Tensor, formats: tuple[Format, Format, Format]) -> torch.Tensor:
    """The states after one optimizer step, from states of any number of layers. int32 [layers, 3, 2 + WINDOW].

    MS-AMP's schedule (FP8-LM, arXiv:2310.18313). With the recorded amax `a = history[0]` of a tensor: the scale is
    computed from the largest of the history, which moves on by one step, and the counter rises. A non-finite `a` is
    dropped and sets the counter to 0, so that WINDOW just-in-time steps follow. Where nothing but zeros was recorded,
    as in a layer that did not run, all stays as it is (MS-AMP lets such steps pass through the window: after WINDOW
    of them it would know no amax, and saturate). formats: of input, weight and the output's gradient.
    """
    return torch.stack([_rolled_window(rows, fmt) for rows, fmt in zip(states.unbind(1), formats, strict=True)], 1)


def _rolled_window(rows: torch.Tensor, fmt: Format) -> torch.Tensor:
    """`rolled_window_states` for one tensor of every layer. int32 [layers, 2 + WINDOW]."""
    bits = rows.view(torch.float32)
    scale, rolls, history = bits.select(-1, SCALE), rows.select(-1, ROLLS), bits.narrow(-1, HISTORY, WINDOW)
    recorded = history.select(-1, 0)
    overflowed = ~torch.isfinite(recorded)
    rolls_on = (recorded != 0) & ~overflowed
    new_scale = torch.where(rolls_on, power_of_two_scale(history.amax(-1), fmt), scale)
    new_rolls = torch.where(overflowed, torch.zeros_like(rolls), rolls + rolls_on.to(torch.int32))
    earlier = history.narrow(-1, 1, WINDOW - 1)
    past = torch.where(rolls_on.unsqueeze(-1), history.narrow(-1, 0, WINDOW - 1), earlier)
    room = torch.zeros_like(recorded.unsqueeze(-1))  # where the next step records
    new_bits = [each.view(torch.int32) for each in (new_scale.unsqueeze(-1), room, past)]
    return torch.cat([new_bits[0], new_rolls.unsqueeze(-1), *new_bits[1:]], -1)
