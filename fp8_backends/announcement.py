"""How this package says something to whoever watches a training run."""

from __future__ import annotations

import logging
import os
import sys

import torch

logger = logging.getLogger("fp8_backends")


def announce(line: str) -> None:
    """Say a line once, on the main process: by the logger `fp8_backends`, or on stderr if no handler would show it."""
    if not is_main_process():
        return
    if _logging_shows_info():
        logger.info(line)
    elif logger.level in (logging.NOTSET, logging.DEBUG, logging.INFO):  # nobody asked for silence
        print(f"{line}\n", end="", file=sys.stderr)  # in one piece, also where threads speak at once


def is_main_process() -> bool:
    """Whether this is rank 0, or the only process."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() == 0
    return int(os.environ.get("RANK", 0)) == 0


def _logging_shows_info() -> bool:
    if not logger.isEnabledFor(logging.INFO):
        return False
    at: logging.Logger | None = logger
    while at is not None:
        for handler in at.handlers:
            if handler.level <= logging.INFO and not isinstance(handler, logging.NullHandler):
                return True
        at = at.parent if at.propagate else None
    return False
