"""The `native` backend: an FP8 linear layer in plain PyTorch, whose three products all run in FP8.

What one layer does with the `dynamic` rule and the HYBRID format (E4M3 forward, E5M2 gradients):

    forward     x8, w8 = quantize(x), quantize(w)            y  = x8 @ w8.T
    backward    dy8    = quantize(dy)                        dx = dy8 @ w8       dw = dy8.T @ x8

Only x8 and w8 are kept for backward, so a layer saves half of what bf16 saves; layers that read the same input (q, k
and v of an attention) share one x8, and microbatches may share w8 (`shared_codes`). Each is made in the two layouts in
which its products read it, or in one with a view where views will do (`numerics.kernels.quantize`). With `rowwise`,
`blockwise` and `mxfp8` an operand is quantized along its contraction, hence once a product: forward keeps a column-wise
copy of x, made from high precision, and backward quantizes the weight again.

A weight may be stored in scaled precision (`ScaledTensor`, MS-AMP's levels): FP16 data becomes w8 without a copy of its
values, E4M3 data is w8. Frozen FP8 weights (`fp8_params`) lie so, too.

Experts of transformers' mixtures, whose weights lie in one 3-D Parameter, run the same products in groups (`experts`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
from torch import nn

from ...numerics.engine import inside_backward
from ...numerics.formats import RECIPE_FORMATS
from ...numerics.kernels.triton_gate import usable
from ...numerics.modules import owner_of
from ...numerics.parameter_swap import swap
from ...numerics.scaling import Quantized, check_state, rolled_delayed_states, rolled_window_states
from ...numerics.sharded_tensor import device_of, local_part
from ...numerics.statistics import Cast
from ..counts import DGRAD, KINDS, ProductCounts
from ..derivatives import refuse_transforms
from ..fields import LEVELS, RULE_FIELDS, Field
from ..frozen_weights import check, freeze
from ..hardware import Availability
from ..interface import Compute, Recipe, check_saved_states
from ..layer_parts import is_parallel, refuse_cut_since
from ..products import EMULATED, engine_for
from . import experts as fp8_experts
from .block_products import block_engine_for
from .casts import cast_of
from .experts import FP8Experts, FP8ExpertWeight
from .fused_head import FP8Head
from .gathers import ExpertCodes, WeightCodes
from .grouped_products import grouped_engine_for
from .layer_rule import STATEFUL, LayerRule, Stored
from .ledger import Ledger, with_noted_amaxes
from .linear import FROZEN, FP8Linear, FP8Products, frozen
from .shared_codes import SharedCodes
from .tensor_parallel import Cut, cut_obstacle

logger = logging.getLogger("fp8_backends")

_STATE_NAMES = {"delayed": "fp8_scaling", "window": "fp8_window"}


class NativeCompute(Compute):
    """`torch._scaled_mm`, or the same product by other means where that is faster or the device has none."""

    name = "native"
    scalings: tuple[str, ...] = ("dynamic", "delayed", "rowwise", "blockwise", "mxfp8", "window")
    default_scaling = "dynamic"
    level_scaling = "window"
    levels: tuple[str, ...] = LEVELS
    fields: tuple[Field | str, ...] = (*RULE_FIELDS, "enable_fsdp_float8_all_gather", "fused_head")
    casts_by = "the layer's own rule"
    takes_conv1d = True
    defers_head = True

    def availability(self) -> Availability:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        engine = engine_for(device, torch.bfloat16)
        if engine == EMULATED:
            return Availability(True, "emulated in FP32: this device has no FP8 products, bf16 is faster")
        return Availability(True, f"products by {engine} on {device.type}")

    def unfit(self, linear: nn.Linear, recipe: Recipe) -> str | None:
        return super().unfit(linear, recipe) or cut_obstacle(linear, layer_rule(recipe).weight_blocks)

    def new_shared(self, root: nn.Module, recipe: Recipe) -> SharedCodes:
        return SharedCodes()

    def build(self, linear: nn.Linear, recipe: Recipe, shared: SharedCodes) -> FP8Linear:
        carrier = FP8Linear(linear.in_features, linear.out_features, bias=False, device="meta")
        return _around(linear, carrier, recipe, shared)

    def build_conv1d(self, conv: nn.Module, recipe: Recipe, shared: SharedCodes) -> FP8Products:
        from .linear import FP8Conv1D

        with torch.device("meta"):
            carrier = FP8Conv1D(conv.nf, conv.nx)
        return _around(conv, carrier, recipe, shared)

    def build_head(self, linear: nn.Linear, recipe: Recipe, shared: SharedCodes) -> FP8Head:
        carrier = FP8Head(linear.in_features, linear.out_features, bias=False, device="meta")
        return _around(linear, carrier, recipe, shared)

    def unfit_experts(self, experts: nn.Module, part: str, recipe: Recipe) -> str | None:
        return fp8_experts.unfit(experts, part, recipe)

    def note_on_experts(self, recipe: Recipe) -> str | None:
        return fp8_experts.note(layer_rule(recipe))

    def build_experts(self, experts: nn.Module, parts: list[str], recipe: Recipe, shared: SharedCodes) -> FP8Experts:
        return fp8_experts.build(experts, parts, layer_rule(recipe), shared, recipe.amax_history_len)

    def attach(self, root: nn.Module, recipe: Recipe, shared: SharedCodes) -> None:
        layer = next(filter(self.is_converted, root.modules()), None)
        if layer is not None and self.engine(layer) == EMULATED:
            logger.warning(
                "FP8 products of %s are emulated on %s: same numbers, no speed; bf16 is faster",
                recipe.name,
                layer.weight.device,
            )
        if recipe.scaling == "delayed":
            root.register_forward_pre_hook(RollDelayedStates(recipe))

    def store_weights(self, root: nn.Module, recipe: Recipe) -> None:
        if recipe.fp8_params:
            layers = self.converted_layers(root)
            freeze(root, layers, lambda weight: isinstance(weight, FROZEN), lambda weight, _: frozen(weight), _thaw)

    def takes_block_codes(self, recipe: Recipe) -> bool:
        return bool(recipe.fp8_params) and recipe.scaling == "blockwise"

    def keep_weight_casts(self, root: nn.Module, keep: bool) -> None:
        for shared in self._shared(root):
            shared.keeps_weights = keep

    def after_optimizer_step(self, root: nn.Module) -> None:
        for shared in self._shared(root):
            shared.forget_weights()
        for (_, rule, *_), (states, stacked) in _states_of_layers(root, "window").items():
            formats = (rule.forward_format, rule.forward_format, rule.gradient_format)
            _write(states, rolled_window_states(stacked, formats))
        rolls = next((hook for hook in root._forward_pre_hooks.values() if isinstance(hook, RollDelayedStates)), None)
        if rolls is not None and not inside_backward():
            rolls.roll(root)  # also where a loop calls parts of the model

    def is_converted(self, module: nn.Module) -> bool:
        return isinstance(module, (FP8Products, FP8ExpertWeight))

    def engine(self, module: FP8Products | FP8ExpertWeight) -> str:
        """The engine for the dtype of the layer's last FP8 result (bf16 before any)."""
        rule, device = module.fp8_rule, module.weight.device
        if rule.has_blocks:
            return block_engine_for(device, module.fp8_out_dtype, rule.along.blocks.columns)
        if isinstance(module, FP8ExpertWeight):
            return grouped_engine_for(device)
        return engine_for(device, module.fp8_out_dtype)

    def products(self, module: FP8Products) -> ProductCounts:
        return module.fp8_ledger.total()

    def high_precision_products(self, recipe: Recipe) -> tuple[str, ...]:
        return tuple(kind for kind, high in zip(KINDS, recipe.override_linear_precision, strict=True) if high)

    def transient_bytes_per_element(self, module: FP8Products) -> float:
        # one FP8 code an element, where they are made for dgrad: rules along the contraction make them in backward, and
        # a weight that is stored in FP8 is its own codes
        rule, weight = module.fp8_rule, Stored.of(local_part(module.weight))
        if weight.is_in(rule.forward_format):
            return 0.0
        for_dgrad = rule.along is None and not rule.high_precision[KINDS.index(DGRAD)]
        # and one for fprop that stays over microbatches, where that is not the same
        stays = module.fp8_shared.keeps_weights and rule.scaling != "delayed"
        is_the_same = for_dgrad and not usable(weight.data)
        return float(for_dgrad) + float(stays and not is_the_same)

    def weight_codes(self, module: FP8Products | FP8ExpertWeight) -> Quantized | None:
        return module.weight_codes() if isinstance(module, FP8Products) else None

    def travelling(self, root: nn.Module, recipe: Recipe) -> dict[tuple[nn.Module, str], WeightCodes]:
        codes = {}
        for layer in filter(self.is_converted, root.modules()):
            codes[owner_of(layer)] = (WeightCodes if isinstance(layer, FP8Products) else ExpertCodes)(layer)
        # at a level, and with codes that serve both products: then nothing of what FSDP2 does is lost, compiled code
        # among it, and no number differs. A stock model's weights are the user's to read in forward
        by_default = recipe.level != "O0" and all(len(each.products) == 1 for each in codes.values())
        asked = recipe.enable_fsdp_float8_all_gather
        if not (by_default if asked is None else asked):
            return {}
        for key, hook in root._forward_pre_hooks.items():
            if isinstance(hook, RollDelayedStates):  # before FSDP2's, which gathers codes by the scale of this step
                root._forward_pre_hooks.move_to_end(key, last=False)
                break
        return codes

    def cast_of(self, module: FP8Products | FP8ExpertWeight, tensor: int, values: torch.Tensor) -> Cast | None:
        return cast_of(module, tensor, values) if isinstance(module, FP8Products) else None

    def scaling_state(self, root: nn.Module) -> dict[str, torch.Tensor]:
        _collect_amaxes(root)
        return {name: layer.fp8_scaling.detach().clone() for name, layer in self._stateful_layers(root)}

    def scaling_buffers(self, root: nn.Module) -> list[torch.Tensor]:
        _collect_amaxes(root)
        return [layer.fp8_scaling for _, layer in self._stateful_layers(root)]

    def check_scaling_state(self, root: nn.Module, state: dict[str, torch.Tensor]) -> None:
        layers = dict(self._stateful_layers(root))

        def check(saved: torch.Tensor, name: str, advice: str) -> None:
            check_state(saved, layers[name].fp8_rule.scaling, name, advice)

        check_saved_states({name: layer.fp8_scaling for name, layer in layers.items()}, state, check)

    def load_scaling_state(self, root: nn.Module, state: dict[str, torch.Tensor]) -> None:
        self.check_scaling_state(root, state)
        _collect_amaxes(root)  # of before, which the loaded state replaces
        for name, layer in self._stateful_layers(root):
            layer.fp8_scaling.copy_(state[name])

    def _stateful_layers(self, root: nn.Module) -> Iterator[tuple[str, FP8Products]]:
        """Layers by the names of their states, which differ from rule to rule, as the states do."""
        for name, layer in self.converted_layers(root).items():
            if layer.fp8_rule.scaling in STATEFUL:
                yield f"{name}.{_STATE_NAMES[layer.fp8_rule.scaling]}", layer

    def _shared(self, root: nn.Module) -> set[SharedCodes]:
        return {layer.fp8_shared for layer in root.modules() if self.is_converted(layer)}


