"""Load damaged checkpoints: each must be refused by name, and nothing of it loaded.

Every kind of file takes every damage, at random places. `load_state` must raise one
`FP8BackendError` with the names of the file and of the whole checkpoint next to it, and leave
models, optimizers and schedulers unchanged; `newest_checkpoint` must find the neighbour.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate_state import fresh_accelerate
from stress.harness import BACKENDS, STRESS, Training, changed

import fp8_backends
from fp8_backends.accelerate_plugin import checkpoints

__all__ = ["fresh_accelerate"]
MANIFEST = "fp8_manifest.json"


def zeroed_tail(data: bytes, older: bytes) -> bytes:
    kept = random.randrange(len(data.rstrip(b"\0")))
    return data[:kept] + bytes(len(data) - kept)


def flipped_bit(data: bytes, older: bytes) -> bytes:
    at = random.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]


DAMAGES: dict[str, Callable[[bytes, bytes], bytes | None]] = {
    "zeroed tail": zeroed_tail,
    "flipped bit": flipped_bit,
    "truncated": lambda data, older: data[: random.randrange(1, len(data))],
    "emptied": lambda data, older: b"",
    "removed": lambda data, older: None,
    "of another step": lambda data, older: older,
}


@pytest.fixture
def damaged(request, tmp_path):
    """A training, its newest checkpoint, and the one before it."""
    run = Training(request.param, tmp_path)
    run.accelerator.register_for_checkpointing(
        torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9)
    )
    for number in (1, 2, 3):
        run.step(number)
        run.save()
    random.seed(0)
    return run, *(tmp_path / "checkpoints" / f"checkpoint_{n}" for n in (2, 1))


@pytest.mark.nightly
@pytest.mark.parametrize("damaged", BACKENDS[: 1 if STRESS == 1 else None], indirect=True)
def test_damaged_file_is_refused_by_name(damaged):
    run, newest, older = damaged
    for name in sorted(path.name for path in newest.iterdir()) * STRESS:
        for damage in DAMAGES:
            check_refused(run, newest, older, name, damage)
    run.load(newest)  # the restored file is whole


@pytest.mark.nightly
@pytest.mark.parametrize("damaged", BACKENDS[:1], indirect=True)
def test_loaded_damage_is_detected(damaged, monkeypatch):
    monkeypatch.setattr(checkpoints, "checked", lambda folder: True)
    with pytest.raises(AssertionError, match="loaded silently"):
        check_refused(*damaged, "model.safetensors", "of another step")


def check_refused(run: Training, newest: Path, older: Path, name: str, damage: str) -> None:
    path, before, case = newest / name, run.stored(), f"{name}, {damage}"
    data = path.read_bytes()
    content = DAMAGES[damage](data, (older / name).read_bytes())
    if content == data:
        return
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    try:
        run.load(newest)
        said = ""
    except fp8_backends.FP8BackendError as error:
        said = str(error)
    assert said, f"{case}: loaded silently"
    # a whole manifest of another step contradicts the files, and the wrong side is unknowable
    names = [name] if name != MANIFEST else [each.name for each in older.iterdir()]
    assert str(older) in said and any(each in said for each in names), f"{case}: {said}"
    assert not changed(before, run.stored()), f"{case}: refused, and something was loaded"
    assert fp8_backends.checkpoints.newest_checkpoint(newest.parent) == str(older), case
    path.write_bytes(data)
