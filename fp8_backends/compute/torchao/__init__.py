"""The `ao` backend: TorchAO's float8 linear layer."""

import functools
import logging


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
