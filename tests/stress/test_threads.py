"""Train with threads, and with forked and spawned processes.

The proof of `ao` profiles a step, and a profiler has a place in the process or in a thread: each
test adds a second thread, process or profiler. `native` shares nothing between threads. (`te` has
no test: TransformerEngine has process-wide state, and its models train one at a time.)
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import warm_process
from stress.harness import STRESS, forked
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fp8_backends
from fp8_backends.states import levels

AO = "ao:tensorwise"
NATIVE = ("native:delayed", "native:blockwise", "msamp:O3")
REPETITIONS = 2 * STRESS
ONCE = {kind: 1 for kind in ("fprop", "dgrad", "wgrad")} | {"recomputed": 0}


class Training:
    """A small model with its optimizer and its data, prepared for a backend."""

    def __init__(self, backend: str = AO, seed: int = 0, compiled: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.batches = [torch.randn(16, 32, generator=generator) for _ in range(8)]
        self.model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.normal_(std=0.1, generator=generator)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.model, self.optimizer = fp8_backends.prepare(self.model, optimizer, backend)
        self.run: Callable = self.model
        if compiled:
            self.run = torch.compile(self.model, backend="aot_eager")
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
        assert not profiles()


def profiles() -> bool:
    return torch._C._autograd._profiler_enabled()


def at_once(*functions: Callable[[], Any]) -> list[Any]:
    """Return the results of functions started together, each in a separate thread."""
    together = threading.Barrier(len(functions))

    def begin(function: Callable[[], Any]) -> Any:
        together.wait()
        return function()

    with ThreadPoolExecutor(len(functions)) as threads:
        return [*threads.map(begin, functions)]


def train_ao(seed: int = 0) -> None:
    Training(seed=seed).train().check_proven()


def train_two(**options: Any) -> None:
    for training in at_once(Training(**options).train, Training(seed=1, **options).train):
        training.check_proven()


@pytest.fixture(autouse=True)
def no_profiler():
    yield
    assert not profiles(), "a profiler was left running"


# Threads


def test_two_models_train_in_two_threads():
    for _ in range(REPETITIONS):
        train_two()


@pytest.mark.nightly
def test_two_compiled_models_train_in_two_threads():
    train_two(compiled=True)


def test_models_prepared_and_given_up_in_threads():
    def work(seed: int) -> None:
        train_ao(seed)
        Training(seed=seed).loss()  # dropped in the middle of its step

    for seed in range(REPETITIONS):
        at_once(*(lambda number=seed + thread: work(number) for thread in range(4)))
        gc.collect()


@pytest.mark.parametrize("backend", NATIVE)
def test_native_models_in_threads_have_their_bits_alone(backend):
    alone = [Training(backend, seed).train(6) for seed in (0, 1)]
    together = at_once(*(lambda s=seed: Training(backend, s).train(6) for seed in (0, 1)))
    for one, other in zip(alone, together, strict=True):
        assert one.losses == other.losses
        states = one.model.state_dict().values(), other.model.state_dict().values()
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(*states, strict=True))
        audits = [fp8_backends.audit(each.model).products for each in (one, other)]
        assert audits[0] == audits[1]


def test_steps_may_run_in_another_thread_than_forwards():
    training = Training()
    with ThreadPoolExecutor(1) as stepping:
        for _ in range(3):
            training.loss().backward()
            stepping.submit(training.step).result()
    training.check_proven()


@pytest.mark.parametrize("place", ["forward", "backward", "in between"])
def test_a_model_trains_on_after_its_thread_died(place):
    def fail(*_: Any) -> None:
        raise FloatingPointError

    def die() -> None:
        if place == "forward":
            training.model[2].register_forward_hook(fail)
        loss = training.loss()
        if place == "backward":
            loss.register_hook(fail)
            loss.backward()
        fail()

    training = Training()
    with pytest.raises(FloatingPointError):
        at_once(die)
    training.model[2]._forward_hooks.clear()
    training.optimizer.zero_grad()
    at_once(lambda: training.train(4))
    training.check_proven()
    train_ao(1)


def test_a_model_dropped_by_another_thread_lets_its_own_train():
    held = [Training()]
    held[0].loss().backward()
    at_once(lambda: (held.clear(), gc.collect()))
    train_ao(1)


def test_a_model_is_proven_while_another_thread_compiles(monkeypatch):
    """PyTorch sets one flag for all threads while it compiles."""
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    Training().train(1).check_proven()


def test_step_begun_in_another_thread_ends_with_that_thread():
    """PyTorch's profiler ends with its thread, and leaves no hooks of layers."""
    training = Training()
    at_once(training.loss)
    assert not any(layer._forward_pre_hooks for layer in training.model)


