"""The Adam step's kernels, in Triton's interpreter: the passes of PyTorch operations to the bit."""

from __future__ import annotations

import adam_cases as cases
import pytest
import torch
from adam_cases import CASES, OPTIONS, check, hyper_of, jobs, slot, with_record
from widths import nightly, nightly_but

from fp8_backends.kernels import triton_adam, triton_gate
from fp8_backends.kernels.adam import AdamSteps, Job, Slot
from fp8_backends.kernels.adam_table import AdamTable

KINDS = [
    "O1",
    "O2",
    "O2 blocks",
    "all blocks",
    "embedding",
    "bf16",
    "other formats",
    "O4",
    "O4 blocks of 32",
]
KINDS += ["O4 embedding"]


@pytest.fixture(autouse=True)
def states_are_made_without_kernels(monkeypatch):
    def slot(values, kind):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(triton_gate.VARIABLE, "0")
            return make(values, kind)

    make = cases.slot
    monkeypatch.setattr(cases, "slot", slot)


@pytest.mark.parametrize(
    "case, options",
    nightly_but(
        [
            ("O2", "adamw"),
            ("all blocks", "adamw"),
            ("bf16", "adamw"),
            ("O4", "adamw"),
            ("O2", "adam"),
        ],
        [*((kind, "adamw") for kind in KINDS), *((kind, "adam") for kind in ("O2", "O4", "bf16"))],
    ),
)
def test_parameters_step_bitwise_like_reference(case, options):
    """Include full and partial tiles."""
    sizes = (2200, 1) if "O4" in case else (3000, 1, 1024, 130)
    check(lambda: jobs(case, options, sizes=sizes))


def test_master_copy_is_cast_bitwise():
    check(lambda: jobs(copied=True))


@pytest.mark.parametrize(
    "case, bad",
    [
        *(("O2", torch.nan), ("all blocks", torch.inf)),
        *(nightly("O2", torch.inf), nightly("embedding", torch.inf), nightly("bf16", torch.nan)),
    ],
)
def test_only_non_finite_gradients_count_as_zero(case, bad):
    cases.check_non_finite_gradient(case, bad)


@pytest.mark.parametrize("size", [3e38, nightly(1e30), 1e-44])
def test_huge_and_tiny_gradients(size):
    check(lambda: jobs(gradient=size, sizes=(3000, 1)))


@pytest.mark.parametrize("case", ["O2", nightly("O2 blocks"), "O4"])
def test_parameter_of_several_programs_steps_bitwise(case):
    check(lambda: jobs(case, copied=case == "O2", sizes=(10, 9300)))


def test_steps_from_zeros_with_sparse_and_tiny_gradients():
    """Include roots of zero, blocks of zeros, the least roots and the largest quotients; and a
    non-finite gradient."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(2200, generator=generator) * 0.02
    values = weight, weight * 0, weight * 0
    both = []
    for _ in range(2):
        w, m, v = (
            slot(x, kind)
            for x, kind in zip(values, ("split", "e4m3 128", "root8 128"), strict=True)
        )
        both.append(with_record(Job(w, None, m, v, None, seed=3, **OPTIONS["adamw"])))
    for step in range(1, 4):
        grad = torch.randn(2200, generator=generator) * 2.0 ** torch.randint(
            -70, 0, (2200,), generator=generator
        )
        grad[:300] = 0
        grad[1000::step] *= 2.0**-60
        if step == 2:
            grad[7] = float("nan")
        both = [job._replace(grad=Slot(grad), hyper=hyper_of(step)) for job in both]
        for job, fused in zip(both, (True, False), strict=True):
            AdamSteps([job], fused=fused).run()
        assert cases.all_bits(both[:1]) == cases.all_bits(both[1:])


def test_partial_steps_match_whole_step():
    cases.check_steps_in_three_parts()


def test_given_bounds_of_shards_are_used():
    cases.check_agreed_bounds("O2 blocks")


def test_unaligned_memory():
    def make():
        first, second = jobs(sizes=(2048, 1024))
        room = torch.zeros(2049, dtype=torch.float16)[1:].copy_(first.weight.data)
        return [first._replace(weight=first.weight._replace(data=room)), second]

    check(make)


def test_number_of_launches_is_constant(monkeypatch):
    cases.check_launches(triton_adam.TritonKernels, monkeypatch)


def test_an_empty_parameter_among_others():
    cases.check_empty_parameter()


def test_unsupported_block_sizes_fall_back_to_pytorch(monkeypatch):
    monkeypatch.setitem(CASES, "odd blocks", ("fp16", "e4m3", "e4m3 24", "fp16"))
    (job,) = jobs("odd blocks", sizes=(100,))
    steps = AdamSteps([job])
    assert not any(isinstance(part, AdamTable) for part, _ in steps.parts)
    steps.run()
    assert torch.isfinite(job.weight.data).all() and job.exp_avg.data.float().any()
