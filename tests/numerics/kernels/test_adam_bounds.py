"""The Adam step in one pass: bounds of what it stores hold, and nothing but the scales differs from two passes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from test_adam_passes import bits, slots, value

from fp8_backends.numerics.kernels import reference
from fp8_backends.numerics.kernels.adam.bounds import LEAST_ROOT, measured, new_bounds
from fp8_backends.numerics.kernels.adam.dispatch import AdamSteps, Job, Slot, adam_hyper
from fp8_backends.numerics.scaled_tensor import quantize, quantize_pair

E4M3, FP16 = torch.float8_e4m3fn, torch.float16
SIZES = (3000, 1, 70_001, 16, 130)
OPTIONS = {
    "adamw": {"decoupled": True, "maximize": False, "rounding": "stochastic"},
    "adam": {"decoupled": False, "maximize": True, "rounding": "nearest"},
}


def jobs(case="O2", options="adamw", copied=False, sizes=SIZES, bounded=True):
    made = []
    for i, numel in enumerate(sizes):
        hyper = adam_hyper(1e-3 * (i + 1), (0.9, 0.999), 1e-8, 0.1, torch.tensor(float(i + 1)), "cpu")
        copy = Slot(torch.zeros(numel, dtype=E4M3), torch.ones(())) if copied else None
        parts = slots(case, numel, i)
        job = Job(*parts, hyper, seed=2**20 + i, copy=copy, first=2**31 - 40, **OPTIONS[options])
        made.append(job._replace(record=measured(*job.written)) if bounded else job)
    return made


def all_bits(of):
    records = [Slot(job.record) for job in of if job.record is not None]
    return bits([each for job in of for each in (*job[:4], job.copy) if each is not None] + records)


# The bounds

positive = some.floats(-30, 30).map(lambda exponent: 2.0**exponent)
share = some.sampled_from([0.0, 0.1, 0.5, 0.9, 0.99, 0.999, 0.999999])


@settings(max_examples=75, deadline=None)
@given(
    sizes=some.tuples(positive, positive, positive, positive),
    spread=some.sampled_from([0.0, 1.0, 8.0, 40.0]),
    betas=some.tuples(share, share),
    eps=some.sampled_from([1e-8, 1e-15, 1e-30, 1.0]),
    lr=some.floats(1e-8, 10.0),
    step=some.sampled_from([1, 2, 10, 10_000]),
    decoupled=some.booleans(),
    maximize=some.booleans(),
    stored=some.sampled_from(["plain", "O2", "O4"]),
    zeros=some.tuples(*[some.sampled_from([0.0, 0.0, 0.5, 1.0])] * 4),
    seed=some.integers(0, 2**31),
)
def test_no_element_is_above_its_bound(sizes, spread, betas, eps, lr, step, decoupled, maximize, stored, zeros, seed):
    """Of any states, such as no run of Adam has: the magnitudes of exp_avg and exp_avg_sq have nothing in common."""
    generator = torch.Generator().manual_seed(seed)

    def values(size, share):
        spreads = 2.0 ** (spread * torch.randn(64, generator=generator))
        kept = torch.rand(64, generator=generator) >= share
        return kept * (size * torch.randn(64, generator=generator) * spreads).clamp(-(2.0**62), 2.0**62)

    w, g, m, v = (values(*each) for each in zip(sizes, zeros, strict=True))
    v = v.abs()
    parts = [Slot(x) for x in (w, m, v)]
    inverse = torch.ones(())
    if stored == "O2":
        parts = [Slot(x._data, x._scale_inv) for x in (quantize(w, FP16), quantize(m, E4M3), quantize(v, FP16))]
        inverse = parts[2].scale_inv
    elif stored != "plain":
        w, m, v = quantize_pair(w), quantize(m, E4M3, block_size=32), quantize(v, torch.uint8, block_size=32)
        parts = [Slot(x._data, x._scale_inv, x.block_size, x.stored.residual) for x in (w, m, v)]
    options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.1, "step": step}
    w, m, v = (value(part) for part in parts)
    new = reference.adam_step(w, g, m, v, **options, decoupled=decoupled, maximize=maximize, rounded=reference.to_fp32)
    hyper = adam_hyper(lr, betas, eps, 0.1, torch.tensor(float(step)), "cpu")
    bounds = new_bounds(measured(*parts), g.abs().amax(), hyper, inverse, decoupled)
    for values, bound in zip(new, bounds, strict=True):
        # a bound above FP32's range gives the weight a scale_inv of NaN, as an amax does
        assert bound.isinf() or values.abs().amax() <= bound.double()


def test_the_bounds_of_a_run_that_began_at_zero_are_near_the_amaxes():
    """After 40 steps, of the weight, exp_avg and exp_avg_sq: within a power of two or two."""
    generator = torch.Generator().manual_seed(0)
    weight = quantize(torch.randn(4096, generator=generator) * 0.02, FP16)
    m, v = quantize(torch.zeros(4096), E4M3), quantize(torch.zeros(4096), FP16)
    parts = [Slot(x._data, x._scale_inv) for x in (weight, m, v)]
    record = measured(*parts)
    for t in range(1, 41):
        gradient = quantize(1e-3 * torch.randn(4096, generator=generator), E4M3)
        grad = Slot(gradient._data, gradient._scale_inv)
        hyper = adam_hyper(1e-3, (0.9, 0.999), 1e-8, 0.1, torch.tensor(float(t)), "cpu")
        job = Job(parts[0], grad, *parts[1:], hyper, seed=0, record=record, **OPTIONS["adamw"])
        (bounds,) = AdamSteps([job], fused=False).amaxes()
        AdamSteps([job], fused=False).run()
    loose = [(bound / amax).item() for bound, amax in zip(bounds, record, strict=False)]
    assert all(1 <= each < limit for each, limit in zip(loose, (1.2, 2.5, 1.2), strict=True)), loose


@pytest.mark.parametrize("size,eps", [(1e-6, 1e-8), (1e8, 1e-8), (1e12, 1e-8), (1.0, 1e-15), (1.0, LEAST_ROOT)])
def test_gradients_of_any_size_leave_the_bound_of_a_weight_near_its_amax(size, eps):
    """A bound far above it would leave an FP16 weight with nothing but zeros."""
    weight, m, v = quantize(torch.ones(64), FP16), quantize(torch.zeros(64), E4M3), quantize(torch.zeros(64), FP16)
    parts = [Slot(x._data, x._scale_inv) for x in (weight, m, v)]
    job = Job(parts[0], Slot(torch.linspace(-size, size, 64)), *parts[1:], None, seed=0, **OPTIONS["adamw"])
    for t in range(1, 4):
        job = job._replace(hyper=adam_hyper(1e-3, (0.9, 0.999), eps, 0.1, torch.tensor(float(t)), "cpu"))
        job = job._replace(record=measured(*parts))
        ((bound, _, _),) = AdamSteps([job], fused=False).amaxes()
        assert bound < 2
        job = job._replace(record=measured(*parts))
        AdamSteps([job], fused=False).run()


# The step


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("case", ["O1", "O2", "O2 blocks", "e5m2 gradient", "wide gradient", "O4"])
def test_it_is_the_step_of_two_passes_with_these_scales(case, options):
    one, two = jobs(case, options), jobs(case, options, bounded=False)
    both = zip(AdamSteps(one, fused=False).amaxes(), AdamSteps(two, fused=False).amaxes(), strict=True)
    of_blocks = [[own if bound is None else bound for bound, own in zip(*pair, strict=True)] for pair in both]
    AdamSteps(two, fused=False).write(of_blocks)
    AdamSteps(one, fused=False).run()
    assert all_bits([job._replace(record=None) for job in one]) == all_bits(two)
    assert all(torch.equal(job.record, measured(*job.written)) for job in one)
