"""Share a model, data, an Accelerator and assertions between the runs of Accelerate's features, on
one process or several."""

from __future__ import annotations

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn

import fp8_backends
from fp8_backends.tensors.scaled_tensor import ScaledTensor

WIDTH = 32


class Net(nn.Module):
    """[batch, 32] -> [batch, 16]: two blocks, each a Linear and a LayerNorm, and a Linear head;
    three layers in FP8."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Sequential(nn.Linear(WIDTH, 64), nn.LayerNorm(64), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU())
        self.last = nn.Linear(64, 16)

    def forward(self, x):
        return self.last(self.second(self.first(x)))


LAYERS = 3


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def accelerator(backend: str, *handlers, **options) -> Accelerator:
    """Return a new Accelerator with this backend, in the current process group."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    fields = options.pop("fields", {})
    recipe = fp8_backends.FP8RecipeKwargs(backend=backend, **fields)
    made = Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe, *handlers], **options)
    assert made.num_processes == ranks()
    return made


def batch(step: int, rows: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """This process's inputs and targets of a step; other processes have others."""
    generator = torch.Generator().manual_seed(100 * step + rank())
    teacher = torch.randn(WIDTH, 16, generator=torch.Generator().manual_seed(99)) / 4
    x = torch.randn(rows, WIDTH, generator=generator)
    return x, torch.tanh(x @ teacher)


def loss_of(model: nn.Module, step: int, rows: int = 16) -> torch.Tensor:
    x, y = batch(step, rows)
    return nn.functional.mse_loss(model(x), y)


def step(acc, model, optimizer, index: int, **backward) -> float:
    loss = loss_of(model, index)
    acc.backward(loss, **backward)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def prepared(acc, optimizer=torch.optim.AdamW, **options):
    model = Net()
    return acc.prepare(model, optimizer(model.parameters(), **{"lr": 5e-3, **options}))


def trained(backend: str, steps: int = 2, **options):
    """(accelerator, model, optimizer) after some steps."""
    acc = accelerator(backend, **options)
    model, optimizer = prepared(acc)
    for index in range(steps):
        step(acc, model, optimizer, index)
    return acc, model, optimizer


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the plain values of all parameters: FP8 values for weights with a remote
    master."""
    found = {}
    for name, p in model.named_parameters():
        p = p.detach()
        read = (
            (p.dequantize if p.shared_out else p.exact) if isinstance(p, ScaledTensor) else p.clone
        )
        found[name.removeprefix("module.")] = read()
    return found


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """The plain gradients of all parameters, copied."""
    found = {name.removeprefix("module."): p.grad.detach() for name, p in model.named_parameters()}
    return {
        name: g.dequantize() if isinstance(g, ScaledTensor) else g.clone()
        for name, g in found.items()
    }


def relative_error(value: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative error in the L2 norm."""
    return ((value.float() - expected.float()).norm() / expected.float().norm()).item()


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def assert_moved(model: nn.Module, before: dict[str, torch.Tensor]) -> None:
    still = [name for name, value in values(model).items() if torch.equal(value, before[name])]
    assert not still, f"did not train: {still}"


def assert_equal_everywhere(model: nn.Module) -> None:
    """All processes have the same weights."""
    if ranks() > 1:
        every = [None] * ranks()
        dist.all_gather_object(every, values(model))
        assert all(same(each, every[0]) for each in every), "the ranks have drifted apart"


def differ_between_ranks(model: nn.Module) -> bool:
    every = [None] * ranks()
    dist.all_gather_object(every, values(model))
    return not same(every[0], every[-1])


def assert_fp8(model: nn.Module, layers: int = LAYERS) -> None:
    products = fp8_backends.audit(model).products
    ran = [name for name, counts in products.items() if counts["fprop"] and counts["wgrad"]]
    assert len(ran) == layers, products


def assert_trained(acc: Accelerator, model: nn.Module, before: dict[str, torch.Tensor]) -> None:
    """Assert that every parameter moved by FP8 products, equally on all processes."""
    assert_moved(model, before)
    assert_equal_everywhere(model)
    assert_fp8(acc.unwrap_model(model))
