"""Train under DeepSpeed ZeRO-1, 2 and 3 through a stock Accelerator, and refuse unsupported
settings."""

from __future__ import annotations

import os
from unittest import mock

import deepspeed
import pytest
import ranks
import torch
import torch.distributed as dist
from accelerate.utils import DeepSpeedPlugin
from conv1d_twins import conv_twin
from deepspeed_training import (
    COMPUTES,
    HIDDEN,
    LAYERS,
    STAGES,
    Blocks,
    accelerator,
    accelerator_with,
    adamw,
    assert_products,
    batches,
    ds_config,
    json_file,
    mean_over_ranks,
    resumed_bitwise,
    scaling_states,
    shares,
    train,
    train_alone,
    trained_by_configuration,
    whole_parameters,
)
from fsdp2_training import same_on_all_ranks
from torch.multiprocessing.reductions import StorageWeakRef

import fp8_backends
from fp8_backends.errors import RecipeError


def check_fp32_engine_matches_one_rank():
    """Both ranks see the same batches, so the mean gradient equals each rank's, and every number
    repeats."""
    data, worst = batches(4), 0.0
    for backend in COMPUTES:
        expected = train_alone(backend, data)
        for stage, make in (
            *((stage, Blocks) for stage in STAGES if stage == 3 or backend == "native:delayed"),
            *[(3, blocks_of_conv1d)] * (backend in ("native:rowwise", "ao:tensorwise")),
        ):
            with accelerator(stage, backend) as acc, ranks.Said() as log:
                model = make()
                engine, optimizer = acc.prepare(model, adamw(model))
                losses = train(acc, engine, optimizer, data)
                assert_products(model)
            gap = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
            worst = max(worst, gap)
            proofs = [line for line in log.lines if "of weight FLOPs in FP8" in line]
            assert len(proofs) == int(dist.get_rank() == 0), log.lines
    return {"worst": worst}


def check_bf16_engine_is_as_close_as_fp8_to_bf16():
    """Each rank has half of every batch, so scales follow from halves, and the engine keeps bf16
    weights where autocast keeps FP32. Bound: the engine's effect on a bf16 run plus twice FP8's
    effect on the one-rank run, since FP8 may move the engine's run as far in another direction."""
    data, figures = batches(12, 32), {}
    bf16 = train_alone(None, data, bf16=True)
    engines_own = _gap(_trained(None, 3, data, bf16=True), bf16)
    for backend in ("native:delayed", "native:rowwise", "ao:tensorwise"):
        alone = train_alone(backend, data, bf16=True)
        losses = _trained(backend, 3, data, bf16=True)
        bound = 2 * _gap(alone, bf16) + engines_own
        figures[backend] = (_gap(losses, alone), bound)
        assert figures[backend][0] <= bound, figures
    stages = [_trained("native:delayed", stage, data, bf16=True) for stage in STAGES]
    assert stages[0] == stages[1] == stages[2]
    return figures


def _trained(backend: str | None, stage: int, data: list, **options) -> list[float]:
    with accelerator(stage, backend, **options) as acc:
        model = Blocks()
        engine, optimizer = acc.prepare(model, adamw(model))
        return mean_over_ranks(train(acc, engine, optimizer, shares(data)))


def _gap(losses: list[float], others: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(losses, others, strict=True))


def check_saved_run_resumes_bitwise():
    """By `save_state`, and by the engine's own checkpoint, as `transformers.Trainer` saves."""
    for backend, stage in (("native:delayed", 2), ("ao:tensorwise", 1), ("native:window", 3)):
        model, _ = resumed_bitwise(backend, stage)
        states = scaling_states(model)
        assert bool(states) == backend.startswith("native")
        assert all(map(same_on_all_ranks, states))


def check_microbatches_accumulate_and_window_rolls_once_per_step():
    data = batches(6)
    for backend, stage in (("native:window", 1), ("native:delayed", 2), ("ao:rowwise", 3)):
        expected = train_alone(backend, data, accumulate=2)
        with accelerator(stage, backend, gradient_accumulation_steps=2) as acc:
            model = Blocks()
            engine, optimizer = acc.prepare(model, adamw(model))
            assert train(acc, engine, optimizer, data) == expected, (backend, stage)
            if backend == "native:window":
                assert {int(state[0, 1]) for state in scaling_states(model)} == {3}


def check_clipping_bounds_the_true_norm():
    """Use SGD: the norm of an update is the learning rate times the clipped norm."""
    data = batches(1)
    for backend, stage in (("native:dynamic", 1), ("native:rowwise", 2), ("ao:tensorwise", 3)):
        alone = Blocks()
        fp8_backends.prepare(alone, None, backend)
        alone(*data[0]).backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in alone.parameters()]).item()
        with accelerator(stage, backend, config={"gradient_clipping": 0.01}) as acc:
            model = Blocks()
            before = [p.detach().clone() for p in model.parameters()]
            engine, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
            train(acc, engine, optimizer, data)
            assert acc.clip_grad_norm_(engine.parameters(), 0.01) == pytest.approx(norm, rel=1e-5)
            moved = [now - was for now, was in zip(whole_parameters(model), before, strict=True)]
            assert torch.nn.utils.get_total_norm(moved).item() == pytest.approx(0.01, rel=1e-3)


