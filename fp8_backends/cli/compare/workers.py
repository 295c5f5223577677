"""The processes of a comparison: one a backend, or one torchrun, that waits on its standard input for each turn."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


class Worker:
    """Trains one backend, a turn at a time. All workers load their libraries at once; turns are given one by one."""

    def __init__(self, arguments: list[str], ranks: int) -> None:
        self.ranks, self.ended = ranks, False
        torchrun = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks), "-m"] if ranks > 1 else []
        # a session of its own: Ctrl-C reaches this process alone, which then stops the worker
        self.process = subprocess.Popen(
            [sys.executable, "-m", *torchrun, "fp8_backends.cli.compare.training_run", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=worker_environment(ranks),
            start_new_session=True,
        )
        self.last_words: deque[str] = deque(maxlen=5)
        lines = (line.strip() for line in self.process.stderr)
        self.drain = threading.Thread(target=self.last_words.extend, args=[filter(None, lines)], daemon=True)
        self.drain.start()

    def give_turn(self) -> None:
        """Every rank reads one byte at the start of a turn."""
        with contextlib.suppress(BrokenPipeError):  # it has ended, as `events` will notice
            os.write(self.process.stdin.fileno(), b"." * self.ranks)

    def events(self, last: str, times: int = 1) -> Iterator[dict[str, Any]]:
        """Pass on what the worker reports, until it has reported `last` so many times or has ended."""
        for line in self.process.stdout:
            event = json.loads(line)
            times -= event["event"] == last
            yield event
            if not times:
                return
        self.process.wait()
        self.drain.join()
        self.ended = True

    def why_it_ended(self) -> str:
        return f"the worker ended with code {self.process.returncode}: {' / '.join(self.last_words) or 'no message'}"


def dismiss(workers: Iterable[Worker]) -> None:
    """Let workers end that wait for a turn."""
    for worker in workers:
        worker.process.stdin.close()
    for worker in workers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(timeout=30)


def stop(workers: Iterable[Worker]) -> None:
    """End workers, whatever they do."""
    running = [worker for worker in workers if worker.process.poll() is None]
    for worker in running:
        worker.process.terminate()
    for worker in running:
        try:
            # torchrun passes the signal on to its ranks, and after 30 s ends those that do not obey
            worker.process.wait(timeout=5 if worker.ranks == 1 else 40)
        except subprocess.TimeoutExpired:
            worker.process.kill()


def worker_environment(ranks: int = 1) -> dict[str, str]:
    """Return this process's environment without what would steer Accelerate from outside."""
    steering = ("ACCELERATE_", "FP8_BACKENDS_DISABLE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(steering)}
    package_root = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))
    if ranks > 1:
        kept.setdefault("OMP_NUM_THREADS", str(max(1, cores() // ranks)))
    return {**kept, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def cores() -> int:
    """Count the processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
