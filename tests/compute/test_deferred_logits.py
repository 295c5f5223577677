"""Defer the logits of a head: losses need none, and every other reader gets them unchanged."""

from __future__ import annotations

import copy
import io
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fp8_backends.convert.fused_head.deferred_logits import DeferredLogits, HighPrecisionHead
from fp8_backends.errors import FP8BackendError

HIDDEN, VOCABULARY, SEQUENCES, LENGTH = 32, 500, 2, 150


class Run:
    """Hold a head, deferring or not, after one forward."""

    def __init__(self, defers: bool, autocast: bool = True) -> None:
        torch.manual_seed(0)
        self.head = (HighPrecisionHead if defers else nn.Linear)(HIDDEN, VOCABULARY)
        self.x = torch.randn(SEQUENCES, LENGTH, HIDDEN, requires_grad=True)
        self.labels = torch.randint(VOCABULARY, (SEQUENCES, LENGTH))
        self.labels[0, :50] = -100
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            self.logits = self.head(self.x)

    def results(self, use) -> list[torch.Tensor]:
        """Return `use(logits, labels)` and its gradients."""
        loss = use(self.logits, self.labels)
        loss.backward()
        return [loss.detach(), self.x.grad, self.head.weight.grad, self.head.bias.grad]


def read(logits) -> bool:
    return logits.pending.output is not None


def of_transformers(logits, labels):
    """Compute `ForCausalLMLoss` with Trainer's count of items over microbatches."""
    labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    loss = F.cross_entropy(logits.float().view(-1, VOCABULARY), labels.view(-1), reduction="sum")
    return loss / torch.tensor(77)


def of_a_loop(logits, labels):
    shifted = logits[:, :-1].contiguous().float().reshape(-1, VOCABULARY)
    return nn.CrossEntropyLoss(label_smoothing=0.1)(shifted, labels[:, 1:].reshape(-1))


def of_gemma(logits, labels):
    return of_transformers(torch.tanh(logits / 5.0) * 5.0, labels)


def of_granite(logits, labels):
    return of_transformers(logits / 8.0, labels)


FUSED = [of_transformers, of_a_loop, of_gemma, of_granite]


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("use", FUSED)
def test_cross_entropy_needs_no_logits(use, autocast):
    run = Run(True, autocast)
    found, expected = run.results(use), Run(False, autocast).results(use)
    assert isinstance(run.logits, DeferredLogits) and not read(run.logits)
    # gradients of the logits are rounded to bf16 before they are divided by the number of tokens,
    # and not after
    for mine, torchs in zip(found, expected, strict=True):
        assert (mine - torchs).norm() <= (2**-7 if autocast else 1e-6) * torchs.norm()


def of_log_probabilities(logits, labels):
    return F.nll_loss(F.log_softmax(logits.float(), -1).view(-1, VOCABULARY), labels.view(-1))


def with_class_weights(logits, labels):
    return F.cross_entropy(
        logits.float().view(-1, VOCABULARY), labels.view(-1), torch.arange(VOCABULARY) + 1.0
    )


def after_a_penalty(logits, labels):
    return logits.float().logsumexp(-1).square().mean() + of_transformers(logits, labels)


def with_a_hook(logits, labels):
    logits.register_hook(lambda gradient: 2 * gradient)
    return of_transformers(logits, labels)


def changed_in_place(logits, labels):
    before = logits.float()
    logits.mul_(2)
    return of_transformers(logits, labels) + of_transformers(before, labels)


def masked(logits, labels):
    logits = logits.float()
    logits[..., 7] = -1e4
    return of_transformers(logits, labels)


class _Doubled(torch.autograd.Function):
    """Hide a function in C++: only its node tells it apart from PyTorch's own."""

    @staticmethod
    def forward(ctx, logits):
        return logits * 2

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


ORDINARY = {
    "log probabilities": of_log_probabilities,
    "class weights": with_class_weights,
    "penalty": after_a_penalty,
    "hook": with_a_hook,
    "change in place": changed_in_place,
    "mask": masked,
    "unreduced": lambda y, labels: (
        F.cross_entropy(y.float().view(-1, VOCABULARY), labels.view(-1), reduction="none")
        .square()
        .sum()
    ),
    "soft targets": lambda y, labels: F.cross_entropy(
        y.float().view(-1, VOCABULARY), torch.full((labels.numel(), VOCABULARY), 0.002)
    ),
    "channels": lambda y, labels: F.cross_entropy(y.float().transpose(1, 2), labels),
    "some words": lambda y, labels: F.cross_entropy(
        y[..., :300].float().reshape(-1, 300), labels.clamp(-100, 299).view(-1)
    ),
    "all words": lambda y, labels: of_transformers(y.narrow(-1, 0, VOCABULARY), labels),
    "no tokens": lambda y, labels: F.cross_entropy(
        y[:, :0].reshape(-1, VOCABULARY), labels[:, :0].reshape(-1), reduction="sum"
    ),
    "function": lambda y, labels: (
        _Doubled.apply(y).float().logsumexp(-1).mean() + of_log_probabilities(y, labels)
    ),
}


@pytest.mark.parametrize("use", ORDINARY.values(), ids=ORDINARY)
def test_other_readers_get_exact_logits(use):
    run = Run(True)
    found, expected = run.results(use), Run(False).results(use)
    assert read(run.logits)
    assert all(torch.equal(mine, torchs) for mine, torchs in zip(found, expected, strict=True))


