"""Compile Linears, the last with one output, for a GPU of a given capability: count the kernels
compiled by Triton, and list the failures. `clamps` puts clamps and maxima between the Linears.
Prints JSON.

    small_layers.py BACKEND MAJOR MINOR [clamps]
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import torch
from torch import nn

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS / "ahead"), str(BENCHMARKS)]
import inductor  # noqa: E402
import machine  # noqa: E402
from machine_code import has_fp8_results, made_for, nan_instructions, tuner_of  # noqa: E402
from specs import convert  # noqa: E402
from tracing import traced  # noqa: E402


class Clamps(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.relu().clamp(max=3.0)
        return torch.maximum(x - x.amax(-1, keepdim=True), -x)


def main(backend: str, major: str, minor: str, between: str = "") -> None:
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode

    torch.set_num_threads(1)
    chip = machine.CHIPS["H200"]._replace(capability=(int(major), int(minor)))
    machine.pretend(chip)
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Linear(32, 64), Clamps() if between else nn.GELU(), nn.Linear(64, 1)
        )
    with FakeTensorMode(allow_non_fake_inputs=True), torch.autocast("cuda", torch.bfloat16):
        convert(machine.on_fake_gpu(model), backend)
        model._forward_pre_hooks.clear()  # once a step
        x = torch.empty(48, 32, device="cuda", requires_grad=True)
        graphs = traced(model, x, decompositions=select_decomp_table())
    codes = [inductor.compiled(graph, False) for graph in graphs.forward]
    codes += [inductor.compiled(graph, True) for graph in graphs.backward]
    failures, kernels = [], [kernel for code in codes for kernel in code.kernels]
    for kernel in kernels:
        tuner = tuner_of(kernel.name, kernel.source)
        try:
            made_for(chip.target, tuner, tuner.configs[0])
        except Exception as error:  # errors of Triton's compiler, or of ptxas
            failures.append(f"{kernel.name}: {error}")
    products = [product.dtype for code in codes for product in code.products]
    of_fp8 = [(kernel.name, kernel.source) for kernel in kernels if has_fp8_results(kernel.source)]
    found = {
        "kernels": len(kernels),
        "failures": failures,
        "products": products,
        "clamping": sum(
            re.search("minimum|maximum|max2", source) is not None for _, source in of_fp8
        ),
        "with_nan_instructions": sum(nan_instructions(*each) > 0 for each in of_fp8),
    }
    print(json.dumps(found | {"torch": torch.__version__}))


if __name__ == "__main__":
    main(*sys.argv[1:])
