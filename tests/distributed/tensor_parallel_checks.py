"""Checks of `native` on the parts of tensor-parallel layers: the codes of one process, and its
losses."""

from __future__ import annotations

import copy
import functools
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conv1d_twins import conv
from ranks import main
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import fp8_backends
from fp8_backends.compute.native import layer_rule
from fp8_backends.compute.native.layer_rule import Split, Stored
from fp8_backends.errors import FP8BackendError
from fp8_backends.formats.formats import E4M3
from fp8_backends.formats.scaling import GRAD_OUTPUT, INPUT, RULES, new_window_state
from fp8_backends.recipes.handlers import FP8RecipeKwargs
from fp8_backends.tools.compare.measuring import sent_bytes

WIDTH, INNER = 64, 256
LAYERS = ("up", "other", "down")
ONCE = {"fprop": 1, "dgrad": 1, "wgrad": 1, "recomputed": 0}


class Net(nn.Module):
    """Map [batch, tokens, WIDTH] to the same shape. Two layers read one input."""

    def __init__(self, inner: int = INNER, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.other = nn.Linear(WIDTH, inner, bias), nn.Linear(WIDTH, inner, bias)
        self.down = nn.Linear(inner, WIDTH, bias)

    def forward(self, x):
        h = self.norm(x)
        return self.down(F.silu(self.up(h)) * self.other(h))


class Packed(nn.Module):
    """Keep two layers in one weight, as some models keep their gate."""

    def __init__(self) -> None:
        super().__init__()
        self.packed, self.down = nn.Linear(WIDTH, 2 * INNER, bias=False), nn.Linear(INNER, WIDTH)

    def forward(self, x):
        gate, up = self.packed(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Exact(nn.Module):
    """Sum few integers with power-of-two scales: ranks add up without rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(INNER, WIDTH)
        with torch.no_grad():
            self.up.weight.copy_(torch.randint(-3, 4, (INNER, WIDTH))).select(1, 0).fill_(7)
            self.down.weight.zero_()
            self.down.bias.copy_(torch.arange(WIDTH))
            for row, columns in zip(
                self.down.weight, torch.rand(WIDTH, INNER).topk(3).indices, strict=True
            ):
                row[columns] = torch.tensor([7.0, 1.0, -1.0])

    def forward(self, x):
        return self.down(F.hardtanh(self.up(x), -7, 7))


@functools.cache
def mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def parallel(model: nn.Module, **plan) -> nn.Module:
    plan = {"up": ColwiseParallel(), "other": ColwiseParallel(), "down": RowwiseParallel(), **plan}
    return parallelize_module(
        model, mesh(), {name: style for name, style in plan.items() if hasattr(model, name)}
    )


def both(model: nn.Module, spec, **plan) -> tuple[nn.Module, nn.Module]:
    """A model on one process, and on all ranks."""
    together = parallel(copy.deepcopy(model), **plan)
    for each in (model, together):
        fp8_backends.prepare(each, None, spec)
    return model, together


def by_transformers(model: nn.Module, **plan: str) -> nn.Module:
    """Parallelize like transformers, by a model's `tp_plan`."""
    from transformers.distributed.tensor_parallel import (
        ALL_PARALLEL_STYLES,
        apply_tensor_parallelism,
    )

    plan = {"up": "colwise", "other": "colwise", "down": "rowwise", **plan}
    plan = {name: style for name, style in plan.items() if hasattr(model, name)}
    for name, style in plan.items():
        for part in ("weight", "bias"):
            ALL_PARALLEL_STYLES[style].shard_param(getattr(model, name), part, mesh())
    return apply_tensor_parallelism(model, mesh(), plan)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def off(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max()).item()


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def losses(
    model: nn.Module, steps: int = 2, dtype: torch.dtype | None = None, spec=None
) -> list[float]:
    """Train and return losses. `spec`: a rule with states that follow the optimizer and are
    synchronized after backward."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    if spec is not None:
        fp8_backends.prepare(model, optimizer, spec)
    for step in range(steps):
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            y = model(2 * normal(4, 8, WIDTH, seed=step).requires_grad_())
        loss = (y.float() - normal(4, 8, WIDTH, seed=9)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def relative(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def check_codes_of_parts_match_whole_weight() -> None:
    """x, w and dy, cut along either dimension, in the layouts of both their products. One rank has
    the amax."""
    spans, group = [256, 128], dist.group.WORLD
    x = normal(*spans) * torch.logspace(-3, 3, 256)[:, None] * torch.logspace(2, -2, 128)
    # the delayed scale is in the state
    for scaling, dim in itertools.product(sorted({*RULES} - {"delayed"}), (0, 1)):
        rule = layer_rule.LayerRule(RULES[scaling], E4M3, E4M3, layer_rule.HighPrecision(), False)
        split, rank = Split(dim, group), dist.get_rank()
        if rule.scales.cuts_contraction and spans[dim] % 256:
            continue  # a block would span two ranks
        part = x.chunk(2, dim)[rank].contiguous()
        for tensor in (INPUT, GRAD_OUTPUT):
            state = new_window_state("cpu") if scaling == "window" else None
            found = layer_rule.quantized(part, E4M3, rule, state, tensor, split=split)
            expected = layer_rule.quantized(x, E4M3, rule, state, tensor)
            same_codes(found.along_columns(), expected.along_columns(), dim, rule)
            same_codes(found.along_rows(), expected.along_rows(), 1 - dim, rule)
        for transposed in (False, True):
            weights = Stored(part, None), Stored(x, None)
            if rule.scales.blocks is None:
                found, expected = (
                    w.quantized(rule, None, split=s).along_columns()
                    for w, s in zip(weights, (split, None), strict=True)
                )
            else:
                blocks = rule.scales.weight_blocks
                found, expected = (
                    w.in_blocks(blocks, E4M3, transposed, s)
                    for w, s in zip(weights, (split, None), strict=True)
                )
            same_codes(
                found, expected, dim if rule.scales.blocks is None else dim ^ transposed, rule
            )


def same_codes(found, expected, dim: int, rule) -> None:
    codes = expected.codes.view(torch.uint8).chunk(2, dim)[dist.get_rank()]
    assert torch.equal(found.codes.view(torch.uint8), codes), (rule, dim)
    scale_inv = expected.scale_inv
    if scale_inv.dim() and scale_inv.shape[dim] > 1:
        scale_inv = scale_inv.chunk(2, dim)[dist.get_rank()]
    assert torch.equal(found.scale_inv, scale_inv), (rule, dim)


def check_exact_sums_match_one_process_bitwise() -> dict:
    found = {}
    for rule in RULES:
        torch.manual_seed(0)
        alone, together = both(Exact(), f"native:{rule}")
        results = []
        for model in (alone, together):
            x = torch.randint(
                -1, 2, (4, 8, WIDTH), generator=torch.Generator().manual_seed(1)
            ).float()
            x[..., 0] = 7
            y = model(x.requires_grad_() * 1)
            loss = (y * (normal(4, 8, WIDTH) * 4).round()).sum()
            loss.backward()
            results.append([loss, y, *(whole(p.grad) for p in model.parameters()), x.grad])
        assert all(map(torch.equal, results[0][:-1], results[1][:-1])), rule
        found[rule] = off(results[1][-1], results[0][-1])  # a sum over the ranks of non-integers
        assert found[rule] < (2**-7 if rule == "rowwise" else 1e-6), found
        counts = fp8_backends.audit(together).products
        assert counts == dict.fromkeys(("up", "down"), ONCE), counts
    return found


def check_losses_of_a_typical_model() -> dict:
    """Terms are rounded before the sum over ranks: in FP32, or in bf16 as dtype of the products.
    `rowwise` always rounds. Parts are uneven but for blocks; the first rank adds the bias."""
    found, kept = {}, ColwiseParallel(use_local_output=False)
    for rule, dtype in itertools.product(
        ("dynamic", "window", "rowwise", "mxfp8"), (None, torch.bfloat16)
    ):
        torch.manual_seed(0)
        inner = INNER if rule == "mxfp8" else 97
        alone, together = both(Net(inner), f"native:{rule}", up=kept, other=kept)
        found[f"{rule} {dtype}"] = relative(losses(together, 2, dtype), losses(alone, 2, dtype))
        assert found[f"{rule} {dtype}"] < (1e-6 if dtype is None and rule != "rowwise" else 1e-3), (
            found
        )
    return found


def check_transformers_parallel_styles() -> dict:
    """Parts may be uneven. Without gradients, and with packed weights, layers get plain tensors."""
    found = {}
    plans = {
        "even": (Net(), {}),
        "uneven": (Net(97), {}),
        "split input": (
            Net(),
            {"up": "colwise_gather_output", "other": "colwise_rep", "down": "rowwise_split_input"},
        ),
        "packed": (Packed(), {"packed": "packed_colwise"}),
    }
    for (name, (alone, plan)), rule in zip(
        plans.items(), ("dynamic", "window", "window", "dynamic"), strict=True
    ):
        together = by_transformers(copy.deepcopy(alone), **plan)
        alone = copy.deepcopy(alone)
        spec = FP8RecipeKwargs(backend=f"native:{rule}", use_autocast_during_eval=True)
        for model in (alone, together):
            fp8_backends.prepare(model, None, spec)
        found[f"{name} {rule}"] = relative(losses(together), losses(alone))
        assert found[f"{name} {rule}"] < 1e-6, found
        for training in (True, False):
            with torch.no_grad():
                y, expected = (
                    model.train(training)(normal(2, 4, WIDTH)) for model in (together, alone)
                )
            assert off(y, expected) < 1e-6
        counts = fp8_backends.audit(together).products
        assert set(counts) == {each for each, _ in together.named_children()} - {"norm"}, counts
        assert all(each["fprop"] == 4 and each["wgrad"] == 2 for each in counts.values()), counts
    return found


def check_states_match_one_process() -> None:
    for rule in ("delayed", "window"):
        spec = f"native:{rule}"
        alone, together = both(Net(), spec)
        assert relative(losses(together, 3, spec=spec), losses(alone, 3, spec=spec)) < 1e-6
        states = [
            [layer.fp8_scaling.view(torch.float32) for layer in (model.up, model.other, model.down)]
            for model in (together, alone)
        ]
        for found, expected in zip(*states, strict=True):
            assert torch.allclose(found, expected, rtol=1e-6, atol=0), (rule, found, expected)


def conv1d_net() -> nn.Sequential:
    return nn.Sequential(conv(WIDTH, INNER), nn.GELU(), conv(INNER, WIDTH))


def check_conv1d() -> None:
    """Split its weight [in, out] manually: no style cuts it."""

    def cut(module: nn.Module, weight, bias, taken, given) -> None:
        for name, placed in (("weight", weight), ("bias", bias)):
            whole = module._parameters[name].detach()
            module._parameters[name] = nn.Parameter(distribute_tensor(whole, mesh(), [placed]))
        distribute_module(
            module,
            mesh(),
            input_fn=lambda _, args, mesh: DTensor.from_local(
                args[0], mesh, [taken], run_check=False
            ),
            output_fn=lambda _, y, mesh: y.redistribute(placements=[given]).to_local(),
        )

    for rule in ("dynamic", "mxfp8"):
        alone = conv1d_net()
        together = copy.deepcopy(alone)
        cut(together[0], Shard(1), Shard(0), Replicate(), Shard(-1))
        cut(together[2], Shard(0), Replicate(), Shard(-1), Replicate())
        for model in (alone, together):
            fp8_backends.prepare(model, None, f"native:{rule}")
        assert relative(losses(together), losses(alone)) < 1e-6
        assert fp8_backends.audit(together).products == fp8_backends.audit(alone).products


def check_local_tokens_with_replicated_weight() -> None:
    """Put a replicated layer between layers with local tokens."""
    for rule in ("dynamic", "rowwise", "mxfp8"):
        alone = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        together = distribute_module(copy.deepcopy(alone), mesh())
        for model in (alone, together):
            fp8_backends.prepare(model, None, f"native:{rule}")
        x = normal(4, 32, WIDTH)
        y = together(distribute_tensor(x, mesh(), [Shard(1)]))
        y.square().mean().backward()
        expected = alone(x)
        expected.square().mean().backward()
        assert torch.equal(whole(y), expected)
        assert off(whole(together[0].weight.grad), alone[0].weight.grad) < (
            2**-7 if rule == "rowwise" else 1e-6
        )


def check_unsupported_part_sizes_are_named() -> None:
    with pytest.raises(FP8BackendError, match="leaves a rank without any of 1 features"):
        fp8_backends.prepare(parallel(Net(1)), None, "native:dynamic")
    with pytest.raises(FP8BackendError, match="each rank 24 of 48 features, not multiples of 16"):
        fp8_backends.prepare(parallel(Net(48)), None, "ao:tensorwise")
    for rule, inner in (("blockwise", 128), ("mxfp8", 96)):
        model = parallel(Net(inner))
        with pytest.raises(FP8BackendError, match="which cuts a block of"):
            fp8_backends.prepare(model, None, f"native:{rule}")
    for spec in ("native:dynamic", "native:delayed", "ao:tensorwise", "msamp:O2"):
        prepared_before = Net()
        fp8_backends.prepare(prepared_before, None, spec)
        with pytest.raises(
            FP8BackendError, match="64 -> 256 was cut over ranks after it was prepared"
        ):
            parallel(prepared_before)(normal(2, 2, WIDTH))
    with pytest.raises(FP8BackendError, match="the input is a Tensor"):
        model = Net()
        fp8_backends.prepare(model, None, "native:dynamic")
        model.up.weight = nn.Parameter(
            distribute_tensor(model.up.weight.detach(), mesh(), [Shard(0)])
        )
        model(normal(2, 2, WIDTH))


def check_high_precision_and_recomputed_products() -> None:
    spec = FP8RecipeKwargs(backend="native:dynamic", override_linear_precision=(False, True, False))
    alone, together = both(Net(), spec)
    assert relative(losses(together), losses(alone)) < 1e-6
    # `rowwise` always rounds before the sum over ranks
    for scaling, bound in (("dynamic", 1e-6), ("rowwise", 1e-3)):
        spec = FP8RecipeKwargs(backend=f"native:{scaling}", products={"wgrad": "e4m3"})
        alone, together = both(Net(), spec)
        assert relative(losses(together), losses(alone)) < bound, scaling
    alone, together = both(Net(), "native:dynamic")
    x = normal(2, 4, WIDTH).requires_grad_()
    checkpoint(lambda x: together(2 * x), x, use_reentrant=False).square().sum().backward()
    found, x.grad = x.grad, None
    alone(2 * x).square().sum().backward()
    assert off(found, x.grad) < 1e-6
    counts = fp8_backends.audit(together).products
    assert counts == dict.fromkeys(LAYERS, ONCE | {"recomputed": 1}), counts


def check_layers_with_same_input_share_its_codes() -> None:
    """Each style makes its own DTensor of the input."""
    _, together = both(Net(), "native:dynamic")
    h = together.norm(normal(2, 4, WIDTH))
    before = together.up(h) * together.other(h)
    shared = together.up.fp8_shared
    assert len(shared._inputs[h][1]) == 1
    h.mul_(2)
    together.up(h)
    assert len(shared._inputs[h][1]) == 1 and not torch.equal(
        together.up(h) * together.other(h), before
    )


def check_compiled_layers_make_one_graph() -> None:
    """Include synchronization. Only dynamo traces, in a tenth of a whole compiler's time."""
    model, h = parallel(Net(bias=False)), normal(2, 4, INNER // 2)
    fp8_backends.prepare(model, None, "native:dynamic")
    expected = model.down(h)
    assert torch.equal(torch.compile(model.down, backend="eager", fullgraph=True)(h), expected)


def check_sequence_parallel_inputs_are_gathered_as_codes() -> dict:
    """Gather once for both readers, with a quarter of the bytes of FP32. Backward is plain."""
    plan = {
        "norm": SequenceParallel(),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    x, sent, gradients = normal(4, 8, WIDTH), {}, {}
    alone = Net()
    twin = copy.deepcopy(alone)
    fp8_backends.prepare(alone, None, "native:dynamic")
    alone(x).square().mean().backward()
    for comm in ("plain", "fp8"):
        model = parallel(copy.deepcopy(twin), **plan)
        fp8_backends.prepare(
            model, None, FP8RecipeKwargs(backend="native:dynamic", activation_comm=comm)
        )
        part = x.chunk(2, 1)[dist.get_rank()]
        made = []
        sent[comm] = sent_bytes(
            lambda model=model, part=part, made=made: made.append(model(part) * 1)
        )
        made[0].square().mean().backward()
        gradients[comm] = [whole(p.grad) for p in model.parameters()]
        for found, p in zip(gradients[comm], alone.parameters(), strict=True):
            assert off(found, p.grad) < 1e-6
    of_norm = 2  # one sum over the ranks for both layers, or two
    assert all(map(torch.equal, *(each[of_norm:] for each in gradients.values())))
    tokens_of_a_rank, amax = x.numel() // 2, 4
    assert sent["plain"] - sent["fp8"] == (2 * 4 - 1) * tokens_of_a_rank - amax, sent
    return sent


if __name__ == "__main__":
    main(globals())
