"""Answer the device queries of PyTorch, Inductor and Triton for a Hopper GPU on a machine without
one.

This needs PyTorch's build for CUDA, which brings Triton and its compilers, and no driver. `pretend`
changes its process, so each question about a GPU runs in a separate one.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
import types
from typing import NamedTuple

import torch
import torch.cuda.graphs
from torch._guards import active_fake_mode
from torch._subclasses import fake_tensor


class Chip(NamedTuple):
    """Describe a chip for the prediction. `rates` has the rates of products."""

    name: str
    gib: int
    copy: float
    """Bandwidth of a copy in memory, bytes read plus written per second. Measured."""
    multiprocessors: int = 132
    clock: float = 1.70e9
    """Cycles under load."""
    capability: tuple[int, int] = (9, 0)

    @property
    def target(self):
        """Return Triton's compilation target."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 10 * self.capability[0] + self.capability[1], 32)

    @property
    def properties(self) -> types.SimpleNamespace:
        """Return the result of `torch.cuda.get_device_properties`."""
        return types.SimpleNamespace(
            name=self.name,
            major=self.capability[0],
            minor=self.capability[1],
            multi_processor_count=self.multiprocessors,
            regs_per_multiprocessor=65_536,
            max_threads_per_multi_processor=2048,
            max_threads_per_block=1024,
            warp_size=32,
            total_memory=self.gib * 2**30,
            shared_memory_per_block=49_152,
            shared_memory_per_block_optin=232_448,
            shared_memory_per_multiprocessor=233_472,
            L2_cache_size=50 * 2**20,
            gcnArchName="",
        )


CHIPS = {
    "H200": Chip("NVIDIA H200", 141, 4.18e12),
    "H100": Chip("NVIDIA H100", 80, 3.0e12),
}


def pretend(chip: Chip) -> None:
    """Present this chip as device 0 of this process. Nothing can be computed there: tensors are
    fake."""
    if torch.version.cuda is None:
        raise SystemExit(
            "this wants PyTorch's build for CUDA: run it by the Python of an environment that has "
            "it"
        )
    # code for an absent chip belongs into no shared cache
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["TRITON_CACHE_DIR"] = folder()
    properties = chip.properties
    torch._C._ensureCUDADeviceGuardSet()
    torch._C._cuda_getDevice = torch.cuda.current_device = lambda: 0
    torch.cuda._lazy_init = lambda: None
    torch.cuda.is_available = torch.cuda.is_initialized = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.get_device_properties = lambda *_: properties
    torch.cuda.get_device_capability = lambda *_: chip.capability
    torch.cuda.get_device_name = lambda *_: chip.name
    torch.cuda.get_rng_state = lambda *_: torch.zeros(16, dtype=torch.uint8)
    torch.cuda.set_rng_state = lambda *_: None
    torch.cuda.is_current_stream_capturing = torch.cuda.graphs.is_current_stream_capturing = (
        lambda: False
    )
    fake_tensor.init_gpu_context = lambda *_: None  # torch 2.11 creates a tensor there
    _pretend_to_triton(chip)
    _pretend_to_inductor(chip)


@functools.cache
def folder() -> str:
    """Return a folder for compiled code, removed at exit."""
    made = tempfile.mkdtemp(prefix="ahead")
    pid = os.getpid()

    def remove() -> None:
        if os.getpid() == pid:
            shutil.rmtree(made, ignore_errors=True)

    atexit.register(remove)
    return made


class Driver:
    """Triton's driver for a chip. Whatever launches a kernel has to be replaced."""

    def __init__(self, chip: Chip = CHIPS["H200"]) -> None:
        self.chip = chip

    def get_current_target(self):
        return self.chip.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self):
        return torch.cuda

    def is_active(self) -> bool:
        return True


def _pretend_to_triton(chip: Chip) -> None:
    from triton.runtime import driver

    driver.set_active(Driver(chip))


def _pretend_to_inductor(chip: Chip) -> None:
    import torch._inductor.scheduler as scheduler
    import torch.utils._triton as triton_utilities
    from torch._inductor import config
    from torch._inductor.runtime import hints, triton_helpers

    triton_utilities.has_triton = scheduler.has_triton = lambda *_, **__: True
    triton_helpers.set_driver_to_gpu = lambda: None
    properties = torch.cuda.get_device_properties(0)
    fields = {
        name: getattr(properties, name)
        for name in hints.DeviceProperties._fields
        if hasattr(properties, name)
    }
    told = hints.DeviceProperties(**{"type": "cuda", "index": 0, "cc": chip.target.arch, **fields})
    hints.DeviceProperties.create = classmethod(lambda *_: told)
    config.shape_padding = config.max_autotune = False  # both would measure
    config.compile_threads = 1
    config.triton.unique_kernel_names = True
    config.triton.descriptive_names = "original_aten"


def on_fake_gpu(module: torch.nn.Module) -> torch.nn.Module:
    """A module of the meta device with fake tensors of the GPU in their place, under
    `FakeTensorMode`."""
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is not None:
                fake = torch.empty(parameter.shape, dtype=parameter.dtype, device="cuda")
                each._parameters[name] = torch.nn.Parameter(fake, parameter.requires_grad)
        for name, buffer in each._buffers.items():
            if buffer is not None:
                each._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cuda")
    # the mode's own references to them: a parameter can only be swapped without any
    active_fake_mode().fake_tensor_converter.meta_converter.tensor_memo.clear()
    return module
