"""Check TransformerEngine's cells of the matrix, over the stand-in."""

from __future__ import annotations

from standin import activate

activate()

import deepspeed  # noqa: E402, F401
import matrix  # noqa: E402
import ranks  # noqa: E402
import transformer_engine.pytorch  # noqa: E402, F401
import transformers.models.llama.modeling_llama  # noqa: E402, F401

globals().update(matrix.checks(matrix.TE_BACKENDS, tuple(matrix.ENGINES)))

if __name__ == "__main__":
    ranks.main(globals())
