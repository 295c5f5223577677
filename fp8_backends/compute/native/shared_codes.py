"""Codes that several layers read (of an activation) or several microbatches of a step (of a weight)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdKeyDictionary

from .layer_rule import Stored


class SharedCodes:
    """What the layers of one prepared model share."""

    def __init__(self) -> None:
        self._inputs: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._weights: WeakKeyDictionary[nn.Module, tuple] = WeakKeyDictionary()
        self._keeps_weights = False

    def of_input(self, x: torch.Tensor, key: tuple, quantize: Callable) -> Any:
        """quantize(), or what an earlier layer got from it for this very tensor under the same key. Held for as long as
        the tensor itself lives.

        Only tensors that autograd made are shared: a leaf, such as a batch that lies in a numpy array or in a CUDA
        graph's static input, can change without a trace.
        """
        if torch.compiler.is_compiling() or x.grad_fn is None:
            return quantize()  # a compiler finds equal casts by itself
        version, codes = self._inputs.get(x, (None, None))
        if version != x._version:
            codes = {}
            self._inputs[x] = (x._version, codes)
        if key not in codes:
            codes[key] = quantize()
        return codes[key]

    @property
    def keeps_weights(self) -> bool:
        """Whether codes of weights are kept from one forward to the next."""
        return self._keeps_weights

    @keeps_weights.setter
    def keeps_weights(self, keep: bool) -> None:
        self._keeps_weights = keep
        self.forget_weights()

    def forget_weights(self) -> None:
        """The weights change, in whichever way: make their codes anew."""
        self._weights.clear()

    def of_weight(self, layer: nn.Module, key: tuple, quantize: Callable) -> Any:
        """quantize(), or what an earlier forward of this layer got from it for this very weight under the same key.

        In-place changes are seen, but for those that go around autograd's count of them (`weight.data`), and new memory
        is. Codes are kept in training alone, and of weights that lie in one piece where the layer has them: sharded
        ones are gathered for each forward, and their codes would need the memory that sharding saves.
        """
        if torch.compiler.is_compiling() or not (self._keeps_weights and layer.training and _is_whole(layer.weight)):
            return quantize()
        memory = _memory_of(layer.weight)
        known, known_key, codes = self._weights.get(layer, (None, None, None))
        if known != memory or known_key != key:
            codes = quantize()
            if not torch.is_inference_mode_enabled():  # a forward that trains cannot save what was made there
                self._weights[layer] = (memory, key, codes)
        return codes

    def held(self, layer: nn.Module) -> Any:
        """The codes of this layer's weight that are kept now, or None."""
        return self._weights.get(layer, (None, None, None))[2]

    def __reduce__(self):  # copies, too, hold no codes
        return self._fresh, (self._keeps_weights,)

    @staticmethod
    def _fresh(keeps_weights: bool) -> SharedCodes:
        shared = SharedCodes()
        shared.keeps_weights = keeps_weights
        return shared


def _is_whole(weight: torch.Tensor) -> bool:
    """Whether this is the layer's own Parameter, real, and nobody swaps its memory (DeepSpeed's ZeRO-3 does)."""
    data = Stored.of(weight).data
    plain = type(data) is torch.Tensor and data.device.type != "meta"
    return plain and isinstance(weight, nn.Parameter) and weight.is_leaf and not hasattr(weight, "ds_id")


def _memory_of(weight: torch.Tensor) -> tuple:
    """A weight's place in memory and number of changes. The weak reference keeps others from getting its address."""
    return tuple(
        (StorageWeakRef(t.untyped_storage()), t.storage_offset(), t.shape, t.stride(), t.dtype, t._version)
        for t in Stored.of(weight)
        if t is not None
    )
