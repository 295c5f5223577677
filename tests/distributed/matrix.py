"""Run every backend under every engine: trained, or refused by name. The page `tables.rst` shows
it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from typing import NamedTuple

import split_models
import torch
import torch.distributed as dist
from fsdp2_training import same_on_all_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

BACKENDS = (
    "native:dynamic",
    "native:delayed",
    "native:rowwise",
    "native:blockwise",
    "native:mxfp8",
    "native:window",
    "ao:tensorwise",
    "ao:rowwise",
    "ao:rowwise_with_gw_hp",
    "msamp:O1",
    "msamp:O2",
    "msamp:O3",
    "msamp:O4",
)
TE_BACKENDS = (
    "te:delayed",
    "te:dynamic",
    "te:delayed+msamp:O1",
    "te:delayed+msamp:O2",
    "te:delayed+msamp:O3",
)
"""Run by `tests/te`, over a stand-in for TransformerEngine's kernels."""
ABILITIES = ("save", "resume", "clip", "accumulate", "compile")


class Engine(NamedTuple):
    """Describe a column of the guide's table."""

    compiled: tuple[str, ...] = ()
    """Backends that are compiled through Accelerate, one of each kind: compiling takes longest. The
    layer of every native scaling is compiled in `compute/test_native_training.py` and
    `compute/test_scaled_weights.py`, of every level in `states/test_level_compile.py`,
    `compute/test_compiled_orders.py` and `convert/test_conv1d.py`; `deepspeed_checks.py` has native
    under ZeRO-3."""
    run: tuple[str, ...] | None = None
    """Backends under test, one of each kind, for engines that treat all others alike; None: all."""
    splits_rows: bool = True
    """True for different rows on each rank, False for equal ones."""
    abilities: str = "all"
    """Content of a working cell, in the guide's word."""

    def cell(self, backend: str) -> str:
        """Return the abilities of a backend under test; in parentheses if another of its kind
        represents it."""
        if self.run is None or backend in self.run:
            return self.abilities
        return f"({self.abilities})"


_KINDS = ("native:delayed", "ao:tensorwise", "msamp:O2", "te:delayed")
_DEFAULT = (*_KINDS, "msamp:O4", "te:delayed+msamp:O2")
"""Cells of engines with all backends; the nightly run has every cell."""
ENGINES = {
    "single": Engine(
        (
            *("native:delayed", "ao:tensorwise", "ao:rowwise_with_gw_hp", "msamp:O4"),
            *("te:delayed", "te:dynamic", "te:delayed+msamp:O2"),
        ),
        splits_rows=False,
    ),
    "DDP": Engine(("native:delayed", "ao:tensorwise", "msamp:O3", "te:delayed+msamp:O2")),
    "FSDP2": Engine(("native:delayed", "ao:tensorwise", "msamp:O4", "te:delayed")),
    "ZeRO-1": Engine(("native:dynamic", "ao:tensorwise")),
    "ZeRO-2": Engine(("native:delayed", "ao:tensorwise")),
    "ZeRO-3": Engine(("native:dynamic", "ao:tensorwise")),
    "ring": Engine(run=_KINDS, splits_rows=False),
    "Ulysses": Engine(run=("native:delayed", "msamp:O2", "te:delayed"), splits_rows=False),
    split_models.PIPELINE: Engine(
        run=(*_KINDS[:3], "te:dynamic"), splits_rows=False, abilities="trains"
    ),
    "TP": Engine(run=(*_KINDS, "msamp:O3"), splits_rows=False),
    "TPxDP": Engine(run=("native:delayed", "msamp:O2")),
}

SPLIT = (*split_models.ENGINES, split_models.PIPELINE)
WHOLE = tuple(name for name in ENGINES if name not in SPLIT)
"""Engines with whole sequences and all layers on each rank."""


def refusal(backend: str, engine: str, ability: str) -> str | None:
    """Return the expected error of a refused cell; None for a working one."""
    if engine in ("ZeRO-3", "Ulysses"):
        return "FSDP2" if "msamp" in backend else None
    if engine.startswith("TP") and (backend.startswith("te") or backend.endswith(("O3", "O4"))):
        return "DTensors" if backend.startswith("te") else "O1 and O2 go with"
    if engine == split_models.PIPELINE and backend.startswith("te:delayed"):
        return "pipeline"
    return None


