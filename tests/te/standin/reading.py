"""Translate TransformerEngine's own source files from CUDA to CPU.

TransformerEngine's Python asks `torch.cuda` for a device, allocates on "cuda" and refuses CPU
tensors. The real `torch.cuda` stays as it is, because the rest of the process must go on seeing no
GPU. So each source file of the package `transformer_engine`, and no other, is translated while it
is imported:

    "cuda"                      ->  "cpu"             as a whole string: devices, device types of autocast
    torch.cuda.…                ->  cuda_of_te.…      (`standin.cuda_of_te`)
    device=current_device()     ->  device="cpu"
    tensor.is_cuda, t.cuda()    ->  tensor.is_cpu, t.cpu()
    torch.is_autocast_enabled() ->  torch.is_autocast_enabled("cpu"); without a device it asks about
    CUDA
    torch.version.cuda          ->  "13.0"
    import triton, onnx, …      ->  import of a placeholder that may be named and decorated with, but not run

Line numbers stay. Its computations and their order stay unchanged.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import marshal
import os
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from types import CodeType, ModuleType

from . import cuda_of_te

PACKAGE = "transformer_engine"
CUDA_VERSION = "13.0"
ABSENT = ("triton", "onnx", "onnxscript", "einops")
"""Packages imported by TransformerEngine at its top, unused under test."""
_PLACEHOLDERS = f"{__package__}.absent"


class CudaAsCpu(ast.NodeTransformer):
    """The translation, one rule a method."""

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return _constant("cpu", node) if node.value == "cuda" else node

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        if node.arg == "device":
            node.value = _CurrentDevice().visit(node.value)
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if node.attr == "cuda":
            if _dotted(node) == "torch.version.cuda":
                return _constant(CUDA_VERSION, node)
            if _dotted(node) == "torch.cuda":
                return ast.copy_location(ast.Name("cuda_of_te", node.ctx), node)
        node.attr = {"is_cuda": "is_cpu", "cuda": "cpu"}.get(node.attr, node.attr)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if not node.args and _dotted(node.func) == "torch.is_autocast_enabled":
            node.args = [_constant("cpu", node)]
        return self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> ast.AST:
        for alias in node.names:
            package = alias.name.partition(".")[0]
            if package in ABSENT:
                alias.asname = alias.asname or package
                alias.name = f"{_PLACEHOLDERS}.{alias.name}"
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        if node.module == "torch.cuda":
            node.module = cuda_of_te.__name__
        elif node.level == 0 and node.module.partition(".")[0] in ABSENT:
            node.module = f"{_PLACEHOLDERS}.{node.module}"
        return node


class _CurrentDevice(ast.NodeTransformer):
    """Replace the number of the current device inside `device=…` by the CPU."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        # no deeper: torch.device("cuda", torch.cuda.current_device()) needs the number
        return _constant("cpu", node) if _dotted(node.func) == "torch.cuda.current_device" else node


def _constant(value: str, node: ast.AST) -> ast.Constant:
    return ast.copy_location(ast.Constant(value), node)


def _dotted(node: ast.AST) -> str:
    """`a.b.c` of nested attributes; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    base = _dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{base}.{node.attr}" if base else ""


class Loader(importlib.machinery.SourceFileLoader):
    """Load one source file, translated. Its bytecode is cached under a name specific to this
    translation."""

    after: Callable[[ModuleType], None]

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        cached = Path(importlib.util.cache_from_source(path, optimization=_TRANSLATION))
        if cached.exists():
            return marshal.loads(cached.read_bytes())
        code = _translated(self.get_data(path), path)
        if not sys.dont_write_bytecode:
            cached.parent.mkdir(exist_ok=True)
            temporary = cached.with_suffix(f".{os.getpid()}")  # several ranks import at a time
            temporary.write_bytes(marshal.dumps(code))
            temporary.replace(cached)
        return code

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["cuda_of_te"] = cuda_of_te
        super().exec_module(module)
        self.after(module)


_TRANSLATION = f"cpu{zlib.crc32(Path(__file__).read_bytes())}"


def _translated(source: bytes, path: str) -> CodeType:
    tree = ast.parse(source, path)
    if any(word.encode() in source for word in ("cuda", "is_autocast_enabled", *ABSENT)):
        tree = ast.fix_missing_locations(CudaAsCpu().visit(tree))
    return compile(tree, path, "exec", dont_inherit=True)


class Finder(importlib.abc.MetaPathFinder):
    """Find TransformerEngine's modules and the placeholders. `after` is called with each executed
    module."""

    def __init__(self, after: Callable[[ModuleType], None]) -> None:
        self._after = after

    def find_spec(self, fullname: str, path=None, target=None):
        if fullname == _PLACEHOLDERS or fullname.startswith(f"{_PLACEHOLDERS}."):
            return importlib.machinery.ModuleSpec(fullname, _PlaceholderLoader(), is_package=True)
        if fullname.partition(".")[0] != PACKAGE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            loader = Loader(spec.loader.name, spec.loader.path)
            loader.after = self._after
            spec.loader = loader
        return spec


class Placeholder:
    """Stand for a name of an absent package during import: as a decorator, base or constant."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str):
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return Placeholder(f"{self._name}.{attribute}")

    def __call__(self, *args, **kwargs):
        return Placeholder(f"{self._name}(…)")

    def __getitem__(self, key):
        raise NotImplementedError(
            f"{self._name} is a placeholder: the stand-in for TransformerEngine does not run it"
        )


class _PlaceholderLoader(importlib.abc.Loader):
    def create_module(self, spec):
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__.removeprefix(f"{_PLACEHOLDERS}.")
        module.__version__ = "0"
        module.__getattr__ = lambda attribute: getattr(Placeholder(name), attribute)


def install(after: Callable[[ModuleType], None]) -> None:
    """Put the finder in front of Python's own."""
    sys.meta_path.insert(0, Finder(after))
