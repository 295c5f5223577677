"""Recipe fields of `te`, and what it refuses before training. Imports nothing of TransformerEngine."""

from __future__ import annotations

from ...errors import Refusal
from ..fields import (
    AMAX_COMPUTE_ALGO,
    AMAX_HISTORY_LEN,
    DELAYED,
    FP8_FORMAT,
    FP8_PARAMS,
    FUSED_HEAD,
    INTERVAL,
    MARGIN,
    OVERRIDE_LINEAR_PRECISION,
    USE_AUTOCAST_DURING_EVAL,
    USE_MXFP8_BLOCK_SCALING,
    Field,
    only_off,
    same,
)
from .amax_group import packed, process_group, ranks_of, unpacked

_attention = only_off(
    "this package converts Linear layers, and attention stays the model's own, in high precision (PyTorch's "
    "scaled_dot_product_attention, or what attn_implementation names); for attention in FP8 build it of "
    "TransformerEngine's DotProductAttention and enter its autocast yourself"
)

DELAYED_PIPELINE = Refusal(
    "delayed scales of te in a pipeline need fp8_group: after each forward TransformerEngine takes the largest amaxes "
    "of all ranks, and those with other stages would never come to that",
    "give fp8_group the ranks that have the same stage, torch.distributed.new_group([rank]) where it is one; or use "
    "te:dynamic, whose scales need no agreement",
)

FIELDS = (
    USE_AUTOCAST_DURING_EVAL,
    MARGIN,
    INTERVAL,
    FP8_FORMAT,
    AMAX_HISTORY_LEN,
    AMAX_COMPUTE_ALGO,
    OVERRIDE_LINEAR_PRECISION,
    USE_MXFP8_BLOCK_SCALING,
    FP8_PARAMS,
    Field(
        "fp8_group",
        None,
        process_group,
        "A torch.distributed.ProcessGroup: the ranks over which an amax is reduced (default: all).",
        DELAYED,
        is_object=True,
        describe=ranks_of,
        pack=packed,
        unpack=unpacked,
    ),
    Field(
        "fp8_dpa",
        False,
        _attention,
        "Attention in FP8, which this package does not have.",
        idle=False,
        launcher_default=False,
        synonyms={"fp8_dot_product_attention": same},
    ),
    Field(
        "fp8_mha",
        False,
        _attention,
        "As fp8_dpa.",
        idle=False,
        launcher_default=False,
        synonyms={"fp8_multi_head_attention": same},
    ),
    FUSED_HEAD,
)
"""In the order of Accelerate's `TERecipeKwargs`, then ours."""
