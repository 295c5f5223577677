"""Check the surroundings of tensor-parallel products: TorchAO's casts, levels, states,
Accelerate."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from engines import engine_arguments, start_engine
from fsdp2_training import on_all_ranks, same_on_all_ranks
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import fp8_backends
from fp8_backends.convert.conversion import prepared_roots
from fp8_backends.errors import FP8BackendError, RecipeError
from fp8_backends.preparation.ranks import scaling_buffers
from fp8_backends.states.levels import expect_equal_gradients
from fp8_backends.states.sharding import first_element
from fp8_backends.tensors.scaled_tensor import ScaledTensor
from fp8_backends.tensors.sharded_tensor import local_part
from fp8_backends.watch import guard

WIDTH, INNER = 64, 128


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, INNER),
            nn.Linear(INNER, WIDTH),
        )

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Map [batch, WIDTH] to the same shape: ranks share the layers of a block, and each has one
    whole layer."""

    _no_split_modules = ["Block"]  # noqa: RUF012, transformers' name for what FSDP wraps

    def __init__(self) -> None:
        super().__init__()
        self.block, self.mix = Block(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.mix(self.block(x))


def split(model: nn.Module, mesh=None) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if mesh is None else mesh
    return parallelize_module(
        model, mesh, {"block.up": ColwiseParallel(), "block.down": RowwiseParallel()}
    )


def both(spec) -> tuple[tuple[Net, torch.optim.Optimizer], ...]:
    """Return one model with its optimizer on one process and on all ranks."""
    torch.manual_seed(0)
    alone = Net()
    pair = []
    for model in (alone, split(copy.deepcopy(alone))):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        fp8_backends.prepare(model, optimizer, spec)
        expect_equal_gradients(model)
        pair.append((model, optimizer))
    return tuple(pair)


def train(
    model,
    optimizer,
    steps: int,
    seed: int = 0,
    rows: slice = slice(None),
    backward=torch.Tensor.backward,
):
    losses, x = [], torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(seed))[rows]
    for _ in range(steps):
        loss = (model(x) - x.flip(1)).square().mean()
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def states_of(model) -> list[torch.Tensor]:
    return scaling_buffers(prepared_roots(model))


# TorchAO


class Products(TorchDispatchMode):
    """Record the codes read by FP8 products."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func == torch.ops.aten._scaled_mm.default:
            self.codes += [each.view(torch.uint8) for each in args[:2]]
        return func(*args, **(kwargs or {}))


def check_torchao_codes_match_one_process():
    """Compare both operands of all nine products; the scales follow from the same amaxes."""
    for spec in ("ao:tensorwise", "ao:rowwise"):
        seen, results = [], []
        for model, _ in both(spec):
            model.block.norm, model.block.forward = (
                None,
                lambda x, b=model.block: b.down(F.relu(b.up(x))),
            )
            x = torch.randn(
                32, WIDTH, generator=torch.Generator().manual_seed(1), requires_grad=True
            )
            with Products() as products:
                y = model.block.forward(x)
                y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)))
            seen.append(products.codes)
            results.append((y.detach(), x.grad))
        for whole, part in zip(*seen, strict=True):
            for dim, (size, all_of_it) in enumerate(zip(part.shape, whole.shape, strict=True)):
                whole = (
                    whole.narrow(dim, dist.get_rank() * size, size) if size < all_of_it else whole
                )
            assert torch.equal(part, whole), spec
        # TorchAO rounds rowwise products to bf16, and so summands
        bound = 1e-6 if spec == "ao:tensorwise" else 0.01
        for alone, together in zip(*results, strict=True):
            assert (alone - together).abs().max() <= bound * alone.abs().max(), spec


# Levels and states


def check_levels_store_parts_with_scale_of_whole_weight():
    figures = {}
    for level in ("O1", "O2"):
        spec = {"backend": f"native:dynamic+msamp:{level}", "rounding": "nearest"}
        (alone, of_one), (together, optimizer) = both(spec)
        for name, dim in (("up", 0), ("down", 1)):
            whole, part = getattr(alone.block, name).weight, getattr(together.block, name).weight
            local = local_part(part)
            assert isinstance(part, DTensor) and torch.equal(local.scale_inv, whole.scale_inv)
            size = local.shape[dim]
            assert torch.equal(
                local.codes, whole.codes.narrow(dim, dist.get_rank() * size, size)
            ), (level, name)
        exact, shared = train(alone, of_one, 4), train(together, optimizer, 4)
        gap = max(abs(a / b - 1) for a, b in zip(exact, shared, strict=True))
        assert gap < 1e-5, (level, exact, shared)
        assert type(together.mix.weight) is ScaledTensor and same_on_all_ranks(
            together.mix.weight.exact()
        )
        assert same_on_all_ranks(local_part(together.block.down.weight).scale_inv)
        figures[level] = fp8_backends.audit(together, optimizer).bytes_per_element["total"]
        values = together.block.up.weight.full_tensor()
        fp8_backends.restore(together)
        assert type(local_part(together.block.up.weight)) is torch.Tensor
        assert torch.equal(together.block.up.weight.full_tensor(), values)
    third = WIDTH * WIDTH / (WIDTH * WIDTH + 2 * WIDTH * INNER)
    # per element of a rank, and a rank has all of one layer in three
    expected = {"O1": 11, "O2": 6}
    for level, found in figures.items():
        assert abs(found / (expected[level] * (third + (1 - third) / 2)) - 1) < 0.01, figures
    return figures


def check_refusals():
    torch.manual_seed(0)
    for spec, text in (
        ("msamp:O3", "O1 and O2 go with tensor parallelism"),
        ({"backend": "native", "fp8_params": True}, "fp8_params"),
    ):
        with pytest.raises(RecipeError, match=f"{text}.*2 ranks share layers"):
            fp8_backends.prepare(split(Net()), None, spec)
    model = Net()
    made_before = torch.optim.AdamW(model.parameters())  # would train only the replicated layers
    with pytest.raises(
        FP8BackendError,
        match=r"before ranks shared block.up.weight, block.up.bias, block.down.weight",
    ):
        fp8_backends.prepare(split(model), made_before, "native:dynamic")


# Accelerate


def prepared(spec, engine: str = "TP", **fields):
    """Return (accelerator, model, optimizer) as a user makes them."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    arguments = engine_arguments(engine, clip=0.0, microbatches=1)
    recipe = fp8_backends.FP8RecipeKwargs(backend=spec, **fields)
    acc = Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe], cpu=True, **arguments)
    start_engine(acc, engine, arguments)
    torch.manual_seed(0)
    model = split(Net(), acc.torch_device_mesh["tp"])
    model.tp_size = 2  # Accelerate asks for it
    return acc, *acc.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def check_guard_compares_and_skips_on_all_ranks():
    """A non-finite loss on one rank skips the step on all. Replicated values agree after each
    step."""
    guard.COMPARED_EVERY = 1
    acc, model, optimizer = prepared("native:dynamic", guard="skip")
    train(model, optimizer, 2, backward=acc.backward)
    before = model.mix.weight.detach().clone()
    last = dist.get_rank() == dist.get_world_size() - 1
    train(
        model,
        optimizer,
        1,
        backward=lambda loss: acc.backward(loss * (float("inf") if last else 1)),
    )
    assert torch.equal(model.mix.weight, before)
    kinds = {fault.kind for fault in guard.faults(optimizer)}
    assert kinds == {"loss", "gradient"}, kinds


