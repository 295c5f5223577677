"""What do the kernels of `fuse_activations` gain over PyTorch's operations, and how far apart are their numbers?

Forward and backward of RMSNorm and of gated activations in eager mode, both ways in turns, on the sizes of Llama 8B.
`apart` is the share of elements, of results and gradients, that are not equal to the bit; `distance` the norm of the
difference over the norm of PyTorch's. Exits with 1 where a distance is more than what one rounding to the dtype makes,
or where the amax that a kernel noted is not the largest magnitude of what it wrote.

    python benchmarks/gpu/activations.py [--runs N] [--json FILE]

Without a GPU both ways are PyTorch's, as a rehearsal; in Triton's interpreter, with TRITON_INTERPRET=1 and
FP8_BACKENDS_TRITON=interpret, the kernels run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measuring import interleaved, summary, table, write_json  # noqa: E402

from fp8_backends.compute.native.fused_gates import ACTIVATIONS, gated_product  # noqa: E402
from fp8_backends.compute.native.fused_norms import Formula, fused_norm  # noqa: E402
from fp8_backends.numerics.kernels import triton_gate  # noqa: E402
from fp8_backends.numerics.kernels.quantize.known_amax import known_partials  # noqa: E402

TOKENS, HIDDEN, INTERMEDIATE = {"cuda": (8192, 4096, 14336), "cpu": (6, 64, 96)}[
    "cuda" if torch.cuda.is_available() else "cpu"
]
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-20}
"""Of FP32: the sum of a row in another order."""
LLAMA = Formula(1e-5, centered=False)

Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def cases(device: str) -> dict[str, tuple[Function, Function, list[torch.Tensor]]]:
    """Both ways, and their two inputs."""

    def gated(name: str) -> tuple[Function, Function, list[torch.Tensor]]:
        plain, inputs = ACTIVATIONS[name], [torch.randn(TOKENS, INTERMEDIATE, device=device) for _ in range(2)]
        both = (lambda gate, up: plain(gate) * up), (lambda gate, up: gated_product(gate, up, name, False))
        return *both, [each.bfloat16() for each in inputs]

    def norm(dtype: torch.dtype) -> tuple[Function, Function, list[torch.Tensor]]:
        inputs = [torch.randn(TOKENS, HIDDEN, device=device), torch.rand(HIDDEN, device=device) + 0.5]
        return LLAMA, (lambda x, weight: fused_norm(x, weight, LLAMA, False)), [each.to(dtype) for each in inputs]

    gates = {f"{name} gate, bf16": gated(name) for name in ACTIVATIONS}
    return {"RMSNorm, FP32": norm(torch.float32), "RMSNorm, bf16": norm(torch.bfloat16), **gates}


def results(function: Function, inputs: list[torch.Tensor], grad: torch.Tensor) -> list[torch.Tensor]:
    """The result, with what was noted on it, and the gradients."""
    inputs = [each.detach().requires_grad_() for each in inputs]
    found = function(*inputs)
    return [found, *torch.autograd.grad(found, inputs, grad)]


def compared(name: str, plain: Function, fused: Function, inputs: list[torch.Tensor], runs: int) -> dict:
    grad = torch.randn_like(plain(*inputs))
    expected, found = results(plain, inputs, grad), results(fused, inputs, grad)
    pairs = [(ours.detach().float(), theirs.detach().float()) for ours, theirs in zip(found, expected, strict=True)]
    noted = known_partials(found[0], False)
    seconds = interleaved(
        {"plain": lambda: results(plain, inputs, grad), "fused": lambda: results(fused, inputs, grad)}, runs
    )
    return {
        "case": name,
        "plain": summary(seconds["plain"]),
        "fused": summary(seconds["fused"]),
        "apart": max((ours != theirs).float().mean().item() for ours, theirs in pairs),
        "distance": max(((ours - theirs).norm() / theirs.norm()).item() for ours, theirs in pairs),
        "amax_is_right": noted is None or bool(noted.amax().view(torch.float32) == pairs[0][0].abs().max()),
        "allowed": ROUNDING[inputs[0].dtype],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=11)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    by_kernels = triton_gate.usable(torch.empty(1, device=device))
    print(f"through {'Triton kernels' if by_kernels else 'PyTorch operations'} on {device}")
    found = [compared(name, *case, arguments.runs) for name, case in cases(device).items()]
    wrong = [each["case"] for each in found if each["distance"] > each["allowed"] or not each["amax_is_right"]]
    rows = [
        [each["case"], *(1e6 * each[way]["median_s"] for way in ("plain", "fused")), each["apart"], each["distance"]]
        for each in found
    ]
    print(table(["forward and backward", "PyTorch's, us", "fused, us", "apart", "distance"], rows))
    print("too far from PyTorch's: " + ", ".join(wrong) if wrong else "as near to PyTorch's as one rounding")
    record = {"question": "fused activations against PyTorch's operations", "by_kernels": by_kernels}
    write_json(arguments.json, record | {"too_far": wrong, "cases": found})
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
