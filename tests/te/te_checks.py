"""The `te` compute on several ranks, over the stand-in for TransformerEngine's kernels."""

from __future__ import annotations

from standin import activate

activate()

import tempfile  # noqa: E402
from contextlib import nullcontext  # noqa: E402

import pytest  # noqa: E402
import ranks  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from conv1d_twins import conv_twin  # noqa: E402
from distributed import expert_checks  # noqa: E402
from distributed.engines import assert_engine, engine_arguments, start_engine  # noqa: E402
from expert_families import routed  # noqa: E402
from fsdp2_accelerate_checks import accelerator as under_fsdp2  # noqa: E402
from fsdp2_models import checks  # noqa: E402
from model_families import WIDTH  # noqa: E402
from te_models import BATCHES, Adapted, InAutocast, adamw, losses, model, of_te_linear  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.pipelining import PipelineStage  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling  # noqa: E402

import fp8_backends  # noqa: E402
from fp8_backends import FP8BackendError, RecipeError, TERecipeKwargs, prepare  # noqa: E402
from fp8_backends.compute.te.weights import is_frozen  # noqa: E402
from fp8_backends.convert.conversion import prepared_roots  # noqa: E402
from fp8_backends.tensors.scaled_tensor import ScaledTensor  # noqa: E402

SPECS = {"te:delayed": DelayedScaling, "te:dynamic": Float8CurrentScaling}


def own_batches() -> list[torch.Tensor]:
    """Return batches of this rank, scaled by its number for different amaxes."""
    return [batch * (1 + dist.get_rank()) for batch in BATCHES]


def scales(made: nn.Module) -> torch.Tensor:
    (_, root, known), *_ = prepared_roots(made)
    state = known.compute.scaling_state(root)
    return torch.cat([tensor.flatten() for name, tensor in state.items() if name.endswith("scale")])


def differs_between_ranks(tensor: torch.Tensor) -> bool:
    largest, smallest = tensor.clone(), tensor.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    dist.all_reduce(smallest, dist.ReduceOp.MIN)
    return not torch.equal(largest, smallest)


def assert_every_product(made: nn.Module) -> None:
    for name, counts in fp8_backends.audit(made).products.items():
        assert counts["fprop"] == counts["wgrad"] > 0, (name, counts)


def sharded(made: nn.Module) -> nn.Module:
    for block in made.blocks:
        fully_shard(block)
    return fully_shard(made)


def check_losses_match_te_linear_under_ddp():
    for spec, recipe in SPECS.items():
        made = model()
        prepare(made, None, spec)
        wrapped = DistributedDataParallel(made)
        optimizer = adamw(wrapped)
        prepare(wrapped, optimizer, spec)
        by_hand = InAutocast(DistributedDataParallel(of_te_linear()), recipe())
        assert losses(wrapped, optimizer, own_batches()) == losses(
            by_hand, adamw(by_hand), own_batches()
        ), spec
        assert_every_product(wrapped)
        if spec == "te:delayed":
            assert not differs_between_ranks(scales(wrapped))


def check_losses_match_te_linear_under_fsdp2():
    for spec, recipe in SPECS.items():
        made = model()
        prepare(made, None, spec)
        sharded(made)
        optimizer = adamw(made)
        prepare(made, optimizer, spec)
        by_hand = InAutocast(sharded(of_te_linear()), recipe())
        assert losses(made, optimizer, own_batches()) == losses(
            by_hand, adamw(by_hand), own_batches()
        ), spec
        assert_every_product(made)
        assert all(isinstance(parameter, DTensor) for parameter in made.parameters())
        assert made.blocks[0].up.is_fsdp2 is True


def check_conv1d_trains_like_linear_layers_under_ddp_and_fsdp2():
    """Match bitwise, except at a level under FSDP2, with different shards of a gradient and their
    own scales."""
    for wrap in (DistributedDataParallel, sharded):
        for spec in ("te:delayed", "te:blockwise", "te:dynamic+msamp:O3"):
            found = []
            for twin in (conv_twin, lambda linear: linear):
                made = model()
                made.first, made.last = twin(made.first), twin(made.last)
                for block in made.blocks:
                    block.up = twin(block.up)
                recipe = fp8_backends.FP8RecipeKwargs(
                    backend=spec, **({"rounding": "nearest"} if "O3" in spec else {})
                )
                prepare(made, None, recipe)
                wrapped = wrap(made)
                optimizer = adamw(wrapped)
                prepare(wrapped, optimizer, recipe)
                found.append(losses(wrapped, optimizer, own_batches()[:3]))
                assert_every_product(wrapped)
            gap = 0.01 if wrap is sharded and "msamp" in spec else 0
            assert found[0] == pytest.approx(found[1], rel=gap, abs=0), (wrap.__name__, spec, found)


