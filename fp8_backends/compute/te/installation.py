"""Why TransformerEngine does not import here, from the text of the exception, and the command that repairs it.

TransformerEngine comes as three distributions that must have one version: `transformer-engine` (Python),
`transformer-engine-cu12` or `-cu13` (the core library), and `transformer-engine-torch` (the extension, compiled on the
user's machine against one PyTorch and one Python). The core library needs CUDA's libraries, which PyTorch brings.
"""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch

from .. import hardware
from ..hardware import Availability

TIME_LIMIT = 120.0
"""Seconds for the import in a process of its own. It takes 3 to 20, and some minutes on a cold network disk."""


class Installation(NamedTuple):
    """What a command that repairs needs to know."""

    te: str | None
    """Version of transformer-engine."""
    cuda: str | None
    """CUDA version that this PyTorch was built for; None: built without CUDA."""

    @property
    def pin(self) -> str:
        return f"=={self.te}" if self.te else ""

    @property
    def cuda_major(self) -> str:
        return (self.cuda or "13").partition(".")[0]

    @property
    def install(self) -> str:
        return f"pip install --no-build-isolation 'transformer-engine[pytorch]{self.pin}'"

    @property
    def install_anew(self) -> str:
        return (
            "pip uninstall -y transformer-engine transformer-engine-torch transformer-engine-cu12 "
            f"transformer-engine-cu13 && pip install --no-cache-dir{self.install.removeprefix('pip install')}"
        )

    @property
    def compile_extension(self) -> str:
        return (
            "pip install --no-build-isolation --no-deps --no-cache-dir --force-reinstall "
            f"transformer-engine-torch{self.pin}"
        )

    def library(self, name: str) -> str:
        """The package of one of CUDA's libraries, such as `cublas`. Since CUDA 13 most names have no suffix."""
        name = {"cublasLt": "cublas", "cudart": "cuda-runtime", "nvrtc": "cuda-nvrtc"}.get(name, name)
        bare = self.cuda_major != "12" and name not in ("cudnn", "nccl")
        return f"nvidia-{name}" if bare else f"nvidia-{name}-cu{self.cuda_major}"


def installation() -> Installation:
    return Installation(hardware.version("transformer-engine"), torch.version.cuda)


def explain(error: BaseException, installed: Installation | None = None) -> Availability:
    """The reason in plain words and the fix, from an exception that importing TransformerEngine raised.

    Never raises: a text that no row knows is quoted, with the command that installs everything anew.
    """
    return _explained(_text(error), installed or installation())


def probe(time_limit: float = TIME_LIMIT) -> Availability:
    """Import TransformerEngine in a process of its own, so that one that hangs or crashes does no harm here.

    It can run: `reason` has the version. It cannot: as `explain`. Nothing is imported where it is not installed.
    """
    installed = installation()
    if importlib.util.find_spec("transformer_engine") is None:
        return Availability(False, "TransformerEngine is not installed", installed.install)
    try:
        done = subprocess.run([sys.executable, "-c", _IMPORT], capture_output=True, text=True, timeout=time_limit)
    except subprocess.TimeoutExpired:
        return Availability(
            False,
            f"importing TransformerEngine did not end within {time_limit:.0f} seconds",
            "try python -X importtime -c 'import torch, transformer_engine.pytorch', which shows where it stops",
        )
    if done.returncode < 0:
        return Availability(
            False,
            f"importing TransformerEngine ends the process with {signal.Signals(-done.returncode).name}: its libraries "
            "were built for other versions of PyTorch or CUDA",
            installed.compile_extension,
        )
    answer = done.stdout.rpartition(_MARK)[2]
    if done.returncode or not answer:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return _explained(answer and json.loads(answer) or last, installed)
    return Availability(True, f"TransformerEngine {json.loads(answer)} imports")


_MARK = "fp8_backends probe: "
_IMPORT = f"""
import json, sys
try:
    import torch
    import transformer_engine.pytorch
except BaseException as error:
    print({_MARK!r} + json.dumps(f"{{type(error).__name__}}: {{error}}"))
    sys.exit(1)
print({_MARK!r} + json.dumps(str(transformer_engine.__version__)))
"""


def _text(error: BaseException) -> str:
    """The exception and what it was raised from, innermost last."""
    errors: list[BaseException] = []
    while error is not None and error not in errors:
        errors.append(error)
        error = error.__cause__ or error.__context__
    return "\n".join(f"{type(each).__name__}: {each}" for each in errors)


