"""TorchAO as a library: without the remarks of its import, and what a configuration of it means."""

from __future__ import annotations

import functools
import logging
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


def drop_import_messages() -> None:
    """Keep what TorchAO says while it loads off the screen, whoever imports it: its wheel holds libraries for several
    CUDA versions and complains of each that does not fit. Nothing of it concerns FP8 training; other records pass.
    Repeating it does nothing."""
    for name, drop in _IMPORT_FILTERS:
        logging.getLogger(name).addFilter(drop)


def _lacks(text: str, record: logging.LogRecord) -> bool:
    return text not in record.getMessage()


_IMPORT_FILTERS = (
    ("torchao", functools.partial(_lacks, "Failed to load")),
    ("torchao", functools.partial(_lacks, "Skipping import of cpp extensions")),
    ("torchao.kernel.intmm", functools.partial(_lacks, "Detected no triton")),
    ("torch.utils._pytree", functools.partial(_lacks, "register_constant")),
)
