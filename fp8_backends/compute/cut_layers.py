"""Layers that tensor parallelism cuts after they were prepared, which are refused.

The scales, states, stored weights and optimizers that exist by then are of whole weights: their parts would get other
codes, and an optimizer would go on with Parameters that the model has no longer, in silence.
"""

from __future__ import annotations

import torch
from torch import nn

from ..errors import FP8BackendError
from ..numerics.sharded_tensor import is_distributed


def note_whether_cut(layer: nn.Module) -> None:
    """Remember of a layer that is prepared whether its weight lies on several ranks by now."""
    layer.fp8_prepared_cut = is_distributed(layer.weight)


def refuse_cut_since(layer: nn.Module, seen: torch.Tensor) -> None:
    """Raise `FP8BackendError` where `seen`, an input or a state of the layer, is a DTensor and the weight was none when
    the layer was prepared. The weight itself may be one of FSDP2's."""
    if is_distributed(seen) and is_distributed(layer.weight) and not layer.fp8_prepared_cut:
        raise FP8BackendError(
            f"an FP8 layer {layer.in_features} -> {layer.out_features} was cut over ranks after it was prepared: call "
            "parallelize_module, or load by tp_plan, first; then make the optimizer, and prepare both"
        )
