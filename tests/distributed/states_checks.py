"""Optimizers on several ranks against one rank: steps, storage, saving and loading."""

import contextlib
import copy
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import InitProcessGroupKwargs
from fsdp2_training import prepared_in, same_on_all_ranks
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from unsealed import unseal

import fp8_backends
from fp8_backends.comm import ddp
from fp8_backends.errors import FP8BackendError
from fp8_backends.states.levels import STATE_FORMATS, StateRule, quantize_weight
from fp8_backends.states.optimizers import convert
from fp8_backends.tensors.scaled_tensor import ScaledTensor
from fp8_backends.tensors.sharded_tensor import local_part

SCALED = [(65, 128), (1, 64), (64, 128)]  # uneven over ranks; all but one rank empty; even
PLAIN = [(66, 128), (64,)]  # an embedding with scaled states, and a norm
"""Rows of 128: a block belongs to one rank, and is the same as on one rank."""


def rule(level: str, rounding: str = "stochastic") -> StateRule:
    return StateRule(level, *STATE_FORMATS[level], rounding)


def values(shape: tuple[int, ...], seed: int, spread: float = 0.02) -> torch.Tensor:
    """Return normal values with rows of different sizes, and so different amaxes on the ranks."""
    normal = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread
    return normal * torch.linspace(0.1, 3, shape[0]).view(-1, *[1] * (len(shape) - 1))


def adam(parameters, states: StateRule, cls=torch.optim.AdamW) -> torch.optim.Optimizer:
    optimizer = cls(parameters, lr=1e-3, weight_decay=0.1)
    convert(optimizer, states)
    return optimizer


def alone(
    level: str, states: StateRule, cls=torch.optim.AdamW
) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    scaled = [
        nn.Parameter(quantize_weight(values(shape, i), level)) for i, shape in enumerate(SCALED)
    ]
    parameters = scaled + [nn.Parameter(values(shape, 50 + i)) for i, shape in enumerate(PLAIN)]
    for p in scaled:
        p.register_post_accumulate_grad_hook(Reduces())
    return parameters, adam(parameters, states, cls)


class Reduces:
    """Replaces gradient reduction: the tests give all ranks the same gradients."""

    reduces = True

    def __call__(self, weight: torch.Tensor) -> None:
        pass


def sharded(
    level: str, states: StateRule, cls=torch.optim.AdamW, lies=None
) -> tuple[list, torch.optim.Optimizer]:
    lies = lies or over_all_ranks()
    shards = [shard(values(shape, i), *lies) for i, shape in enumerate(SCALED)]
    scaled = [nn.Parameter(quantize_weight(each, level)) for each in shards]
    parameters = scaled + [
        nn.Parameter(shard(values(shape, 50 + i), *lies)) for i, shape in enumerate(PLAIN)
    ]
    return parameters, adam(parameters, states, cls)


def over_all_ranks() -> tuple:
    return init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)]


def two_replicas() -> tuple:
    """A mesh with two replicas, as under HSDP."""
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2)), [Replicate(), Shard(0)]


