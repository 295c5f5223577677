"""Kernels compiled to machine code of compute capability 9.0 (H100, H200), on a machine without a
GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fp8_backends.kernels.triton_common import OPTIONS

HOPPER = GPUTarget("cuda", 90, 32)
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class MachineCode(NamedTuple):
    ptx: str
    registers: int
    """Registers of a thread; 255 at most, and the threads of a multiprocessor share 65,536."""
    stack: int
    """Bytes of local memory of a thread, for spills and arrays."""
    shared: int
    """Bytes of shared memory of a program; Hopper has 227 KiB for all programs of a
    multiprocessor."""

    def widths(self, instruction: str) -> set[int]:
        """Return the bits moved per thread by each access to global memory: `ld` or `st`."""
        found = re.findall(rf"\b{instruction}\.global[\w:.]*?(?:\.v(\d))?\.[bu](\d+)\b", self.ptx)
        return {int(count or 1) * int(bits) for count, bits in found}


def compiled(
    kernel, signature: dict[str, str], constants: dict[str, object], **options
) -> MachineCode:
    """Compile a kernel like the launcher, for arguments divisible by 16, as large tensors' pointers
    are.

    Args:
        signature: "*bf16", "*u8", "fp32", "i32", … by the name of each parameter that is no
            constant. "i32" are numbers of any value; "i32:16" multiples of 16. All pointers are.
        constants: the values of the others.
        options: num_warps and the like.
    """
    names = kernel.arg_names
    aligned = {
        (names.index(n),): [["tt.divisibility", 16]]
        for n, t in signature.items()
        if t[0] == "*" or ":16" in t
    }
    types = {name: signature.get(name, "constexpr").split(":")[0] for name in names}
    source = ASTSource(kernel, signature=types, constexprs=constants, attrs=aligned)
    made = triton.compile(source, target=HOPPER, options={**OPTIONS, **options})
    assert not miscompiled(made.asm["ptx"]), "ptxas reads some of these codes too early"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(made.asm["cubin"])
        cubin.flush()
        command = [_CUOBJDUMP, "--dump-resource-usage", cubin.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True)
    registers, stack = (
        int(re.search(rf"{name}:(\d+)", usage.stdout)[1]) for name in ("REG", "STACK")
    )
    local = int(re.search(r"LOCAL:(\d+)", usage.stdout)[1])
    return MachineCode(made.asm["ptx"], registers, max(stack, local), made.metadata.shared)


def miscompiled(ptx: str) -> list[str]:
    """List the registers of FP8 casts used more than once: packed into a word, and their bytes one
    by one.

    ptxas of CUDA 12.8 and 12.9 then reads bytes before the cast writes them. Seen on an H200:
    transposed codes of FP32 matrices were wrong. Casts by `hardware_codes` hide the register of a
    pair.
    """
    casts = re.findall(r"cvt\.rn\.satfinite\.e\dm\dx2\.f32\s+(%\w+),", ptx)
    return [cast for cast in casts if len(re.findall(rf"{cast}\b", ptx)) > 2]
