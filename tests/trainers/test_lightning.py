"""Lightning's real Trainer with `FP8Precision`."""

from __future__ import annotations

from types import SimpleNamespace

import lightning
import pytest
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy
from torch import nn

import fp8_backends
from fp8_backends import RecipeError
from fp8_backends.lightning import FP8Precision

QUIET = {
    name: False
    for name in ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
}
BATCH = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))


class Net(lightning.LightningModule):
    left_out = ()
    """Batches with None from `training_step`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.losses: list[float] = []

    def training_step(self, batch, index):
        loss = (self.layers(batch) - batch).float().square().mean()
        self.losses.append(loss.item())
        return None if len(self.losses) in self.left_out else loss

    def validation_step(self, batch, index):
        self.losses.append(self.layers(batch).sum().item())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(
    spec, steps: int, model: Net | None = None, resume=None, **options
) -> tuple[Net, lightning.Trainer]:
    model = model or Net()
    trainer = lightning.Trainer(
        max_steps=steps, plugins=[FP8Precision(spec)], accelerator="cpu", **QUIET, **options
    )
    trainer.fit(
        model,
        torch.utils.data.DataLoader(BATCH, batch_size=16),
        ckpt_path=resume,
        weights_only=False,
    )
    return model, trainer


@pytest.mark.nightly
@pytest.mark.parametrize("spec", ["native:delayed", "ao:tensorwise", "msamp:O4"])
def test_lightning_trains_like_prepare_and_resumes_bitwise(spec, tmp_path):
    model, trainer = fit(spec, 3)
    assert all(min(c["fprop"], c["wgrad"]) > 0 for c in fp8_backends.audit(model).products.values())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    resumed, _ = fit(spec, 6, resume=tmp_path / "a.ckpt")
    whole, _ = fit(spec, 6)
    assert whole.losses == model.losses + resumed.losses

    own = Net()
    own, optimizer = fp8_backends.prepare(own, own.configure_optimizers(), spec)
    for index in range(6):
        with trainer.precision_plugin.forward_context():
            own.training_step(BATCH, index).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert own.losses == whole.losses


def test_gradients_are_clipped_and_batches_may_be_skipped():
    clipped, _ = fit("msamp:O2", 1, gradient_clip_val=1e-4)
    norms = [p.grad.norm() for p in clipped.parameters()]
    assert torch.stack(norms).norm() <= 1.001e-4
    model = Net()
    model.left_out = (1,)
    fit("native:dynamic", 2, model)
    assert model.losses[0] == model.losses[1]


def test_evaluation_runs_before_training_and_after_it():
    # in inference mode, with undecomposed composite operations
    plugin, model = FP8Precision("msamp:O4"), Net()
    trainer = lightning.Trainer(plugins=[plugin], accelerator="cpu", max_steps=1, **QUIET)
    loader = torch.utils.data.DataLoader(BATCH, batch_size=16)
    trainer.validate(model, loader, verbose=False)
    trainer.fit(model, loader)
    trainer.validate(model, loader, verbose=False)
    assert len(set(model.losses)) == 3  # no, one training loss, and the changes of one step


def test_unsupported_settings_are_refused_by_name():
    with pytest.raises(RecipeError, match="autocast_dtype='fp16'"):
        FP8Precision({"backend": "native:dynamic", "autocast_dtype": "fp16"})
    released = fp8_backends.MSAMPRecipeKwargs(opt_level="O2", gradient_release=True)
    with pytest.raises(RecipeError, match="gradient_release .*max_grad_norm=1"):
        fit(released, 1, gradient_clip_val=1.0)
    with pytest.raises(RecipeError, match="gradient_accumulation_steps=2"):
        fit(released, 1, accumulate_grad_batches=2)
    for strategy in (ModelParallelStrategy, DeepSpeedStrategy):
        module = SimpleNamespace(trainer=SimpleNamespace(strategy=object.__new__(strategy)))
        with pytest.raises(RecipeError, match=f"not by {strategy.__name__}"):
            FP8Precision("native:dynamic").convert_module(module)
    lbfgs = Net()
    lbfgs.configure_optimizers = lambda: torch.optim.LBFGS(lbfgs.parameters())
    with pytest.raises(RecipeError, match="LBFGS runs backward inside its steps"):
        fit("native:dynamic", 1, lbfgs)


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    _, trainer = fit("native:delayed", 1)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=False)
    tensors = saved["optimizer_states"][0]["fp8_scaling"]["tensors"]
    name = next(iter(tensors))
    tensors[name] = tensors[name][..., :-1]
    torch.save(saved, tmp_path / "b.ckpt")
    with pytest.raises(fp8_backends.FP8BackendError, match="the optimizer's checkpoint.*layers.0"):
        fit("native:delayed", 2, resume=tmp_path / "b.ckpt")
