"""Hold the map of the package: rooms on floors, over every import of every file, also inside
functions and under `if TYPE_CHECKING`; no circle among files."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import fp8_backends

ROOT = Path(fp8_backends.__file__).parent

FLOORS = (
    ("errors", "announcement", "words"),
    ("formats", "torch_tools"),
    ("kernels",),
    ("tensors",),
    ("compute",),
    ("recipes",),
    ("states", "comm"),
    ("convert",),
    ("evidence",),
    ("watch", "rules", "checkpoints"),
    ("preparation",),
    ("advice",),
    ("accelerate_plugin",),
    ("__init__", "lightning", "trl"),
    ("tools",),
    ("__main__",),
)
"""Rooms of the package by floor, the lowest first. A room imports rooms of lower floors only."""
FORBIDDEN = {("states", "compute"), ("comm", "compute"), ("watch", "evidence")}
"""Arrows to a lower floor forbidden to a room: states and comm do not know the products."""


def modules(root: Path) -> dict[str, Path]:
    """Files of a package by dotted name, without the package's own: "" is its `__init__`."""
    found = {}
    for file in root.rglob("*.py"):
        if file.relative_to(root).parts[0] in ("docs", "examples"):
            # the configuration of Sphinx, and copied scripts (`tests/tools/test_examples.py`)
            continue
        parts = file.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports(name: str, file: Path, known: dict[str, Path]) -> Iterator[str]:
    """Return the modules of the package imported anywhere in a file."""
    package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            of_package = [
                alias.name for alias in node.names if alias.name.split(".")[0] == "fp8_backends"
            ]
            yield from (each.partition(".")[2] for each in of_package)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = [part for part in package[: len(package) - node.level + 1] if part]
            elif (node.module or "").split(".")[0] == "fp8_backends":
                base = []
            else:
                continue
            module = node.module if node.level else node.module.partition(".")[2]
            base = ".".join([*base, *((module or "").split(".") if module else ())])
            for alias in node.names:
                full = f"{base}.{alias.name}".lstrip(".")
                yield full if full in known else base


def part(name: str) -> str:
    return name.split(".")[0] or "__init__"


@functools.cache
def arrows(root: Path) -> dict[str, set[str]]:
    """Return each module's imports from the package. Cached: no test changes files already read."""
    known = modules(root)
    return {
        name: {target for target in imports(name, file, known) if target != name}
        for name, file in known.items()
    }


def wrong_arrows(root: Path) -> list[str]:
    """Return arrows to the same or a higher floor, forbidden ones, and rooms without a floor."""
    floor = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    messages = [
        f"{room} has no floor" for room in sorted({part(name) for name in modules(root)} - {*floor})
    ]
    for name, targets in arrows(root).items():
        for target in targets:
            room, other = part(name), part(target)
            goes_down = room == other or floor.get(other, len(FLOORS)) < floor.get(room, 0)
            is_ground = floor.get(room) == 0 and floor.get(other) == 0
            if not (goes_down or is_ground) or (room, other) in FORBIDDEN:
                messages.append(f"{name or '__init__'} imports {target or '__init__'}")
    return messages


def circle(root: Path) -> list[str] | None:
    """Return files that import each other in a loop. A package's `__init__` re-exports names: its
    imports do not import the `__init__` of their own folder."""
    try:
        TopologicalSorter(arrows(root)).prepare()
    except CycleError as error:
        return error.args[1]
    return None


def test_rooms_import_only_lower_floors():
    assert wrong_arrows(ROOT) == []


def test_imports_have_no_cycle():
    assert circle(ROOT) is None


def test_backends_do_not_import_each_other():
    backends = ("native", "te", "torchao")
    for name, targets in arrows(ROOT).items():
        mine = name.split(".")[1] if name.startswith("compute.") else None
        if mine in backends:
            others = [["compute", backend] for backend in backends if backend != mine]
            foreign = [each for each in targets if each.split(".")[:2] in others]
            assert not foreign, f"{name} imports {foreign}"


PLANTED = {
    "formats/formats.py": "from ..compute import hardware",
    "states/levels.py": "def late():\n    from ..comm import ddp",
    "recipes/handlers.py": "if TYPE_CHECKING:\n    from ..convert.conversion import Prepared",
    "comm/ddp.py": "import fp8_backends.compute.products",
    "extra.py": "x = 1",
}


def test_planted_upward_imports_are_found(tmp_path):
    """Plant one per file, all in one copy of the package."""
    copied = tmp_path / "fp8_backends"
    for name in modules(ROOT).values():
        target = copied / name.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(name.read_bytes())
    for file, planted in PLANTED.items():
        (copied / file).open("a").write(f"\n{planted}\n")
    messages = wrong_arrows(copied)
    names = [file.removesuffix(".py").replace("/", ".") for file in PLANTED]
    assert sorted(message.split()[0] for message in messages) == sorted(names)


def test_planted_cycle_is_found(tmp_path):
    (tmp_path / "a.py").write_text("from . import b\n")
    (tmp_path / "b.py").write_text("def late():\n    from .a import x\n")
    assert set(circle(tmp_path)) == {"a", "b"}
