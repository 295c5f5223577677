"""FP8 under DDP on real ranks: gradients against exact means, and everything equal on all ranks."""

from __future__ import annotations

import dataclasses

import ddp_connecting
import ranks
import torch
import torch.distributed as dist
from ddp_training import (
    WIDTH,
    Traffic,
    alone,
    assert_equal_on_all_ranks,
    assert_mean_gradients,
    batch,
    everything,
    mine,
    mlp,
    mse,
    scaled,
    step,
    twin_of,
    wrapped,
)
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fp8_backends
from fp8_backends.comm.ddp import Connection
from fp8_backends.tensors.scaled_tensor import ScaledTensor

BACKENDS = {
    "O3": "msamp:O3",
    "O4": "msamp:O4",
    "O2 plain": {"backend": "msamp:O2", "gradient_comm": "plain"},
    "dynamic": "native:dynamic",
    "delayed": {"backend": "native:delayed", "amax_history_len": 16},
    "dynamic fp8": {"backend": "native:dynamic", "gradient_comm": "fp8"},
}
"""Each way of reducing gradients: O2 is like O3, and TorchAO like `dynamic`; `matrix.py` trains
both."""


def scenario(
    passes, model=None, spec="msamp:O2", steps: int = 2, set_to_none: bool = True, **options
):
    """Run `passes(model, step)` under DDP and on a twin of each rank: gradients are the twins'
    mean, and after the optimizer's step all ranks are equal. Return (ddp, optimizer)."""
    ddp, optimizer = wrapped(spec, mlp() if model is None else model, **options)
    for index in range(steps):
        twin = twin_of(ddp)
        twin.zero_grad()
        passes(ddp, index)
        passes(twin, index)
        assert_mean_gradients(ddp, twin)
        optimizer.step()
        assert_equal_on_all_ranks(ddp, optimizer)
        optimizer.zero_grad(set_to_none)
    return ddp, optimizer


def no_sync(model):
    return model.no_sync() if isinstance(model, DistributedDataParallel) else torch.enable_grad()


def check_ranks_stay_equal_and_match_one_rank():
    """30 steps with the same data on one rank and on all, dropped in loss by half. Losses differ by
    how FP8 rounds: scales follow from the rows that a rank has, which is all that `dynamic` with
    its FP32 gradients shows, and a gradient that travels is rounded twice (0.037) in place of once
    (0.026). So no backend may show more than twice what `dynamic` does, and none a gap that does
    not average out."""
    figures = {}
    for name, spec in BACKENDS.items():
        ddp, optimizer = wrapped(spec, mlp(), lr=1e-2)
        model, its_optimizer = alone(spec, mlp(), lr=1e-2)
        gaps, first = [], None
        for index in range(30):
            loss = step(ddp, optimizer, index)
            if index % 6 == 0:  # the last one as well: ranks that came apart stay apart
                assert_equal_on_all_ranks(ddp, optimizer)
            other = mse(model, batch(index))
            other.backward()
            its_optimizer.step()
            its_optimizer.zero_grad()
            gaps.append(loss / other.item() - 1)
            first = first or other.item()
        figures[name] = {
            "largest gap": max(map(abs, gaps)),
            "mean gap": sum(gaps) / len(gaps),
            "learned": other.item() / first,
        }
        assert other.item() < 0.5 * first, figures
    floor = figures["dynamic"]["largest gap"]
    assert floor < 0.02, figures
    for name, figure in figures.items():
        assert figure["largest gap"] <= 2 * floor and abs(figure["mean gap"]) <= 0.2 * floor, (
            name,
            figures,
        )
    return figures


def microbatches(model, index, count: int = 4) -> None:
    for k in range(count - 1):
        with no_sync(model):
            (mse(model, mine(10 * index + k)) / count).backward()
    (mse(model, mine(10 * index + count - 1)) / count).backward()


