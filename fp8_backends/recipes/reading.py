"""Configuration files and JSON texts, read within bounds: no file takes more than a moment, none means two things.

What a file may hold is what JSON holds: text, numbers, flags, lists, blocks of keys. YAML's other kinds (bytes, sets,
Python objects) are refused where they stand, a date is its text, and a key may stand in a block once.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import stat
from collections.abc import Mapping
from typing import Any

import yaml

from ..errors import RecipeError
from ..words import shortened, shown

MOST_BYTES = 2**20
"""Of a file; those of trainers have a few thousand."""
MOST_VALUES = 10_000
"""In a YAML file, with what an alias stands for counted at each place: twenty lines of aliases can mean a million."""
DEEPEST = 64
"""Blocks and lists inside one another."""


def read_file(path: str) -> dict[str, Any]:
    """Return the keys of a YAML file, or of a JSON file by its ending.

    Raises:
        RecipeError: there is no such file, it is longer, deeper or larger than the bounds of this module, no YAML or
            JSON in UTF-8, a key stands in a block twice, or it holds something else than keys. The error names the
            file, and the line where there is one.
    """
    kind, read = ("JSON", from_json) if path.endswith(".json") else ("YAML", _from_yaml)
    try:
        values = read(_text(path))
    except OSError as error:
        raise RecipeError(f"{shortened(path)}: {error.strerror or error}") from None
    except (yaml.YAMLError, ValueError) as error:
        reason = shortened(" ".join(str(error).split()).replace(' in "<unicode string>",', ","), 600)
        raise RecipeError(f"{shortened(path)} is no {kind} that can be read: {reason}") from None
    if not isinstance(values, Mapping):
        raise RecipeError(f"{shortened(path)} holds no keys: a configuration file of Accelerate or Axolotl is wanted")
    return {str(key): value for key, value in values.items()}


def from_json(text: str) -> Any:
    """Return what a JSON text holds. Raises ValueError for what is no JSON, is nested deeper than `DEEPEST`, or has a
    key in a block twice."""
    brackets = re.findall(r'"(?:[^"\\]|\\.)*"?|([\[{])|([\]}])', text)
    if max(itertools.accumulate(bool(opens) - bool(closes) for opens, closes in brackets), default=0) > DEEPEST:
        raise ValueError(f"more than {DEEPEST} blocks and lists inside one another")
    return json.loads(text, object_pairs_hook=_block)


def _block(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} stands in a block twice")
    return found


def _text(path: str) -> str:
    """Return what the file holds. Raises OSError, and ValueError for what is longer, or no text in UTF-8."""
    if not stat.S_ISREG(os.stat(path).st_mode):  # reading a pipe or a terminal may never end
        raise ValueError("it is no file: a folder, a pipe or a device")
    with open(path, "rb") as file:
        found = file.read(MOST_BYTES + 1)
    if len(found) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES // 2**20} MiB")
    return found.decode("utf-8-sig")


def _from_yaml(text: str) -> Any:
    return yaml.load(text, _Loader)


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader within the bounds of this module. It raises `yaml.YAMLError` with the line."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = self._values = 0
        self._sizes: dict[yaml.Node, int] = {}
        """For each node that is complete: the values in it."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event, before = self.peek_event(), self._values
        self._depth += 1
        if self._depth > DEEPEST:
            raise _error(f"more than {DEEPEST} blocks and lists inside one another", event)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(event, yaml.AliasEvent) and node not in self._sizes:
            raise _error(f"*{event.anchor} stands inside of what it names", event)
        self._values += self._sizes.get(node, 1)
        self._sizes[node] = self._values - before
        if self._values > MOST_VALUES:
            raise _error(f"more than {MOST_VALUES} values", event)
        return node

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and (key.value in seen or seen.add(key.value)):
                raise _error(f"the key {key.value!r} stands in a block twice", key)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except yaml.YAMLError:
            raise
        except Exception as error:  # of PyYAML, for a value that is not what its tag says, such as `!!bool x`
            raise _error(f"{shown(node.value)} is no value of the kind {node.tag}", node) from error

    def refuse(self, node: yaml.Node) -> Any:
        raise _error(f"a value of the kind {node.tag} is not known here", node)


def _error(problem: str, at: yaml.Event | yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=shortened(problem), problem_mark=at.start_mark)


for _kind in ("binary", "set", "omap", "pairs"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _Loader.refuse)
_Loader.add_constructor("tag:yaml.org,2002:timestamp", _Loader.construct_scalar)
