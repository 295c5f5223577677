"""How long does one linear layer take, forward and backward, in FP8 against bf16?

All backends run interleaved in one process; the ratio is to bf16's time in the same round (below 1 is faster).
"""

from __future__ import annotations

import argparse

import torch
from measuring import interleaved, ratio, summary, table, write_json
from torch import nn

SHAPES = {
    "tiny": [(64, 32, 48)],
    "small": [(1024, 2048, 2048)],
    "llama": [(8192, 2048, 2048), (8192, 2048, 8192), (8192, 4096, 4096), (8192, 4096, 14336), (8192, 8192, 8192)],
}
"""(tokens, in, out): Llama 1B, 8B and 70B projections."""


def layer_step(backend: str, tokens: int, n_in: int, n_out: int, device: str, compiled: bool):
    import fp8_backends

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(n_in, n_out, bias=False, dtype=torch.bfloat16, device=device))
    if backend != "bf16":
        fp8_backends.prepare(model, None, backend)
    run = torch.compile(model, fullgraph=True) if compiled else model
    x = torch.randn(tokens, n_in, dtype=torch.bfloat16, device=device, requires_grad=True)
    dy = torch.randn(tokens, n_out, dtype=torch.bfloat16, device=device)

    def step():
        run(x).backward(dy)
        x.grad = model[0].weight.grad = None

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default="bf16,native:dynamic,native:delayed,native:rowwise,ao:tensorwise")
    parser.add_argument("--shapes", choices=list(SHAPES), default="llama" if torch.cuda.is_available() else "small")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    backends = list(dict.fromkeys(["bf16", *arguments.backends.split(",")]))
    rows, results = [], []
    for shape in SHAPES[arguments.shapes]:
        steps = {b: layer_step(b, *shape, device, arguments.compile) for b in backends}
        seconds = interleaved(steps, arguments.runs)
        flops = 6 * shape[0] * shape[1] * shape[2]
        for backend in backends:
            against = ratio(seconds[backend], seconds["bf16"])
            median = summary(seconds[backend])["median_s"]
            rows.append(["x".join(map(str, shape)), backend, median * 1e3, flops / median / 1e12, against["ratio"]])
            results.append({"shape": shape, "backend": backend, **summary(seconds[backend]), "to_bf16": against})
    print(table(["tokens x in x out", "backend", "ms", "TFLOP/s", "time / bf16"], rows))
    record = {"question": "time of a linear layer", "compiled": arguments.compile, "results": results}
    write_json(arguments.json, record)


if __name__ == "__main__":
    main()