def shard(whole: torch.Tensor, mesh, placements) -> DTensor:
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def step(parameters: list[nn.Parameter], optimizer, seed: int, bad: float | None = None) -> None:
    """Make one step with the same gradients on every rank; `bad` goes into the last row of the
    first."""
    for i, p in enumerate(parameters):
        gradient = values(tuple(p.shape), 100 * seed + i)
        if bad is not None and i in (0, 3):
            gradient[-1, 3] = bad
        p.grad = (
            shard(gradient, p.device_mesh, p.placements) if isinstance(p, DTensor) else gradient
        )
    optimizer.step()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All values of a parameter or state, FP32."""
    if isinstance(tensor, DTensor):
        local = plain(tensor._local_tensor)
        like = DTensor.from_local(
            local,
            tensor.device_mesh,
            tensor.placements,
            shape=tensor.shape,
            stride=tensor.stride(),
            run_check=False,
        )
        return like.full_tensor()
    return plain(tensor)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.exact(torch.float32) if isinstance(tensor, ScaledTensor) else tensor


def assert_same(ours: tuple, theirs: tuple) -> None:
    """Weights, masters and states of two (parameters, optimizer) are equal to the bit, as
    values."""
    assert all(torch.equal(whole(p), whole(q)) for p, q in zip(ours[0], theirs[0], strict=True))
    assert_same_states(ours, theirs)


def other_optimizers() -> dict[str, Callable]:
    """Return constructors of the optimizers with PyTorch's steps. Muon supports only matrices."""
    return {
        "sgd": lambda p, lr, weight_decay: torch.optim.SGD(
            p, lr, 0.9, weight_decay=weight_decay, nesterov=True
        ),
        "muon": lambda p, lr, weight_decay: torch.optim.Muon(
            [q for q in p if q.dim() == 2], lr, weight_decay
        ),
        "adafactor": lambda p, lr, weight_decay: torch.optim.Adafactor(
            p, lr, weight_decay=weight_decay
        ),
    }


def held(pair: tuple) -> tuple:
    """Return the optimizer's parameters, and the optimizer."""
    return [p for group in pair[1].param_groups for p in group["params"]], pair[1]


def check_shards_step_save_and_load_like_one_rank():
    """One non-finite row on one rank zeroes the whole gradient. Muon and Adafactor gather matrices,
    and each rank keeps its rows."""
    kinds = [(level, "stochastic", torch.optim.AdamW) for level in STATE_FORMATS]
    kinds += [(level, "nearest", torch.optim.AdamW) for level in ("O2", "O4")]
    kinds += [("O3", "stochastic", make) for make in other_optimizers().values()]
    for level, rounding, make in kinds:
        states = rule(level, rounding)
        ours, reference = held(sharded(level, states, make)), held(alone(level, states, make))
        hybrid = held(sharded(level, states, make, two_replicas()))
        for seed, bad in enumerate((None, float("nan"), float("inf"))):
            for pair in (ours, hybrid, reference):
                step(*pair, seed, bad)
        assert_same(ours, reference)
        assert_same(hybrid, reference)
        assert all(torch.isfinite(whole(p)).all() for p in ours[0])
        assert all(
            same_on_all_ranks(local_part(p).scale_inv)
            for p in ours[0]
            if hasattr(local_part(p), "scale_inv")
        )

        back, theirs = held(alone(level, states, make)), held(sharded(level, states, make))
        back[1].load_state_dict(ours[1].state_dict())
        theirs[1].load_state_dict(copy.deepcopy(reference[1].state_dict()))
        through_files = [
            held(sharded(level, states, make, lies)) for lies in (None, two_replicas())
        ]
        for pair in through_files:
            save_and_load(ours, pair)
        for pair in (back, theirs, *through_files):
            assert_same_states(pair, reference)
        if make is torch.optim.AdamW:
            load_from_rank_0_only(level, states, ours, reference)


def load_from_rank_0_only(level: str, states: StateRule, ours: tuple, reference: tuple) -> None:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole_one = get_optimizer_state_dict(Holder(ours[0]), ours[1], options=options)
    assert bool(whole_one) is (dist.get_rank() == 0)
    theirs = sharded(level, states)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(Holder(theirs[0]), theirs[1], whole_one, options=options)
    assert_same_states(theirs, reference)
    if level == "O3":  # the states hold the masters of the weights
        for _ in range(2):
            assert all(
                torch.equal(whole(p), whole(q))
                for p, q in zip(theirs[0][:3], reference[0][:3], strict=True)
            )
            step(*theirs, 7)
            step(*reference, 7)


# Checkpoints of shards


class Holder(nn.Module):
    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self.held = nn.ParameterList(parameters)


