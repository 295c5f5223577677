"""Run Trainer in FP8 as a whole: its reports, checkpoints, exports and resumes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from tiny_trainers import (
    LAYERS,
    counting_batch,
    llama,
    loss_in_bf16,
    losses_of,
    trainer_for,
    values_of,
)
from transformers import LlamaForCausalLM

import fp8_backends
from fp8_backends.compute.products import engine_for


def test_run_reports_fp8_once(launched, capsys, tmp_path):
    """Use transformers' logging setup; a second run of the same Trainer adds nothing."""
    trainer = trainer_for(tmp_path, bf16=True, max_steps=2)
    trainer.train()
    trainer.evaluate()
    proofs = [line for line in capsys.readouterr().err.splitlines() if "weight FLOPs" in line]
    share = fp8_backends.audit(trainer.model).flops_share
    assert proofs == [
        f"native:dynamic: {LAYERS}/{LAYERS + 1} Linear, {share:.0%} of weight FLOPs in FP8, fprop "
        f"dgrad wgrad ({engine_for(torch.device('cpu'), torch.bfloat16)})".replace("%", " %", 1)
    ]


class Notes(GeneralTracker):
    name, requires_logging_directory, main_process_only = "notes", False, True

    def __init__(self):
        super().__init__()
        self.configuration = None

    @property
    def tracker(self):
        return self

    def store_init_configuration(self, values):
        self.configuration = values

    def log(self, values, step=None, **kwargs):
        pass


def test_trackers_store_the_backend_and_the_share(launched):
    before, after = Notes(), Notes()
    accelerator = Accelerator(log_with=[before])
    accelerator.init_trackers("run", {"rate": 0.1})
    assert before.configuration == {"fp8_backend": "native:dynamic", "rate": 0.1}
    model = accelerator.prepare(llama())
    accelerator.log_with = [after]
    accelerator.init_trackers("run")
    assert after.configuration["fp8_flops_share"] == pytest.approx(
        fp8_backends.convert.conversion.prepared_roots(model)[0][2].report.flops_share
    )
    assert json.dumps(after.configuration)


def test_the_best_model_is_loaded_at_the_end(launched, tmp_path):
    """Take two steps at a good rate, then ruin the model by a bad one: the first checkpoint is the
    best."""
    launched("native:delayed")
    options = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "bf16": True,
    }
    trainer = trainer_for(tmp_path, load_best_model_at_end=True, **options)
    trainer.create_optimizer()
    trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
        trainer.optimizer, lambda step: 1 if step < 2 else 1000
    )
    trainer.train()
    found = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    best = found.index(min(found))
    assert best != len(found) - 1, found
    assert trainer.state.best_model_checkpoint.endswith(f"checkpoint-{2 * (best + 1)}")
    assert trainer.evaluate()["eval_loss"] == min(found)
    stock = LlamaForCausalLM.from_pretrained(trainer.state.best_model_checkpoint)
    trained = values_of(trainer.model)
    assert all(torch.equal(value, trained[name]) for name, value in values_of(stock).items())


class Hub:
    """Read uploaded files as a user of the Hub."""

    def __init__(self):
        self.models = []

    def create_repo(self, name, **_):
        return SimpleNamespace(repo_id=name)

    def upload_folder(self, folder_path, path_in_repo=None, **_):
        if (Path(folder_path) / "model.safetensors").exists():
            self.models.append(LlamaForCausalLM.from_pretrained(folder_path))
        return SimpleNamespace(done=lambda: True, result=lambda: None)


def plain_state(model) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    assert {type(value) for value in state.values()} == {torch.Tensor}
    return state


@pytest.mark.parametrize("backend", ["native:delayed", "msamp:O3"])
def test_pushed_model_is_plain(backend, launched, monkeypatch, tmp_path):
    """A push uploads the files of `save_model` and of checkpoints, while training runs."""
    launched(backend)
    hub = Hub()
    monkeypatch.setattr("transformers.trainer.hf_api", lambda: hub)
    options = {
        "push_to_hub": True,
        "hub_model_id": "me/model",
        "hub_strategy": "checkpoint",
        "save_steps": 1,
    }
    trainer = trainer_for(tmp_path / "run", max_steps=2, save_strategy="steps", **options)
    trainer.train()
    trainer.push_to_hub()
    loss = trainer.evaluate()["eval_loss"]
    trainer.accelerator.unwrap_model(trainer.model).save_pretrained(tmp_path / "unwrapped")
    trained = plain_state(trainer.model)
    for stock in (hub.models[-1], LlamaForCausalLM.from_pretrained(tmp_path / "unwrapped")):
        assert plain_state(stock).keys() == trained.keys()
        assert all(torch.equal(value, trained[name]) for name, value in plain_state(stock).items())
    assert loss_in_bf16(hub.models[-1]) == pytest.approx(loss, abs=0.02)
    assert len(hub.models) >= 2  # after a step, and at the end


