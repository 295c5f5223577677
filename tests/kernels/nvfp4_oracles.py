"""Record NVFP4 codes and scales of TransformerEngine's and TorchAO's references, and NVIDIA's casts
to E2M1.

    python tests/kernels/nvfp4_oracles.py TE_REPOSITORY AO_REPOSITORY CUDA_INCLUDE

Writes recordings/nvfp4.safetensors, which `test_nvfp4.py` reads. Both references run on the CPU,
without oneDNN, whose bf16 products flush subnormal numbers. The two repositories are git
directories; the cast is compiled with g++ from CUDA's own header.
"""

from __future__ import annotations

import datetime
import enum
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import torch
from safetensors.torch import save_file

FILE = Path(__file__).parents[1] / "compute" / "recordings" / "nvfp4.safetensors"
TE_FOLDER = "transformer_engine/pytorch/custom_recipes"
AO_FILES = (
    "torchao/prototype/moe_training/nvfp4_training/hadamard_utils.py",
    "test/prototype/moe_training/nvfp4_training/nvfp4_reference.py",
)
HOST = """
#include <cuda_fp4.h>
#include <cstdio>
int main() {
    for (unsigned i = 0; i < 65536; i++) {
        __nv_bfloat16_raw raw;
        raw.x = i;
        putchar(__nv_cvt_bfloat16raw_to_fp4(raw, __NV_E2M1, cudaRoundNearest));
    }
}
"""


def matrices() -> dict[str, torch.Tensor]:
    """Return bf16 matrices [48, 64] by name."""
    generator, shape = torch.Generator().manual_seed(0), (48, 64)

    def normal() -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    made = {
        "normal": normal(),
        "sizes": normal() * torch.exp2(torch.randint(-12, 8, shape, generator=generator)),
        "rows": normal() * torch.exp2(torch.randint(-30, 8, (shape[0], 1), generator=generator)),
        "ties": torch.randint(-24, 25, shape, generator=generator) / 4,
        "zeros": torch.zeros(shape),
        "blocks of zeros": normal(),
        "denormal": normal() * 2.0**-128,
        "tiny": normal() * 2.0**-118,
        "huge": normal().clamp(-3.9, 3.9) * 2.0**124,
        "inf": normal(),
        "nan": normal(),
    }
    made["blocks of zeros"][:16, :32] = made["blocks of zeros"][20] = 0
    made["inf"][3, 7], made["nan"][9, 5] = -torch.inf, torch.nan
    return {name: matrix.bfloat16() for name, matrix in made.items()}


def module_of(repository: str, path: str, name: str) -> types.ModuleType:
    """Run the text of a file at HEAD as a module of this name."""
    text = subprocess.check_output(["git", "-C", repository, "show", f"HEAD:{path}"], text=True)
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(text, path, "exec"), module.__dict__)
    return module


def commit_of(repository: str) -> str:
    return subprocess.check_output(
        ["git", "-C", repository, "log", "-1", "--format=%H %cs"], text=True
    ).strip()


def transformer_engine(repository: str) -> types.ModuleType:
    """Load its reference beside stand-ins for the modules that need a GPU's libraries."""

    class Quantizer:
        def __init__(self, *, rowwise, columnwise):
            self.rowwise_usage, self.columnwise_usage = rowwise, columnwise

    package = "transformer_engine.pytorch"
    recipes = types.ModuleType(f"{package}.custom_recipes")
    recipes.gemm = types.SimpleNamespace(
        MMParams=object, GEMMType=enum.Enum("GEMMType", "FPROP DGRAD WGRAD")
    )
    tensors = types.SimpleNamespace(Quantizer=Quantizer, QuantizedTensorStorage=object)
    for name in ("transformer_engine", package):
        sys.modules[name] = types.ModuleType(name)
    sys.modules[f"{package}.custom_recipes"], sys.modules[f"{package}.quantized_tensor"] = (
        recipes,
        tensors,
    )
    recipes.reference_utils = module_of(
        repository, f"{TE_FOLDER}/reference_utils.py", f"{recipes.__name__}.utils"
    )
    return module_of(
        repository, f"{TE_FOLDER}/reference_nvfp4.py", f"{recipes.__name__}.reference_nvfp4"
    )


def record(te_repository: str, ao_repository: str, include: str) -> None:
    te = transformer_engine(te_repository)
    names = "torchao.prototype.moe_training.nvfp4_training.hadamard_utils", "nvfp4_reference"
    _, ao = (
        module_of(ao_repository, path, name) for path, name in zip(AO_FILES, names, strict=True)
    )
    torch.backends.mkldnn.enabled = False
    tensors, e2m1 = {}, te.reference_utils.Fp4Formats.E2M1
    for name, matrix in matrices().items():
        theirs = te.NVFP4QuantizerRef(
            dtype=e2m1, quant_tile_shape=(1, 16), with_rht=False
        ).quantize(matrix)
        # its quantizer of columns transforms them for training; its rows are plain
        _, rows = ao.reference_rht_quantize_row_col(
            matrix, *ao.reference_rht_amax(matrix), layout="plain"
        )
        tensors[f"{name}: matrix"] = matrix
        for source, codes, scales in (
            ("te", theirs.data, theirs.scale),
            ("ao", rows.codes, rows.scales),
        ):
            tensors[f"{name}: {source} input codes"] = codes.contiguous()
            tensors[f"{name}: {source} input scales"] = scales.contiguous().view(torch.uint8)
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "cast.cpp"), Path(folder, "cast")
        source.write_text(HOST)
        subprocess.check_call(["g++", "-I", include, str(source), "-o", str(program)])
        codes = torch.frombuffer(
            bytearray(subprocess.check_output([str(program)])), dtype=torch.uint8
        )
    tensors["casts of bf16"] = codes[::2] | codes[1::2] << 4
    sources = {
        "TransformerEngine": f"{commit_of(te_repository)}, {TE_FOLDER}/reference_nvfp4.py",
        "TorchAO": f"{commit_of(ao_repository)}, {AO_FILES[1]}",
        "casts": f"cuda_fp4.hpp of {Path(include).parent.name}",
        "date": datetime.date.today().isoformat(),
    }
    save_file(tensors, FILE, metadata=sources)


if __name__ == "__main__":
    record(*sys.argv[1:])
