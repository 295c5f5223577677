"""TorchAO's weights for FSDP2: high-precision shards, FP8 on the wire. Imports TorchAO.

`AOWeight` is TorchAO's own `WeightWithDynamicFloat8CastTensor`, which FSDP2 asks what to gather: the shard in FP8, with
a scale that is agreed over the ranks. What differs: it travels as bytes (gloo refuses float8), uneven shards are
padded, and state dicts hold plain weights, also those that a model on the meta device is loaded from.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor, precompute_float8_dynamic_scale_for_fsdp

from ...errors import FP8BackendError
from ...numerics.parameter_swap import refuse_if_held, swap
from ...numerics.sharded_tensor import is_distributed, local_part, with_local
from .linear import AOProducts


class AOWeight(WeightWithDynamicFloat8CastTensor):
    """A high-precision weight or shard of one, `_tensor`, that FSDP2 gathers in FP8."""

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
            codes = torch.cat([codes, codes.new_zeros(missing, *outer_size[1:])]) if missing else codes
        return (codes,), (metadata, outer_size)

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        (gathered,), (metadata, size) = all_gather_outputs, metadata
        codes = gathered.reshape(-1)[: size.numel()].view(self._dtype).view(size)
        result = super().fsdp_post_all_gather((codes,), metadata, param_dtype, out=out)
        return None if result is None else (result[0], (gathered,))


torch.serialization.add_safe_globals([AOWeight])


def gather_in_fp8(root: nn.Module) -> None:
    """Before `fully_shard`: let the weights of all AO layers travel in FP8. Parameters stay the same objects.

    Raises:
        FP8BackendError: a weight that is sharded already, or that something else holds on to; none has changed then.
    """
    layers = {name: layer for name, layer in root.named_modules() if isinstance(layer, AOProducts)}
    for name, layer in layers.items():
        if is_distributed(layer.weight):
            raise FP8BackendError(
                f"enable_fsdp_float8_all_gather: {name}.weight is sharded already, and what it gathers can no longer "
                f"be swapped: prepare the model before fully_shard"
            )
        refuse_if_held(layer.weight, f"{name}.weight")
    for name, layer in layers.items():
        if not isinstance(layer.weight, AOWeight):  # it may be tied to one before it
            swap(layer.weight, _wrapped(layer, layer.weight.detach()), f"{name}.weight")
        layer.register_state_dict_post_hook(export_plain)
        layer.register_load_state_dict_pre_hook(wrap_again)
        layer.register_load_state_dict_post_hook(forget_scale)


def agree_scales(root: nn.Module) -> None:
    """After an optimizer step: the scales of all weights by one all-reduce, and not by one for each gathered weight."""
    weights = [layer.weight for layer in root.modules() if isinstance(layer, AOProducts)]
    if any(is_distributed(weight) and isinstance(local_part(weight), AOWeight) for weight in weights):
        precompute_float8_dynamic_scale_for_fsdp(root)


def _wrapped(layer: AOProducts, values: torch.Tensor) -> AOWeight:
    return AOWeight(values, layer.linear_mm_config, layer.config.cast_config_weight.target_dtype)


# State dicts: plain weights out, wrapped weights in


def export_plain(layer: AOProducts, state_dict: dict, prefix: str, local_metadata: dict) -> None:
    """State-dict hook: the weight's plain values."""
    weight = state_dict.get(f"{prefix}weight")
    if weight is None or weight.requires_grad or not isinstance(local_part(weight), AOWeight):
        return  # keep_vars=True asks for the Parameter itself
    plain = local_part(weight)._tensor
    state_dict[f"{prefix}weight"] = with_local(weight, plain) if is_distributed(weight) else plain


def wrap_again(layer: AOProducts, state_dict: dict, prefix: str, *_) -> None:
    """Load hook: `load_state_dict(assign=True)`, as for a model on the meta device, puts in what it is given."""
    new = state_dict.get(f"{prefix}weight")
    if new is None or isinstance(local_part(new), AOWeight) or not isinstance(local_part(layer.weight), AOWeight):
        return
    wrapped = _wrapped(layer, local_part(new.detach()))
    state_dict[f"{prefix}weight"] = with_local(new, wrapped) if is_distributed(new) else wrapped


def forget_scale(layer: AOProducts, incompatible_keys) -> None:
    """Load hook: the scale of the values before is not that of these."""
    local_part(layer.weight)._precomputed_scale = None
