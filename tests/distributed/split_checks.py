"""The cells of the matrix whose engines split sequences or layers: transformers is loaded before ranks are forked."""

import deepspeed  # noqa: F401
import matrix
import ranks
import transformers.models.llama.modeling_llama  # noqa: F401

globals().update(matrix.checks(engines=matrix.SPLIT))

if __name__ == "__main__":
    ranks.main(globals())
