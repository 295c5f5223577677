"""The Adam step in C++: all parameters in one call a pass, the passes of PyTorch operations to the bit."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch
import warm_process
from test_adam_passes import CASES, bits, needs_compiler, slots, value
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8_backends.numerics.kernels.adam import cpu
from fp8_backends.numerics.kernels.adam.dispatch import AdamSteps, Job, Slot, adam_hyper
from fp8_backends.numerics.kernels.adam.table import AdamTable
from fp8_backends.numerics.scaled_tensor import quantize

pytestmark = needs_compiler

E4M3 = torch.float8_e4m3fn
SIZES = (3000, 1, 70_001, 16, 130)  # vectors and less, a chunk and more
OPTIONS = {
    "adamw": {"decoupled": True, "maximize": False, "rounding": "stochastic"},
    "adam": {"decoupled": False, "maximize": True, "rounding": "nearest"},
}


def jobs(case="O2", options="adamw", copied=False, sizes=SIZES):
    made = []
    for i, numel in enumerate(sizes):
        hyper = adam_hyper(1e-3 * (i + 1), (0.9, 0.999), 1e-8, 0.1, torch.tensor(float(i + 1)), "cpu")
        copy = Slot(torch.zeros(numel, dtype=E4M3), torch.ones(())) if copied else None
        made.append(Job(*slots(case, numel, i), hyper, seed=2**20 + i, copy=copy, first=2**31 - 40, **OPTIONS[options]))
    return made


def all_bits(of):
    return bits([each for job in of for each in (*job[:4], job.copy) if each is not None])


def both(make, passes=1):
    """Jobs after a step by the kernels, and by PyTorch's operations."""
    ours, expected = make(), make()
    before = all_bits(ours)
    for _ in range(passes):
        steps = AdamSteps(ours)
        assert {type(part.kernels) for part, _ in steps._parts} == {cpu.CPUKernels}
        steps.run()
        AdamSteps(expected, fused=False).run()
    assert all_bits(ours) != before
    return ours, expected


@pytest.mark.parametrize("case", CASES)
def test_all_parameters_are_stepped_to_the_bit(case):
    ours, expected = both(lambda: jobs(case))
    assert all_bits(ours) == all_bits(expected)


def test_other_options_to_the_bit():
    ours, expected = both(lambda: jobs("O2", "adam"))
    assert all_bits(ours) == all_bits(expected)


def test_the_copy_of_a_master_is_cast_to_the_bit():
    ours, expected = both(lambda: jobs("O2", copied=True), passes=3)
    assert all_bits(ours) == all_bits(expected)


def test_a_copy_is_cast_again_where_rounding_changed_its_scale():
    """A weight of 448 that grows to 448.05, for which E4M3 needs a scale of 1/2, is stored as 448, where it is 1."""

    def make():
        zeros, weight = torch.zeros(1500), quantize(torch.linspace(-448.0, 448.0, 1500), torch.float16)
        parts = (Slot(weight._data, weight._scale_inv), Slot(zeros - 1), Slot(zeros), Slot(zeros.clone()))
        hyper = adam_hyper(0.05, (0.9, 0.999), 1e-8, 0.0, torch.tensor(1.0), "cpu")
        copy = Slot(torch.zeros(1500, dtype=E4M3), torch.zeros(()))
        return [Job(*parts, hyper, decoupled=True, maximize=False, rounding="nearest", seed=0, copy=copy)]

    ours, expected = both(make)
    assert all_bits(ours) == all_bits(expected) and ours[0].copy.scale_inv == 1.0