def save_and_load(ours: tuple, theirs: tuple) -> None:
    """Take the states of one optimizer to another through `torch.distributed.checkpoint`."""
    folder = ranks.shared_folder()
    saved = get_optimizer_state_dict(Holder(ours[0]), ours[1])
    assert all(
        type(local_part(v)) is torch.Tensor
        for state in saved["state"].values()
        for v in state.values()
    )
    dcp.save({"optimizer": saved}, checkpoint_id=folder)
    template = get_optimizer_state_dict(Holder(theirs[0]), theirs[1])
    dcp.load({"optimizer": template}, checkpoint_id=folder)
    set_optimizer_state_dict(Holder(theirs[0]), theirs[1], template)


def check_refusal_on_one_rank_reaches_all():
    """A fault in the rows of one rank: the others would wait for it when scales are agreed on."""
    ours = sharded("O2", rule("O2"))
    step(*ours, 0)
    before, state = copy.deepcopy(ours[1].state_dict()), ours[1].state_dict()
    if dist.get_rank() == dist.get_world_size() - 1:
        local_part(state["state"][0]["exp_avg_sq"])[-1, 0] = -1.0
    with pytest.raises(
        FP8BackendError, match="exp_avg_sq of parameter 0|another rank refuses its part"
    ):
        ours[1].load_state_dict(state)
    for key, saved in ours[1].state_dict()["state"].items():
        assert all(
            torch.equal(whole(saved[name]), whole(before["state"][key][name])) for name in saved
        )


def check_stepped_and_changed_optimizer_is_converted():
    """Accelerate converts an optimizer with states, and replaces its parameters by shards, in
    place."""
    parameters = [nn.Parameter(values(shape, i)) for i, shape in enumerate([*SCALED, *PLAIN])]
    stock = torch.optim.AdamW(parameters, 1e-3, weight_decay=0.1)
    step(parameters, stock, 0)
    one = alone("O2", rule("O2"))
    one[1].load_state_dict(stock.state_dict())
    shards = [
        nn.Parameter(quantize_weight(shard(values(shape, i), *over_all_ranks()), "O2"))
        for i, shape in enumerate(SCALED)
    ]
    shards += [
        nn.Parameter(shard(values(shape, 50 + i), *over_all_ranks()))
        for i, shape in enumerate(PLAIN)
    ]
    for old, new in zip(parameters, shards, strict=True):
        stock.state[new] = stock.state.pop(old)
    stock.param_groups[0]["params"] = shards
    convert(stock, rule("O2"))
    step(shards, stock, 1)
    step(*one, 1)
    assert_same((shards, stock), one)


def assert_same_states(ours: tuple, theirs: tuple) -> None:
    for i, (p, q) in enumerate(zip(ours[0], theirs[0], strict=True)):
        a, b = ours[1].state[p], theirs[1].state[q]
        assert a.keys() == b.keys(), (a.keys(), b.keys())
        assert all(torch.equal(whole(a[name]), whole(b[name])) for name in a), f"states of {i}"


# Levels O3 and O4 under DDP: masters, residuals and states shared out


def under_ddp(
    level: str = "O3", seed: int = 0, lr: float = 1e-3, make=torch.optim.AdamW, **fields
) -> tuple[nn.Module, torch.optim.Optimizer]:
    recipe = fp8_backends.resolve({"backend": f"msamp:{level}", **fields})
    ddp = wrapped_ddp(recipe, seed)
    return fp8_backends.prepare(ddp, make(list(ddp.parameters()), lr=lr, weight_decay=0.1), recipe)


def wrapped_ddp(recipe, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)), nn.LayerNorm(64))
    fp8_backends.prepare(model, None, recipe)
    return fp8_backends.prepare(nn.parallel.DistributedDataParallel(model), None, recipe)[0]


