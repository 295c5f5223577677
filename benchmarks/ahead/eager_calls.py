"""Count the host's work in an eager step of one Linear, forward and backward: launches, PyTorch's
calls, synchronisations and Python's time; and the machine code of the Triton kernels of a linear
layer and of the optimizer.

The kernels go through Triton's real binder and compiler, for compute capability 9.0; the launch
itself is left out, and tensors lie on the CPU. Products are not computed. Prints JSON.

    eager_calls.py [--backends NAMES] [--levels NAMES]
"""

from __future__ import annotations

import functools
import json
import math
import os
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from machine import Driver, folder  # noqa: E402
from machine_code import Code, Work, disassembled, fast_path, loaded  # noqa: E402
from measuring import options  # noqa: E402
from specs import convert  # noqa: E402
from tracing import VIEWS  # noqa: E402

SYNCHRONISING = frozenset("_local_scalar_dense item is_nonzero equal nonzero".split())


class Launches:
    """Record launches, and the kernels' machine code."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.codes: dict[str, list[Code]] = {}
        self._kernels: set = set()

    def stand_in(self) -> None:
        """Redirect every launch of this process to here."""
        from triton.compiler import ASTSource  # noqa: F401  (Triton is loaded before its driver is replaced)
        from triton.runtime import driver

        launches = self

        class Utilities:
            def load_binary(self, name, cubin, shared, device):
                return 0, 0, 64, 0, 1024

            def get_device_properties(self, device):
                return {
                    "max_shared_mem": 232_448,
                    "max_num_regs": 65_536,
                    "multiprocessor_count": 132,
                    "warpSize": 32,
                }

        class Launcher:
            def __init__(self, source, metadata):
                self.name = metadata.name

            def __call__(self, x, y, z, stream, function, *arguments):
                launches.counts[self.name] += 1

        class WithLauncher(Driver):
            utils, launcher_cls = Utilities(), Launcher

        driver.set_active(WithLauncher())
        self._keep_codes()

    def _keep_codes(self) -> None:
        from triton.runtime.jit import JITFunction

        original = JITFunction._do_compile

        @functools.wraps(original)
        def compiled(kernel, *arguments, **more):
            made = original(kernel, *arguments, **more)
            code = disassembled(
                made.asm["cubin"], 32 * made.metadata.num_warps, made.metadata.shared
            )
            self.codes.setdefault(kernel.__name__, []).append(code)
            self._kernels.add(kernel)
            return made

        JITFunction._do_compile = compiled

    def forget(self) -> None:
        """Recompile every later launch."""
        self.codes.clear()
        self.counts.clear()
        for kernel in self._kernels:
            kernel.device_caches.clear()


def through_the_kernels() -> None:
    """Let this package send tensors of the CPU to its Triton kernels, as it would a Hopper
    GPU's."""
    import fp8_backends  # noqa: F401
    from fp8_backends.compute import products
    from fp8_backends.kernels import devices, triton_gate
    from fp8_backends.kernels.triton_gate import is_eager

    class Guard:
        """Cost as much as `torch.cuda.device`."""

        def __enter__(self):
            self.previous = 0

        def __exit__(self, *_):
            self.previous = -1

    everywhere(triton_gate.usable, is_eager)
    everywhere(devices.has_fp8_casts, lambda tensor: True)
    everywhere(devices.multiprocessors, lambda tensor: 132)
    everywhere(devices.on_device_of, lambda tensor: Guard())
    everywhere(products.engine_for, lambda *_: products.SCALED_MM)


def everywhere(function, other) -> None:
    """Replace a function in every module of this package that imported it."""
    for name, module in list(sys.modules.items()):
        if name.startswith("fp8_backends"):
            for attribute in [key for key, value in vars(module).items() if value is function]:
                setattr(module, attribute, other)


PRODUCTS: Counter[str] = Counter()


def no_product(
    a,
    b,
    scale_a=None,
    scale_b=None,
    bias=None,
    scale_result=None,
    out_dtype=None,
    use_fast_accum=False,
):
    """Replace `torch._scaled_mm`: count, do not compute."""
    PRODUCTS["_scaled_mm"] += 1
    return torch.empty(a.shape[0], b.shape[1], dtype=out_dtype)