def penalty_last(logits, labels):
    return of_transformers(logits, labels) + logits.float().square().mean()


def compiled(use, mark=()):
    """Compile; the graph breaks at the logits."""
    forward = torch.compile(use, backend="eager")
    return pytest.param(forward, use, marks=mark, id=f"compiled {use.__name__}")


@pytest.mark.parametrize(
    "use,reference",
    [
        (penalty_last, penalty_last),
        compiled(of_transformers),
        compiled(after_a_penalty, pytest.mark.nightly),
        compiled(with_class_weights, pytest.mark.nightly),
    ],
)
def test_penalty_and_compiled_losses_have_same_gradients(use, reference):
    for mine, torchs in zip(Run(True).results(use), Run(False).results(reference), strict=True):
        assert (mine - torchs).norm() <= 2**-7 * torchs.norm()


def saved(logits):
    file = io.BytesIO()
    torch.save(logits.detach(), file)
    file.seek(0)
    return torch.load(file)


READS = {
    "argmax": lambda y: y.argmax(-1),
    "numpy": lambda y: torch.from_numpy(y.detach().float().numpy()),
    "tolist": lambda y: torch.tensor(y.tolist()),
    "last token": lambda y: y[:, -1],
    "mask": lambda y: y[torch.ones(SEQUENCES, LENGTH, dtype=torch.bool)],
    "iteration": lambda y: next(iter(y)),
    "data": lambda y: y.data + 0,
    "detach": lambda y: y.detach() + 0,
    "comparison": lambda y: y > 0,
    "cat": lambda y: torch.cat([y, y]),
    "float64": lambda y: y.double(),
    "integers": lambda y: y.long(),
    "saved": saved,
    "deepcopy": lambda y: copy.deepcopy(y.detach()),
    "transposed": lambda y: y.mT + 0,
}


@pytest.mark.parametrize("name", READS)
def test_reads_return_ordinary_logits(name):
    found, expected = Run(True).logits, Run(False).logits
    found, expected = READS[name](found), READS[name](expected)
    assert found.dtype == expected.dtype and torch.equal(found + 0, expected)
    assert str(Run(True).logits.detach()) == str(Run(False).logits.detach())


def test_metadata_needs_no_logits():
    logits = Run(True).logits
    assert (logits.shape, logits.dtype, logits.device.type) == (
        (SEQUENCES, LENGTH, VOCABULARY),
        torch.bfloat16,
        "cpu",
    )
    assert (
        logits.requires_grad
        and logits.grad_fn is not None
        and logits.is_contiguous()
        and len(logits) == SEQUENCES
    )
    assert isinstance(logits.float(), DeferredLogits) and logits.float().dtype == torch.float32
    assert not read(logits)


def test_logits_of_other_weights_are_refused():
    run = Run(True)
    loss = of_transformers(run.logits, run.labels)
    loss.backward()
    with torch.no_grad():
        run.head.weight.add_(1)
    with pytest.raises(FP8BackendError, match="Read logits before optimizer.step"):
        run.logits.argmax()


@pytest.mark.parametrize(
    "register", ["register_full_backward_hook", "register_full_backward_pre_hook"]
)
def test_backward_hook_of_head_runs(register):
    head, seen = HighPrecisionHead(HIDDEN, VOCABULARY), []
    getattr(head, register)(lambda *gradients: seen.append(gradients[-1][0].shape))
    x = torch.randn(8, HIDDEN, requires_grad=True)
    F.cross_entropy(head(x), torch.zeros(8, dtype=torch.int64)).backward()
    assert seen == [(8, VOCABULARY)]


@pytest.mark.parametrize("mode", ["evaluation", "no gradients", "frozen"])
def test_head_is_ordinary_outside_training(mode):
    head, x = HighPrecisionHead(HIDDEN, VOCABULARY), torch.randn(4, HIDDEN)
    if mode == "evaluation":
        head.eval()
    if mode == "frozen":
        head.requires_grad_(False)
    with torch.set_grad_enabled(mode != "no gradients"):
        assert type(head(x)) is torch.Tensor


def test_flop_meter_hook_runs_with_and_without_logits():
    for use in (of_transformers, of_log_probabilities):
        run, seen = Run(True), []
        run.logits.when_backward(seen.append)
        run.results(use)
        assert len(seen) == 1


class Largest(TorchDispatchMode):
    """Record the largest number of elements of any result."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        real = [
            t
            for t in tree_leaves(result)
            if isinstance(t, torch.Tensor) and type(t) is not DeferredLogits
        ]
        self.elements = max([self.elements, *(t.numel() for t in real if t.device.type != "meta")])
        return result


@pytest.mark.parametrize("use", FUSED)
def test_no_tensor_of_logits_size_is_allocated(use):
    run, largest = Run(True), Largest()
    with largest:
        run.results(use)
    assert largest.elements == 128 * VOCABULARY  # rows of a chunk; there are 300 tokens
    with largest:
        Run(False).results(use)
    assert largest.elements >= (LENGTH - 1) * SEQUENCES * VOCABULARY


def test_memory_is_freed_with_the_output():
    run = Run(True)
    pending = weakref.ref(run.logits.pending)
    run.results(of_transformers)
    del run.logits
    assert pending() is None
