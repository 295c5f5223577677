"""Gradients in E4M3, read once: a microbatch is added to one, or its norm is taken."""
