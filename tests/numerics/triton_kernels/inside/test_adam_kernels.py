"""The Adam step's kernels, in Triton's interpreter: the passes of PyTorch operations to the bit."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from fp8_backends.numerics.formats import E4M11
from fp8_backends.numerics.formats import ROOT8 as ROOTS
from fp8_backends.numerics.kernels.adam import triton_adam, triton_usual
from fp8_backends.numerics.kernels.adam.bounds import measured
from fp8_backends.numerics.kernels.adam.dispatch import AdamSteps, Job, Slot, adam_hyper
from fp8_backends.numerics.kernels.adam.rounding import decoded
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
NOTHING_BOUNDED = ("blocks everywhere", "an embedding at O4")
"""All scales follow from what is written."""
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
    kind: str, options: str = "adamw", copied: bool = False, size: float = 1e-3, sizes=SIZES, bounded: bool = False
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


UNUSUAL = ("eps", "a scale", "a weight", "a second moment", "a gradient")


def written_by(make, monkeypatch) -> list[str]:
    """Which functions wrote the tiles of a step that is that of PyTorch's operations."""
    written = []
    for name in ("write_tile", "write_usual_tile"):
        function = getattr(triton_adam, name)
        monkeypatch.setattr(triton_adam, name, lambda *given, f=function, n=name: (written.append(n), f(*given))[1])
    ours, expected = both(make)
    assert bits(ours) == bits(expected)
    return written


@pytest.mark.parametrize(
    "kind, options", [*((kind, "adamw") for kind in KINDS if kind not in OF_BYTES), ("O2", "adam"), ("bf16", "adam")]
)
def test_all_parameters_are_stepped_to_the_bit(kind, options):
    ours, expected = both(lambda: jobs(kind, options))
    assert bits(ours) == bits(expected)


def test_roots_and_residuals_are_stepped_in_two_passes_to_the_bit():
    ours, expected = both(lambda: jobs("O4", "adam", sizes=(1, 1100)))
    assert bits(ours) == bits(expected)


@pytest.mark.parametrize(
    "kind, options",
    [*((kind, "adamw") for kind in KINDS if kind != "bf16"), *((kind, "adam") for kind in ("O2", "O4"))],
)
def test_all_parameters_are_stepped_in_one_pass_to_the_bit(kind, options):
    sizes = (2200, 1) if kind in OF_BYTES else SIZES
    ours, expected = both(lambda: jobs(kind, options, bounded=True, sizes=sizes))
    assert bits(ours) == bits(expected)
    made = [AdamSteps(of, **how) for of, how in ((ours, {}), (expected, {"fused": False}))]
    first, second = ([x for of in steps.amaxes() for x in of if x is not None and not x.dim()] for steps in made)
    assert list(map(float, first)) == list(map(float, second)) and (first or kind in NOTHING_BOUNDED)


def test_the_copy_of_a_master_is_cast_in_one_pass_to_the_bit():
    ours, expected = both(lambda: jobs("O2", copied=True, bounded=True))
    assert bits(ours) == bits(expected)


def test_the_copy_of_a_master_is_cast_to_the_bit():
    ours, expected = both(lambda: jobs("O2", copied=True))
    assert bits(ours) == bits(expected)


def test_a_copy_is_cast_again_where_rounding_changed_its_scale():
    """A weight of 448 that grows to 448.05, for which E4M3 needs a scale of 1/2, is stored as 448, where it is 1."""

    def make():
        zeros = torch.zeros(1500)
        slots = (
            slot(torch.linspace(-448.0, 448.0, 1500), (FP16, 0)),
            Slot(zeros - 1),
            Slot(zeros),
            Slot(zeros.clone()),
        )
        hyper = adam_hyper(0.05, (0.9, 0.999), 1e-8, 0.0, torch.tensor(1.0), "cpu")
        copy = Slot(torch.zeros(1500, dtype=E4M3), torch.zeros(()))
        return [Job(*slots, hyper, decoupled=True, maximize=False, rounding="nearest", seed=0, copy=copy)]

    ours, expected = both(make)
    assert bits(ours) == bits(expected) and ours[0].copy.scale_inv == 1.0


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
@pytest.mark.parametrize("bounded", [False, True])
def test_a_gradient_that_is_not_finite_counts_as_zero_and_others_do_not(kind, bad, bounded):
    def make():
        made = jobs(kind, bounded=bounded)
        values = made[0].grad.data.float() * 1e-3
        values[2999] = bad
        return [made[0]._replace(grad=slot(values, KINDS[kind][1])), *made[1:]]

    ours, expected = both(make)
    assert bits(ours) == bits(expected)
    if bounded:
        return
    still = [made._replace(grad=slot(torch.zeros(made.grad.data.numel()), KINDS[kind][1])) for made in jobs(kind)[:1]]
    AdamSteps(still, fused=False).run()
    assert bits(ours[:1])[0] == bits(still)[0]


