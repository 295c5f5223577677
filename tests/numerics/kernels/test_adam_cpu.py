"""The Adam step in C++: all parameters in one pass, and PyTorch's operations to the bit."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch
import warm_process
from hypothesis import given, settings
from hypothesis import strategies as some
from test_adam_bounds import OPTIONS, all_bits, jobs, positive
from test_adam_passes import CASES, bits, needs_compiler, slot, slots, value
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8_backends.numerics.kernels.adam import cpu
from fp8_backends.numerics.kernels.adam.bounds import LEAST_ROOT, measured
from fp8_backends.numerics.kernels.adam.dispatch import AdamSteps, Job, Slot, adam_hyper
from fp8_backends.numerics.kernels.adam.table import AdamTable
from fp8_backends.numerics.scaled_tensor import quantize

pytestmark = needs_compiler

E4M3 = torch.float8_e4m3fn


def stepped(make, steps=1):
    """Jobs after steps by the kernels, and by PyTorch's operations. The bounds of all are compared."""
    ours, expected = make(), make()
    before = all_bits(ours)
    for _ in range(steps):
        made, eager = AdamSteps(ours), AdamSteps(expected, fused=False)
        assert {type(part.kernels) for part, _ in made._parts} == {cpu.CPUKernels}
        if all(job.kind.bounded for job in ours):
            for job, *bounds in zip(ours, made.amaxes(), eager.amaxes(), strict=True):
                first, second = ([Slot(bound) for bound in of if bound is not None] for of in bounds)
                assert bits(first) == bits(second) or not job.weight.data.numel()
            for job, other in zip(ours, expected, strict=True):
                job.record.copy_(other.record)  # `amaxes` has begun a step
        AdamSteps(ours).run()
        eager.run()
    assert all_bits(ours) != before
    return ours, expected


KINDS = [*((case, "adamw") for case in CASES), *((case, "adam") for case in ("O1", "O2", "O4"))]


@pytest.mark.parametrize("case,options", KINDS)
def test_all_parameters_are_stepped_to_the_bit(case, options):
    ours, expected = stepped(lambda: jobs(case, options), steps=2)
    assert all_bits(ours) == all_bits(expected)
    assert all(torch.equal(job.record, measured(*job.written)) for job in ours if job.kind.bounded)


def test_the_copy_of_a_master_is_cast_to_the_bit_with_the_scale_of_the_bound():
    ours, expected = stepped(lambda: jobs(copied=True), steps=3)
    assert all_bits(ours) == all_bits(expected)
    largest = value(ours[0].copy).abs().max()
    assert 1 / 1.07 <= largest / ours[0].record[0] <= 1.07


@settings(max_examples=40, deadline=None)
@given(
    numel=some.integers(1, 300),
    sizes=some.tuples(positive, positive, positive, positive),
    spread=some.sampled_from([0.0, 1.0, 8.0]),
    zeros=some.tuples(*[some.sampled_from([0.0, 0.5, 1.0])] * 4),
    seed=some.integers(0, 2**31),
)
def test_any_states_are_stepped_to_the_bit(numel, sizes, spread, zeros, seed):
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

    ours, expected = make(), make()
    for _ in range(2):
        AdamSteps(ours).run()
        AdamSteps(expected, fused=False).run()
    assert all_bits(ours) == all_bits(expected)
    assert torch.equal(ours[0].record, measured(*ours[0].written))


@pytest.mark.parametrize("case", ["O2", "O4"])
def test_the_record_has_what_is_stored_of_a_positive_second_moment_that_rounds_to_zero(case):
    def make():
        ones, largest = torch.ones(64), torch.tensor([1e10] + [0.0] * 63)
        values = ones, 1e-6 * ones, ones, largest
        parts = [slot(x, kind) for x, kind in zip(values, CASES[case], strict=True)]
        hyper = adam_hyper(1e-3, (0.9, 0.999), 1e-8, 0.0, torch.tensor(3.0), "cpu")
        return [Job(*parts, hyper, seed=0, record=measured(parts[0], *parts[2:]), **OPTIONS["adamw"])]

    ours, expected = stepped(make)
    assert all_bits(ours) == all_bits(expected) and (value(ours[0].exp_avg_sq) > 1e-10).all()
    assert torch.equal(ours[0].record, measured(*ours[0].written))


