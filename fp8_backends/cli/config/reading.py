"""A configuration file, whichever system it is of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import RecipeError
from .accelerate_config import read_accelerate
from .axolotl_config import read_axolotl
from .training_config import TrainingConfig, parsed_file


def read(path: str, system: str | None = None, processes: int | None = None) -> TrainingConfig:
    """Read a YAML (or JSON) file of Accelerate or Axolotl.

    Args:
        system: "accelerate" or "axolotl"; by default told by the file's keys.
        processes: how many will train, where the file does not say, or in place of what it says.

    Raises:
        RecipeError: no such file, no YAML, of neither system, or with keys or values that are not known.
    """
    values = parsed_file(path)
    readers = {"accelerate": read_accelerate, "axolotl": read_axolotl}
    system = system or _told_by_keys(values, path)
    return readers[system](values, path, processes)


_MARKS = {
    "accelerate": ("compute_environment", "distributed_type", "mixed_precision", "num_machines", "downcast_bf16"),
    "axolotl": ("base_model", "datasets", "sequence_len", "micro_batch_size", "fp8", "fp16", "bf16", "adapter"),
}


def _told_by_keys(values: Mapping[str, Any], path: str) -> str:
    counts = {system: sum(mark in values for mark in marks) for system, marks in _MARKS.items()}
    system = max(counts, key=counts.get)
    if list(counts.values()).count(counts[system]) > 1:
        listed = " or ".join(f"{name.capitalize()} ({', '.join(marks)}, …)" for name, marks in _MARKS.items())
        raise RecipeError(f"{path}: its keys do not tell whether it is a configuration of {listed}: say it with --from")
    return system
