"""Allow no process-wide state except the backend registry (design rule 6): functions write to
objects with an owner. State of a thread (`threading.local`, `ContextVar`) describes its current
work and is allowed, and so are tables filled by decorators during import.

Read from the source, in every module:

- `global` statements;
- module-level containers, also imported ones, and class-level containers that a function writes to;
- attributes that a function sets on a module-level function, class or instance;
- cached functions that return nothing: their cache is a flag for "done already".

A default device is state of the process, too: every new tensor names its own device, except in
commands.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import fp8_backends

ROOT = Path(fp8_backends.__file__).parent

ALLOWED = {"compute.registry.factories", "compute.registry.instances"}

CONTAINERS = {
    "list",
    "dict",
    "set",
    "bytearray",
    "defaultdict",
    "Counter",
    "OrderedDict",
    "deque",
    "ChainMap",
}
CONTAINERS |= {"WeakKeyDictionary", "WeakValueDictionary", "WeakSet"}
DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
WRITES = set(
    "append extend insert remove pop popitem popleft appendleft clear sort reverse add discard "
    "update setdefault subtract difference_update intersection_update move_to_end".split()
)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def trees(root: Path) -> dict[str, ast.Module]:
    """Every module of a package by its dotted name, without the package's own."""
    found = {}
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(file.read_text(encoding="utf-8"))
        found[name].is_package = parts[-1] == "__init__"
    return found


def last_name(node: ast.AST) -> str:
    """`deque` of `collections.deque`, `deque[int]` and `deque`."""
    node = node.value if isinstance(node, ast.Subscript) else node
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def is_container(value: ast.AST | None) -> bool:
    return isinstance(value, DISPLAYS) or (
        isinstance(value, ast.Call) and last_name(value.func) in CONTAINERS
    )


def bindings(body: list[ast.stmt]) -> Iterator[tuple[str, ast.AST | None]]:
    """Return (name, value) of each binding in the body of a module or class, also under `if`,
    `try`, `with` and `for`."""
    for statement in body:
        if isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
            yield statement.name, statement
            continue
        targets = (
            statement.targets
            if isinstance(statement, ast.Assign)
            else [getattr(statement, "target", None)]
        )
        for target in targets:
            if isinstance(target, ast.Name):
                yield target.id, getattr(statement, "value", None)
        for inner in ("body", "orelse", "finalbody"):
            yield from bindings(getattr(statement, inner, None) or [])
        for handler in getattr(statement, "handlers", ()):
            yield from bindings(handler.body)


def of_thread(classes: dict[str, ast.ClassDef], value: ast.AST | None) -> bool:
    """Tell if a value is an instance of `threading.local`, of a subclass of it here, or a
    `ContextVar`."""
    if not isinstance(value, ast.Call):
        return False
    name = last_name(value.func)
    bases = {last_name(base) for base in classes[name].bases} if name in classes else set()
    return "local" in bases | {name} or name == "ContextVar"


def functions(tree: ast.AST) -> Iterator[ast.AST]:
    return (node for node in ast.walk(tree) if isinstance(node, (*FUNCTIONS, ast.Lambda)))


def local_names(function: ast.AST) -> set[str]:
    arguments = function.args
    named = [
        *arguments.posonlyargs,
        *arguments.args,
        *arguments.kwonlyargs,
        arguments.vararg,
        arguments.kwarg,
    ]
    bound = {each.arg for each in named if each is not None}
    return bound | {
        n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }


def written(function: ast.AST) -> Iterator[ast.expr]:
    """Return names changed in place by a function: `x` of x[i] = …, del x[i], x.append(…), x |= …;
    no locals."""
    for node in ast.walk(function):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
            yield node.value
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in WRITES
        ):
            yield node.func.value
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Attribute):
            yield node.target


def imported(name: str, tree: ast.Module, known: dict[str, ast.Module]) -> dict[str, str]:
    """Map local names to dotted names of a module's imports from this package."""
    package = name.split(".") if tree.is_package else name.split(".")[:-1]
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            base = ".".join(part for part in base if part)
            found |= {
                alias.asname or alias.name: f"{base}.{alias.name}".lstrip(".")
                for alias in node.names
            }
    return found


