"""`python -m fp8_backends` is the command `fp8-backends`."""

import sys

from .tools.main import main

if __name__ == "__main__":
    sys.exit(main())
