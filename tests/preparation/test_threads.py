"""Train in threads: the cases of `benchmarks/reliability/threads.py`; the benchmark adds
processes."""

import gc
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import warm_process

RELIABILITY = Path(__file__).resolve().parents[2] / "benchmarks" / "reliability"
sys.path.append(str(RELIABILITY))
import threads as cases  # noqa: E402

from fp8_backends.states import levels  # noqa: E402


@pytest.fixture(autouse=True)
def no_profiler():
    yield
    cases.check_no_profiler()


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        cases.two_models,
        cases.prepared_and_dropped,
        cases.users_profiler_elsewhere,
        cases.step_elsewhere,
        cases.threads_that_die,
        cases.dropped_elsewhere,
        cases.native_as_alone,
    ],
)
def test_threads_train_independently(case):
    case(2)


def test_user_profiler_may_start_within_a_step():
    cases.users_profiler_in_the_middle(1, forms=(False,))


def test_a_model_is_proven_while_another_thread_compiles(monkeypatch):
    """PyTorch sets one flag for all threads while it compiles."""
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    cases.Training().train(1).check_proven()


def test_step_begun_in_another_thread_ends_with_that_thread():
    """PyTorch's profiler ends with its thread, and leaves no hooks of layers."""
    training = cases.Training()
    cases.in_thread(training.loss)
    assert not any(layer._forward_pre_hooks for layer in training.model)


def test_a_model_dropped_inside_a_backward_leaves_no_profiler_on():
    """Python collects garbage anywhere; a profiler stopped there would stay on."""
    held = [cases.Training()]
    held[0].loss()
    loss = cases.Training("native:dynamic").loss()
    loss.register_hook(lambda _: (held.clear(), gc.collect()) and None)
    loss.backward()
    cases.train_ao(1)


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O4"])
def test_gradients_of_one_model_add_up_over_threads(level, monkeypatch):
    """One thread accumulates while another, slowed down, stores the gradient in FP8."""
    training, alone = (cases.Training(f"native:dynamic+msamp:{level}") for _ in range(2))
    quantize, casting = levels.quantize, threading.Event()

    def slow(*args, **kwargs):
        gradient = quantize(*args, **kwargs)
        casting.set()
        time.sleep(0.1)
        return gradient

    monkeypatch.setattr(levels, "quantize", slow)
    first, second = training.loss(), training.loss()
    cases.at_once(first.backward, lambda: casting.wait() and second.backward())
    monkeypatch.undo()
    for _ in range(2):
        alone.loss().backward()
    for p, q in zip(training.model.parameters(), alone.model.parameters(), strict=True):
        assert (p.grad + 0 - q.grad).norm() < 0.05 * q.grad.norm()


@pytest.mark.nightly
def test_processes_and_threads():
    # a busy machine takes minutes; the program ends a hanging case, and prints its stacks
    done = warm_process.run(str(RELIABILITY / "threads.py"), "--quick", timeout=900)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("holds") == len(cases.CASES) - len(cases.SLOW)
