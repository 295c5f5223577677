"""The `native` backend: FP8 linear layers in plain PyTorch, with all three products in FP8.

    forward     x8, w8 = quantize(x), quantize(w)            y  = x8 @ w8.T
    backward    dy8    = quantize(dy)                        dx = dy8 @ w8       dw = dy8.T @ x8

Rules with scales along the contraction quantize once for each product: forward keeps a column-wise
copy of x, made from high precision, and backward quantizes the weight again.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ...announcement import logger
from ...errors import RecipeError
from ...formats.formats import RECIPE_FORMATS
from ...formats.scaling import (
    RULES,
    SQUARES,
    Quantized,
)
from ...kernels.triton_gate import usable
from ...tensors.block_codes import RAW_CODES, SQUARE_CODES, BlockCodes, CodeLayout, dequantize_bias
from ...tensors.parameter_swap import swap
from ...tensors.sharded_tensor import device_of, local_part
from ...tensors.statistics import Cast
from ...torch_tools.backward_end import inside_backward
from ...torch_tools.modules import owner_of
from ..counts import ProductCounts
from ..fields import LEVELS, RULE_FIELDS, Field
from ..frozen_weights import check, freeze
from ..hardware import Availability
from ..interface import Compute, Recipe, check_saved_states
from ..products import EMULATED, engine_for
from ..refusals import refuse_cut_since, refuse_transforms
from .layer_rule import FROZEN, HighPrecision, LayerRule, parallel
from .linear import FP8Linear, FP8Products
from .scaling_states import KeepsLedger, Ledger, SharedCodes, with_noted_amaxes
from .weights import kind_of, read


class NativeCompute(Compute):
    """Multiply by `torch._scaled_mm`, or by other means if they are faster or the device lacks
    it."""

    name = "native"
    scalings: tuple[str, ...] = tuple(RULES)
    default_scaling = "dynamic"
    level_scaling = "window"
    levels: tuple[str, ...] = LEVELS
    fields: tuple[Field | str, ...] = (
        *RULE_FIELDS,
        "enable_fsdp_float8_all_gather",
        "fast_accumulation",
    )
    casts_by = "the layer's own rule"
    takes_transposed = True
    parts_module = "fp8_backends.compute.experts.native_layer"

    def availability(self) -> Availability:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        engine = engine_for(device, torch.bfloat16)
        if engine == EMULATED:
            return Availability(
                True, "emulated in FP32: this device has no FP8 products, bf16 is faster"
            )
        return Availability(True, f"products by {engine} on {device.type}")

    def check(self, recipe: Recipe) -> None:
        for name in ("fused_head", "enable_fsdp_float8_all_gather") if recipe.schedule else ():
            if getattr(recipe, name):
                raise RecipeError(
                    f"{recipe.name}: schedule and {name} do not go together: leave one out"
                )
        if recipe.gradient_formats and RULES[recipe.scaling].state_name:
            raise RecipeError(
                f"products: {recipe.name} has one scale for a gradient, so one format: give "
                "fp8_format in place of e4m3 and e5m2"
            )

    def unfit(self, linear: nn.Linear, recipe: Recipe) -> str | None:
        blocks = RULES[recipe.scaling].weight_blocks
        is_raw = linear.weight.dtype in RAW_CODES and type(linear) is nn.Linear
        if not (is_raw and recipe.level == "O0") and (reason := super().unfit(linear, recipe)):
            return reason
        return parallel("cut_obstacle", linear, linear.weight, blocks)

    def new_shared(self, root: nn.Module, recipe: Recipe) -> SharedCodes:
        return SharedCodes()

    def build(self, linear: nn.Linear, recipe: Recipe, shared: SharedCodes) -> FP8Linear:
        carrier = FP8Linear(linear.in_features, linear.out_features, bias=False, device="meta")
        return _around(linear, carrier, recipe, shared)

    def turn_off_fast_accumulation(self, layer: KeepsLedger) -> None:
        layer.fp8_rule = layer.fp8_rule._replace(fast_accumulation=False)

    def switches(self, recipe: Recipe) -> tuple[str, ...]:
        return "bf16", "rule"

    def switch(self, layer: KeepsLedger, recipe: Recipe | None) -> None:
        rule = (
            layer.fp8_rule._replace(high_precision=HighPrecision(True, True, True))
            if recipe is None
            else layer_rule(recipe)
        )
        before = layer.fp8_rule
        kept = {
            "fast_accumulation": before.fast_accumulation,
            "frozen_weight": before.frozen_weight,
        }
        layer.fp8_rule = rule._replace(**kept)
        # a phase without states holds none
        if bool(rule.scales.state_name) == (layer.fp8_scaling is None):
            counts = layer.fp8_ledger.total()
            layer._reset_state(device_of(layer.weight))
            layer.fp8_ledger.counts = counts

    def attach(self, root: nn.Module, recipe: Recipe, shared: SharedCodes) -> None:
        layer = next(filter(self.is_converted, root.modules()), None)
        if layer is not None and self.engine(layer) == EMULATED:
            logger.warning(
                "FP8 products of %s are emulated on %s: same casts, no speed; bf16 is faster",
                recipe.name,
                layer.weight.device,
            )
        if RULES[recipe.scaling].moves_in_forward:
            root.register_forward_pre_hook(RollDelayedStates(recipe, shared))

    def store_weights(self, root: nn.Module, recipe: Recipe) -> None:
        layers = self.converted_layers(root)
        if layers := {
            name: layer for name, layer in layers.items() if layer.fp8_rule.frozen_weight
        }:
            from .stored_weights import frozen

            freeze(
                root,
                layers,
                lambda weight: isinstance(local_part(weight), FROZEN),
                lambda weight, _: frozen(weight),
                _thaw,
            )
            for layer in layers.values():
                dequantize_bias(layer)

    def takes_block_codes(self, recipe: Recipe, layout: CodeLayout) -> bool:
        if layout is SQUARE_CODES:
            return bool(recipe.fp8_params) and RULES[recipe.scaling].weight_blocks is SQUARES
        return recipe.level == "O0"

    def keep_weight_casts(self, root: nn.Module, keep: bool) -> None:
        for shared in self._shared(root):
            shared.keep_weights(keep)

    def after_optimizer_step(self, root: nn.Module) -> None:
        for shared in self._shared(root):
            layers = filter(self.is_converted, root.modules())
            shared.forget_weights(layer for layer in layers if layer.weight.grad is not None)
            shared.forget_modes()
        for (_, rule, *_), (states, stacked) in _states_of_layers(root, in_forward=False).items():
            formats = (rule.forward_format, rule.forward_format, rule.gradient_format)
            _write(states, rule.scales.rolled(stacked, formats))
        rolls = next(
            (
                hook
                for hook in root._forward_pre_hooks.values()
                if isinstance(hook, RollDelayedStates)
            ),
            None,
        )
        if rolls is not None and not inside_backward():
            rolls.roll(root)  # for loops that call parts of the model

    def is_converted(self, module: nn.Module) -> bool:
        return isinstance(module, KeepsLedger)

    def engine(self, module: KeepsLedger) -> str:
        return module.fp8_engine

    def products(self, module: KeepsLedger) -> ProductCounts:
        return module.fp8_ledger.total()

    def transient_bytes_per_element(self, module: KeepsLedger) -> float:
        # one FP8 code an element for dgrad, made in forward: rules along the contraction make it in
        # backward, and a weight stored in FP8 is its own codes
        rule, weight = module.fp8_rule, local_part(module.weight)
        if kind_of(weight).is_decoded:  # each product casts its values
            return 0.0
        weight = read(weight)
        if weight.is_in(rule.forward_format):
            return 0.0
        for_dgrad = not rule.dgrad_reads_weight
        # and one for fprop, kept over microbatches, unless it is the same
        stays = module.fp8_shared.keeps_weights and not rule.scales.moves_in_forward
        is_the_same = for_dgrad and not usable(weight.data)
        return float(for_dgrad) + float(stays and not is_the_same)

    def weight_codes(self, module: KeepsLedger) -> Quantized | None:
        return module.weight_codes() if isinstance(module, FP8Products) else None

    def gathers_codes(self, recipe: Recipe) -> bool:
        if recipe.enable_fsdp_float8_all_gather is not None:
            return recipe.enable_fsdp_float8_all_gather
        # at a level, with codes for both products: FSDP2 keeps all its features, compiled code
        # among them, and all numbers. In forward, users may read the weights of a stock model
        in_both = RULES[recipe.scaling].serves_both_products
        return recipe.level != "O0" and not recipe.schedule and in_both

    def travelling(self, root: nn.Module, recipe: Recipe) -> dict[tuple[nn.Module, str], Any]:
        if not self.gathers_codes(recipe):
            return {}
        layers = (layer for layer in root.modules() if self.is_converted(layer))
        layers = (layer for layer in layers if layer.fp8_rule.scaling == recipe.scaling)
        # frozen ones travel as they are stored
        layers = (layer for layer in layers if not layer.fp8_rule.frozen_weight)
        codes = {owner_of(layer): layer.gathered_codes() for layer in layers}
        for key, hook in root._forward_pre_hooks.items():
            # before FSDP2's hook, which gathers codes by this step's scale
            if isinstance(hook, RollDelayedStates):
                root._forward_pre_hooks.move_to_end(key, last=False)
                break
        return codes

    def cast_of(self, module: KeepsLedger, tensor: int, values: torch.Tensor) -> Cast | None:
        return module.cast_of(tensor, values) if isinstance(module, FP8Products) else None

    def scaling_state(self, root: nn.Module) -> dict[str, torch.Tensor]:
        _collect_amaxes(root)
        return {
            name: layer.fp8_scaling.detach().clone() for name, layer in self._stateful_layers(root)
        }

    def scaling_buffers(self, root: nn.Module) -> list[torch.Tensor]:
        _collect_amaxes(root)
        return [layer.fp8_scaling for _, layer in self._stateful_layers(root)]

    def check_scaling_state(self, root: nn.Module, state: dict[str, torch.Tensor]) -> None:
        layers = dict(self._stateful_layers(root))

        def check(saved: torch.Tensor, name: str, advice: str) -> None:
            layers[name].fp8_rule.scales.check_state(saved, name, advice)

        check_saved_states(
            {name: layer.fp8_scaling for name, layer in layers.items()}, state, check
        )

    def load_scaling_state(self, root: nn.Module, state: dict[str, torch.Tensor]) -> None:
        self.check_scaling_state(root, state)
        _collect_amaxes(root)  # earlier ones, replaced by the loaded state
        for name, layer in self._stateful_layers(root):
            layer.fp8_scaling.copy_(state[name])

    def _stateful_layers(self, root: nn.Module) -> Iterator[tuple[str, KeepsLedger]]:
        """Yield layers by the names of their states. Names differ by rule, like the states."""
        for name, layer in self.converted_layers(root).items():
            if state_name := layer.fp8_rule.scales.state_name:
                yield f"{name}.{state_name}", layer

    def _shared(self, root: nn.Module) -> set[SharedCodes]:
        # not `is_converted`: each step asks every module
        return {layer.fp8_shared for layer in root.modules() if isinstance(layer, KeepsLedger)}


class RollDelayedStates:
    """Roll every layer's delayed state before each training forward of the prepared root, and at
    each optimizer step, for loops that call submodules. A state with no new amax does not change.

    In a loop of forward and backward, scales and histories equal TransformerEngine's. Evaluation,
    recomputation and forwards of the root without gradients leave the state alone. A class, unlike
    a closure, pickles with the model.
    """

    def __init__(self, recipe: Recipe, shared: SharedCodes) -> None:
        self.shared = shared
        self.rule = RULES[recipe.scaling]
        self.arguments = recipe.margin, recipe.amax_compute_algo, recipe.interval
        forward, gradient = RECIPE_FORMATS[recipe.fp8_format]
        self.format_max = (forward.max, forward.max, gradient.max)

    def __call__(self, root: nn.Module, args) -> None:
        if not root.training or inside_backward():
            return
        self.shared.forward_records = torch.is_grad_enabled()
        if torch.is_grad_enabled():
            refuse_transforms()
            self.roll(root)

    def roll(self, root: nn.Module) -> None:
        for group, states in _states_of_layers(root, in_forward=True).values():
            # filled on the device: a copy from the host would wait
            limits = [
                torch.full((1,), most, dtype=torch.float32, device=states.device)
                for most in self.format_max
            ]
            _write(group, self.rule.rolled_in_forward(states, torch.cat(limits), *self.arguments))


def _write(states: list[torch.Tensor], stacked: torch.Tensor) -> None:
    """Copy new values into live states."""
    # `data`: compiled code may still read a state for a backward
    data = [state.data for state in states]
    if not torch.compiler.is_compiling():
        torch._foreach_copy_(data, stacked.unbind())
        return
    # Inductor miscompiles `_foreach_copy_` here
    for state, new in zip(data, stacked.unbind(), strict=True):
        state.copy_(new)


def _states_of_layers(
    root: nn.Module, in_forward: bool
) -> dict[tuple, tuple[list[torch.Tensor], torch.Tensor]]:
    """Group the states of rules that move in forward, or at the step, by (device, rule, size): live
    states, and a stacked copy with all amaxes."""
    groups: dict[tuple, tuple[list[torch.Tensor], list[Ledger]]] = {}
    for module in root.modules():
        if isinstance(module, KeepsLedger) and module.fp8_scaling is not None:
            if module.fp8_rule.scales.moves_in_forward != in_forward:
                continue
            module._follow(device_of(module.weight))
            if isinstance(module, FP8Products):
                refuse_cut_since(module, module.fp8_scaling)
            state = module.fp8_scaling
            states = [state] if state.dim() == 2 else state.unbind()
            group = groups.setdefault(
                (states[0].device, module.fp8_rule, states[0].shape[1]), ([], [])
            )
            group[0].extend(states)
            group[1].append(module.fp8_ledger)
    return {
        key: (states, with_noted_amaxes(torch.stack(states), ledgers))
        for key, (states, ledgers) in groups.items()
    }


def _collect_amaxes(root: nn.Module) -> None:
    """Add the amaxes noted by compiled code to the states of all layers."""
    for in_forward in (True, False):
        for states, stacked in _states_of_layers(root, in_forward).values():
            _write(states, stacked)


def _thaw(layer: nn.Module) -> None:
    """Undo `freeze` on one layer."""
    if isinstance(layer.weight, FROZEN):
        swap(layer.weight, layer.weight.exact(), "weight")


def _around(
    layer: nn.Module, carrier: FP8Products, recipe: Recipe, shared: SharedCodes
) -> FP8Products:
    """Give the carrier the Parameters of `layer` and the rule of the recipe."""
    carrier.weight, carrier.bias = layer.weight, layer.bias
    rule = layer_rule(recipe)
    codes = local_part(carrier.weight)
    layout = RAW_CODES.get(codes.dtype)
    if isinstance(codes, BlockCodes):
        layout = codes.code_layout
    if layout not in (None, SQUARE_CODES):
        rule = rule._replace(frozen_weight=f"from {layout.name}")
    if rule.frozen_weight:
        check(carrier)
    carrier.set_rule(rule, shared, recipe.amax_history_len)
    carrier.fp8_cut = parallel(
        "cut_of", layer, layer._parameters.get("weight"), carrier.transposed_weight
    )
    return carrier


def layer_rule(recipe: Recipe) -> LayerRule:
    """Build the rule of a resolved recipe's layers."""
    forward, gradient = RECIPE_FORMATS[recipe.fp8_format]
    dgrad = recipe.gradient_formats.get("dgrad", gradient)
    wgrad = recipe.gradient_formats.get("wgrad", gradient)
    return LayerRule(
        RULES[recipe.scaling],
        forward,
        dgrad,
        HighPrecision(*recipe.override_linear_precision),
        bool(recipe.use_autocast_during_eval),
        "stored" if recipe.fp8_params else "",
        recipe.activation_comm == "fp8",
        wgrad_format=None if wgrad is dgrad else wgrad,
    )
