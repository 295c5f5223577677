"""Choose scales: the rules of docs/recipes.rst and their states.

A scale `s` (FP32) maps a tensor into the range of an FP8 format: `codes = saturate(round(x * s))`,
and `x ≈ codes * scale_inv` with `scale_inv = 1 / s`.

TransformerEngine's rules (delayed; dynamic, its current scaling; blockwise; mxfp8) equal its own to
the bit, except for scales after an inf (`scale_inv_of`). mxfp8 keeps 2**127 there: products with
all but small values overflow to inf. (Compiled for a GPU, a scale from a division may differ in its
last bit, unless `torch._inductor.config.eager_numerics.division_rounding` is set. Powers of two are
computed on bits, and exact.)

A layer's state is an int32 tensor of FP32 bits: wrappers cast every floating-point buffer of a
module, and a scale in bf16 is a wrong scale.
"""

from collections.abc import Callable
from typing import NamedTuple, final

import torch
import torch.nn.functional as F

from .formats import (
    AMAX,
    COUNT,
    FP32,
    NOT_NEGATIVE,
    POSITIVE,
    Format,
    check_values,
    saturating_cast,
)

INPUT, WEIGHT, GRAD_OUTPUT = 0, 1, 2
"""Rows of a state: the tensors of a layer."""
SCALE, ROLLS, HISTORY = 0, 1, 2
"""Columns of a state: the scale, an integer counter of rolls, and the start of the amax history."""

WINDOW = 16
"""Optimizer steps in the history of the `window` rule, and steps with just-in-time amaxes at its
start."""


class Quantized(NamedTuple):
    """FP8 codes and their scales: values are `codes * scale_inv`."""

    codes: torch.Tensor
    """FP8, [rows, columns], row-major."""
    scale_inv: torch.Tensor
    """FP32, 0-dimensional (one scale) or [rows of blocks, blocks in a row]; for mxfp8 uint8, the
    bits of E8M0. An inf gives NaN (mxfp8: 2**127)."""


def tensor_amax(x: torch.Tensor) -> torch.Tensor:
    """Return max |x|, FP32, 0-dimensional. NaN if x has one."""
    low, high = torch.aminmax(x)
    return torch.maximum(-low, high).float()


def without_nan(x: torch.Tensor) -> torch.Tensor:
    """Replace NaN by 0. TransformerEngine's amax skips NaN; its code shows it."""
    if torch.compiler.is_compiling():  # one pass; `nan_to_num` also compares with both infinities
        return torch.where(x == x, x, torch.zeros_like(x))
    return torch.nan_to_num(x, nan=0.0, posinf=float("inf"), neginf=float("-inf"))


