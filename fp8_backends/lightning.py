"""FP8 for Lightning's Trainer: `Trainer(plugins=[FP8Precision("native:dynamic")])`.

Only this module imports Lightning.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import GradClipAlgorithmType

from . import preparation, rules
from .accelerate_plugin.callers import with_whole_states
from .compute import hardware
from .errors import RecipeError
from .preparation import optimizer_steps, ranks
from .recipes.handlers import Spec, resolve
from .rules import preconditions
from .torch_tools.modules import has_ranks


class FP8Precision(Precision):
    """Lightning's precision plugin for an FP8 backend, on one device or under the DDP strategy.

    Converts the LightningModule before Lightning creates optimizers, and logs the proof at the
    first step. The recipe's `autocast_dtype` runs around FP8: by default bf16, or FP32 on a CPU
    without bf16 products. Lightning's checkpoints hold the scaling states in the optimizer states.

    Args:
        spec: a backend string, a recipe, a dict, as in `fp8_backends.resolve`; None picks for this
        machine.

    Raises:
        RecipeError: the recipe cannot be honoured, here or (later) with an argument of the Trainer.
        BackendUnavailableError: the backend cannot run on this machine.
    """

    def __init__(self, spec: Spec = None) -> None:
        recipe = resolve(spec)
        if recipe.implementation == "original" or recipe.autocast_dtype == "fp16":
            raise RecipeError(
                f"{recipe.name}: with Lightning, this package's own backends run with bf16 or fp32 "
                "around FP8: leave implementation and autocast_dtype='fp16' out"
            )
        preconditions.check_machine(recipe)
        self.recipe = with_whole_states(recipe)  # one rank saves
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        given = "autocast_dtype" in recipe.given
        self.autocast_dtype = (
            recipe.autocast_dtype if given else hardware.fast_precision(torch.device(self.device))
        )
        self.precision = "bf16-mixed" if self.autocast_dtype == "bf16" else "32-true"

    def convert_module(self, module: LightningModule) -> LightningModule:
        """Convert the layers of the module in place. Raises `RecipeError` if the Trainer
        contradicts the recipe."""
        trainer = self.trainer = module.trainer
        strategy = trainer.strategy
        # DeepSpeed's is a subclass of DDP's
        known = (DeepSpeedStrategy, DDPStrategy, SingleDeviceStrategy)
        kind = next((kind for kind in known if isinstance(strategy, kind)), None)
        if kind in (None, DeepSpeedStrategy):
            raise RecipeError(
                f"{self.recipe.name}: with Lightning, FP8 trains on one device or by DDPStrategy, "
                f"not by {type(strategy).__name__}: choose strategy='ddp', or Accelerate for FSDP2 "
                "and DeepSpeed"
            )
        setup = rules.Setup(
            self.recipe,
            rules.Machine.this(),
            parallel="ddp" if kind is DDPStrategy else None,
            world_size=trainer.world_size,
            accumulation_steps=trainer.accumulate_grad_batches,
            max_grad_norm=trainer.gradient_clip_val,
        )
        rules.refuse(setup)
        preconditions.check_sharing(module, setup)
        preparation.prepare_model(module, self.recipe)
        return module

    def connect(
        self,
        model: torch.nn.Module,
        optimizers: list[torch.optim.Optimizer],
        lr_schedulers: list[Any],
    ) -> tuple[torch.nn.Module, list[torch.optim.Optimizer], list[Any]]:
        """Let the optimizers train the converted model, in any wrapper."""
        if optimizers:
            preconditions.check_trains([model], optimizers, self.recipe)
        if has_ranks():
            ranks.connect_ranks(model, self.recipe)
        for optimizer in optimizers:
            preconditions.check_optimizer(optimizer, self.recipe)
            optimizer_steps.watch_optimizer([model], optimizer, self.recipe, self._log_sample)
        return model, optimizers, lr_schedulers

    def _log_sample(self, values: dict[str, float], step: int) -> None:
        for logger in self.trainer.loggers:
            logger.log_metrics(values, step=self.trainer.global_step)

    def forward_context(self) -> contextlib.AbstractContextManager:
        """Autocast around FP8."""
        if self.autocast_dtype == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device, torch.bfloat16)

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        model: LightningModule,
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        """Step after running `closure`: the optimizer's hooks read gradients before it would run
        its own closure."""
        if isinstance(optimizer, torch.optim.LBFGS):
            raise RecipeError(
                f"{self.recipe.name}: LBFGS runs backward inside its steps; use another optimizer"
            )
        result = closure()
        self._after_closure(model, optimizer)
        if result is None and model.automatic_optimization:
            return None  # `training_step` skipped this batch
        optimizer.step(**kwargs)
        return result

    def clip_gradients(
        self,
        optimizer: torch.optim.Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip the gradients by norm or by value."""
        setup = rules.Setup(self.recipe, rules.Machine.this(), max_grad_norm=clip_val)
        rules.refuse(setup, rules.RELEASE_RULES)
        super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)
