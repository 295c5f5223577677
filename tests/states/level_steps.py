"""Small models prepared at a level, and a few steps with them: shared by the tests of this
folder."""

import torch
from torch import nn

import fp8_backends
from fp8_backends.tensors.scaled_tensor import ScaledTensor

LEVELS = ("O1", "O2", "O3", "O4")
STORED = dict(zip(LEVELS, 2 * [torch.float16] + 2 * [torch.float8_e4m3fn], strict=True))
ERRORS = {"O1": (11, 28), "O2": (11, 28), "O3": (11, 28), "O4": (12, 13)}
"""The guide's table: 2**-first of a value of at least 2**-second of the amax, and the same error
for smaller ones."""
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, 1e-3, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, 1e-3, weight_decay=0.1),
}


def mlp(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 64, bias=False)]
    return nn.Sequential(*layers).to(dtype)


def batch(seed: int, rows: int = 32) -> torch.Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed))


def prepared(
    level: str, make_optimizer=OPTIMIZERS["adamw"], model: nn.Module | None = None, **fields
) -> tuple:
    model = model or mlp()
    spec = {"backend": f"msamp:{level}", **fields}
    return fp8_backends.prepare(model, make_optimizer(model.parameters()), spec)


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    x = batch(seed).to(next(model.parameters()).dtype)
    return (model(x) - x).float().square().mean()


def train(model: nn.Module, optimizer, seeds) -> list[float]:
    losses = []
    for seed in seeds:
        loss = loss_of(model, seed)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_rounded(found: torch.Tensor, values: torch.Tensor, level: str) -> None:
    """Assert values rounded as a level stores them."""
    bits, least = ERRORS[level]
    error = (found.double() - values.double()).abs()
    assert (
        error
        <= 2.0**-bits * values.double().abs().clamp(min=2.0**-least * values.abs().max().item())
    ).all()


def assert_equal_states(a, b) -> None:
    """Assert equal numbers to the bit in equal forms. Scales are powers of two: the same numbers
    get a finer scale from values rounded down to a power of two."""
    for p, q in zip(parameters_of(a), parameters_of(b), strict=True):
        assert a.state[p].keys() == b.state[q].keys()
        for name, value in a.state[p].items():
            other = b.state[q][name]
            assert type(value) is type(other), name
            if isinstance(value, ScaledTensor):
                assert (value.codes.dtype, value.block_size) == (
                    other.codes.dtype,
                    other.block_size,
                ), name
                assert torch.equal(value.exact(torch.float32), other.exact(torch.float32)), name
            else:
                assert torch.equal(value, other), name


def parameters_of(optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def assert_same(ours: tuple, theirs: tuple) -> None:
    """Assert equal weights and states of two (model, optimizer), to the bit."""
    for (name, value), other in zip(
        values_of(ours[0]).items(), values_of(theirs[0]).values(), strict=True
    ):
        assert torch.equal(value, other), name
    assert_equal_states(ours[1], theirs[1])