@pytest.mark.parametrize("case", ["O2", "all blocks", "wide gradient", "O4"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_counts_as_zero_and_others_do_not(case, bad):
    def make(bad=bad):
        first, *others = jobs(case)
        values = value(first.grad)
        values[2999] = bad
        made = quantize(values, E4M3, block_size=first.grad.block_size)
        scaled = Slot(made._data, made._scale_inv, made.block_size)
        return [first._replace(grad=Slot(values) if first.grad.scale_inv is None else scaled), *others]

    ours, expected = stepped(make)
    assert all_bits(ours) == all_bits(expected) and ours[0].record.isfinite().all()
    still = make(0.0)[:1]
    still[0].grad.data.zero_()
    # the bound of a gradient of codes is that of its scale
    still = [still[0]._replace(finite=torch.tensor(False))]
    AdamSteps(still, fused=False).run()
    assert bits([ours[0].weight]) == bits([still[0].weight])


@pytest.mark.parametrize("size", [3e38, 1e30, 1e-38, 1e-44])
def test_huge_and_tiny_gradients(size):
    def make():
        zeros = slots("O2", 300)
        for part in zeros[2:]:
            part.data.zero_()
        gradient = Slot(torch.linspace(-1, 1, 300) * size)
        weight = Slot(zeros[0].data, torch.full((), size if size < 1 else 1.0))
        hyper = adam_hyper(size if size < 1 else 1e-3, (0.9, 0.999), 1e-8, 0.1, torch.tensor(1.0), "cpu")
        job = Job(weight, gradient, *zeros[2:], hyper, seed=0, **OPTIONS["adamw"])
        return [job._replace(record=measured(*job.written))]

    ours, expected = stepped(make, steps=2)
    assert all_bits(ours) == all_bits(expected)


@pytest.mark.parametrize("case", ["O2", "O4"])
def test_lanes_behind_the_last_element_hold_no_value(case):
    """With the least eps that has bounds, they divide 0 by next to nothing."""

    def make():
        hyper = adam_hyper(1e-3, (0.9, 0.999), LEAST_ROOT, 0.1, torch.tensor(1.0), "cpu")
        return [job._replace(hyper=hyper) for job in jobs(case, sizes=(1, 17, 130))]

    ours, expected = stepped(make)
    assert all_bits(ours) == all_bits(expected) and all(job.weight.scale_inv.isfinite() for job in ours)


@pytest.mark.parametrize("case", ["O2", "O4"])
def test_a_weight_that_is_not_finite_is_marked(case):
    def make():
        made = jobs(case)
        made[0].weight.scale_inv.fill_(float("inf"))
        return [made[0]._replace(record=measured(*made[0].written)), *made[1:]]

    ours, expected = stepped(make)
    assert ours[0].weight.scale_inv.isnan() and expected[0].weight.scale_inv.isnan()
    assert all_bits(ours[1:]) == all_bits(expected[1:])


def test_a_step_in_its_parts_is_the_step():
    whole, parts = jobs("O2", copied=True), jobs("O2", copied=True)
    AdamSteps(whole).run()
    steps = AdamSteps(parts)
    amaxes = [[amax.clone() for amax in of] for of in steps.amaxes()]
    stored = steps.write(amaxes)
    assert stored == [None] * len(parts)  # copies are written
    steps.write_copies(stored)
    assert all_bits(parts) == all_bits(whole)


@pytest.mark.parametrize("case", ["O1", "O2 blocks"])
def test_bounds_and_finiteness_that_several_ranks_agreed_on_are_taken(case):
    ours, expected = jobs(case), jobs(case)
    finite = [torch.tensor(i != 1) for i in range(len(ours))]
    for of, options in ((ours, {}), (expected, {"fused": False})):
        steps = AdamSteps([job._replace(finite=known) for job, known in zip(of, finite, strict=True)], **options)
        steps.write([[None if amax is None else amax * 4 for amax in amaxes] for amaxes in steps.amaxes()])
    assert all_bits(ours) == all_bits(expected) != all_bits(jobs(case))


class CountedKernels(cpu.CPUKernels):
    """Kernels that keep the names of those that were called."""

    def __init__(self, kind):
        super().__init__(kind, cpu.kernels(kind).library)
        self.calls = []

    def run(self, kernel, table):
        self.calls.append(kernel)
        super().run(kernel, table)


def test_no_tensor_is_made_and_no_call_added_for_more_parameters():
    for count, copied in ((1, False), (9, False), (3, True)):
        of_table = jobs("O2", copied=copied, sizes=(40,) * count)
        kernels = CountedKernels(of_table[0].kind)
        table = AdamTable(of_table[0].kind, of_table, kernels)
        table.run()
        assert kernels.calls == ["bounds", "write"]
        tensors = [each for each in vars(table).values() if isinstance(each, torch.Tensor)]
        assert sum(each.numel() for each in tensors) <= 30 * count


def test_a_job_without_a_record_is_left_to_pytorch_unless_nothing_has_a_scale():
    for case, fused in (("O2", False), ("bf16 states", True)):
        steps = AdamSteps(jobs(case, bounded=False))
        assert all(hasattr(part, "kernels") == fused for part, _ in steps._parts)


@pytest.mark.parametrize("case", ["O1", "O2", "O2 blocks", "all blocks", "bf16 states", "O4"])
def test_a_parameter_of_several_chunks_and_of_several_parts_of_a_pass(case):
    """The passes work on 2**18 elements at a time, the kernels on 2**16."""
    ours, expected = stepped(lambda: jobs(case, sizes=(2**19 + 77,)))
    assert all_bits(ours) == all_bits(expected)


def test_what_is_written_counts_as_changed_in_place():
    (job,) = jobs("O2", copied=True, sizes=(40,))
    written = [part for slot in (*job.written, job.copy) for part in slot[:2]]
    versions = [part._version for part in written]
    untouched = [part._version for part in job.grad[:2]]
    AdamSteps([job]).run()
    assert all(part._version > version for part, version in zip(written, versions, strict=True))
    assert [part._version for part in job.grad[:2]] == untouched


def test_several_threads_write_the_same():
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        ours, expected = stepped(lambda: jobs("O2", copied=True, sizes=(300_000, 5, 200_000)))
    finally:
        torch.set_num_threads(threads)
    assert all_bits(ours) == all_bits(expected)


def test_an_empty_parameter_among_others():
    ours, expected = stepped(lambda: jobs("O2", sizes=(0, 50, 0)))
    assert all_bits(ours[1:2]) == all_bits(expected[1:2])
    assert all(job.weight.scale_inv.isfinite() for job in ours)


def test_fake_tensors_never_reach_a_kernel():
    hyper = adam_hyper(1e-3, (0.9, 0.999), 1e-8, 0.1, torch.tensor(1.0), "cpu")
    with FakeTensorMode(allow_non_fake_inputs=True):
        steps = AdamSteps([Job(*slots("O2", 100), hyper, **OPTIONS["adamw"], seed=0)])
    assert not any(hasattr(part, "kernels") for part, _ in steps._parts)


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["AVX2", "DEFAULT"])
def test_older_processors_compute_the_same(capability, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    cpu._library.cache_clear()
    try:
        for case, options in (("bf16 states", "adamw"), ("e5m2 gradient", "adamw"), ("O4", "adamw"), ("O4", "adam")):
            ours, expected = stepped(lambda case=case, options=options: jobs(case, options))
            assert all_bits(ours) == all_bits(expected)
    finally:
        cpu._library.cache_clear()


@pytest.mark.slow
def test_processes_that_start_together_compile_once_and_the_first_rank_says_so(tmp_path):
    """A compiler that takes its time over writing its file: whoever looked for it without waiting would load half."""
    compiler, log = tmp_path / "slow-g++", tmp_path / "log"
    compiler.write_text(
        f"#!{sys.executable}\n"
        "import subprocess, sys, time\n"
        f"open({str(log)!r}, 'a').write('compiled\\n')\n"
        "target = sys.argv[sys.argv.index('-o') + 1]\n"
        f"made = {str(tmp_path / 'made.so')!r}\n"
        "subprocess.run(['g++', *[made if each == target else each for each in sys.argv[1:]]], check=True)\n"
        "data = open(made, 'rb').read()\n"
        "with open(target, 'wb', buffering=0) as out:\n"
        "    out.write(data[: len(data) // 2]); time.sleep(1); out.write(data[len(data) // 2 :])\n"
    )
    compiler.chmod(0o755)
    script = f"""
        import sys, warnings
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        from test_adam_passes import bits, slots, step
        warnings.simplefilter("error")
        fast, eager = slots("O2", 1000), slots("O2", 1000)
        step(fast, one_pass="fused"), step(eager, one_pass="eager")
        assert bits(fast) == bits(eager)
    """
    environment = {**os.environ, "CXX": str(compiler), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [warm_process.python(), "-c", textwrap.dedent(script)]
    processes = [
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**environment, "RANK": str(rank)})
        for rank in range(3)
    ]
    said = [process.communicate(timeout=240)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * 3, said
    assert log.read_text() == "compiled\n"
    assert [line.count("compiling the optimizer's step") for line in said] == [1, 0, 0]


@pytest.mark.slow
def test_without_a_compiler_the_step_runs_eagerly():
    script = """
        import sys, warnings
        sys.path.insert(0, {tests!r})
        from test_adam_passes import bits, slots, step
        fast, eager = slots("O2", 1000), slots("O2", 1000)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            step(fast, one_pass="fused"), step(fast, 2, one_pass="fused")
            others = slots("O1", 1000)
            step(others, one_pass="fused")
        step(eager, one_pass="eager"), step(eager, 2, one_pass="eager")
        assert bits(fast) == bits(eager)
        found = [str(w.message) for w in seen if "uncompiled" in str(w.message)]
        assert len(found) == 2, found  # one for each kind of parameters, not for each step
    """
    environment = {**os.environ, "CXX": "no-such-compiler", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    done = warm_process.run("-c", textwrap.dedent(script).format(tests=os.path.dirname(__file__)), env=environment)
    assert done.returncode == 0, done.stderr
