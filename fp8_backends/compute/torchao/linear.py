"""The layers of `ao`, and their weights under FSDP2. Imports TorchAO, so it is imported with a
layer."""

from collections import namedtuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map_only
from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.fsdp_utils import (
    WeightWithDynamicFloat8CastTensor,
    precompute_float8_dynamic_scale_for_fsdp,
)

from ...errors import FP8BackendError
from ...tensors.parameter_swap import refuse_if_held, swap
from ...tensors.sharded_tensor import is_distributed, local_part, with_local
from ..counts import DGRAD, FPROP, WGRAD
from ..refusals import (
    refuse_cut_since,
    refuse_second_derivative,
    refuse_transforms,
    refuse_width,
    saved_by_name,
)

_AsLinear = namedtuple("_AsLinear", "weight bias linear_mm_config config")
"""The attributes read by TorchAO's forward."""


class AOProducts(nn.Module):
    """A layer with TorchAO's products, to the bit, and correct where TorchAO crashes: inputs of
    zero tokens or of one dimension, and a high-precision weight gradient under any autocast but
    CUDA's."""

    transposed_weight = False
    """True if the Parameter holds the weight as [in, out] (`TransposedLinear`)."""
    rule_in_words = "ao"
    ao_paused = False
    """True while its products run in high precision."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        # under tensor parallelism, of this part
        in_features = self.weight.shape[0 if self.transposed_weight else 1]
        refuse_width(input, in_features)
        if isinstance(self.weight, WeightWithDynamicFloat8CastTensor):
            raise FP8BackendError(
                "enable_fsdp_float8_all_gather=True, and the model is not sharded: apply "
                "fully_shard to it before it runs, or leave the field out"
            )
        refuse_cut_since(self, input)
        # nothing to take an amax of. (Asked by `numel()`, Inductor writes past a buffer of a
        # padded, dynamic input)
        if 0 in input.shape or self.ao_paused:
            gathered = hasattr(self.weight, "to_original_precision")
            weight = self.weight.to_original_precision() if gathered else self.weight
            return F.linear(input, weight.t() if self.transposed_weight else weight, self.bias)
        if input.dim() == 1:
            return self.forward(input.unsqueeze(0)).squeeze(0)
        if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            # TorchAO's tensors do not know the operators of inference mode
            with torch.inference_mode(False), torch.no_grad():
                return self.forward(input)
        device = input.device.type
        # oneDNN on AMX-FP16 and cuBLAS return no FP64 from FP8 products
        if input.dtype == torch.float64:
            return self.forward(input.float()).double()
        if not self.fp8_wgrad and torch.is_autocast_enabled(device):
            # TorchAO casts only under CUDA's autocast; elsewhere it multiplies a bf16 gradient by
            # an fp32 input
            input = input.to(torch.get_autocast_dtype(device))
        refuse_transforms(self.weight)
        layer = self
        if self.transposed_weight:
            layer = _AsLinear(self.weight.t(), self.bias, self.linear_mm_config, self.config)
        with saved_by_name(self.weight):
            output = Float8Linear.forward(layer, input)
        if self.bias is None:  # TorchAO's view, in which autograd lets nobody write
            output = torch.ops.aten._unsafe_view.default(output, output.shape)
        if output.requires_grad and not torch.compiler.is_compiling():
            output.register_hook(refuse_second_derivative)
        return output


class AOLinear(AOProducts, Float8Linear):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.fp8_wgrad = WGRAD not in products_in_high_precision(self.config)
        self.ao_paused = False

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


class AOWeight(WeightWithDynamicFloat8CastTensor):
    """A high-precision weight or shard, `_tensor`, that FSDP2 gathers in FP8 with one scale for all
    ranks. Unlike in TorchAO's class, codes travel as bytes (gloo refuses float8), and uneven shards
    are padded."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        return tree_map_only(
            WeightWithDynamicFloat8CastTensor,
            lambda weight: AOWeight(weight._tensor, weight._linear_mm_config, weight._dtype),
            result,
        )

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        (codes,), metadata = super().fsdp_pre_all_gather(mesh)
        codes = codes.view(torch.uint8)
        if self.shape[1:] == outer_size[1:]:
            missing = -(-outer_size[0] // mesh.size()) - self.shape[0]
            codes = (
                torch.cat([codes, codes.new_zeros(missing, *outer_size[1:])]) if missing else codes
            )
        return (codes,), (metadata, outer_size)

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        (gathered,), (metadata, size) = all_gather_outputs, metadata
        codes = gathered.reshape(-1)[: size.numel()].view(self._dtype).view(size)
        result = super().fsdp_post_all_gather((codes,), metadata, param_dtype, out=out)
        return None if result is None else (result[0], (gathered,))


torch.serialization.add_safe_globals([AOWeight])


def gather_in_fp8(root: nn.Module) -> None:
    """Let FSDP2 gather the weights of all AO layers in FP8. Call it before `fully_shard`;
    Parameters stay the same objects. Raises `FP8BackendError`, without a change, if a weight is
    sharded already, or held by something else."""
    layers = {name: layer for name, layer in root.named_modules() if isinstance(layer, AOProducts)}
    for name, layer in layers.items():
        if is_distributed(layer.weight):
            raise FP8BackendError(
                f"enable_fsdp_float8_all_gather: {name}.weight is sharded already, and FSDP2 would "
                "not gather it in FP8 any more: prepare the model before fully_shard"
            )
        refuse_if_held(layer.weight, f"{name}.weight")
    for name, layer in layers.items():
        if not isinstance(layer.weight, AOWeight):  # it may be tied to an earlier one
            swap(layer.weight, _wrapped(layer, layer.weight.detach()), f"{name}.weight")
        layer.register_state_dict_post_hook(export_plain)
        layer.register_load_state_dict_pre_hook(wrap_again)
        layer.register_load_state_dict_post_hook(forget_scale)


def agree_scales(root: nn.Module) -> None:
    """Compute the scales of all weights after an optimizer step by one all-reduce, in place of one
    for each weight."""
    weights = [layer.weight for layer in root.modules() if isinstance(layer, AOProducts)]
    if any(
        is_distributed(weight) and isinstance(local_part(weight), AOWeight) for weight in weights
    ):
        precompute_float8_dynamic_scale_for_fsdp(root)


def _wrapped(layer: AOProducts, values: torch.Tensor) -> AOWeight:
    return AOWeight(values, layer.linear_mm_config, layer.config.cast_config_weight.target_dtype)


def export_plain(layer: AOProducts, state_dict: dict, prefix: str, local_metadata: dict) -> None:
    """Put the weight's plain values into a state dict (hook)."""
    weight = state_dict.get(f"{prefix}weight")
    if weight is None or weight.requires_grad or not isinstance(local_part(weight), AOWeight):
        return  # keep_vars=True returns the Parameter itself
    plain = local_part(weight)._tensor
    state_dict[f"{prefix}weight"] = with_local(weight, plain) if is_distributed(weight) else plain


def wrap_again(layer: AOProducts, state_dict: dict, prefix: str, *_) -> None:
    """Wrap a plain weight before it is loaded (hook): `assign=True` makes it the Parameter."""
    new = state_dict.get(f"{prefix}weight")
    if (
        new is None
        or isinstance(local_part(new), AOWeight)
        or not isinstance(local_part(layer.weight), AOWeight)
    ):
        return
    wrapped = _wrapped(layer, local_part(new.detach()))
    state_dict[f"{prefix}weight"] = with_local(new, wrapped) if is_distributed(new) else wrapped


def forget_scale(layer: AOProducts, incompatible_keys) -> None:
    """Drop the scale of the values before loading (hook)."""
    local_part(layer.weight)._precomputed_scale = None
