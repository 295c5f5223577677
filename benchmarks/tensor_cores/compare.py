"""Are the emulated sums of tensor cores those of the chips, to the bit?

Compares `emulation.product` with recordings of single instructions: D = A @ B.T + C, 5,000 rows a
chip and format. The recordings are the folder `model_validation` of
https://github.com/north-numerical-computing/MATLAB-tensor-core.
"""

from __future__ import annotations

import sys
from pathlib import Path

import emulation
import torch

from fp8_backends.formats.formats import E4M3, E5M2

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measuring import options, write_json  # noqa: E402
from tables import printed  # noqa: E402

WGMMA = ("H100", "H200")
"""Recorded with C = 0, whatever their files of C hold."""


def numbers(file: Path, base: int) -> torch.Tensor:
    """FP32 numbers written as hexadecimal or binary integers."""
    return (
        torch.tensor([int(word, base) for word in file.read_text().split()])
        .to(torch.int32)
        .view(torch.float32)
    )


def recorded(folder: Path, chip: str, fmt) -> tuple[torch.Tensor, ...]:
    """Codes of A and B [rows, 32], C and D [rows]."""
    name = fmt.name.upper()
    a, b = (numbers(folder / chip / name / f"{x}_{chip}_{name}.txt", 16).view(-1, 32) for x in "ab")
    c, d = (numbers(folder / chip / name / f"{x}_{chip}_fp32.txt", 2) for x in "cd")
    codes = tuple(x.to(fmt.dtype) for x in (a, b))
    assert all(torch.equal(x.float(), of) for x, of in zip(codes, (a, b), strict=True))
    return *codes, torch.zeros_like(c) if chip in WGMMA else c, d


def equal(x: torch.Tensor, y: torch.Tensor) -> int:
    return int((x.view(torch.int32) == y.view(torch.int32)).sum())


def compare(a, b, c, d, chip: str) -> dict:
    """Rows equal to the bit: by the chip's rule with C, without C where that is 0, and by exact
    sums rounded once."""
    rows = [(a[i : i + 1], b[i : i + 1], c[i].view(1, 1)) for i in range(len(d))]

    def products(chip, with_c=True):
        return torch.cat(
            [emulation.product(a, b, chip, c=c if with_c else None).view(1) for a, b, c in rows]
        )

    results = {
        "rows": len(d),
        "equal": equal(products(chip), d),
        "exact_sums_equal": equal(products("exact"), d),
    }
    return results | (
        {"compiled_equal": equal(products(chip, with_c=False), d)} if not c.any() else {}
    )


def main() -> None:
    arguments = options(__doc__, folder=".")
    results = []
    for chip in ("H100", "H200", "Ada", "L40S", "B200"):
        for fmt in (E4M3, E5M2):
            found = compare(*recorded(Path(arguments.folder), chip, fmt), chip)
            results.append({"chip": chip, "format": fmt.name, **found})
    printed("instructions", write_json(arguments, "sums equal to recordings", results=results))


if __name__ == "__main__":
    main()
