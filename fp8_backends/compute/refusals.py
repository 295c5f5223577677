"""Refuse uses of FP8 layers that would give wrong numbers: derivatives, and layers cut over ranks
after `prepare`.

Gradients are rounded to FP8 on the way, and PyTorch would take backward's weight and input for
constants: a second derivative would silently lack their terms. Tensor parallelism comes before
`prepare`: parts of a later cut would get other codes, and the optimizer would keep Parameters that
left the model.
"""

import contextlib

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ..errors import FP8BackendError
from ..tensors.sharded_tensor import is_distributed

_WAY_OUT = (
    "compute it with a native backend in evaluation mode (model.eval()), whose layers multiply in "
    "high precision there and those of ao do not, or leave these layers out with exclude=..."
)
_BATCHED = torch._C._dispatch_key_parse("Batched")
"""Key of tensors inside `is_grads_batched`."""


def refuse_second_derivative(gradient: torch.Tensor) -> None:
    """Raise `FP8BackendError` in a backward under `create_graph=True`, or of several gradients at
    once."""
    if torch.compiler.is_compiling():
        return
    if torch.is_grad_enabled():
        raise FP8BackendError(
            f"create_graph=True: the gradient of an FP8 product has no derivative; {_WAY_OUT}"
        )
    if torch._C._dispatch_keys(gradient).has(_BATCHED):
        raise FP8BackendError(
            "is_grads_batched=True, which jacobian(vectorize=True) sets: an FP8 product takes one "
            f"gradient; call torch.autograd.grad for each, or {_WAY_OUT}"
        )


def refuse_transforms(weight: torch.Tensor | None = None) -> None:
    """Raise `FP8BackendError` in a forward inside a transform of `torch.func`, for gradients of
    each sample, or with dual numbers."""
    if torch.compiler.is_compiling():
        return
    # as `torch.autograd.Function.apply` asks, and as `torch.autograd.forward_ad` counts
    is_dual = torch.autograd.forward_ad._current_level >= 0
    is_of_samples = type(weight).__name__ == "ExpandedWeight"
    if torch._C._are_functorch_transforms_active() or is_dual or is_of_samples:
        raise FP8BackendError(
            "an FP8 layer cannot run inside torch.func's grad, vmap, jvp and the like, "
            "call_for_per_sample_grads, nor in forward-mode differentiation (loss.backward() and "
            f"torch.autograd.grad work); {_WAY_OUT}"
        )


def refuse_width(x: torch.Tensor, in_features: int) -> None:
    """Raise ValueError for an input [..., another width]."""
    if x.dim() == 0 or x.shape[-1] != in_features:
        raise ValueError(
            f"an FP8 linear layer of {in_features} input features got an input of shape "
            f"{tuple(x.shape)}; its last dimension must be {in_features}"
        )


def saved_by_name(weight: nn.Parameter) -> contextlib.AbstractContextManager:
    """Let autograd save the Parameter in place of views of its data, and recreate the views in
    backward. DeepSpeed's ZeRO-3 takes the gathered data out of it after forward: saved views such
    as `weight.t()` would hold the weights of the whole model. Does nothing for other weights."""
    if not hasattr(weight, "ds_id"):
        return contextlib.nullcontext()

    def pack(tensor: torch.Tensor):
        if tensor.data_ptr() == weight.data_ptr() and tensor.numel() == weight.numel():
            return tensor.shape, tensor.stride()
        return tensor

    def unpack(packed):
        return packed if isinstance(packed, torch.Tensor) else weight.detach().as_strided(*packed)

    return saved_tensors_hooks(pack, unpack)


def is_parallel(layer: nn.Module) -> bool:
    """Return True if a tensor-parallel style of PyTorch or transformers was applied to this
    layer."""
    return any(getattr(layer, mark, False) for mark in ("_distribute_module_applied", "_is_hooked"))


def part_obstacle(
    layer: nn.Module, weight: torch.Tensor, multiple: int, otherwise: str
) -> str | None:
    """Return the reason to keep the parts of a weight in a tensor-parallel layer in high precision,
    or None. Products take features in multiples of `multiple`; `otherwise` has the consequence for
    other sizes, and the remedy."""
    if not is_parallel(layer) or not is_distributed(weight):
        return None
    mesh = weight.device_mesh
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    for dimension, placed in enumerate(weight.placements):
        ranks = mesh.size(dimension)  # Dynamo of torch 2.11 does not iterate over `mesh.shape`
        # FSDP gathers its shards before the product
        is_fsdp = mesh.ndim > 1 and names[dimension] != "tp"
        if (
            placed.is_replicate()
            or ranks == 1
            or is_fsdp
            or placed.dim % weight.dim() < weight.dim() - 2
        ):
            continue  # or whole matrices on each rank
        # of each packed weight
        size = weight.shape[placed.dim] // getattr(placed, "split_factor", 1)
        part = -(-size // ranks)
        if part % multiple:
            return f"tensor parallelism gives each rank {part} of {size} features, {otherwise}"
        if part * (ranks - 1) >= size:
            return f"tensor parallelism leaves a rank without any of {size} features"
    return None


def note_whether_cut(layer: nn.Module) -> None:
    """Record on a prepared layer if its weight is distributed by now."""
    layer.fp8_prepared_cut = is_distributed(layer.weight)


def refuse_cut_since(layer: nn.Module, seen: torch.Tensor) -> None:
    """Raise `FP8BackendError` if `seen`, an input or a state, is a DTensor and the weight became
    one too late."""
    if is_distributed(seen) and is_distributed(layer.weight) and not layer.fp8_prepared_cut:
        raise FP8BackendError(
            f"an FP8 layer {layer.in_features} -> {layer.out_features} was cut over ranks after it "
            "was prepared: call parallelize_module, or load by tp_plan, first; then make the "
            "optimizer, and prepare both"
        )
