"""`schedule`: other recipes from given optimizer steps on. The oracle is a model restored and
prepared by hand."""

import copy

import pytest
import torch
from conv1d_twins import conv
from torch import nn
from widths import nightly

import fp8_backends
from fp8_backends import resolve
from fp8_backends.convert.conversion import prepared_roots
from fp8_backends.errors import FP8BackendError, RecipeError
from fp8_backends.formats.scaling import INPUT
from fp8_backends.preparation.optimizer_steps import watch_optimizer


def fresh() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.GELU(), conv(48, 32))


class SharedInput(nn.Module):
    """Two layers on one tensor share its casts, as query and key do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.left, self.right = nn.Linear(32, 48), nn.Linear(48, 32), nn.Linear(48, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.first(x))
        return self.left(h) + self.right(h)


def prepared(spec, model: nn.Module | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = fresh() if model is None else model
    return fp8_backends.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2), spec)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0
) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))
        with torch.autocast("cpu", torch.bfloat16):
            loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("backend", "compiled"),
    [
        ("native:dynamic", True),
        ("native:delayed", False),
        ("native:mxfp8", False),
        ("ao:tensorwise", False),
        nightly("ao:tensorwise", True),
    ],
)
def test_bf16_phase_equals_a_restored_model(backend, compiled):
    torch._dynamo.reset()  # other tests of the process count for its limit of recompilations
    model, optimizer = prepared({"backend": backend, "schedule": {3: "bf16"}})
    run = torch.compile(model, backend="aot_eager") if compiled else model
    losses = train(run, optimizer, 6)
    by_hand, its_optimizer = prepared(backend)
    run = torch.compile(by_hand, backend="aot_eager") if compiled else by_hand
    wanted = train(run, its_optimizer, 3)
    fp8_backends.restore(by_hand)
    assert losses == wanted + train(by_hand, its_optimizer, 3, first=3)
    assert train(*prepared(backend), 6)[:3] == wanted != losses[3:]


@pytest.mark.parametrize("base", ["native:dynamic", "native:delayed", "native:window"])
def test_another_rule_equals_a_model_prepared_again(base):
    model, optimizer = prepared(
        {"backend": base, "schedule": f"2=native:rowwise, 4={base}"}, SharedInput()
    )
    by_hand, its_optimizer = prepared(base, SharedInput())
    losses = train(by_hand, its_optimizer, 2)
    for first, backend in ((2, "native:rowwise"), (4, base)):
        fp8_backends.restore(by_hand)
        fp8_backends.prepare(by_hand, its_optimizer, backend)
        losses += train(by_hand, its_optimizer, 2, first=first)
    assert train(model, optimizer, 6) == losses
    assert fp8_backends.audit(model).products["first"]["fprop"] == 6  # all since `prepare`


def test_model_prepared_on_meta_has_the_scales_of_a_later_phase():
    spec = {
        "backend": "native:delayed",
        "schedule": {0: "native:rowwise", 2: "native:delayed", 4: "bf16"},
    }
    with torch.device("meta"):
        model = fresh()
    fp8_backends.prepare(model, None, spec)
    model.to_empty(device="cpu")
    model.load_state_dict(fresh().state_dict())
    assert train(*prepared(spec, model), 5) == train(*prepared(spec), 5)


@pytest.mark.parametrize(
    ("backend", "optimizers", "microbatches"),
    [
        ("native:dynamic", 1, 2),
        ("ao:tensorwise", 2, 1),
        ("native:dynamic", 2, 2),
        ("msamp:O2", 2, 2),
    ],
)
def test_proof_waits_with_several_optimizers_and_microbatches(
    backend, optimizers, microbatches, capsys
):
    model = SharedInput()
    parts = [[*model.first.parameters()], [*model.left.parameters(), *model.right.parameters()]]
    parts = parts if optimizers == 2 else [sum(parts, [])]
    stepping = [torch.optim.AdamW(part, 1e-2) for part in parts]
    rule = "native:window" if backend == "msamp:O2" else backend
    for optimizer in stepping:
        fp8_backends.prepare(
            model, optimizer, {"backend": backend, "schedule": {0: "bf16", 2: rule, 4: "bf16"}}
        )
    for step in range(4):
        for _ in range(microbatches):
            with torch.autocast("cpu", torch.bfloat16):
                model(torch.randn(16, 32)).square().mean().backward()
        for optimizer in stepping:
            optimizer.step()
            optimizer.zero_grad()
        is_proven = (
            "3/3 Linear, 100 % of weight FLOPs in FP8, fprop dgrad wgrad" in capsys.readouterr().err
        )
        assert is_proven == (step == 2)


def test_warm_up_in_bf16_delays_the_proof_and_is_logged(capsys):
    model, optimizer = prepared({"backend": "native", "schedule": {0: "bf16", 2: "native"}})
    plain = fresh()
    wanted = train(plain, torch.optim.AdamW(plain.parameters(), 1e-2), 2)
    assert train(model, optimizer, 2) == wanted
    said = capsys.readouterr().err
    assert "native:dynamic: bf16 from step 0 on, by schedule" in said and "weight FLOPs" not in said
    assert "native:dynamic: native:dynamic from step 2 on, by schedule" in said
    train(model, optimizer, 1, first=2)
    assert "native:dynamic: 1/1 Linear, 1/1 Conv1D, " in capsys.readouterr().err


@pytest.mark.parametrize(
    "base", ["native:delayed", "native:window", "msamp:O2", "msamp:O4", "ao:tensorwise"]
)
def test_every_phase_resumes_in_a_new_and_in_a_running_model(base):
    another = base if base.startswith("ao") else "native:rowwise"
    spec = {"backend": base, "schedule": {0: "bf16", 1: base, 2: another, 3: "bf16", 4: base}}
    model, optimizer = prepared(spec, SharedInput())
    states, losses = {}, []
    for step in range(5):
        states[step] = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        losses += train(model, optimizer, 1, first=step)
    running = prepared(spec, SharedInput())
    train(*running, 3)
    for saved_at in (0, 4, 2, 3, 1):
        for resumed, its_optimizer in (prepared(spec, SharedInput()), running):
            resumed.load_state_dict(states[saved_at][0])
            # it steps the tensors that it is given
            its_optimizer.load_state_dict(copy.deepcopy(states[saved_at][1]))
            assert train(resumed, its_optimizer, 5 - saved_at, first=saved_at) == losses[saved_at:]


def test_lost_states_of_a_phase_are_reported():
    spec = {"backend": "native:window", "schedule": {3: "bf16"}}
    model, optimizer = prepared(spec)
    train(model, optimizer, 1)
    saved = optimizer.state_dict()
    saved["fp8_scaling"]["tensors"].clear()
    with pytest.raises(
        FP8BackendError, match="names native:window but has no scaling state: it is incomplete"
    ):
        prepared(spec)[1].load_state_dict(saved)


@pytest.mark.parametrize("backend", ["native:dynamic", "native:delayed", "ao:tensorwise"])
def test_statistics_know_no_cast_of_a_bf16_phase(backend):
    model, optimizer = prepared({"backend": backend, "schedule": {1: "bf16"}})
    ((_, _, record),) = prepared_roots(model)
    x = torch.randn(16, 32)
    assert record.compute.cast_of(model[0], INPUT, x) is not None
    train(model, optimizer, 1)
    assert record.compute.cast_of(model[0], INPUT, x) is None


def test_layer_added_in_a_phase_follows_it():
    model, optimizer = prepared({"backend": "native", "schedule": {1: "bf16"}})
    train(model, optimizer, 1)
    model.append(nn.Linear(32, 32))
    optimizer.add_param_group({"params": model[3].parameters()})
    fp8_backends.prepare(model, optimizer, {"backend": "native", "schedule": {1: "bf16"}})
    train(model, optimizer, 1, first=1)
    counts = fp8_backends.audit(model).products
    assert counts["3"]["fprop"] == 0 and counts["0"]["fprop"] == 1


def test_each_model_counts_the_steps_of_its_own_optimizer():
    spec = {"backend": "native", "schedule": {2: "bf16"}}
    models = [fresh(), fresh()]
    optimizers = [torch.optim.AdamW(model.parameters(), 1e-2) for model in models]
    for model in models:
        fp8_backends.prepare(model, None, spec)
    for optimizer in optimizers:
        watch_optimizer(models, optimizer, resolve(spec))
    train(models[0], optimizers[0], 3)
    train(models[1], optimizers[1], 1)
    assert [fp8_backends.audit(model).products["0"]["fprop"] for model in models] == [2, 1]
    train(models[1], optimizers[1], 2, first=1)
    assert fp8_backends.audit(models[1]).products["0"]["fprop"] == 2


def test_checkpoint_without_a_count_is_reported(caplog):
    model, optimizer = prepared("native:delayed")
    train(model, optimizer, 1)
    resumed, its_optimizer = prepared({"backend": "native:delayed", "schedule": {3: "bf16"}})
    its_optimizer.load_state_dict(optimizer.state_dict())
    assert "was saved without schedule: its steps are counted from here on" in caplog.text


def test_layers_keep_their_own_rule_outside_of_bf16():
    fields = {"backend": "native:dynamic", "layers": {"0": "native:mxfp8"}}
    model, optimizer = prepared(
        {**fields, "schedule": {1: "native:rowwise", 2: "bf16", 3: "native:dynamic"}}
    )
    rules = []
    for step in range(3):
        train(model, optimizer, 1, first=step)
        rules.append(
            [
                model[0].fp8_rule.scaling,
                model[2].fp8_rule.scaling,
                all(model[0].fp8_rule.high_precision),
            ]
        )
    assert rules == [
        ["mxfp8", "rowwise", False],
        ["mxfp8", "dynamic", True],
        ["mxfp8", "dynamic", False],
    ]


def test_trainer_knows_the_share_of_its_steps(tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    from accelerate import Accelerator  # noqa: F401, the plug-in is connected by its import

    data = [{"input_ids": torch.arange(8) % 32, "labels": torch.arange(8) % 32}] * 8
    shape = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, **shape))
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=2, use_cpu=True, report_to=[],
        accelerator_config={"gradient_accumulation_kwargs": None}, save_strategy="no",
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
        patch.setenv("ACCELERATE_FP8_BACKEND", "native")
        patch.setenv("ACCELERATE_FP8_SCHEDULE", "0.5=bf16")
        transformers.Trainer(model=model, args=arguments, train_dataset=data).train()
    assert "native:dynamic: bf16 from step 2 on, by schedule" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"schedule": {}}, "must be a mapping such as"),
        (
            {"schedule": {"steps": 10}},
            "must have its starts as steps, 100, or as shares of training",
        ),
        ({"schedule": {0.5: "bf16", 100: "native"}}, "one kind"),
        ({"schedule": {-1: "bf16"}}, "whole number of at least 0"),
        ({"schedule": {1.5: "bf16"}}, "whole number"),
        ({"schedule": {5: 8}}, "must have bf16 or a backend string from 5 on, not 8"),
        ({"schedule": {5: "nativ"}}, "schedule: unknown backend 'nativ'"),
        ({"schedule": {5: "ao"}}, "native:dynamic cannot change to ao in a run"),
        ({"schedule": {5: "native:delayed"}}, "native:delayed is no rule of a phase alone"),
        (
            {"backend": "ao", "schedule": {5: "ao:rowwise"}},
            "ao:tensorwise cannot change to ao:rowwise",
        ),
        (
            {"backend": "te", "schedule": {5: "te:dynamic"}},
            "te:delayed cannot change to te:dynamic",
        ),
        (
            {"backend": "te+msamp:O2", "schedule": {5: "bf16"}},
            "layers of te:delayed.msamp:O2 cannot change in a run",
        ),
        (
            {"backend": "native+msamp:O2", "layers": {"a": "te:dynamic"}, "schedule": {5: "bf16"}},
            "layers of te:dynamic.msamp:O2 cannot change in a run",
        ),
        (
            {"schedule": {5: "bf16"}, "fused_head": True},
            "schedule and fused_head do not go together",
        ),
        (
            {"backend": "msamp:O2", "schedule": {5: "bf16"}, "enable_fsdp_float8_all_gather": True},
            "do not go together",
        ),
        (
            {"backend": "ao", "schedule": {5: "bf16"}, "enable_fsdp_float8_all_gather": True},
            "layers of ao:tensorwise",
        ),
    ],
)
def test_contradictory_schedules_are_refused_by_name(fields, said):
    with pytest.raises(RecipeError, match=said):
        resolve({"backend": "native", **fields})


def test_share_of_an_unknown_number_of_steps_is_refused_before_anything_changes():
    model = fresh()
    with pytest.raises(RecipeError, match='add it: schedule={0.9: .bf16., "steps": 1000}'):
        prepared({"backend": "native", "schedule": {0.9: "bf16"}}, model)
    assert type(model[0]) is nn.Linear
    schedule = resolve({"backend": "native", "schedule": "0.9=bf16, steps=10"}).schedule
    assert (
        schedule
        == {0.9: "bf16", "steps": 10}
        == resolve({"backend": "native", "schedule": schedule}).schedule
    )
