"""The Adam step in C++: all parameters in one pass, and PyTorch's operations to the bit."""

import os
import subprocess
import textwrap
from pathlib import Path

import adam_cases as cases
import pytest
import torch
import warm_process
from adam_cases import (
    CASES,
    OPTIONS,
    all_bits,
    bits,
    check,
    hyper_of,
    jobs,
    slot,
    slots,
    value,
    with_record,
)
from hypothesis import given, settings
from hypothesis import strategies as some
from test_adam_bounds import positive
from torch._subclasses.fake_tensor import FakeTensorMode
from widths import nightly, nightly_but

from fp8_backends.kernels import adam_cpu
from fp8_backends.kernels.adam import AdamSteps, Job, Slot
from fp8_backends.kernels.adam_table import LEAST_ROOT, AdamTable, measured

pytestmark = cases.needs_compiler

TESTS = str(Path(cases.__file__).parent)
SIZES = (3000, 1, 70_001, 16, 130)
KINDS = [*((case, "adamw") for case in CASES), *((case, "adam") for case in ("O1", "O2", "O4"))]


KEPT = [
    ("O2", "adamw"),
    ("all blocks", "adamw"),
    ("bf16", "adamw"),
    ("O4", "adamw"),
    ("O1", "adam"),
    ("O4", "adam"),
]


@pytest.mark.parametrize("case,options", nightly_but(KEPT, KINDS))
def test_parameters_step_bitwise_like_reference(case, options):
    check(lambda: jobs(case, options, sizes=SIZES), steps=2)


def test_master_copy_is_cast_bitwise_with_bound_scale():
    ours, _ = check(lambda: jobs(copied=True, sizes=SIZES), steps=3)
    largest = value(ours[0].copy).abs().max()
    assert 1 / 1.07 <= largest / measured(*ours[0].written)[0] <= 1.07


