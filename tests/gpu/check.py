"""Compare FP8 on this GPU with the CPU's numbers: every kind of product, and a training step of
each backend.

Prints a line a check and exits with 1 if any failed. `--compile` checks only the compiled forms,
`--features` trainings with other fields, and `--quick` few kernels, those of most trainings.
`--device cpu` rehearses the same checks without a GPU.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import os
import sys
import traceback
from pathlib import Path

import torch
import torch._inductor.config
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from measuring import options, write_json  # noqa: E402
from training import Prepared, build  # noqa: E402

import fp8_backends  # noqa: E402
from fp8_backends.compute.products import engine_for  # noqa: F401
from fp8_backends.formats.formats import E4M3, E5M2  # noqa: F401
from fp8_backends.formats.scaling import MX, ROWS, SQUARES, VECTORS  # noqa: F401
from fp8_backends.kernels import quantize as quantization  # noqa: F401
from fp8_backends.kernels.adam import AdamSteps, Job, Slot, adam_hyper  # noqa: F401
from fp8_backends.kernels.adam_table import measured
from fp8_backends.tensors.scaled_tensor import ScaledTensor, quantize  # noqa: F401

SCALINGS = [
    f"native:{rule}" for rule in ("dynamic", "delayed", "rowwise", "window", "blockwise", "mxfp8")
]
QUICK = SCALINGS[:2]
"""The rules of the quick checks. Triton compiles a kernel for each rule, format, dtype and
alignment, about a second each: all checks need some 140, the quick ones some 30."""
FEATURES = {
    "native:dynamic, wgrad in bf16, dgrad in E4M3": {
        "products": {"wgrad": "bf16", "dgrad": "e4m3"}
    },
    "native:dynamic, layers of several backends": {
        "layers": {"*.down_proj": "native:mxfp8", "*.q_proj": "ao:rowwise"}
    },
    "native:dynamic, rowwise from step 2, bf16 from step 4": {
        "schedule": {2: "native:rowwise", 4: "bf16"}
    },
    "native:dynamic, fused head": {"fused_head": True},
    "native:rowwise, fused head in FP8": {"fused_head": True, "include": "+lm_head"},
    "native:dynamic, FP8 activations": {"saved_activations": "fp8"},
    "native:blockwise, monitor and guard": {
        "monitor_every": 1,
        "monitor_file": os.devnull,
        "guard": "warn",
    },
    "msamp:O4, FP8 activations": {"saved_activations": "fp8"},
    "msamp:O4, gradient release": {"gradient_release": True},
    "te+msamp:O2": {},
}
"""Recipe fields by label; its first word is the backend."""
RESULTS: list[dict] = []


def check(name: str, passed: bool, **figures) -> None:
    RESULTS.append({"check": name, "passed": bool(passed), **figures})
    print(
        f"{'ok  ' if passed else 'FAIL'} {name} {json.dumps(figures) if figures else ''}",
        flush=True,
    )


def attempt(name: str, function, *arguments) -> None:
    """Run one group of checks; an exception is a failed check, not the end of the run."""
    try:
        function(name, *arguments)
    except Exception as error:
        traceback.print_exc()
        check(name, False, error=f"{type(error).__name__}: {error}"[:300])


def sqnr(exact: torch.Tensor, values: torch.Tensor) -> float:
    exact, values = exact.detach().cpu().double(), values.detach().cpu().double()
    return (20 * torch.log10(exact.norm() / (exact - values).norm().clamp(min=1e-30))).item()


CASTS = {
    "tensor": lambda x, fmt: quantization.quantize(x, fmt),
    "given": lambda x, fmt: quantization.quantize(x, fmt, torch.tensor(8.0, device=x.device)),
    **{
        name: functools.partial(
            lambda blocks, x, fmt: quantization.quantize_blocks(x, blocks, fmt), blocks
        )
        for name, blocks in (
            ("rowwise", ROWS),
            ("1x128", VECTORS),
            ("128x128", SQUARES),
            ("mxfp8", MX),
        )
    },
}


def same_codes(name: str, device: str, quick: bool) -> None:
    kinds = {kind: CASTS[kind] for kind in ("tensor", "given")} if quick else CASTS
    for fmt, dtype, (kind, cast) in itertools.product(
        (E4M3, E5M2), (torch.float32, torch.bfloat16), kinds.items()
    ):
        x = torch.randn(384, 256).to(dtype)
        x[0, :5] = torch.tensor([0.0, 1e-8, 1e4, -3e4, 7.0])
        here, there = cast(x, fmt), cast(x.to(device), fmt)
        for layout in ("along_columns", "along_rows"):
            (a, a_scale), (b, b_scale) = getattr(here, layout)(), getattr(there, layout)()
            equal = torch.equal(
                a.contiguous().view(torch.uint8), b.cpu().contiguous().view(torch.uint8)
            )
            scales = torch.equal(a_scale.contiguous(), b_scale.cpu().contiguous())
            check(f"{name} {fmt.name} {dtype} {kind} {layout}", equal and scales)


def products(name: str, device: str, compiled: bool, quick: bool) -> None:
    """y, dx, dw, db of one layer on the device against the same layer on the CPU, ragged sizes
    included."""
    # each case is compiled again
    formats = ("HYBRID",) if compiled or quick else ("HYBRID", "E4M3")
    rules, dtypes = (
        (QUICK, (torch.bfloat16,)) if quick else (SCALINGS, (torch.bfloat16, torch.float32))
    )
    grid = itertools.product(rules, formats, dtypes, ((256, 256, 512), (50, 33, 72)))
    for backend, fmt, dtype, (tokens, n_in, n_out) in grid:
        torch._dynamo.reset()
        torch.manual_seed(0)
        spec = fp8_backends.FP8RecipeKwargs(backend=backend, fp8_format=fmt)
        x, dy = torch.randn(tokens, n_in).to(dtype), torch.randn(tokens, n_out).to(dtype)
        linear = nn.Linear(n_in, n_out).to(dtype)
        made = {}
        for where in ("cpu", device):
            model = nn.Sequential(copy.deepcopy(linear)).to(where)
            fp8_backends.prepare(model, None, spec)
            run = torch.compile(model, fullgraph=True) if compiled and where == device else model
            for _ in range(3):  # delayed scaling needs two steps to leave scale 1
                model.zero_grad()
                x_here = x.to(where, copy=True).requires_grad_()
                y = run(x_here)
                y.backward(dy.to(where))
            counts = model[0].fp8_products[:3].tolist()
            made[where] = (y, x_here.grad, model[0].weight.grad, model[0].bias.grad, counts)
        figures = [
            round(sqnr(a, b), 1) for a, b in zip(made["cpu"][:4], made[device][:4], strict=True)
        ]
        exact = made["cpu"][4] == made[device][4] == [3, 3, 3]
        # two bf16 roundings and Hopper's fast accumulation (about 14 bits) apart: far above FP8's
        # own 32 dB
        label = f"{name} {backend} {fmt} {str(dtype)[6:]} {tokens}x{n_in}x{n_out}"
        check(label, exact and min(figures) > 45, sqnr_y_dx_dw_db=figures)


def non_finite(name: str, device: str, quick: bool) -> None:
    for backend in QUICK if quick else SCALINGS:
        model = nn.Sequential(nn.Linear(64, 64)).to(device)
        fp8_backends.prepare(model, None, backend)
        x = torch.randn(32, 64, device=device)
        x[0, 0] = float("inf")
        shows = not torch.isfinite(model(x)).all()
        x[0, 0] = 1.0
        check(f"{name} {backend}", bool(shows) and bool(torch.isfinite(model(x)).all()))


def optimizer_step(name: str, device: str, compiled: bool, quick: bool) -> None:
    """Five steps of the fused Adam on the device against five on the CPU: the stored bits, with the
    same randomness."""
    kinds = {"O1": (torch.float32, torch.float32), "O2": (torch.float8_e4m3fn, torch.float16)}
    kinds = {"O2": kinds["O2"]} if quick else kinds
    roundings = ("stochastic",) if quick else ("stochastic", "nearest")
    for (level, (exp_avg, exp_avg_sq)), rounding in itertools.product(kinds.items(), roundings):
        made = {}
        for where in ("cpu", device):
            generator = torch.Generator().manual_seed(0)
            draw = functools.partial(torch.randn, 300, 1000, generator=generator)
            weight = quantize(draw() * 0.02, torch.float16).to(where)
            states = [
                _state(torch.zeros(300, 1000), dtype).to(where) for dtype in (exp_avg, exp_avg_sq)
            ]
            for step in range(1, 6):
                gradient = quantize(draw(), torch.float8_e4m3fn).to(where)
                hyper = adam_hyper(
                    1e-3, (0.9, 0.999), 1e-8, 0.1, torch.tensor(float(step)), torch.device(where)
                )
                slots = [_slot(each) for each in (weight, gradient, *states)]
                job = Job(*slots, hyper, decoupled=True, maximize=False, rounding=rounding, seed=3)
                job = job._replace(record=measured(*job.written))
                AdamSteps([job], fused=compiled and where == device).run()
            made[where] = [_data(each).cpu() for each in (weight, *states)]
        pairs = zip(made["cpu"], made[device], strict=True)
        # square roots and fused multiplications differ in FP32's last bit, and sometimes change a
        # rounding
        differing = [(~_equal(a, b)).float().mean().item() for a, b in pairs]
        passed = max(differing) <= 1e-2
        check(f"{name} {level} {rounding}", passed, differing_weight_exp_avg_exp_avg_sq=differing)


def _equal(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.isclose(a, b, rtol=1e-5, atol=0.0) if a.dtype == torch.float32 else a == b


def _state(zeros: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return zeros if dtype == torch.float32 else quantize(zeros, dtype)


def _data(tensor: torch.Tensor) -> torch.Tensor:
    data = tensor.codes if isinstance(tensor, ScaledTensor) else tensor
    return data.view(torch.uint8) if data.dtype.itemsize == 1 else data


def _slot(tensor: torch.Tensor) -> Slot:
    return (
        Slot(tensor.codes, tensor.scale_inv)
        if isinstance(tensor, ScaledTensor)
        else Slot(tensor, None)
    )


def on_cpu(backend: str) -> str:
    """Return the backend for the CPU's numbers: the native rule for `te`, which computes on GPUs
    only."""
    return backend.replace("te+", "te:delayed+").replace("te:", "native:")


def training(name: str, device: str, label: str, compiled: bool, **fields) -> None:
    """Losses of a small Llama over six steps through Accelerate, on the device and on the CPU."""
    losses, backend = {}, label.split(",")[0]
    tokens = torch.randint(256, (8, 64), generator=torch.Generator().manual_seed(0))
    for where in ("cpu", device):
        there = on_cpu(backend) if where == "cpu" else backend
        prepared = Prepared(there, lambda: build("tiny", 64, "cpu"), 1e-3, on=where, **fields)
        if compiled and where == device:
            prepared.model.compile()
        steps = (prepared.step(input_ids=tokens, labels=tokens) for _ in range(6))
        losses[where] = [round(loss.item(), 5) for loss in steps]
    share = fp8_backends.audit(prepared.model, prepared.optimizer).flops_share
    gap = max(abs(a - b) for a, b in zip(losses["cpu"], losses[device], strict=True))
    falls = losses[device][-1] < losses[device][0]
    # a shared batch and shared weights: only accumulation order and bf16 kernels differ, and six
    # steps let it grow
    check(
        f"{name} {label}",
        gap < 0.03 and falls and share > 0.5,
        gap=gap,
        losses=losses[device],
        fp8_share=share,
    )


def main() -> int:
    arguments = options(
        __doc__,
        device="cuda",
        backends="native:dynamic,native:delayed,native:rowwise,native:blockwise,native:mxfp8,"
        "ao:tensorwise,ao:rowwise,msamp:O1,msamp:O2,msamp:O3",
        compile=False,
        features=False,
        quick=False,
    )
    torch.manual_seed(0)
    device = arguments.device
    engine = engine_for(torch.device(device), torch.bfloat16)
    check(
        "engine",
        engine == "scaled_mm" if device == "cuda" else engine.endswith("-exact"),
        engine=engine,
    )
    mode = "compiled" if arguments.compile else "eager"
    # else Inductor's division on a GPU may change a scale's last bit, and with it every code on a
    # tie
    torch._inductor.config.eager_numerics.division_rounding = True
    if not arguments.features:
        if not arguments.compile:
            attempt("codes", same_codes, device, arguments.quick)
            attempt("non-finite shows", non_finite, device, arguments.quick)
        attempt(f"optimizer {mode}", optimizer_step, device, arguments.compile, arguments.quick)
        attempt(f"products {mode}", products, device, arguments.compile, arguments.quick)
    trained = FEATURES if arguments.features else dict.fromkeys(arguments.backends.split(","), {})
    for label, fields in trained.items():
        available = fp8_backends.available_backends()[
            fp8_backends.resolve(label.split(",")[0]).compute
        ]
        if available.can_run:
            run = functools.partial(training, **fields)
            attempt(f"training {mode}", run, device, label, arguments.compile)
        else:
            print(f"not run: training {label}: {available.reason}")
    failed = [r["check"] for r in RESULTS if not r["passed"]]
    print(f"{len(RESULTS) - len(failed)} passed, {len(failed)} failed")
    write_json(arguments, "numbers of a GPU against a CPU's", mode=mode, checks=RESULTS)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
