"""The table of chips: complete, and equal to what the code does there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fp8_backends import resolve
from fp8_backends.compute import chips as hardware_table
from fp8_backends.compute import registry
from fp8_backends.compute.chips import CHIPS, EMULATED, FP8, NOTES, REFUSED, TABLE, chip_here, chip_of, support_of
from fp8_backends.compute.native.block_products import block_engine_for
from fp8_backends.compute.products import engine_for
from fp8_backends.compute.te.backend import TransformerEngineCompute
from fp8_backends.compute.torchao import backend as torchao

MACHINES = {
    # chip: (capability, AMD architecture)
    "before-fp8": ((8, 6), None),
    "ada": ((8, 9), None),
    "hopper": ((9, 0), None),
    "blackwell": ((10, 0), None),
    "rtx-blackwell": ((12, 0), None),
    "mi300": ((9, 4), "gfx942:sramecc+"),
    "mi350": ((9, 5), "gfx950"),
}


@pytest.fixture
def machine(monkeypatch):
    """Pretend to have one such GPU, and a PyTorch for that CUDA."""

    def pretend(key: str, cuda: str = "13.0") -> None:
        capability, architecture = MACHINES[key]
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: key)
        properties = SimpleNamespace(gcnArchName=architecture)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
        monkeypatch.setattr(torch.version, "hip", "7.0" if architecture else None)
        monkeypatch.setattr(torch.version, "cuda", None if architecture else cuda)

    return pretend


def state(backend: str, key: str, cuda: tuple[int, int] | None = None) -> str:
    compute, _, scaling = backend.partition(":")
    return support_of(compute, scaling, next(chip for chip in CHIPS if chip.key == key), cuda).state


def test_the_table_has_every_backend_once_and_a_cell_for_every_chip():
    backends = [backend for row in TABLE for backend in row.backends]
    strings = [f"{name}:{scaling}" for name in registry.BUILT_IN for scaling in registry.scalings_of(name)]
    assert sorted(backends) == sorted([*strings, "msamp"])
    assert all(resolve(backend).name == backend for backend in backends if backend != "msamp")
    assert {len(row.cells) for row in TABLE} == {len(CHIPS)}
    assert {cell.note for row in TABLE for cell in row.cells} - {""} == NOTES.keys()
    for row in TABLE:
        assert all(cell.note for cell in row.cells if cell.state == REFUSED), "a refusal has a reason"


@pytest.mark.parametrize("key", MACHINES)
def test_the_table_says_what_the_code_does_on_that_chip(key, machine, monkeypatch):
    machine(key)
    device = torch.device("cuda", 0)
    assert chip_here().key == key
    emulated = {"scaled_mm": FP8, "emulated": EMULATED}
    for scaling in ("dynamic", "delayed", "rowwise", "window"):
        assert emulated[engine_for(device, torch.bfloat16)] == state(f"native:{scaling}", key)
    assert emulated[block_engine_for(device, torch.bfloat16, 128)] == state("native:blockwise", key)
    assert emulated[block_engine_for(device, torch.bfloat16, 32)] == state("native:mxfp8", key)
    assert (EMULATED if torchao._products_are_emulated() else FP8) == state("ao:tensorwise", key)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    monkeypatch.setattr("fp8_backends.compute.hardware.version", lambda name: "2.20.2")
    assert (FP8 if TransformerEngineCompute().availability() else REFUSED) == state("te:delayed", key)


def test_a_pytorch_for_an_older_cuda_is_taken_into_account(machine):
    assert state("te:blockwise", "hopper", (12, 8)) == REFUSED != state("te:blockwise", "hopper", (12, 9))
    assert state("native:blockwise", "hopper", (12, 8)) == EMULATED != state("native:blockwise", "hopper", (13, 0))
    machine("hopper", cuda="12.8")
    here = {backend: each.state for each in hardware_table.supports_here() for backend in each.backends}
    assert (here["te:blockwise"], here["native:blockwise"], here["te:delayed"]) == (REFUSED, EMULATED, FP8)
    device = torch.device("cuda", 0)
    assert block_engine_for(device, torch.bfloat16, 128) == "emulated"


@pytest.mark.parametrize(
    ("capability", "key"),
    [((7, 0), "before-fp8"), ((8, 7), "before-fp8"), ((10, 3), "blackwell"), ((11, 0), "blackwell")]
    + [((12, 1), "rtx-blackwell"), ((8, 9), "ada")],
)
def test_capabilities_belong_to_chips(capability, key):
    assert chip_of(capability).key == key


def test_without_a_gpu_it_is_the_cpu():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert chip_here().key == "cpu"
    assert support_of("te", "delayed", chip_here()).state == REFUSED
    assert support_of("mine", "delayed", chip_here()) is None


def test_texts_fit_their_width():
    assert max(map(len, hardware_table.text(100).splitlines())) <= 100
    assert max(map(len, hardware_table.restructured_text().splitlines())) <= 118
