"""Watch a training while it runs: the monitor of its casts, and the guard."""
