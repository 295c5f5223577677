"""Store the weights of converted layers in the form of a backend and a level, and make them plain
for a while."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from ..comm import ddp, fsdp2
from ..errors import FP8BackendError
from ..states import levels
from ..tensors.block_codes import BlockCodes
from ..tensors.parameter_swap import refuse_if_held, swap
from ..tensors.scaled_tensor import ScaledTensor
from ..tensors.sharded_tensor import is_distributed
from ..torch_tools.modules import CONVERSION, check_is_module, has_ranks, owner_of, weight_name
from .conversion import Prepared, prepared_roots


def store_weights(root: nn.Module, prepared: Prepared) -> None:
    """Store the weights of converted layers in the form of the level, and hide them from DDP."""
    if prepared.recipe.level != "O0":
        layers = prepared.compute.converted_layers(root)
        levels.store_weights(
            layers, prepared.recipe.level, by_fsdp2=has_ranks() and bool(fsdp2.fsdp_modules(root))
        )
        levels.export_ties(root)
        for layer in layers.values():
            undo = layer.__dict__[CONVERSION].undo
            if levels.make_plain not in undo:
                undo.append(levels.make_plain)
    ddp.ignore(root)
    # weights stored at O0 are frozen
    undo_sharing = levels.forget_ties
    if prepared.recipe.level == "O0":
        undo_sharing = fsdp2.make_plain
    prepared.undo += [undo for undo in (ddp.forget, undo_sharing) if undo not in prepared.undo]


def keep_weight_casts(model: nn.Module, keep: bool = True) -> None:
    """Cast each weight to FP8 once per optimizer step, not in each forward of an accumulated step.
    Results are bit-identical.

    Only weights with a gradient at the last step of a prepared optimizer keep codes. The next step
    discards them, and so does any other change of the weight except a write through `weight.data`
    between two microbatches. Codes take one byte an element; rules with one scale a tensor hold
    them until backward anyway. `native:delayed` (its scales move with every forward), other
    backends and compiled code ignore the setting. An `Accelerator` with
    `gradient_accumulation_steps` above 1 turns it on automatically if weights are whole on every
    rank.

    Args:
        model: prepared, or holds prepared models.
        keep: False turns it off again.

    Raises:
        FP8BackendError: nothing is prepared, or weights are sharded: they are gathered for each
            forward, and their codes would take the memory that sharding saves.
    """
    check_is_module(model)
    roots = prepared_roots(model)
    if not roots:
        raise FP8BackendError(
            "no model here is prepared: fp8_backends.prepare(model, optimizer, spec) comes first"
        )
    if keep and any(is_distributed(p) or hasattr(p, "ds_id") for p in model.parameters()):
        raise FP8BackendError(
            "weights are sharded (FSDP2 or DeepSpeed ZeRO-3), and codes would take the memory that "
            "sharding saves: leave keep_weight_casts out"
        )
    for _, root, prepared in roots:
        prepared.compute.keep_weight_casts(root, keep)


@contextlib.contextmanager
def plain_weights(model: nn.Module) -> Iterator[nn.Module]:
    """Make every weight of a prepared model an ordinary tensor inside.

    Parameters stay the same objects. Inside they hold their exact values in memory readable and
    writable by any library (`data_ptr()`, NumPy, DLPack, safetensors), and a copy of the model
    keeps plain weights. Afterwards each weight is stored as before: bit-exactly if unchanged;
    changes are kept like those of an operation in place, in FP32 until the optimizer's next step.
    Gradients stay unchanged.

    Inside, evaluate the model, read it, change it; train it outside. The plain weights take
    additional memory. A model with plain weights (level O0, or not prepared) stays unchanged, and
    layers restored inside by `fp8_backends.restore` stay plain.

    Args:
        model: prepared, or holds prepared models; possibly inside DDP and `torch.compile`.

    Raises:
        FP8BackendError: `model` is no module; weights are sharded, or shared out between ranks; or
            another object, such as a graph, refers to one; nothing has changed then. At the end:
            the same, or a frozen FP8 weight was changed; the named weights are plain then, with the
            new values.
    """
    check_is_module(model)
    weights = _stored_weights(model)
    try:
        for weight in weights:
            weight.make_plain()
        yield model
    finally:
        errors = [error for weight in weights if (error := weight.store_again())]
        if errors:
            raise FP8BackendError("; ".join(errors))
        for _, root, prepared in prepared_roots(model):
            prepared.compute.store_weights(root, prepared.recipe)
            store_weights(root, prepared)


@dataclass
class StoredWeight:
    name: str
    layer: nn.Module
    parameter: nn.Parameter
    form: torch.Tensor

    def make_plain(self) -> None:
        if not levels.is_marked(self.layer):
            is_part = owner_of(self.layer)[0] is not self.layer
            # a frozen weight; the first takes a layer of experts off its module
            for undo in reversed(self.layer.__dict__[CONVERSION].undo[is_part:]):
                undo(self.layer)
            return
        levels.unmark(self.layer)
        if not _is_plain(self.parameter):  # else tied to an earlier layer
            swap(self.parameter, self.form.exact(), self.name)

    def store_again(self) -> str | None:
        """Restore the Parameter's form, with later changes; or return the reason against it."""
        owner, part = owner_of(self.layer)
        is_same = owner._parameters.get(part) is self.parameter
        if not is_same or CONVERSION not in self.layer.__dict__ or not _is_plain(self.parameter):
            return None  # replaced or restored since; or tied to an earlier layer
        values = self.parameter.detach()
        if any(
            getattr(values, name) != getattr(self.form, name)
            for name in ("shape", "dtype", "device")
        ):
            return None  # moved or cast: `store_weights` stores it
        form = self.form
        try:
            if isinstance(form, ScaledTensor):
                changed = values != form.exact()
                if changed.any():
                    form[changed] = values[changed]
            else:  # a frozen weight, this package's or TransformerEngine's
                if isinstance(form, BlockCodes):
                    frozen = form.exact()
                else:
                    frozen = form.dequantize(dtype=form.dtype)
                if not torch.equal(values, frozen):
                    return (
                        f"{self.name}: a frozen FP8 weight cannot hold what was written to it: "
                        "fp8_backends.restore(model) comes before changes"
                    )
            swap(self.parameter, form, self.name)
        except FP8BackendError as error:
            return f"{error}; it is plain until fp8_backends.prepare(model, optimizer, spec) stores it again"
        return None


def _stored_weights(model: nn.Module) -> list[StoredWeight]:
    weights = []
    for prefix, root, prepared in prepared_roots(model):
        for name, layer in prepared.compute.converted_layers(root).items():
            weight = layer.weight
            name = f"{prefix}.{weight_name(name, layer)}".strip(".")
            if is_distributed(weight) or getattr(weight, "shared_out", False):
                raise FP8BackendError(
                    f"{name}: this rank has only a part of it (sharded weights, or levels O3 and "
                    "O4 under DDP): call accelerator.get_state_dict(model) on all ranks, or "
                    "prepare with shard_states=False under DDP"
                )
            if not _is_plain(weight):
                refuse_if_held(weight, name)
                weights.append(StoredWeight(name, layer, weight, weight.detach()))
    return weights


def _is_plain(weight: torch.Tensor) -> bool:
    return type(weight) is nn.Parameter
