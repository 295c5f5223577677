"""Save time in all tests, and clear the environment's FP8 variables."""

from __future__ import annotations

import gc
import os
import sys

# before torch: the tests' models are small, and several run at a time
os.environ.setdefault("OMP_NUM_THREADS", "1")
# else each compiling process starts a waiting one
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import distributed  # noqa: E402, F401, the folder, before a test of benchmarks brings their file of that name
import hypothesis  # noqa: E402
import pytest  # noqa: E402
import warm_process  # noqa: E402

hypothesis.settings.register_profile("busy machine", deadline=None)  # others may use it, too
hypothesis.settings.load_profile("busy machine")

_server = pytest.StashKey()


gc.disable()  # until all tests are collected


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # one for all workers
        config.stash[_server] = warm_process.start()


def pytest_unconfigure(config):
    if server := config.stash.get(_server, None):
        warm_process.end(server)


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup():
    return (yield from skipped_where_torch_has_no_rows())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    return (yield from skipped_where_torch_has_no_rows())


def skipped_where_torch_has_no_rows():
    """Skip a test that the package, or PyTorch, refuses: `ao:rowwise` on a CPU before torch
    2.13."""
    try:
        return (yield)
    except Exception as error:
        from fp8_backends.compute.torchao.backend import cpu_multiplies_rowwise

        refusals = "no rowwise FP8 product there", "only supports per-tensor scaling for CPU"
        if any(refusal in str(error) for refusal in refusals) and not cpu_multiplies_rowwise():
            pytest.skip(str(error))
        raise


@pytest.fixture(autouse=True, scope="module")
def exempt_loaded_libraries_from_collection():
    """Exempt loaded libraries, a million objects, from the many full collections by Accelerate and
    Dynamo."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def seed_only_present_devices():
    """Skip absent devices: for each, `torch.manual_seed` formats and keeps the whole stack, which
    is deep in pytest."""
    import torch

    with pytest.MonkeyPatch.context() as patch:
        for kind in (torch.cuda, torch.xpu, torch.mtia):
            if not kind.is_available():
                patch.setattr(kind, "manual_seed_all", lambda seed: None)
        yield


@pytest.fixture(autouse=True)
def no_fp8_in_environment(monkeypatch):
    for name in list(os.environ):
        if name.upper().startswith(
            ("ACCELERATE_FP8_", "ACCELERATE_MIXED_PRECISION", "FP8_BACKENDS_")
        ):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def forget_the_machine_after_each_test():
    yield
    if products := sys.modules.get("fp8_backends.compute.products"):
        products.engine_of_gpu.cache_clear()


@pytest.fixture
def hopper(monkeypatch):
    """Present a machine with a Hopper GPU to the package."""
    monkeypatch.setattr("fp8_backends.compute.hardware.has_gpu", lambda: True)
    monkeypatch.setattr("fp8_backends.compute.hardware.gpus", lambda: [(9, 0)])
