"""Test one small step of each backend against a plain one, in another process that may crash
(docs/planning.rst).

python -m fp8_backends.tools.self_test native:dynamic msamp:O2
"""

import contextlib
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import nn

from ..compute import hardware
from ..evidence.auditing import Audit, audit, incomplete_layers
from ..preparation import prepare
from ..recipes.handlers import Recipe, resolve
from ..recipes.precision_plan import plan
from ..states.levels import scale_bytes_per_element
from ..tensors.scaled_tensor import ScaledTensor
from ..words import first_line
from .terminal import environment_without

LOSS_BOUND = 0.05
GRADIENT_BOUND = 0.25
"""Relative errors against the plain step, the gradient's in L2. Rounding to E4M3 is an error of
0.026, to E5M2 of 0.052, so a forward product errs by 0.037 and a backward one by 0.058. Through the
three layers here a gradient errs by 0.12, half of the bound, and the loss, an average over a
thousand outputs, by less than 0.01. Wrong codes or scales err by 1."""
BYTES_BOUND = 0.02
"""Bytes of an element beyond the plan and the scales of blocks, for one scale a tensor."""

STARTS_WITHIN = 90.0
"""Seconds for the process to import its libraries."""
ENDS_WITHIN = 45.0
"""Seconds for one test, usually less than one."""

_WIDTH = 64
_TOKENS = 64
_LAYERS = 3
_MARK = "fp8_backends self-test: "


@dataclass
class SelfTest:
    backend: str
    proven: bool
    reason: str
    precision: str = ""
    """Precision of the plain step and around FP8: "bf16" or "fp32"."""
    loss_error: float | None = None
    gradient_error: float | None = None
    """Relative errors; the largest of any weight's gradient, in L2."""
    products: int = 0
    engine: str = ""
    bytes_per_element: float | None = None
    seconds: float = 0.0


def run(backends: Sequence[str]) -> list[SelfTest]:
    """Test the backends in another process, and in a new one after a backend ended or hung it."""
    results: list[SelfTest] = []
    while len(results) < len(backends):
        results += _run_in_process(list(backends[len(results) :]))
    return results


def _run_in_process(backends: list[str]) -> list[SelfTest]:
    """Return the results up to the first test that ends the process; at least one."""
    command = [sys.executable, "-m", __name__, *backends]
    # as no rank, and with FP8 off
    dropped = ("ACCELERATE_", "FP8_BACKENDS_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_")
    environment = environment_without(dropped)
    # a second thread gains nothing, and waits in a loop where other processes have the cores
    environment |= {"FP8_BACKENDS_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    results = []
    reasons = []
    limit = STARTS_WITHIN
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
            start_new_session=True,
        )

        def kill(*late: str) -> None:  # with its children, in its own session
            reasons.extend(late)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        try:
            for backend in backends:
                timer = threading.Timer(
                    limit, kill, [f"the test did not end within {limit:.0f} seconds"]
                )
                timer.start()
                line = next((line for line in process.stdout if line.startswith(_MARK)), None)
                timer.cancel()
                if line is None:
                    code = process.wait()
                    errors.seek(0)
                    # an interrupted library may end with nanobind's list of leaks
                    lines = itertools.takewhile(
                        lambda line: not line.startswith("nanobind:"), errors
                    )
                    last_line = (
                        [line.strip() for line in lines if line.strip()] or ["no message"]
                    )[-1]
                    how = f"code {code}: {last_line}" if code >= 0 else signal.Signals(-code).name
                    reasons.append(f"the test ended its process with {how}")
                    return [*results, SelfTest(backend, False, reasons[0])]
                results.append(SelfTest(**json.loads(line.removeprefix(_MARK))))
                limit = ENDS_WITHIN
            return results
        finally:
            kill()
            process.wait()
            process.stdout.close()


# In the process


