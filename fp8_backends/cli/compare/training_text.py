"""The text that `compare` trains on: read, and split by file into training and held-out parts. A token is a byte."""

from __future__ import annotations

import contextlib
import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

from ...errors import FP8BackendError
from ...words import counted, readable_bytes

HELD_OUT_EVERY = 10
"""The last of so many files is held out; of a single file, the last such part."""
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "node_modules"}
_BOUNDARY = b"\0"  # between two files; only binary files, which are left out, hold zero bytes


@dataclass
class TrainingText:
    """Tokens of the two parts, and what a report must say about them."""

    train: torch.Tensor
    """1-D, uint8 for bytes; another dtype for the tokens of a model's own tokenizer."""
    held_out: torch.Tensor
    vocab_size: int
    description: str
    sha256: str
    """The hash of the raw text, training part and then held-out part."""

    def batches(self, steps: int, batch: int, sequence: int, seed: int) -> torch.Tensor:
        """Draw the starting points of the windows of a training run, [steps, batch]; the same for the same seed."""
        self._check_length(self.train, sequence, "training")
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(len(self.train) - sequence, (steps, batch), generator=generator)

    def windows(self, starts: torch.Tensor, sequence: int) -> torch.Tensor:
        """Return training tokens [batch, sequence], int64, at these starting points [batch]."""
        return self.train[starts[:, None] + torch.arange(sequence)].long()

    def held_out_windows(self, count: int, sequence: int) -> torch.Tensor:
        """Return evenly spaced held-out tokens [count, sequence], int64; fewer where the text is short."""
        self._check_length(self.held_out, sequence, "held-out")
        count = min(count, len(self.held_out) // sequence)
        starts = torch.linspace(0, len(self.held_out) - sequence, count).long()
        return self.held_out[starts[:, None] + torch.arange(sequence)].long()

    @staticmethod
    def _check_length(tokens: torch.Tensor, sequence: int, part: str) -> None:
        if len(tokens) <= sequence:
            raise FP8BackendError(
                f"the {part} part of the text has {counted(len(tokens), 'token')}, too few for --sequence {sequence}: "
                "give more text or shorter sequences"
            )


def load_text(path: str | Path | None = None, limit_mb: float = 8.0) -> TrainingText:
    """Read the text to train on.

    Args:
        path: a file, or a folder whose text files are read; None: the Python sources of the standard library.
        limit_mb: read files in the order of their paths until so many megabytes are reached.

    Raises:
        FP8BackendError: nothing there to read, or too little of it.
    """
    files, description = _files(path)
    parts = _read(files, limit_mb)
    if not parts:
        raise FP8BackendError(f"no text found in {path}: --text takes a text file or a folder of text files")
    if (count := len(parts)) < HELD_OUT_EVERY:
        whole = _BOUNDARY.join(parts)
        cut = len(whole) - len(whole) // HELD_OUT_EVERY
        train, held_out, split = whole[:cut], whole[cut:], "the last tenth held out"
    else:
        held_out = _BOUNDARY.join(parts[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY])
        del parts[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
        train, split = _BOUNDARY.join(parts), f"every {HELD_OUT_EVERY}th file held out"
    size = readable_bytes(len(train) + len(held_out))
    description = f"{description}, {counted(count, 'file')}, {size}, {split}"
    sha256 = hashlib.sha256(train + held_out).hexdigest()
    tokens = [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (train, held_out)]
    return TrainingText(*tokens, 256, f"{description}, one token a byte", sha256)


def _files(path: str | Path | None) -> tuple[list[Path], str]:
    if path is None:
        root, pattern = Path(sysconfig.get_paths()["stdlib"]), "*.py"
        description = f"Python {sysconfig.get_python_version()} standard library sources"
    else:
        root, pattern, description = Path(path), "*", Path(path).name
        if root.is_file():
            return [root], description
        if not root.is_dir():
            raise FP8BackendError(f"--text {path}: there is no such file or folder")
    found = []
    for file in root.rglob(pattern):
        relative = file.relative_to(root)
        if file.is_file() and not any(p in _SKIPPED_FOLDERS or p.startswith(".") for p in relative.parts):
            found.append((relative.as_posix(), file))
    return [file for _, file in sorted(found)], description


def _read(files: list[Path], limit_mb: float) -> list[bytes]:
    parts, wanted = [], int(limit_mb * 1e6)
    for file in files:
        if wanted <= 0:
            break
        with contextlib.suppress(OSError):
            data = file.read_bytes()[:wanted]
            if data and _BOUNDARY not in data:
                parts.append(data)
                wanted -= len(data)
    return parts
