"""MS-AMP's window rule in the native layer: just in time for 16 optimizer steps, then from the last
16 amaxes."""

import math

import pytest
import reference
import torch
from torch import nn

from fp8_backends.compute.native import layer_rule, linear
from fp8_backends.compute.native.backend import NativeCompute
from fp8_backends.convert.conversion import convert
from fp8_backends.errors import FP8BackendError
from fp8_backends.formats.formats import E4M3, E5M2, RECIPE_FORMATS
from fp8_backends.formats.scaling import GRAD_OUTPUT, HISTORY, INPUT, ROLLS, WEIGHT, WINDOW
from fp8_backends.preparation.optimizer_steps import watch_optimizer
from fp8_backends.recipes.handlers import FP8RecipeKwargs

COMPUTE = NativeCompute()


def prepare(model, backend="native:window", **fields):
    convert(model, FP8RecipeKwargs(backend=backend, **fields))
    return model


def one_layer(**fields):
    torch.manual_seed(0)
    return prepare(nn.Sequential(nn.Linear(16, 16)), **fields)


def step(model, x, dy=None):
    """Run forward, backward and roll."""
    x = x.detach().clone().requires_grad_()
    y = model(x)
    y.backward(torch.ones_like(y) if dy is None else dy)
    COMPUTE.after_optimizer_step(model)
    return y.detach(), x.grad


def scale_of(amax, fmt):
    return 2.0 ** math.floor(math.log2(fmt.max / amax))


def row(model, tensor):
    """(counter, history) of the first layer"""
    state = model[0].fp8_scaling[tensor]
    return state[ROLLS].item(), state.view(torch.float32)[HISTORY:].tolist()


@pytest.fixture
def scales(monkeypatch):
    """The scales of inputs and gradients, in order."""
    seen = {INPUT: [], GRAD_OUTPUT: []}
    original = linear.quantized

    def watched(matrix, fmt, rule, state, tensor, *layouts, **named):
        layouts = original(matrix, fmt, rule, state, tensor, *layouts, **named)
        if tensor in seen:
            seen[tensor].append(1 / layouts.scale_inv.item())
        return layouts

    for module in (linear, layer_rule):
        monkeypatch.setattr(module, "quantized", watched)
    return seen


def test_window_is_just_in_time_for_16_steps_then_delayed(scales):
    model = one_layer()
    amaxes = [1.5 * 2.0 ** ((5 * i) % 19 - 9) for i in range(40)]
    gradients = [1.5 * 2.0 ** ((3 * i) % 23 - 30) for i in range(40)]
    for amax, gradient in zip(amaxes, gradients, strict=True):
        step(model, torch.full((4, 16), amax), torch.full((4, 16), gradient))
    for seen, recorded, fmt in (
        (scales[INPUT], amaxes, E4M3),
        (scales[GRAD_OUTPUT], gradients, E5M2),
    ):
        just_in_time = [scale_of(amax, fmt) for amax in recorded[:16]]
        delayed = [scale_of(max(recorded[i - 16 : i]), fmt) for i in range(16, 40)]
        assert seen == just_in_time + delayed
        # or it was never delayed
        assert just_in_time + delayed != [scale_of(amax, fmt) for amax in recorded]
    assert row(model, INPUT) == (40, [0.0, *amaxes[:-16:-1]])


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("at", [3, 20])
def test_non_finite_value_restarts_just_in_time_steps(scales, bad, at):
    model = one_layer()
    amaxes = [1.5 * 2.0 ** ((5 * i) % 9 - 4) for i in range(at + 30)]
    for i, amax in enumerate(amaxes):
        x, dy = torch.full((4, 16), amax), torch.full((4, 16), amax)
        if i == at:
            x[1, 1] = dy[2, 2] = bad
        y, dx = step(model, x, dy)
        assert torch.isfinite(y).all() == torch.isfinite(dx).all() == (i != at)
        assert torch.isfinite(model[0].fp8_scaling.view(torch.float32)[:, HISTORY:]).all()
    for seen, fmt in ((scales[INPUT], E4M3), (scales[GRAD_OUTPUT], E5M2)):
        after = seen[at + 1 :]
        assert after[:16] == [scale_of(amax, fmt) for amax in amaxes[at + 1 : at + 17]]
        assert after[16:] == [
            scale_of(max(amaxes[i - 16 : i]), fmt) for i in range(at + 17, at + 30)
        ]
    # the weight's scale has no history to poison
    assert row(model, WEIGHT) == (0, [0.0] * WINDOW)


def test_steps_without_amax_leave_window_unchanged(scales):
    """Try an idle layer, an expert without tokens, and a gradient of zeros."""
    model = one_layer()
    for _ in range(40):
        COMPUTE.after_optimizer_step(model)
    assert row(model, INPUT) == (0, [0.0] * WINDOW)
    step(model, torch.zeros(4, 16))
    assert scales[INPUT] == [1.0] and row(model, INPUT)[0] == 0
    for _ in range(16):
        step(model, torch.full((4, 16), 10.0))
    before = row(model, INPUT)
    for _ in range(40):
        step(model, torch.zeros(4, 16))
    assert row(model, INPUT) == before and before[0] == 16
    step(model, torch.full((4, 16), 1e4))
    step(model, torch.full((4, 16), 10.0))
    assert scales[INPUT][-2:] == [32.0, 1 / 32]


