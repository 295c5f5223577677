"""A small model, its data and its loops, with DeepSpeed through a stock Accelerator and without
either."""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import deepspeed
import ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler, InitProcessGroupKwargs
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8_backends

# the CPU's all-reduce through shared memory is an extension, compiled by DeepSpeed at its first
# collective
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

HIDDEN, LAYERS = 64, 3
COMPUTES = (
    "native:dynamic",
    "native:delayed",
    "native:rowwise",
    "native:window",
    "ao:tensorwise",
    "ao:rowwise",
)
STAGES = (1, 2, 3)


class Blocks(nn.Module):
    """Residual Linear layers; `recompute` checkpoints each."""

    def __init__(self, recompute: bool = False, layers: int = LAYERS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(layers))
        self.out = nn.Linear(HIDDEN, 16)
        self.recompute = recompute

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The mean squared error, FP32."""
        for layer in self.layers:
            if self.recompute:
                x = x + checkpoint(self._block, layer, x, use_reentrant=False)
            else:
                x = x + self._block(layer, x)
        return F.mse_loss(self.out(x).float(), y)

    @staticmethod
    def _block(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(layer(x))


def batches(steps: int, size: int = 16) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    teacher = torch.randn(HIDDEN, 16, generator=generator)
    inputs = [torch.randn(size, HIDDEN, generator=generator) for _ in range(steps)]
    return [(x, torch.tanh(x @ teacher)) for x in inputs]


def shares(data: list) -> list:
    """This rank's part of every batch."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return [(x.chunk(ranks)[rank], y.chunk(ranks)[rank]) for x, y in data]


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), 5e-3)


@contextlib.contextmanager
def accelerator(
    stage: int, backend: str | None, *, config: dict | None = None, bf16: bool = False, **options
):
    """A stock Accelerator with a DeepSpeed plug-in; `backend` None trains without FP8. `config`
    changes its JSON."""
    plugin = DeepSpeedPlugin(hf_ds_config=ds_config(stage, bf16) | (config or {}))
    with accelerator_with(plugin, backend, bf16=bf16, **options) as acc:
        yield acc


@contextlib.contextmanager
def accelerator_with(
    plugin: DeepSpeedPlugin | None, backend: str | None, *, bf16: bool = False, **options
):
    fields = options.pop("fields", {})
    handler = options.pop("handler", None) or (
        backend and fp8_backends.FP8RecipeKwargs(backend=backend, **fields)
    )
    handlers = [InitProcessGroupKwargs(backend="gloo"), *([handler] if handler else [])]
    precision = options.pop("mixed_precision", "fp8" if handler else ("bf16" if bf16 else "no"))
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    acc = None
    try:
        acc = Accelerator(
            mixed_precision=precision, deepspeed_plugin=plugin, kwargs_handlers=handlers, **options
        )
        yield acc
    finally:
        if acc is not None:
            acc.free_memory()
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
        AcceleratorState._reset_state(True)


def ds_config(stage: int, bf16: bool = False) -> dict:
    """Return a configuration with threshold 0: ZeRO-3 would never partition such small layers by
    default."""
    return {
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "train_micro_batch_size_per_gpu": 16,
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 0.0,
        "bf16": {"enabled": bf16},
    }


def train(
    acc: Accelerator, engine, optimizer, data: list, clip: float | None = None
) -> list[float]:
    """The usual loop of Accelerate; the loss of each batch on this rank."""
    losses = []
    for x, y in data:
        with acc.accumulate(engine):
            dtype = next(engine.module.parameters()).dtype
            loss = engine(x.to(dtype), y)
            acc.backward(loss)
            if clip is not None and acc.sync_gradients:
                acc.clip_grad_norm_(engine.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@contextlib.contextmanager
def trained_by_configuration(backend: str, zero: dict, **optimizer_fields):
    """Train with a file's "auto" values, and its optimizer and scheduler. Yield (model, optimizer,
    plug-in)."""
    warmup = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto")
    adamw_fields = {"lr": "auto", "weight_decay": "auto", **optimizer_fields}
    config = {
        "optimizer": {"type": "AdamW", "params": adamw_fields},
        "scheduler": {"type": "WarmupLR", "params": warmup},
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"reduce_bucket_size": "auto", **zero},
    }
    plugin = DeepSpeedPlugin(hf_ds_config=json_file(config))
    with accelerator_with(plugin, backend) as acc, ranks.Said() as log:
        model = Blocks()
        model.config = SimpleNamespace(hidden_size=HIDDEN)
        optimizer = DummyOptim(model.parameters(), lr=5e-3)
        scheduler = DummyScheduler(optimizer, total_num_steps=20, warmup_num_steps=2)
        rows = torch.utils.data.TensorDataset(*batches(1, 64)[0])
        loader = torch.utils.data.DataLoader(rows, batch_size=16)
        engine, optimizer, scheduler, loader = acc.prepare(model, optimizer, scheduler, loader)
        losses = [loss for _ in range(6) for loss in train(acc, engine, optimizer, list(loader))]
        assert losses[-1] < losses[0] and all(map(math.isfinite, losses))
        assert scheduler.get_last_lr() == [5e-3]
        assert_products(model)
        proof = f"{backend}: 4/4 Linear"
        assert any(proof in line for line in log.lines) or dist.get_rank()
        yield model, optimizer, plugin


