"""Give the weights of a training to an inference engine from memory:
`fp8_backends.checkpoints.rollout_weights`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..announcement import announce
from ..compute.fields import check_known
from ..convert.conversion import unwrapped
from ..errors import FP8BackendError
from ..formats.scaling import Quantized
from ..torch_tools.modules import check_is_module
from ..words import by_reason, counted, listed
from .exporting import CHECKPOINT_FORMATS, FITS_INTO, TENSOR, LayerCodes, checked


def rollout_weights(model: nn.Module, format: str = "finegrained_fp8") -> RolloutWeights:
    """Return the weights of a prepared model as an inference engine loads them, with the very codes
    of its products.

    Each iteration, such as one after every optimizer step, yields the present (name, tensor) pairs
    for the `load_weights` of vLLM and SGLang, and writes no file. On several ranks all of them
    iterate to the end.

    Args:
        model: prepared, possibly inside DDP, FSDP2 or `torch.compile`.
        format: `finegrained_fp8` or `compressed-tensors`, as in `export`.

    Raises:
        RecipeError: an unknown format.
        FP8BackendError: the format has no scales for a layer's codes, or its backend does not tell
            them; in an iteration, a weight is not finite.
    """
    check_known(
        "format", format, (name for name, fmt in CHECKPOINT_FORMATS.items() if not fmt.is_4_bit)
    )
    check_is_module(model)
    return RolloutWeights(unwrapped(model), format)


class RolloutWeights:
    """Iterate over (name, tensor): the codes of an FP8 layer and then their scales, and every other
    weight itself, with its exact values. Tied weights come once. Copy a tensor to keep it."""

    def __init__(self, model: nn.Module, format: str) -> None:
        self._codes = codes = LayerCodes(model, CHECKPOINT_FORMATS[format])
        high_precision, in_fp8 = dict(codes.high_precision), []
        for name, grid in codes.grids.items():
            if codes.grid not in FITS_INTO.get(grid, ()):
                raise FP8BackendError(
                    f"{name}: format={format!r} cannot hold the codes of its products: "
                    f"{codes.inexact(name, grid)}. Use another format, or native:blockwise and "
                    "FSDP2; fp8_backends.checkpoints.export rounds"
                )
            if reason := codes.format.unfit(codes.shapes[name], codes.grid, grid == TENSOR):
                high_precision[name] = reason
            else:
                in_fp8.append(name)
        self.high_precision: dict[str, str] = high_precision
        """Weights in high precision for the engine, each with its reason."""
        self.quantization_config: dict[str, Any] = codes.config(high_precision, in_fp8)
        """For the engine's `config.json`: the same for all iterations."""
        parts = [f"{counted(len(in_fp8), 'weight')} as the FP8 codes that training uses"]
        parts += [
            f"{listed(names)} in high precision ({why})"
            for why, names in by_reason(high_precision.items())
        ]
        announce(f"rollout weights, {format}: {'; '.join(parts)}")

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for (name, *_), tensor in self._codes.tensors(self._stored):
            yield name, tensor

    def _stored(self, name: str, weight: torch.Tensor) -> Quantized | None:
        if name in self.high_precision:
            return None
        if (codes := self._codes.of(name)) is None:
            raise FP8BackendError(
                f"{name}: it was restored since: prepare the model and call rollout_weights again"
            )
        return checked(name, codes)