def scale_from_amax(amax: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return `fmt.max / amax` in FP32; 1 for an amax of 0, inf or NaN; at most the largest FP32.

    TransformerEngine's `compute_scale_from_amax` (common/recipe/recipe_common.cuh).
    """
    # divide tensors: a Python number over a tensor multiplies by the reciprocal and rounds twice
    scale = torch.clamp(torch.full_like(amax, fmt.max) / amax, max=FP32.max)
    return torch.where(is_usable(amax), scale, 1.0)


def is_usable(amax: torch.Tensor) -> torch.Tensor:
    """Return True for an amax with a scale of its own: neither 0, inf nor NaN."""
    return (amax > 0) & (amax < torch.inf)


def power_of_two_scale(amax: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return `2**floor(log2(fmt.max / amax))` in FP32; 1 for an amax of 0, inf or NaN; at most
    2**126.

    MS-AMP's rule (FP8-LM, arXiv:2310.18313): multiplying by such a scale does not round. 2**126 is
    the largest one with a normal FP32 inverse.
    """
    return _power_of_two_scale(amax, fmt, largest=126)


def block_scale(amax: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return `power_of_two_scale`, but at most 2**127: TransformerEngine's
    `compute_scale_from_amax` with powers of two, its default for blocks. It clamps overflow to the
    input dtype's largest number, with exponent 127."""
    return _power_of_two_scale(amax, fmt, largest=127)


def _power_of_two_scale(amax: torch.Tensor, fmt: Format, largest: int) -> torch.Tensor:
    # on the bits: exact also where a compiler's division is not. fmt.max / amax never rounds up to
    # a power of two
    bits, max_bits = amax.view(torch.int32), fmt.max_bits
    quotient = (
        (max_bits >> 23)
        - (bits >> 23)
        - ((bits & 0x7FFFFF) > (max_bits & 0x7FFFFF)).to(torch.int32)
    )
    scale = ((quotient.clamp(max=largest) + 127) << 23).view(torch.float32)
    return torch.where(is_usable(amax), scale, 1.0)


def scale_inv_of(scale: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """Return `1 / scale`, or NaN for an amax that is not finite.

    The saturating cast turns an inf into the format's maximum; the NaN shows the overflow to loss
    scalers, gradient clipping and users. The scale itself stays finite, so the next step is not
    affected.
    """
    # an amax is not negative: one comparison finds inf and NaN
    return torch.where(amax < torch.inf, scale.reciprocal(), torch.nan)


def times(number: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
    return number if factor is None else number * factor


# Blocks: parts of a matrix with one scale each; at the right and lower edge they may be smaller


class Blocks(NamedTuple):
    """Block shape and scaling rule of a matrix. Scales are [rows of blocks, blocks in a row]."""

    rows: int
    columns: int | None
    """None: all columns."""
    scale: Callable[[torch.Tensor, Format], torch.Tensor]
    """FP32 scales from amaxes."""
    inverse: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """Stored scale_inv from (scales, amaxes): FP32, or the bits of E8M0 as uint8."""

    def quantize(
        self, x: torch.Tensor, fmt: Format, stored_scale_inv: torch.Tensor | None = None
    ) -> Quantized:
        """Quantize x or `x * stored_scale_inv`. x: [rows, columns] of any strides, bf16, fp16 or
        fp32; stored_scale_inv: FP32, 0-dimensional, a power of two, so that values round once."""
        amax = times(self.amax(x), stored_scale_inv)
        scale = self.scale(amax, fmt)
        return Quantized(
            self.cast(x, times(scale, stored_scale_inv), fmt), self.inverse(scale, amax)
        )

    def amax(self, x: torch.Tensor) -> torch.Tensor:
        """Return max |x| of each block, skipping NaN. FP32."""
        return without_nan(self.tiles(x)).abs_().amax((1, 3)).float()

    def cast(self, x: torch.Tensor, factor: torch.Tensor, fmt: Format) -> torch.Tensor:
        """Multiply x by the factor of its block, and cast. FP8, row-major."""
        return self._matrix(
            saturating_cast(self.tiles(x).float() * factor.unsqueeze(1).unsqueeze(3), fmt), x.shape
        )

    def repeated(self, scale_inv: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Repeat one scale_inv, a power of two, for every block of a matrix, as `inverse` stores
        it."""
        down, across = -(-shape[0] // self.rows), -(-shape[1] // (self.columns or shape[1]))
        return self.inverse(scale_inv.reciprocal(), scale_inv).repeat(down, across)

    def dequantize(self, q: Quantized, dtype: torch.dtype) -> torch.Tensor:
        """Return the values: bf16, fp16 or fp32, [rows, columns], rounded once. With powers of two
        as scales, normal numbers of the dtype are exact. Experts are [experts, rows, columns]."""
        if q.codes.dim() == 3:  # one by one: FP32 takes four times the codes
            matrices = zip(*q, strict=True)
            return torch.stack([self.dequantize(Quantized(*matrix), dtype) for matrix in matrices])
        scale_inv = e8m0_values(q.scale_inv) if q.scale_inv.dtype == torch.uint8 else q.scale_inv
        values = self.tiles(q.codes.float()) * scale_inv.unsqueeze(1).unsqueeze(3)
        return self._matrix(values.to(dtype), q.codes.shape)

    def tiles(self, x: torch.Tensor) -> torch.Tensor:
        """View as [rows of blocks, rows of a block, blocks in a row, columns of a block], padded
        with zeros."""
        width = self.columns or x.shape[1]
        missing = -x.shape[0] % self.rows, -x.shape[1] % width
        if any(missing):
            x = F.pad(x, (0, missing[1], 0, missing[0]))
        return x.reshape(x.shape[0] // self.rows, self.rows, x.shape[1] // width, width)

    def _matrix(self, tiles: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        a, b, c, d = tiles.shape
        matrix = tiles.reshape(a * b, c * d).narrow(0, 0, shape[0]).narrow(1, 0, shape[1])
        return (
            matrix
            if matrix.is_contiguous()
            else matrix.clone(memory_format=torch.contiguous_format)
        )


def mx_scale(amax: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return the inverse of `2**ceil(log2(amax / fmt.max))`: FP32 from 2**-127 (an amax of inf) to
    2**127 (0 and the smallest).

    TransformerEngine's `float_to_e8m0` of `amax * (1 / fmt.max)`; its two roundings to FP32 are
    part of the rule.
    """
    bits = (amax * torch.full_like(amax, 1.0 / fmt.max)).view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # exponent 0 stands for 2**-127: round subnormal numbers up only above it
    upwards = (mantissa > 0) & ((exponent > 0) | (mantissa > 1 << 22))
    exponent = (exponent + upwards.to(torch.int32)).clamp(max=254)  # biased, of the inverse
    # 2**-127, the inverse of the largest, is subnormal in FP32
    bits = torch.where(exponent == 254, torch.full_like(exponent, 1 << 22), (254 - exponent) << 23)
    return bits.view(torch.float32)


def e8m0_bits(scale: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """Return the inverse of a power of two from `mx_scale` as a biased exponent: uint8. Ignores the
    amax."""
    return (254 - (scale.view(torch.int32) >> 23)).to(torch.uint8)


def e8m0_values(bits: torch.Tensor) -> torch.Tensor:
    """Return `2**(bits - 127)` for uint8 bits, NaN for 255. FP32."""
    exponent = bits.to(torch.int32)
    # subnormal 2**-127 and NaN set the same bit
    ends = ((exponent == 0) | (exponent == 255)).to(torch.int32)
    return (exponent << 23 | ends << 22).view(torch.float32)


ROWS = Blocks(1, None, scale_from_amax, scale_inv_of)
"""The blocks of `rowwise`."""
NVFP4 = Blocks(1, 16, block_scale, scale_inv_of)
"""The shape of NVFP4's blocks; `kernels.nvfp4` has its two levels of scales."""
VECTORS, SQUARES = (
    Blocks(1, 128, block_scale, scale_inv_of),
    Blocks(128, 128, block_scale, scale_inv_of),
)
"""The blocks of `blockwise`: VECTORS of activations and gradients, along the contraction; SQUARES
of weights, the same for their transpose."""
MX = Blocks(1, 32, mx_scale, e8m0_bits)
"""The blocks of `mxfp8`."""


# Delayed scaling: the state of one layer is int32 [3, 2 + history length], viewed as FP32


def new_delayed_state(history_len: int, device: torch.device | str | None = None) -> torch.Tensor:
    """Return a fresh state: scale 1 (TransformerEngine's first step), an empty history. int32 [3, 2
    + history_len]."""
    state = torch.zeros(3, HISTORY + history_len, dtype=torch.int32, device=device)
    state.view(torch.float32).select(1, SCALE).fill_(1.0)
    return state


def delayed_scale(state: torch.Tensor, tensor: int) -> torch.Tensor:
    """Return the current scale for INPUT, WEIGHT or GRAD_OUTPUT: FP32, 0-dimensional, or [experts]
    of a state [experts, 3, 2 + history length]."""
    return state.view(torch.float32).select(-2, tensor).select(-1, SCALE)


def record_amax(
    state: torch.Tensor, tensor: int, amax: torch.Tensor, keep_nan: bool = False
) -> None:
    """Set history[0] = max(history[0], amax), in place. Recomputation may record again. NaN is
    ignored unless `keep_nan`."""
    newest = state.view(torch.float32).select(-2, tensor).select(-1, HISTORY)
    newest.copy_((torch.maximum if keep_nan else torch.fmax)(newest, amax))


def rolled_delayed_states(
    states: torch.Tensor, format_max: torch.Tensor, margin: int, algorithm: str, interval: int
) -> torch.Tensor:
    """Return the states of any number of layers after one step. int32 [layers, 3, 2 + L] in and
    out.

    TransformerEngine's fused update (common/recipe/delayed_scaling.cu). With the recorded amax `a =
    history[0]`: if a is 0, nothing changes; else `A` is a (`most_recent`) or the largest of the
    history (`max`), the history shifts with a at its end, and a finite A gives the scale
    `format_max * 2**-margin / A`, at every `interval`-th roll. format_max: FP32, broadcastable to
    [layers, 3].
    """
    bits, length = states.view(torch.float32), states.shape[-1] - HISTORY
    scale, history, rolls = (
        bits.select(-1, SCALE),
        bits.narrow(-1, HISTORY, length),
        states.select(-1, ROLLS),
    )
    recorded = history.select(-1, 0)
    seen = recorded != 0
    amax = recorded if algorithm == "most_recent" else history.amax(dim=-1)
    due = seen & (amax < torch.inf)  # an amax that was seen is positive
    due = due if interval == 1 else due & (rolls % interval == 0)
    new_scale = torch.where(due, torch.clamp(format_max * 2.0**-margin / amax, max=FP32.max), scale)
    room = torch.zeros_like(recorded.unsqueeze(-1))  # where the next step records
    shifted = (
        torch.cat([room, history.narrow(-1, 2, length - 2), recorded.unsqueeze(-1)], -1)
        if length > 1
        else room
    )
    new_history = torch.where(seen.unsqueeze(-1), shifted, history)
    return torch.cat(
        [
            new_scale.unsqueeze(-1).view(torch.int32),
            (rolls + seen).to(torch.int32).unsqueeze(-1),
            new_history.view(torch.int32),
        ],
        dim=-1,
    )


# The window rule: the delayed rule's layout with a history of WINDOW; its WEIGHT row is unused


def new_window_state(device: torch.device | str | None = None) -> torch.Tensor:
    """Return a fresh state, with WINDOW just-in-time steps ahead. int32 [3, 2 + WINDOW]."""
    return new_delayed_state(WINDOW, device)


def window_scale(state: torch.Tensor, tensor: int, amax: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return the scale for INPUT or GRAD_OUTPUT, chosen on the device: from the tensor's own `amax`
    in the first WINDOW steps, then the state's. FP32, of the amax's shape."""
    warm = state.select(-2, tensor).select(-1, ROLLS) >= WINDOW
    return torch.where(warm, delayed_scale(state, tensor), power_of_two_scale(amax, fmt))


def rolled_window_states(
    states: torch.Tensor, formats: tuple[Format, Format, Format]
) -> torch.Tensor:
    """Return the states of any number of layers after one optimizer step. int32 [layers, 3, 2 +
    WINDOW].

    MS-AMP's schedule (FP8-LM, arXiv:2310.18313). With the recorded amax `a = history[0]` of a
    tensor: the scale follows from the largest of the history, the history shifts by one step, and
    the counter rises. A non-finite `a` is dropped and sets the counter to 0: WINDOW just-in-time
    steps follow. If only zeros were recorded, as in a layer that did not run, nothing changes.
    (MS-AMP shifts such steps into the window; WINDOW of them would leave no amax, and saturate.)
    formats: of input, weight and the output's gradient.
    """
    return torch.stack(
        [_rolled_window(rows, fmt) for rows, fmt in zip(states.unbind(1), formats, strict=True)], 1
    )


def _rolled_window(rows: torch.Tensor, fmt: Format) -> torch.Tensor:
    bits = rows.view(torch.float32)
    scale, rolls, history = (
        bits.select(-1, SCALE),
        rows.select(-1, ROLLS),
        bits.narrow(-1, HISTORY, WINDOW),
    )
    recorded = history.select(-1, 0)
    overflowed = ~(recorded < torch.inf)
    rolls_on = is_usable(recorded)
    new_scale = torch.where(rolls_on, power_of_two_scale(history.amax(-1), fmt), scale)
    new_rolls = torch.where(overflowed, torch.zeros_like(rolls), rolls + rolls_on.to(torch.int32))
    earlier = history.narrow(-1, 1, WINDOW - 1)
    past = torch.where(rolls_on.unsqueeze(-1), history.narrow(-1, 0, WINDOW - 1), earlier)
    room = torch.zeros_like(recorded.unsqueeze(-1))  # where the next step records
    new_bits = [values.view(torch.int32) for values in (new_scale.unsqueeze(-1), room, past)]
    return torch.cat([new_bits[0], new_rolls.unsqueeze(-1), *new_bits[1:]], -1)


DYNAMIC, POWER_OF_TWO, JUST_IN_TIME = "dynamic", "power_of_two", "window"
"""How a scale follows from an amax. Only the first leaves NaN out of the amax."""


def scale_by(
    how: str, amax: torch.Tensor, fmt: Format, state: torch.Tensor | None, tensor: int
) -> torch.Tensor:
    """Return the scale of an amax: FP32, of the amax's shape. Triton kernels compute the same.

    state: for JUST_IN_TIME, the layer's, int32 [..., 3, 2 + WINDOW], of which `tensor` is a row.
    """
    if how == DYNAMIC:
        return scale_from_amax(amax, fmt)
    if how == POWER_OF_TWO:
        return power_of_two_scale(amax, fmt)
    if how == JUST_IN_TIME:
        return window_scale(state, tensor, amax, fmt)
    raise NotImplementedError(f"no scale follows from an amax by {how!r}")


# The rules. Each is one object, and whoever needs to know something of a rule asks it


class Rule:
    """Choose a scale from a tensor's own amax, one for all of it: `dynamic`. Other rules override
    what they do otherwise."""

    name = "dynamic"
    default_format = "HYBRID"
    """`fp8_format` of a recipe that does not say it."""
    blocks: Blocks | None = None
    """Of activations and gradients, along the contraction; each product then has codes of its own.
    None: one scale for a tensor, and one cast for both its products."""
    weight_blocks: Blocks | None = None
    cuts_contraction = False
    """True if a scale covers only a part of the contraction."""
    state_name: str | None = None
    """A layer's state in checkpoints. None: a rule without state."""
    moves_in_forward = False
    """True if states roll in every forward of the model, not in the optimizer's step: a weight then
    gets a new scale in each."""
    records_weight = True
    """False if a weight's amax does not enter the state."""
    warm_from = 1
    """Number of rolls after which the state's scale is used."""

    @property
    def serves_both_products(self) -> bool:
        """Return True if fprop and dgrad read the same codes of a weight."""
        return self.weight_blocks is None or self.weight_blocks is SQUARES

    @property
    def keeps_nan(self) -> bool:
        """Return True if a NaN counts in an amax, and stays in the state for the end of the step.
        Kernels know it by `from_amax`, too."""
        return self.from_amax(INPUT) != DYNAMIC

    @property
    def multiple(self) -> int:
        """Return the number of which TransformerEngine's sizes are multiples."""
        return 32 if self.blocks is MX else 16

    def __reduce__(self):  # copies of a layer, and pickles, have the one rule of this name
        return rule_of, (self.name,)

    def new_state(
        self, history_len: int, device: torch.device | str | None = None
    ) -> torch.Tensor | None:
        """Return a fresh state for one weight matrix: int32 [3, 2 + history length], or None."""
        return None

    def given_scale(self, state: torch.Tensor | None, tensor: int) -> torch.Tensor | None:
        """Return a scale that is known before the tensor: FP32; None if its amax gives one."""
        return None

    def from_amax(self, tensor: int) -> str:
        """Return how a scale follows from an amax: DYNAMIC, POWER_OF_TWO or JUST_IN_TIME. Another
        way is a line of `scale_by`, and of `_scale_of` in `kernels/triton_matrix.py`."""
        return DYNAMIC

    @final  # casts ask `given_scale` and `from_amax`, and would not meet another formula
    def scale(
        self, amax: torch.Tensor, fmt: Format, tensor: int, state: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the scale for INPUT, WEIGHT or GRAD_OUTPUT: FP32, of the amax's shape. `state` is
        the layer's, read only."""
        given = self.given_scale(state, tensor)
        return (
            scale_by(self.from_amax(tensor), amax, fmt, state, tensor) if given is None else given
        )

    def rolled(self, states: torch.Tensor, formats: tuple[Format, Format, Format]) -> torch.Tensor:
        """Return the states of any number of layers after an optimizer step."""
        raise NotImplementedError(f"{self.name} does not say how its states roll")

    def rolled_in_forward(
        self,
        states: torch.Tensor,
        format_max: torch.Tensor,
        margin: int,
        algorithm: str,
        interval: int,
    ) -> torch.Tensor:
        """Return them after a forward, if the rule `moves_in_forward`, as in
        `rolled_delayed_states`."""
        raise NotImplementedError(f"{self.name} does not say how its states roll in a forward")

    def check_state(self, state: torch.Tensor, name: str, advice: str) -> None:
        """Raise `FP8BackendError` for numbers in a saved state that the rule cannot produce.

        Args:
            state: int32 [3, 2 + history length], or [experts, 3, 2 + history length].
            name: the state's name in the error.
            advice: the way out, at the error's end.
        """
        bits = state.view(torch.float32)
        check_values(bits.select(-1, SCALE), POSITIVE, f"a scale of {name}", advice)
        check_values(state.select(-1, ROLLS), COUNT, f"a counter of {name}", advice)


class Delayed(Rule):
    """Take the scale from the amaxes of earlier steps, as TransformerEngine does."""

    name = "delayed"
    state_name = "fp8_scaling"
    moves_in_forward = True

    def new_state(self, history_len, device=None):
        return new_delayed_state(history_len, device)

    def given_scale(self, state, tensor):
        return delayed_scale(state, tensor)

    def rolled_in_forward(self, states, format_max, margin, algorithm, interval):
        return rolled_delayed_states(states, format_max, margin, algorithm, interval)

    def check_state(self, state, name, advice):
        super().check_state(state, name, advice)
        history = state.view(torch.float32)[..., HISTORY:]
        check_values(history, AMAX, f"the amax history of {name}", advice)


class Window(Rule):
    """Scale as MS-AMP does: just in time for WINDOW steps, then by their largest amax. A weight's
    amax is of the optimizer step, which is the same number as just in time."""

    name = "window"
    state_name = "fp8_window"
    records_weight = False
    warm_from = WINDOW

    def new_state(self, history_len, device=None):
        return new_window_state(device)

    def from_amax(self, tensor):
        return POWER_OF_TWO if tensor == WEIGHT else JUST_IN_TIME

    def rolled(self, states, formats):
        return rolled_window_states(states, formats)

    def check_state(self, state, name, advice):
        super().check_state(state, name, advice)
        bits = state.view(torch.float32)
        # an overflow before the end of the step, such as after a skipped step
        newest = bits.select(-1, HISTORY).nan_to_num(nan=torch.inf, posinf=torch.inf)
        check_values(newest, AMAX, f"the newest amax of {name}", advice)
        check_values(bits[..., HISTORY + 1 :], NOT_NEGATIVE, f"the amax history of {name}", advice)


class AlongContraction(Rule):
    """Give each block of the contraction a scale from its own amax."""

    # such fine scales leave a gradient little need of E5M2's range; TransformerEngine and TorchAO
    # agree
    default_format = "E4M3"

    def __init__(self, name: str, blocks: Blocks, weight_blocks: Blocks) -> None:
        self.name = name
        self.blocks = blocks
        self.weight_blocks = weight_blocks
        self.cuts_contraction = blocks is not ROWS


RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule(),
        Delayed(),
        AlongContraction("rowwise", ROWS, ROWS),
        AlongContraction("blockwise", VECTORS, SQUARES),
        AlongContraction("mxfp8", MX, MX),
        Window(),
    )
}


def rule_of(name: str) -> Rule:
    return RULES[name]


STATEFUL = tuple(name for name, rule in RULES.items() if rule.state_name)
"""Rules with state from step to step."""


# Faults of states, found on the device. States are int32 [n, 3, 2 + history length]

MOST_CLIPPED = (64.0, 64.0, 4096.0)
"""For INPUT, WEIGHT and GRAD_OUTPUT: largest ratio of an amax to the largest number in range of its
scale.

The amax of activations and weights is some ten times their root mean square, so beyond 64 most of a
tensor is out of range. Gradients have far longer tails, and their amax moves by a hundred times
from step to step in ordinary training: clipping these few values does no harm.
"""

_INF = 0x7F800000
"""FP32 bits of inf. NaN has larger ones, and negative numbers have negative ones."""


def overshoot(states: torch.Tensor, format_max: torch.Tensor, warm_from: int) -> torch.Tensor:
    """Return the ratio of the newest amax to the largest number in range: FP32 [n, 3], 0 if none
    was recorded.

    Args:
        format_max: the largest code of each of the three tensors' formats, FP32 [3].
        warm_from: number of rolls before the state's scale is used.
    """
    numbers = states.view(torch.float32)
    over = numbers[..., HISTORY] * numbers[..., SCALE] / format_max
    return torch.where(states[..., ROLLS] >= warm_from, over, torch.zeros_like(over))


def is_clipped(over: torch.Tensor) -> torch.Tensor:
    """Return True where an `overshoot` clips most values of a tensor: bool [n, 3]. False for a
    non-finite amax."""
    return (over > on_device(MOST_CLIPPED, over.device)) & torch.isfinite(over)


def on_device(numbers: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Return FP32 numbers, filled in on the device: copying them from the host would wait for
    it."""
    return torch.stack(
        [torch.full((), number, dtype=torch.float32, device=device) for number in numbers]
    )


def is_invalid(states: torch.Tensor, reads_history: bool) -> torch.Tensor:
    """Return True for each scale that is not a positive number, or history with an impossible amax:
    bool [n, 3]. Ignores the newest amax. An inf stops only a rule that `reads_history`, until it
    leaves the history."""
    scale, past = states[..., SCALE], states[..., HISTORY + 1 :]
    invalid = (scale <= 0) | (scale >= _INF)
    return invalid | ((past < 0) | (past >= _INF if reads_history else past > _INF)).any(-1)


def anew(states: torch.Tensor, format_max: torch.Tensor, margin: int) -> torch.Tensor:
    """Return fresh states with scales from the newest amaxes: int32 [n, 3, 2 + history length]. The
    scale is 1 for an amax of 0, inf or NaN. A window state restarts its just-in-time steps, since
    its counter is 0."""
    amax = states.view(torch.float32)[..., HISTORY]
    scale = torch.clamp(format_max * 2.0**-margin / amax, max=FP32.max)
    scale = torch.where(is_usable(amax), scale, 1.0)
    new = torch.zeros_like(states)
    new[..., SCALE] = scale.view(torch.int32)
    return new