def check_experts_train_alike_under_ddp_and_fsdp2():
    """Use only experts: under FSDP2 `te.Linear` casts its weight again in backward, by the scales
    of the next step. At a level a shard's gradient has its own scale."""
    for backend, gap in (("te:delayed", 0), ("te:dynamic+msamp:O4", 1e-3)):
        found = {}
        for wrap in (expert_checks.in_ddp, expert_checks.in_fsdp2):
            recipe = fp8_backends.FP8RecipeKwargs(backend=backend, include=["experts"])
            found[wrap.__name__], made = expert_checks.trained("gpt_oss", recipe, wrap)
            assert_every_product(made)
            if backend == "te:delayed":
                assert not differs_between_ranks(scales(made))
        assert found["in_ddp"] == pytest.approx(found["in_fsdp2"], rel=gap, abs=0), found


def check_expert_parallelism_matches_one_process():
    """Include a rank without tokens; with delayed scales experts stay in high precision with a
    reason. Weights' gradients match up to one bf16 unit: an operand's address may change the order
    of an FP32 sum."""
    for scaling, numbers in (
        ("dynamic", (40, 7)),
        ("blockwise", (0, 24)),
        ("dynamic+msamp:O2", (0, 24)),
    ):
        tokens = routed(sum(numbers), 0, torch.bfloat16)
        dy = torch.randn(sum(numbers), WIDTH, generator=torch.Generator().manual_seed(0)).bfloat16()
        one, root = (
            expert_checks.experts_in_fp8(f"te:{scaling}", torch.bfloat16, share)
            for share in (False, True)
        )
        expected = expert_checks.one_step(one, *tokens, dy)
        own = [expert_checks.of_this_rank(each, numbers) for each in (*tokens, dy)]
        for found, each in zip(expert_checks.one_step(root, *own), expected, strict=True):
            assert torch.equal(found, expert_checks.of_this_rank(each, numbers)), (scaling, numbers)
        for name, parameter in root.experts.named_parameters():
            gradient = one.experts.get_parameter(name).grad
            if isinstance(gradient, ScaledTensor):
                continue  # a rank's has another scale
            torch.testing.assert_close(
                parameter.grad.full_tensor(), gradient, rtol=2**-7, atol=1e-4
            )
    with pytest.raises(FP8BackendError, match="mix the amaxes of different experts"):
        expert_checks.experts_in_fp8("te:delayed", torch.bfloat16, share=True)


def check_recomputation_under_fsdp2_changes_no_loss():
    for reentrant in (True, False):
        found = []
        for recompute in (None, reentrant):
            made = model(recompute)
            prepare(made, None, "te:delayed")
            sharded(made)
            optimizer = adamw(made)
            prepare(made, optimizer, "te:delayed")
            found.append((losses(made, optimizer, own_batches()), scales(made)))
        assert found[0][0] == found[1][0], reentrant
        assert torch.equal(found[0][1], found[1][1])


def check_delayed_scales_in_a_pipeline_are_refused():
    """Avoid a deadlock: one stage would wait for amaxes of a rank waiting for that stage's
    output."""
    for spec, said in (
        ("te:delayed", pytest.raises(RecipeError, match="not go with a pipeline")),
        ("te:dynamic", nullcontext()),
    ):
        made = model()
        prepare(made, None, spec)
        sizes = {"input_args": BATCHES[0], "output_args": BATCHES[0]}
        stage = PipelineStage(
            made, dist.get_rank(), dist.get_world_size(), torch.device("cpu"), **sizes
        )
        with said:
            stage.forward_maybe_with_nosync(BATCHES[0])
        with torch.no_grad():
            stage.forward_maybe_with_nosync(BATCHES[0])


