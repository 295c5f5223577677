"""`save_state` leaves a whole checkpoint or none, and `load_state` takes only a whole one."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import ProjectConfiguration
from plugin_training import batches, copied_parameters, mlp, train

import fp8_backends
from fp8_backends.accelerate_plugin import checkpoints
from fp8_backends.errors import FP8BackendError

DATA = batches(4)


class Killed(BaseException):
    """Stand for SIGKILL: the package never catches it."""


def run(folder: Path | None = None, seed: int = 0, **project):
    """Accelerator, model and optimizer; with a folder, checkpoints are named by Accelerate."""
    AcceleratorState._reset_state(reset_partial_state=True)
    project = ProjectConfiguration(
        project_dir=folder and str(folder),
        automatic_checkpoint_naming=folder is not None,
        **project,
    )
    recipe = fp8_backends.FP8RecipeKwargs(backend="native:delayed")
    accelerator = Accelerator(
        mixed_precision="fp8", kwargs_handlers=[recipe], project_config=project
    )
    model = mlp(seed)
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 5e-3))


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_checkpoint_appears_atomically(tmp_path):
    accelerator, model, optimizer = run()
    train(accelerator, model, optimizer, DATA[:2])
    target, seen = tmp_path / "runs" / "a", []

    def watch(models, weights, folder):
        seen.append((Path(folder), target.exists()))
        Path(folder, "mine.txt").write_text("mine")

    accelerator.register_save_state_pre_hook(watch)
    assert accelerator.save_state(str(target)) == target
    (place, existed) = seen[0]
    assert place.name == "a" and place != target and not existed
    record = json.loads((target / "fp8_manifest.json").read_text())
    assert (
        set(record["files"]) == files(target) - {"fp8_manifest.json"}
        and "mine.txt" in record["files"]
    )
    assert record["step"] == 2
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["a"]


def test_overwrite_keeps_user_files_and_removes_stale_ones(tmp_path):
    accelerator, model, optimizer = run()
    for name in ("log.txt", "part/more.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    os.symlink(tmp_path, tmp_path.with_name(f"{tmp_path.name}_link"))
    accelerator.save_state(str(tmp_path.with_name(f"{tmp_path.name}_link")))
    first = files(tmp_path)
    assert {"log.txt", "part/more.txt", "model.safetensors"} <= first
    train(accelerator, model, optimizer, DATA[:1])
    accelerator.save_state(str(tmp_path), safe_serialization=False)
    assert files(tmp_path) == first - {"model.safetensors"} | {"pytorch_model.bin"}
    weights = copied_parameters(model)
    accelerator, model, _ = run(seed=5)
    accelerator.load_state(str(tmp_path))
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())


def test_overwrite_without_manifest_removes_files_of_other_ranks(tmp_path):
    accelerator, model, optimizer = run()
    accelerator.save_state(str(tmp_path))
    (tmp_path / "fp8_manifest.json").unlink()
    before = files(tmp_path)
    for name in ("random_states_1.pkl", "fp8_scaling_1.safetensors", "config.json"):
        (tmp_path / name).touch()
    accelerator.save_state(str(tmp_path))
    assert files(tmp_path) == before | {"fp8_manifest.json", "config.json"}


@pytest.mark.parametrize("is_checkpoint", [False, True])
def test_overwrite_removes_weights_preferred_by_accelerate(is_checkpoint, tmp_path):
    accelerator, _, _ = run()
    if is_checkpoint:
        accelerator.save_state(str(tmp_path))
        for name in ("fp8_manifest.json", "fp8_backend.json"):
            (tmp_path / name).unlink()
    else:
        (tmp_path / "model.safetensors").touch()
    accelerator.save_state(str(tmp_path), safe_serialization=False)
    accelerator.load_state(str(tmp_path))
    assert not (tmp_path / "model.safetensors").exists()


def test_sibling_files_from_hooks_stay_siblings(tmp_path):
    accelerator, _, _ = run()

    def write(models, weights, folder):
        Path(folder).parent.joinpath("latest.txt").write_text(Path(folder).name)
        Path(folder).parent.joinpath("hub").mkdir(exist_ok=True)
        Path(folder).parent.joinpath("hub", "card.md").touch()
        Path(folder, "elsewhere").symlink_to("nowhere")

    accelerator.register_save_state_pre_hook(write)
    for _ in range(2):  # a new folder, and an existing one
        accelerator.save_state(str(tmp_path / "a"))
        assert {"latest.txt", "hub/card.md"} == {
            name for name in files(tmp_path) if not name.startswith("a/")
        }
        (tmp_path / "latest.txt").unlink()
    accelerator.load_state(str(tmp_path / "a"))


@pytest.mark.parametrize("is_there", [False, True])
def test_concurrent_saves_into_one_folder_wait(is_there, tmp_path):
    accelerator, model, optimizer = run()
    target = tmp_path / "a"
    if is_there:
        accelerator.save_state(str(target))
    entered, goes_on = threading.Event(), threading.Event()

    def wait(models, weights, folder):
        if threading.current_thread() is first:
            entered.set()
            goes_on.wait()

    accelerator.register_save_state_pre_hook(wait)
    first = threading.Thread(target=accelerator.save_state, args=(str(target),))
    first.start()
    entered.wait()
    threading.Timer(0.2, goes_on.set).start()
    accelerator.save_state(str(target))
    assert goes_on.is_set()
    first.join()
    accelerator.load_state(str(target))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_sharded_file_error_is_reported_like_others(tmp_path):
    # no Exception, but a BaseException
    from torch.distributed.checkpoint import CheckpointException

    def fail(*_):
        raise CheckpointException("on rank 1", {})

    accelerator, _, _ = run()
    accelerator.register_save_state_pre_hook(fail)
    with pytest.raises(FP8BackendError, match="on rank 1.*as it was"):
        accelerator.save_state(str(tmp_path / "a"))
    assert list(tmp_path.iterdir()) == []


class CountsElsewhere(torch.optim.SGD):
    """Keep a state without a parameter, as some third-party optimizers do."""

    def step(self, closure=None):
        super().step(closure)
        self.state["calls"] = 3
        for p in self.param_groups[0]["params"]:
            self.state[p]["step"] = None


def test_optimizer_without_step_count_is_saved(tmp_path):
    accelerator, model, _ = run()
    optimizer = accelerator.prepare(CountsElsewhere(model.parameters(), 0.1, momentum=0.9))
    train(accelerator, model, optimizer, DATA[:1])
    accelerator.save_state(str(tmp_path / "a"))
    assert json.loads((tmp_path / "a" / "fp8_manifest.json").read_text())["step"] is None


def test_folder_name_expands_home(tmp_path, monkeypatch):
    accelerator, _, _ = run()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    accelerator.save_state("~/a")
    assert fp8_backends.checkpoints.newest_checkpoint("~") == str(tmp_path / "a")
    accelerator.load_state("~/a")
    for nothing in ("", None):
        with pytest.raises(FP8BackendError, match="no folder"):
            accelerator.save_state(nothing)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_unrenamable_folder_is_refused_with_fix(tmp_path, monkeypatch):
    accelerator, _, _ = run()
    (tmp_path / "a").write_text("mine")
    with pytest.raises(FP8BackendError, match="is a file.*save into another one"):
        accelerator.save_state(str(tmp_path / "a"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FP8BackendError, match="is the current folder.*save into another one"):
        accelerator.save_state(".")
    with pytest.raises(FP8BackendError, match="is a mount point.*save into another one"):
        accelerator.save_state("/proc")
    (tmp_path / "c").mkdir()
    with (
        monkeypatch.context() as patched,
        pytest.raises(FP8BackendError, match="is read-only.*save into another one"),
    ):
        patched.setattr(os, "access", lambda *_: False)  # root may write everywhere
        accelerator.save_state(str(tmp_path / "c"))
    assert files(tmp_path) == {"a"} and sorted(path.name for path in tmp_path.iterdir()) == [
        "a",
        "c",
    ]
    for _ in range(2):
        accelerator.save_state("b")
    accelerator.load_state("b")


def test_replaced_folder_keeps_permissions(tmp_path):
    accelerator, _, _ = run()
    (tmp_path / "a").mkdir(mode=0o2750)
    (tmp_path / "a").chmod(0o2750)
    accelerator.save_state(str(tmp_path / "a"))
    assert (tmp_path / "a").stat().st_mode & 0o7777 == 0o2750


@contextmanager
def killed_at_rename(number: int):
    """End the process before rename number `count`; yield whether it got there."""
    rename, renamed, killed = os.rename, [], []

    def interrupted(source, target):
        renamed.append(target)
        if len(renamed) == number:
            raise Killed
        rename(source, target)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "rename", interrupted)
        try:
            yield killed
        except Killed:
            killed.append(number)


@pytest.mark.parametrize("at", range(1, 6))
def test_load_finishes_interrupted_replacement(at, tmp_path):
    """Interrupt before each rename of a replacement, and again while a load finishes it."""
    accelerator, model, optimizer = run()
    target, mine = tmp_path / "a", {"log.txt", "part/more.txt"}
    accelerator.save_state(str(target))
    for name in mine:
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_text(name)
    train(accelerator, model, optimizer, DATA[:2])
    weights = copied_parameters(model)
    with killed_at_rename(at) as killed:
        accelerator.save_state(str(target))
    assert bool(killed) == (at <= 4)  # the old one away, the new one in, and the user's own files
    for folder in (tmp_path, target):
        assert fp8_backends.checkpoints.newest_checkpoint(folder) == str(target)
    assert target.exists() == (at != 2)  # finding it changes nothing
    accelerator, model, _ = run(seed=5)
    with killed_at_rename(1):
        accelerator.load_state(str(target))
    accelerator.load_state(str(target))
    # the new one was not in its place yet
    expected = dict(mlp().named_parameters()) if at == 1 else weights
    assert all(torch.equal(p, expected[name]) for name, p in model.named_parameters())
    accelerator.save_state(str(target))
    assert mine <= files(target) and [path.name for path in tmp_path.iterdir()] == ["a"]


def test_rotation_keeps_interrupted_replacement(tmp_path):
    accelerator, _, _ = run()
    target = tmp_path / "checkpoints" / "best"
    accelerator.save_state(str(target))
    with killed_at_rename(2):
        accelerator.save_state(str(target))
    accelerator, _, _ = run(tmp_path, total_limit=1)
    accelerator.save_state()
    accelerator.load_state(str(target))


def test_next_save_removes_remains_of_killed_save(tmp_path):
    accelerator, _, _ = run()
    for name in (".a.saving/a/stale.bin", ".a.saving/stale.bin"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("stale")
    accelerator.save_state(str(tmp_path / "a"))
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and "stale.bin" not in files(
        tmp_path / "a"
    )


@pytest.mark.parametrize("is_there", [False, True])
def test_failed_save_keeps_previous_checkpoint(is_there, tmp_path):
    accelerator, model, optimizer = run()
    if is_there:
        accelerator.save_state(str(tmp_path / "a"))
        before = {name: (tmp_path / "a" / name).read_bytes() for name in files(tmp_path / "a")}

    def fail(*_):
        raise OSError(28, "No space left on device")

    train(accelerator, model, optimizer, DATA[:1])
    hook = accelerator.register_save_state_pre_hook(fail)
    with pytest.raises(FP8BackendError, match="No space left on device.*as it was"):
        accelerator.save_state(str(tmp_path / "a"))
    if is_there:
        assert {
            name: (tmp_path / "a" / name).read_bytes() for name in files(tmp_path / "a")
        } == before
    else:
        assert list(tmp_path.iterdir()) == []
    assert accelerator.project_configuration.iteration == is_there
    hook.remove()
    accelerator.save_state(str(tmp_path / "a"))
    accelerator.load_state(str(tmp_path / "a"))


def test_damaged_checkpoint_is_refused_before_loading(tmp_path):
    accelerator, model, optimizer = run()
    for name in ("a", "b"):
        train(accelerator, model, optimizer, DATA[:1])
        accelerator.save_state(str(tmp_path / name))
    optimizer_file = tmp_path / "b" / "optimizer.bin"
    data = bytearray(optimizer_file.read_bytes())
    data[len(data) // 2] ^= 1
    optimizer_file.write_bytes(data)
    accelerator, model, _ = run(seed=5)
    weights = copied_parameters(model)
    with pytest.raises(
        FP8BackendError, match="optimizer.bin has other contents.*beside it is .*a$"
    ):
        accelerator.load_state(str(tmp_path / "b"))
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    (tmp_path / "b" / "fp8_manifest.json").unlink()
    with pytest.raises(FP8BackendError, match="incomplete: fp8_manifest.json is missing"):
        accelerator.load_state(str(tmp_path / "b"))
    with pytest.raises(ValueError, match="does not exist"):
        accelerator.load_state(str(tmp_path / "c"))


def test_checkpoint_without_manifest_loads_with_notice(tmp_path, capsys):
    accelerator, _, _ = run()
    accelerator.save_state(str(tmp_path))
    (tmp_path / "fp8_manifest.json").unlink()
    metadata = json.loads((tmp_path / "fp8_backend.json").read_text())
    assert metadata.pop("manifest") == "fp8_manifest.json"
    (tmp_path / "fp8_backend.json").write_text(json.dumps(metadata))
    accelerator.load_state(str(tmp_path))
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "manifest" in line]
    assert str(tmp_path) in line


def test_automatic_naming_loads_newest_whole_and_rotates_last(tmp_path, caplog, monkeypatch):
    accelerator, model, optimizer = run(tmp_path, total_limit=2)
    with pytest.raises(FP8BackendError, match="no checkpoint"):
        accelerator.load_state()
    weights = []
    for _ in range(3):
        weights.append(copied_parameters(model))
        accelerator.save_state()
        train(accelerator, model, optimizer, DATA[:1])
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint_1", "checkpoint_2"]
    (folder / "checkpoint_2" / "model.safetensors").write_bytes(b"")
    with caplog.at_level(logging.WARNING, "fp8_backends"):
        accelerator.load_state()
    assert "checkpoint_2 is skipped: damaged: model.safetensors" in caplog.text
    assert all(torch.equal(p, weights[1][name]) for name, p in model.named_parameters())

    def removes(folder, newest, limit):
        assert (newest / "fp8_manifest.json").exists() and (folder / "checkpoint_1").exists()
        raise Killed

    monkeypatch.setattr(checkpoints, "_remove_oldest", removes)
    with pytest.raises(Killed):
        accelerator.save_state()
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoint_1",
        "checkpoint_2",
        "checkpoint_3",
    ]
    accelerator.project_configuration.iteration = 3
    with pytest.raises(ValueError, match="already exists"):
        accelerator.save_state()


def test_automatic_naming_removes_only_its_own_checkpoints(tmp_path):
    accelerator, _, _ = run(tmp_path, total_limit=1)
    accelerator.save_state()
    folder = tmp_path / "checkpoints"
    shutil.copytree(folder / "checkpoint_0", folder / "checkpoint_best")
    accelerator.save_state()
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint_1", "checkpoint_best"]
