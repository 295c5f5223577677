"""Count FP8 products, prove them at the first step, and audit a model."""