@pytest.mark.parametrize("case", ["O2", "all blocks", "wide gradient", "O4"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_counts_as_zero_and_others_do_not(case, bad):
    def make():
        first, *others = jobs(case)
        values = value(first.grad)
        values[2999] = bad
        if first.grad.scale_inv is None:
            return [first._replace(grad=Slot(values)), *others]
        made = quantize(values, first.grad.data.dtype, block_size=first.grad.block_size)
        return [first._replace(grad=Slot(made._data, made._scale_inv, made.block_size)), *others]

    ours, expected = both(make)
    assert all_bits(ours) == all_bits(expected)
    still = jobs(case)[:1]
    still[0].grad.data.zero_()
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
        return [Job(weight, gradient, *zeros[2:], hyper, seed=0, **OPTIONS["adamw"])]

    ours, expected = both(make, passes=2)
    assert all_bits(ours) == all_bits(expected)


@pytest.mark.parametrize("case", ["O2", "O4"])
def test_lanes_behind_the_last_element_hold_no_value(case):
    """With an eps of 0 they divide 0 by 0."""

    def make():
        hyper = adam_hyper(1e-3, (0.9, 0.999), 0.0, 0.1, torch.tensor(1.0), "cpu")
        return [job._replace(hyper=hyper) for job in jobs(case, sizes=(1, 17, 130))]

    ours, expected = both(make)
    assert all_bits(ours) == all_bits(expected) and all(job.weight.scale_inv.isfinite() for job in ours)


@pytest.mark.parametrize("case", ["O2", "O4"])
def test_a_weight_that_is_not_finite_is_marked(case):
    def make():
        made = jobs(case)
        made[0].weight.scale_inv.fill_(float("inf"))
        return made

    ours, expected = both(make)
    assert all_bits(ours) == all_bits(expected) and ours[0].weight.scale_inv.isnan()


def test_a_step_in_its_parts_is_the_step():
    whole, parts = jobs("O2", copied=True), jobs("O2", copied=True)
    AdamSteps(whole).run()
    steps = AdamSteps(parts)
    amaxes = [[amax.clone() for amax in of] for of in steps.amaxes()]
    steps.write_copies([amax.clone() for amax in steps.write(amaxes)])
    assert all_bits(parts) == all_bits(whole)


@pytest.mark.parametrize("case", ["O1", "O2 blocks"])
def test_amaxes_and_finiteness_that_several_ranks_agreed_on_are_taken(case):
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
        assert kernels.calls == ["amaxes", "write", "recast"][: 2 + copied]
        tensors = [each for each in vars(table).values() if isinstance(each, torch.Tensor)]
        assert sum(each.numel() for each in tensors) <= 30 * count


@pytest.mark.parametrize("case", ["O1", "O2", "O2 blocks", "all blocks", "bf16 states", "O4"])
def test_a_parameter_of_several_chunks_and_of_several_parts_of_a_pass(case):
    """The passes work on 2**18 elements at a time, the kernels on 2**16."""
    ours, expected = both(lambda: jobs(case, sizes=(2**19 + 77,)))
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
        ours, expected = both(lambda: jobs("O2", copied=True, sizes=(300_000, 5, 200_000)))
    finally:
        torch.set_num_threads(threads)
    assert all_bits(ours) == all_bits(expected)


def test_an_empty_parameter_among_others():
    ours, expected = both(lambda: jobs("O2", sizes=(0, 50, 0)))
    assert all_bits(ours) == all_bits(expected)


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
        for case in ("bf16 states", "e5m2 gradient"):  # of the levels in one pass: test_adam_bounds.py
            ours, expected = both(lambda case=case: jobs(case))
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
        step(fast, compiled=True), step(eager)
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
            step(fast, compiled=True), step(fast, 2, compiled=True)
            others = slots("O1", 1000)
            step(others, compiled=True)
        step(eager), step(eager, 2)
        assert bits(fast) == bits(eager)
        found = [str(w.message) for w in seen if "uncompiled" in str(w.message)]
        assert len(found) == 2, found  # one for each kind of parameters, not for each step
    """
    environment = {**os.environ, "CXX": "no-such-compiler", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    done = warm_process.run("-c", textwrap.dedent(script).format(tests=os.path.dirname(__file__)), env=environment)
    assert done.returncode == 0, done.stderr