def check_files_hold_whole_values():
    """Read files of two ranks on one process. (`matrix.py` continues from them bitwise on two.)"""
    acc, model, optimizer = prepared("msamp:O2")
    train(model, optimizer, 2, backward=acc.backward)
    folder = ranks.shared_folder()
    acc.save_state(folder)
    acc.save_model(model, f"{folder}/model")
    values, stock = acc.get_state_dict(model), Net()
    for file in (f"{folder}/model.safetensors", f"{folder}/model/model.safetensors"):
        stock.load_state_dict(load_file(file))
        assert all(torch.equal(value, values[name]) for name, value in stock.state_dict().items())
    saved = torch.load(Path(folder, "optimizer.bin"), weights_only=True)["state"].values()
    assert {moment.shape for moment in (state["exp_avg"] for state in saved)} == {
        p.shape for p in stock.parameters()
    }


# On four ranks: two share a layer, and FSDP2 shards it over two pairs


def rows() -> slice:
    return slice(dist.get_rank() // 2, None, 2)


def fsdp2_over_parts():
    acc, model, optimizer = prepared("native:delayed", engine="TPxDP")
    losses = train(model, optimizer, 3, rows=rows(), backward=acc.backward)
    assert losses[-1] < losses[0], losses
    assert states_of(model) and all(map(same_on_all_ranks, states_of(model)))
    products = fp8_backends.audit(model, optimizer.optimizer).products
    assert len(products) == 3 and all(count["wgrad"] == 3 for count in products.values()), products


def fsdp2_gathers_the_common_scale():
    """Write values to shards with the scale of the whole tensor, over both dimensions of the
    mesh."""
    acc, model, optimizer = prepared("msamp:O2", engine="TPxDP")
    for name, places in (("up", [0, 64, 32, 96]), ("down", None)):
        weight = getattr(model.block, name).weight
        assert (
            weight.device_mesh.shape == (2, 2) and weight.to_local().numel() * 4 == weight.numel()
        )
        first = on_all_ranks(first_element(weight))
        assert len(set(first)) == 4 and (
            places is None or first == [row * WIDTH for row in places]
        ), (name, first)
        with torch.no_grad():
            local_part(weight).copy_(torch.full(weight.to_local().shape, 2.0 ** dist.get_rank()))
    train(model, optimizer, 1, rows=rows(), backward=acc.backward)
    assert same_on_all_ranks(local_part(model.block.up.weight).scale_inv) and same_on_all_ranks(
        local_part(model.block.down.weight).scale_inv
    )


if __name__ == "__main__":
    os.environ["ACCELERATE_USE_CPU"] = "true"
    ranks.main(globals())
