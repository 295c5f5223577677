"""The cells of the matrix that are TransformerEngine's, over the stand-in."""

from __future__ import annotations

from standin import activate

activate()

import matrix  # noqa: E402
import ranks  # noqa: E402
import transformer_engine.pytorch  # noqa: E402, F401

globals().update(matrix.checks(matrix.TE_BACKENDS))

if __name__ == "__main__":
    ranks.main(globals())
