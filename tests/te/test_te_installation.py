"""Failures of importing TransformerEngine: their texts as they were recorded, each with its reason and its fix."""

from __future__ import annotations

import re
import sys

import pytest

from fp8_backends.compute.te import installation as te_installation
from fp8_backends.compute.te.installation import FAILURES, Installation, explain, probe

CUDA_13 = Installation("2.20.2", "13.0")
CUDA_12 = Installation("2.20.2", "12.8")
WITHOUT_CUDA = Installation("2.20.2", None)

LIB = "/site-packages/transformer_engine/wheel_lib"

# (failure, exception, reason has, fix has). "seen": raised by TransformerEngine 2.20.2 with torch 2.11.0+cu130
SEEN = [
    (
        "empty_meta_package",
        RuntimeError(
            "Found empty `transformer-engine` meta package installed. Install `transformer-engine` with framework "
            "extensions via'pip3 install --no-build-isolation transformer-engine[pytorch,jax]==VERSION' or 'pip3 "
            "install transformer-engine[core]` for the TE core lib only. The `core_cu12` or `core_cu13` extra deps "
            "can be used to specify CUDA version for the TE core lib."
        ),
        "only TransformerEngine's Python part",
        "pip install --no-build-isolation 'transformer-engine[pytorch]==2.20.2'",
    ),
    (
        "no_torch_extension",
        FileNotFoundError("Could not find shared object file for Transformer Engine torch lib."),
        "extension for PyTorch is missing",
        "--no-build-isolation --no-deps --no-cache-dir --force-reinstall transformer-engine-torch==2.20.2",
    ),
    (
        "no_core_library",
        FileNotFoundError("Could not find shared object file for Transformer Engine core lib."),
        "core library is missing",
        "transformer-engine-cu13==2.20.2",
    ),
    (
        "versions_differ",
        AssertionError(
            "Transformer Engine package version mismatch. Found transformer-engine v2.20.2 and "
            "transformer-engine-cu13 v2.19.0."
        ),
        "different versions: transformer-engine v2.20.2 and transformer-engine-cu13 v2.19.0",
        "pip uninstall -y .* && pip install --no-cache-dir --no-build-isolation 'transformer-engine[pytorch]==2.20.2'",
    ),
    (
        "versions_differ",
        AssertionError(
            "Transformer Engine package version mismatch. Found transformer_engine_torch v2.19.0, transformer-engine "
            "v2.20.2, and transformer-engine-cu13 v2.20.2. Install transformer-engine using 'pip3 install "
            "--no-build-isolation transformer-engine[pytorch]==VERSION'"
        ),
        "different versions: transformer_engine_torch v2.19.0, transformer-engine v2.20.2, and",
        "pip uninstall -y .* && pip install",
    ),
    (
        "mixed_installation",
        RuntimeError(
            "Multiple files found: [PosixPath('/site-packages/transformer_engine/transformer_engine_torch.cpython-312-"
            f"x86_64-linux-gnu.so'), PosixPath('{LIB}/transformer_engine_torch.cpython-312-x86_64-linux-gnu.so')]"
        ),
        "installed twice",
        "pip uninstall -y transformer-engine ",
    ),
    (
        "torch_not_first",
        OSError("libnccl.so.2: cannot open shared object file: No such file or directory"),
        "once torch is imported",
        "import torch before transformer_engine; where that does not help, pip install nvidia-nccl-cu13",
    ),
    (
        "other_python",
        ImportError(
            "Python version mismatch: module was compiled for Python 3.12, but the interpreter version is "
            "incompatible: 3.11.7 (main, May  9 2026, 07:35:25) [GCC 12.2.0]."
        ),
        f"compiled for Python 3.12, and this is Python {sys.version_info.major}.{sys.version_info.minor}",
        "transformer-engine-torch==2.20.2",
    ),
    (
        "cuda_library_too_old",
        OSError(
            f"{LIB}/libtransformer_engine.so: undefined symbol: cublasLtGroupedMatrixLayoutInit_internal, version "
            "libcublasLt.so.13"
        ),
        "libcublas is older .* no cublasLtGroupedMatrixLayoutInit_internal",
        "pip install --upgrade nvidia-cublas, and unset LD_BIND_NOW",
    ),
    (
        "other_torch",
        ImportError(
            f"{LIB}/transformer_engine_torch.cpython-312-x86_64-linux-gnu.so: undefined symbol: _ZTIN3c105ErrorX"
        ),
        r"compiled for another PyTorch than \d.* _ZTIN3c105ErrorX",
        "transformer-engine-torch==2.20.2",
    ),
    (
        "library_missing",
        OSError("libcublas.so.12: cannot open shared object file: No such file or directory"),
        r"core library was built for CUDA 12 \(it asks for libcublas.so.12\), and this PyTorch is for CUDA 13.0",
        "transformer-engine-cu12 .*&& pip install --no-cache-dir --no-build-isolation 'transformer-engine[pytorch]==",
    ),
    (
        "no_driver",
        RuntimeError(
            "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver "
            "from http://www.nvidia.com/Download/index.aspx"
        ),
        "no NVIDIA driver",
        "native:delayed",
    ),
    ("no_driver", RuntimeError("TransformerEngine needs CUDA."), "NVIDIA GPU only", "nvidia-smi"),
    (
        "no_driver",
        OSError("libcuda.so.1: cannot open shared object file: No such file or directory"),
        "no NVIDIA driver",
        "--gpus all",
    ),
    ("module_missing", ModuleNotFoundError("No module named 'pydantic'"), "package pydantic", "pip install pydantic$"),
    ("module_missing", ModuleNotFoundError("No module named 'onnxscript'"), "onnxscript", "pip install onnxscript$"),
    ("module_missing", ModuleNotFoundError("No module named 'einops'"), "package einops", "pip install einops$"),
]

