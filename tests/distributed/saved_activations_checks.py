"""Save activations in FP8 on real ranks."""

from __future__ import annotations

import ranks
import torch
import torch.distributed as dist
from conversion_steps import take_steps
from fsdp2_training import prepared_in
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import fp8_backends
from fp8_backends.convert.saved_activations import saved_bytes

WIDTH, STEPS = 64, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 128), nn.Linear(128, WIDTH)
        self.table = nn.Parameter(torch.ones(64, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.table
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Encoder(nn.Sequential):
    """Gather the weights of submodules when they begin."""


def losses(wrap, value: str, backend: str) -> tuple[list[float], nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(Encoder(Block(), Block()), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16))
    recipe = fp8_backends.FP8RecipeKwargs(
        backend=backend, saved_activations=value, gradient_comm="plain"
    )
    wrapped, optimizer = prepared_in(wrap, model, recipe)
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    return take_steps(lambda: wrapped(x).float().square().mean(), optimizer, STEPS), model


def sharded(model: nn.Module) -> nn.Module:
    for block in model[0]:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    return fully_shard(model)


def check_ddp_and_fsdp2_losses_stay_unchanged():
    for wrap, backend in ((DistributedDataParallel, "native:dynamic"), (sharded, "msamp:O2")):
        off, _ = losses(wrap, "off", backend)
        on, model = losses(wrap, "fp8", backend)
        assert off[0] == on[0] and off != on  # the forward is the same; gradients are not
        assert all(abs(a - b) < 0.01 * a for a, b in zip(off, on, strict=True)), (off, on)
        # the inputs of a product, three norms and two activations; no table and no batch, without
        # gradients
        assert saved_bytes(model).tensors == 6, saved_bytes(model)


def check_gathered_weight_is_not_saved():
    """FSDP2 frees weights gathered for the forward of a block at its end."""
    _, model = losses(sharded, "fp8", "native:dynamic")
    y = model(torch.randn(64, WIDTH))
    gathered = [
        p for block in model[0] for p in block._get_fsdp_state()._fsdp_param_group.fsdp_params
    ]
    assert [p._unsharded_param.untyped_storage().nbytes() for p in gathered] == [0] * 14
    y.sum().backward()
    assert all(torch.isfinite(p.grad.to_local()).all() for p in model.parameters())


if __name__ == "__main__":
    ranks.main(globals())
