"""What this machine can do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Availability:
    """Whether a backend can run here."""

    can_run: bool
    reason: str = ""
    """Why it cannot run, or what it will run on."""
    fix: str = ""
    """What to install or change; empty when it can run."""

    def __bool__(self) -> bool:
        return self.can_run
