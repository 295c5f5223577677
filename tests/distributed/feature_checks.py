"""Check Accelerate's other features with FP8 on two ranks: one check per cell of
`feature_table.py`."""

from __future__ import annotations

import functools
import gc
from pathlib import Path

import feature_runs
import feature_setting
import fsdp2_training
import pytest
import ranks
import torch
from accelerate.local_sgd import LocalSGD
from accelerate.state import AcceleratorState, GradientState, PartialState
from ddp_training import assert_equal_on_all_ranks, everything, scaled
from feature_table import Feature, cells
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import fp8_backends
from fp8_backends.comm.ddp import HOOK_AT_A_LEVEL, Connection
from fp8_backends.convert.conversion import prepared_roots
from fp8_backends.errors import FP8BackendError


def check(feature: Feature, backend: str) -> None:
    try:
        feature_runs.run_as_listed(feature, backend, Path(ranks.shared_folder()))
    finally:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()


def name_of(feature: Feature, backend: str) -> str:
    return f"check_{feature.run}_{backend.replace(':', '_')}"


def checks() -> dict:
    """Return name -> function for each cell that runs inside a process group."""
    return {
        name_of(*cell): functools.partial(check, *cell)
        for cell in cells()
        if cell[0].run in feature_runs.RUNS
    }


globals().update(checks())


def check_uses_on_single_ranks_end_the_sharding_of_states():
    """LocalSGD, `join_uneven_inputs` and `Join` after two steps equal `shard_states=False` to the
    bit, at O3 and O4."""
    for use in (_steps_on_each_rank, _uneven_steps, _joined_steps):
        for backend in ("msamp:O3", "msamp:O4"):
            runs = [_used(backend, use, fields) for fields in ({}, {"shard_states": False})]
            assert runs[0] == runs[1], (use, backend)
            acc = feature_setting.accelerator(backend, fields={"shard_states": True})
            model, optimizer = feature_setting.prepared(acc)
            with pytest.raises(
                FP8BackendError,
                match="shard_states=True leaves each weight.*leave shard_states out",
            ):
                use(acc, model, optimizer)
            assert optimizer.optimizer.fp8_owners is not None


def _used(backend: str, use, fields: dict) -> tuple[list[float], dict[str, str]]:
    """Return losses and digests of a training with a use of single ranks in its middle."""
    acc = feature_setting.accelerator(backend, fields=fields)
    model, optimizer = feature_setting.prepared(acc)
    with ranks.Said() as said:
        losses = [feature_setting.step(acc, model, optimizer, index) for index in range(2)]
        assert (optimizer.optimizer.fp8_owners is None) == bool(fields)
        for _ in range(2):
            losses += use(acc, model, optimizer)
            # watches the optimizer again
            acc.prepare(torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0))
        losses += [feature_setting.step(acc, model, optimizer, index) for index in range(8, 10)]
    lines = [line for line in said.lines if "from now on each rank keeps all" in line]
    assert len(lines) == (feature_setting.rank() == 0 and not fields), said.lines
    assert all(
        f"{backend}: " in line and {"O3": "7", "O4": "5"}[backend[-2:]] + " bytes" in line
        for line in lines
    )
    if use is not _steps_on_each_rank:  # which averages no optimizer states, in FP8 or bf16
        assert_equal_on_all_ranks(model, optimizer.optimizer)
    assert all(p.rest is not None and not p.shared_out for p in scaled(model).values())
    model.state_dict(), optimizer.state_dict()
    return losses, everything(model, optimizer.optimizer)


def _steps_on_each_rank(acc, model, optimizer) -> list[float]:
    losses = []
    with LocalSGD(accelerator=acc, model=model, local_sgd_steps=2) as local:
        for index in range(2, 6):
            losses.append(feature_setting.step(acc, model, optimizer, index))
            assert feature_setting.differ_between_ranks(model)
            local.step()
    feature_setting.assert_equal_everywhere(model)
    return losses


def _uneven_steps(acc, model, optimizer) -> list[float]:
    with feature_runs.joined(acc, model):
        return [
            feature_setting.step(acc, model, optimizer, index)
            for index in range(2, 4 + feature_setting.rank())
        ]


def _joined_steps(acc, model, optimizer) -> list[float]:
    with Join([model]):
        return [
            feature_setting.step(acc, model, optimizer, index)
            for index in range(2, 4 + feature_setting.rank())
        ]


