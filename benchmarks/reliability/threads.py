"""Train with threads, and with forked and spawned processes.

    python benchmarks/reliability/threads.py [--quick] [--only PART] [--out FOLDER]

The proof of `ao` profiles a step, and a profiler has a place in the process or in a thread: each
case here adds a second thread, process or profiler. One of `native` shows that threads share
nothing. (`te` has no case: TransformerEngine has process-wide state, and its models train one at a
time.) A case runs in a separate process, forked from this one after loading only the libraries. It
passes with exit code 0: an assertion ends with 1, a segmentation fault with -11, and a hanging case
is killed. Random cases run 20 times in one process. `--quick` runs each once, and skips processes
that reload the libraries. Exits with 1 if a case fails.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]
import measuring  # noqa: E402

import fp8_backends  # noqa: E402

AO = "ao:tensorwise"
NATIVE = ("native:dynamic", "native:delayed", "native:blockwise", "msamp:O2", "msamp:O3")
SECONDS = 120
"""Seconds after which a case counts as hanging; ten earlier, its threads print their stacks."""
ONCE = {kind: 1 for kind in ("fprop", "dgrad", "wgrad")} | {"recomputed": 0}


class Training:
    """A small model with its optimizer and its data, prepared for a backend."""

    def __init__(self, backend: str = AO, seed: int = 0, compiled: bool = False) -> None:
        random = torch.Generator().manual_seed(seed)
        self.batches = [torch.randn(16, 32, generator=random) for _ in range(8)]
        self.model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.normal_(std=0.1, generator=random)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.model, self.optimizer = fp8_backends.prepare(self.model, optimizer, backend)
        self.run: Callable = (
            torch.compile(self.model, backend="aot_eager") if compiled else self.model
        )
        self.losses: list[float] = []

    def loss(self) -> torch.Tensor:
        """Return the loss of the next forward."""
        batch = self.batches[len(self.losses) % len(self.batches)]
        # to give each layer its dgrad
        loss = (self.run(batch.clone().requires_grad_()) - batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, steps: int = 3) -> Training:
        for _ in range(steps):
            self.loss().backward()
            self.step()
        return self

    def check_proven(self) -> None:
        """Check each of the three products of each layer in the profiled step."""
        products = fp8_backends.audit(self.model).products
        assert len(products) == 2 and all(counts == ONCE for counts in products.values()), products
        check_no_profiler()


def check_no_profiler() -> None:
    assert not torch._C._autograd._profiler_enabled(), "a profiler was left running"


def at_once(*functions: Callable[[], Any]) -> list[Any]:
    """Return the results of functions started together, each in a separate thread."""
    together = threading.Barrier(len(functions))

    def begin(function: Callable[[], Any]) -> Any:
        together.wait()
        return function()

    with ThreadPoolExecutor(len(functions)) as threads:
        return [
            each.result() for each in [threads.submit(begin, function) for function in functions]
        ]


def in_thread(function: Callable[[], Any]) -> Any:
    return at_once(function)[0]


def train_ao(seed: int = 0) -> None:
    """Train and be proven in a process, or a thread."""
    Training(seed=seed).train().check_proven()


# The cases


def two_models(repetitions: int) -> None:
    for seed in range(repetitions):
        for training in at_once(Training(seed=seed).train, Training(seed=seed + 1).train):
            training.check_proven()


def prepared_and_dropped(repetitions: int) -> None:
    """Threads also prepare their models at once, and give them up in the middle of a step."""

    def work(seed: int) -> None:
        train_ao(seed)
        Training(seed=seed).loss()

    for seed in range(repetitions):
        at_once(*(lambda seed=seed, index=index: work(seed + index) for index in range(4)))
        gc.collect()


def compiled_models(repetitions: int) -> None:
    one, two = at_once(Training(compiled=True).train, Training(seed=1, compiled=True).train)
    one.check_proven()
    two.check_proven()


def then_forked(repetitions: int) -> None:
    two_models(2)
    started_processes("fork", repetitions)


def then_spawned(repetitions: int) -> None:
    two_models(2)
    started_processes("spawn", 1)


def started_processes(method: str, number: int) -> None:
    context = multiprocessing.get_context(method)
    processes = [context.Process(target=train_ao, args=(seed,)) for seed in range(number)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert all(process.exitcode == 0 for process in processes), [
        process.exitcode for process in processes
    ]


def forked_inside_a_step(repetitions: int) -> None:
    """Fork like a data loader: the profile stays with its process, and the new one may train as
    well."""
    training = Training()
    training.loss().backward()
    assert torch._C._autograd._profiler_enabled()
    child = os.fork()
    if child == 0:
        check_no_profiler()
        training.train()
        train_ao(1)
        training.check_proven()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    training.step()
    training.check_proven()


def users_profiler_elsewhere(repetitions: int) -> None:
    """Start the user's profiler in another thread during training."""
    for seed in range(repetitions):
        done = threading.Event()

        def watch(done: threading.Event = done) -> None:
            while not done.is_set():
                with profile(activities=[ProfilerActivity.CPU]) as profiler:
                    torch.ones(8).add_(1)
                assert any(event.name == "aten::add_" for event in profiler.events())

        def train(seed: int = seed, done: threading.Event = done) -> Training:
            try:
                return Training(seed=seed).train()
            finally:
                done.set()

        at_once(train, watch)[0].check_proven()


