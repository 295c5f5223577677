"""Test `notebook_launcher`: stock Accelerate drops its `mixed_precision`."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch
import warm_process
from accelerate import Accelerator, notebook_launcher
from accelerate.utils import InitProcessGroupKwargs
from tiny_trainers import trainer_for
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

import fp8_backends


def training_function(report, *handlers, **arguments):
    """Train like a notebook, without mention of FP8 unless handlers are given."""
    torch.manual_seed(0)
    try:
        accelerator = Accelerator(kwargs_handlers=list(handlers), **arguments)
    except fp8_backends.FP8BackendError as error:
        (report / "error").write_text(str(error))
        raise
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 16))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    losses = []
    for _ in range(3):
        loss = model(torch.ones(16, 32)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    products = fp8_backends.audit(model).products
    recipe = getattr(accelerator, "fp8_recipe", None)
    lines = [
        recipe.name if recipe else "none",
        accelerator.num_processes,
        len(products),
        losses[-1] < losses[0],
    ]
    (report / f"rank{accelerator.process_index}").write_text(" ".join(map(str, lines)))


def launch(report, *handlers, processes=1, **arguments) -> list[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {
        "num_processes": processes,
        "mixed_precision": "fp8",
        "use_port": str(port),
    } | arguments
    notebook_launcher(training_function, (report, *handlers), **options)
    return read(report)


def read(report) -> list[str]:
    return [path.read_text() for path in sorted(report.iterdir())]


def test_one_process_trains(tmp_path):
    assert launch(tmp_path) == ["native:dynamic 1 2 True"]


def test_environment_selects_backend(monkeypatch, tmp_path):
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "native:delayed")
    assert launch(tmp_path) == ["native:delayed 1 2 True"]


def test_handler_in_launched_function_applies(tmp_path):
    assert launch(tmp_path, fp8_backends.NativeRecipeKwargs(scaling="rowwise")) == [
        "native:rowwise 1 2 True"
    ]


def test_two_processes_train(monkeypatch, tmp_path):
    """In a new process: with a CUDA build, PyTorch refuses backward in a fork after another test
    used `FakeTensorMode` and ran backward."""
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "native:delayed")
    code = (
        "import pathlib, sys; sys.path[:0] = sys.argv[2:]\n"
        "import test_notebook; test_notebook.launch(pathlib.Path(sys.argv[1]), processes=2)"
    )
    here = Path(__file__).parent
    done = warm_process.run("-c", code, str(tmp_path), str(here), str(here.parent))
    assert done.returncode == 0, done.stderr
    assert read(tmp_path) == ["native:delayed 2 2 True"] * 2


@pytest.mark.parametrize(
    "handlers", [(), (InitProcessGroupKwargs(backend="gloo"),)], ids=["none", "gloo"]
)
def test_two_processes_without_an_engine_are_refused(handlers, monkeypatch, tmp_path):
    """In a process group, too, which Accelerate makes and does not use."""
    monkeypatch.delenv("ACCELERATE_USE_CPU")
    with pytest.raises(ChildFailedError):
        launch(tmp_path, *handlers, processes=2)
    error = (tmp_path / "error").read_text()
    assert (
        error.startswith("2 processes were started")
        and "for DDP set ACCELERATE_USE_CPU=true" in error
    )
    assert "leave DeepSpeed and FSDP out" in error


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_other_precision_runs_without_fp8(precision, tmp_path):
    assert launch(tmp_path, mixed_precision=precision) == ["none 1 0 True"]


def test_launched_function_overrides_with_one_warning(caplog, tmp_path):
    def says_bf16():
        training_function(tmp_path, mixed_precision="bf16")

    notebook_launcher(says_bf16, num_processes=1, mixed_precision="fp8")
    assert (tmp_path / "rank0").read_text() == "none 1 0 True"
    assert (
        sum(
            'launched with notebook_launcher(mixed_precision="fp8")' in line
            for line in caplog.messages
        )
        == 1
    )


def test_trainer_trains_in_a_notebook(tmp_path):
    made = []
    notebook_launcher(
        lambda: made.append(trainer_for(tmp_path, bf16=True)),
        num_processes=1,
        mixed_precision="fp8",
    )
    assert made[0].accelerator.fp8_recipe.name == "native:dynamic"
