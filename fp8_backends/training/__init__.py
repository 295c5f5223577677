"""From a model and a recipe to a model that trains in FP8, with proof."""
