"""Drive a program in a pseudo terminal of 80 columns."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Sequence
from pathlib import Path

COLUMNS = 80


class PseudoTerminal:
    """A program with this terminal as standard input, output and error; `text` is everything on the
    screen."""

    def __init__(
        self, command: Sequence[str], folder: Path, environment: dict[str, str] | None = None
    ) -> None:
        self._keys, screen = pty.openpty()
        fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
        environment = {**os.environ, "TERM": "dumb", **(environment or {})}
        for name in ("COLUMNS", "LINES"):
            environment.pop(name, None)
        ends = {"stdin": screen, "stdout": screen, "stderr": screen}
        self.program = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            **ends,
            preexec_fn=lambda: become_foreground(screen),
        )
        os.close(screen)
        self.text, self._read_until = "", 0

    def expect(self, text: str, seconds: float = 200) -> None:
        """Wait until the screen shows a text, after the one before."""
        end = time.monotonic() + seconds
        while (found := self.text.find(text, self._read_until)) < 0:
            assert self._read(end), f"{text!r} is not on the screen:\n{self.text}"
        self._read_until = found + len(text)

    def type(self, keys: str) -> None:
        os.write(self._keys, keys.encode())

    def answer(self, prompt: str, keys: str = "") -> None:
        """Wait for a prompt, and type a line."""
        self.expect(prompt)
        self.type(f"{keys}\n")

    def end(self) -> int:
        """Read until the program ends, and return its exit code."""
        while self._read(time.monotonic() + 200):
            pass
        os.close(self._keys)
        return self.program.wait(20)

    def press(self, keys: str, text: str) -> None:
        """Type keys until the screen shows a text. Python misses a signal between a prompt and its
        read, so type anew, but late: a second Ctrl-C would interrupt the answer to the first."""
        for _ in range(6):
            self.type(keys)
            again = time.monotonic() + 20
            while time.monotonic() < again:
                if text in self.text:
                    return
                self._read(again)
        raise AssertionError(f"{text!r} is not on the screen:\n{self.text}")

    def _read(self, until: float) -> bool:
        ready, *_ = select.select([self._keys], [], [], max(0, until - time.monotonic()))
        try:
            read = os.read(self._keys, 65536) if ready else b""
        except OSError:  # the program has ended
            read = b""
        self.text += read.decode(errors="replace").replace("\r\n", "\n")
        return bool(read)


def become_foreground(screen: int) -> None:
    """Make the terminal this process's own, so that Ctrl-C reaches it."""
    # else Python leaves Ctrl-C ignored, as a shell does for all that it starts with `&`
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.setsid()
    fcntl.ioctl(screen, termios.TIOCSCTTY, 0)