@settings(max_examples=40, deadline=None)
@given(
    numel=some.integers(1, 300),
    sizes=some.tuples(positive, positive, positive, positive),
    spread=some.sampled_from([0.0, 1.0, 8.0]),
    zeros=some.tuples(*[some.sampled_from([0.0, 0.5, 1.0])] * 4),
    seed=some.integers(0, 2**31),
)
def test_arbitrary_states_step_bitwise_like_reference(numel, sizes, spread, zeros, seed):
    """Use states beyond any run of Adam: a share of each is 0, elements and whole blocks."""
    generator = torch.Generator().manual_seed(seed)

    def values(size, share):
        spreads = 2.0 ** (spread * torch.randn(numel, generator=generator))
        kept = (
            torch.rand(-(-numel // 64), generator=generator).repeat_interleave(64)[:numel] >= share
        )
        kept &= torch.rand(numel, generator=generator) >= share / 2
        return kept * (size * torch.randn(numel, generator=generator) * spreads).clamp(
            -(2.0**62), 2.0**62
        )

    w, g, m, v = (values(*each) for each in zip(sizes, zeros, strict=True))
    both = []
    for fused in (True, False):
        parts = [slot(x, kind) for x, kind in zip((w, g, m, v.abs()), CASES["O4"], strict=True)]
        of = [with_record(Job(*parts, hyper_of(3), seed=seed, **OPTIONS["adamw"]))]
        for _ in range(2):
            AdamSteps(of, fused=fused).run()
        both.append(of)
    assert all_bits(both[0]) == all_bits(both[1])
    assert torch.equal(both[0][0].record, measured(*both[0][0].written))


@pytest.mark.parametrize("case", ["O2", "O4"])
def test_record_includes_least_stored_second_moment(case):
    def make():
        ones, largest = torch.ones(64), torch.tensor([1e10] + [0.0] * 63)
        values = ones, 1e-6 * ones, ones, largest
        parts = [slot(x, kind) for x, kind in zip(values, CASES[case], strict=True)]
        return [with_record(Job(*parts, hyper_of(3, weight_decay=0.0), seed=0, **OPTIONS["adamw"]))]

    ours, _ = check(make)
    assert (value(ours[0].exp_avg_sq) > 1e-10).all()


@pytest.mark.parametrize("case", ["O2", "all blocks", "wide gradient", "O4"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_only_non_finite_gradients_count_as_zero(case, bad):
    cases.check_non_finite_gradient(case, bad)


@pytest.mark.parametrize("size", [3e38, 1e30, 1e-38, 1e-44])
def test_huge_and_tiny_gradients(size):
    """Include a weight with a tiny scale, and a matching learning rate."""

    def make():
        small = min(size, 1.0)
        zeros = slots("O2", 300)
        for part in zeros[2:]:
            part.data.zero_()
        weight, gradient = (
            Slot(zeros[0].data, torch.full((), small)),
            Slot(torch.linspace(-1, 1, 300) * size),
        )
        hyper = hyper_of(1, size if size < 1 else 1e-3)
        return [with_record(Job(weight, gradient, *zeros[2:], hyper, seed=0, **OPTIONS["adamw"]))]

    check(make, steps=2)


@pytest.mark.parametrize("case", ["O2", "O4"])
def test_lanes_beyond_last_element_are_ignored(case):
    """With the least eps allowed for bounds, such lanes divide 0 by almost nothing."""
    hyper = hyper_of(eps=LEAST_ROOT)
    ours, _ = check(lambda: [job._replace(hyper=hyper) for job in jobs(case, sizes=(1, 17, 130))])
    assert all(job.weight.scale_inv.isfinite() for job in ours)


@pytest.mark.parametrize("case", ["O2", "O4"])
def test_non_finite_weight_is_marked(case):
    both = jobs(case), jobs(case)
    for of, fused in zip(both, (True, False), strict=True):
        of[0].weight.scale_inv.fill_(float("inf"))
        of[0] = with_record(of[0])
        AdamSteps(of, fused=fused).run()
        assert of[0].weight.scale_inv.isnan()
    assert all_bits(both[0][1:]) == all_bits(both[1][1:])


def test_partial_steps_match_whole_step():
    cases.check_steps_in_three_parts()


@pytest.mark.parametrize("case", ["O2", "O2 blocks"])
def test_synchronized_bounds_and_finiteness_are_used(case):
    cases.check_agreed_bounds(case)


def test_number_of_calls_is_constant_and_table_small(monkeypatch):
    cases.check_launches(adam_cpu.CPUKernels, monkeypatch)
    of = jobs(sizes=(40,) * 9)
    table = AdamTable(of[0].kind, of, adam_cpu.kernels(of[0].kind))
    assert (
        sum(each.numel() for each in vars(table).values() if isinstance(each, torch.Tensor))
        <= 30 * 9
    )


def test_unsupported_jobs_fall_back_to_pytorch():
    """Include jobs without a record, unless nothing has a scale, and fake tensors."""
    for case, fused in (("O2", False), ("bf16 states", True)):
        steps = AdamSteps(jobs(case, bounded=False))
        assert all(isinstance(part, AdamTable) == fused for part, _ in steps.parts)
    with FakeTensorMode(allow_non_fake_inputs=True):
        steps = AdamSteps([Job(*slots("O2", 100), hyper_of(), **OPTIONS["adamw"], seed=0)])
    assert not any(isinstance(part, AdamTable) for part, _ in steps.parts)


@pytest.mark.parametrize("case", ["O2", "O2 blocks", "bf16", "O4"])
def test_parameter_of_several_chunks_and_passes(case):
    """The passes work on 2**18 elements at a time, the kernels on 2**16."""
    check(lambda: jobs(case, sizes=(2**19 + 77,)))


def test_kernel_writes_bump_version_counters():
    (job,) = jobs(copied=True, sizes=(40,))
    written = [part for slot in (*job.written, job.copy) for part in slot[:2]]
    versions = [part._version for part in written]
    untouched = [part._version for part in job.grad[:2]]
    AdamSteps([job]).run()
    assert all(part._version > version for part, version in zip(written, versions, strict=True))
    assert [part._version for part in job.grad[:2]] == untouched


def test_several_threads_write_same_bits():
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        check(lambda: jobs(copied=True, sizes=(300_000, 5, 200_000)))
    finally:
        torch.set_num_threads(threads)


def test_an_empty_parameter_among_others():
    cases.check_empty_parameter()


def forget():
    """Forget compiled kernels, as a new process."""
    adam_cpu.kernels.cache_clear()
    adam_cpu.library.cache_clear()


@pytest.mark.nightly
@pytest.mark.parametrize("capability", ["AVX2", nightly("DEFAULT")])
def test_older_processors_compute_the_same(capability, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    forget()
    try:
        for case, options in (
            ("bf16", "adamw"),
            ("e5m2 gradient", "adamw"),
            ("O4", "adamw"),
            ("O4", "adam"),
        ):
            check(lambda case=case, options=options: jobs(case, options, sizes=SIZES))
    finally:
        forget()


@pytest.mark.nightly
def test_concurrent_processes_compile_without_waiting_with_notice_on_first_rank(tmp_path):
    """The compiler starts when each process has called it."""
    compiler, log = tmp_path / "patient-g++", tmp_path / "log"
    compiler.write_text(
        f"#!/bin/sh\necho compiling >> {log}\n"
        f'while [ "$(wc -l < {log})" -lt 3 ]; do sleep 0.1; done\nexec g++ "$@" -O0\n'
    )
    compiler.chmod(0o755)
    script = f"""
        import sys, warnings
        sys.path.insert(0, {TESTS!r})
        from adam_cases import bits, slots, step
        warnings.simplefilter("error")
        fast, eager = slots("O2", 1000), slots("O2", 1000)
        step(fast, one_pass="fused"), step(eager, one_pass="eager")
        assert bits(fast) == bits(eager)
    """
    environment = {
        **os.environ,
        "CXX": str(compiler),
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "cache"),
    }
    command = [warm_process.python(), "-c", textwrap.dedent(script)]
    processes = [
        subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env={**environment, "RANK": str(rank)}
        )
        for rank in range(3)
    ]
    said = [process.communicate(timeout=240)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * 3, said
    assert len([*tmp_path.glob("cache/fp8_backends/*")]) == 1
    assert [line.count("compiling the optimizer step") for line in said] == [1, 0, 0]


def test_without_a_compiler_the_step_runs_eagerly(monkeypatch):
    """Warn once per kind of parameters, not per step."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    forget()
    try:
        fast, eager = slots("O2", 1000), slots("O2", 1000)
        with pytest.warns(UserWarning, match="uncompiled") as seen:
            for t in (1, 2):
                cases.step(fast, t, one_pass="fused"), cases.step(eager, t, one_pass="eager")
            cases.step(slots("O1", 1000), one_pass="fused")
        assert bits(fast) == bits(eager) and len(seen) == 2
    finally:
        forget()