def check_microbatches_are_summed_in_fp32_and_reduced_once():
    for spec in ("msamp:O2", "msamp:O3", {"backend": "native", "gradient_comm": "fp8"}):
        with Traffic() as traffic:
            ddp, _ = scenario(
                microbatches, spec=spec, steps=1, bucket_mb=25 if spec == "msamp:O3" else 0.01
            )
        reducer = Connection.find(ddp).reducer
        buckets = len(reducer.buckets) if reducer else traffic.count("all_to_all_single")
        assert traffic.count("all_to_all_single") == buckets <= 4, traffic.calls


def check_reduction_per_microbatch_gives_same_mean():
    """Test `sync_each_batch` of Accelerate: averaging averaged gradients again changes nothing."""

    def passes(model, index):
        for k in range(3):
            mse(model, mine(10 * index + k)).backward()

    ddp, optimizer = wrapped("msamp:O2", mlp())
    twin = twin_of(ddp)
    passes(ddp, 0)
    passes(twin, 0)
    # the sums of 1, 2 and 3 microbatches are rounded, instead of one sum
    assert_mean_gradients(ddp, twin, bound=0.037 * 3**0.5)
    optimizer.step()
    assert_equal_on_all_ranks(ddp, optimizer)


class Branches(nn.Module):
    """Use `everywhere` and `once` on all ranks, `somewhere` on rank 0, `nowhere` on none; `frozen`
    does not train."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.nowhere, self.somewhere, self.frozen, self.everywhere, self.once = (
            nn.Linear(WIDTH, WIDTH) for _ in range(5)
        )
        self.frozen.requires_grad_(False)

    def forward(self, x, *, use_somewhere: bool, use_once: bool = True):
        x = self.frozen(torch.tanh(self.everywhere(x)))
        x = x + self.somewhere(x) if use_somewhere else x
        return {"out": self.once(x) if use_once else x, "input": x.detach(), "more": [(x,), None]}


def check_unused_weights_and_keyword_only_inputs():
    def passes(model, index):
        x, y = mine(index)
        out = model(x=x, use_somewhere=dist.get_rank() == 0)["out"]
        nn.functional.mse_loss(out, y).backward()

    scenario(passes, Branches(), find_unused_parameters=True)


def check_rank_without_scaled_weights_participates():
    class Chooses(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net, self.bias = mlp(), nn.Parameter(torch.zeros(WIDTH))

        def forward(self, x):
            return (self.net(x) if dist.get_rank() else x) + self.bias

    spec = {"backend": "msamp:O2", "on_unproven": "warn"}  # rank 0 has no FP8 product
    scenario(
        lambda model, index: mse(model, mine(index)).backward(),
        Chooses(),
        spec,
        find_unused_parameters=True,
    )


def check_a_weight_used_in_an_earlier_microbatch_only():
    def passes(model, index):
        x, y = mine(index)
        with no_sync(model):
            nn.functional.mse_loss(model(x, use_somewhere=True)["out"], y).backward()
        nn.functional.mse_loss(model(x, use_somewhere=False, use_once=False)["out"], y).backward()

    scenario(passes, Branches(), find_unused_parameters=True)


def check_static_graph():
    scenario(lambda model, index: mse(model, mine(index)).backward(), static_graph=True, steps=3)


def check_several_forwards_before_a_backward():
    def passes(model, index):
        losses = [mse(model, mine(10 * index + k)) for k in range(3)]
        with torch.no_grad():
            mse(model, mine(5))
        (sum(losses) / 3).backward()

    scenario(passes)


def check_no_sync_forward_and_reduced_forward_before_one_backward():
    def passes(model, index):
        first = mse(model, mine(10 * index))
        with no_sync(model):
            second = mse(model, mine(10 * index + 1))
        (first + second).backward()

    scenario(passes)


def check_evaluation_between_steps_changes_nothing():
    ddp, optimizer = wrapped("msamp:O2", mlp())
    other, its_optimizer = wrapped("msamp:O2", mlp())
    for index in range(3):
        step(ddp, optimizer, index)
        ddp.eval()
        mse(ddp, mine(50))  # with grad enabled, and without a backward
        with torch.no_grad(), fp8_backends.checkpoints.plain_weights(ddp):
            assert not scaled(ddp)
            mse(ddp, mine(51))
        with ddp.no_sync():
            mse(ddp, mine(52))
        ddp.train()
        step(other, its_optimizer, index)
    assert everything(ddp.module, optimizer) == everything(other.module, its_optimizer)


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    tokens: int


def check_outputs_in_every_container():
    for put, take in (
        (lambda out: (out, 1), lambda out: out[0]),
        (lambda out: [None, {"x": out}], lambda out: out[1]["x"]),
        (lambda out: Output(out, 3), lambda out: out.logits),
    ):
        model = mlp()
        model.register_forward_hook(lambda module, args, out, put=put: put(out))

        def passes(model, index, take=take):
            x, y = mine(index)
            nn.functional.mse_loss(take(model(x)), y).backward()

        scenario(passes, model, steps=1)


def check_loss_outside_forward_outputs():
    """Keep the loss in the model: the first gradient signals the start of backward."""

    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x, y):
            self.loss = nn.functional.mse_loss(self.net(x), y)

    def passes(model, index):
        model(*mine(index))
        getattr(model, "module", model).loss.backward()
        del getattr(model, "module", model).loss

    scenario(passes, Keeps(), steps=1)


def check_gradients_zeroed_in_place():
    ddp, _ = scenario(
        lambda model, index: mse(model, mine(index)).backward(), steps=3, set_to_none=False
    )
    assert all(isinstance(p.grad, ScaledTensor) for p in scaled(ddp.module).values())


def check_tied_weights():
    model = mlp()
    model[2].weight = model[0].weight
    ddp, optimizer = scenario(lambda model, index: mse(model, mine(index)).backward(), model)
    assert model[2].weight is model[0].weight and len(Connection.find(ddp).reducer.parameters) == 2


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool, shared: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)
        )
        if shared:
            self.blocks[3][0].weight = self.blocks[0][0].weight
        self.reentrant = reentrant

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def with_inputs_that_need_gradients(model, index):
    x, y = mine(index)
    nn.functional.mse_loss(model(x.requires_grad_()), y).backward()


def check_both_kinds_of_activation_checkpointing():
    for reentrant in (False, True):
        scenario(with_inputs_that_need_gradients, Checkpointed(reentrant))
    scenario(with_inputs_that_need_gradients, Checkpointed(False, shared=True))


def check_second_gradient_after_reduction_is_named():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.shared, self.alpha = (
                nn.Linear(WIDTH, WIDTH, bias=False),
                nn.Parameter(torch.ones(())),
            )

        def forward(self, x):
            x = checkpoint(self.shared, x, use_reentrant=True)
            return checkpoint(self.shared, x, use_reentrant=True) * self.alpha

    ddp, _ = wrapped("msamp:O2", Twice())
    ddp_connecting.refused(
        lambda: with_inputs_that_need_gradients(ddp, 0), "shared.weight", "use_reentrant=False"
    )


def check_failed_backward_leaves_no_trace():
    """Fail before the first gradient, so stock DDP continues, too; after a later failure it accepts
    no forward."""
    ddp, optimizer = wrapped("msamp:O2", mlp())
    other, its_optimizer = wrapped("msamp:O2", mlp())

    def fail(gradient):
        raise RuntimeError("planted")

    handle = ddp.module[4].register_forward_hook(
        lambda module, args, out: out.register_hook(fail) and None
    )
    loss = mse(ddp.eval(), mine(1))
    try:
        loss.backward()
        raise AssertionError("did not fail")
    except RuntimeError as error:
        assert "planted" in str(error)
    handle.remove()
    ddp.train()
    for index in range(2):
        step(ddp, optimizer, index)
        step(other, its_optimizer, index)
    assert everything(ddp.module, optimizer) == everything(other.module, its_optimizer)


def check_forwards_without_step_keep_gradients():
    """Profile the proof of `ao` inside DDP's own range: consecutive profilers there would overwrite
    activations."""
    model = nn.Sequential(
        *(m for _ in range(6) for m in (nn.Linear(128, 352), nn.GELU(), nn.Linear(352, 128)))
    )
    optimizer = torch.optim.AdamW(model.parameters())
    fp8_backends.prepare(model, optimizer, "ao:tensorwise")
    ddp, x = DistributedDataParallel(model), torch.randn(512, 128)
    expected = None
    for _ in range(10):
        with torch.autocast("cpu", torch.bfloat16):
            loss = ddp(x).float().square().mean()
        loss.backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        expected = expected or gradients
        assert all(map(torch.equal, gradients, expected))
        optimizer.zero_grad()


def check_non_finite_gradient_on_one_rank_reaches_every_scaler():
    for spec in ("msamp:O2", {"backend": "msamp:O2", "gradient_comm": "plain"}):
        ddp, optimizer = wrapped(spec, mlp())
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for index in range(3):
            x, y = mine(index)
            y = y * float("inf") if index == 1 and dist.get_rank() == 1 else y
            before = everything(ddp.module, optimizer)
            scaler.scale(nn.functional.mse_loss(ddp(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            changed = everything(ddp.module, optimizer) != before
            assert changed == (index != 1) or index == 1, index
            weights = {
                name: digest
                for name, digest in everything(ddp.module).items()
                if "state" not in name
            }
            stayed = all(
                before[name] == digest
                for name, digest in weights.items()
                if not name.endswith(" grad")
            )
            assert stayed == (index == 1), index
            assert_equal_on_all_ranks(ddp, optimizer)
        assert scaler.get_scale() == 128.0


# Uneven inputs


def check_uneven_inputs():
    """Rank r has 2 + 2r batches. An exhausted rank contributes zeros and ends with the last rank's
    weights, states and scales, so an epoch with even inputs can follow."""
    stock_optimizer = {"backend": "native:delayed", "amax_history_len": 4, "gradient_comm": "fp8"}
    for spec in ("msamp:O2", "msamp:O3", "msamp:O4", stock_optimizer):
        ddp, optimizer = wrapped(spec, mlp())
        with Join([ddp]):
            for index in range(2 + 2 * dist.get_rank()):
                with no_sync(ddp):
                    mse(ddp, mine(100 + index)).backward()
                step(ddp, optimizer, index, everyone=False)
        if spec is stock_optimizer:  # with states left to stock
            assert_equal_on_all_ranks(ddp)
            continue
        assert_equal_on_all_ranks(ddp, optimizer)
        for index in range(2):
            step(ddp, optimizer, 50 + index)
            assert_equal_on_all_ranks(ddp, optimizer)


def check_a_joined_rank_contributes_zeros():
    ddp, _ = wrapped("msamp:O2", mlp())
    twin = twin_of(ddp)
    with Join([ddp]):
        if dist.get_rank() == 0:
            mse(ddp, mine(0)).backward()
            mse(twin, mine(0)).backward()
    if dist.get_rank() == 0:
        for p, q in zip(scaled(ddp.module).values(), scaled(twin).values(), strict=True):
            exact = q.grad / dist.get_world_size()
            assert (p.grad.dequantize() - exact).norm() <= 0.04 * exact.norm()
    else:
        assert all(p.grad is None for p in scaled(ddp.module).values())


def check_division_by_remaining_ranks_is_refused():
    ddp, _ = wrapped("msamp:O2", mlp())
    ddp_connecting.refused(
        lambda: Join([ddp], divide_by_initial_world_size=False), "divide_by_initial_world_size"
    )


if __name__ == "__main__":
    ranks.main({**globals(), **vars(ddp_connecting)})
