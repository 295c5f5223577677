"""Hold the one-pass Adam step to its bounds, and to two passes up to the scales."""

import pytest
import reference
import torch
from adam_cases import OPTIONS, all_bits, hyper_of, jobs, slot, value, with_record
from hypothesis import given, settings
from hypothesis import strategies as some

from fp8_backends.kernels.adam import AdamSteps, Job, Slot
from fp8_backends.kernels.adam_table import LEAST_ROOT, measured, new_bounds

positive = some.floats(-30, 30).map(lambda exponent: 2.0**exponent)
share = some.sampled_from([0.0, 0.1, 0.5, 0.9, 0.99, 0.999, 0.999999])
STORED = {
    "plain": (None, None, None),
    "O2": ("fp16", "e4m3", "fp16"),
    "O4": ("split", "e4m3 32", "root8 32"),
}


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
    stored=some.sampled_from(list(STORED)),
    zeros=some.tuples(*[some.sampled_from([0.0, 0.0, 0.5, 1.0])] * 4),
    seed=some.integers(0, 2**31),
)
def test_elements_stay_within_bound(
    sizes, spread, betas, eps, lr, step, decoupled, maximize, stored, zeros, seed
):
    """Use states beyond any run of Adam: the magnitudes of exp_avg and exp_avg_sq are unrelated."""
    generator = torch.Generator().manual_seed(seed)

    def values(size, share):
        spreads = 2.0 ** (spread * torch.randn(64, generator=generator))
        kept = torch.rand(64, generator=generator) >= share
        return kept * (size * torch.randn(64, generator=generator) * spreads).clamp(
            -(2.0**62), 2.0**62
        )

    w, g, m, v = (values(*each) for each in zip(sizes, zeros, strict=True))
    parts = [slot(x, kind) for x, kind in zip((w, m, v.abs()), STORED[stored], strict=True)]
    inverse = parts[2].scale_inv if stored == "O2" else torch.ones(())
    options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.1}
    w, m, v = (value(part) for part in parts)
    kind = {"decoupled": decoupled, "maximize": maximize}
    new = reference.adam_step(w, g, m, v, **options, step=step, **kind, rounded=reference.to_fp32)
    bounds = new_bounds(
        measured(*parts), g.abs().amax(), hyper_of(step, **options), inverse, decoupled
    )
    for values, bound in zip(new, bounds, strict=True):
        # a bound above FP32's range gives the weight a scale_inv of NaN, as an amax does
        assert bound.isinf() or values.abs().amax() <= bound.double()


def test_bounds_of_a_run_from_zero_are_near_amaxes():
    """After 40 steps, bounds of weight, exp_avg and exp_avg_sq are within one or two powers of
    two."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4096, generator=generator) * 0.02, torch.zeros(4096), torch.zeros(4096)
    parts = [slot(x, kind) for x, kind in zip(values, STORED["O2"], strict=True)]
    record = measured(*parts)
    for t in range(1, 41):
        grad = slot(1e-3 * torch.randn(4096, generator=generator), "e4m3")
        job = Job(
            parts[0], grad, *parts[1:], hyper_of(t), seed=0, record=record, **OPTIONS["adamw"]
        )
        (bounds,) = AdamSteps([job], fused=False).amaxes()
        AdamSteps([job], fused=False).run()
    loose = [(bound / amax).item() for bound, amax in zip(bounds, record, strict=False)]
    assert all(1 <= each < limit for each, limit in zip(loose, (1.2, 2.5, 1.2), strict=True)), loose


@pytest.mark.parametrize(
    "size,eps", [(1e-6, 1e-8), (1e8, 1e-8), (1e12, 1e-8), (1.0, 1e-15), (1.0, LEAST_ROOT)]
)
def test_weight_bound_stays_near_amax_for_any_gradient(size, eps):
    """A bound far above it would flush an FP16 weight to zeros."""
    values = torch.ones(64), torch.zeros(64), torch.zeros(64)
    parts = [slot(x, kind) for x, kind in zip(values, STORED["O2"], strict=True)]
    gradient = Slot(torch.linspace(-size, size, 64))
    for t in range(1, 4):
        job = Job(parts[0], gradient, *parts[1:], hyper_of(t, eps=eps), seed=0, **OPTIONS["adamw"])
        ((bound, _, _),) = AdamSteps([with_record(job)], fused=False).amaxes()
        assert bound < 2
        AdamSteps([with_record(job)], fused=False).run()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("case", ["O1", "O2", "O2 blocks", "e5m2 gradient", "wide gradient", "O4"])
def test_one_pass_matches_two_passes_with_same_scales(case, options):
    one, two = jobs(case, options), jobs(case, options, bounded=False)
    both = zip(
        AdamSteps(one, fused=False).amaxes(), AdamSteps(two, fused=False).amaxes(), strict=True
    )
    of_blocks = [
        [own if bound is None else bound for bound, own in zip(*pair, strict=True)] for pair in both
    ]
    AdamSteps(two, fused=False).write(of_blocks)
    AdamSteps(one, fused=False).run()
    assert all_bits([job._replace(record=None) for job in one]) == all_bits(two)
    assert all(torch.equal(job.record, measured(*job.written)) for job in one)
