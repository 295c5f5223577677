"""`fp8_backends/recipes/handlers.pyi`: the handlers for type checkers and editors, which cannot see that classes are
made from declared fields.

python tests/house/handler_stub.py --write    writes it
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from dataclasses import fields
from pathlib import Path

from fp8_backends.compute.fields import Field
from fp8_backends.recipes import handlers
from fp8_backends.recipes.fields import FIELDS, SETTINGS

STUB = Path(handlers.__file__).with_suffix(".pyi")

HEAD = '''\
"""Made from `handlers.py` and the declared fields by tests/house/handler_stub.py."""

from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from typing import Any, ClassVar

from accelerate.utils import KwargsHandler
from torch import distributed, nn
from torchao.float8 import Float8LinearConfig

from ..compute.fields import Field
from .specs import Spec
from .strings import AUTO as AUTO
'''

SETTLED = {
    "backend": "str | None",
    "compute": "str",
    "scaling": "str | None",
    "level": "str",
    "opt_level": "str",
    "given": "frozenset[str]",
}
"""Attributes of every recipe beside its fields."""


def written() -> str:
    """The text of the file."""
    tree = ast.parse(Path(handlers.__file__).read_text(encoding="utf-8"))
    classes = [*handlers.HANDLERS, handlers.FP8RecipeKwargs]
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"]
    (recipe,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Recipe"]
    parts = [HEAD, _recipe(recipe), *map(_handler, classes), "HANDLERS: tuple[type[Recipe], ...]\n"]
    return "\n".join([*parts, *map(_declared, functions)])


def _recipe(node: ast.ClassDef) -> str:
    """The class without its code, and the types of its fields once they have their defaults."""
    public = [each for each in node.body if not isinstance(each, ast.FunctionDef) or each.name == each.name.lstrip("_")]
    ignored = "  # type: ignore[misc]  # Accelerate tells no types"
    lines = [f"class {node.name}({ast.unparse(node.bases[0])}):{ignored}", _docstring(ast.get_docstring(node)), ""]
    for each in public:
        if isinstance(each, ast.AnnAssign):
            lines.append(f"    {ast.unparse(each.target)}: {ast.unparse(each.annotation)}")
        elif isinstance(each, ast.FunctionDef):
            lines.append(textwrap.indent(_declared(each), "    ").rstrip())
    held = SETTLED | {name: _held(field) for name, field in SETTINGS.items()}
    return "\n".join([*lines, *(f"    {name}: {type_}" for name, type_ in held.items())]) + "\n"


def _handler(cls: type) -> str:
    arguments = [(each.name, _given(FIELDS[each.name]), each.kw_only) for each in fields(cls)]
    lines = [f"class {cls.__name__}(Recipe):", _docstring(inspect.getdoc(cls)), ""]
    lines += ["    def __init__(", "        self,"]
    for previous, (name, type_, keyword_only) in zip([(None, None, False), *arguments], arguments, strict=False):
        lines += ["        *,"] if keyword_only and not previous[2] else []
        lines.append(f"        {name}: {type_} | None = None,")
    return "\n".join([*lines, "    ) -> None: ..."]) + "\n"


def _declared(node: ast.FunctionDef) -> str:
    """A function's head with its documentation."""
    decorators = "".join(f"@{ast.unparse(each)}\n" for each in node.decorator_list)
    arguments = ast.unparse(node.args).replace("=None", " = None")
    head = f"{decorators}def {node.name}({arguments}) -> {ast.unparse(node.returns)}:"
    return f"{head}\n{_docstring(ast.get_docstring(node))}\n"


def _docstring(text: str) -> str:
    return textwrap.indent(f'"""{text}' + ('\n"""' if "\n" in text else '"""'), "    ")


def _given(field: Field) -> str:
    """The type that a field takes: of its parser's argument, where that names one, else of its values."""
    types = _annotations(field)
    return types["return"] if types["value"] == "Any" else types["value"]


def _held(field: Field) -> str:
    """The type of a field in a recipe."""
    optional = " | None" if field.default is None else ""
    return _annotations(field)["return"] + optional


def _annotations(field: Field) -> dict[str, str]:
    return field.parse.__annotations__


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    STUB.write_text(written(), encoding="utf-8")
