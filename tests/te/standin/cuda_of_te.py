"""Stand in for `torch.cuda` in TransformerEngine's modules: one device, of a given compute
capability.

Other names come from the real `torch.cuda`.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import torch

capability = (9, 0)
"""(major, minor) of TransformerEngine's device, set by `activate.compute_capability`."""


def is_available() -> bool:
    return True


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def get_device_capability(device=None) -> tuple[int, int]:
    return capability


def get_device_properties(device=None) -> SimpleNamespace:
    major, minor = capability
    return SimpleNamespace(
        major=major,
        minor=minor,
        multi_processor_count=132,
        name="a CPU that stands in for a GPU",
        total_memory=0,
    )


def is_current_stream_capturing() -> bool:
    return False


def synchronize(device=None) -> None:
    """Everything is done when a CPU function returns."""


def empty_cache() -> None:
    """Do nothing."""


def get_rng_state(device=None) -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device=None) -> None:
    torch.set_rng_state(state)


def manual_seed(seed: int) -> None:
    torch.manual_seed(seed)


def _lazy_init() -> None:
    """There is no driver to start."""


def _lazy_call(function) -> None:
    function()


class CUDAGraph:
    """Stand for CUDA graphs: no capture, and no generator states."""


default_generators = (torch.default_generator,)
nvtx = SimpleNamespace(
    range=lambda message: nullcontext(),
    range_push=lambda message: None,
    range_pop=lambda: None,
    mark=lambda text: None,
)


def __getattr__(name: str):
    return getattr(torch.cuda, name)
