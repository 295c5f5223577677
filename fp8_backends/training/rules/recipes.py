"""What of a recipe has no effect, or wants something beside it."""

from __future__ import annotations

from .setup import Rule

RECIPE_RULES = (
    Rule(
        "short_amax_history",
        "info",
        lambda s: (
            s.recipe.scaling == "delayed" and s.recipe.amax_history_len == 1 and s.recipe.amax_compute_algo == "max"
        ),
        "amax_history_len=1 leaves nothing to take a maximum of: amax_compute_algo='max' equals 'most_recent'",
        "lengthen the history, or drop amax_compute_algo",
    ),
    Rule(
        "fp16_autocast",
        "info",
        lambda s: s.recipe.autocast_dtype == "fp16",
        "fp16 around FP8 needs a loss scaler: Accelerate makes one, a loop of your own must",
        "use bf16 where the device has it",
    ),
)