def test_a_delayed_scale_saturates_a_spike_for_one_step():
    model = one_layer()
    for _ in range(20):
        step(model, torch.ones(4, 16))
    spike = torch.ones(4, 16) * 1000
    exact = nn.functional.linear(spike, model[0].weight, model[0].bias)
    errors = [((step(model, spike)[0] - exact).norm() / exact.norm()).item() for _ in range(2)]
    assert errors[0] > 0.4 and errors[1] < 0.04


def test_microbatches_and_skipped_steps_record_largest_amax():
    """A step skipped by a loss scaler never ends: its amax counts for the next."""
    model = one_layer()
    for amax in (1.0, 8.0, 2.0):
        model(torch.full((4, 16), amax)).sum().backward()
    assert row(model, INPUT) == (0, [8.0] + [0.0] * 15)
    COMPUTE.after_optimizer_step(model)
    assert row(model, INPUT) == (1, [0.0, 8.0] + [0.0] * 14)


@pytest.mark.parametrize("tokens,n_in,n_out", [(32, 64, 48), (17, 33, 5)])
@pytest.mark.parametrize("fp8_format", ["HYBRID", "E4M3"])
def test_all_three_products_match_reference(tokens, n_in, n_out, fp8_format):
    """Codes and scales equal plain Python's; FP32 results differ only by the order of summation."""
    torch.manual_seed(0)
    model = prepare(nn.Sequential(nn.Linear(n_in, n_out, bias=False)), fp8_format=fp8_format)
    forward, gradient = RECIPE_FORMATS[fp8_format]
    windows = {INPUT: (1.0, 0, [0.0] * WINDOW), GRAD_OUTPUT: (1.0, 0, [0.0] * WINDOW)}

    def quantized(values, tensor, fmt):
        amax = values.abs().max().item()
        s = scale_of(amax, fmt)
        if tensor != WEIGHT:
            in_force, counter, history = windows[tensor]
            s = s if counter < WINDOW else in_force
            windows[tensor] = reference.window_update(in_force, counter, [amax, *history[1:]], fmt)
        return reference.dequantize(reference.cast(values * s, fmt), torch.tensor(1 / s)).double()

    for i in range(20):
        x, dy = torch.randn(tokens, n_in) * 1.5**i, torch.randn(tokens, n_out) / 1.5**i
        model.zero_grad()
        y, dx = step(model, x, dy)
        x8, dy8 = quantized(x, INPUT, forward), quantized(dy, GRAD_OUTPUT, gradient)
        w8 = quantized(model[0].weight.detach(), WEIGHT, forward)
        for ours, exact in ((y, x8 @ w8.t()), (dx, dy8 @ w8), (model[0].weight.grad, dy8.t() @ x8)):
            assert (ours - exact).abs().max() <= 2**-19 * exact.abs().max()
    for tensor, (s, counter, history) in windows.items():
        assert row(model, tensor) == (counter, history)
        assert model[0].fp8_scaling[tensor].view(torch.float32)[0].item() == s


def test_optimizer_step_rolls_window_once_for_all_microbatches():
    model, recipe = nn.Sequential(nn.Linear(16, 16)), FP8RecipeKwargs(backend="native:window")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    convert(model, recipe)
    watch_optimizer([model], optimizer, recipe)
    for _ in range(3):
        for _ in range(2):
            model(torch.randn(4, 16, requires_grad=True)).sum().backward()
        optimizer.step()
    assert row(model, INPUT)[0] == row(model, GRAD_OUTPUT)[0] == 3


def test_evaluation_and_no_grad_leave_window_unchanged():
    model = one_layer(use_autocast_during_eval=True)
    step(model, torch.randn(4, 16))
    before = model[0].fp8_scaling.clone()
    with torch.no_grad():
        model(torch.randn(4, 16) * 50)
    model.eval()
    model(torch.randn(4, 16) * 50)
    COMPUTE.after_optimizer_step(model)
    assert model[0].fp8_products[0] == 3 and torch.equal(model[0].fp8_scaling, before)


@pytest.mark.parametrize("saved_after", [5, 18])
def test_resumed_run_matches_uninterrupted_run_bitwise(saved_after):
    batches = (
        torch.randn(24, 4, 16, generator=torch.Generator().manual_seed(0))
        * 1.1 ** torch.arange(24.0)[:, None, None]
    )
    model, resumed = one_layer(), one_layer()
    for x in batches[:saved_after]:
        step(model, x)
    COMPUTE.load_scaling_state(resumed, COMPUTE.scaling_state(model))
    for x in batches[saved_after:]:
        assert all(map(torch.equal, step(model, x), step(resumed, x)))
    assert torch.equal(model[0].fp8_scaling, resumed[0].fp8_scaling)


def test_delayed_state_is_refused_as_window():
    delayed = one_layer(backend="native:delayed", amax_history_len=16)
    window = one_layer()
    assert delayed[0].fp8_scaling.shape == window[0].fp8_scaling.shape
    for saved, target in ((delayed, window), (window, delayed)):
        with pytest.raises(FP8BackendError, match="other FP8 layers .of another rule"):
            COMPUTE.load_scaling_state(target, COMPUTE.scaling_state(saved))


def test_repr_shows_rule():
    assert "native:window i:e4m3,w:e4m3,go:e5m2" in repr(one_layer()[0])
