"""Compare delayed scaling of `native` with TransformerEngine's own Python: histories, scales and
codes, step by step.

Both sides get the same tensors. TransformerEngine's side is real Python from its wheel: recipe
states, quantizers, the global buffers of FP8GlobalStateManager, and the update at the exit of
`te.autocast`. That update has two forms:

- fused, the default: one kernel. Here it is the stand-in's transcription of the kernel
  (`standin/delayed.py`), so these tests prove `native` equal to the transcription; only a GPU can
  prove the transcription equal to the kernel.
- unfused (NVTE_UNFUSED_FP8_UPDATE=1): TransformerEngine's own `_amax_and_scale_update`. It matches
  the kernel as long as every step records an amax above zero and no scale over- or underflows.
  Otherwise it differs: after a step without amax it rolls a zero in, and the kernel keeps history
  and scale. Besides, its division `fp8_max / amax` is torch's `amax.reciprocal() * fp8_max`:
  rounded twice; the kernel rounds once. Scales are then equal bitwise for power-of-two amaxes, and
  within 2**-23 of each other for all.
"""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformer_engine.common.recipe import DelayedScaling, Format
from transformer_engine.pytorch import autocast
from transformer_engine.pytorch.quantization import FP8GlobalStateManager, RecipeState

from fp8_backends.formats import scaling
from fp8_backends.formats.formats import RECIPE_FORMATS
from fp8_backends.formats.scaling import GRAD_OUTPUT, HISTORY, INPUT, SCALE, WEIGHT
from fp8_backends.kernels.quantize import quantize

# the longest history but one is filled twice; several layers: test_oracle_training
STEPS, LAYERS = 80, 1
LENGTHS_AND_MARGINS = [(1, 0), (2, 3), (3, -2), (31, 1), (1024, 0)]
RULES = [
    *(("max", each) for each in LENGTHS_AND_MARGINS),
    ("most_recent", (2, 3)),
    ("most_recent", (1024, 0)),
]


