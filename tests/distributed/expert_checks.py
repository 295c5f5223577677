"""Train mixtures of experts on several ranks: DDP, FSDP2 and ZeRO-3 agree, and so does
transformers' expert parallelism, which exchanges tokens between ranks with different experts."""

from __future__ import annotations

import copy
import functools
import itertools
import tempfile
from unittest import mock

import torch
import torch.distributed as dist
from expert_families import EXPERTS as EXPERTS_OF_ALL
from expert_families import build, make_experts, routed
from fsdp2_training import mean, on_all_ranks, prepared_in
from model_families import WIDTH, batch
from ranks import main
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import fp8_backends
from fp8_backends.compute import hardware
from fp8_backends.convert import conversion
from fp8_backends.recipes.handlers import FP8RecipeKwargs
from fp8_backends.states import levels
from fp8_backends.tensors.scaled_tensor import ScaledTensor
from fp8_backends.tensors.sharded_tensor import is_distributed, local_part

EXPERTS = "model.layers.1.mlp.experts.down_proj"
STEPS = 3


def share(step: int) -> dict[str, torch.Tensor]:
    """This rank's rows of a batch of four."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return {name: rows.chunk(ranks)[rank] for name, rows in batch(rows=4, seed=step).items()}


def in_ddp(model):
    return DistributedDataParallel(model)


def in_fsdp2(model, **options):
    """Shard experts apart from their block, as usual for mixtures of experts."""
    for block in model.model.layers:
        fully_shard(block.mlp.experts, **options)
        fully_shard(block, **options)
    return fully_shard(model, **options)


def prepared(family, spec, wrap, checkpointing=False, seed=0):
    """(the wrapped model, its optimizer)"""
    model = build(family, seed)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return prepared_in(wrap, model, spec, lr=3e-3)


def trained(family, spec, wrap, checkpointing=False, seed=0):
    """(losses, mean over ranks; the wrapped model)"""
    model, optimizer = prepared(family, spec, wrap, checkpointing, seed)
    return steps(model, optimizer, range(STEPS)), model


def whole(step: int) -> dict[str, torch.Tensor]:
    return batch(rows=4, seed=step)


in_bf16 = functools.partial(torch.autocast, "cpu", torch.bfloat16)


def steps(
    model, optimizer, numbers, given=share, backward=torch.Tensor.backward, autocast=in_bf16
) -> list[float]:
    """Return losses, mean over ranks."""
    losses = []
    for step in numbers:
        with autocast():
            loss = model(**given(step)).loss.float()
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean(loss))
    return losses


def counts(model, recomputed=0):
    found = fp8_backends.audit(model).products[EXPERTS]
    assert found == {"fprop": STEPS, "dgrad": STEPS, "wgrad": STEPS, "recomputed": recomputed}, (
        found
    )


def check_ddp_and_fsdp2_have_the_same_losses() -> dict:
    found = {}
    for family, spec in (("mixtral", "native:dynamic"), ("gpt_oss", "native:rowwise")):
        losses = {}
        for wrap in (in_ddp, in_fsdp2):
            losses[wrap.__name__], model = trained(family, spec, wrap)
            counts(model)
        assert losses["in_ddp"] == losses["in_fsdp2"], losses
        assert losses["in_ddp"][-1] < losses["in_ddp"][0]
        found[family] = losses["in_ddp"]
    return found


def check_levels_store_experts_in_ddp_and_fsdp2() -> dict:
    """A shard's gradient has its own scale: losses differ by its rounding to E4M3, which averages
    out over models. Adam takes a whole step for a gradient that one scale rounds to zero and the
    other does not: at O4 up to 0.002."""
    found = {}
    for family, level, bytes_each, seeds in (("mixtral", "O2", 2, 1), ("gpt_oss", "O4", 1, 3)):
        gaps = []
        for seed in range(seeds):
            losses = {}
            for wrap, parts in ((in_ddp, 1), (in_fsdp2, 2)):
                losses[wrap.__name__], model = trained(family, f"msamp:{level}", wrap, seed=seed)
                counts(model)
                stored = fp8_backends.audit(model).bytes_per_element
                assert (
                    abs(stored["weight"] - bytes_each / parts) < 0.02
                    and abs(stored["gradient"] - 1 / parts) < 0.02
                )
            assert losses["in_ddp"][-1] < losses["in_ddp"][0] - 0.2, losses
            gaps.append([a - b for a, b in zip(losses["in_ddp"], losses["in_fsdp2"], strict=True)])
        means = torch.tensor(gaps).mean(0)
        assert means.abs().max() < 1e-3, gaps
        found[f"{family} {level}"] = losses
    return found


def check_stored_experts_resume_to_the_bit() -> None:
    """Resume DDP at O4, with sharded residuals and states, and FSDP2, from whole and from sharded
    states."""
    for wrap in (in_ddp, in_fsdp2):
        model, optimizer = prepared("mixtral", "msamp:O4", wrap)
        steps(model, optimizer, range(2))
        with fp8_backends.checkpoints.whole_states(optimizer):
            saved = copy.deepcopy(get_state_dict(model, optimizer))
        assert all(not isinstance(local_part(weight), ScaledTensor) for weight in saved[0].values())
        resume(saved, model, optimizer, *prepared("mixtral", "msamp:O4", wrap, seed=3))


def resume(saved, model, optimizer, other, resumed) -> None:
    """Load (states of model and optimizer) into another pair, and train both to the same losses."""
    set_state_dict(other, resumed, model_state_dict=saved[0], optim_state_dict=saved[1])
    ((_, root, found),), ((_, other_root, _),) = map(conversion.prepared_roots, (model, other))
    found.compute.load_scaling_state(other_root, found.compute.scaling_state(root))
    assert steps(other, resumed, range(2, 4)) == steps(model, optimizer, range(2, 4))


def check_fsdp2_recomputes_and_casts_its_shards() -> dict:
    _, model = trained("mixtral", "native:rowwise", in_fsdp2, checkpointing=True)
    counts(model, recomputed=STEPS)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    losses, model = trained(
        "mixtral", "native:dynamic", lambda model: in_fsdp2(model, mp_policy=policy)
    )
    counts(model)
    assert losses[-1] < losses[0]
    return {"bf16 shards": losses}


def check_delayed_states_of_every_expert_are_synchronized() -> None:
    spec = fp8_backends.FP8RecipeKwargs(backend="native:delayed", amax_history_len=4)
    for wrap in (in_ddp, in_fsdp2):
        _, model = trained("mixtral", spec, wrap)
        ((_, root, prepared),) = conversion.prepared_roots(model)
        states = [state for state in prepared.compute.scaling_buffers(root) if state.dim() == 3]
        assert len(states) == 4 and all(state[:, 0].any(-1).all() for state in states)
        for state in states:
            assert all(torch.equal(state, other) for other in on_all_ranks(state))


def check_zero3_matches_ddp_losses() -> dict:
    """Match bitwise with bf16 products in hardware. Otherwise DeepSpeed's plain linear function, as
    for the head, sums in another order: less than a unit of bf16 in a loss."""
    from deepspeed_training import accelerator

    losses = {}
    for spec in ("native:dynamic", "native:rowwise"):
        with accelerator(3, spec) as acc:
            model = build("mixtral")
            model, optimizer = acc.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
            losses[spec] = steps(
                model, optimizer, range(STEPS), backward=acc.backward, autocast=acc.autocast
            )
            counts(acc.unwrap_model(model))
        expected = trained("mixtral", spec, in_ddp)[0]
        unit = 0 if hardware.cpu_bf16() else torch.finfo(torch.bfloat16).eps
        assert all(abs(a - b) <= unit * b for a, b in zip(losses[spec], expected, strict=True)), (
            losses,
            expected,
        )
    return losses


# expert parallelism


@functools.cache
def meshes():
    """Return the mesh of ranks sharing the experts, and a mesh of one rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("ep", "tp"))
    return mesh["ep"], mesh["tp"]


