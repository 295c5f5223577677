"""Check the cells of engines that split sequences or layers: load transformers before forking
ranks."""

import deepspeed  # noqa: F401
import matrix
import ranks
import transformers.models.llama.modeling_llama  # noqa: F401

globals().update(matrix.checks(engines=matrix.SPLIT))

if __name__ == "__main__":
    ranks.main(globals())
