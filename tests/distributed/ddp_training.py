"""Small models, data for every rank, and comparisons between ranks, for the checks of DDP."""

from __future__ import annotations

import copy
import hashlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fp8_backends
from fp8_backends.convert.conversion import prepared_roots
from fp8_backends.states.levels import cast_gradient, swap_gradient_hook
from fp8_backends.tensors.scaled_tensor import ScaledTensor

WIDTH = 64
LARGEST_ERROR = 0.04
"""Relative L2 error of a mean sent in FP8: two roundings to E4M3, 0.026 each, are 0.037."""


def mlp(width: int = WIDTH, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(width, width, bias), nn.GELU(), nn.Linear(width, width, bias), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(width, width))


def wrapped(spec, model: nn.Module, lr: float = 5e-3, bucket_mb: float = 0.01, **options):
    """Return (ddp, optimizer), prepared as documented for a loop without Accelerate."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr)
    fp8_backends.prepare(model, None, spec)
    ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_mb, **options)
    return fp8_backends.prepare(ddp, optimizer, spec)


class Alone:
    """Hook gradients of a model trained by each rank alone on all data."""

    reduces = True

    def __call__(self, weight: torch.Tensor) -> None:
        cast_gradient(weight)


def alone(spec, model: nn.Module, lr: float = 5e-3):
    """Return (model, optimizer), trained by each rank alone."""
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    fp8_backends.prepare(model, optimizer, spec)
    for weight in scaled(model).values():
        swap_gradient_hook(weight, Alone())
    return model, optimizer


def batch(seed: int, rows: int = 32, width: int = WIDTH) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a small regression, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    teacher = torch.randn(width, width, generator=torch.Generator().manual_seed(99)) / width**0.5
    x = torch.randn(rows, width, generator=generator)
    return x, torch.tanh(x @ teacher)


def share(x: torch.Tensor) -> torch.Tensor:
    """This rank's rows."""
    return x[dist.get_rank() :: dist.get_world_size()]


def mse(model: nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(data[0]), data[1])


def mine(seed: int, rows: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(map(share, batch(seed, rows)))


def step(ddp, optimizer, seed: int, everyone: bool = True) -> float:
    """Take one step on this rank's share; return the mean loss over ranks if all of them step."""
    loss = mse(ddp, mine(seed))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().clone()
    if everyone:
        dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def scaled(model: nn.Module) -> dict[str, ScaledTensor]:
    return {name: p for name, p in model.named_parameters() if isinstance(p, ScaledTensor)}


# Equality on all ranks


def digest(tensor: torch.Tensor) -> str:
    parts = (
        [tensor.codes, tensor.scale_inv] if isinstance(tensor, ScaledTensor) else [tensor.detach()]
    )
    as_bytes = [part.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for part in parts]
    return hashlib.sha256(b"|".join(as_bytes)).hexdigest()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, str]:
    """Return digests of all parameters, gradients, masters, residuals, states and scales of this
    rank."""
    found = {}
    for name, p in model.named_parameters():
        states = optimizer.state.get(p, {}) if optimizer is not None else {}
        values = {"": p, "grad": p.grad, "rest": getattr(p, "rest", None), **states}
        found |= {
            f"{name} {key}": digest(value) for key, value in values.items() if value is not None
        }
    for _, root, prepared in prepared_roots(model):
        for index, state in enumerate(prepared.compute.scaling_buffers(root)):
            found[f"scaling state {index}"] = digest(state)
    return found


def assert_equal_on_all_ranks(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Compare every byte, except optimizer states and rests sharded by O3 and O4."""
    held = everything(model, None if getattr(optimizer, "fp8_owners", None) else optimizer)
    if getattr(optimizer, "fp8_owners", None):
        held = {name: value for name, value in held.items() if not name.endswith(" rest")}
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, held)
    differing = {
        name
        for each in every
        for name in {*each, *every[0]}
        if each.get(name) != every[0].get(name)
    }
    assert not differing, sorted(differing)


# Gradients against exact means


def twin_of(ddp: nn.Module) -> nn.Module:
    """Copy the model without DDP: gradients stay on this rank and in FP32, since copies have no
    gradient hooks."""
    model = ddp.module if isinstance(ddp, DistributedDataParallel) else ddp
    return copy.deepcopy(model)


def assert_mean_gradients(ddp: nn.Module, twin: nn.Module, bound: float = LARGEST_ERROR) -> float:
    """Compare each gradient of a converted layer with the mean of the twins' gradients. Return the
    largest relative error."""
    worst = 0.0
    for (name, p), other in zip(ddp.module.named_parameters(), twin.parameters(), strict=True):
        given = torch.tensor([float(other.grad is not None)])
        dist.all_reduce(given)
        if not given or p.dim() < 2:
            assert p.grad is None or p.dim() < 2, f"{name} was used on no rank and has a gradient"
            continue
        exact = (
            other.grad.double()
            if other.grad is not None
            else torch.zeros(p.shape, dtype=torch.float64)
        )
        dist.all_reduce(exact)
        exact /= dist.get_world_size()
        values = p.grad.dequantize() if isinstance(p.grad, ScaledTensor) else p.grad
        error = ((values - exact).norm() / exact.norm()).item()
        assert error <= bound, (name, error)
        worst = max(worst, error)
    return worst


# Counting


class Traffic:
    """Count calls of the Python collectives of `torch.distributed`, and their bytes, in a
    context."""

    NAMES = (
        *("all_to_all_single", "all_gather_single", "all_gather_into_tensor", "all_reduce"),
        *("reduce_scatter_single", "reduce_scatter_tensor"),
    )

    def __enter__(self) -> Traffic:
        self.calls: list[tuple[str, int]] = []
        self.before = {name: getattr(dist, name) for name in self.NAMES if hasattr(dist, name)}
        for name, original in self.before.items():
            setattr(dist, name, self._counted(name, original))
        return self

    def __exit__(self, *error) -> None:
        for name, original in self.before.items():
            setattr(dist, name, original)

    def _counted(self, name, original):
        place = 0 if name == "all_reduce" else 1

        def call(*args, **kwargs):
            named = next(
                (kwargs[key] for key in ("tensor", "input", "input_tensor") if key in kwargs), None
            )
            given = args[place] if len(args) > place else named
            self.calls.append((name, given.numel() * given.element_size()))
            return original(*args, **kwargs)

        return call

    def count(self, kind: str) -> int:
        """Return the number of collectives with names beginning with `kind`."""
        return sum(called.startswith(kind) for called, _ in self.calls)

    def bytes(self, kind: str) -> int:
        """Return the bytes passed to them by this rank."""
        return sum(size for called, size in self.calls if called.startswith(kind))

    def sent(self) -> float:
        """Return the bytes sent by this rank to others."""
        size = dist.get_world_size()
        shares = {"all_to_all_single": (size - 1) / size, "all_reduce": 2 * (size - 1) / size}
        return sum(shares.get(name, size - 1) * numel for name, numel in self.calls)
