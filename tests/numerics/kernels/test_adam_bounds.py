"""The Adam step in one pass: bounds of what it stores hold, and nothing but the scales differs from two passes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from test_adam_passes import CASES, bits, needs_compiler, slot, slots, value

from fp8_backends.numerics.kernels import reference
from fp8_backends.numerics.kernels.adam import cpu
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
        job = Job(*parts, hyper, seed=2**20 + i, copy=copy, first=40, **OPTIONS[options])
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


# The kernels for a CPU


KINDS = [
    ("O1", "adam"),
    ("O2", "adamw"),
    ("O2", "adam"),
    ("O2 blocks", "adamw"),
    ("wide gradient", "adamw"),
    ("all blocks", "adamw"),
    ("O4", "adamw"),
    ("O4", "adam"),
    ("O4 blocks of 32", "adamw"),
]


def stepped(make, steps=2):
    """Jobs after steps by the kernels, and by PyTorch's operations."""
    ours, expected = make(), make()
    for _ in range(steps):
        made, eager = AdamSteps(ours), AdamSteps(expected, fused=False)
        assert {type(part.kernels) for part, _ in made._parts} == {cpu.CPUKernels}
        bounds = [[amax for amax in of if amax is not None and not amax.dim()] for of in made.amaxes()]
        assert bits([Slot(amax) for of in bounds for amax in of]) == bits(
            [Slot(amax) for of in eager.amaxes() for amax in of if amax is not None and not amax.dim()]
        )
        for job, before in zip(ours, expected, strict=True):
            job.record.copy_(before.record)  # `amaxes` has begun a step
        AdamSteps(ours).run()
        eager.run()
    return ours, expected


@needs_compiler
@pytest.mark.parametrize("case,options", KINDS)
def test_all_parameters_are_stepped_in_one_pass_to_the_bit(case, options):
    ours, expected = stepped(lambda: jobs(case, options))
    assert all_bits(ours) == all_bits(expected)


@needs_compiler
def test_parts_of_a_large_parameter_are_stepped_in_one_pass_to_the_bit():
    sizes = (*SIZES, 15, 127, 129, 2**18 + 5)  # the passes work on 2**18 elements at a time, the kernels on 2**16
    ours, expected = stepped(lambda: jobs("O4", sizes=sizes))
    assert all_bits(ours) == all_bits(expected)
    assert all(torch.equal(job.record, measured(*job.written)) for job in ours)


@needs_compiler
@settings(max_examples=40, deadline=None)
@given(
    numel=some.integers(1, 300),
    sizes=some.tuples(positive, positive, positive, positive),
    spread=some.sampled_from([0.0, 1.0, 8.0]),
    zeros=some.tuples(*[some.sampled_from([0.0, 0.5, 1.0])] * 4),
    seed=some.integers(0, 2**31),
)
def test_any_states_are_stepped_in_one_pass_to_the_bit(numel, sizes, spread, zeros, seed):
    """Such as no run of Adam has: a share of each of them is 0, alone and in whole blocks."""
    generator = torch.Generator().manual_seed(seed)

    def values(size, share):
        spreads = 2.0 ** (spread * torch.randn(numel, generator=generator))
        kept = torch.rand(-(-numel // 64), generator=generator).repeat_interleave(64)[:numel] >= share
        kept &= torch.rand(numel, generator=generator) >= share / 2
        return kept * (size * torch.randn(numel, generator=generator) * spreads).clamp(-(2.0**62), 2.0**62)

    w, g, m, v = (values(*each) for each in zip(sizes, zeros, strict=True))
    inputs = [w, g, m, v.abs()]

    def make():
        parts = [slot(x, kind) for x, kind in zip(inputs, CASES["O4"], strict=True)]
        hyper = adam_hyper(1e-3, (0.9, 0.999), 1e-8, 0.1, torch.tensor(3.0), "cpu")
        job = Job(*parts, hyper, seed=seed, **OPTIONS["adamw"])
        return [job._replace(record=measured(*job.written))]

    ours, expected = stepped(make)
    assert all_bits(ours) == all_bits(expected)
    assert torch.equal(ours[0].record, measured(*ours[0].written))


@needs_compiler
@pytest.mark.parametrize("case", ["O2", "O4"])
def test_the_record_has_what_is_stored_of_a_positive_second_moment_that_rounds_to_zero(case):
    def make():
        ones, largest = torch.ones(64), torch.tensor([1e10] + [0.0] * 63)
        values = ones, 1e-6 * ones, ones, largest
        parts = [slot(x, kind) for x, kind in zip(values, CASES[case], strict=True)]
        hyper = adam_hyper(1e-3, (0.9, 0.999), 1e-8, 0.0, torch.tensor(3.0), "cpu")
        return [Job(*parts, hyper, seed=0, record=measured(parts[0], *parts[2:]), **OPTIONS["adamw"])]

    ours, expected = stepped(make, steps=1)
    assert all_bits(ours) == all_bits(expected) and (value(ours[0].exp_avg_sq) > 1e-10).all()
    assert torch.equal(ours[0].record, measured(*ours[0].written))


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("capability", ["AVX2", "DEFAULT"])
def test_older_processors_make_one_pass_alike(capability, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    cpu._library.cache_clear()
    try:
        for options in OPTIONS:
            ours, expected = stepped(lambda options=options: jobs("O4", options))
            assert all_bits(ours) == all_bits(expected)
    finally:
        cpu._library.cache_clear()


@needs_compiler
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("case", ["O2", "wide gradient", "all blocks", "O4"])
def test_a_gradient_that_is_not_finite_counts_as_zero_in_the_bounds_too(case, bad):
    def make():
        first, *others = jobs(case)
        values = value(first.grad)
        values[2999] = bad
        block_size = first.grad.block_size
        made = quantize(values, E4M3, block_size=block_size)
        wrong = Slot(values) if first.grad.scale_inv is None else Slot(made._data, made._scale_inv, block_size)
        return [first._replace(grad=wrong), *others]

    ours, expected = stepped(make, steps=1)
    assert all_bits(ours) == all_bits(expected) and ours[0].record.isfinite().all()


@needs_compiler
def test_a_weight_that_is_not_finite_is_marked_in_one_pass_too():
    made = jobs()
    made[0].weight.scale_inv.fill_(float("inf"))
    made[0].record.copy_(measured(*made[0].written))
    AdamSteps(made).run()
    assert made[0].weight.scale_inv.isnan() and made[1].weight.scale_inv.isfinite()


@needs_compiler
def test_shards_take_the_bounds_that_their_ranks_agreed_on():
    def make():
        return [job._replace(finite=torch.tensor(i != 1)) for i, job in enumerate(jobs())]

    ours, expected = make(), make()
    for of, options in ((ours, {}), (expected, {"fused": False})):
        steps = AdamSteps(of, **options)
        steps.write([[amax * 4 for amax in amaxes] for amaxes in steps.amaxes()])
    assert all_bits(ours) == all_bits(expected) != all_bits(jobs())


@needs_compiler
def test_the_copy_of_a_master_has_the_scale_of_the_bound():
    ours, expected = stepped(lambda: jobs(copied=True))
    assert all_bits(ours) == all_bits(expected)
    largest = value(ours[0].copy).abs().max()
    assert 1 / 1.07 <= largest / ours[0].record[0] <= 1.07
