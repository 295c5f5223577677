"""TorchAO as a library: imported without its remarks, and what a configuration of it means."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..counts import DGRAD, FPROP, WGRAD

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig


def products_in_high_precision(config: Float8LinearConfig) -> tuple[str, ...]:
    """Which of fprop, dgrad and wgrad a configuration does not cast to FP8."""
    casts = (
        (FPROP, config.cast_config_input),
        (DGRAD, config.cast_config_grad_output),
        (WGRAD, config.cast_config_input_for_grad_weight),
    )
    return tuple(kind for kind, cast in casts if cast.scaling_type.value == "disabled")


@contextlib.contextmanager
def quiet_import() -> Iterator[None]:
    """Keep what TorchAO says while it loads off the screen: nothing of it concerns FP8 training.

    Its wheel holds libraries for several CUDA versions and complains of each that does not fit. Only these records
    are dropped, and only while the import runs.
    """
    if "torchao.float8" in sys.modules:
        yield
        return
    with contextlib.ExitStack() as undo:
        for name, text in _IMPORT_MESSAGES:
            logger, drop = logging.getLogger(name), functools.partial(_lacks, text)
            logger.addFilter(drop)
            undo.callback(logger.removeFilter, drop)
        yield


_IMPORT_MESSAGES = (
    ("torchao", "Failed to load"),
    ("torchao", "Skipping import of cpp extensions"),
    ("torchao.kernel.intmm", "Detected no triton"),
    ("torch.utils._pytree", "register_constant"),
)


def _lacks(text: str, record: logging.LogRecord) -> bool:
    return text not in record.getMessage()
