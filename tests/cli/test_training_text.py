from __future__ import annotations

import pytest
import torch
from cli.comparing import write_text

from fp8_backends.cli.compare.workload import load_text
from fp8_backends.errors import FP8BackendError


def test_default_text_is_the_standard_library_without_its_tests_and_the_same_at_every_call():
    first, again = load_text(limit_mb=0.3), load_text(limit_mb=0.3)
    assert first.sha256 == again.sha256 and torch.equal(first.train, again.train)
    assert "standard library" in first.description
    assert first.vocab_size == 256 and first.train.dtype == torch.uint8


def test_held_out_files_never_appear_in_the_training_part(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(20):
        (folder / f"{number:02}.txt").write_text(f"<file {number:02}> " * 30)
    text = load_text(folder)
    train, held_out = bytes(text.train), bytes(text.held_out)
    in_train = {n for n in range(20) if f"<file {n:02}>".encode() in train}
    in_held_out = {n for n in range(20) if f"<file {n:02}>".encode() in held_out}
    assert in_held_out == {9, 19} and in_train == set(range(20)) - in_held_out


def test_a_single_file_holds_out_its_last_tenth(tmp_path):
    file = tmp_path / "one.txt"
    file.write_bytes(bytes(range(1, 101)) * 10)
    text = load_text(file)
    assert len(text.train) == 900 and len(text.held_out) == 100
    assert bytes(text.held_out) == bytes(range(1, 101))


def test_binary_files_are_left_out(tmp_path):
    write_text(tmp_path)
    plain = load_text(tmp_path)
    (tmp_path / "binary.bin").write_bytes(b"\0\1\2" * 100)
    assert load_text(tmp_path).sha256 == plain.sha256


def test_batches_depend_on_the_seed_alone_and_windows_lie_inside_the_text(tmp_path):
    text = load_text(write_text(tmp_path))
    starts = text.batches(steps=50, batch=4, sequence=32, seed=3)
    assert torch.equal(starts, text.batches(steps=50, batch=4, sequence=32, seed=3))
    assert not torch.equal(starts, text.batches(steps=50, batch=4, sequence=32, seed=4))
    windows = text.windows(starts[0], 32)
    assert windows.shape == (4, 32) and windows.dtype == torch.int64
    assert bytes(windows[0].to(torch.uint8)) in bytes(text.train)


@pytest.mark.parametrize("missing", ["nowhere", "empty"])
def test_text_that_is_not_there_is_an_error_that_names_the_path(tmp_path, missing):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FP8BackendError, match=missing):
        load_text(tmp_path / missing)


def test_too_little_text_for_the_sequence_says_which_part(tmp_path):
    text = load_text(write_text(tmp_path, files=10))
    with pytest.raises(FP8BackendError, match="held-out part.*--sequence"):
        text.held_out_windows(4, 100_000)
