"""Watch plain copies of FP8 weights in state dicts.

PyTorch's state dicts alias the weights. These copies do not, so a write to one would be lost: the
next read of the weight raises.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..errors import FP8BackendError
from ..kernels.triton_gate import is_eager
from .sharded_tensor import local_part


@dataclass
class StateDictCopy:
    """One copy: a weak reference to its memory, and autograd's count of writes to it.

    Attributes:
        counters: empty tensors with the version counters of the copy and, for a DTensor, of its
            local part.
        seen: the count when copy and weight last agreed.
    """

    name: str
    memory: StorageWeakRef
    counters: tuple[torch.Tensor, ...]
    seen: int = 0

    @classmethod
    def of(cls, values: torch.Tensor, name: str) -> StateDictCopy:
        local = local_part(values)
        empty = local.new_empty(0)
        counter = local.detach()
        counter.data = empty  # the version counter stays
        counters = (counter,)
        # operations on a DTensor count its writes apart from its local part's
        if local is not values:
            outer = values.detach()
            outer._local_tensor = empty
            counters = (outer, counter)
        watched = cls(name, StorageWeakRef(local.untyped_storage()), counters)
        watched.seen = watched.writes
        return watched

    @property
    def writes(self) -> int:
        return sum(counter._version for counter in self.counters)

    @property
    def is_written(self) -> bool:
        return self.writes != self.seen


@dataclass
class StateDictCopies:
    """The copies of one weight: those alive, and those written to."""

    copies: list[StateDictCopy] = field(default_factory=list)

    def add(self, values: torch.Tensor, name: str) -> None:
        """Watch a new copy, plain or a DTensor. Writes through `.data`, NumPy or collectives are
        not counted."""
        local = local_part(values)
        if is_eager(local) and not local.is_inference():
            self.copies = [
                copy for copy in self.copies if copy.is_written or not copy.memory.expired()
            ]
            self.copies.append(StateDictCopy.of(values, name))

    def check(self) -> None:
        """Raise `FP8BackendError` if a copy was written to, once for each write."""
        written = next((copy for copy in self.copies if copy.is_written), None)
        if written is not None:
            self.accept()
            raise FP8BackendError(
                f"{written.name}: a tensor of state_dict() was written to, and the weight is "
                "unchanged: FP8 weights are saved as plain copies. Write to model.parameters(), "
                "or pass the changed dict to model.load_state_dict(). To change only what is "
                "saved, clone() first"
            )

    def accept(self) -> None:
        """Forget earlier writes: the weight has new values."""
        for copy in self.copies:
            copy.seen = copy.writes

    def __deepcopy__(self, memo: dict) -> StateDictCopies:
        return StateDictCopies()