def in_the_default_run(backend: str, engine: str) -> bool:
    """Choose the cells of one kind each; `deepspeed_checks.py` has the other stages."""
    return ENGINES[engine].run is not None or (
        backend in _DEFAULT and engine not in ("ZeRO-1", "ZeRO-2")
    )


COMPILED_IN_THE_DEFAULT_RUN = {
    ("ao:tensorwise", "single"),
    ("te:delayed", "single"),
    ("native:delayed", "DDP"),
    ("msamp:O4", "FSDP2"),
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Map token ids [batch, length] to logits [batch, length, 64]: embedding, a block, a head
    without bias."""

    _no_split_modules = ["Block"]  # noqa: RUF012, transformers' name for what FSDP wraps

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, width)
        self.blocks = nn.ModuleList([Block(width)])
        self.head = nn.Linear(width, 64, bias=False)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


MICROBATCHES = 2


def layers_of(engine: str) -> int:
    """Return the layers in FP8; the head stays in high precision unless a recipe includes it."""
    return 7 if engine in split_models.ENGINES else 2


def batches(count: int, rank: int, ranks: int) -> list[torch.Tensor]:
    """Return this rank's share of `count` microbatches of 8 rows from a simple rule: the next token
    is the last plus three."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(0, 64, (count, 8), generator=generator)
    ids = (starts.unsqueeze(-1) + 3 * torch.arange(17)) % 64
    return list(ids[:, rank::ranks])


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(
        model(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten()
    )


def rows_of(engine: str) -> list[torch.Tensor]:
    """This rank's microbatches under an engine."""
    if engine == "TPxDP":  # ranks with shared layers share rows
        return batches(12, dist.get_rank() // 2, dist.get_world_size() // 2)
    return batches(
        12, *((dist.get_rank(), dist.get_world_size()) if ENGINES[engine].splits_rows else (0, 1))
    )


@contextlib.contextmanager
def loss_on_this_rank(accelerator, model: nn.Module, engine: str, ids: torch.Tensor):
    """The loss of this rank's part of a microbatch, for the time of its backward."""
    if engine not in split_models.ENGINES:
        yield loss_of(model, ids)
        return
    with split_models.shares(accelerator, engine, ids) as part:
        yield split_models.loss_of(model, *part)


@contextlib.contextmanager
def prepared(backend: str, engine: str, compiled: bool = False):
    """Return (accelerator, model, optimizer) as a user makes them."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from engines import assert_engine, engine_arguments, share_layers, start_engine

    import fp8_backends

    torch.manual_seed(0)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = split_models.llama() if engine in split_models.ENGINES else Net()
    arguments = engine_arguments(engine, clip=MAX_NORM, microbatches=MICROBATCHES)
    try:
        accelerator = Accelerator(
            mixed_precision="fp8",
            kwargs_handlers=[
                fp8_backends.FP8RecipeKwargs(backend=backend),
                *arguments.pop("kwargs_handlers", ()),
            ],
            gradient_accumulation_steps=MICROBATCHES,
            dynamo_backend="aot_eager" if compiled else None,
            **arguments,
        )
        start_engine(accelerator, engine, arguments)
        share_layers(accelerator, engine, model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
        model, optimizer = accelerator.prepare(model, optimizer)
        assert_engine(engine, model)
        yield accelerator, model, optimizer
        accelerator.free_memory()
    finally:
        for state in (AcceleratorState, GradientState):
            state._reset_state()
        PartialState._reset_state()
        for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
            del os.environ[name]
        os.environ["ACCELERATE_USE_CPU"] = "true"


MAX_NORM = 0.05


def train(accelerator, model, optimizer, data, engine: str) -> list[float]:
    """Return one loss per microbatch; clip at every step."""
    losses = []
    for ids in data:
        with (
            accelerator.accumulate(model),
            loss_on_this_rank(accelerator, model, engine, ids) as loss,
        ):
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                check_clip(accelerator, model)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check_clip(accelerator, model) -> None:
    """Compare one norm on all ranks, and the requested norm after clipping."""
    norm = accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
    if accelerator.distributed_type == "DEEPSPEED":
        return  # its engine clips inside its step, and tells the norm afterwards
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    norms = [torch.zeros(()) for _ in range(dist.get_world_size())]
    dist.all_gather(norms, norm.detach().float().reshape(()))
    assert all(torch.equal(each, norms[0]) for each in norms) and norms[0] > MAX_NORM, norms
    left = accelerator.clip_grad_norm_(model.parameters(), 1e9)
    left = left.full_tensor() if hasattr(left, "full_tensor") else left
    assert abs(left.item() / MAX_NORM - 1) < 1e-3, left


def counts_of(model: nn.Module) -> dict[str, dict[str, int]]:
    import fp8_backends

    return fp8_backends.audit(model).products


def check_cell(backend: str, engine: str) -> dict:
    """Check all abilities of a working cell except compile."""
    from engines import plain_state_dict

    data = rows_of(engine)
    with prepared(backend, engine) as (accelerator, model, optimizer):
        before = plain_state_dict(accelerator, model)
        losses = train(accelerator, model, optimizer, data[:1], engine)
        after_one = plain_state_dict(accelerator, model)
        assert all(torch.equal(after_one[name], before[name]) for name in before), (
            "a step before its time"
        )
        losses += train(accelerator, model, optimizer, data[1:8], engine)
        assert losses[-1] < losses[0], losses

        products = counts_of(accelerator.unwrap_model(model))
        assert len(products) == layers_of(engine), products
        if backend.startswith(("ao", "te")):  # counted on one profiled step
            assert all(count["fprop"] and count["dgrad"] for count in products.values()), products
        else:
            assert all(
                count[kind] >= 8
                for count in products.values()
                for kind in ("fprop", "dgrad", "wgrad")
            )

        if engine in split_models.ENGINES:
            check_equal_on_all_ranks(model)
        folder = [tempfile.mkdtemp()]
        if engine != "single":
            dist.broadcast_object_list(folder)
        weights = plain_state_dict(accelerator, model)
        moved = [name for name in weights if not torch.equal(weights[name], before[name])]
        assert moved == list(weights), "parameters that did not train"
        assert all(type(value) is torch.Tensor for value in weights.values())
        accelerator.save_state(folder[0])
        unbroken = train(accelerator, model, optimizer, data[8:], engine)
        accelerator.load_state(folder[0])
        again = plain_state_dict(accelerator, model)
        assert all(torch.equal(weights[name], again[name]) for name in weights)
        assert train(accelerator, model, optimizer, data[8:], engine) == unbroken
    if engine in split_models.ENGINES:
        check_equal_to_one_process(engine, losses)
    EAGER[backend, engine] = losses
    return {"losses": losses}


def check_equal_on_all_ranks(model: nn.Module) -> None:
    """The scaling states of a stateful rule, though each rank has seen other tokens."""
    for name, layer in model.named_modules():
        if (state := getattr(layer, "fp8_scaling", None)) is not None:
            assert same_on_all_ranks(state), name


def check_equal_to_one_process(engine: str, losses: list[float]) -> None:
    """Compare the mean over ranks with the loss of whole sequences in FP32 on this process, up to
    FP8 rounding."""
    means = torch.tensor(losses)
    dist.all_reduce(means)
    means /= dist.get_world_size()
    if engine == "Ulysses":
        split_models.forget_ulysses()
    torch.manual_seed(0)
    model = split_models.llama()
    optimizer, expected = torch.optim.AdamW(model.parameters(), lr=4e-3), []
    for step, ids in enumerate(batches(12, 0, 1)[: len(losses)], start=1):
        positions = torch.arange(split_models.LENGTH).expand(len(ids), -1)
        loss = split_models.loss_of(model, ids[:, :-1], ids[:, 1:], positions)
        (loss / MICROBATCHES).backward()
        if step % MICROBATCHES == 0:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
        expected.append(loss.item())
    assert torch.allclose(means, torch.tensor(expected), rtol=3e-3), (means, expected)


def check_pipeline(backend: str) -> dict:
    """Compare both schedules of `torch.distributed.pipelining` with one process, bitwise if scales
    are independent of the order of microbatches."""
    from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

    def stages() -> list[nn.Module]:
        torch.manual_seed(0)
        return [
            split_models.FirstStage(Block(split_models.WIDTH)),
            split_models.LastStage(Block(split_models.WIDTH)),
        ]

    if backend.startswith("te"):
        split_models.forget_amaxes()
    data = batches(3, 0, 1)
    expected = split_models.losses_of_one_process(stages(), backend, data)
    for schedule in (ScheduleGPipe, Schedule1F1B):
        stage = stages()[dist.get_rank()]
        losses = split_models.losses_of_a_pipeline(stage, backend, schedule, data)
        if ":delayed" in backend and schedule is Schedule1F1B:
            assert torch.allclose(torch.tensor(losses), torch.tensor(expected), rtol=2e-3), (
                losses,
                expected,
            )
        else:
            assert losses == expected, (schedule, losses, expected)
        products = counts_of(stage)
        assert len(products) == 2, products
        assert all(
            count[kind] for count in products.values() for kind in ("fprop", "dgrad", "wgrad")
        ), products
    return {"losses": losses}


EAGER: dict[tuple[str, str], list[float]] = {}
"""Losses of earlier cells."""


def check_losses_over_a_mesh_match_one_process() -> dict:
    """Cut layers over each of two pairs of ranks, and shard the parts over the pairs by FSDP2. All
    see one batch, so dynamic scales match one process, and so do losses in FP32, up to the order of
    sums."""
    from engines import cut_layers

    import fp8_backends

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    losses = []
    for shared in (False, True):
        torch.manual_seed(0)
        model = Net()
        if shared:
            cut_layers(model, mesh["tp"])
        fp8_backends.prepare(model, None, "native:dynamic")
        if shared:
            for block in model.blocks:
                fully_shard(block, mesh=mesh["dp"])
            fully_shard(model, mesh=mesh["dp"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
        model, optimizer = fp8_backends.prepare(model, optimizer, "native:dynamic")
        losses.append([])
        for ids in batches(4, 0, 1):
            loss = loss_of(model, ids)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    one, found = losses
    assert all(
        abs(loss / expected - 1) < 2e-7 for loss, expected in zip(found, one, strict=True)
    ), losses
    return {"losses": found}


def check_compile(backend: str, engine: str) -> dict:
    """Run after `check_cell` of the same cell, and repeat its first losses."""
    data = rows_of(engine)[:4]
    eager = EAGER[backend, engine][:4]
    with prepared(backend, engine, compiled=True) as (accelerator, model, optimizer):
        compiled = train(accelerator, model, optimizer, data, engine)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
        products = counts_of(accelerator.unwrap_model(model))
        assert len(products) == layers_of(engine) and all(
            count["fprop"] for count in products.values()
        ), products
    # bf16 intermediate results are rounded in other places
    assert torch.allclose(torch.tensor(eager), torch.tensor(compiled), rtol=2e-2), (eager, compiled)
    return {"eager": eager, "compiled": compiled}


def check_refused(backend: str, engine: str, message: str) -> None:
    try:
        with prepared(backend, engine):
            pass
    except Exception as error:
        assert message in str(error), error
    else:
        raise AssertionError(f"{backend} under {engine} was not refused")


def checks(
    backends: tuple[str, ...] = BACKENDS, engines: tuple[str, ...] = WHOLE, nightly: bool = True
) -> dict:
    """Return name -> function for every cell of the default or the nightly run."""
    made = {}
    for engine in engines:
        column = ENGINES[engine]
        if engine == "TPxDP" and "native:dynamic" in backends:
            made["check_TPxDP_losses"] = check_losses_over_a_mesh_match_one_process
        for backend in (each for each in backends if column.run is None or each in column.run):
            name = f"check_{engine}_{backend}".replace("-", "").replace(":", "_").replace("+", "_")
            if not nightly and not in_the_default_run(backend, engine):
                continue
            if message := refusal(backend, engine, "train"):
                made[name] = lambda b=backend, e=engine, m=message: check_refused(b, e, m)
            elif engine == split_models.PIPELINE:
                made[name] = lambda b=backend: check_pipeline(b)
            else:
                made[name] = lambda b=backend, e=engine: check_cell(b, e)
                if backend in column.compiled and (
                    nightly or (backend, engine) in COMPILED_IN_THE_DEFAULT_RUN
                ):
                    made[f"{name}_compiled"] = lambda b=backend, e=engine: check_compile(b, e)
    return made