def _explained(text: str, installed: Installation) -> Availability:
    for failure in FAILURES:
        if found := re.search(failure.pattern, text):
            return Availability(False, *(_filled(each, found, installed) for each in (failure.reason, failure.fix)))
    return Availability(False, f"importing TransformerEngine fails with {text.splitlines()[0]}", installed.install)


def _filled(text: Text, found: re.Match, installed: Installation) -> str:
    return text.format(installed=installed, **found.groupdict()) if isinstance(text, str) else text(found, installed)


# The failures, first match first


Text = str | Callable[[re.Match, "Installation"], str]
"""A template, in which {name} stands for a group of the match and {installed.…} for the installation, or what makes the
text of the two."""


class Failure(NamedTuple):
    name: str
    pattern: str
    reason: Text
    fix: Text


_WITHOUT_CUDA = "this PyTorch was built without CUDA, and TransformerEngine uses the libraries that CUDA's brings"


def _missing_library(found: re.Match, installed: Installation) -> str:
    library, major = found["library"], found["major"]
    if installed.cuda is None:
        return f"lib{library} is not found: {_WITHOUT_CUDA}"
    if major and major != installed.cuda_major and library not in ("cudnn", "nccl"):
        return (
            f"TransformerEngine's core library was built for CUDA {major} (it asks for lib{library}.so.{major}), and "
            f"this PyTorch is for CUDA {installed.cuda}"
        )
    return f"lib{library} is not found: TransformerEngine needs it, and neither PyTorch nor the system brings it"


def _bring_library(found: re.Match, installed: Installation) -> str:
    library, major = found["library"], found["major"]
    if installed.cuda is None:
        return _torch_with_cuda(found, installed)
    if major and major != installed.cuda_major and library not in ("cudnn", "nccl"):
        return installed.install_anew
    package = installed.library(library)
    return f"pip install {package}; where it is installed already, put its lib folder into LD_LIBRARY_PATH"


def _torch_with_cuda(found: re.Match, installed: Installation) -> str:
    return f"install a PyTorch for CUDA (see pytorch.org), then {installed.install}"