def users_profiler_around(repetitions: int) -> None:
    """The proof waits, and follows."""
    training = Training()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        training.train(2)
    assert any("mm" in event.key for event in profiler.key_averages())
    assert fp8_backends.audit(training.model).products["0"]["fprop"] == 0
    training.train(2).check_proven()


def users_profiler_in_the_middle(repetitions: int, forms: tuple[bool, ...] = (False, True)) -> None:
    """Start it between the backward and the step, eager, and between two steps, compiled: ours
    gives way."""
    for compiled in forms:
        training = Training(compiled=compiled)
        if compiled:
            training.train(1)
        else:
            training.loss().backward()
        assert torch._C._autograd._profiler_enabled()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            training.step()
            training.train(1)
        assert any("mm" in event.key for event in profiler.key_averages())
        training.train().check_proven()


def native_as_alone(repetitions: int) -> None:
    """Compare the bits of models trained in two threads with single runs."""
    for backend in NATIVE:
        alone = [Training(backend, seed).train(6) for seed in (0, 1)]
        together = at_once(*(lambda s=seed, b=backend: Training(b, s).train(6) for seed in (0, 1)))
        for one, other in zip(alone, together, strict=True):
            assert one.losses == other.losses, backend
            pairs = zip(
                one.model.state_dict().values(), other.model.state_dict().values(), strict=True
            )
            assert all(torch.equal(a.float(), b.float()) for a, b in pairs), backend
            assert (
                fp8_backends.audit(one.model).products == fp8_backends.audit(other.model).products
            ), backend


def step_elsewhere(repetitions: int) -> None:
    """Run forwards and backwards in one thread, steps in another, as with a separate optimizer
    thread."""
    training = Training()
    with ThreadPoolExecutor(1) as stepping:
        for _ in range(3):
            training.loss().backward()
            stepping.submit(training.step).result()
    training.check_proven()


def threads_that_die(repetitions: int) -> None:
    """End a thread in the forward, in the backward, and in between; another thread continues with
    the model."""

    def fail(*_) -> None:
        raise FloatingPointError

    def in_forward(training: Training) -> None:
        hook = training.model[2].register_forward_hook(fail)
        try:
            training.loss()
        finally:
            hook.remove()

    def in_backward(training: Training) -> None:
        loss = training.loss()
        loss.register_hook(fail)
        loss.backward()

    def in_between(training: Training) -> None:
        training.loss()
        raise FloatingPointError

    for dying in (in_forward, in_backward, in_between):
        training = Training()
        errors: list[BaseException | None] = []
        thread = threading.Thread(target=caught, args=(dying, training, errors))
        thread.start()
        thread.join()
        assert isinstance(errors[0], FloatingPointError)
        training.optimizer.zero_grad()
        in_thread(lambda training=training: training.train(4))
        training.check_proven()
        train_ao(1)


def caught(function: Callable, training: Training, errors: list) -> None:
    try:
        function(training)
    except FloatingPointError as error:
        errors.append(error)


def dropped_elsewhere(repetitions: int) -> None:
    """Begin a model's first step in one thread and drop it in another: the first can train
    others."""
    held = [Training()]
    held[0].loss().backward()
    in_thread(lambda: (held.clear(), gc.collect()))
    train_ao(1)