class Experts(nn.Module):
    """Each rank visits its own expert, first or only."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x):
        return x + self.experts[dist.get_rank()](x) + self.experts[2](x)


def check_ranks_running_different_layers_synchronize_scales():
    """TransformerEngine lists layers as they run first, and reduces the list in one piece."""
    torch.manual_seed(0)
    made = Experts()
    optimizer = torch.optim.SGD(made.parameters(), lr=1e-3)
    prepare(made, optimizer, "te:delayed")
    losses(made, optimizer, own_batches()[:3])
    assert not differs_between_ranks(scales(made))
    input_scales = [layer.delayed_state("forward").scale[0].item() for layer in made.experts]
    assert input_scales[1] == input_scales[2] < input_scales[0], (
        "rank 1's inputs are twice as large"
    )


def accelerator(engine: str, **fields) -> Accelerator:
    # an earlier notice may name another engine
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    arguments = engine_arguments(engine, 1.0, 1)
    handlers = [TERecipeKwargs(**fields), *arguments.pop("kwargs_handlers", [])]
    made = Accelerator(mixed_precision="fp8", kwargs_handlers=handlers, **arguments)
    start_engine(made, engine, arguments)
    return made


def train(acc: Accelerator, made: nn.Module, optimizer, batches) -> list[float]:
    found = []
    for batch in batches:
        loss = (made(batch).float() - batch).square().mean()
        acc.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def check_norms_match_one_rank_under_ddp_and_fsdp2():
    """Both ranks see the same batches, so the mean of their gradients is the gradient, and every
    loss repeats."""
    found = []
    for wrap in (lambda made: made, DistributedDataParallel, shard_each):
        torch.manual_seed(0)
        made = nn.Sequential(
            nn.Linear(32, 32), nn.RMSNorm(32, eps=1e-5), nn.Linear(32, 32), nn.LayerNorm(32)
        )
        prepare(made, None, "te:dynamic")
        ((_, _, known),) = prepared_roots(made)
        assert [norm.swapped for norm in known.report.norms] == [True, True]
        wrapped = wrap(made)
        optimizer = adamw(wrapped)
        prepare(wrapped, optimizer, "te:dynamic")
        found.append(losses(wrapped, optimizer))
    assert found[0] == found[1] == found[2]


def shard_each(made: nn.Sequential) -> nn.Sequential:
    """`fully_shard`, norms too, each on its own: FSDP2 swaps their classes once more."""
    for layer in made:
        fully_shard(layer)
    return fully_shard(made)


def check_accelerate_proves_and_resumes():
    fp8_backends.connect()
    for engine in ("DDP", "FSDP2"):
        said = ranks.Said()
        acc = accelerator(engine, amax_history_len=4, amax_compute_algo="max")
        made, optimizer = (lambda m: acc.prepare(m, adamw(m)))(model())
        assert_engine(engine, made)
        with said:
            train(acc, made, optimizer, own_batches()[:3])
        proof = "te:delayed: 6/6 Linear, 100 % of weight FLOPs in FP8, fprop dgrad wgrad (te)"
        proofs = [line for line in said.lines if "of weight FLOPs in FP8" in line]
        assert proofs == ([proof] if dist.get_rank() == 0 else []), said.lines
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        acc.save_state(folder[0])
        unbroken = train(acc, made, optimizer, own_batches()[3:])
        acc.load_state(folder[0])
        assert train(acc, made, optimizer, own_batches()[3:]) == unbroken, engine


def check_fp8_params_train_under_ddp_and_refuse_sharding():
    found = []
    for fp8_params in (False, True):
        torch.manual_seed(0)
        made = Adapted()
        spec = TERecipeKwargs(scaling="dynamic", exclude=["adapter"], fp8_params=fp8_params)
        prepare(made, None, spec)
        wrapped = DistributedDataParallel(made)
        optimizer = adamw(made.adapter)
        prepare(wrapped, optimizer, spec)
        found.append(losses(wrapped, optimizer, own_batches()))
        assert is_frozen(made.base.first.weight) == fp8_params
    assert found[0] == found[1]
    for engine in ("FSDP2", "ZeRO3"):
        with pytest.raises(RecipeError, match="sharded weights"):
            acc = accelerator(engine, scaling="dynamic", exclude=["adapter"], fp8_params=True)
            acc.prepare(Adapted(), adamw(Adapted()))
    made = Adapted()
    prepare(made, None, spec)
    fully_shard(made)
    with pytest.raises(RecipeError, match="sharded weights"):
        losses(made, adamw(made.adapter), own_batches()[:1])


def check_deepspeed_matches_one_rank():
    """Both ranks see the same batches, so the mean of their gradients is the gradient, and every
    number repeats."""
    fp8_backends.connect()
    for engine, scaling, recompute in (("ZeRO1", "dynamic", None), ("ZeRO3", "delayed", False)):
        made, (alone, its_optimizer) = model(recompute), prepared_alone(scaling, recompute)
        expected = []
        for batch in BATCHES:
            loss = (alone(batch) - batch).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
            its_optimizer.step()
            its_optimizer.zero_grad()
            expected.append(loss.item())
        acc = accelerator(engine, scaling=scaling)
        wrapped, optimizer = acc.prepare(made, adamw(made))
        assert_engine(engine, wrapped)
        assert train(acc, wrapped, optimizer, BATCHES) == expected, engine
        assert_every_product(made)


def prepared_alone(scaling: str, recompute: bool | None) -> tuple:
    made = model(recompute)
    return prepare(made, adamw(made), f"te:{scaling}")


globals().update(checks(under_fsdp2, "te:delayed"))

if __name__ == "__main__":
    ranks.main(globals())
