"""`docs/patches.rst` names exactly the files that change or inspect Python, PyTorch or another
library outside official extension points (design rule 8).

Read from the source, in every module:

- an attribute of a foreign module or class that is assigned or deleted;
- `object.__class__ = …`, and a method of an object that is replaced by a function made here;
- functions that run and their locals (`sys._getframe`, `inspect.currentframe`, `f_locals`, …);
- file descriptors that are redirected (`os.dup2`), kernels of the dispatcher
  (`torch.library.Library(…, "IMPL")`), code objects that are copied, hook tables of modules,
  filters on foreign loggers, and private names of DDP, FSDP2 and autograd.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import fp8_backends

ROOT = Path(fp8_backends.__file__).parent
LIST = ROOT / "docs" / "patches.rst"

CALLS = {"_getframe", "currentframe", "walk_stack", "dup2", "addFilter", "CodeType", "FunctionType"}
ATTRIBUTES = {
    "f_locals",
    "f_back",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_always_called",
}
ATTRIBUTES |= {
    "_set_params_and_buffers_to_ignore_for_model",
    "queue_callback",
    "_match_all_reduce_for_bwd_pass",
}
METHODS = {"forward", "_apply"}
"""Attributes of modules: any replacement on an object counts."""
ATTRIBUTES |= {"_sharded_local_tensor"}
MEANT = {"sys.argv ="}
"""Attributes that a program may set by Python's documentation."""


def dotted(node: ast.AST) -> str:
    """Return `a.b.c` of an attribute expression, else an empty string."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}" if dotted(node.value) else ""
    return node.id if isinstance(node, ast.Name) else ""


def foreign_names(tree: ast.Module, nodes: list[ast.AST]) -> set[str]:
    """Return a module's imports from elsewhere, and loop variables over them."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {alias.asname or alias.name for alias in node.names}
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(
            statement.value, (ast.Tuple, ast.List, ast.Set, ast.Dict)
        ):
            if any(
                isinstance(node, ast.Name) and node.id in found
                for node in ast.walk(statement.value)
            ):
                found |= {target.id for target in statement.targets if isinstance(target, ast.Name)}
    for node in nodes:
        if isinstance(node, (ast.For, ast.comprehension)) and dotted(node.iter) in found:
            found |= {each.id for each in ast.walk(node.target) if isinstance(each, ast.Name)}
    return found - {"self"}


def pairs(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST | None]]:
    """(target, value) of assignments, also of `a, b = c, d` and `del a`."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                yield from zip(target.elts, node.value.elts, strict=True)
            else:
                yield target, node.value
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        yield node.target, node.value
    elif isinstance(node, ast.Delete):
        yield from ((target, None) for target in node.targets)


def patches(source: str) -> set[str]:
    """Describe one file's patches in words."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    foreign, found = foreign_names(tree, nodes), set()
    functions = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    own = {
        each
        for function in nodes
        if isinstance(function, ast.FunctionDef)
        for each in values_of(function)
    }
    for node in nodes:
        for target, value in pairs(node):
            if not isinstance(target, ast.Attribute):
                continue
            owner = dotted(target.value)
            if target.attr == "__class__":
                found.add(f"{owner}.__class__ =")
            elif owner.split(".")[0] in foreign:
                found.add(f"{owner}.{target.attr} =")
            elif owner not in ("self", "cls") and target.attr in METHODS:
                found.add(f"{owner}.{target.attr} =")
            elif (
                owner not in ("self", "cls") and value not in own and is_function(value, functions)
            ):
                found.add(f"{owner}.{target.attr} = a function")
        if isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES:
            found.add(node.attr)
        if isinstance(node, ast.Call):
            found |= set(call(node, foreign))
    return found - MEANT


def values_of(function: ast.FunctionDef) -> Iterator[ast.Name]:
    """Yield a function's reads of its own arguments."""
    arguments = {
        each.arg
        for each in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    }
    return (
        node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id in arguments
    )