def check_activation_checkpointing_changes_no_bit():
    data = batches(3)
    for backend, stage in (("native:delayed", 2), ("native:rowwise", 3), ("ao:rowwise", 3)):
        expected = train_alone(backend, data)
        with accelerator(stage, backend) as acc:
            model = Blocks(recompute=True)
            engine, optimizer = acc.prepare(model, adamw(model))
            assert train(acc, engine, optimizer, data) == expected, (backend, stage)
            assert_products(model)
            if backend.startswith("native"):
                assert fp8_backends.audit(model).products["layers.1"]["recomputed"] == 3


def check_zero_3_frees_every_gathered_weight_between_forward_and_backward():
    backends = ("native:dynamic", "native:rowwise", "ao:tensorwise", "ao:rowwise", "high")
    of_conv1d = ("native:rowwise", "ao:tensorwise", "high")
    for backend, make in [(each, Blocks) for each in backends] + [
        (each, blocks_of_conv1d) for each in of_conv1d
    ]:
        name = "native:dynamic" if backend == "high" else backend
        fields = {"override_linear_precision": (False, True, False)} if backend == "high" else {}
        with accelerator(3, name, bf16=True, fields=fields) as acc:
            model = make()
            engine, optimizer = acc.prepare(model, adamw(model))
            gathered = GatheredWeights()
            for layer in (*model.layers, model.out):
                layer.register_forward_pre_hook(gathered)  # after the engine's own gathering hook
            x, y = batches(1)[0]
            loss = engine(x.bfloat16(), y)
            assert gathered.sizes == [HIDDEN * HIDDEN] * LAYERS + [HIDDEN * 16]
            assert all(p.numel() == 0 for p in model.parameters())
            alive = [
                number for number, storage in enumerate(gathered.storages) if not storage.expired()
            ]
            assert not alive, (backend, make.__name__, alive)
            acc.backward(loss)
            if backend != "high":
                assert_products(model)


def blocks_of_conv1d() -> Blocks:
    model = Blocks()
    model.layers = torch.nn.ModuleList(map(conv_twin, model.layers))
    return model


class GatheredWeights:
    """Record gathered weights and the lifetime of their memory in a forward pre-hook."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.storages: list[StorageWeakRef] = []

    def __call__(self, layer: torch.nn.Linear, args) -> None:
        self.sizes.append(layer.weight.numel())
        self.storages.append(StorageWeakRef(layer.weight.untyped_storage()))


def check_weights_partitioned_at_birth_are_converted():
    """Under `deepspeed.zero.Init` a Parameter is empty when it is prepared; its sizes are in
    `ds_shape`."""
    data = batches(3)
    for backend in ("native:delayed", "ao:tensorwise"):
        expected = train_alone(backend, data)
        with accelerator(3, backend) as acc:
            with deepspeed.zero.Init(
                config_dict_or_path=ds_config(3)
                | {"gradient_accumulation_steps": 1, "train_batch_size": 32}
            ):
                model = Blocks()
            assert all(p.numel() == 0 for p in model.parameters())
            engine, optimizer = acc.prepare(model, adamw(model))
            assert train(acc, engine, optimizer, data) == expected
            products = fp8_backends.convert.conversion.weight_products(model)
            assert {(p.in_features, p.out_features, p.state) for p in products} == {
                (64, 64, "fp8"),
                (64, 16, "fp8"),
            }
            assert_products(model)


def compiled_engine():
    """Of one layer beside the last: Dynamo traces the same code for each."""
    data = batches(3)
    expected = train_alone("native:delayed", data, layers=1)
    with accelerator(3, "native:delayed", dynamo_backend="aot_eager") as acc, ranks.Said() as log:
        model = Blocks(layers=1)
        engine, optimizer = acc.prepare(model, adamw(model))
        assert train(acc, engine, optimizer, data) == expected
        assert sum("2/2 Linear, 100 % of weight FLOPs" in line for line in log.lines) == (
            dist.get_rank() == 0
        )


def check_json_with_auto_values_and_own_optimizer():
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    with trained_by_configuration("native:window", zero, torch_adam=True) as (model, _, _):
        # auto: mixed_precision="fp8" means bf16 around FP8
        assert next(model.parameters()).dtype == torch.bfloat16


def check_refusals():
    def refused(*words: str, backend: str, plugin: DeepSpeedPlugin | None = None, **fields) -> None:
        with pytest.raises(RecipeError) as error, accelerator_with(plugin, backend, fields=fields):
            pass
        assert all(word in str(error.value) for word in words), str(error.value)

    path = json_file(ds_config(2))
    for level in ("O1", "O2", "O3", "O4"):
        words = (f"msamp:{level}", "DeepSpeed", "fsdp_version=2", "zero_stage 3")
        refused(*words, backend=f"msamp:{level}", plugin=DeepSpeedPlugin(zero_stage=3))
        variables = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}
        with mock.patch.dict(os.environ, variables):
            refused(*words, backend=f"msamp:{level}")
    stage_1 = DeepSpeedPlugin(zero_stage=1)
    refused("autocast_dtype", "DeepSpeed", backend="native", plugin=stage_1, autocast_dtype="fp32")
    refused(
        "autocast_dtype",
        "DeepSpeed",
        backend="native",
        plugin=DeepSpeedPlugin(hf_ds_config=path),
        autocast_dtype="bf16",
    )
    refused(
        "gradient_comm",
        "communication_data_type",
        backend="native",
        plugin=DeepSpeedPlugin(zero_stage=1),
        gradient_comm="fp8",
    )


if __name__ == "__main__":
    ranks.main(globals())