def resumed_bitwise(backend: str, stage: int, other: int | None = None) -> tuple:
    """Resume by `save_state`, and by the engine's own checkpoint at another stage. Return the last
    model, and the engine's file with the losses that follow it."""
    data, place = shares(batches(6)), ranks.shared_folder()
    with accelerator(stage, backend, bf16=True) as acc:
        model = Blocks()
        engine, optimizer = acc.prepare(model, adamw(model))
        train(acc, engine, optimizer, data[:3])
        acc.save_state(f"{place}/accelerate")
        engine.save_checkpoint(f"{place}/engine", tag="t", client_state={"mine": 1})
        unbroken, states = train(acc, engine, optimizer, data[3:]), scaling_states(model)
    for at, by_engine in ((stage, False), (stage if other is None else other, True)):
        with accelerator(at, backend, bf16=True) as acc:
            model = Blocks()
            engine, optimizer = acc.prepare(model, adamw(model))
            train(acc, engine, optimizer, data[4:])
            if by_engine:
                _, client_state = engine.load_checkpoint(f"{place}/engine")
                assert client_state["mine"] == 1 and "fp8_scaling" not in client_state
            else:
                acc.load_state(f"{place}/accelerate")
            assert train(acc, engine, optimizer, data[3:]) == unbroken, (backend, stage, at)
            assert engine.global_steps == 6
            assert all(map(torch.equal, scaling_states(model), states))
    file = Path(place, "engine/t/mp_rank_00_model_states.pt")
    saved = torch.load(file, weights_only=False) if file.exists() else None
    return model, (saved, unbroken)


def train_alone(
    backend: str | None,
    data: list,
    *,
    bf16: bool = False,
    accumulate: int = 1,
    layers: int = LAYERS,
    **fields,
) -> list[float]:
    """The same on one rank without DeepSpeed and without Accelerate."""
    model = Blocks(layers=layers)
    optimizer = adamw(model)
    if backend:
        recipe = fp8_backends.FP8RecipeKwargs(backend=backend, **fields)
        fp8_backends.prepare(model, optimizer, recipe)
    losses = []
    for number, (x, y) in enumerate(data, 1):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(x, y)
        (loss / accumulate).backward()
        if number % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def mean_over_ranks(losses: list[float]) -> list[float]:
    total = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def scaling_states(model: nn.Module) -> list[torch.Tensor]:
    return [
        module.fp8_scaling.clone()
        for module in model.modules()
        if getattr(module, "fp8_scaling", None) is not None
    ]


def whole_parameters(model: nn.Module) -> list[torch.Tensor]:
    parameters = list(model.parameters())
    with deepspeed.zero.GatheredParameters([p for p in parameters if hasattr(p, "ds_id")]):
        return [p.detach().clone() for p in parameters]


def json_file(config: dict) -> str:
    """The path of a file of this rank's own."""
    path = Path(tempfile.mkdtemp(), "deepspeed.json")
    path.write_text(json.dumps(config))
    return str(path)


def assert_products(model: nn.Module, layers: int = LAYERS + 1, at_least: int = 1) -> None:
    """Assert every kind of product for every layer; the first needs no input gradient."""
    products = fp8_backends.audit(model).products
    assert len(products) == layers, list(products)
    for name, counts in products.items():
        kinds = ("fprop", "wgrad") if name == "layers.0" else ("fprop", "dgrad", "wgrad")
        assert all(counts[kind] >= at_least for kind in kinds), (name, counts)
