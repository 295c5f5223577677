"""Time one linear layer, forward and backward, in FP8, plain, and with TorchAO.

All run interleaved in one process, eager and compiled; a ratio refers to another's time in the same
round, below 1 is faster. `torchao` is TorchAO without this package, and `ao:tensorwise` the same
through it. Each dtype, of weights, inputs and results, is measured separately: by default bf16, or
FP32 on a CPU without bf16 products. A plain bf16 layer takes a minute there: it runs once, eager,
and every round is compared with it. `--linears 8` chains so many in one model, which hides Python's
time as a model does.
"""

from __future__ import annotations

import itertools
from argparse import Namespace
from collections.abc import Callable

import torch
from measuring import (
    DTYPES,
    Attempts,
    device,
    interleaved,
    options,
    plain,
    ratio,
    summary,
    write_json,
)
from tables import printed
from torch import nn

TOKENS = 8192
LLAMAS = {
    "llama-1b": (2048, 512, 8192),
    "llama-8b": (4096, 1024, 14336),
    "llama-70b": (8192, 1024, 28672),
}
"""Width of the model, of keys and values, of the feed-forward part."""


def projections(width: int, keys: int, wide: int) -> list[tuple[int, int, int]]:
    """(tokens, in, out) of query and output, of key and value, of gate and up, of down."""
    return [
        (TOKENS, width, width),
        (TOKENS, width, keys),
        (TOKENS, width, wide),
        (TOKENS, wide, width),
    ]


SHAPES = {
    "tiny": [(64, 32, 48)],
    "small": [(1024, 2048, 2048)],
    **{name: projections(*widths) for name, widths in LLAMAS.items()},
    "llama-gates": [(TOKENS, width, wide) for width, _, wide in LLAMAS.values()],
}
SHAPES["llama"] = [shape for name in LLAMAS for shape in SHAPES[name]]


def torchao_layer(model: nn.Module) -> None:
    from torchao.float8 import convert_to_float8_training

    convert_to_float8_training(model)


class LayerStep:
    """Forward and backward of layers without bias in the dtype of this name: from `in` to `out`,
    and back by turns."""

    def __init__(
        self,
        backend: str,
        form: str,
        shape: tuple[int, int, int],
        name: str,
        device: str,
        linears: int,
    ) -> None:
        import fp8_backends

        (tokens, n_in, n_out), dtype = shape, DTYPES[name]
        torch.manual_seed(0)
        widths = [(n_in, n_out), (n_out, n_in)] * linears
        options = {"bias": False, "dtype": dtype, "device": device}
        model = nn.Sequential(*(nn.Linear(*width, **options) for width in widths[:linears]))
        if backend == "torchao":
            torchao_layer(model)
        elif backend != name:
            fp8_backends.prepare(model, None, backend)
        self.steps = 0
        self.is_compiled = form == "compiled"
        self.compiled_steps = 0
        self.run = model
        if self.is_compiled:
            self.run = torch.compile(model, fullgraph=True, backend=self._counted)
        self.x = torch.randn(tokens, n_in, dtype=dtype, device=device, requires_grad=True)
        self.dy = torch.randn(tokens, widths[linears - 1][1], dtype=dtype, device=device)
        self.leaves = [self.x, *model.parameters()]

    def __call__(self) -> None:
        self.steps += 1
        self.run(self.x).backward(self.dy)
        for leaf in self.leaves:
            leaf.grad = None

    def _counted(self, graph: torch.fx.GraphModule, inputs: list) -> Callable:
        from torch._inductor.compile_fx import compile_fx

        code = compile_fx(graph, inputs)

        def run(*arguments):
            self.compiled_steps += 1
            return code(*arguments)

        return run

    def check(self) -> bool:
        """Return True. Raises if a step of a compiled layer ran eagerly: Dynamo skips a frame
        without a word."""
        if self.is_compiled and self.compiled_steps < self.steps:
            raise RuntimeError(f"{self.compiled_steps} of {self.steps} steps ran compiled code")
        return True


def first_step(*of) -> LayerStep:
    """The step, once it has run."""
    step = LayerStep(*of)
    step()
    return step


def only_step(*of) -> list[float]:
    """Return the seconds of the first step, for code that would take another minute each round."""
    return interleaved({"": LayerStep(*of)}, runs=1, warmup=0)[""]


def compared(own: list[float], other: list[float]) -> dict:
    """Return the ratio paired by round; a single run is paired with each round, with a notice."""
    rounds = max(len(own), len(other))
    found = ratio(*(seconds * (rounds // len(seconds)) for seconds in (own, other)))
    return found if len(own) == len(other) else found | {"paired": False}


def measure(
    shape: tuple[int, int, int],
    name: str,
    arguments: Namespace,
    device: str,
    attempt: Attempts,
) -> list[dict]:
    """Return one result per available backend and form, in this dtype."""
    from fp8_backends.compute import hardware

    torch._dynamo.reset()  # one shape's code says nothing about the next: no dynamic sizes
    is_slow = device == "cpu" and not hardware.cpu_multiplies(DTYPES[name])
    steps, seconds = {}, {}
    for form in arguments.forms.split(","):
        for backend in dict.fromkeys([name, *arguments.backends.split(",")]):
            of = backend, form, shape, name, device, arguments.linears
            if not (is_slow and backend == name):
                steps[backend, form] = attempt(f"{backend}, {form}", first_step, *of)
            elif form == "eager":
                seconds[backend, form] = only_step(*of)
    steps = {key: step for key, step in steps.items() if step}
    timed = interleaved(steps, arguments.runs, calls=arguments.calls)
    for (backend, form), step in steps.items():
        if attempt(f"{backend}, {form}", step.check):
            seconds[backend, form] = timed[backend, form]
    references = {"to_plain": name, "to_dynamic": "native:dynamic", "to_torchao": arguments.peer}
    results = []
    for backend, form in seconds:
        found = {
            "shape": shape,
            "dtype": name,
            "backend": backend,
            "form": form,
            **summary(seconds[backend, form]),
        }
        flops = 6 * arguments.linears * shape[0] * shape[1] * shape[2]
        found["tflops"] = flops / found["median_s"] / 1e12
        for key, reference in references.items():
            if (reference, form) in seconds:
                found[key] = compared(seconds[backend, form], seconds[reference, form])
        if (arguments.peer, "eager") in seconds:
            found["to_torchao_eager"] = compared(
                seconds[backend, form], seconds[arguments.peer, "eager"]
            )
        results.append(found)
    return results


def main() -> None:
    cuda = device() == "cuda"
    arguments = options(
        __doc__,
        backends="native:dynamic,native:delayed,native:rowwise,ao:tensorwise,torchao",
        peer="ao:tensorwise",
        shapes="llama" if cuda else "small",
        forms="eager",
        dtypes=plain(),
        linears=1,
        runs=15,
        calls=8 if cuda else 1,
    )
    results, attempt = [], Attempts()
    for name in arguments.shapes.split(","):
        for shape, dtype in itertools.product(SHAPES[name], arguments.dtypes.split(",")):
            results += measure(shape, dtype, arguments, device(), attempt)
            record = write_json(arguments, "time of a linear layer", results=results)
    printed("linear", record)
    attempt.end()


if __name__ == "__main__":
    main()