def shared_out(model, plan, shared_batch=False, implementation="all_to_all"):
    """Share the experts of transformers' plan over the ranks, with the same tokens on all or
    not."""
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    of_experts, alone = meshes()
    batch_mesh = of_experts if shared_batch else alone
    return apply_expert_parallelism(
        model, of_experts, batch_mesh, plan, ep_implementation=implementation
    )


PLAN = {
    **dict.fromkeys(
        (f"experts.{part}{end}" for part in ("gate_up_proj", "down_proj") for end in ("", "_bias")),
        "grouped_gemm",
    ),
    "experts": "ep_dispatch_experts",
}


def experts_in_fp8(spec, dtype, share=False):
    """GPT-OSS' experts in FP8, in their own root; with `share`, only this rank's."""
    root = make_experts("gpt_oss", dtype)
    if share:
        shared_out(root, PLAN, implementation="auto")
    fp8_backends.prepare(root, None, spec)
    return root


def one_step(root, hidden, chosen, weights, dy):
    """(output, gradients of the tokens and of the routing weights)"""
    hidden, weights = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
    y = root.experts(hidden, chosen, weights)
    y.backward(dy)
    return y.detach(), hidden.grad, weights.grad


ROUTES = {
    "to all experts, and one rank has fewer tokens": ((40, 7), range(EXPERTS_OF_ALL)),
    "to the first rank's experts": ((40, 24), range(EXPERTS_OF_ALL // 2)),
    "from one rank": ((0, 24), range(EXPERTS_OF_ALL)),
}


def of_this_rank(tokens, numbers):
    return tokens.split(list(numbers))[dist.get_rank()]


def sorted_stably():
    """Patch transformers' unstable sort of pairs: the order of an expert's tokens decides the last
    bit of sums over them."""
    return mock.patch("torch.argsort", functools.partial(torch.argsort, stable=True))


@sorted_stably()
def check_expert_parallelism_matches_one_process() -> None:
    """Match bitwise in bf16."""
    for (numbers, experts), scaling in itertools.product(
        ROUTES.values(), ("dynamic", "delayed", "rowwise", "mxfp8")
    ):
        hidden, chosen, weights = routed(sum(numbers), 0, torch.bfloat16)
        chosen = chosen % len(experts)
        dy = torch.randn(sum(numbers), WIDTH, generator=torch.Generator().manual_seed(0)).bfloat16()
        one = experts_in_fp8(f"native:{scaling}", torch.bfloat16)
        y, dx, dw = (
            of_this_rank(each, numbers) for each in one_step(one, hidden, chosen, weights, dy)
        )
        own = [of_this_rank(each, numbers) for each in (hidden, chosen, weights, dy)]
        root = experts_in_fp8(f"native:{scaling}", torch.bfloat16, share=True)
        found = one_step(root, *own)
        case = numbers, scaling
        assert torch.equal(found[0], y), case
        assert torch.equal(found[2], dw), case
        assert torch.equal(found[1], dx), case
        for name, parameter in root.experts.named_parameters():
            gradient = parameter.grad.full_tensor()
            assert torch.equal(gradient, one.experts.get_parameter(name).grad), (case, name)


def check_split_experts_have_codes_of_whole_experts() -> None:
    """transformers' tensor-parallel plan: parts' gradients to the bit; sums over ranks, rounded to
    bf16, to two units."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    plan = {
        "experts.gate_up_proj": "packed_colwise",
        "experts.down_proj": "rowwise",
        "experts": "moe_tp_experts",
    }
    hidden, chosen, weights = routed(40, 0, torch.bfloat16)
    dy = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(0)).bfloat16()
    for scaling, fmt in (
        ("dynamic", "E4M3"),
        ("dynamic", "HYBRID"),
        ("rowwise", "E4M3"),
        ("window", "HYBRID"),
    ):
        found = []
        for share in (False, True):
            root = make_experts("mixtral", torch.bfloat16)
            if share:
                apply_tensor_parallelism(root, meshes()[0], plan)
            fp8_backends.prepare(
                root, None, FP8RecipeKwargs(backend=f"native:{scaling}", fp8_format=fmt)
            )
            y, dx, _ = one_step(root, hidden, chosen, weights, dy)
            gradients = [parameter.grad for parameter in root.experts.parameters()]
            found.append((y, dx, [each.full_tensor() if share else each for each in gradients]))
        whole_experts, parts = found
        assert all(map(torch.equal, parts[2], whole_experts[2])), (scaling, fmt)
        for ours, expected in zip(parts[:2], whole_experts[:2], strict=True):
            torch.testing.assert_close(
                ours, expected, rtol=2**-7, atol=2**-7 * expected.abs().max().item()
            )


@sorted_stably()
def check_expert_parallel_training_matches_one_process() -> dict:
    """Mixtral's losses and weights to the bit, with one batch on all ranks, and the states of all
    experts on every rank."""
    found = {}
    for spec, implementation in (
        ("native:dynamic", "all_reduce"),
        (FP8RecipeKwargs(backend="native:delayed", amax_history_len=4), "auto"),
        ("native:rowwise", "all_to_all"),
        ("msamp:O2", "auto"),
    ):
        one, model = build("mixtral"), build("mixtral")
        plan = model._expand_parallel_plan(model.ep_plan)
        shared_out(model, plan, shared_batch=True, implementation=implementation)
        losses = [steps(*ready(each, spec), range(STEPS), given=whole) for each in (one, model)]
        assert losses[0] == losses[1], (spec, losses)
        counts(model)
        audits = [fp8_backends.audit(each) for each in (one, model)]
        assert audits[0].flops_share == audits[1].flops_share
        for name, parameter in model.named_parameters():
            # a part's gradient with its own scale, which rounds small numbers
            if spec != "msamp:O2":
                values = parameter.full_tensor() if is_distributed(parameter) else parameter
                assert torch.equal(values, one.get_parameter(name)), (spec, name)
        states = [list(states_of(each)) for each in (one, model)]
        assert all(torch.equal(*pair) for pair in zip(*states, strict=True))
        found[str(spec)] = losses[0]
    return found


def ready(model, spec, lr=3e-3):
    """Return (prepared model, its optimizer), for ranks with the same batch."""
    fp8_backends.prepare(model, None, spec)
    model, optimizer = fp8_backends.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=lr, foreach=False), spec
    )
    levels.expect_equal_gradients(model)
    return model, optimizer


def in_transformers_fsdp2(model, **sizes):
    """Distribute like `from_pretrained(distributed_config=…)`."""
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.utils import initialize_distributed_mesh

    config = DistributedConfig(**sizes)
    return model.maybe_distribute_model(model, config, initialize_distributed_mesh(config)[1])


def check_expert_parallel_ranks_resume_and_save_whole_weights() -> dict:
    """transformers' FSDP2 shards the other layers."""
    import transformers

    spec = FP8RecipeKwargs(backend="native:delayed", amax_history_len=4)

    def fresh(seed):
        model = in_transformers_fsdp2(build("mixtral", seed), fsdp_size=2, ep_size=2)
        return fp8_backends.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3), spec)

    model, optimizer = fresh(0)
    losses = steps(model, optimizer, range(2))
    for state in states_of(model):
        assert all(torch.equal(state, other) for other in on_all_ranks(state))
    resume(copy.deepcopy(get_state_dict(model, optimizer)), model, optimizer, *fresh(3))
    experts = model.get_parameter(EXPERTS).full_tensor()
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)
        model.save_pretrained(folders[0])
        dist.barrier()
        plain = transformers.AutoModelForCausalLM.from_pretrained(folders[0])
        dist.barrier()
    assert torch.equal(plain.get_parameter(EXPERTS), experts)
    return {"losses": losses}


def states_of(model):
    ((_, root, prepared),) = conversion.prepared_roots(model)
    return prepared.compute.scaling_state(root).values()


if __name__ == "__main__":
    main(globals())
