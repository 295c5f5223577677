"""The Adam step's kernels, in Triton's interpreter: the passes of PyTorch operations to the bit."""

from __future__ import annotations

import pytest
import torch

from fp8_backends.numerics.kernels.adam import triton_adam
from fp8_backends.numerics.kernels.adam.bounds import measured
from fp8_backends.numerics.kernels.adam.dispatch import AdamSteps, Job, Slot, adam_hyper
from fp8_backends.numerics.scaled_tensor import quantize, quantize_pair

E4M3, E5M2, FP16, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16
ROOT8, PAIR = torch.uint8, "E4M3 with a residual"
SIZES = (3000, 1, 1024, 130)  # tiles that are full, and some that are not
KINDS = {  # weight, grad, exp_avg, exp_avg_sq: dtype, block size; a dtype alone is stored without a scale
    "O1": ((FP16, 0), (E4M3, 0), None, None),
    "O2": ((FP16, 0), (E4M3, 0), (E4M3, 0), (FP16, 0)),
    "O2, blocks of 32": ((FP16, 0), (E4M3, 0), (E4M3, 32), (FP16, 0)),
    "blocks everywhere": ((FP16, 64), (E4M3, 64), (E4M3, 64), (FP16, 64)),
    "an embedding": (None, None, (E4M3, 0), (FP16, 0)),
    "bf16": (BF16, BF16, BF16, BF16),
    "other formats": ((E4M3, 0), (E5M2, 0), (E5M2, 0), (E4M3, 0)),
    "O4": (PAIR, (E4M3, 0), (E4M3, 128), (ROOT8, 128)),
    "O4, blocks of 32": (PAIR, None, (E4M3, 32), (ROOT8, 32)),
    "an embedding at O4": (None, None, (E4M3, 128), (ROOT8, 128)),
}

OF_BYTES = ("O4", "O4, blocks of 32", "an embedding at O4")
NOTHING_BOUNDED = ("blocks everywhere", "an embedding at O4", "bf16")
"""All scales follow from what is written, or there are none."""
OPTIONS = {
    "adamw": {"decoupled": True, "maximize": False, "rounding": "stochastic"},
    "adam": {"decoupled": False, "maximize": True, "rounding": "nearest"},
}


def slot(values: torch.Tensor, kind) -> Slot:
    if kind is PAIR:
        made = quantize_pair(values)
        return Slot(made._data, made._scale_inv, residual=made.stored.residual)
    if not isinstance(kind, tuple):
        return Slot(values.to(kind or torch.float32))
    made = quantize(values, kind[0], block_size=kind[1])
    return Slot(made._data, made._scale_inv, kind[1])


def jobs(
    kind: str, options: str = "adamw", copied: bool = False, size: float = 1e-3, sizes=SIZES, bounded: bool = True
) -> list[Job]:
    made = []
    for i, numel in enumerate(sizes):
        generator = torch.Generator().manual_seed(i)
        w, g, m, v = (torch.randn(numel, generator=generator) for _ in range(4))
        values = (w * 0.02, g * size, m * 1e-4, v**2 * 1e-6)
        hyper = adam_hyper(1e-3 * (i + 1), (0.9, 0.999), 1e-8, 0.1, torch.tensor(float(i + 1)), "cpu")
        copy = Slot(torch.zeros(numel, dtype=E4M3), torch.ones(())) if copied else None
        slots = [slot(x, of) for x, of in zip(values, KINDS[kind], strict=True)]
        job = Job(*slots, hyper, seed=2**20 + i, first=7 * i, copy=copy, **OPTIONS[options])
        made.append(job._replace(record=measured(*job.written)) if bounded else job)
    return made


def bits(of: list[Job]) -> list[bytes]:
    slots = [each for job in of for each in (*job[:4], job.copy) if each is not None]
    tensors = [x for each in slots for x in (each.data, each.scale_inv, each.residual) if x is not None]
    tensors += [job.record for job in of if job.record is not None]
    return [x.reshape(-1).view(torch.uint8).numpy().tobytes() for x in tensors]


def both(make) -> tuple[list[Job], list[Job]]:
    """Jobs after a step by the kernels, and by PyTorch's operations."""
    ours, expected = make(), make()
    before = bits(ours)
    steps = AdamSteps(ours)
    assert {type(part.kernels) for part, _ in steps._parts} == {triton_adam.TritonKernels}
    steps.run()
    AdamSteps(expected, fused=False).run()
    assert bits(ours) != before
    return ours, expected


@pytest.mark.parametrize(
    "kind, options",
    [*((kind, "adamw") for kind in KINDS), *((kind, "adam") for kind in ("O2", "O4", "bf16"))],
)
def test_all_parameters_are_stepped_to_the_bit(kind, options):
    sizes = (2200, 1) if kind in OF_BYTES else SIZES
    ours, expected = both(lambda: jobs(kind, options, sizes=sizes))
    assert bits(ours) == bits(expected)
    made = [AdamSteps(of, **how) for of, how in ((ours, {}), (expected, {"fused": False}))]
    first, second = ([x for of in steps.amaxes() for x in of if x is not None and not x.dim()] for steps in made)
    assert list(map(float, first)) == list(map(float, second)) and (first or kind in NOTHING_BOUNDED)


def test_the_copy_of_a_master_is_cast_to_the_bit():
    ours, expected = both(lambda: jobs("O2", copied=True))
    assert bits(ours) == bits(expected)


