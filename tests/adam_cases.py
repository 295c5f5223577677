"""Adam jobs in every combination of formats, and claims about fused kernels: PyTorch operations'
bits."""

from __future__ import annotations

import shutil

import pytest
import torch

from fp8_backends.formats.formats import ROOT8
from fp8_backends.kernels.adam import AdamSteps, Job, Slot, adam_hyper
from fp8_backends.kernels.adam_table import AdamTable, measured
from fp8_backends.tensors.scaled_tensor import quantize

E4M3 = torch.float8_e4m3fn
# weight, grad, exp_avg, exp_avg_sq: a dtype, None for FP32, or a scaled format with its block size
CASES = {
    "fp32": (None, None, None, None),
    "bf16 weight and gradient": (torch.bfloat16, torch.bfloat16, None, None),
    "fp16 weight": (torch.float16, None, None, None),
    "bf16 states": (torch.bfloat16, None, torch.bfloat16, torch.bfloat16),
    "bf16": (torch.bfloat16,) * 4,
    "O1": ("fp16", "e4m3", None, None),
    "O2": ("fp16", "e4m3", "e4m3", "fp16"),
    "O2 blocks": ("fp16", "e4m3", "e4m3 32", "fp16"),
    "all blocks": ("fp16 32", "e4m3 32", "e4m3 32", "fp16 32"),
    "e5m2 gradient": ("fp16", "e5m2", "e4m3", "fp16"),
    "other formats": ("e4m3", "e5m2", "e5m2", "e4m3"),
    "wide gradient": ("fp16", None, "e4m3", "fp16"),
    "embedding": (None, None, "e4m3", "fp16"),
    "O4": ("split", "e4m3", "e4m3 128", "root8 128"),
    "O4 blocks of 32": ("split", "e4m3", "e4m3 32", "root8 32"),
    "O4 embedding": (None, None, "e4m3 128", "root8 128"),
}
SCALED = {"fp16": torch.float16, "e4m3": E4M3, "e5m2": torch.float8_e5m2, "root8": torch.uint8}
OPTIONS = {
    "adamw": {"decoupled": True, "maximize": False, "rounding": "stochastic"},
    "adam": {"decoupled": False, "maximize": True, "rounding": "nearest"},
}
needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler"
)


def slot(values, kind):
    if kind is None or isinstance(kind, torch.dtype):
        return Slot(values.to(kind or torch.float32).clone())
    name, _, block = kind.partition(" ")
    stored = (
        quantize(values, torch.int8)
        if name == "split"
        else quantize(values, SCALED[name], block_size=int(block or 0))
    )
    return Slot(stored.codes, stored.scale_inv, int(block or 0), stored.residual)


def slots(case, numel, seed=0, gradient=1e-3):
    generator = torch.Generator().manual_seed(seed)
    w, g, m, v = (torch.randn(numel, generator=generator) for _ in range(4))
    values = (w * 0.02, g * gradient, m * 1e-4, v**2 * 1e-6)
    return [slot(x, kind) for x, kind in zip(values, CASES[case], strict=True)]


def hyper_of(t=1, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1):
    return adam_hyper(lr, betas, eps, weight_decay, torch.tensor(float(t)), "cpu")


def with_record(job):
    return job._replace(record=measured(*job.written))


def jobs(
    case="O2",
    options="adamw",
    copied=False,
    sizes=(3000, 1, 1024, 130),
    bounded=True,
    gradient=1e-3,
):
    made = []
    for i, numel in enumerate(sizes):
        copy = Slot(torch.zeros(numel, dtype=E4M3), torch.ones(())) if copied else None
        parts, hyper = slots(case, numel, i, gradient), hyper_of(i + 1, 1e-3 * (i + 1))
        job = Job(*parts, hyper, seed=2**20 + i, copy=copy, first=2**31 - 40, **OPTIONS[options])
        made.append(with_record(job) if bounded else job)
    return made


def step(
    parts,
    t=1,
    rounding="stochastic",
    seed=5,
    one_pass=None,
    decoupled=True,
    maximize=False,
    copy=None,
    **hyper,
):
    """Make one step. one_pass: "eager", or "fused" if there is a kernel; else two passes by PyTorch
    operations."""
    job = Job(*parts, hyper_of(t, **hyper), decoupled, maximize, rounding, seed, copy)
    AdamSteps([with_record(job) if one_pass else job], fused=one_pass == "fused").run()


