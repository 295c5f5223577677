"""Read configuration files and JSON texts. A key that appears twice in a block is an error."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ..errors import RecipeError
from ..words import shortened


def read_file(path: str) -> dict[str, Any]:
    """Return the keys of a YAML file, or of a JSON file by its ending.

    Raises:
        RecipeError: the file cannot be read, is no YAML or JSON in UTF-8, repeats a key in a block, or holds no keys.
            The error names the file, and the line if PyYAML reports one.
    """
    kind = "JSON" if path.endswith(".json") else "YAML"
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        values = from_json(text) if kind == "JSON" else yaml.load(text, _Loader)
    except OSError as error:
        raise RecipeError(f"{shortened(path)}: {error.strerror or error}") from None
    except Exception as error:  # PyYAML raises any error for a value that contradicts its tag, such as `!!bool x`
        reason = shortened(" ".join(str(error).split()).replace(' in "<unicode string>",', ","), 600)
        raise RecipeError(f"{shortened(path)} is no {kind} that can be read: {reason}") from None
    if not isinstance(values, Mapping):
        raise RecipeError(f"{shortened(path)} holds no keys: a configuration file of Accelerate or Axolotl is wanted")
    return {str(key): value for key, value in values.items()}


def from_json(text: str) -> Any:
    """Parse a JSON text. Raises ValueError for invalid JSON and for a key that appears twice in a block."""
    return json.loads(text, object_pairs_hook=_block)


def _block(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} stands in a block twice")
    return found


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, with an error for a key that appears twice in a block."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and (key.value in seen or seen.add(key.value)):
                problem = shortened(f"the key {key.value!r} stands in a block twice")
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
        return node