class Calls(TorchDispatchMode):
    """Count PyTorch's operators, except operators without a launch."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        if name not in VIEWS:
            self.operators[name] += 1
        return func(*args, **(kwargs or {}))


def layer(backend: str, size: int, bias: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return convert(nn.Sequential(nn.Linear(size, size, bias=bias, dtype=torch.bfloat16)), backend)


def step(model: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> None:
    model(x).backward(dy)
    x.grad = None
    for parameter in model.parameters():
        parameter.grad = None


def python_microseconds(run, calls: int, rounds: int) -> float:
    """Return the microseconds of one call in the fastest round."""
    best = float("inf")
    for _ in range(rounds):
        start = time.process_time()
        for _ in range(calls):
            run()
        best = min(best, (time.process_time() - start) / calls)
    return best * 1e6


def of_linear(backend: str, launches: Launches, calls: int = 200, rounds: int = 7) -> dict:
    """Count one layer's work for the host. Sizes are small, so the CPU computes almost nothing."""
    size = 128 if "blockwise" in backend or "mxfp8" in backend else 16
    model = layer(backend, size)
    x, dy = (torch.randn(size, size, dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()
    run = functools.partial(step, model, x, dy)
    run(), run()
    launches.counts.clear()
    PRODUCTS.clear()
    with Calls() as found:
        run()
    found.operators += PRODUCTS
    counts = dict(launches.counts)
    synchronisations = sum(n for name, n in found.operators.items() if name in SYNCHRONISING)
    return {
        "backend": backend,
        "launches": sum(counts.values()),
        "kernels": counts,
        "operators": sum(found.operators.values()),
        "by_operator": dict(found.operators),
        "synchronisations": synchronisations,
        "python_us": python_microseconds(run, calls, rounds),
    }


def quantizing(backend: str, launches: Launches, tokens: int = 512, size: int = 1024) -> list[dict]:
    """Return one layer's kernels for matrices of whole tiles."""
    launches.forget()
    model = layer(backend, size)
    x = torch.zeros(tokens, size, dtype=torch.bfloat16, requires_grad=True)
    step(model, x, torch.zeros(tokens, size, dtype=torch.bfloat16))
    return [
        {
            "kernel": name,
            "specialisations": len(codes),
            "registers": max(code.registers for code in codes),
            "stack": max(code.stack for code in codes),
            "loops": max(len(code.loops()) for code in codes),
            "instructions": min(
                len([o for o in code.operations if o.kind != "NOP"]) for code in codes
            ),
        }
        for name, codes in launches.codes.items()
    ]


def of_optimizer(level: str, launches: Launches, numel: int = 65_536) -> dict:
    """Return the kernels of one step over a weight of this many elements, and the reads, writes and
    operations of their loops."""
    import optimizer as steps

    weight, exp_avg, exp_avg_sq, *_ = steps.LEVELS[level]
    made = steps.scaled_step(level, numel, 1, "cpu", True)
    # casts, too
    stored = [steps.slot(torch.zeros(1), fmt) for fmt in (weight, steps.E4M3, exp_avg, exp_avg_sq)]
    launches.forget()
    made.run()
    # a residual is one byte
    size = sum(each.data.itemsize + (each.residual is not None) for each in stored)
    kernels = []
    for name, codes in launches.codes.items():
        path = fast_path(codes[0])
        if not path:
            continue
        elements = 2 ** int(math.log2(loaded(path) / size))  # per thread; scalars are loaded too
        work = Work.of(path, 1 / elements)
        written = sum(each.bytes for each in path if each.kind == "STG") / elements
        kernels.append(
            {
                "kernel": name,
                "registers": codes[0].registers,
                "stack": codes[0].stack,
                "read": size,
                "written": written,
                **work._asdict(),
            }
        )
    total = {
        key: sum(each[key] for each in kernels)
        for key in ("read", "written", "instructions", "alu", "special")
    }
    return {
        "level": level,
        "launches": dict(launches.counts),
        "kernels": kernels,
        "of_an_element": total,
    }


def main() -> None:
    arguments = options(__doc__, backends="", levels="")
    torch.set_num_threads(1)
    os.environ.setdefault("TRITON_CACHE_DIR", folder())
    launches = Launches()
    launches.stand_in()
    through_the_kernels()
    torch._scaled_mm = no_product
    backends = [each for each in arguments.backends.split(",") if each]
    levels = [each for each in arguments.levels.split(";") if each]
    linear = {each: of_linear(each, launches) for each in backends}
    matrices = {each: quantizing(each, launches) for each in backends if each.startswith("native")}
    steps = {each: of_optimizer(each, launches) for each in levels}
    print(json.dumps({"linear": linear, "quantize": matrices, "optimizer": steps}))


if __name__ == "__main__":
    main()