def check_manual_ddp_hook_is_refused_with_scaled_weights():
    """Register after the model is connected, and before."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    acc = feature_setting.accelerator("msamp:O2")
    model, _ = feature_setting.prepared(acc)
    assert Connection.find(model).reducer is not None
    for call in (
        lambda: model.register_comm_hook(None, fp16_compress_hook),
        lambda: _connect_hooked(fp16_compress_hook),
    ):
        try:
            call()
        except FP8BackendError as error:
            assert "fp16_compress_hook" in str(error) and HOOK_AT_A_LEVEL[1] in str(error), error
        else:
            raise AssertionError("a hook that sees no gradient of a scaled weight was taken")


def _connect_hooked(hook) -> None:
    import fp8_backends

    model = feature_setting.Net()
    fp8_backends.prepare(model, None, "msamp:O2")
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    ddp.register_comm_hook(None, hook)
    fp8_backends.prepare(ddp, torch.optim.AdamW(ddp.parameters()), "msamp:O2")


# Recipes by layer

LAYERS = {"blocks.0.up": "native:rowwise", "down": "native:mxfp8", "mix": "bf16"}


def check_mixed_layers_equal_layers_prepared_one_by_one():
    """DDP and FSDP2 train a model with `layers` to the bit as one whose layers were prepared one by
    one."""
    fields = {"backend": "native:dynamic", "layers": LAYERS}
    words = {
        "blocks.0.up": "native:rowwise",
        "blocks.0.down": "native:mxfp8",
        "blocks.1.down": "native:mxfp8",
    }
    words |= {
        "blocks.1.up": "native:dynamic",
        "frozen": "native:dynamic",
        "loudness": "native:dynamic",
    }
    for engine in (
        fsdp2_training.shard,
        lambda model: DistributedDataParallel(model, find_unused_parameters=True),
    ):
        losses = []
        for by_hand in (False, True):
            torch.manual_seed(0)
            model = fsdp2_training.Net()
            for name, word in words.items() if by_hand else ():
                fp8_backends.prepare(model.get_submodule(name), None, word)
            if not by_hand:
                fp8_backends.prepare(model, None, fields)
            model = engine(model)
            optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
            if not by_hand:
                fp8_backends.prepare(model, optimizer, fields)
            losses.append(fsdp2_training.train(model, optimizer, 4))
        assert losses[0] == losses[1], engine


def check_mixed_layers_gather_codes_for_the_rules_that_share_them():
    """At O2 FSDP2 gathers codes of the dynamic layers alone, and the losses equal those of plain
    gathers."""
    fields = {"backend": "native:dynamic+msamp:O2", "layers": LAYERS}
    losses = []
    for gathers in (None, False):
        model, optimizer = fsdp2_training.prepared(
            {**fields, "enable_fsdp_float8_all_gather": gathers}
        )
        losses.append(fsdp2_training.train(model, optimizer, 4))
        _, root, record = prepared_roots(model)[0]
        places = {name for name, _ in _names(root, record.compute.travelling(root, record.recipe))}
        assert places == (set() if gathers is False else {"blocks.1.up", "frozen", "loudness"}), (
            places
        )
    assert losses[0] == losses[1]


def _names(root: torch.nn.Module, places: dict) -> list[tuple[str, str]]:
    names = {module: name for name, module in root.named_modules()}
    return [(names[module], parameter) for module, parameter in places]


def check_schedules_change_at_the_same_step_on_all_ranks():
    """A change to bf16 under DDP and FSDP2 equals a plain model that goes on from the same
    values."""
    fields = {"backend": "native:dynamic", "schedule": {2: "bf16"}}
    for engine in (
        fsdp2_training.shard,
        lambda model: DistributedDataParallel(model, find_unused_parameters=True),
    ):
        runs = [_of_engine(engine, spec) for spec in (fields, "native:dynamic", None)]
        losses = [fsdp2_training.train(*runs[0], 2), fsdp2_training.train(*runs[1], 2)]
        assert losses[0] == losses[1], engine
        runs[2][0].load_state_dict(runs[1][0].state_dict())
        runs[2][1].load_state_dict(runs[1][1].state_dict())
        assert fsdp2_training.train(*runs[0], 3, seed=1) == fsdp2_training.train(
            *runs[2], 3, seed=1
        ), engine


def check_ranks_agree_on_the_states_of_a_later_phase():
    """A wrapper connected in a phase without scaling states learns of later ones."""
    for backend in ("native:delayed", "native:window"):
        model = torch.nn.Linear(32, 32)
        fields = {"backend": backend, "schedule": {0: "native:dynamic", 2: backend}}
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        fp8_backends.prepare(model, None, fields)
        wrapped = DistributedDataParallel(model)
        fp8_backends.prepare(wrapped, optimizer, fields)
        for _ in range(4):
            wrapped(
                torch.randn(16, 32) * (1 + torch.distributed.get_rank())
            ).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        states = [torch.empty_like(model.fp8_scaling) for _ in range(2)]
        torch.distributed.all_gather(states, model.fp8_scaling)
        assert torch.equal(*states), backend


def _of_engine(engine, spec) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = fsdp2_training.Net()
    if spec is not None:
        fp8_backends.prepare(model, None, spec)
    model = engine(model)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    if spec is not None:
        fp8_backends.prepare(model, optimizer, spec)
    return model, optimizer


if __name__ == "__main__":
    gc.collect()
    gc.freeze()  # loaded libraries are no garbage, and each check collects
    ranks.main(globals())
