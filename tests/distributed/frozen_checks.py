"""Frozen codes under FSDP2: sharded and gathered as bytes, on any number of ranks."""

from __future__ import annotations

import copy
import os
import pickle

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ddp_training import Traffic
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import fp8_backends
from fp8_backends.errors import FP8BackendError
from fp8_backends.formats.formats import E4M3
from fp8_backends.formats.scaling import SQUARES
from fp8_backends.tensors.block_codes import (
    MODELOPT_NVFP4,
    PACKED_MXFP4,
    PACKED_NVFP4,
    RAW_CODES,
    SQUARE_CODES,
    TENSOR_CODES,
    BlockCodes,
    CodeLayout,
)
from fp8_backends.tensors.scaled_tensor import ScaledTensor
from fp8_backends.tensors.sharded_tensor import is_distributed, local_part

WIDTH, ROWS, INNER = 192, 330, 320
"""330 rows are uneven on four ranks, and a border of two, three or four ranks cuts blocks of 128."""
STEPS = 20

FORMATS = {
    "fp8_params": (None, "native:dynamic", True),
    "fp8_params by rows": (None, "native:rowwise", True),
    "E4M3 in squares": (SQUARE_CODES, "native:blockwise", True),
    "E4M3 with one scale": (TENSOR_CODES, "native:dynamic", False),
    "raw E4M3": (RAW_CODES[E4M3.dtype], "native:dynamic", False),
    "NVFP4": (PACKED_NVFP4, "native:dynamic", False),
    "NVFP4 of ModelOpt": (MODELOPT_NVFP4, "native:rowwise", False),
    "MXFP4": (PACKED_MXFP4, "native:mxfp8", False),
}
"""Name -> layout of the codes in the file, backend, `fp8_params`."""


def codes_of(values: torch.Tensor, layout: CodeLayout) -> BlockCodes:
    """Round values to a file's codes, with scales other than powers of two where it has them."""
    if layout is SQUARE_CODES:
        codes, scales = SQUARES.quantize(values, E4M3)
        return BlockCodes((codes, scales * 1.37), values.dtype)
    if layout is TENSOR_CODES:
        codes = (values * 1000).clamp(-448, 448).to(E4M3.dtype)
        return BlockCodes((codes, torch.tensor(1.3e-3)), values.dtype, layout)
    if layout is RAW_CODES[E4M3.dtype]:
        return BlockCodes.of_raw(values.to(E4M3.dtype))
    if layout is MODELOPT_NVFP4:
        codes, scales, scale = BlockCodes.encoded(values, PACKED_NVFP4).parts
        return BlockCodes((codes, scales, scale.reciprocal().view(())), values.dtype, layout)
    return BlockCodes.encoded(values, layout)