def main(backends: Sequence[str]) -> None:
    logging.getLogger("fp8_backends").setLevel(logging.ERROR)
    for backend in backends:
        print(_MARK + json.dumps(asdict(test(backend))), flush=True)


def test(backend: str) -> SelfTest:
    start = time.perf_counter()
    try:
        result = _test(backend)
    except Exception as error:  # a library may raise anything
        result = SelfTest(backend, False, f"{type(error).__name__}: {first_line(error)}")
    result.seconds = time.perf_counter() - start
    return result


def _test(backend: str) -> SelfTest:
    recipe = resolve(backend)
    expected_loss, expected_gradients = _backward(_model_and_optimizer()[0])
    model, optimizer = prepare(*_model_and_optimizer(), recipe)
    if recipe.scaling == "delayed":
        # TransformerEngine's first step has scales of 1, where small gradients vanish
        _backward(model)
        optimizer.zero_grad()
    loss, gradients = _backward(model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.step()
    report = audit(model, optimizer)
    pairs = zip(gradients, expected_gradients, strict=True)
    result = SelfTest(
        backend,
        True,
        "",
        precision=hardware.fast_precision(hardware.device()),
        loss_error=abs(loss - expected_loss) / abs(expected_loss),
        gradient_error=max(((fp8 - plain).norm() / plain.norm()).item() for fp8, plain in pairs),
        products=sum(sum(counts.values()) for counts in report.products.values()),
        engine=", ".join(sorted(set(report.engine.values()))),
        bytes_per_element=report.bytes_per_element["total"],
    )
    faults = list(_faults(result, report, recipe))
    if not all(
        bool((p.detach() != old).any()) for p, old in zip(model.parameters(), before, strict=True)
    ):
        faults.append("a weight did not move in the optimizer's step")
    result.proven = not faults
    result.reason = "; ".join(faults)
    return result


def _faults(result: SelfTest, report: Audit, recipe: Recipe) -> Iterator[str]:
    for name, missing in incomplete_layers(report, recipe).items():
        yield f"layer {name} made no {' '.join(missing)} in FP8"
    if len(report.products) != _LAYERS:
        yield f"{len(report.products)} of {_LAYERS} layers were converted"
    bounds = (
        ("loss", result.loss_error, LOSS_BOUND),
        ("gradient", result.gradient_error, GRADIENT_BOUND),
    )
    for quantity, error, bound in bounds:
        if not error <= bound:  # NaN too
            yield f"{quantity} differs from {result.precision}'s by {error:.2g}, the bound is {bound}"
    if not result.gradient_error:
        yield f"the gradient equals {result.precision}'s to the bit: nothing was rounded to FP8"
    promised = plan(recipe).bytes_per_element + scale_bytes_per_element(recipe)
    if not abs(result.bytes_per_element - promised) <= BYTES_BOUND:
        yield f"{result.bytes_per_element:.4g} bytes an element are stored, {promised:g} were promised"


def _model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [layer for _ in range(_LAYERS) for layer in (nn.Linear(_WIDTH, _WIDTH), nn.GELU())]
    model = nn.Sequential(*layers[:-1]).to(hardware.device())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _backward(model: nn.Module) -> tuple[float, list[torch.Tensor]]:
    """Return (loss, plain gradients of all parameters) of one fixed batch, in the fast
    precision."""
    generator = torch.Generator().manual_seed(1)
    inputs, targets = (
        torch.randn(_TOKENS, _WIDTH, generator=generator).to(hardware.device()) for _ in range(2)
    )
    inputs.requires_grad_()  # so that the first layer makes its dgrad
    with hardware.fast_autocast(hardware.device()):
        loss = (model(inputs).float() - targets).square().mean()
    loss.backward()
    gradients = [
        p.grad.dequantize() if isinstance(p.grad, ScaledTensor) else p.grad
        for p in model.parameters()
    ]
    return loss.item(), [gradient.detach().float().clone() for gradient in gradients]


if __name__ == "__main__":
    main(sys.argv[1:])
