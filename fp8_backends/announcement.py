"""Announce a line to the user of a training run."""

import logging
import os
import sys

import torch

logger = logging.getLogger("fp8_backends")


def announce(line: str) -> None:
    """Log a line on the main process by the logger `fp8_backends`, or print it on stderr without a
    visible handler."""
    if not is_main_process():
        return
    if _logging_shows_info():
        logger.info(line)
    elif logger.level in (logging.NOTSET, logging.DEBUG, logging.INFO):  # else the user silenced it
        print(f"{line}\n", end="", file=sys.stderr)  # one write: threads may print at once


def is_main_process() -> bool:
    """Return True on rank 0, and in a single process."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() == 0
    return int(os.environ.get("RANK", 0)) == 0


def _logging_shows_info() -> bool:
    current: logging.Logger | None = logger if logger.isEnabledFor(logging.INFO) else None
    while current is not None:
        if any(
            h.level <= logging.INFO and not isinstance(h, logging.NullHandler)
            for h in current.handlers
        ):
            return True
        current = current.parent if current.propagate else None
    return False