class RollDelayedStates:
    """One step of every layer's delayed state. Forward pre-hook of the prepared root, for training forwards; each
    optimizer step rolls too, for loops that call submodules. A state with no new amax does not change.

    In a loop of forward and backward, scales and histories are TransformerEngine's, which rolls those of a forward at
    its end and those of a backward in it. Evaluation, recomputation and forwards without gradients leave the state
    alone; TransformerEngine lets the next step see the amax of a forward without gradients, too.

    A class and not a closure, so that models pickle.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.margin, self.interval, self.algorithm = recipe.margin, recipe.interval, recipe.amax_compute_algo
        forward, gradient = RECIPE_FORMATS[recipe.fp8_format]
        self.format_max = (forward.max, forward.max, gradient.max)

    def __call__(self, root: nn.Module, args) -> None:
        if root.training and torch.is_grad_enabled() and not inside_backward():
            refuse_transforms()
            self.roll(root)

    def roll(self, root: nn.Module) -> None:
        """Roll the states of all layers."""
        for group, states in _states_of_layers(root, "delayed").values():
            # filled on the device: a copy from the host would wait for it
            limits = [torch.full((1,), most, dtype=torch.float32, device=states.device) for most in self.format_max]
            _write(group, rolled_delayed_states(states, torch.cat(limits), self.margin, self.algorithm, self.interval))


def _write(states: list[torch.Tensor], stacked: torch.Tensor) -> None:
    """Copy new values into live states."""
    # `data`: compiled code may still read a state for a backward
    data = [state.data for state in states]
    if not torch.compiler.is_compiling():
        torch._foreach_copy_(data, stacked.unbind())
        return
    for state, new in zip(data, stacked.unbind(), strict=True):  # Inductor writes wrong numbers of the above
        state.copy_(new)


def _states_of_layers(root: nn.Module, scaling: str) -> dict[tuple, tuple[list[torch.Tensor], torch.Tensor]]:
    """The states of all layers with that rule, in groups that one computation can serve: (device, rule, size).
    Each group as the states themselves, and stacked, with all amaxes so far."""
    groups: dict[tuple, tuple[list[torch.Tensor], list[Ledger]]] = {}
    for module in root.modules():
        if isinstance(module, (FP8Products, FP8ExpertWeight)) and module.fp8_rule.scaling == scaling:
            module._follow(device_of(module.weight))
            if isinstance(module, FP8Products):
                refuse_cut_since(module, module.fp8_scaling)
            states = [module.fp8_scaling] if isinstance(module, FP8Products) else module.fp8_scaling.unbind()
            group = groups.setdefault((states[0].device, module.fp8_rule, states[0].shape[1]), ([], []))
            group[0].extend(states)
            group[1].append(module.fp8_ledger)
    return {key: (states, with_noted_amaxes(torch.stack(states), ledgers)) for key, (states, ledgers) in groups.items()}


def _collect_amaxes(root: nn.Module) -> None:
    """Complete the states of all layers with the amaxes that compiled code noted."""
    for scaling in STATEFUL:
        for states, stacked in _states_of_layers(root, scaling).values():
            _write(states, stacked)


def _thaw(layer: nn.Module) -> None:
    """Undo `freeze` on one layer."""
    if isinstance(layer.weight, FROZEN):
        swap(layer.weight, layer.weight.exact(), "weight")


def _around(layer: nn.Module, carrier: FP8Products, recipe: Recipe, shared: SharedCodes) -> FP8Products:
    """The carrier, with the Parameters of `layer` and the rule of the recipe."""
    carrier.weight, carrier.bias = layer.weight, layer.bias
    if recipe.fp8_params:
        check(carrier)
    carrier.set_rule(layer_rule(recipe), shared, recipe.amax_history_len)
    if is_parallel(layer):
        carrier.fp8_cut = Cut.of_weight(carrier)
    return carrier


def layer_rule(recipe: Recipe) -> LayerRule:
    """The plain values of a resolved recipe that a layer reads."""
    forward, gradient = RECIPE_FORMATS[recipe.fp8_format]
    return LayerRule(
        recipe.scaling,
        forward,
        gradient,
        tuple(recipe.override_linear_precision),
        bool(recipe.use_autocast_during_eval),
        bool(recipe.fp8_params),
        recipe.activation_comm == "fp8",
    )
