"""Manifests of checkpoints, and the newest whole checkpoint of a folder."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

import fp8_backends
from fp8_backends.checkpoints import manifest
from fp8_backends.errors import FP8BackendError

RECIPE = fp8_backends.resolve("native:delayed")


def checkpoint(folder: Path, step: int = 1, sealed: bool = True) -> Path:
    """Write a folder of files like Accelerate, one of them in a subfolder."""
    (folder / "part").mkdir(parents=True)
    for name in ("random_states_0.pkl", "model.safetensors", "part/__0_0.distcp"):
        (folder / name).write_bytes(name.encode() * 100 + bytes([step]))
    (folder / "fp8_backend.json").write_text(
        json.dumps({"format": 1, "manifest": "fp8_manifest.json"})
    )
    if sealed:
        files = {name: manifest.digest(folder / name) for name in manifest.files_of(folder)}
        manifest.write(folder, files, RECIPE, step, world_size=2)
    return folder


def test_a_manifest_describes_a_save(tmp_path):
    record = manifest.condition(checkpoint(tmp_path / "a", step=7)).manifest
    assert (record["backend"], record["step"], record["world_size"]) == ("native:delayed", 7, 2)
    assert record["recipe"]["amax_history_len"] == RECIPE.amax_history_len
    assert (
        set(record["files"]) == set(manifest.files_of(tmp_path / "a"))
        and "part/__0_0.distcp" in record["files"]
    )
    assert {"fp8-backends", "torch", "accelerate", "python"} == set(record["versions"])


@pytest.mark.parametrize(
    ("change", "word", "said"),
    [
        (lambda file: None, "whole", ""),
        (lambda file: file.unlink(), "damaged", "part/__0_0.distcp is missing"),
        (
            lambda file: file.write_bytes(file.read_bytes()[:-1]),
            "damaged",
            "1,700 bytes in place of 1,701",
        ),
        (
            lambda file: file.write_bytes(file.read_bytes()[:-1] + b"\0"),
            "damaged",
            "part/__0_0.distcp has other cont",
        ),
        (
            lambda file: (file.parents[1] / manifest.MANIFEST).unlink(),
            "incomplete",
            manifest.MANIFEST,
        ),
        (
            lambda file: (file.parents[1] / manifest.MANIFEST).write_text("{"),
            "damaged",
            manifest.MANIFEST,
        ),
        (
            lambda file: (file.parents[1] / manifest.MANIFEST).write_text("[]"),
            "damaged",
            manifest.MANIFEST,
        ),
        (
            lambda file: rewrite(file.parents[1], '"step": 1', '"step": 2'),
            "damaged",
            "its own checksum",
        ),
        (
            lambda file: rewrite(file.parents[1], '"format": 1', '"format": 9'),
            "foreign",
            "format 9",
        ),
        (lambda file: (file.parents[1] / "my_notes.txt").write_text("mine"), "whole", ""),
    ],
)
def test_conditions_of_a_checkpoint(change, word, said, tmp_path):
    change(checkpoint(tmp_path / "a") / "part" / "__0_0.distcp")
    found = manifest.condition(tmp_path / "a")
    assert found.word == word and said in found.detail


def rewrite(folder: Path, old: str, new: str) -> None:
    text = (folder / manifest.MANIFEST).read_text()
    assert old in text
    (folder / manifest.MANIFEST).write_text(text.replace(old, new, 1))


def test_foreign_weights_preferred_by_accelerate_are_refused(tmp_path):
    folder = checkpoint(tmp_path / "a", sealed=False)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    manifest.write(
        folder, {n: manifest.digest(folder / n) for n in manifest.files_of(folder)}, RECIPE, 1, 1
    )
    assert manifest.condition(folder).word == "whole"
    (folder / "model.safetensors").touch()
    assert manifest.condition(folder).detail.startswith("model.safetensors is no part of it")


def test_manifest_is_required_only_if_promised(tmp_path):
    folder = checkpoint(tmp_path / "checkpoint-3", sealed=False)
    (folder / "fp8_backend.json").write_text('{"format": 2, "models": {}}')
    assert manifest.condition(folder).word == "no manifest"
    (folder / "fp8_backend.json").unlink()
    assert manifest.condition(folder).word == "no manifest"
    (folder / "random_states_0.pkl").unlink()  # now it looks like an interrupted one of Trainer
    assert manifest.condition(folder).word == "incomplete"
    (folder / "trainer_state.json").write_text("{}")
    assert manifest.condition(folder).word == "no manifest"


def test_newest_whole_checkpoint_is_found_and_skips_are_reported(tmp_path, caplog):
    assert fp8_backends.checkpoints.newest_checkpoint(tmp_path / "nothing") is None
    for step in (2, 9, 10):
        checkpoint(tmp_path / f"checkpoint-{step}", step)
    os.symlink(tmp_path / "checkpoint-10", tmp_path / "latest")
    assert fp8_backends.checkpoints.newest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")
    assert fp8_backends.checkpoints.newest_checkpoint(tmp_path / "checkpoint-2") == str(
        tmp_path / "checkpoint-2"
    )
    (tmp_path / "checkpoint-10" / "model.safetensors").write_bytes(b"")
    checkpoint(tmp_path / "checkpoint-11", sealed=False)
    with caplog.at_level(logging.WARNING, "fp8_backends"):
        assert fp8_backends.checkpoints.newest_checkpoint(str(tmp_path)) == str(
            tmp_path / "checkpoint-9"
        )
    assert [record.args[0].name for record in caplog.records] == ["checkpoint-11", "checkpoint-10"]
    assert "model.safetensors" in caplog.text


def test_unnumbered_names_sort_by_save_time(tmp_path):
    checkpoint(tmp_path / "zebra")
    checkpoint(tmp_path / "best")
    assert fp8_backends.checkpoints.newest_checkpoint(tmp_path) == str(tmp_path / "best")


def rewritten(folder: Path, **changed) -> None:
    """Change values in the manifest of a checkpoint, and its checksum."""
    record = json.loads((folder / manifest.MANIFEST).read_bytes())
    del record["sha256"]
    (folder / manifest.MANIFEST).write_bytes(manifest._text(record | changed))


@pytest.mark.parametrize(
    "names, newest",
    [
        (["best", "last"], "last"),
        (["run_20270101", "run_20251231"], "run_20251231"),  # named by the clock
        (["checkpoint-900", "checkpoint-1000"], "checkpoint-1000"),
        (["checkpoint_9", "checkpoint_10"], "checkpoint_10"),
    ],
)
def test_clock_set_back_keeps_checkpoint_order(names, newest, tmp_path):
    for name, step, year in zip(names, (900, 1000), (2027, 2025), strict=True):
        rewritten(checkpoint(tmp_path / name), step=step, time=f"{year}-01-01T00:00:00+00:00")
    assert fp8_backends.checkpoints.newest_checkpoint(tmp_path) == str(tmp_path / newest)
    (checkpoint(tmp_path / "ended_early", sealed=False) / "model.safetensors").unlink()
    if not newest.startswith("checkpoint_"):
        assert fp8_backends.checkpoints.newest_checkpoint(tmp_path) == str(tmp_path / newest)


def test_numbers_of_saves_come_before_steps(tmp_path):
    for number, step in ((0, 100), (1, 200), (2, 150)):
        checkpoint(tmp_path / f"checkpoint_{number}", step)
    assert fp8_backends.checkpoints.newest_checkpoint(tmp_path) == str(tmp_path / "checkpoint_2")


def test_run_starts_over_unless_a_checkpoint_is_damaged(tmp_path):
    checkpoint(tmp_path / "checkpoint-1", sealed=False)
    assert fp8_backends.checkpoints.newest_checkpoint(tmp_path) is None
    (checkpoint(tmp_path / "checkpoint-0") / "model.safetensors").unlink()
    with pytest.raises(FP8BackendError, match="checkpoint-0 .*model.safetensors is missing"):
        fp8_backends.checkpoints.newest_checkpoint(tmp_path)


def test_checkpoints_without_manifest_count_if_none_has_one(tmp_path, capsys):
    for step in (1, 2):
        (checkpoint(tmp_path / f"checkpoint_{step}", sealed=False) / "fp8_backend.json").unlink()
    assert fp8_backends.checkpoints.newest_checkpoint(tmp_path) == str(tmp_path / "checkpoint_2")
    assert "carries no manifest" in capsys.readouterr().err
    checkpoint(tmp_path / "checkpoint_0")
    assert fp8_backends.checkpoints.newest_checkpoint(tmp_path) == str(tmp_path / "checkpoint_0")


@pytest.mark.parametrize(
    "key, value",
    [
        ("files", {"/dev/zero": {"bytes": 1, "sha256": ""}}),
        ("files", {"../model": {"bytes": 1, "sha256": ""}}),
        ("files", {"model": 3}),
        ("files", None),
        ("time", "yesterday"),
        ("step", "3"),
        ("backend", ["native"]),
    ],
)
def test_malformed_manifest_is_damaged(key, value, tmp_path):
    """A correct checksum proves integrity, not authorship."""
    folder = checkpoint(tmp_path / "checkpoint_1", 1)
    rewritten(folder, **{key: value})
    found = manifest.condition(folder)
    assert (found.word, found.manifest) == (
        "damaged",
        None,
    ) and "does not hold what a manifest" in found.detail


def test_pipe_as_manifest_is_damaged(tmp_path):
    folder = checkpoint(tmp_path / "checkpoint_1", 1)
    (folder / manifest.MANIFEST).unlink()
    os.mkfifo(folder / manifest.MANIFEST)
    assert (
        manifest.condition(folder).detail == f"{manifest.MANIFEST} cannot be read (it is no file)"
    )
