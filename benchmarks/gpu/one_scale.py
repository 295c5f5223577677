"""Decide whether a product with one scale an operand may run in the kernel for a scale a row.

On an H200 that kernel was 2 to 20 % faster on the same operands with fast accumulation. It serves
`native` only with equal bits, in every product and for scales that are no powers of two, and with
time left over for a vector of scales, filled anew for each product. Random values in the shapes
of Llama's layers: fprop with fast accumulation, dgrad and wgrad without. Exits with 1 if a bit
differs on a GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from limits import LAYERS, repeated  # noqa: E402
from measuring import device, interleaved, options, summary, write_json  # noqa: E402

TOKENS = {"cuda": 8192, "cpu": 32}
WIDTHS = {"cuda": LAYERS, "cpu": [(48, 64)]}
CALLS = {"cuda": 10, "cpu": 1}
"""Products between two readings of the clock."""


def sizes(on: str) -> dict[tuple[str, int, int, int], torch.dtype]:
    """Return (product, m, k, n), with the dtype of the first operand."""
    tokens, found = TOKENS[on], {}
    for n_in, n_out in WIDTHS[on]:
        found["fprop", tokens, n_in, n_out] = torch.float8_e4m3fn
        found["dgrad", tokens, n_out, n_in] = torch.float8_e5m2
        found["wgrad", n_out, tokens, n_in] = torch.float8_e5m2
    return found


def functions(product: str, m: int, k: int, n: int, dtype: torch.dtype, on: str) -> dict:
    a = torch.randn(m, k, device=on).to(dtype)
    b = torch.randn(n, k, device=on).to(torch.float8_e4m3fn).t()
    scale_a, scale_b = (torch.tensor(scale, device=on) for scale in (0.37, 1.7))
    ones = torch.ones(1, n, device=on)
    fast = product == "fprop"

    def multiply(scale_a: torch.Tensor, scale_b: torch.Tensor) -> torch.Tensor:
        return torch._scaled_mm(
            a, b, scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast
        )

    def by_rows() -> torch.Tensor:
        # one factor, as the kernel for one scale multiplies the scales first
        return multiply((scale_a * scale_b).expand(m, 1).contiguous(), ones)

    return {"one scale": lambda: multiply(scale_a, scale_b), "a scale for each row": by_rows}


def main() -> int:
    arguments, on = options(__doc__, runs=5), device()
    found = []
    for (product, *size), dtype in sizes(on).items():
        made = functions(product, *size, dtype, on)
        one, rows = (function() for function in made.values())
        equal = int((one.view(torch.int16) == rows.view(torch.int16)).sum())
        timed = {name: repeated(function, CALLS[on], on) for name, function in made.items()}
        seconds = interleaved(timed, arguments.runs)
        times = {name: summary(each)["median_s"] / CALLS[on] for name, each in seconds.items()}
        found.append({"product": product, "size": size, "equal": equal, "of": one.numel(), **times})
        speedup = times["one scale"] / times["a scale for each row"]
        print(f"{product} {size}: {equal} of {one.numel()} equal, {speedup:.3f} times as fast")
    write_json(arguments, "one scale by the kernel for a scale a row", products=found)
    # a CPU's kernels differ from each other in some last bits
    return int(on == "cuda" and any(each["equal"] != each["of"] for each in found))


if __name__ == "__main__":
    sys.exit(main())