def is_function(value: ast.AST | None, functions: set[str]) -> bool:
    """Tell if a value is a function made in this file, or one bound to an object."""
    if isinstance(value, ast.IfExp):
        return is_function(value.body, functions) or is_function(value.orelse, functions)
    if isinstance(value, ast.Call):
        of_file = any(is_function(argument, functions) for argument in value.args)
        return dotted(value.func).endswith(("MethodType", "partial")) and of_file
    return isinstance(value, ast.Lambda) or (isinstance(value, ast.Name) and value.id in functions)


def call(node: ast.Call, foreign: set[str]) -> Iterator[str]:
    name = dotted(node.func)
    last = name.split(".")[-1] if name else getattr(node.func, "attr", "")
    arguments = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
    if last in CALLS:
        yield f"{last}()"
    if last in ("setattr", "delattr") and dotted(node.args[0]).split(".")[0] in foreign:
        yield f"{last}({dotted(node.args[0])})"
    if last == "Library" and {"IMPL", "DEF", "FRAGMENT"} & set(arguments):
        yield "Library(IMPL)"
    if last == "replace" and any(
        (keyword.arg or "").startswith("co_") for keyword in node.keywords
    ):
        yield "code.replace()"


def patched_files(root: Path) -> dict[str, set[str]]:
    files = {
        str(file.relative_to(root)): patches(file.read_text(encoding="utf-8"))
        for file in root.rglob("*.py")
    }
    return {name: found for name, found in files.items() if found}


def test_list_names_exactly_the_patching_files():
    named = set(re.findall(r"``([a-z_0-9/]+\.py)``", LIST.read_text(encoding="utf-8")))
    found = patched_files(ROOT)
    assert not {name: what for name, what in found.items() if name not in named}, (
        "not in docs/patches.rst"
    )
    assert not named - found.keys(), "in docs/patches.rst, and does none of this"


@pytest.mark.parametrize(
    "planted",
    [
        "import accelerate\ndef f():\n    accelerate.state.is_fp8_available = None",
        "from torch.nn import Linear\nLinear.forward = None",
        "import torch.nn as nn\nsetattr(nn.Linear, 'forward', None)",
        "import torch\ndel torch.nn.Linear",
        "import a, b\n_BOTH = (a, b)\ndef f(x):\n    for each in _BOTH:\n        each.x, y = x, 1",
        "def f(model):\n    model.__class__ = int",
        "def f(engine):\n    def save(): pass\n    engine.save = save",
        "def f(model):\n    model._apply = Applies(model)",
        "from types import MethodType\ndef f(model):\n    model.forward = MethodType(len, model)",
        "import sys\nframe = sys._getframe(1)",
        "from inspect import currentframe\nframe = currentframe()",
        "import os\nos.dup2(1, 2)",
        "from torch.library import Library\nlibrary = Library('aten', 'IMPL')",
        "def f(g):\n    return g.__code__.replace(co_name='x')",
        "def f(module):\n    module._forward_hooks.clear()",
        "def f(engine, g):\n    engine.queue_callback(g)",
    ],
)
def test_a_planted_patch_is_found(planted, tmp_path):
    (tmp_path / "extra.py").write_text(planted)
    assert list(patched_files(tmp_path)) == ["extra.py"]


@pytest.mark.parametrize(
    "plain",
    [
        "import torch\ndef f(x):\n    y = torch.zeros(1)\n    y.grad = x",
        "class A:\n    def __init__(self):\n        self.forward = lambda x: x",
        "def f(text):\n    return text.replace('a', 'b')",
        "import sys\nsys.argv = ['x']",
        "def keep(): pass\ndef f(config, keep):\n    config.keep = keep",
    ],
)
def test_ordinary_code_passes_patch_check(plain, tmp_path):
    (tmp_path / "extra.py").write_text(plain)
    assert not patched_files(tmp_path)