def numbers(of):
    """Decode stored data without scales to FP64, from the definitions of the formats."""
    if of.residual is not None:
        code = of.data.view(torch.uint8).int()
        magnitude = ((code & 0x7F) << 8) + of.residual
        below = magnitude < 2**11  # subnormal
        exponent = torch.where(below, 1, magnitude >> 11) - 7.0
        fraction = torch.where(below, 0, 1) + (magnitude & 0x7FF).double() / 2**11
        return torch.copysign(fraction * 2**exponent, 0.5 - (code >> 7))
    if of.format is ROOT8:
        code = of.data.int()
        exponent, fraction = torch.where(code < 16, 1, code >> 4) - 7.0, (code & 15).double() / 16
        return (torch.where(code < 16, 0, 1) + fraction) * 2**exponent
    return of.data.double()


def value(of):
    """Return the FP32 values of a slot."""
    if of.scale_inv is None:
        return of.data.float()
    scale = (
        of.scale_inv.repeat_interleave(of.block_size)[: of.data.numel()]
        if of.block_size
        else of.scale_inv
    )
    values = numbers(of).float() * scale
    return values * values if of.format is ROOT8 else values


def bits(parts):
    tensors = [
        t for part in parts for t in (part.data, part.scale_inv, part.residual) if t is not None
    ]
    return [t.reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors]


def all_bits(of):
    records = [Slot(job.record) for job in of if job.record is not None]
    return bits([part for job in of for part in (*job[:4], job.copy) if part is not None] + records)


def check(make, steps=1):
    """Step jobs by kernels and by PyTorch operations: equal bits, bounds and records. Returns the
    stepped jobs."""
    ours, expected = make(), make()
    before = all_bits(ours)
    for _ in range(steps):
        fused = AdamSteps(ours)
        assert all(isinstance(part, AdamTable) for part, _ in fused.parts)
        fused.run()
        AdamSteps(expected, fused=False).run()
    assert all_bits(ours) == all_bits(expected) != before
    assert all(torch.equal(job.record, measured(*job.written)) for job in ours if job.kind.bounded)
    both = zip(AdamSteps(ours).amaxes(), AdamSteps(expected, fused=False).amaxes(), strict=True)
    for job, *bounds in zip(ours, *zip(*both, strict=True), strict=True):
        if job.kind.bounded:
            first, second = (
                bits([Slot(bound) for bound in of if bound is not None]) for of in bounds
            )
            assert first == second
    return ours, expected


# Claims about every device's kernels


def check_non_finite_gradient(case, bad):
    """Count the gradient of one parameter as zero, and step the others normally."""

    def make():
        first, *others = jobs(case)
        values = value(first.grad)
        values[2999] = bad
        return [first._replace(grad=slot(values, CASES[case][1])), *others]

    ours, _ = check(make)
    zeros = slot(torch.zeros(3000), CASES[case][1])
    still = [jobs(case)[0]._replace(grad=zeros, finite=torch.tensor(False))]
    AdamSteps(still, fused=False).run()
    assert bits([ours[0].weight]) == bits([still[0].weight])


def check_steps_in_three_parts():
    whole, parts = jobs(copied=True), jobs(copied=True)
    AdamSteps(whole).run()
    steps = AdamSteps(parts)
    stored = steps.write([[bound.clone() for bound in bounds] for bounds in steps.amaxes()])
    assert stored == [None] * len(parts)  # copies are written
    steps.write_copies(stored)
    assert all_bits(parts) == all_bits(whole)


def check_agreed_bounds(case):
    """Bounds and finite flags from several ranks replace the own ones."""
    ours, expected = jobs(case), jobs(case)
    for of, options in ((ours, {}), (expected, {"fused": False})):
        told = [job._replace(finite=torch.tensor(i != 1)) for i, job in enumerate(of)]
        steps = AdamSteps(told, **options)
        steps.write(
            [[None if amax is None else amax * 4 for amax in amaxes] for amaxes in steps.amaxes()]
        )
    assert all_bits(ours) == all_bits(expected) != all_bits(jobs(case))


def check_launches(kernels, monkeypatch):
    """The number of parameters does not change the number of launches."""
    launched, run = [], kernels.run
    monkeypatch.setattr(
        kernels,
        "run",
        lambda self, kernel, table: launched.append(kernel) or run(self, kernel, table),
    )
    for count, copied in ((1, False), (9, False), (3, True)):
        launched.clear()
        AdamSteps(jobs(copied=copied, sizes=(40,) * count)).run()
        assert launched == ["bounds", "write"]


def check_empty_parameter():
    ours, expected = (jobs(sizes=(0, 50, 0)) for _ in range(2))
    AdamSteps(ours).run()
    AdamSteps(expected, fused=False).run()
    assert all_bits(ours[1:2]) == all_bits(expected[1:2])
    assert all(job.weight.scale_inv.isfinite() for job in ours)
