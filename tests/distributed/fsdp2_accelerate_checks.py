"""Checks of FSDP2 through stock Accelerate."""

from __future__ import annotations

import copy

import pytest
import ranks
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, TorchDynamoPlugin
from fsdp2_models import checks
from fsdp2_training import Net, batches, loss_of, mean, whole
from torch._dynamo.exc import TorchRuntimeError
from torch.distributed.tensor import DTensor

import fp8_backends
from fp8_backends.errors import FP8BackendError, RecipeError
from fp8_backends.recipes.handlers import AORecipeKwargs, FP8RecipeKwargs
from fp8_backends.tensors.scaled_tensor import ScaledTensor
from fp8_backends.tensors.sharded_tensor import local_part

fp8_backends.connect()
ROWS = 80
"""TorchAO takes multiples of 16."""
GATHERED_BY_AO = AORecipeKwargs(enable_fsdp_float8_all_gather=True)
GATHERED = FP8RecipeKwargs(backend="native:delayed", enable_fsdp_float8_all_gather=True)
"""At O2 weights travel so by default."""


def accelerator(
    spec,
    version=2,
    kind=DistributedType.FSDP,
    compiled=None,
    accumulate=1,
    parallelism=None,
    **options,
):
    """Set the engine chosen on GPUs: without a GPU, Accelerate always chooses DDP."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    handler = FP8RecipeKwargs(backend=spec) if isinstance(spec, str) else spec
    options = {
        "auto_wrap_policy": "transformer_based_wrap",
        "transformer_cls_names_to_wrap": ["Block"],
        "cpu_ram_efficient_loading": False,
        **options,
    }
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, **options)
    compiled = compiled or TorchDynamoPlugin()
    AcceleratorState(
        "bf16", cpu=True, dynamo_plugin=compiled, fsdp_plugin=plugin, _from_accelerator=True
    )
    for state in (PartialState, AcceleratorState):
        state._shared_state["distributed_type"] = kind
    AcceleratorState._shared_state |= {"fsdp_plugin": plugin, "_mixed_precision": "fp8"}
    acc = Accelerator(
        cpu=True,
        mixed_precision="fp8",
        kwargs_handlers=[handler],
        fsdp_plugin=plugin,
        gradient_accumulation_steps=accumulate,
    )
    if parallelism is not None:
        shared = AcceleratorState._shared_state
        shared["parallelism_config"], shared["device_mesh"] = (
            parallelism,
            parallelism.build_device_mesh("cpu"),
        )
    if plugin.mixed_precision_policy is None:
        plugin.set_mixed_precision("fp8")
    return acc


def new(seed: int = 0, lr: float = 3e-3, blocks: int = 2):
    """Model, optimizer with two groups, scheduler."""
    torch.manual_seed(seed)
    model = Net(ROWS, blocks)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr)
    return (
        model,
        optimizer,
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step)),
    )


def train(
    acc, model, optimizer, scheduler, steps: int, seed: int = 0, clip: float | None = 1.0
) -> list[float]:
    losses = []
    for ids in batches(steps, seed):
        loss = loss_of(model, ids)
        acc.backward(loss)
        if clip is not None:
            acc.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(mean(loss))
    return losses


TRAINED = ("native:delayed", "ao:tensorwise", GATHERED_BY_AO, "msamp:O4")
"""One of each way to store and to gather; `matrix_checks.py` has every backend."""


def check_each_backend_trains():
    """Use efficient loading, the launcher's default, with weights only on the first rank. Every
    product runs in FP8 in every layer; the proof prints once; optimizer, groups and scheduler stay
    the given objects."""
    figures = {}
    for spec in TRAINED:
        name = spec if isinstance(spec, str) else "ao, gathered in FP8"
        acc = accelerator(spec, cpu_ram_efficient_loading=True)
        model, optimizer, scheduler = new(seed=0 if acc.is_main_process else 5)
        names = [[_name_of(model, p) for p in group["params"]] for group in optimizer.param_groups]
        with ranks.Said() as log:
            prepared, wrapped, _ = acc.prepare(model, optimizer, scheduler)
            before = {key: whole(value) for key, value in model.state_dict().items()}
            losses = train(acc, prepared, wrapped, scheduler, 8)
        assert wrapped.optimizer is optimizer and scheduler.optimizer is optimizer, name
        assert [
            [_name_of(model, p) for p in group["params"]] for group in optimizer.param_groups
        ] == names, name
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0], name
        for key, value in model.state_dict().items():
            assert torch.equal(whole(value), before[key]) == key.startswith("frozen"), (name, key)
        products = fp8_backends.audit(prepared, optimizer).products
        assert len(products) == (6 if name.startswith("ao") else 7), (name, products)
        for layer, counts in products.items():
            kinds = ("fprop", "dgrad") if layer == "frozen" else ("fprop", "dgrad", "wgrad")
            assert all(counts[kind] > 0 for kind in kinds), (name, layer, counts)
        proofs = [line for line in log.lines if "of weight FLOPs in FP8" in line]
        assert len(proofs) == (1 if acc.is_main_process else 0), (name, log.lines)
        assert losses[-1] < losses[0] - 0.5, (name, losses)
        figures[name] = losses[-1]
    return figures


def _name_of(model, parameter) -> str:
    return next(name for name, p in model.named_parameters() if p is parameter)


def check_loading_does_not_change_the_run():
    """Efficient loading or not: the same losses, to the bit."""
    for spec in (GATHERED, GATHERED_BY_AO, "msamp:O3"):
        runs = []
        for efficient in (False, True):
            acc = accelerator(spec, cpu_ram_efficient_loading=efficient)
            runs.append(train(acc, *acc.prepare(*new()), 4))
        assert runs[0] == runs[1], (spec, runs)


def check_a_bf16_model():
    for spec in ("msamp:O2", "msamp:O3", GATHERED_BY_AO):
        acc = accelerator(spec)
        model, *_ = new()
        model.to(torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        losses = train(acc, *acc.prepare(model, optimizer, schedule), 6)
        assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
        assert losses[-1] < losses[0] - 0.5, (spec, losses)


def check_states_of_a_stepped_optimizer():
    """They are sharded with the parameters, by name; in FP8 they are rounded once: E4M3 to nearest,
    1/16 at most."""
    for spec in ("native:dynamic", "msamp:O1", "msamp:O2"):
        model, optimizer, scheduler = new()
        for ids in batches(3):
            loss_of(model, torch.cat([ids] * 2)).backward()
            for p in model.parameters():
                if p.grad is not None:
                    dist.all_reduce(p.grad)
            optimizer.step()
            optimizer.zero_grad()
        names = {name: p for name, p in model.named_parameters()}
        before = {
            name: copy.deepcopy(optimizer.state[p])
            for name, p in names.items()
            if p in optimizer.state
        }
        acc = accelerator(spec)
        prepared, wrapped, _ = acc.prepare(model, optimizer, scheduler)
        layers = [
            name
            for name, p in prepared.named_parameters()
            if isinstance(local_part(p), ScaledTensor)
        ]
        after = {
            name: optimizer.state[p]
            for name, p in prepared.named_parameters()
            if p in optimizer.state
        }
        assert after.keys() == before.keys()
        for name, state in after.items():
            assert float(state["step"]) == 3
            for moment in ("exp_avg", "exp_avg_sq"):
                assert isinstance(state[moment], DTensor)
                local = local_part(state[moment])
                scaled = isinstance(local, ScaledTensor)
                assert scaled == (
                    spec == "msamp:O2" and (name in layers or before[name][moment].numel() >= 4096)
                )
                values, exact = whole(state[moment]), before[name][moment]
                error = (values - exact).norm() / exact.norm()
                assert error <= (1 / 16 if scaled else 0), (spec, name, moment, error)
        assert train(acc, prepared, wrapped, scheduler, 2)


def check_save_and_resume():
    """`save_state` and `load_state`, full and sharded: a resumed run is the unbroken one, to the
    bit."""
    full, shards = "FULL_STATE_DICT", "SHARDED_STATE_DICT"
    for spec, kind in (
        *(("native:delayed", full), (GATHERED_BY_AO, shards)),
        *(("msamp:O3", full), ("msamp:O4", shards)),
    ):
        folder = ranks.shared_folder()
        acc = accelerator(spec, state_dict_type=kind)
        run = acc.prepare(*new())
        train(acc, *run, 2)
        acc.save_state(folder)
        unbroken = train(acc, *run, 2, seed=1)
        again = accelerator(spec, state_dict_type=kind)
        run = again.prepare(*new(seed=3))
        train(again, *run, 1, seed=2)
        again.load_state(folder)
        resumed = train(again, *run, 2, seed=1)
        assert resumed == unbroken, (spec, kind, unbroken, resumed)


def check_activation_checkpointing():
    """Match losses; count recomputed products separately."""
    for spec in (
        FP8RecipeKwargs(backend="native:mxfp8", enable_fsdp_float8_all_gather=True),
        "msamp:O3",
    ):
        runs = []
        for checkpointing in (False, True):
            acc = accelerator(spec, activation_checkpointing=checkpointing)
            run = acc.prepare(*new())
            runs.append(train(acc, *run, 4))
        assert runs[0] == runs[1], (spec, runs)
        product = fp8_backends.audit(run[0], run[1].optimizer).products["blocks.0.up"]
        assert product["fprop"] == product["dgrad"] == 4, product


def check_regional_compilation():
    """No break of the training, products counted. `matrix_checks.py` compiles whole models. Of one
    block: Dynamo traces the same code for each."""
    torch._dynamo.reset()
    regional = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=True)
    acc = accelerator(GATHERED, compiled=regional)
    run = acc.prepare(*new(blocks=1))
    losses = train(acc, *run, 4)
    assert losses[-1] < losses[0] - 0.3, losses
    products = fp8_backends.audit(run[0], run[1].optimizer).products
    assert len(products) == 5 and all(counts["fprop"] for counts in products.values()), products
    # what was compiled for the codes of fprop would read them in dgrad, too
    run = accelerator(
        FP8RecipeKwargs(backend="native:rowwise", enable_fsdp_float8_all_gather=True),
        compiled=regional,
    ).prepare(*new(blocks=1))
    with pytest.raises(
        TorchRuntimeError,
        match="that dgrad reads are not here.*enable_fsdp_float8_all_gather=False",
    ):
        loss_of(run[0], batches(1)[0])


def check_cpu_offload():
    from torch.distributed.fsdp import CPUOffloadPolicy

    for spec in ("native:dynamic", "msamp:O3"):
        acc = accelerator(spec, cpu_offload=CPUOffloadPolicy(pin_memory=False))
        losses = train(acc, *acc.prepare(*new()), 3)
        assert losses[-1] < losses[0], (spec, losses)


def check_unsupported_engine_features_are_refused():
    for spec, options, text in (
        ("msamp:O2", {"version": 1}, "fsdp_version"),
        (GATHERED_BY_AO, {"kind": DistributedType.MULTI_CPU}, "FSDP2"),
    ):
        try:
            accelerator(spec, **options)
        except RecipeError as error:
            assert text in str(error), error
        else:
            raise AssertionError(spec)
    acc = accelerator("msamp:O2")
    model, *_ = new()
    stranger = torch.optim.AdamW([*model.parameters(), torch.nn.Parameter(torch.zeros(2))])
    try:
        acc.prepare(model, stranger)
    except FP8BackendError as error:
        assert "does not have" in str(error)
    else:
        raise AssertionError("a parameter was lost")


# On four ranks


def hybrid_mesh():
    """Return Accelerate's mesh of two replicas of two shards."""
    from accelerate.parallelism_config import ParallelismConfig

    acc = accelerator(
        "msamp:O3", parallelism=ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    )
    run = acc.prepare(*new())
    losses = train(acc, *run, 4)
    weight = run[0].mix.weight
    assert weight.device_mesh.ndim == 2 and weight.to_local().shape[0] == 32
    assert losses[-1] < losses[0] - 0.3, losses


globals().update(checks(accelerator, "native:delayed", "msamp:O2", "msamp:O4"))

if __name__ == "__main__":
    ranks.main(globals())
