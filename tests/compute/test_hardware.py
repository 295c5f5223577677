"""This machine's devices and products, and pretended machines'."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from fp8_backends.compute import hardware
from fp8_backends.compute.chips import REFUSED, RUNS, RUNS_EMULATED, cell_of
from fp8_backends.compute.products import engine_for
from fp8_backends.compute.te.backend import TransformerEngineCompute
from fp8_backends.compute.torchao.backend import TorchAOCompute


@pytest.fixture
def gpus(monkeypatch):
    """Pretend to see these GPUs, by CUDA capability or AMD's architecture."""

    def pretend(*seen, cuda="13.0"):
        is_amd = any(isinstance(gpu, str) for gpu in seen)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(seen))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(seen))
        monkeypatch.setattr(
            torch.cuda,
            "get_device_capability",
            lambda index=0: (9, 4) if is_amd else seen[at(index)],
        )
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: "pretended")
        properties = [SimpleNamespace(gcnArchName=gpu) for gpu in seen]
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda index=0: properties[at(index)]
        )
        monkeypatch.setattr(torch.version, "hip", "7.0" if is_amd else None)
        monkeypatch.setattr(torch.version, "cuda", None if is_amd else cuda)

    def at(index):
        return index if isinstance(index, int) else index.index or 0

    return pretend


@pytest.mark.parametrize(
    ("visible", "products"),
    [
        *[
            ((), False),
            (((8, 0),), False),
            (((8, 9),), True),
            (((9, 0), (9, 0)), True),
            (((9, 0), (8, 0)), False),
        ],
        *[(("gfx942:sramecc+",), True), (("gfx950",), True), (("gfx950", "gfx90a"), False)],
    ],
)
def test_fp8_products_require_matrix_units_in_every_visible_gpu(gpus, visible, products):
    """Identify AMD's GPUs by architecture: their capability numbers have another meaning."""
    gpus(*visible)
    assert hardware.fp8_products() is products
    capabilities = [gpu for gpu in visible if isinstance(gpu, tuple)]
    assert hardware.describe()["capability"] == min(capabilities, default=None)


NATIVE = {
    # GPU, PyTorch's CUDA: engines of rules with one scale a tensor or a row, of blockwise, of mxfp8
    ((8, 6), "13.0"): ("emulated", "emulated", "emulated"),
    ((8, 9), "13.0"): ("scaled_mm", "emulated", "emulated"),
    ((9, 0), "13.0"): ("scaled_mm", "scaled_mm", "emulated"),
    ((9, 0), "12.8"): ("scaled_mm", "emulated", "emulated"),
    ((9, 0), "12.9"): ("scaled_mm", "scaled_mm", "emulated"),
    ((10, 0), "13.0"): ("scaled_mm", "emulated", "scaled_mm"),
    ((10, 0), "12.6"): ("scaled_mm", "emulated", "emulated"),
    ((10, 3), "12.8"): ("scaled_mm", "emulated", "scaled_mm"),
    ((12, 0), "13.0"): ("scaled_mm", "emulated", "scaled_mm"),
    ((12, 1), "12.9"): ("scaled_mm", "emulated", "emulated"),
    ("gfx942:sramecc+", None): ("emulated", "emulated", "emulated"),
    ("gfx950", None): ("scaled_mm", "emulated", "emulated"),
}


@pytest.mark.parametrize(("gpu", "cuda"), NATIVE)
def test_native_uses_the_fp8_products_of_the_gpu(gpu, cuda, gpus, monkeypatch):
    gpus(gpu, cuda=cuda)
    monkeypatch.setattr(torch, "__version__", "2.14.0+cu130")
    device, bf16 = torch.device("cuda", 0), torch.bfloat16
    engines = tuple(
        engine_for(device, bf16, scaling) for scaling in ("dynamic", "blockwise", "mxfp8")
    )
    assert engines == NATIVE[gpu, cuda]