def daemons(repetitions: int) -> None:
    """Alive when the interpreter ends: one in the middle of its first step, one between two
    steps."""
    begun = threading.Barrier(3)

    def wait(training: Training, in_step: bool) -> None:
        training.loss().backward()
        if not in_step:
            training.step()
        begun.wait()
        threading.Event().wait()

    for in_step in (False, True):
        threading.Thread(target=wait, args=(Training(), in_step), daemon=True).start()
    begun.wait()
    train_ao()


def launched_in_a_notebook(repetitions: int) -> None:
    """`notebook_launcher` forks, here after threads have trained."""
    from accelerate import notebook_launcher

    two_models(2)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    notebook_launcher(train_rank, (), num_processes=2, use_port=str(port))


def train_rank() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(
        mixed_precision="fp8", kwargs_handlers=[fp8_backends.FP8RecipeKwargs(backend=AO)], cpu=True
    )
    assert accelerator.num_processes == 2
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for _ in range(3):
        accelerator.backward(model(torch.randn(16, 32)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    products = fp8_backends.audit(accelerator.unwrap_model(model)).products
    assert all(counts == ONCE for counts in products.values()), products


CASES: dict[str, Callable[[int], None]] = {
    "two ao models in two threads": two_models,
    "models prepared and given up in four threads": prepared_and_dropped,
    "two compiled ao models in two threads": compiled_models,
    "threads, then forked processes": then_forked,
    "threads, then spawned processes": then_spawned,
    "threads, then notebook_launcher": launched_in_a_notebook,
    "a process forked inside the first step": forked_inside_a_step,
    "a user's profiler in another thread": users_profiler_elsewhere,
    "a user's profiler around the first steps": users_profiler_around,
    "a user's profiler from the middle of a step on": users_profiler_in_the_middle,
    "steps in another thread than forwards": step_elsewhere,
    "threads that die in their first step": threads_that_die,
    "a model given up by another thread": dropped_elsewhere,
    "daemon threads when the interpreter ends": daemons,
    "native models in two threads, bits as alone": native_as_alone,
}
SLOW = {"threads, then spawned processes", "threads, then notebook_launcher"}


def run_case(case: Callable[[int], None], repetitions: int, output: int) -> int:
    """Run one case in this process, and return its exit code."""
    os.setsid()  # a hanging case is killed with all of its children
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    faulthandler.dump_traceback_later(SECONDS - 10)
    warnings.simplefilter("ignore")
    # a forked process recreates PyTorch's pool, and two threads may find none
    torch.set_num_threads(1)
    try:
        case(repetitions)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        faulthandler.cancel_dump_traceback_later()
    return 0


def wait_for(child: int) -> int | None:
    """Return a process's exit status; None if it hung and was killed."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="one repetition, and no process that loads anew"
    )
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--out", help="folder for the record, threads_cpu_FEATURES.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # a forked process has no OpenMP threads
    # loads TorchAO, once for all cases
    fp8_backends.prepare(nn.Sequential(nn.Linear(32, 32)), None, AO)
    logging.getLogger("fp8_backends").addHandler(logging.NullHandler())
    repetitions = 1 if arguments.quick else 20
    results = []
    for name, case in CASES.items():
        if arguments.only not in name or (arguments.quick and name in SLOW):
            continue
        start = time.monotonic()
        with tempfile.TemporaryFile() as output:
            if (child := os.fork()) == 0:
                # the interpreter ends as it usually does
                return run_case(case, repetitions, output.fileno())
            code = wait_for(child)
            output.seek(0)
            told = output.read().decode(errors="replace")
        failed = code != 0 or "Exception ignored" in told or "Fatal" in told
        results.append(
            {
                "case": name,
                "result": f"FAILED ({code})" if failed else "holds",
                "seconds": time.monotonic() - start,
            }
        )
        if failed:
            print(f"{name}: ended with {code}\n{told}", flush=True)
    print(
        measuring.table(
            ["case", "result", "seconds"], [list(result.values()) for result in results]
        )
    )
    if arguments.out:
        path = Path(arguments.out) / f"threads_cpu_{measuring.cpu_features()}.json"
        measuring.write_json(str(path), {"repetitions": repetitions, "results": results})
    return int(any(result["result"].startswith("FAILED") for result in results))


if __name__ == "__main__":
    raise SystemExit(main())