# in reports to TransformerEngine's project, or in its source, as f"{type}: {message}" reads there
REPORTED = [
    (
        "library_missing",  # report 1853
        OSError("libcudnn_adv.so.9: cannot open shared object file: No such file or directory"),
        "libcudnn is not found: TransformerEngine needs it",
        "pip install nvidia-cudnn-cu13; where it is installed already, put its lib folder into LD_LIBRARY_PATH",
    ),
    (
        "cudnn_too_old",
        RuntimeError("Transformer Engine requires cuDNN 9.12.0 or later, but the cuDNN runtime is 9.1.0."),
        "cuDNN 9.1.0 is older than 9.12.0",
        "pip install --upgrade 'nvidia-cudnn-cu13>=9.12.0'",
    ),
    (
        "flash_attention",  # report 2771
        ImportError(
            "/site-packages/flash_attn_2_cuda.cpython-312-x86_64-linux-gnu.so: undefined symbol: "
            "_ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_ib"
        ),
        "flash-attn",
        "pip uninstall -y flash-attn",
    ),
    (
        "other_torch",  # report 2504
        OSError(
            "/site-packages/transformer_engine/libtransformer_engine.so: undefined symbol: "
            "_ZN18transformer_engine9to_stringERK15NVTEScalingMode"
        ),
        "another PyTorch",
        "transformer-engine-torch",
    ),
    (
        "old_system",
        OSError(
            f"/lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.34' not found (required by {LIB}/"
            "libtransformer_engine.so)"
        ),
        "wants GLIBC_2.34",
        "newer system",
    ),
    (
        "old_system",
        ImportError(f"/usr/lib/libstdc++.so.6: version `GLIBCXX_3.4.32' not found (required by {LIB}/x.so)"),
        "wants GLIBCXX_3.4.32",
        "libstdcxx-ng",
    ),
    (
        "torch_without_cuda",
        ImportError("libc10_cuda.so: cannot open shared object file: No such file or directory"),
        "built without CUDA",
        "install a PyTorch for CUDA",
    ),
    (
        "nvrtc",
        RuntimeError("NVRTC Error: NVRTC_ERROR_COMPILATION: cuda_runtime.h: No such file or directory"),
        "CUDA's headers",
        "NVTE_DISABLE_NVRTC=1",
    ),
    (
        "hidden",
        AttributeError("module 'transformer_engine' has no attribute 'pytorch'"),
        "kept the reason to itself",
        "import torch, transformer_engine.pytorch",
    ),
    (
        "library_not_found_by_te",
        RuntimeError("nvrtc shared object not found."),
        "libnvrtc is not found",
        "pip install nvidia-cuda-nvrtc;",
    ),
]