FAILURES = (
    Failure(
        "empty_meta_package",
        r"Found empty .transformer-engine. meta package|Could not find TE core package",
        "only TransformerEngine's Python part is installed, without its core library",
        "{installed.install}",
    ),
    Failure(
        "no_torch_extension",
        r"shared object file for Transformer Engine torch lib|No module named 'transformer_engine_torch'",
        "TransformerEngine's extension for PyTorch is missing: it is compiled when it is installed",
        "{installed.compile_extension}",
    ),
    Failure(
        "no_core_library",
        r"Could not find shared object file for Transformer Engine core lib",
        "the file of TransformerEngine's core library is missing from its package",
        "pip install --force-reinstall --no-deps transformer-engine-cu{installed.cuda_major}{installed.pin}",
    ),
    Failure(
        "versions_differ",
        r"Transformer Engine package version mismatch. Found (?P<found>.*?)\.(?: Install|$|\n)",
        "the parts of TransformerEngine have different versions: {found}",
        "{installed.install_anew}",
    ),
    Failure(
        "mixed_installation",
        r"Multiple files found|Could not find `transformer-engine` PyPI package",
        "TransformerEngine is installed twice, compiled from source and from packages",
        "{installed.install_anew}",
    ),
    Failure(
        "cudnn_too_old",
        r"requires cuDNN (?P<wanted>[\d.]*\d).* cuDNN runtime is (?P<has>[\d.]*\d)",
        "cuDNN {has} is older than {wanted}, the oldest that TransformerEngine {installed.te} takes",
        lambda found, installed: f"pip install --upgrade '{installed.library('cudnn')}>={found['wanted']}'",
    ),
    Failure(
        "flash_attention",
        r"flash_attn\S*\.so: undefined symbol",
        "TransformerEngine imports flash-attn, which was compiled for another PyTorch",
        "pip uninstall -y flash-attn",
    ),
    Failure(
        "other_python",
        r"compiled for Python (?P<wanted>[\d.]*\d)|undefined symbol: _?(?P<symbol>Py\w+)",
        lambda found, installed: (
            f"TransformerEngine's extension was compiled for Python {found['wanted'] or 'of another version'}, "
            f"and this is Python {sys.version_info.major}.{sys.version_info.minor}"
        ),
        "{installed.compile_extension}",
    ),
    Failure(
        "cuda_library_too_old",
        r"undefined symbol: (?P<symbol>(?P<library>cublas|cudnn|nccl)\w*)",
        "lib{library} is older than the one that TransformerEngine was built with: it has no {symbol}",
        lambda found, installed: f"pip install --upgrade {installed.library(found['library'])}, and unset LD_BIND_NOW",
    ),
    Failure(
        "other_torch",
        r"undefined symbol: (?P<symbol>\S+)",
        lambda found, installed: (
            f"TransformerEngine's extension was compiled for another PyTorch than {torch.__version__}, which has no "
            f"{found['symbol']}"
        ),
        "{installed.compile_extension}",
    ),
    Failure(
        "old_system",
        r"version `(?P<what>GLIBC(?:XX)?_[\d.]+)' not found",
        "TransformerEngine's library wants {what}, which this system's C or C++ library is too old for",
        lambda found, installed: (
            "conda install -c conda-forge libstdcxx-ng"
            if found["what"].startswith("GLIBCXX")
            else "use a newer system or container (Ubuntu 22.04 or later)"
        ),
    ),
    Failure(
        "no_driver",
        r"libcuda\.so|Found no NVIDIA driver|TransformerEngine needs CUDA",
        "no NVIDIA driver is found: TransformerEngine runs on an NVIDIA GPU only",
        "install the driver (nvidia-smi must list the GPU; in a container, start that with --gpus all), or use "
        "the native equivalent native:delayed, native:dynamic, native:blockwise or native:mxfp8, which needs none",
    ),
    Failure(
        "torch_without_cuda",
        r"lib(?:c10_cuda|torch_cuda)\S*\.so|Torch not compiled with CUDA",
        "this PyTorch was built without CUDA, and TransformerEngine was compiled for one with it",
        _torch_with_cuda,
    ),
    Failure(
        "nvrtc",
        r"(?i)nvrtc(?!\S*\.so| shared object)|cuda_runtime\.h",
        "TransformerEngine compiles some kernels while it runs, and does not find CUDA's headers or NVRTC",
        "export NVTE_CUDA_INCLUDE_DIR=/usr/local/cuda/include (its folder of headers), or NVTE_DISABLE_NVRTC=1",
    ),
    Failure(
        "torch_not_first",
        r"libnccl\.so[.\d]*: cannot open",
        lambda found, installed: (
            "libnccl is not found: PyTorch brings it, and only once torch is imported"
            if installed.cuda
            else f"libnccl is not found: {_WITHOUT_CUDA}"
        ),
        lambda found, installed: (
            f"import torch before transformer_engine; where that does not help, pip install {installed.library('nccl')}"
            if installed.cuda
            else _torch_with_cuda(found, installed)
        ),
    ),
    Failure(
        "library_missing",
        r"lib(?P<library>cudnn|cublasLt|cublas|cudart|nvrtc|curand|cusolver|cusparse|nvJitLink)\w*\.so\.?(?P<major>\d*)"
        r"[.\d]*: cannot open",
        _missing_library,
        _bring_library,
    ),
    Failure(
        "library_not_found_by_te",
        r"(?P<library>cudnn|cublas|cudart|nvrtc|curand|cusolver|nccl) shared object not found(?P<major>)",
        _missing_library,
        _bring_library,
    ),
    Failure(
        "module_missing",
        r"No module named '(?!transformer_engine)(?P<module>[\w]+)",
        "the Python package {module}, which TransformerEngine imports, is missing",
        lambda found, installed: f"pip install {_PACKAGES.get(found['module'], found['module'])}",
    ),
    Failure(
        "hidden",
        r"module 'transformer_engine' has no attribute 'pytorch'",
        "TransformerEngine's part for PyTorch did not import, and TransformerEngine kept the reason to itself",
        "python -c 'import torch, transformer_engine.pytorch' says why; often: {installed.compile_extension}",
    ),
)
"""Each was produced with TransformerEngine 2.20.2, or is in a report to its project; the tests hold their texts."""

_PACKAGES = {"nvdlfw_inspect": "nvdlfw-inspect", "cudnn": "nvidia-cudnn-frontend"}
"""Where a module's package has another name."""
