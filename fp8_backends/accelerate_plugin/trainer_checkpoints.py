"""What seals the checkpoints of transformers' Trainer, which writes `checkpoint-N` itself and never calls `save_state`.

Imported where a Trainer runs, because it imports transformers.
"""

from __future__ import annotations

from pathlib import Path

from transformers import Trainer, TrainerCallback

from ..recipes.handlers import Recipe
from . import whole_checkpoints


class CheckpointCallback(TrainerCallback):
    """Writes the manifest of each checkpoint that Trainer has written."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def on_save(self, args, state, control, **kwargs) -> None:
        """Seal the newest checkpoint. All ranks are here. Those of a hyperparameter search lie elsewhere, and carry no
        manifest."""
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        if whole_checkpoints.anywhere(folder):
            whole_checkpoints.seal(folder.resolve(), self.recipe, state.global_step)


def seal_checkpoints_of(trainer: Trainer, recipe: Recipe) -> None:
    """Let a Trainer's checkpoints have manifests. Repeating it does nothing."""
    handler = getattr(trainer, "callback_handler", None)  # none while the Trainer is being built
    if handler is not None and not any(isinstance(each, CheckpointCallback) for each in handler.callbacks):
        trainer.add_callback(CheckpointCallback(recipe))
