"""Configuration files of Accelerate and Axolotl: read, checked and translated."""

from __future__ import annotations

from ...errors import RecipeError
from ...recipes.sources import read_file
from .accelerate_config import read_accelerate
from .axolotl_config import read_axolotl
from .training_config import TrainingConfig

_READERS = {"accelerate": read_accelerate, "axolotl": read_axolotl}
_MARKS = {
    "accelerate": ("compute_environment", "distributed_type", "mixed_precision", "num_machines", "downcast_bf16"),
    "axolotl": ("base_model", "datasets", "sequence_len", "micro_batch_size", "fp8", "fp16", "bf16", "adapter"),
}


def read(path: str, system: str | None = None, processes: int | None = None) -> TrainingConfig:
    """Read a YAML (or JSON) file of Accelerate or Axolotl.

    Args:
        system: "accelerate" or "axolotl"; by default the file's keys tell.
        processes: how many will train, where the file does not say, or in place of what it says.

    Raises:
        RecipeError: no such file, no YAML, of neither system, or with keys or values that are not known.
    """
    values = read_file(path)
    if system is None:
        counts = {name: sum(mark in values for mark in marks) for name, marks in _MARKS.items()}
        if counts["accelerate"] == counts["axolotl"]:
            listed = " or ".join(f"{name.capitalize()} ({', '.join(marks)}, …)" for name, marks in _MARKS.items())
            raise RecipeError(
                f"{path}: its keys do not tell whether it is a configuration of {listed}: say it with --from"
            )
        system = max(counts, key=counts.get)
    return _READERS[system](values, path, processes)