def test_gradient_checkpointing_only_repeats_products(launched, tmp_path):
    """Not reentrant; `test_lora.py` has the other kind."""
    launched("native:delayed")
    plain = trainer_for(tmp_path, bf16=True, max_steps=3)
    plain.train()
    kept = {"use_reentrant": False}
    trainer = trainer_for(
        tmp_path,
        bf16=True,
        max_steps=3,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs=kept,
    )
    trainer.train()
    assert losses_of(trainer) == losses_of(plain)
    products = fp8_backends.audit(trainer.model).products
    assert all(
        counts == dict(fprop=3, dgrad=3, wgrad=3, recomputed=3) for counts in products.values()
    )


@pytest.mark.nightly
def test_compiled_training_matches_eager_bitwise(launched, tmp_path):
    """Use the compiler without code generation, which runs its trace."""
    trainers = [
        trainer_for(tmp_path, llama(num_hidden_layers=1), bf16=True, max_steps=2, **options)
        for options in ({}, {"torch_compile": True, "torch_compile_backend": "eager"})
    ]
    for trainer in trainers:
        trainer.train()
    assert losses_of(trainers[0]) == losses_of(trainers[1])
    assert hasattr(trainers[1].model_wrapped, "_orig_mod")
    products = [fp8_backends.audit(trainer.model).products for trainer in trainers]
    assert products[0] == products[1] and all(
        counts["wgrad"] == 2 for counts in products[0].values()
    )


def test_generation_between_steps_changes_nothing(launched, tmp_path):
    """Generate like TRL's online trainers and generating callbacks."""
    launched("native:delayed")
    from transformers import TrainerCallback

    class Generates(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            model.eval()
            model.generate(input_ids=counting_batch()[:1, :4], max_new_tokens=2, do_sample=False)
            model.train()

    plain, generating = (trainer_for(tmp_path, max_steps=3) for _ in range(2))
    generating.add_callback(Generates())
    for trainer in (plain, generating):
        trainer.train()
    assert losses_of(plain) == losses_of(generating)


def test_trainer_saves_fp8_activations_unless_checkpointed(launched, tmp_path):
    launched(saved_activations="fp8")
    tensors = []
    for checkpointing in (False, True):
        trainer = trainer_for(
            tmp_path, bf16=True, max_steps=2, gradient_checkpointing=checkpointing
        )
        trainer.train()
        tensors.append(fp8_backends.audit(trainer.model).saved_activations["tensors"])
    assert tensors == [16, 2]  # of two layers and the last norm, and of only the last norm


@pytest.mark.parametrize("backend", ["native:delayed", "msamp:O4"])
def test_trainer_resumes_bitwise_from_newest_whole_checkpoint(backend, launched, tmp_path):
    launched(backend)
    unbroken = trainer_for(tmp_path / "a")
    unbroken.train()
    trainer_for(tmp_path / "b", save_strategy="steps", save_steps=3).train()
    newest = fp8_backends.checkpoints.newest_checkpoint
    assert newest(tmp_path / "b") == str(tmp_path / "b" / "checkpoint-6")
    (tmp_path / "b" / "checkpoint-6" / "scheduler.pt").unlink()
    assert newest(tmp_path / "b") == str(tmp_path / "b" / "checkpoint-3")
    resumed = trainer_for(tmp_path / "b")
    resumed.train(resume_from_checkpoint=newest(tmp_path / "b"))
    assert losses_of(resumed) == losses_of(unbroken)
    expected = unbroken.model.state_dict()
    assert all(
        torch.equal(value, expected[name]) for name, value in resumed.model.state_dict().items()
    )


def test_a_trainer_evaluates_without_training(launched, tmp_path):
    assert trainer_for(tmp_path).evaluate()["eval_loss"] > 0
