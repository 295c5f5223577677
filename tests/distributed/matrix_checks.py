"""Check every cell of the matrix: load DeepSpeed and transformers before forking ranks."""

import deepspeed  # noqa: F401
import matrix
import ranks
import transformers.models.llama.modeling_llama  # noqa: F401

globals().update(matrix.checks(engines=tuple(matrix.ENGINES)))

if __name__ == "__main__":
    ranks.main(globals())