@pytest.mark.parametrize(
    ("gpu", "te", "ao"),
    [
        *[
            ((8, 6), REFUSED, RUNS_EMULATED),
            ((8, 9), RUNS, RUNS),
            ((9, 0), RUNS, RUNS),
            ((12, 0), RUNS, RUNS),
        ],
        *[("gfx90a", REFUSED, RUNS_EMULATED), ("gfx942", REFUSED, RUNS), ("gfx950", REFUSED, RUNS)],
    ],
)
def test_chip_table_agrees_with_libraries(gpu, te, ao, gpus, monkeypatch):
    gpus(gpu)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    monkeypatch.setattr("fp8_backends.compute.hardware.version", lambda name: "2.20.2")
    assert (RUNS if TransformerEngineCompute().availability() else REFUSED) == te
    assert ("emulated" in TorchAOCompute().availability().reason) == (ao == RUNS_EMULATED)
    assert (
        cell_of("te:delayed", hardware.chip()).state,
        cell_of("ao:tensorwise", hardware.chip()).state,
    ) == (te, ao)


def test_advice_is_for_weakest_gpu_or_cpu(gpus):
    gpus((9, 0), (7, 0))
    assert hardware.advice().precision == "fp16" and hardware.chip().key == "before-fp8"
    gpus((9, 0), (9, 0))
    assert hardware.advice(te_runs=True).backend == "te:dynamic"
    gpus()
    assert hardware.advice().precision in ("bf16", "fp32") and hardware.chip().key == "cpu"


CPUS = {
    # name: capabilities, bf16 support in oneDNN, and the results: bf16 products, a useful
    # `_scaled_mm`
    "AVX2": ({"avx2"}, False, False, True),
    "AVX-512, where oneDNN goes by way of FP32": ({"avx2", "avx512_f"}, True, False, True),
    "AVX-512 BF16": ({"avx512_f", "avx512_bf16"}, True, True, True),
    "AVX2 with NE-CONVERT": ({"avx2", "avx_ne_convert"}, True, True, True),
    "AMX": ({"avx512_bf16", "amx_bf16", "amx_tile", "amx_int8"}, True, True, False),
    "AMX-FP16": ({"avx512_bf16", "amx_bf16", "amx_int8", "amx_fp16"}, True, True, True),
    "Arm with BF16": ({"neon", "bf16"}, True, True, True),
    "Arm with SVE": ({"neon", "sve", "sve_bf16"}, True, True, True),
    "Arm without": ({"neon"}, False, False, True),
    "Apple, whose PyTorch has no oneDNN": ({"neon", "bf16"}, None, False, True),
}


@pytest.mark.parametrize(
    ("capabilities", "in_onednn", "bf16", "scaled_mm"), CPUS.values(), ids=CPUS
)
def test_cpu_bf16_products_need_instructions_and_pytorch_support(
    capabilities, in_onednn, bf16, scaled_mm, monkeypatch
):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(capabilities, True))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: in_onednn is not None)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: in_onednn)
    with torch.backends.mkldnn.flags(enabled=True):
        assert answers() == (
            bf16,
            torch.bfloat16 if bf16 else torch.float32,
            "bf16" if bf16 else "fp32",
        )
        assert (
            hardware.cpu_scaled_mm() is scaled_mm and hardware.fast_dtype("cuda") == torch.bfloat16
        )
    with torch.backends.mkldnn.flags(enabled=False):
        assert answers() == (False, torch.float32, "fp32") and hardware.cpu_scaled_mm()


def answers():
    hardware._cpu_has_bf16.cache_clear()
    try:
        return hardware.cpu_bf16(), hardware.fast_dtype("cpu"), hardware.fast_precision("cpu")
    finally:
        hardware._cpu_has_bf16.cache_clear()


def test_pytorch_without_onednn_has_no_bf16_products(monkeypatch):
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    assert not answers()[0]


def test_fast_autocast_dtype_is_bf16_or_none(monkeypatch):
    for has_bf16, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(hardware, "cpu_bf16", lambda answer=has_bf16: answer)
        with hardware.fast_autocast("cpu"):
            assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == dtype


def test_describe_names_device_and_versions(gpus):
    gpus((9, 0), (8, 9))
    machine = hardware.describe()
    assert [machine[key] for key in ("device", "gpus", "capability", "fp8_products")] == [
        "pretended",
        2,
        (8, 9),
        True,
    ]
    assert machine["versions"]["torch"] == importlib.metadata.version("torch")
    gpus()
    machine = hardware.describe()
    assert machine["device"] and machine["gpus"] == 0 and not machine["fp8_products"]
    assert hardware.version("no-such-distribution-here") is None


@pytest.mark.nightly
def test_describe_imports_no_library():
    code = (
        "import fp8_backends.compute.hardware as h, sys; h.describe();"
        "assert not {'torchao', 'transformers', 'transformer_engine'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