def is_decorator(statement: ast.stmt, tree: ast.Module) -> bool:
    """Tell if a module uses a function only as decorator of its other functions, so at import."""
    if not isinstance(statement, ast.FunctionDef):
        return False
    decorators = [
        d for each in tree.body if isinstance(each, FUNCTIONS) for d in each.decorator_list
    ]
    of_decorators = {node for each in decorators for node in ast.walk(each)}
    if not any(isinstance(node, ast.Name) and node.id == statement.name for node in of_decorators):
        return False  # without a look at the whole module
    uses = {
        node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == statement.name
    }
    return uses <= of_decorators


def is_flag(function: ast.AST) -> bool:
    """Tell if this is a cached function without a result."""
    cached = {
        last_name(each.func if isinstance(each, ast.Call) else each)
        for each in function.decorator_list
    }
    results = [
        node
        for node in ast.walk(function)
        if isinstance(node, (ast.Return, ast.Yield)) and node.value
    ]
    return bool(cached & {"cache", "lru_cache"}) and not results


def hidden_state(root: Path) -> list[str]:
    """Return dotted names of process-wide state written by functions of the package."""
    known, found = trees(root), set()
    containers = {
        f"{name}.{bound}"
        for name, tree in known.items()
        for bound, v in bindings(tree.body)
        if is_container(v)
    }
    for name, tree in known.items():
        top, nodes = dict(bindings(tree.body)), list(ast.walk(tree))
        classes = {each.name: each for each in nodes if isinstance(each, ast.ClassDef)}
        dotted = {bound: f"{name}.{bound}" for bound in top} | imported(name, tree, known)
        objects = {
            bound
            for bound, value in top.items()
            if isinstance(value, (*FUNCTIONS, ast.ClassDef, ast.Call))
        }
        objects -= {bound for bound in objects if of_thread(classes, top[bound])}
        found |= {
            f"{name}.{each}"
            for node in nodes
            if isinstance(node, ast.Global)
            for each in node.names
        }
        found |= {
            f"{name}.{each.name}" for each in nodes if isinstance(each, FUNCTIONS) and is_flag(each)
        }
        importing = {
            node for each in tree.body if is_decorator(each, tree) for node in ast.walk(each)
        }
        places = []  # written by any function
        for function in functions(tree):
            writes = list(written(function))
            places += writes
            if function in importing:
                continue
            own = local_names(function)
            for place in writes:
                if isinstance(place, ast.Name) and place.id not in own:
                    found |= {dotted.get(place.id)} & containers
                elif isinstance(place, ast.Attribute) and isinstance(place.value, ast.Name):
                    found |= {f"{dotted.get(place.value.id)}.{place.attr}"} & containers
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
                    if isinstance(node.value, ast.Name) and node.value.id in objects - own:
                        found.add(f"{name}.{node.value.id}.{node.attr}")
        for owner, definition in classes.items():
            if "local" in {last_name(base) for base in definition.bases}:
                continue
            fresh = {
                node.attr
                for node in ast.walk(definition)
                if isinstance(node, ast.Attribute) and is_self(node)
            }
            shared = {
                bound for bound, value in bindings(definition.body) if is_container(value)
            } - fresh
            for place in places:
                if isinstance(place, ast.Attribute) and place.attr in shared:
                    if isinstance(place.value, ast.Name) and place.value.id in (
                        "self",
                        "cls",
                        owner,
                    ):
                        found.add(f"{name}.{owner}.{place.attr}")
    return sorted(found)