@pytest.mark.parametrize(
    ("name", "error", "reason", "fix"), [*SEEN, *REPORTED], ids=lambda value: value if isinstance(value, str) else ""
)
def test_each_failure_is_known_by_its_text(name, error, reason, fix):

    first = next(failure.name for failure in FAILURES if re.search(failure.pattern, f"{type(error).__name__}: {error}"))
    assert first == name
    explained = explain(error, CUDA_13)
    assert not explained.can_run
    assert re.search(reason, explained.reason), explained.reason
    assert re.search(fix.replace("[pytorch]", r"\[pytorch\]"), explained.fix), explained.fix
    assert "{" not in explained.reason + explained.fix


def test_every_row_has_a_recorded_text():
    assert {failure.name for failure in FAILURES} == {name for name, *_ in [*SEEN, *REPORTED]}


def test_the_fix_follows_the_cuda_of_pytorch():
    error = OSError("libcublas.so.13: cannot open shared object file: No such file or directory")
    assert explain(error, CUDA_12).reason.endswith(
        "built for CUDA 13 (it asks for libcublas.so.13), and this PyTorch is for CUDA 12.8"
    )
    assert explain(error, CUDA_13).fix.startswith("pip install nvidia-cublas;")
    assert "built without CUDA" in explain(error, WITHOUT_CUDA).reason
    # a CPU build of PyTorch 2.13 with the core library of 2.20.2
    cudnn = RuntimeError("cudnn shared object not found.")
    assert "this PyTorch was built without CUDA" in explain(cudnn, WITHOUT_CUDA).reason
    assert "pip install nvidia-cudnn-cu12" in explain(cudnn, CUDA_12).fix
    assert "built without CUDA" in explain(OSError("libnccl.so.2: cannot open"), WITHOUT_CUDA).reason


def test_a_cause_is_looked_at_too():
    try:
        try:
            raise ModuleNotFoundError("No module named 'pydantic'")
        except ModuleNotFoundError as error:
            raise ImportError("te is not available") from error
    except ImportError as error:
        assert explain(error, CUDA_13).fix == "pip install pydantic"


def test_what_no_row_knows_is_quoted_with_the_command_that_installs_anew():
    explained = explain(ValueError("a new one"), CUDA_13)
    assert explained.reason == "importing TransformerEngine fails with ValueError: a new one"
    assert explained.fix == CUDA_13.install


# In a process of its own


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package of that name, whose import does what the test says."""

    def install(code: str) -> None:
        package = tmp_path / "transformer_engine"
        package.mkdir()
        (package / "__init__.py").write_text("__version__ = '2.99'\n")
        (package / "pytorch.py").write_text(code)
        (tmp_path / "torch.py").write_text("")  # the process that imports has no need of the real one
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setattr(te_installation.importlib.util, "find_spec", lambda name: True)
        monkeypatch.setattr(te_installation, "installation", lambda: CUDA_13)

    return install


def test_probe_imports_nothing_where_te_is_not_installed(monkeypatch):
    monkeypatch.setattr(te_installation.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(te_installation.subprocess, "run", lambda *a, **k: pytest.fail("a process was started"))
    assert not probe() and "not installed" in probe().reason


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import pydantic_of_nowhere", "package pydantic_of_nowhere"),
        ("print('noise'); raise OSError('libnccl.so.2: cannot open shared object file')", "libnccl is not found"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV: its libraries were built for other"),
        ("import os; os._exit(3)", "importing TransformerEngine fails with no message"),
    ],
)
def test_probe_explains_what_the_import_does(installed, code, said):
    installed(code)
    found = probe()
    assert not found and said in found.reason and found.fix
    assert "transformer_engine" not in sys.modules


def test_probe_of_a_good_installation_names_its_version(installed):
    installed("")
    found = probe()
    assert found.can_run and found.reason == "TransformerEngine 2.99 imports"


def test_probe_of_an_import_that_hangs_comes_back(installed):
    installed("import time; time.sleep(60)")
    found = probe(time_limit=1)
    assert not found and "within 1 seconds" in found.reason