class Adapted(nn.Module):
    """Two frozen layers, and an adapter of the first."""

    def __init__(self, layout: CodeLayout | None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(WIDTH, ROWS, bias=False, dtype=dtype)
        self.down = nn.Linear(INNER, WIDTH, bias=False, dtype=dtype)
        self.a = nn.Linear(WIDTH, 8, bias=False)
        self.b = nn.Linear(8, ROWS, bias=False)
        for layer in (self.up, self.down):
            layer.requires_grad_(False)
            if layout is not None:
                codes = codes_of(layer.weight.detach(), layout)
                layer.weight = nn.Parameter(codes, requires_grad=False)

    def forward(self, x):
        x = x.to(self.up.weight.dtype)
        hidden = self.up(x) + self.b(self.a(x.to(self.a.weight.dtype)))
        return self.down(torch.relu(hidden)[..., :INNER].to(self.up.weight.dtype)).float()


def spec_of(name: str, frozen: bool = True) -> dict:
    _, backend, fp8_params = FORMATS[name]
    fields = {"backend": backend, "exclude": ["a", "b"], "gradient_comm": "plain"}
    return fields | {"fp8_params": fp8_params and frozen}


def made(name: str, sharded: bool = True, before: bool = False, dtype=torch.float32, **options):
    """Return (model, optimizer). `before`: FSDP2 shards the codes before `prepare`."""
    model = Adapted(FORMATS[name][0], dtype)
    if not before:
        fp8_backends.prepare(model, None, spec_of(name))
    if sharded:
        fully_shard(model, **options)
    optimizer = torch.optim.AdamW([*model.a.parameters(), *model.b.parameters()], lr=2e-2)
    return fp8_backends.prepare(model, optimizer, spec_of(name))


def dequantized(name: str):
    """Return a model with the same values in a plain base, and its optimizer."""
    codes, model = made(name, sharded=False)[0], Adapted(None)
    for part in ("up", "down"):
        values = getattr(codes, part).weight.exact()
        getattr(model, part).weight.data.copy_(values)
    optimizer = torch.optim.AdamW([*model.a.parameters(), *model.b.parameters()], lr=2e-2)
    return fp8_backends.prepare(model, optimizer, spec_of(name, frozen=False))


def train(model, optimizer, steps: int = STEPS) -> list[float]:
    """Train on the same rows on all ranks, so that averages of gradients do not round."""
    losses = []
    for step in range(steps):
        x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step % 2))
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def parts_of(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return codes and scales in memory as bytes, codes first."""
    return tuple(part.contiguous().view(torch.uint8) for part in stored_parts_of(weight))


def stored_parts_of(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if isinstance(weight, ScaledTensor):
        return weight.codes, weight.scale_inv.view(1)
    return tuple(part.view(1) if part.dim() == 0 else part for part in weight.parts)


def gathered(model) -> dict[str, tuple[torch.Tensor, ...]]:
    """Return copies of the parts that FSDP2 gathers for a forward."""
    model.unshard()
    parts = {
        name: tuple(part.clone() for part in parts_of(getattr(model, name).weight))
        for name in ("up", "down")
    }
    model.reshard()
    return parts


def assert_same_parts(model, plain) -> None:
    for name, parts in gathered(model).items():
        expected = parts_of(getattr(plain, name).weight)
        assert len(parts) == len(expected), name
        assert all(map(torch.equal, parts, expected)), name


def check_training_matches_whole_codes_bitwise():
    """Shard before and after `prepare`. Codes after 20 steps equal the file's; losses are near, in
    formats that products read as values equal to, those over the dequantized base."""
    figures = {}
    for name, (layout, *_) in FORMATS.items():
        losses = train(*made(name, sharded=False))
        for before in (False, True) if layout else (False,):
            model, optimizer = made(name, before=before)
            assert all(is_distributed(p) for p in model.parameters())
            assert train(model, optimizer) == losses, (name, before)
            assert_same_parts(model, made(name, sharded=False)[0])
            counts = fp8_backends.audit(model, optimizer).products
            assert {layer: c["fprop"] for layer, c in counts.items()} == dict.fromkeys(
                ("up", "down"), STEPS
            )
        plain = train(*dequantized(name))
        if layout not in (None, SQUARE_CODES, RAW_CODES[E4M3.dtype]):
            assert losses == plain, name
        gaps = [abs(a / b - 1) for a, b in zip(losses, plain, strict=True)]
        assert max(gaps) < 0.02 and losses[-1] < 0.9 * losses[0], (name, gaps, losses)
        figures[name] = {"first": losses[0], "last": losses[-1], "gap": max(gaps)}
    return figures


def cut_bytes(weight: torch.Tensor, ranks: int) -> int:
    """Return the bytes of a rank's rows of a whole weight, padded as FSDP2 does."""
    parts = parts_of(weight)
    rows = -(-weight.shape[0] // ranks)
    return sum(rows * part.shape[1] for part in parts if part.shape[0] == weight.shape[0])


def check_bytes_of_a_rank_and_of_a_step():
    """A step gathers each byte of the codes once, with scales in rows; a rank holds its rows, and
    no values."""
    figures, ranks_ = {}, dist.get_world_size()
    for name in FORMATS:
        plain = made(name, sharded=False)[0]
        weights = plain.up.weight, plain.down.weight
        frozen = sum(cut_bytes(weight, ranks_) for weight in weights)
        adapters = 4 * 8 * (-(-8 // ranks_) * WIDTH // 8 + -(-ROWS // ranks_))
        model, optimizer = made(name)
        seen, peaks = [], []

        def note(*_, model=model, seen=seen, peaks=peaks):
            seen += [part for w in (model.up.weight, model.down.weight) for part in parts_of(w)]
            peaks.append(sum(part.nbytes for part in seen))

        model.down.register_forward_hook(note)
        with Traffic() as traffic:
            train(model, optimizer, 1)
        codes = [part for part in seen if part.dim() == 2 and part.shape[0] in (ROWS, WIDTH)]
        assert codes and not any(part.untyped_storage().nbytes() for part in codes), "freed"
        assert traffic.bytes("all_gather") == frozen + adapters, name
        held = sum(
            part.nbytes
            for layer in (model.up, model.down)
            for part in stored_parts_of(local_part(layer.weight))
        )
        scales = sum(part.nbytes for w in weights for part in parts_of(w)[1:])
        assert held <= frozen + scales, name
        # storages, also those kept by a view
        memory = {
            part.untyped_storage().data_ptr(): part.untyped_storage().nbytes()
            for layer in (model.up, model.down)
            for part in stored_parts_of(local_part(layer.weight))
        }
        assert sum(memory.values()) <= frozen + scales, name
        whole_bytes = sum(part.nbytes for w in weights for part in parts_of(w))
        values = 4 * sum(w.numel() for w in weights)
        assert peaks == [whole_bytes], (name, peaks)
        figures[name] = {"held": held, "sent": frozen, "in forward": whole_bytes, "fp32": values}
    return figures


def check_precision_policy_casts_no_codes():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for name in FORMATS:
        model, optimizer = made(name, mp_policy=policy)
        losses = train(model, optimizer, 6)
        assert losses[-1] < losses[0], name
        assert_same_parts(model, made(name, sharded=False)[0])


def check_other_ways_to_shard():
    """Units that are freed after forward and gathered again for backward, as bytes; host memory;
    a shard_placement_fn."""
    for name, (layout, *_) in FORMATS.items():
        losses = train(*made(name, sharded=False), 4)
        again = made(name, reshard_after_forward=True)
        with Traffic() as traffic:
            assert train(*again, 4) == losses, name
        with Traffic() as once:
            train(*made(name), 4)
        assert traffic.bytes("all_gather") == 2 * once.bytes("all_gather"), name
        offload = CPUOffloadPolicy(pin_memory=False)
        assert train(*made(name, offload_policy=offload), 4) == losses, name
        if layout is not None:
            with pytest.raises(FP8BackendError, match="are sharded by rows"):
                made(name, shard_placement_fn=lambda p: Shard(1))
            sharded = fully_shard(Adapted(layout))
            with pytest.raises(FP8BackendError, match="up: its codes are sharded"):
                fp8_backends.checkpoints.dequantize(sharded)


def check_hybrid_meshes():
    """Replicas of shards on two ranks, and of whole matrices."""
    number = dist.get_world_size()
    for shape in {(number, 1), (2, number // 2)}:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
        for name in FORMATS:
            losses = train(*made(name, sharded=False), 2)
            assert train(*made(name, mesh=mesh), 2) == losses, (name, shape)


def check_empty_shards():
    """Matrices of one row: only the first rank has any."""
    for layout in (SQUARE_CODES, PACKED_NVFP4):
        layer = nn.Linear(64, 1, bias=False)
        codes = codes_of(layer.weight.detach(), layout)
        layer.weight = nn.Parameter(codes, requires_grad=False)
        x = torch.ones(2, 64)
        expected = layer(x)
        fully_shard(layer)
        values = layer.weight.full_tensor()
        assert torch.equal(values, codes.exact()) and torch.equal(layer(x), expected)


def check_shard_keeps_codes_in_every_copy():
    for name, (layout, *_) in FORMATS.items():
        if layout is None:
            continue
        model = made(name)[0]
        shard = local_part(model.up.weight.detach())
        first = dist.get_rank() * -(-ROWS // dist.get_world_size())
        values = codes_of(Adapted(None).up.weight.detach(), layout).exact()
        values = values[first : first + len(shard)]
        copies = (shard.clone(), copy.deepcopy(shard), pickle.loads(pickle.dumps(shard)))
        for other in (shard, *copies, shard.view(shard.shape)):
            assert type(other) is type(shard) and torch.equal(other.exact(), values), name
        assert torch.equal(shard.view(-1) + 0, values.view(-1)), name
        with pytest.raises(FP8BackendError, match="would change the frozen codes"):
            shard.mul_(2)
        with pytest.raises(FP8BackendError, match="cannot take other values without a loss"):
            shard.copy_(values + 1)
        shard.copy_(values)


FOLDER = "FROZEN_CHECKPOINTS"


def write_checkpoints():
    """Return the losses of the steps after the checkpoint."""
    figures = {}
    for name in FORMATS:
        model, optimizer = made(name)
        train(model, optimizer, 3)
        state = {
            "model": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer),
        }
        dcp.save(state, checkpoint_id=f"{os.environ[FOLDER]}/{name}")
        figures[name] = train(model, optimizer, 3)
    return figures


def read_checkpoints():
    figures = {}
    for name in FORMATS:
        model, optimizer = made(name)
        state = {
            "model": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer),
        }
        dcp.load(state, checkpoint_id=f"{os.environ[FOLDER]}/{name}")
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        figures[name] = train(model, optimizer, 3)
        plain = made(name, sharded=False)[0]
        if FORMATS[name][0] is not None:  # else loaded values may get a finer scale
            assert_same_parts(model, plain)
        state = model.state_dict()
        for layer in ("up", "down"):
            values = getattr(plain, layer).weight.exact()
            assert torch.equal(state[f"{layer}.weight"].full_tensor(), values), (name, layer)
    return figures


if __name__ == "__main__":
    ranks.main(globals())