@pytest.mark.parametrize(
    "kind, bad",
    [
        ("O2", float("nan")),
        ("O2", float("inf")),
        ("blocks everywhere", float("nan")),
        ("an embedding", float("inf")),
        ("bf16", float("nan")),
    ],
)
def test_a_gradient_that_is_not_finite_counts_as_zero_and_others_do_not(kind, bad):
    def make():
        made = jobs(kind)
        values = made[0].grad.data.float() * 1e-3
        values[2999] = bad
        return [made[0]._replace(grad=slot(values, KINDS[kind][1])), *made[1:]]

    ours, expected = both(make)
    assert bits(ours) == bits(expected)
    zeros = slot(torch.zeros(ours[0].grad.data.numel()), KINDS[kind][1])
    still = [job._replace(grad=zeros, finite=torch.tensor(False)) for job in jobs(kind)[:1]]
    AdamSteps(still, fused=False).run()
    assert bits(ours[:1])[0] == bits(still)[0]


@pytest.mark.parametrize("size", [3e38, 1e30, 1e-44])
def test_huge_and_tiny_gradients(size):
    ours, expected = both(lambda: jobs("O2", size=size, sizes=(3000, 1)))
    assert bits(ours) == bits(expected)


@pytest.mark.parametrize("kind", ["O2", "O2, blocks of 32", "O4"])
def test_a_parameter_of_several_programs_is_stepped_to_the_bit(kind):
    ours, expected = both(lambda: jobs(kind, copied=kind == "O2", sizes=(10, 9300)))
    assert bits(ours) == bits(expected)


def test_steps_from_zeros_whose_gradients_are_zero_here_and_there_and_tiny_elsewhere():
    """Roots of zero, blocks of zeros, the least roots and the largest quotients; and a gradient that is not finite."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(2200, generator=generator) * 0.02
    zeros = [slot(weight, PAIR), *(slot(weight * 0, KINDS["O4"][i]) for i in (2, 3))]
    sides = [
        [Slot(*(x if x is None or isinstance(x, int) else x.clone() for x in each)) for each in zeros] for _ in "ab"
    ]
    records = [measured(*side) for side in sides]
    for step in range(1, 4):
        grad = torch.randn(2200, generator=generator) * 2.0 ** torch.randint(-70, 0, (2200,), generator=generator)
        grad[:300] = 0
        grad[1000::step] *= 2.0**-60
        if step == 2:
            grad[7] = float("nan")
        hyper = adam_hyper(1e-3, (0.9, 0.999), 1e-8, 0.1, torch.tensor(float(step)), "cpu")
        for i, (weight_, m, v) in enumerate(sides):
            job = Job(weight_, Slot(grad), m, v, hyper, seed=3, record=records[i], **OPTIONS["adamw"])
            AdamSteps([job], fused=i == 0).run()
        made = [[x for each in side for x in each if isinstance(x, torch.Tensor)] for side in sides]
        for ours, expected in zip(*([*of, record] for of, record in zip(made, records, strict=True)), strict=True):
            assert torch.equal(ours.view(-1).view(torch.uint8), expected.view(-1).view(torch.uint8))


def test_a_step_in_its_parts_is_the_step():
    whole, parts = jobs("O2", copied=True), jobs("O2", copied=True)
    AdamSteps(whole).run()
    steps = AdamSteps(parts)
    stored = steps.write([[bound.clone() for bound in of] for of in steps.amaxes()])
    assert stored == [None] * len(parts)  # copies are written
    steps.write_copies(stored)
    assert bits(parts) == bits(whole)


def test_bounds_of_several_shards_are_taken_as_they_are_given():
    ours, expected = jobs("O2, blocks of 32"), jobs("O2, blocks of 32")
    steps = [AdamSteps(ours), AdamSteps(expected, fused=False)]
    for each in steps:
        amaxes = each.amaxes()
        each.write([[w * 4, m, v * 64] for w, m, v in amaxes])  # other ranks found more
    assert bits(ours) == bits(expected) != bits(jobs("O2, blocks of 32"))


def test_memory_that_is_not_aligned():
    def make():
        made = jobs("O2", sizes=(2048, 1024))
        room = torch.zeros(2049, dtype=FP16)[1:]
        room.copy_(made[0].weight.data)
        return [made[0]._replace(weight=made[0].weight._replace(data=room)), made[1]]

    ours, expected = both(make)
    assert bits(ours) == bits(expected)


def test_the_number_of_launches_does_not_grow_with_the_parameters(monkeypatch):
    launched = []
    run = triton_adam.TritonKernels.run

    def noted(self, kernel, table):
        launched.append(kernel)
        run(self, kernel, table)

    monkeypatch.setattr(triton_adam.TritonKernels, "run", noted)
    for count, copied in ((1, False), (9, False), (3, True)):
        launched.clear()
        AdamSteps(jobs("O2", copied=copied, sizes=(40,) * count)).run()
        assert launched == ["bounds", "write"]


def test_an_empty_parameter_among_others():
    ours, expected = both(lambda: jobs("O2", sizes=(0, 50, 0)))
    assert bits(ours[1:2]) == bits(expected[1:2])
    assert all(job.weight.scale_inv.isfinite() for job in ours)


def test_block_sizes_that_no_tile_has_are_left_to_pytorch():
    values = torch.randn(100, generator=torch.Generator().manual_seed(0))
    hyper = adam_hyper(1e-3, (0.9, 0.999), 1e-8, 0.1, torch.tensor(1.0), "cpu")
    slots = [
        slot(values, (FP16, 0)),
        slot(values, (E4M3, 0)),
        slot(values * 0, (E4M3, 24)),
        slot(values * 0, (FP16, 0)),
    ]
    job = Job(*slots, hyper, seed=0, **OPTIONS["adamw"])
    steps = AdamSteps([job._replace(record=measured(*job.written))])
    assert not any(hasattr(part, "kernels") for part, _ in steps._parts)
    steps.run()
    assert torch.isfinite(slots[0].data).all() and slots[2].data.float().any()
