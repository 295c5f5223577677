"""`python -m fp8_backends` is the command `fp8-backends`."""

from __future__ import annotations

import sys

from .tools.main import main

if __name__ == "__main__":
    sys.exit(main())