@pytest.mark.parametrize("size", [3e38, 1e30, 1e-44])
@pytest.mark.parametrize("bounded", [False, True])
def test_huge_and_tiny_gradients(size, bounded):
    ours, expected = both(lambda: jobs("O2", size=size, bounded=bounded, sizes=(3000, 1)))
    assert bits(ours) == bits(expected)


@pytest.mark.parametrize("kind", ["O2", "O2, blocks of 32", "O4"])
def test_a_parameter_of_several_programs_is_stepped_in_one_pass_to_the_bit(kind):
    ours, expected = both(lambda: jobs(kind, copied=kind == "O2", bounded=True, sizes=(10, 9300)))
    assert bits(ours) == bits(expected)


@pytest.mark.parametrize("unusual", ["", "eps", "a scale", "an infinite weight", "an infinite gradient"])
def test_only_tiles_of_usual_numbers_are_written_the_short_way(unusual, monkeypatch):
    def make():
        (job,) = jobs("O2", sizes=(2048,))
        if unusual == "eps":
            job.hyper[7] = 1e-30
        elif unusual == "a scale":
            job.exp_avg_sq.scale_inv.mul_(1.5)
        elif unusual == "an infinite weight":
            job.weight.data[7] = float("inf")
        elif unusual == "an infinite gradient":
            job.grad.scale_inv.fill_(float("nan"))
        return [job._replace(record=measured(job.weight, job.exp_avg, job.exp_avg_sq))]

    assert written_by(make, monkeypatch) == ["write_tile" if unusual else "write_usual_tile"] * 2


@pytest.mark.parametrize("unusual", ["", *UNUSUAL])
def test_only_tiles_of_usual_numbers_are_written_the_short_way_where_all_are_bytes(unusual, monkeypatch):
    def make():
        (job,) = jobs("O4", sizes=(2048,))
        if unusual == "eps":
            job.hyper[7] = 1e-31
        elif unusual == "a scale":
            job.weight.scale_inv.mul_(1.5)
        elif unusual == "a weight":
            job.weight.scale_inv.fill_(float("nan"))
        elif unusual == "a second moment":
            job.exp_avg_sq.scale_inv[3] = 2.0
        elif unusual == "a gradient":
            job.grad.scale_inv.fill_(float("nan"))
        return [job._replace(record=measured(*job.written))]

    assert written_by(make, monkeypatch) == (["write_tile"] * 4 if unusual else ["write_usual_tile"])


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


def run_ptx(text: str, *inputs: np.ndarray) -> dict[str, np.ndarray]:
    """What the few instructions of `triton_usual` leave in registers: `$0`, `$1`, ... are outputs and then inputs."""
    outputs = len(set(re.findall(r"\$\d", text))) - len(inputs)
    registers = {f"${outputs + i}": x.astype(np.uint32) for i, x in enumerate(inputs)}

    def prmt(x, y, selector):
        both = [x >> 8 * i & 0xFF for i in range(4)] + [y >> 8 * i & 0xFF for i in range(4)]
        chosen = [both[selector >> 4 * i & 7] for i in range(4)]
        signs = [selector >> 4 * i & 8 for i in range(4)]
        made = [np.where(byte & 0x80, 0xFF, 0) if sign else byte for byte, sign in zip(chosen, signs, strict=True)]
        return sum(byte.astype(np.uint32) << np.uint32(8 * i) for i, byte in enumerate(made))

    does = {
        "xor.b32": lambda x, y: x ^ y,
        "and.b32": lambda x, y: x & y,
        "shr.u32": lambda x, y: x >> y,
        "mad.lo.s32": lambda x, y, z: x * y + z,
        "prmt.b32": lambda x, y, selector: prmt(x, y, int(selector)),
        "cvt.f32.f16": lambda x: x.astype(np.uint16).view(np.float16).astype(np.float32),
    }
    for line in re.sub(r"^\{|\}$", "", text.strip()).split(";"):
        name, _, rest = line.strip().partition(" ")
        if not name or name.startswith("."):
            continue
        if name == "mov.b32":
            low, high, x = re.findall(r"\w+", rest)
            registers |= {low: registers[x] & 0xFFFF, high: registers[x] >> 16}
            continue
        to, *of = (each.strip() for each in rest.split(","))
        values = [registers[x] if x in registers else np.array(int(x, 0) % 2**32, dtype=np.uint32) for x in of]
        registers[to] = does[name](*values)
    return registers


