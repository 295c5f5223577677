"""Read a kernel's machine code for compute capability 9.0: registers, spills, instructions per
element.

Instructions are counted in the code, not run. A loop counts once for each of its trips; both sides
of a branch count, so the figures are upper bounds.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import math
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import machine

ALU = frozenset(
    "LOP3 IADD3 SHF PRMT SEL FSEL FSETP ISETP VIMNMX FMNMX LEA PLOP3 F2FP VIADD IMNMX HSETP2 "
    "HMNMX2 SGXT BMSK VIMNMX3 FMNMX3 VIADDMNMX I2FP".split()
)
"""Half a multiprocessor's lanes run these."""
SPECIAL = frozenset("MUFU F2F F2I I2F POPC FLO BREV".split())
"""An eighth of the lanes run these."""
_BYTES = {
    "bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8, "fp8e4nv": 1, "fp8e5": 1, "i1": 1, "i8": 1, "u8": 1, "i16": 2, "i32": 4,
    "i64": 8,
}  # fmt: skip


class Operation(NamedTuple):
    address: int
    name: str
    """Opcode, such as `LDG.E.128`."""
    rest: str
    predicated: bool
    """True for a predicated instruction."""

    @property
    def kind(self) -> str:
        return self.name.partition(".")[0]

    @property
    def target(self) -> int | None:
        """Return the destination of a branch."""
        found = re.search(r"0x([0-9a-f]+)", self.rest) if self.kind == "BRA" else None
        return int(found[1], 16) if found else None

    @property
    def is_conditional(self) -> bool:
        """Tell if execution may continue behind the branch."""
        return self.predicated or re.search(r"\bU?P\d", self.rest) is not None

    @property
    def bytes(self) -> int:
        """Return the bytes moved per thread by a memory access."""
        for width, size in (
            (".128", 16),
            (".64", 8),
            (".U16", 2),
            (".S16", 2),
            (".U8", 1),
            (".S8", 1),
        ):
            if width in self.name:
                return size
        return 4


class Code(NamedTuple):
    registers: int
    """Registers of a thread."""
    stack: int
    """Bytes of local memory of a thread, used for spills."""
    shared: int
    """Bytes of shared memory of a program."""
    threads: int
    operations: list[Operation]

    def loops(self) -> list[list[Operation]]:
        """The outermost ones."""
        spans = []
        for each in self.operations:
            if each.target is not None and each.target < each.address:
                spans.append((each.target, each.address))
        outermost = [
            a for a in spans if not any(b[0] <= a[0] and a[1] <= b[1] and a != b for b in spans)
        ]
        return [
            [o for o in self.operations if low <= o.address <= high]
            for low, high in sorted(set(outermost))
        ]


def loaded(operations: list[Operation]) -> int:
    """Return the bytes read per thread from global memory."""
    return sum(each.bytes for each in operations if each.kind == "LDG")


def fast_path(code: Code) -> list[Operation]:
    """Return the path through a loop with the widest vector loads: the path with most such loads,
    then the shortest. Empty without such a loop."""
    return min((_way(each) for each in code.loops() if loaded(each)), default=(0, []))[1]


def _way(loop: list[Operation]) -> tuple[tuple[int, int, int], list[Operation]]:
    """The fast way through one loop, and its (narrow loads, -bytes, length)."""
    at = {each.address: i for i, each in enumerate(loop)}
    # from each operation to the loop's end: (narrow loads, -bytes, length) and the next operation
    # on the best way
    best: list[tuple[tuple[int, int, int], int | None]] = [((0, 0, 0), None)] * (len(loop) + 1)
    for i in reversed(range(len(loop))):
        each = loop[i]
        load = each.kind == "LDG"
        own = int(load and each.bytes < 4), -each.bytes * load, int(each.kind != "NOP")
        ways = [i + 1]
        if each.kind in ("EXIT", "RET") and not each.is_conditional:
            ways = []
        elif each.target is not None:
            ahead = at.get(each.target, len(loop))
            ways = ([i + 1] if each.is_conditional else []) + [ahead if ahead > i else len(loop)]
        ways = [way for way in ways if way == len(loop) or best[way][0][0] < _NO_WAY]
        if not ways:
            best[i] = (_NO_WAY, 0, 0), None
            continue
        way = min(ways, key=lambda way: best[way][0])
        best[i] = tuple(a + b for a, b in zip(own, best[way][0], strict=True)), way
    found, at_ = [], 0
    while at_ is not None and at_ < len(loop):
        found.append(loop[at_])
        at_ = best[at_][1]
    return best[0][0], [each for each in found if each.kind != "NOP"]


_NO_WAY = 10**9


class Work(NamedTuple):
    """Sum the work of all threads of one launch."""

    instructions: float
    alu: float
    special: float

    @classmethod
    def of(cls, operations: list[Operation], times: float) -> Work:
        kinds = Counter(each.kind for each in operations)
        sums = [
            sum(kinds[name] for name in names) for names in (kinds.keys() - {"NOP"}, ALU, SPECIAL)
        ]
        return cls(*(times * each for each in sums))

    def __add__(self, other: Work) -> Work:  # type: ignore[override]
        return Work(*(a + b for a, b in zip(self, other, strict=True)))


NOTHING = Work(0.0, 0.0, 0.0)