def train(model: nn.Module, optimizer, seeds) -> list[float]:
    losses = []
    for seed in seeds:
        x = values((16, 64), 1000 * dist.get_rank() + seed, 1.0)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def bits(model: nn.Module) -> list[torch.Tensor]:
    """Return all stored tensors of the parameters except masters."""
    stored = [
        (p.codes.view(torch.uint8), p.scale_inv) if isinstance(p, ScaledTensor) else (p.data,)
        for p in model.parameters()
    ]
    return [each.clone() for parts in stored for each in parts]


def whole_state_dicts(model, optimizer, **options) -> tuple[dict, dict]:
    with fp8_backends.checkpoints.whole_states(optimizer, **options):
        return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


def values_of(weights, states) -> tuple:
    """Remove the recipe, since `shard_states` may differ."""
    scaling = {name: value for name, value in states["fp8_scaling"].items() if name != "recipes"}
    return weights, states | {"fp8_scaling": scaling}


def equal(a, b) -> bool:
    """Compare two state dicts to the bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, ScaledTensor):
        return equal(a.codes, b.codes) and equal(a.scale_inv, b.scale_inv)
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(
            a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)
        )
    return a == b


def check_sharded_states_match_whole_states_and_resume():
    """Each rank steps its own weights; gathered states resume to the bit, shared out or not."""
    kinds = [
        *((level, torch.optim.AdamW) for level in ("O1", "O2", "O3", "O4")),
        *(("O3", make) for make in other_optimizers().values()),
    ]
    for level, make in kinds:
        shared = {"shard_states": True} if level in ("O1", "O2") else {}  # not their default
        model, optimizer = under_ddp(level, make=make, **shared)
        reference, its_optimizer = under_ddp(level, make=make, shard_states=False)
        assert optimizer.fp8_owners is not None and its_optimizer.fp8_owners is None
        with pytest.MonkeyPatch.context() as patch:
            # a weight has 4096 bytes: messages end inside of one
            patch.setattr(ddp, "MESSAGE", 5000)
            assert train(model, optimizer, range(3)) == train(reference, its_optimizer, range(3))
        assert equal(bits(model), bits(reference))
        saved = whole_state_dicts(model, optimizer)
        assert equal(
            values_of(*saved), values_of(reference.state_dict(), its_optimizer.state_dict())
        )
        mine = {id(p) for p in optimizer.state if isinstance(p, ScaledTensor)}
        assert len(mine) == 4 // dist.get_world_size()
        rests = {
            id(p) for p in model.parameters() if isinstance(p, ScaledTensor) and p.rest is not None
        }
        assert rests == (mine if level in ("O3", "O4") else set())
        losses = train(model, optimizer, range(3, 5))
        for fields in (shared, {"shard_states": False}):
            other, resumed = under_ddp(level, seed=5, make=make, **fields)
            weights, states = copy.deepcopy(saved)
            other.load_state_dict(weights)
            resumed.load_state_dict(states)
            assert equal(values_of(*whole_state_dicts(other, resumed)), values_of(*saved))
            assert train(other, resumed, range(3, 5)) == losses
            found, wanted = whole_state_dicts(other, resumed), whole_state_dicts(model, optimizer)
            assert equal(values_of(*found), values_of(*wanted))
            assert all(resumed.owns(p) for p in resumed.state)


def check_partial_export_of_sharded_states_is_refused():
    model, optimizer = under_ddp("O4")
    train(model, optimizer, range(1))
    others = [p for p in model.parameters() if isinstance(p, ScaledTensor) and p.rest is None]
    for export in (optimizer.state_dict, model.state_dict, others[0].exact):
        with pytest.raises(FP8BackendError, match="whole_states"):
            export()
    with pytest.raises(FP8BackendError, match=r"0.weight: .*get_state_dict.*shard_states=False"):
        with fp8_backends.checkpoints.plain_weights(model):
            pass
    weights, states = whole_state_dicts(model, optimizer, receives=dist.get_rank() == 0)
    for value in weights.values():
        assert dist.get_rank() > 0 if value.is_meta else value.isfinite().all()
    assert len(states["state"]) == len(list(model.parameters())) - len(others) * (
        dist.get_rank() > 0
    )
    assert all(p.rest is None for p in others)
    assert train(model, optimizer, range(1, 3))[-1] > 0


def check_local_steps_of_several_optimizers_and_models_are_refused():
    """Two optimizers of a model, and one of two models, until `Join` gathers the states."""
    recipe = fp8_backends.resolve({"backend": "msamp:O3", "on_unproven": "warn"})
    for count in (1, 2):
        models = [wrapped_ddp(recipe) for _ in range(count)]
        weights = [p for model in models for p in model.parameters()]
        parts = [weights] if count == 2 else [weights[:4], weights[4:]]
        optimizers = [torch.optim.AdamW(part, lr=1e-3) for part in parts]
        for model in models:
            for optimizer in optimizers:
                fp8_backends.prepare(model, optimizer, recipe)
        with models[-1].no_sync():
            losses = [
                model(values((16, 64), dist.get_rank(), 1.0)).square().mean() for model in models
            ]
            sum(losses).backward()
        for optimizer in optimizers:
            assert optimizer.fp8_owners is not None
            with pytest.raises(FP8BackendError, match="no_sync.*LocalSGD"):
                optimizer.step()
        Join(models)
        for optimizer in optimizers:
            assert optimizer.fp8_owners is None
            optimizer.step()


def check_weight_with_remote_master_is_never_read_as_fp8():
    """Evaluation and training multiply by the FP8 values on all ranks; any other read is exact or
    raises."""
    for level in ("O3", "O4"):
        model, optimizer = under_ddp(level)
        train(model, optimizer, range(1))
        with fp8_backends.checkpoints.whole_states(optimizer):
            exact = {name: value.clone() for name, value in model.state_dict().items()}
        copied, x = copy.deepcopy(model.module), values((16, 64), 1, 1.0)
        reads = {
            "float": lambda p: p.detach().float(),
            "double": lambda p: p.detach().to(torch.float64),
            "clone": lambda p: p.clone(),
            "numpy": lambda p: torch.from_numpy(p.detach().numpy().copy()),
            "tolist": lambda p: torch.tensor(p.tolist()),
            "copy_": lambda p: torch.empty(p.shape).copy_(p.detach()),
            "foreach": lambda p: torch._foreach_mul([p.detach()], 1.0)[0],
            "vector": lambda p: nn.utils.parameters_to_vector([p]).view(p.shape),
            "average": lambda p: torch.zeros(p.shape).add_(p.detach()),
            "row": lambda p: torch.stack([row.clone() for row in p.detach()]),
        }
        for of in (model.module, copied):
            for p in of.parameters():
                for read in reads.values() if isinstance(p, ScaledTensor) else ():
                    with pytest.raises(
                        FP8BackendError, match="get_state_dict.*whole_states.*shard_states=False"
                    ):
                        read(p).norm()
                assert "ScaledTensor" in repr(p) or not isinstance(p, ScaledTensor)
        with fp8_backends.checkpoints.whole_states(optimizer):
            for name, p in model.module.named_parameters():
                assert all(
                    torch.equal(read(p), exact[f"module.{name}"]) for read in reads.values()
                ), name
            model.state_dict()["module.0.weight"].mul_(0.5)
            with pytest.raises(
                FP8BackendError, match=r"0\.weight: a tensor of state_dict\(\) was written to"
            ):
                model.state_dict()
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with mode():
                evaluated = model.module.eval()(x)
            assert same_on_all_ranks(evaluated.detach().clone())
        model.train()
        assert train(model, optimizer, range(1, 3))[-1] > 0


def check_sharpness_aware_steps_need_whole_states():
    """Perturb the weights along their gradients in place, take the gradients there, restore the
    weights and step. One rank alone has the values to perturb, and may be the only one to write: no
    collective could help."""
    for level in ("O3", "O4"):
        model, optimizer = under_ddp(level)
        before = bits(model)
        for p in model.parameters():
            if isinstance(p, ScaledTensor):
                for write in (
                    lambda p: p.add_(0.1),
                    lambda p: p[0].mul_(2),
                    lambda p: torch._foreach_add_([p], 1.0),
                ):
                    with (
                        torch.no_grad(),
                        pytest.raises(FP8BackendError, match="in place.*shard_states=False"),
                    ):
                        write(p)
        assert all(map(torch.equal, bits(model), before))
        model, optimizer = under_ddp(level, shard_states=False)
        for seed in range(3):
            x = values((16, 64), 1000 * dist.get_rank() + seed, 1.0)
            loss = (model(x) - x).square().mean()
            loss.backward()
            before, old = bits(model), [p.detach().clone() for p in model.parameters()]
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(p.grad / p.grad.norm(), alpha=0.05)
            optimizer.zero_grad()
            assert all(map(same_on_all_ranks, bits(model)))
            perturbed = (model(x) - x).square().mean()
            perturbed.backward()
            losses = torch.stack([loss.detach(), perturbed.detach()])
            dist.all_reduce(losses)
            assert losses[1] > losses[0]
            for p, value in zip(model.parameters(), old, strict=True):
                p.data = value
            assert all(map(torch.equal, bits(model), before))
            optimizer.step()
            optimizer.zero_grad()
            assert all(map(same_on_all_ranks, bits(model)))


def check_new_values_are_equal_on_all_ranks():
    """Round to FP16, or to code and residual, before FP8: the owner, and so every other rank."""
    for level in ("O3", "O4"):
        model, _ = under_ddp(level)
        shapes = {
            name: value.shape
            for name, value in under_ddp(level, shard_states=False)[0].state_dict().items()
        }
        model.load_state_dict(
            {name: values(tuple(shape), i) for i, (name, shape) in enumerate(shapes.items())}
        )
        assert all(map(same_on_all_ranks, bits(model)))


def accelerated(**fields) -> tuple[Accelerator, nn.Module, torch.optim.Optimizer]:
    AcceleratorState._reset_state(True)
    handlers = [
        fp8_backends.MSAMPRecipeKwargs(opt_level="O4", **fields),
        InitProcessGroupKwargs(backend="gloo"),
    ]
    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=handlers)
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)), nn.LayerNorm(64))
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-3))


def check_accelerate_saves_and_loads_sharded_states():
    folder = ranks.shared_folder()
    accelerator, model, optimizer = accelerated()
    assert optimizer.optimizer.fp8_owners is not None
    train(model, optimizer, range(3))
    saved = whole_state_dicts(model.module, optimizer)
    accelerator.save_state(folder)
    accelerator.save_model(model, f"{folder}/export")
    exported = accelerator.get_state_dict(model)
    accelerator.wait_for_everyone()
    assert equal(dict(exported), dict(saved[0]))  # on every rank
    on_disk = load_file(f"{folder}/export/model.safetensors")
    assert equal(dict(sorted(on_disk.items())), dict(sorted(saved[0].items())))
    losses = train(model, optimizer, range(3, 5))
    for fields in ({}, {"shard_states": False}):
        accelerator, model, optimizer = accelerated(**fields)
        train(model, optimizer, range(7, 9))
        accelerator.load_state(folder)
        assert equal(dict(whole_state_dicts(model.module, optimizer)[0]), dict(saved[0]))
        assert train(model, optimizer, range(3, 5)) == losses


def check_scaling_state_refused_by_one_rank_is_refused_by_all():
    folder = ranks.shared_folder()
    accelerator, model, optimizer = accelerated()
    train(model, optimizer, range(2))
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    if dist.get_rank() == 1:
        unseal(Path(folder))
        states = load_file(f"{folder}/fp8_scaling_1.safetensors")
        states[max(states)][2, 0] = -1  # the bits of a NaN
        save_file(states, f"{folder}/fp8_scaling_1.safetensors")
    accelerator.wait_for_everyone()
    before = bits(model)
    with pytest.raises(FP8BackendError, match="a scale of .*fp8_window holds nan"):
        accelerator.load_state(folder)
    assert all(map(torch.equal, bits(model), before))


def check_checkpoint_of_several_ranks_is_whole_or_refused():
    """Include a rank without write access, ranks with local disks, and a damaged file."""
    folder = ranks.shared_folder()
    rank = dist.get_rank()
    accelerator, model, optimizer = accelerated()
    train(model, optimizer, range(2))
    shared = Path(folder, "shared")
    accelerator.save_state(shared)
    record = json.loads((shared / "fp8_manifest.json").read_text())
    assert {"random_states_0.pkl", "random_states_1.pkl"} < set(record["files"]) and record[
        "step"
    ] == 2

    def fail(*_):
        if rank == 1:
            raise OSError(28, "No space left on device")

    hook = accelerator.register_save_state_pre_hook(fail)
    with pytest.raises(FP8BackendError, match="failed on rank 1: .*No space left"):
        accelerator.save_state(shared)
    hook.remove()
    assert json.loads((shared / "fp8_manifest.json").read_text()) == record
    assert not (shared.parent / ".shared.saving").exists()
    accelerator.load_state(shared)

    state = PartialState()
    before, state.local_process_index = state.local_process_index, 0  # two nodes
    own = Path(folder, str(rank), "own")
    for _ in range(2):
        accelerator.save_state(own)
    names = set(json.loads((own / "fp8_manifest.json").read_text())["files"])
    assert f"random_states_{rank}.pkl" in names and f"random_states_{1 - rank}.pkl" not in names
    state.local_process_index = before

    accelerator.wait_for_everyone()
    if rank == 0:
        (shared / "random_states_1.pkl").write_bytes(b"")
    accelerator.wait_for_everyone()
    with pytest.raises(FP8BackendError, match="random_states_1.pkl has 0 bytes"):
        accelerator.load_state(shared)


def check_trainer_saves_o3_on_one_rank_and_resumes_bitwise():
    """Trainer saves the optimizer only on rank 0, so its states are not sharded."""
    from trainers.tiny_trainers import losses_of, trainer_for

    folder = ranks.shared_folder()
    losses = []
    for resume in (None, f"{folder}/checkpoint-2"):
        AcceleratorState._reset_state(True)
        with environment(ACCELERATE_MIXED_PRECISION="fp8", ACCELERATE_FP8_BACKEND="msamp:O3"):
            trainer = trainer_for(
                folder, max_steps=4, save_strategy="steps", save_steps=2, bf16=True
            )
            trainer.train(resume_from_checkpoint=resume)
        optimizer = trainer.optimizer.optimizer
        assert trainer.accelerator.fp8_recipe.level == "O3" and optimizer.fp8_owners is None
        losses.append(losses_of(trainer)[-2:])
    assert losses[0] == losses[1]
    assert fp8_backends.checkpoints.newest_checkpoint(folder) == f"{folder}/checkpoint-4"
    AcceleratorState._reset_state(True)


@contextlib.contextmanager
def environment(**variables: str):
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


# Their bytes, and sharded gradients


def sharded_model(level: str, **fields) -> tuple[nn.Module, torch.optim.Optimizer]:
    def shard_layers(model):
        for layer in model:
            fully_shard(layer)
        return fully_shard(model)

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(4)))
    return prepared_in(shard_layers, model, {"backend": f"msamp:{level}", **fields})


def check_bytes_per_element_on_each_rank():
    """O2 and O4 in shards: 6/N and 5/N. Under DDP O1 3 + 8/N, O2 3 + 3/N, O3 2 + 5/N, O4 2 + 3/N.
    Within 2 % for scales; blocks add 8/128 bytes."""
    count, found = dist.get_world_size(), {}
    for level, bytes_ in (("O2", 6), ("O4", 5 + 8 / 128)):
        model, optimizer = sharded_model(level)
        model(torch.randn(16, 128)).square().mean().backward()
        optimizer.step()
        found[f"{level} under FSDP2"] = measured = fp8_backends.audit(
            model, optimizer
        ).bytes_per_element
        assert abs(measured["total"] / (bytes_ / count) - 1) < 0.02, measured
    for level, whole_bytes, bytes_ in (
        ("O1", 3, 8),
        ("O2", 3, 3),
        ("O3", 2, 5),
        ("O4", 2, 3 + 8 / 128),
    ):
        model, optimizer = under_ddp(level, shard_states=True)
        x = torch.randn(16, 64)
        (model(x) - x).square().mean().backward()
        optimizer.step()
        found[f"{level} under DDP"] = measured = fp8_backends.audit(
            model, optimizer
        ).bytes_per_element
        assert abs(measured["total"] / (whole_bytes + bytes_ / count) - 1) < 0.02, measured
    return found


def check_sharded_gradients_are_clipped_and_zeroed():
    model, optimizer = sharded_model("O2")
    (100 * model(values((16, 128), dist.get_rank(), 1.0)).square().mean()).backward()
    gradients = [p.grad for p in model.parameters()]
    assert all(isinstance(gradient._local_tensor, ScaledTensor) for gradient in gradients)
    norm = torch.stack([whole(gradient).norm() for gradient in gradients]).norm()
    total = torch.nn.utils.clip_grad_norm_(model.parameters(), norm.item() / 10)
    total = total.full_tensor() if isinstance(total, DTensor) else total
    torch.testing.assert_close(total, norm, rtol=1e-5, atol=0)  # sums in FP32
    clipped = torch.stack([whole(p.grad).norm() for p in model.parameters()]).norm()
    torch.testing.assert_close(clipped, norm / 10, rtol=1e-5, atol=0)
    optimizer.zero_grad(set_to_none=False)
    assert all(not whole(p.grad).any() for p in model.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def check_changed_sharded_state_dicts_load_and_lost_writes_raise():
    """Agree on one scale for all ranks before the next forward."""
    for level in ("O2", "O3", "O4"):
        model, optimizer = sharded_model(level)
        x = values((16, 128), dist.get_rank(), 1.0)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        before = {name: whole(p) for name, p in model.named_parameters()}
        for change in (
            lambda p: p.mul_(0.5),
            lambda p: p.copy_(p * 0.5),
            lambda p: p.to_local().zero_(),
        ):
            change(model.state_dict()["0.weight"])
            with pytest.raises(
                FP8BackendError, match=r"0\.weight: a tensor of state_dict\(\) was written to"
            ):
                model(x)
        state = model.state_dict()
        for index, value in enumerate(state.values()):
            value.mul_(0.5) if index % 2 else value.copy_(value * 0.5)
        model.load_state_dict(state)
        after = {name: whole(value) for name, value in model.state_dict().items()}
        for name, value in before.items():
            torch.testing.assert_close(after[name], value * 0.5, rtol=2**-11, atol=2**-24)
        model(x).square().mean().backward()
        optimizer.step()
        assert all(same_on_all_ranks(local_part(p).scale_inv) for p in model.parameters())


def check_states_are_created_before_first_step():
    """`torch.distributed.checkpoint` takes an empty step to have states to load into: no FP8 need
    be proven in it."""
    model, optimizer = sharded_model("O3")
    before = [whole(p) for p in model.parameters()]
    states = get_optimizer_state_dict(model, optimizer)
    assert len(states["state"]) == 4 and all(
        "master_weight" in state for state in states["state"].values()
    )
    assert all(torch.equal(a, whole(b)) for a, b in zip(before, model.parameters(), strict=True))
    model(torch.randn(16, 128)).square().mean().backward()
    optimizer.step()


if __name__ == "__main__":
    ranks.main(globals())