def test_the_instructions_that_take_codes_apart_and_put_them_together():
    """Run by the test: no CPU has them, and Triton's interpreter does not."""
    codes, residuals = (x.reshape(-1) for x in np.meshgrid(np.arange(256), np.arange(-128, 128)))
    valid = (codes & 0x7F) * 256 + residuals >= 0
    codes, residuals = codes[valid].astype(np.uint8), residuals[valid].astype(np.int8)
    for i in range(4):
        place = np.uint32(8 * i)
        others = np.uint32(0xA5C3F017 & ~(0xFF << 8 * i))
        made = [x.view(np.uint8).astype(np.uint32) << place | others for x in (codes, residuals)]
        found = run_ptx(triton_usual._PAIRS.value, *made)[f"${i}"].view(np.float32) * np.float32(2.0**120)
        expected = decoded(torch.from_numpy(codes), E4M11, torch.from_numpy(residuals))
        assert found.tobytes() == expected.numpy().tobytes()
        every = np.arange(256, dtype=np.uint32)
        found = run_ptx(triton_usual._ROOTS.value, every << place | others)[f"${i}"] * np.float32(2.0**8)
        assert found.tobytes() == decoded(torch.arange(256), ROOTS).numpy().tobytes()
    words = np.random.default_rng(0).integers(0, 2**32, (4, 1000), dtype=np.uint32)
    for text, expected in (("_UPPER_BYTES", words >> 24), ("_RESIDUALS", (words >> 16 & 0xFF) ^ 0x80)):
        found = run_ptx(getattr(triton_usual, text).value, *words)["$0"]
        assert np.array_equal([found >> 8 * i & 0xFF for i in range(4)], expected)


@triton.jit
def _corrected_kernel(x_ptr, y_ptr, root_ptr, quotient_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    tl.store(root_ptr + at, triton_usual.root_of(x, True))
    tl.store(quotient_ptr + at, triton_usual.quotient_of(x, y, True))


@pytest.mark.parametrize("units", [-1, 0, 1])
def test_roots_and_quotients_are_those_of_ieee_754_from_approximations_that_are_a_last_place_off(units, monkeypatch):
    """The approximations are stubs of instructions that only a GPU has, and the interpreter rounds an fma twice."""

    def approximation_of(function):
        def approximate(x):
            data = function(x.handle.data.astype(np.float64)).astype(np.float32)
            return tl.core.tensor(TensorHandle((data.view(np.int32) + units).view(np.float32), tl.float32), x.type)

        return approximate

    def fma(_, x, y, z):
        exact = x.data.astype(np.longdouble) * y.data + z.data
        return TensorHandle(exact.astype(np.float32), tl.float32)

    monkeypatch.setattr(triton_usual, "_approximate_root", approximation_of(lambda x: x**-0.5))
    monkeypatch.setattr(triton_usual, "_approximate_inverse", approximation_of(lambda x: 1 / x))
    monkeypatch.setattr(InterpreterBuilder, "create_fma", fma)
    x, y = 2.0 ** (torch.rand(2, 2**16, generator=torch.Generator().manual_seed(0)) * 98 - 49)
    root, quotient = torch.empty_like(x), torch.empty_like(x)
    _corrected_kernel[(1,)](x, y, root, quotient, SIZE=len(x))
    assert torch.equal(root, x.double().sqrt().float()) and torch.equal(quotient, (x.double() / y.double()).float())


def test_a_step_in_its_parts_is_the_step():
    whole, parts = jobs("O2", copied=True), jobs("O2", copied=True)
    AdamSteps(whole).run()
    steps = AdamSteps(parts)
    amaxes = [[amax.clone() for amax in of] for of in steps.amaxes()]
    steps.write_copies([amax.clone() for amax in steps.write(amaxes)])
    assert bits(parts) == bits(whole)


def test_amaxes_of_several_shards_are_taken_as_they_are_given():
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
    for count in (1, 9):
        launched.clear()
        AdamSteps(jobs("O2", sizes=(40,) * count)).run()
        assert launched == ["amaxes", "write"]
    launched.clear()
    AdamSteps(jobs("O2", copied=True, sizes=(40,) * 3)).run()
    assert launched == ["amaxes", "write", "recast"]
    launched.clear()
    AdamSteps(jobs("O2", copied=True, sizes=(40,) * 3, bounded=True)).run()
    assert launched == ["bounds", "write"]


def test_an_empty_parameter_among_others():
    ours, expected = both(lambda: jobs("O2", sizes=(0, 50, 0)))
    assert bits(ours) == bits(expected)


def test_block_sizes_that_no_tile_has_are_left_to_pytorch():
    values = torch.randn(100, generator=torch.Generator().manual_seed(0))
    hyper = adam_hyper(1e-3, (0.9, 0.999), 1e-8, 0.1, torch.tensor(1.0), "cpu")
    slots = [
        slot(values, (FP16, 0)),
        slot(values, (E4M3, 0)),
        slot(values * 0, (E4M3, 24)),
        slot(values * 0, (FP16, 0)),
    ]
    steps = AdamSteps([Job(*slots, hyper, seed=0, **OPTIONS["adamw"])])
    assert not any(hasattr(part, "kernels") for part, _ in steps._parts)
    steps.run()
    assert torch.isfinite(slots[0].data).all() and slots[2].data.float().any()
