"""The layer of `ao`. Imports TorchAO, so it is imported only when a layer is converted or unpickled."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

from ...errors import FP8BackendError
from ..counts import DGRAD, FPROP, WGRAD
from ..refusals import refuse_cut_since, refuse_second_derivative, refuse_transforms, saved_by_name


class AOProducts(nn.Module):
    """A layer with TorchAO's products, equal to them to the bit, and correct where they crash: on inputs of zero tokens
    or of one dimension, and with a high-precision weight gradient under any autocast but CUDA's.

    Input: [..., in_features] in fp32, bf16 or fp16; output: [..., out_features].
    """

    transposed_weight = False
    """Whether the Parameter holds the weight as [in, out] (`Conv1DForm`)."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        in_features = self.weight.shape[0 if self.transposed_weight else 1]  # of a rank's part, where there are parts
        if input.dim() == 0 or input.shape[-1] != in_features:
            raise ValueError(
                f"an FP8 linear layer of {in_features} input features got an input of shape {tuple(input.shape)}; its "
                f"last dimension must be {in_features}"
            )
        if isinstance(self.weight, WeightWithDynamicFloat8CastTensor):
            raise FP8BackendError(
                "enable_fsdp_float8_all_gather=True, and the model is not sharded: apply fully_shard to it before it "
                "runs, or leave the field out"
            )
        refuse_cut_since(self, input)
        # nothing to take an amax of. (Asked by `numel()`, Inductor writes past a buffer of a padded, dynamic input)
        if 0 in input.shape:
            gathered = hasattr(self.weight, "to_original_precision")
            weight = self.weight.to_original_precision() if gathered else self.weight
            return F.linear(input, weight.t() if self.transposed_weight else weight, self.bias)
        if input.dim() == 1:
            return self.forward(input.unsqueeze(0)).squeeze(0)
        if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            # there TorchAO's tensors would get operators that they do not know
            with torch.inference_mode(False), torch.no_grad():
                return self.forward(input)
        device = input.device.type
        if input.dtype == torch.float64:  # oneDNN on AMX-FP16 and cuBLAS return no FP64 from FP8 products
            return self.forward(input.float()).double()
        if not self.fp8_wgrad and torch.is_autocast_enabled(device):
            # TorchAO casts under CUDA's autocast alone, and then multiplies a bf16 gradient by an fp32 input
            input = input.to(torch.get_autocast_dtype(device))
        refuse_transforms()
        with saved_by_name(self.weight):
            output = self._products(input)
        if output.requires_grad and not torch.compiler.is_compiling():
            output.register_hook(refuse_second_derivative)
        return output


class AOLinear(AOProducts, Float8Linear):
    _products = Float8Linear.forward

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.fp8_wgrad = WGRAD not in products_in_high_precision(self.config)

    def extra_repr(self) -> str:
        return super().extra_repr().replace("cast_configs=", "ao ").rstrip('"')


def products_in_high_precision(config: Float8LinearConfig) -> tuple[str, ...]:
    """Return those of fprop, dgrad and wgrad that a configuration does not cast to FP8."""
    casts = (
        (FPROP, config.cast_config_input),
        (DGRAD, config.cast_config_grad_output),
        (WGRAD, config.cast_config_input_for_grad_weight),
    )
    return tuple(kind for kind, cast in casts if cast.scaling_type.value == "disabled")