def is_self(node: ast.Attribute) -> bool:
    """`self.x` on the left of an assignment: an attribute of each instance."""
    return (
        isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


@pytest.mark.nightly
def test_backend_registry_is_the_only_process_state():
    assert set(hidden_state(ROOT)) == ALLOWED


@pytest.mark.parametrize(
    ("name", "planted"),
    [
        ("extra._count", "_count = 0\ndef f():\n    global _count\n    _count += 1"),
        ("extra._seen", "_seen: set[str] = set()\ndef f(x):\n    _seen.add(x)"),
        ("extra._table", "_table = {}\ndef f(x):\n    if x:\n        _table[x] = 1"),
        (
            "extra._table",
            "import collections\n_table = collections.defaultdict(int)\nf = lambda x: "
            "_table.pop(x)",
        ),
        (
            "extra._table",
            "import weakref\n_table = weakref.WeakKeyDictionary()\ndef f(x):\n    del _table[x]",
        ),
        (
            "extra.A.items",
            "class A:\n    items = []\n    def f(self):\n        self.items.append(1)",
        ),
        ("extra.A.made", "class A:\n    made = 0\n    def f(self):\n        A.made += 1"),
        ("extra.f.calls", "def f():\n    f.calls = 1"),
        ("extra._state.on", "class S: pass\n_state = S()\ndef f():\n    _state.on = True"),
        ("extra.say", "import functools\n@functools.cache\ndef say(text):\n    print(text)"),
        (
            "compute.registry.ALIASES",
            "from .compute.registry import ALIASES\ndef f():\n    ALIASES['x'] = 'te'",
        ),
        (
            "compute.registry.ALIASES",
            "from .compute import registry\ndef f():\n    registry.ALIASES.clear()",
        ),
    ],
)
def test_planted_state_is_found(name, planted, tmp_path):
    (tmp_path / "compute").mkdir()
    (tmp_path / "compute" / "registry.py").write_text("ALIASES = {'torchao': 'ao'}\n")
    (tmp_path / "extra.py").write_text(planted)
    assert hidden_state(tmp_path) == [name]


@pytest.mark.parametrize(
    "plain",
    [
        "TABLE = {1: 2}\ndef f(x):\n    return TABLE[x]",
        "TABLE = {}\ndef f(TABLE):\n    TABLE[1] = 2",
        "def f():\n    found = []\n    found.append(1)\n    return found",
        "import threading\nclass T(threading.local):\n    x = None\n_thread = T()\ndef f():\n    "
        "_thread.x = 1",
        "class A:\n    items = []\n    def __init__(self):\n        self.items = []\n        "
        "self.items.append(1)",
        "T = {}\ndef put(x):\n    def keep(f):\n        T[x] = f\n    return keep\n@put(1)\ndef "
        "f(): pass",
        "import functools\n@functools.cache\ndef f(x):\n    return x + 1",
    ],
)
def test_constants_pass_state_check(plain, tmp_path):
    (tmp_path / "extra.py").write_text(plain)
    assert hidden_state(tmp_path) == []


NEW_TENSORS = {
    "empty",
    "empty_strided",
    "zeros",
    "ones",
    "full",
    "eye",
    "arange",
    "linspace",
    "logspace",
    "tensor",
}
NEW_TENSORS |= {
    "as_tensor",
    "asarray",
    "scalar_tensor",
    "rand",
    "randn",
    "randint",
    "randperm",
    "tril_indices",
}


def without_device(source: str) -> list[str]:
    """Return uses of PyTorch's factory functions that leave the device to the process."""
    tree = ast.parse(source)
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    good = {call.func for call in calls if "device" in {keyword.arg for keyword in call.keywords}}
    uses = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node not in good)
    return [
        ast.unparse(use)
        for use in uses
        if use.attr in NEW_TENSORS and ast.unparse(use.value) == "torch"
    ]


def test_no_tensor_is_made_on_the_default_device():
    rooms = (
        file
        for file in ROOT.rglob("*.py")
        if file.relative_to(ROOT).parts[0] not in ("tools", "examples")
    )
    found = {file.name: without_device(file.read_text(encoding="utf-8")) for file in rooms}
    assert {name: uses for name, uses in found.items() if uses} == {}
    assert without_device(
        "x = torch.zeros(2)\nmake = partial(torch.ones, 2)\ny = torch.full((), 1, device='cpu')"
    ) == [
        "torch.zeros",
        "torch.ones",
    ]
