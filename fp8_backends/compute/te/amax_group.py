"""The ranks over which TransformerEngine reduces its amaxes, as the value of a recipe's `fp8_group`.

A process group belongs to one process: it cannot be pickled, and means nothing in a file. A recipe that holds one is
described by the group's ranks, and a pickled recipe carries these ranks.
"""

from __future__ import annotations

from typing import Any

from torch import distributed

from ...errors import FP8BackendError


def process_group(value: Any) -> distributed.ProcessGroup:
    """Parser of `fp8_group`: a `torch.distributed.ProcessGroup` that this rank belongs to."""
    if isinstance(value, AbsentGroup):
        return value
    if not distributed.is_available() or not isinstance(value, distributed.ProcessGroup):
        raise ValueError(
            "must be a torch.distributed.ProcessGroup that this rank belongs to, such as "
            "torch.distributed.new_group(ranks) or device_mesh.get_group()"
        )
    return value


def ranks_of(group: Any) -> tuple[int, ...] | None:
    """Global ranks of a live group in its own order; None for None."""
    if group is None:
        return None
    return group.ranks if isinstance(group, AbsentGroup) else tuple(distributed.get_process_group_ranks(group))


class AbsentGroup:
    """Stands in an unpickled recipe for a group that this process does not have. Whatever uses it is told so."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks

    def __repr__(self) -> str:
        return f"AbsentGroup({self.ranks})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "ranks":
            raise AttributeError(name)
        raise FP8BackendError(
            f"fp8_group of ranks {self.ranks} did not come along when the recipe was pickled: make the group and the "
            "recipe again in this process, and prepare the model with them"
        )


def packed(group: Any) -> AbsentGroup | None:
    """What a pickled recipe carries of a group: its ranks."""
    return None if group is None else AbsentGroup(ranks_of(group))


def unpacked(group: Any) -> Any:
    """An unpickled group, or the group of all ranks of this process where that has the same ranks."""
    if isinstance(group, AbsentGroup) and distributed.is_available() and distributed.is_initialized():
        everyone = distributed.group.WORLD
        return everyone if ranks_of(everyone) == group.ranks else group
    return group