class TransformerEngineLayers:
    """The delayed state of some layers, as `te.Linear` holds it: input and weight forward, gradient
    backward."""

    def __init__(self, recipe: DelayedScaling) -> None:
        FP8GlobalStateManager.reset()
        self.recipe = recipe
        self.metas = [self._meta() for _ in range(LAYERS)]

    def _meta(self) -> dict:
        # as for one product
        sizes = {"scaling_fwd": ("forward", 3), "scaling_bwd": ("backward", 2)}
        states = {
            key: RecipeState.create(self.recipe, mode=mode, num_quantizers=size, device="cpu")
            for key, (mode, size) in sizes.items()
        }
        return {"recipe": self.recipe, "fp8_group": None, **states}

    def step(self, tensors: list[list[list[torch.Tensor]]]) -> list[torch.Tensor]:
        """Return the codes of all casts, forward first. tensors: [layer][INPUT, WEIGHT,
        GRAD_OUTPUT]."""
        codes = []
        with autocast(recipe=self.recipe):
            for meta, (inputs, weights, _) in zip(self.metas, tensors, strict=True):
                FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(meta)
                quantizers = meta["scaling_fwd"].make_quantizers()
                codes += [quantizers[0](x)._data for x in inputs] + [
                    quantizers[1](w)._data for w in weights
                ]
        for meta, (_, _, gradients) in zip(self.metas, tensors, strict=True):
            codes += [meta["scaling_bwd"].make_quantizers()[0](dy)._data for dy in gradients]
        FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        return codes

    def state(self, layer: int, tensor: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale, 0-dimensional, and history [length]."""
        meta = self.metas[layer]["scaling_bwd" if tensor == GRAD_OUTPUT else "scaling_fwd"]
        place = {INPUT: 0, WEIGHT: 1, GRAD_OUTPUT: 0}[tensor]
        return meta.scale[place], meta.amax_history[:, place]


class NativeLayers:
    """The same with the functions of `fp8_backends.formats.scaling`."""

    def __init__(self, length: int, margin: int, algorithm: str, fp8_format: str) -> None:
        self.states = torch.stack([scaling.new_delayed_state(length) for _ in range(LAYERS)])
        forward, gradient = RECIPE_FORMATS[fp8_format]
        self.formats = {INPUT: forward, WEIGHT: forward, GRAD_OUTPUT: gradient}
        self.rule = torch.tensor([forward.max, forward.max, gradient.max]), margin, algorithm, 1

    def step(self, tensors: list[list[list[torch.Tensor]]]) -> list[torch.Tensor]:
        codes = [
            self._cast(layer, t, x)
            for layer in range(LAYERS)
            for t in (INPUT, WEIGHT)
            for x in tensors[layer][t]
        ]
        codes += [
            self._cast(layer, GRAD_OUTPUT, dy)
            for layer in range(LAYERS)
            for dy in tensors[layer][GRAD_OUTPUT]
        ]
        self.states = scaling.rolled_delayed_states(self.states, *self.rule)
        return codes

    def _cast(self, layer: int, tensor: int, x: torch.Tensor) -> torch.Tensor:
        state, amax = self.states[layer], scaling.tensor_amax(scaling.without_nan(x))
        codes = quantize(x, self.formats[tensor], scaling.delayed_scale(state, tensor)).codes
        scaling.record_amax(state, tensor, amax)
        return codes.view(torch.uint8)

    def state(self, layer: int, tensor: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = self.states.view(torch.float32)[layer, tensor]
        return row[SCALE], row[HISTORY:]


def finite(rng: random.Random) -> torch.Tensor:
    magnitude = 10 ** rng.uniform(-8, 8)
    return torch.tensor([rng.uniform(-magnitude, magnitude) for _ in range(4)])


def with_value(rng: random.Random, value: float) -> torch.Tensor:
    """Finite values and this one."""
    x = finite(rng)
    x[rng.randrange(4)] = value
    return x


def any_tensors(rng: random.Random) -> list[torch.Tensor]:
    """Return the values of one tensor of a layer in one step: several microbatches, one, or
    none."""
    kind = rng.choice(
        ["finite"] * 4 + ["skipped", "zeros", "inf", "nan", "all nan", "tiny", "huge", "two"]
    )
    made = {
        "skipped": [],
        "zeros": [torch.zeros(4)],
        "inf": [with_value(rng, rng.choice([math.inf, -math.inf]))],
        "nan": [with_value(rng, math.nan)],
        "all nan": [torch.full((4,), math.nan)],
        "tiny": [torch.tensor([1e-44, 0.0, -3e-45, 0.0])],  # FP8MAX / amax overflows
        "huge": [torch.tensor([3.4e38, 1.0, -1e38, 0.0])],
        "two": [finite(rng), finite(rng)],
    }
    return made.get(kind, [finite(rng)])


def recorded_tensors(rng: random.Random) -> list[torch.Tensor]:
    """Return tensors with equal meaning for the unfused update: an amax above zero in every step,
    of moderate size."""
    return [rng.choice([finite(rng), with_value(rng, math.inf), with_value(rng, math.nan)])]


def power_of_two_tensors(rng: random.Random) -> list[torch.Tensor]:
    """The largest magnitude is a power of two."""
    largest = 2.0 ** rng.randint(-20, 20)
    return [torch.tensor([largest, -largest, rng.uniform(-largest, largest), math.nan])]


def sides(algorithm: str, length: int, margin: int, fp8_format: str = "HYBRID"):
    recipe = DelayedScaling(
        margin=margin,
        amax_history_len=length,
        amax_compute_algo=algorithm,
        fp8_format=Format[fp8_format],
    )
    return TransformerEngineLayers(recipe), NativeLayers(length, margin, algorithm, fp8_format)


def steps_of(te, native, make, seed: int, compare_codes: bool = True, steps: int = STEPS):
    """Both sides step; yields (step, layer, tensor, te's state, native's state) after each step."""
    rng = random.Random(seed)
    for step in range(steps):
        tensors = [[make(rng) for _ in range(3)] for _ in range(LAYERS)]
        for ours, theirs in zip(native.step(tensors), te.step(tensors), strict=True):
            assert not compare_codes or torch.equal(ours, theirs), f"codes of step {step}"
        for layer, tensor in itertools.product(range(LAYERS), (INPUT, WEIGHT, GRAD_OUTPUT)):
            yield step, layer, tensor, te.state(layer, tensor), native.state(layer, tensor)


def assert_equal_steps(te, native, make, seed: int, rtol: float = 0.0, **options) -> None:
    """Histories to the bit, and scales, up to a relative difference."""
    for *where, theirs, ours in steps_of(te, native, make, seed, **options):
        for mine, its, tolerance in zip(ours, theirs, (rtol, 0.0), strict=True):
            said = f"at {where}: {mine}, not {its}"
            assert torch.equal(mine, its) or (mine - its).abs() <= tolerance * its, said
            assert torch.equal(mine.signbit(), its.signbit()), said


@pytest.mark.parametrize("algorithm, length_and_margin", RULES)
def test_many_steps_match_fused_update_bitwise(algorithm, length_and_margin):
    assert_equal_steps(*sides(algorithm, *length_and_margin), any_tensors, seed=1)


@given(
    st.sampled_from(["max", "most_recent"]),
    st.integers(1, 48),
    st.integers(-8, 8),
    st.integers(0, 2**16),
)
@settings(max_examples=12, deadline=None)
def test_every_rule_matches_fused_update_bitwise(algorithm, length, margin, seed):
    assert_equal_steps(*sides(algorithm, length, margin, "E4M3"), any_tensors, seed, steps=40)


@pytest.mark.parametrize("algorithm, length_and_margin", RULES)
def test_power_of_two_steps_match_unfused_update_bitwise(algorithm, length_and_margin, monkeypatch):
    monkeypatch.setenv("NVTE_UNFUSED_FP8_UPDATE", "1")
    both = sides(algorithm, *length_and_margin, fp8_format="E4M3")
    assert_equal_steps(*both, power_of_two_tensors, seed=2)


@pytest.mark.parametrize(
    "algorithm, length_and_margin", [("max", (31, 1)), ("most_recent", (2, 3))]
)
def test_many_steps_match_unfused_update_up_to_one_rounding(
    algorithm, length_and_margin, monkeypatch
):
    """Histories to the bit; scales within 2**-23, two halves of a unit in the last place."""
    monkeypatch.setenv("NVTE_UNFUSED_FP8_UPDATE", "1")
    both = sides(algorithm, *length_and_margin)
    # an ulp of the scale may flip a code
    assert_equal_steps(*both, recorded_tensors, seed=3, rtol=2**-23, compare_codes=False)
