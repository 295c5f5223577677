"""Compare the security guide, file by file, with every use of a function that can run code or read
executable data.

Read from the source: a name counts whether called or passed on. A user's own objects, such as the
`load` of an entry point, are found at their source, `importlib.metadata`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import fp8_backends

ROOT = Path(fp8_backends.__file__).parent
GUIDE = ROOT / "docs" / "security.rst"

BUILTINS = {"eval", "exec", "compile", "__import__"}
MODULES = set(
    "pickle _pickle cPickle cloudpickle dill marshal shelve joblib jsonpickle code codeop pty "
    "socket socketserver ssl http ftplib smtplib telnetlib xmlrpc asyncio requests httpx aiohttp "
    "urllib3 subprocess ctypes runpy imp".split()
)
"""All of their names count, except `NO_CODE`."""
NAMES = set(
    "os.system os.popen os.startfile os.posix_spawn os.posix_spawnp os.fork os.forkpty "
    "tempfile.mktemp numpy.load urllib.request huggingface_hub "
    "importlib.import_module importlib.reload importlib.util.module_from_spec "
    "importlib.metadata.entry_points torch.load torch.jit.load torch.hub torch.package "
    "torch.ops.load_library torch.classes.load_library torch.utils.cpp_extension yaml.load "
    "yaml.load_all yaml.full_load yaml.full_load_all yaml.unsafe_load yaml.unsafe_load_all "
    "yaml.Loader yaml.FullLoader yaml.UnsafeLoader yaml.CLoader yaml.CFullLoader "
    "yaml.CUnsafeLoader multiprocessing torch.distributed.all_gather_object "
    "torch.distributed.gather_object torch.distributed.broadcast_object_list "
    "torch.distributed.scatter_object_list torch.distributed.send_object_list "
    "torch.distributed.recv_object_list torch.serialization.add_safe_globals "
    "torch.serialization.safe_globals".split()
)
PREFIXES = ("os.exec", "os.spawn")
NO_CODE = re.compile(
    r"subprocess\.(\w+(Error|Expired)|CompletedProcess|DEVNULL|PIPE|STDOUT)|"
    r"ctypes\.(c_\w+|Structure|POINTER|byref|sizeof|addressof)"
)
"""Descriptions in these modules: exceptions, constants, types."""
MUST_BE_FALSE = ("shell", "trust_remote_code", "allow_pickle")
"""Arguments given as False, or not at all."""


def imported(nodes: list[ast.AST]) -> dict[str, str]:
    """Map local names to dotted names of a module's imports from elsewhere."""
    found = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                found[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {
                alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names
            }
    return found


def dotted(node: ast.AST, names: dict[str, str]) -> str | None:
    """Return `torch.load` for `torch.load`, for `t.load` after `import torch as t`, and for an
    imported `load`."""
    if isinstance(node, ast.Attribute):
        base = dotted(node.value, names)
        return base and f"{base}.{node.attr}"
    if isinstance(node, ast.Name):
        return names.get(node.id, f"builtins.{node.id}" if node.id in BUILTINS else None)
    return None


def counts(name: str) -> bool:
    if NO_CODE.fullmatch(name):
        return False
    own = name.removeprefix("builtins.")
    parts = own.split(".")
    is_of = {".".join(parts[:i]) for i in range(1, len(parts) + 1)}
    return (
        own in BUILTINS
        or bool(is_of & NAMES)
        or len(parts) > 1
        and parts[0] in MODULES
        or own.startswith(PREFIXES)
    )


def is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def is_safe(call: ast.Call, names: dict[str, str], safe_loaders: set[str]) -> bool:
    """Tell if this is `torch.load` with `weights_only=True`, or `yaml.load` with a safe loader."""
    options = {each.arg: each.value for each in call.keywords}
    name = dotted(call.func, names)
    if name == "torch.load":
        weights_only = options.get("weights_only")
        return isinstance(weights_only, ast.Constant) and weights_only.value is True
    if name in ("yaml.load", "yaml.load_all"):
        loader = options.get("Loader") or (call.args[1] if len(call.args) > 1 else None)
        return (dotted(loader, names) or getattr(loader, "id", None)) in safe_loaders
    return False


def found_in(source: str) -> Iterator[str]:
    """Return the relevant names in a file."""
    nodes = list(ast.walk(ast.parse(source)))
    names, safe_loaders = imported(nodes), {"yaml.SafeLoader", "yaml.CSafeLoader"}
    for node in nodes:
        if (
            isinstance(node, ast.ClassDef)
            and node.bases
            and {dotted(b, names) for b in node.bases} <= safe_loaders
        ):
            safe_loaders |= {node.name}
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    safe = {call.func for call in calls if is_safe(call, names, safe_loaders)}
    for call in calls:
        yield from (
            each.arg
            for each in call.keywords
            if each.arg in MUST_BE_FALSE and not is_false(each.value)
        )
    for node in nodes:
        if (
            isinstance(node, (ast.Attribute, ast.Name))
            and isinstance(node.ctx, ast.Load)
            and node not in safe
        ):
            name = dotted(node, names)
            if name and counts(name):
                yield name.removeprefix("builtins.")
        elif isinstance(node, ast.ImportFrom) and not node.level and node.names[0].name == "*":
            yield f"{node.module}.*"


def longest(names: set[str]) -> set[str]:
    """Drop prefixes of other names: `torch.hub` of `torch.hub.load`."""
    return {name for name in names if not any(other.startswith(f"{name}.") for other in names)}


def found(root: Path) -> dict[str, set[str]]:
    each = {
        str(file.relative_to(root)): longest(set(found_in(file.read_text("utf-8"))))
        for file in root.rglob("*.py")
    }
    return {file: names for file, names in each.items() if names}


def listed() -> dict[str, set[str]]:
    """Return the names in the guide: ``FILE``: ``NAME``, ``NAME``. A sentence."""
    text = GUIDE.read_text("utf-8")
    lines = re.findall(r"^\* ``([\w/]+\.py)``: ((?:``[\w.]+``(?:, |,\n  )?)+)", text, re.M)
    return {file: set(re.findall(r"``([\w.]+)``", names)) for file, names in lines}


def test_security_guide_names_all_code_execution():
    assert found(ROOT) == listed()


@pytest.mark.parametrize(
    "planted",
    [
        "eval(text)",
        "def f():\n    exec(text)",
        "run = eval",
        "import pickle\npickle.load(file)",
        "from pickle import loads as read\nread(data)",
        "import marshal as m\nm.loads(data)",
        "import shelve\nshelve.open(path)",
        "import torch\ntorch.load(path)",
        "import torch as t\nt.load(path, weights_only=False)",
        "from torch import load\nload(path, weights_only=choice)",
        "import yaml\nyaml.load(text)",
        "import yaml\nyaml.load(text, loader)",
        "import yaml\nclass L(yaml.SafeLoader, Other): pass\nyaml.load(text, L)",
        "import pickle\npickle.load(file, weights_only=True)",
        "import yaml\nread = yaml.unsafe_load",
        "from yaml import Loader\nf(Loader)",
        "import subprocess\nsubprocess.run(command, shell=True)",
        "run(command, shell=flag)",
        "import os\nos.system(command)",
        "import os as o\no.execvp(a, b)",
        "import tempfile\ntempfile.mktemp()",
        "import importlib\nimportlib.import_module(name)",
        "from urllib import request\nrequest.urlopen(url)",
        "import torch.hub\ntorch.hub.load(name)",
        "import numpy\nnumpy.load(path, allow_pickle=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "import ctypes\nctypes.CDLL(path)",
        "from os import *",
    ],
)
def test_a_planted_violation_is_found(planted, tmp_path):
    (tmp_path / "extra.py").write_text(planted)
    assert list(found(tmp_path)) == ["extra.py"]


@pytest.mark.parametrize(
    "plain",
    [
        "import torch\ntorch.load(path, weights_only=True)",
        "import re\nre.compile(text)\nmodel.compile()\nmodel.eval()",
        "import yaml\nyaml.safe_load(text)",
        "import yaml\nclass L(yaml.SafeLoader): pass\nyaml.load(text, L)\nyaml.load(text, "
        "Loader=yaml.CSafeLoader)",
        "import subprocess\ntry: pass\nexcept subprocess.TimeoutExpired: pass",
        "import urllib.parse\nurllib.parse.quote(text)",
        "run(command, shell=False)",
        "class Settings:\n    compile: bool = False",
        "import tempfile\ntempfile.mkdtemp()",
    ],
)
def test_harmless_code_passes_security_check(plain, tmp_path):
    (tmp_path / "extra.py").write_text(plain)
    assert found(tmp_path) == {}


def test_guide_lists_environment_variables():
    text = GUIDE.read_text("utf-8")
    read = set()
    # which builds the site, and is not installed
    for file in {*ROOT.rglob("*.py")} - {ROOT / "docs" / "conf.py"}:
        source = file.read_text("utf-8")
        read |= set(
            re.findall(
                r"""environ(?:\.get\(|\[|\.setdefault\(|\.pop\()\s*["']([A-Z]\w+)["']""", source
            )
        )
    assert {"CXX", "TORCH_EXTENSIONS_DIR", "RANK"} <= read
    assert [name for name in sorted(read) if f"``{name}``" not in text] == []