def test_a_model_dropped_inside_a_backward_leaves_no_profiler_on():
    """Python collects garbage anywhere; a profiler stopped there would stay on."""
    held = [Training()]
    held[0].loss()
    loss = Training("native:dynamic").loss()
    loss.register_hook(lambda _: (held.clear(), gc.collect()) and None)
    loss.backward()
    train_ao(1)


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O4"])
def test_gradients_of_one_model_add_up_over_threads(level, monkeypatch):
    """One thread accumulates while another, slowed down, stores the gradient in FP8."""
    training, alone = (Training(f"native:dynamic+msamp:{level}") for _ in range(2))
    quantize, casting = levels.quantize, threading.Event()

    def slow(*args, **kwargs):
        gradient = quantize(*args, **kwargs)
        casting.set()
        time.sleep(0.1)
        return gradient

    monkeypatch.setattr(levels, "quantize", slow)
    first, second = training.loss(), training.loss()
    at_once(first.backward, lambda: casting.wait() and second.backward())
    monkeypatch.undo()
    for _ in range(2):
        alone.loss().backward()
    for p, q in zip(training.model.parameters(), alone.model.parameters(), strict=True):
        assert (p.grad + 0 - q.grad).norm() < 0.05 * q.grad.norm()


# A user's profiler


def users_profiler() -> profile:
    return profile(activities=[ProfilerActivity.CPU])


def test_user_profiles_in_another_thread():
    def watch() -> None:
        while not done.is_set():
            with users_profiler() as profiler:
                torch.ones(8).add_(1)
            assert any(event.name == "aten::add_" for event in profiler.events())

    def train() -> Training:
        try:
            return Training().train()
        finally:
            done.set()

    for _ in range(REPETITIONS):
        done = threading.Event()
        at_once(train, watch)[0].check_proven()


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_proof_gives_way_to_a_users_profiler_within_a_step(compiled):
    """It starts between the backward and the step, eager, and between two steps, compiled."""
    training = Training(compiled=compiled)
    training.loss().backward()
    if compiled:
        training.step()
    assert profiles()
    with users_profiler() as profiler:
        training.step()
        training.train(1)
    assert any("mm" in event.key for event in profiler.key_averages())
    training.train().check_proven()


# Processes


@pytest.mark.nightly
def test_processes_forked_after_threads_train():
    train_two()
    for _ in range(REPETITIONS):
        forked(train_ao)


@pytest.mark.nightly
def test_process_forked_within_a_step_trains_as_well():
    """As a data loader forks: the profile stays with its process."""

    def inside() -> None:
        assert not profiles()
        training.train().check_proven()
        train_ao(1)

    training = Training()
    training.loss().backward()
    assert profiles()
    forked(inside)
    training.step()
    training.check_proven()


def spawn_after_threads() -> None:
    train_two()
    process = multiprocessing.get_context("spawn").Process(target=train_ao)
    process.start()
    process.join()
    assert process.exitcode == 0


def launch_after_threads() -> None:
    from accelerate import notebook_launcher

    train_two()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    notebook_launcher(train_rank, (), num_processes=2, use_port=str(port))


def train_rank() -> None:
    from stress.harness import Training as OfAccelerate

    run = OfAccelerate(AO)
    assert run.accelerator.num_processes == 2
    for number in range(3):
        run.step(number)
    products = fp8_backends.audit(run.bare[0]).products
    assert products["2"] == products["4"] == ONCE, products


def leave_daemons() -> None:
    """End the interpreter while one thread is in its first step, and another between two steps."""

    def wait(training: Training, in_step: bool) -> None:
        training.loss().backward()
        if not in_step:
            training.step()
        begun.wait()
        threading.Event().wait()

    begun = threading.Barrier(3)
    for in_step in (False, True):
        threading.Thread(target=wait, args=(Training(), in_step), daemon=True).start()
    begun.wait()
    train_ao()


CASES = (leave_daemons, launch_after_threads, spawn_after_threads)
"""The others load all libraries again."""


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES[: 1 if STRESS == 1 else None])
def test_threads_in_a_process_of_their_own(case):
    here = os.pathsep.join(path for path in sys.path if path)
    ended = warm_process.run(__file__, case.__name__, env=os.environ | {"PYTHONPATH": here})
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Exception ignored" not in ended.stderr and "Fatal" not in ended.stderr


if __name__ == "__main__":
    globals()[sys.argv[1]]()
