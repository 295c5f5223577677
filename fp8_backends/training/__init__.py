"""Turn a model and a recipe into a model that trains in FP8, with proof."""