def disassembled(cubin: bytes, threads: int, shared: int) -> Code:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    file = Path(machine.folder()) / f"{hashlib.sha256(cubin).hexdigest()[:16]}.cubin"
    file.write_bytes(cubin)
    usage, sass = (
        subprocess.run([tool, option, file], capture_output=True, text=True, check=True).stdout
        for option in ("--dump-resource-usage", "--dump-sass")
    )
    registers, stack, local = (
        int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK", "LOCAL")
    )
    line = re.compile(r"\s+/\*([0-9a-f]+)\*/\s+(@!?U?P\w+\s+)?([A-Z0-9_.]+)(.*)")
    found = [
        Operation(int(m[1], 16), m[3], m[4], bool(m[2]))
        for m in map(line.match, sass.splitlines())
        if m
    ]
    return Code(registers, max(stack, local), shared, threads, found)


class Analysis(NamedTuple):
    """Analyse one kernel of Inductor."""

    elements: int
    work: Work
    registers: int
    stack: int


@functools.cache
def of_inductor(name: str, source: str, number: int = 0) -> Analysis:
    """Compile the kernel in one of the configurations among which Inductor would choose by
    measuring: they differ in tiles and warps."""
    tuner = tuner_of(name, source)
    sizes = _sizes(source)
    return _analysed(tuner, tuner.configs[number], source, math.prod(sizes.values()), sizes)


def configurations(name: str, source: str) -> int:
    return len(tuner_of(name, source).configs)


@functools.cache
def tuner_of(name: str, source: str):
    """Return the kernel with Inductor's candidate configurations."""
    file = Path(machine.folder()) / f"kernel_{hashlib.sha256(source.encode()).hexdigest()[:16]}.py"
    file.write_text(source)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def _analysed(tuner, config, source: str, elements: int, sizes: dict[str, int]) -> Analysis:
    code = _compiled(tuner, config)
    blocks = (
        dict(re.findall(r"^\s+(\w*BLOCK): tl\.constexpr = (\d+)", source, re.M)) | config.kwargs
    )
    blocks = {
        axis.removesuffix("BLOCK").lower(): int(size)
        for axis, size in blocks.items()
        if axis.endswith("BLOCK")
    }
    loops = code.loops()
    if not loops:  # the compiler has unrolled the source's loops: a program works on whole rows
        blocks |= {
            axis: sizes[f"{axis}numel"]
            for axis in blocks
            if axis.startswith("r") and f"{axis}numel" in sizes
        }
    per_thread = max(math.prod(blocks.values()) / code.threads, 1 / 32)
    inside = {each.address for loop in loops for each in loop}
    programs = math.prod(
        math.ceil(sizes[f"{axis}numel"] / size) for axis, size in blocks.items() if axis in "xyz"
    )
    work = Work.of(
        [each for each in code.operations if each.address not in inside], programs * code.threads
    )
    signature = tuner.triton_meta["signature"]
    read = sum(
        _BYTES.get(t[1:], 0)
        for n, t in signature.items()
        if n.startswith("in_") and t.startswith("*")
    )
    for loop in loops:
        loaded = sum(each.bytes for each in loop if each.kind == "LDG")
        trips_in_one = max(1, round(loaded / (read * per_thread))) if read else 1
        work += Work.of(loop, elements / (per_thread * trips_in_one))
    return Analysis(elements, work, code.registers, code.stack)


def has_fp8_results(source: str) -> bool:
    return re.search(r"'(?:in_)?out_ptr\d+': '\*fp8", source) is not None


def nan_instructions(name: str, source: str) -> int:
    """Count the PTX instructions `min.NaN` and `max.NaN` of a kernel. Its configurations have the
    same ones."""
    tuner = tuner_of(name, source)
    made = made_for(machine.CHIPS["H200"].target, tuner, tuner.configs[0])
    return len(re.findall(r"\b(?:min|max)(?:\.ftz)?\.NaN", made.asm["ptx"]))


def bytewise_stores(name: str, source: str) -> int:
    """Return the elements that a reduction kernel stores byte by byte at a stride, in each of its
    configurations: neighbouring bytes are stored so far apart in time that no cache joins them."""
    if "@triton_heuristics.pointwise" in source:
        return 0
    addresses = re.findall(r"tl\.store\(\w+ \+ \(([^\n]*?)\), ", source)
    strided = sum(re.search(r"\d{3,}\*\(*r0_", address) is not None for address in addresses)
    if not strided:
        return 0
    tuner = tuner_of(name, source)
    codes = (_compiled(tuner, config) for config in tuner.configs)
    if (
        min(
            sum(each.kind == "STG" and each.bytes == 1 for each in code.operations)
            for code in codes
        )
        < 4
    ):
        return 0
    return strided * math.prod(_sizes(source).values())


def _sizes(source: str) -> dict[str, int]:
    return {
        axis: int(size)
        for axis, size in re.findall(r"^\s+([xyzr]\d?_?numel) = (\d+)", source, re.M)
    }


def _compiled(tuner, config) -> Code:
    made = made_for(machine.CHIPS["H200"].target, tuner, config)
    return disassembled(made.asm["cubin"], 32 * config.num_warps, made.metadata.shared)


def made_for(target, tuner, config):
    """A kernel of Inductor as Triton compiles it in one configuration."""
    import triton
    from triton.compiler import ASTSource

    meta = tuner.triton_meta
    constants = dict(meta.get("constants", {})) | dict(config.kwargs)
    signature = dict(meta["signature"]) | dict.fromkeys(config.kwargs, "constexpr")
    constants |= {
        name: None
        for name, kind in signature.items()
        if kind == "constexpr" and name not in constants
    }
    attributes = {tuple(at): value for at, value in meta["configs"][0].items()}
    return triton.compile(
        ASTSource(tuner.fn, signature=signature, constexprs=constants, attrs=attributes),
        target=target,
        options={
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
            "enable_fp_fusion": meta.get("enable_fp_fusion", True),
        },
    )
