"""Record sums of FP8 products on this GPU: codes in, FP32 or bf16 bits out, for a later comparison
on any machine.

Each record is a sample of 32 rows and 32 columns of a product by `torch._scaled_mm`, so that a
large product, which cuBLAS does not split along K, fits in a small file. `--device cpu` rehearses
the recording with exact sums.

    sums.py --out DIR                          on a GPU: writes DIR/sums.pt, a dict with `machine` and `records`
    sums.py --compare DIR/sums.pt --json FILE  anywhere: equal results by K, of
    `tensor_cores/emulation.py` and of exact sums
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measuring import machine, options, write_json  # noqa: E402
from tables import printed  # noqa: E402

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
PAIRS = (("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2"))
"""Formats of the operands; no GPU multiplies E5M2 by E5M2."""
SHAPES = ((64, 64), (1024, 1024), (2048, 4096))
"""Rows and columns of the result: cuBLAS may split K among blocks for the small one."""
DEPTHS = (32, 64, 128, 256, 512, 1024, 4096, 14336)
SAMPLE = 32


def random_codes(
    rows: int, depth: int, fmt: str, data: str, generator: torch.Generator
) -> torch.Tensor:
    """Return codes [rows, depth]: every finite bit pattern alike, or casts of normal or positive
    values."""
    dtype = FORMATS[fmt]
    if data == "patterns":
        codes = torch.randint(256, (rows, depth), generator=generator, dtype=torch.uint8)
        finite = codes.view(dtype).float().isfinite()
        return torch.where(finite, codes, torch.zeros_like(codes)).view(dtype)
    values = torch.randn(rows, depth, generator=generator) * 16
    return (values.abs() if data == "positive" else values).to(dtype)


def multiply(a, b, scale_a, scale_b, out_dtype, fast: bool) -> torch.Tensor:
    return torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=out_dtype, use_fast_accum=fast)


def record(device: str, shape, depth: int, pair, data: str, scales: str, generator) -> dict:
    """Return the sampled codes, scales and results, with and without fast accumulation (None where
    refused)."""
    (rows, columns), (a_format, b_format) = shape, pair
    a = random_codes(rows, depth, a_format, data, generator)
    b = random_codes(columns, depth, b_format, data, generator)
    picked = [torch.randperm(size, generator=generator)[:SAMPLE] for size in shape]
    rowwise = scales == "rowwise"
    if rowwise:
        scale_a = torch.rand(rows, 1, generator=generator) + 0.5
        scale_b = torch.rand(columns, 1, generator=generator).t() + 0.5
    else:
        scale_a, scale_b = (
            torch.tensor(1.0 if scales == "one" else value) for value in (0.37, 1.7)
        )
    dtype = torch.bfloat16 if rowwise else torch.float32
    operands = [tensor.to(device) for tensor in (a, b, scale_a, scale_b)]
    results = {}
    for name, fast in (("fast", True), ("slow", False)):
        try:
            results[name] = multiply(*operands, dtype, fast).cpu()[picked[0]][:, picked[1]].clone()
        except RuntimeError as error:
            results[name] = None
            print(
                f"refused: {shape} {depth} {pair} {scales} {name}: "
                f"{str(error).splitlines()[0][:150]}"
            )
    return {
        "a": a.view(torch.uint8)[picked[0]].clone(),
        "b": b.view(torch.uint8)[picked[1]].clone(),
        "scale_a": scale_a[picked[0]] if rowwise else scale_a,
        "scale_b": scale_b[:, picked[1]].clone() if rowwise else scale_b,
        "results": results,
        "formats": pair,
        "shape": (rows, columns, depth),
        "data": data,
        "scales": scales,
    }


def compared(entry: dict) -> list[dict]:
    """Count the results of a record equal to the bit: emulated, and from exact sums rounded
    once."""
    from tensor_cores.emulation import product, scaled_product

    from fp8_backends.formats.scaling import Quantized

    a, b = (
        entry[name].view(FORMATS[fmt]) for name, fmt in zip("ab", entry["formats"], strict=True)
    )
    operands, scales = (
        (Quantized(a, entry["scale_a"]), Quantized(b, entry["scale_b"].t())),
        entry["scale_a"] * entry["scale_b"],
    )
    rows = []
    for accumulation, results in entry["results"].items():
        if results is None:
            continue
        row = {name: entry[name] for name in ("formats", "shape", "data", "scales")} | {
            "accumulation": accumulation
        }
        made = {
            "emulated": scaled_product(*operands, results.dtype, "h100", accumulation == "fast"),
            "exact_sums": (product(a, b, "exact") * scales).to(results.dtype),
        }
        for name, values in made.items():
            row[name] = int((values == results).sum())
            row[f"{name}_in_bf16"] = int((values.bfloat16() == results.bfloat16()).sum())
        rows.append(row | {"results": results.numel()})
    return rows


def compare(arguments) -> int:
    """Print a table by K, write the record, and return 1 if an emulated result differs."""
    recorded = torch.load(arguments.compare)
    rows = [row for entry in recorded["records"] for row in compared(entry)]
    keys = ("emulated", "emulated_in_bf16", "exact_sums", "exact_sums_in_bf16", "results")
    by_depth = []
    for accumulation, depth in itertools.product(
        ("fast", "slow"), sorted({row["shape"][2] for row in rows})
    ):
        chosen = [
            row for row in rows if row["accumulation"] == accumulation and row["shape"][2] == depth
        ]
        sums = {key: sum(row[key] for row in chosen) for key in keys}
        by_depth.append({"accumulation": accumulation, "depth": depth} | sums)
    figures = {"recorded_on": recorded["machine"], "by_depth": by_depth}
    printed("sums", write_json(arguments, "sums of a GPU", **figures))
    return int(any(row["emulated"] != row["results"] for row in rows))


def main() -> int:
    arguments = options(
        __doc__, device="cuda", out=".", depths=",".join(map(str, DEPTHS)), compare=str
    )
    if arguments.compare:
        return compare(arguments)
    generator = torch.Generator().manual_seed(0)
    depths = [int(depth) for depth in arguments.depths.split(",")]
    cases = [
        *itertools.product(SHAPES, depths, PAIRS[:1], ("patterns", "normal", "positive"), ("one",)),
        *itertools.product(SHAPES, depths, PAIRS[1:], ("normal",), ("one",)),
        *itertools.product(SHAPES[:2], depths, PAIRS[:1], ("positive",), ("some", "rowwise")),
    ]
    largest = {SHAPES[0]: 4096, SHAPES[1]: 14336, SHAPES[2]: 1024}
    records = [
        record(arguments.device, *case, generator) for case in cases if case[1] <= largest[case[0]]
    ]
    folder = Path(arguments.out)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({"machine": machine(), "records": records}, folder / "sums.pt")
    print(f"{len(records)} products recorded, each with and without fast accumulation")
    return 0


if __name__ == "__main__":
    sys.exit(main())
