"""Run the cells of a notebook: notebook.py OUTPUT."""

from __future__ import annotations

from accelerate import notebook_launcher
from trained import main

import fp8_backends  # noqa: F401

notebook_launcher(main, num_processes=1)
