"""How long does one linear layer take, forward and backward, in FP8 against bf16 and against TorchAO's own layer?

All run interleaved in one process, eager and compiled; a ratio is to another's time in the same round, below 1 is
faster. `torchao` is TorchAO without this package, and `ao:tensorwise` the same through it.
"""

from __future__ import annotations

import argparse

import torch
from measuring import Attempts, interleaved, interval, ratio, summary, table, write_json
from torch import nn

TOKENS = 8192
LLAMAS = {"llama-1b": (2048, 512, 8192), "llama-8b": (4096, 1024, 14336), "llama-70b": (8192, 1024, 28672)}
"""Width of the model, of keys and values, of the feed-forward part."""


def projections(width: int, keys: int, wide: int) -> list[tuple[int, int, int]]:
    """(tokens, in, out) of query and output, of key and value, of gate and up, of down."""
    return [(TOKENS, width, width), (TOKENS, width, keys), (TOKENS, width, wide), (TOKENS, wide, width)]


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


def layer_step(backend: str, form: str, shape: tuple[int, int, int], device: str):
    """Forward and backward of one layer without bias in bf16."""
    import fp8_backends

    tokens, n_in, n_out = shape
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(n_in, n_out, bias=False, dtype=torch.bfloat16, device=device))
    if backend == "torchao":
        torchao_layer(model)
    elif backend != "bf16":
        fp8_backends.prepare(model, None, backend)
    run = torch.compile(model, fullgraph=not backend.startswith("te")) if form == "compiled" else model
    x = torch.randn(tokens, n_in, dtype=torch.bfloat16, device=device, requires_grad=True)
    dy = torch.randn(tokens, n_out, dtype=torch.bfloat16, device=device)

    def step():
        run(x).backward(dy)
        x.grad = model[0].weight.grad = None

    return step


def first_step(backend: str, form: str, shape: tuple[int, int, int], device: str):
    """The step, once it has run."""
    step = layer_step(backend, form, shape, device)
    step()
    return step


def measure(shape: tuple[int, int, int], arguments: argparse.Namespace, device: str, attempt: Attempts) -> list[dict]:
    """One result for each backend and form that runs here."""
    torch._dynamo.reset()  # one shape's code says nothing about the next: no dynamic sizes
    steps = {}
    for form in arguments.forms.split(","):
        for backend in dict.fromkeys(["bf16", *arguments.backends.split(",")]):
            step = attempt(f"{backend}, {form}", first_step, backend, form, shape, device)
            if step:
                steps[backend, form] = step
    seconds = interleaved(steps, arguments.runs)
    references = {"to_bf16": "bf16", "to_dynamic": "native:dynamic", "to_torchao": arguments.peer}
    results = []
    for backend, form in steps:
        found = {"shape": shape, "backend": backend, "form": form, **summary(seconds[backend, form])}
        found["tflops"] = 6 * shape[0] * shape[1] * shape[2] / found["median_s"] / 1e12
        for key, reference in references.items():
            if (reference, form) in seconds:
                found[key] = ratio(seconds[backend, form], seconds[reference, form])
        if (arguments.peer, "eager") in seconds:
            found["to_torchao_eager"] = ratio(seconds[backend, form], seconds[arguments.peer, "eager"])
        results.append(found)
    return results


COLUMNS = {"to_bf16": "time / bf16", "to_torchao": "time / TorchAO", "to_torchao_eager": "time / TorchAO, eager"}


def printed(results: list[dict]) -> str:
    rows = []
    for each in results:
        row = ["x".join(map(str, each["shape"])), each["backend"], each["form"], each["median_s"] * 1e3, each["tflops"]]
        rows.append(row + [interval(each[key]) if key in each else "-" for key in COLUMNS])
    return table(["tokens x in x out", "backend", "form", "ms", "TFLOP/s", *COLUMNS.values()], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--backends", default="native:dynamic,native:delayed,native:rowwise,ao:tensorwise,torchao")
    parser.add_argument("--peer", default="ao:tensorwise", help="the backend that stands for TorchAO in ratios")
    parser.add_argument("--shapes", default="llama" if cuda else "small", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--forms", default="eager", help="eager, compiled or both with a comma")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    results, attempt = [], Attempts()
    for name in arguments.shapes.split(","):
        for shape in SHAPES[name]:
            results += measure(shape, arguments, "cuda" if cuda else "cpu", attempt)
            write_json(arguments.json, {"question": "time of a linear layer", "results": results})
    print(printed(results))
    attempt.end()


if __name__ == "__main__":
    main()
