"""The common part of all `te` layers: FP8 regions, counts of products, and scales.

TransformerEngine's layers multiply by `general_gemm`, and experts by `general_grouped_gemm` (all in
one call). They are wrapped where the layers look them up: a call with only FP8 operands is a
product of the layer whose forward or autograd node runs, and its layout tells the kind
(docs/patches.rst lists alternatives).

Imports TransformerEngine, so it is imported when a layer is converted or unpickled.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformer_engine.pytorch.module.grouped_linear as te_grouped_linear_module
import transformer_engine.pytorch.module.linear as te_linear_module
from torch import distributed, nn

from ...errors import FP8BackendError, RecipeError, Refusal
from ...formats.scaling import RULES
from ...tensors.parameter_swap import belongings_kept
from ...tensors.state_dict_copies import StateDictCopies
from ...torch_tools.backward_end import call_when_backward_ends, inside_backward
from ...torch_tools.modules import PREPARED, has_ranks
from ..counts import DGRAD, FPROP, RECOMPUTED, WGRAD, Modes, ProductCounts
from ..interface import Recipe
from .recipes import (
    VERSION,
    FP8GlobalStateManager,
    autocast,
    fast_accumulation_off,
    recipe_object,
    refuse_cpu,
)

DELAYED_PIPELINE = Refusal(
    "delayed scales of te do not go with a pipeline: after each forward TransformerEngine takes "
    "the largest amaxes of all ranks, and ranks with other stages would wait forever",
    "use te:dynamic, whose scales need no agreement, or native:delayed",
)
DIRECTIONS = {"forward": "scaling_fwd", "backward": "scaling_bwd"}
"""The halves of a delayed scaling state: our name and TransformerEngine's."""


class ModelState(Modes):
    """The state shared by all layers of a prepared model: its recipe and its open region."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        _count_products()
        self.recipe = recipe
        self.te_recipe = recipe_object(recipe)
        self.in_eval = bool(recipe.use_autocast_during_eval)
        self.plain_wgrad = bool(recipe.override_linear_precision[2])
        # rows are padded to it, as the contraction of the weight gradient's product
        self.rows_multiple = RULES[recipe.scaling].multiple
        self.paused = False
        """True in a bf16 phase (`schedule`): layers run as in evaluation."""
        self.region: Region | None = None
        self._updates_after, self._updates_forward = -1, False

    def __reduce__(self):
        return ModelState, (self.recipe,)

    def runs_in_fp8(self, training: bool) -> bool:
        """Return True if layers in this mode have FP8 products."""
        return (training or self.in_eval) and not self.paused

    def update_after_backward(self, forward: bool) -> None:
        """Take the amaxes of gradients, and of inputs too if `forward`, into the scales at the end
        of the running backward: for layers whose own backward does not, since TransformerEngine
        gave another layer that task."""
        task = torch._C._current_graph_task_id()
        self._updates_forward |= forward
        if self._updates_after != task:
            self._updates_after = task
            call_when_backward_ends(self._update)

    def _update(self) -> None:
        if self._updates_forward:
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=True)
        FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        self._updates_after, self._updates_forward = -1, False


class Region:
    """TransformerEngine's autocast with the recipe of one model, around a forward.

    A region that `records` is a training forward's: TransformerEngine takes its amaxes into the
    scales at the end of the outermost one. Raises `RecipeError` if it records delayed scales in a
    stage of a pipeline.
    """

    def __init__(self, state: ModelState, records: bool) -> None:
        delayed = records and state.te_recipe.delayed()
        if delayed and has_ranks() and distributed.get_world_size() > 1:
            names = (frame.f_globals.get("__name__") for frame, _ in traceback.walk_stack(None))
            if "torch.distributed.pipelining.stage" in names:
                raise RecipeError(DELAYED_PIPELINE)
        self.records = records
        self._autocast = autocast(state.te_recipe)

    def __enter__(self) -> Region:
        self._autocast.__enter__()
        return self

    def __exit__(self, *error) -> None:
        # TransformerEngine updates scales if gradients are on
        with contextlib.nullcontext() if self.records else torch.no_grad():
            self._autocast.__exit__(None, None, None)


class _Running(threading.local):
    """What runs in this thread: forwards of models, and the layer that multiplies."""

    forward: ProductCounts | None = None
    backward: ProductCounts | None = None
    due: frozenset[str] = frozenset()
    """The products to come of the backward's layer."""
    task: int = -1
    """The backward pass of `backward`, by autograd's number."""


_running = _Running()


class AroundRoot:
    """The forward of a prepared root, in FP8. Leaves FP8 after a KeyboardInterrupt, too, when
    PyTorch runs no hooks. A class, so that models pickle."""

    def __init__(self, root: nn.Module, state: ModelState) -> None:
        self.root, self.state = root, state
        self.__wrapped__ = root.forward

    @torch.compiler.disable(recursive=False)  # the forward inside is compiled
    def __call__(self, *args, **kwargs):
        region = self._new_region()
        if region is None:
            return self.__wrapped__(*args, **kwargs)
        with region:
            region.ensure_states()
            return self.__wrapped__(*args, **kwargs)

    @torch.compiler.disable
    def _new_region(self) -> RootRegion | None:
        """Return None if FP8 is on already, or each layer enters its own region."""
        root, state = self.root, self.state
        prepared = root.__dict__.get(PREPARED)
        if prepared is None or state not in prepared.shared.values():
            return None  # restored since, when other code had wrapped this forward
        if not state.runs_in_fp8(root.training):
            return None
        if state.region is not None or inside_backward():
            return None
        return RootRegion(state, root)


class RootRegion(Region):
    """The region of a root's forward, shared by its layers. Ends without new scales on an error."""

    def __init__(self, state: ModelState, root: nn.Module) -> None:
        super().__init__(state, records=root.training and torch.is_grad_enabled())
        self.state = state
        self.layers = [
            module for module in root.modules() if module.__dict__.get("te_state") is state
        ]

    @torch.compiler.disable
    def __enter__(self) -> Region:
        self.state.region = self
        return super().__enter__()

    @torch.compiler.disable
    def __exit__(self, *error) -> None:
        self.state.region = None
        self.records = self.records and error[0] is None
        if self.records:
            remember_scales(self.layers)
        super().__exit__()

    @torch.compiler.disable
    def ensure_states(self) -> None:
        """Create the states of all layers in one order, so that ranks reduce the same amaxes."""
        for layer in self.layers:
            layer.ensure_state()


@torch.no_grad()
def remember_scales(layers: list[nn.Module]) -> None:
    """Copy the scales of a training forward, for layers recomputed in backward."""
    layers = [layer for layer in layers if layer.te_used_scale is not None]
    if layers:
        torch._foreach_copy_(
            [layer.te_used_scale for layer in layers],
            [layer.delayed_state("forward").scale for layer in layers],
        )


_PLACES = (
    (te_linear_module, "general_gemm"),
    (te_grouped_linear_module, "general_grouped_gemm"),
)
"""The functions that multiply, where TransformerEngine's linear layers look them up."""
_KIND_OF_LAYOUT = {"TN": FPROP, "NN": DGRAD, "NT": WGRAD}


def _count_products() -> None:
    """Wrap the functions that multiply, once. Raises `FP8BackendError` if TransformerEngine has
    others."""
    if missing := [name for module, name in _PLACES if not hasattr(module, name)]:
        raise FP8BackendError(
            f"FP8 cannot be proven with TransformerEngine {VERSION}, whose linear layers do not "
            f"multiply by {missing[0]}: install another version of transformer_engine, or a newer "
            "fp8-backends"
        )
    for module, name in _PLACES:
        multiply = getattr(module, name)
        if not hasattr(multiply, "fp8_counted"):
            setattr(module, name, _counted(multiply))


def _counted(multiply: Callable) -> Callable:
    @functools.wraps(multiply)
    def count_and_multiply(a, b, *args, **kwargs):
        if _is_fp8(a) and _is_fp8(b):
            _count(_KIND_OF_LAYOUT[kwargs.get("layout", "TN")])
        return multiply(a, b, *args, **kwargs)

    count_and_multiply.fp8_counted = True
    return count_and_multiply


def _is_fp8(operand: Any) -> bool:
    """Return True for TransformerEngine's quantized tensor, or a list of them (grouped
    products)."""
    parts = operand if isinstance(operand, (list, tuple)) else [operand]
    return all(getattr(part, "_fp8_dtype", None) is not None for part in parts)


def _count(kind: str) -> None:
    if kind == FPROP and _running.forward is not None:
        _running.forward.add(RECOMPUTED if inside_backward() else FPROP)
    elif kind in _running.due and _running.task == torch._C._current_graph_task_id():
        _running.due -= {kind}
        _running.backward.add(kind)


def _begin_backward(counts: ProductCounts, gradients: Any) -> None:
    _running.backward, _running.due = counts, frozenset({DGRAD, WGRAD})
    _running.task = torch._C._current_graph_task_id()


class TELayer:
    """Mixed into a class of TransformerEngine: correct outside of an FP8 region, and recomputed by
    plain `torch.utils.checkpoint`, with the scales of its last training forward, which it leaves
    unchanged."""

    te_state: ModelState
    matrices = 1
    """The number of weight matrices, each with its own scales."""
    te_fast_accumulation = True

    # a checkpoint holds weight and bias; scales are in `Compute.scaling_state`
    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state

    def _apply(self, fn, recurse=True):
        with belongings_kept(self, fn):
            return super()._apply(fn, recurse)

    def _in_region(self, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        """Multiply the rows of x, in the region of the root's forward or in one for this layer."""
        refuse_cpu(x)
        state = self.te_state
        if inside_backward():
            return self._recomputed(x, *arguments)
        if state.region is not None:
            return self._first_time(x, arguments, state.region.records)
        with Region(state, records=self.training and torch.is_grad_enabled()) as region:
            y = self._first_time(x, arguments, region.records)
            if region.records:
                remember_scales([self])
            return y

    def _first_time(self, x: torch.Tensor, arguments: tuple, records: bool) -> torch.Tensor:
        self.ensure_state()
        self.te_recorded, self.te_had_gradients = records, torch.is_grad_enabled()
        with contextlib.nullcontext() if records else self._state_unchanged():
            return self._products(x, *arguments)

    def _recomputed(self, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        state = self.te_state
        unchanged = self._state_unchanged(self.te_used_scale if state.region is None else None)
        with (
            Region(state, records=False),
            unchanged if self.te_recorded else contextlib.nullcontext(),
        ):
            # the layer whose backward updates the scales was chosen in the first forward
            FP8GlobalStateManager.is_first_fp8_module()
            if (
                not self.te_had_gradients
                and torch.is_grad_enabled()
                and self.te_used_scale is not None
            ):
                state.update_after_backward(forward=not self.te_recorded)
            return self._products(x, *arguments)

    def _products(self, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        _running.forward = self.te_counts
        slowly = fast_accumulation_off(self.te_state.te_recipe)
        try:
            with contextlib.nullcontext() if self.te_fast_accumulation else slowly:
                y = self._multiply(x, *arguments)
        finally:
            _running.forward = None
        if y.grad_fn is not None:
            y.grad_fn.register_prehook(functools.partial(_begin_backward, self.te_counts))
        return y

    def _multiply(self, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        """Call TransformerEngine's own forward, inside a region."""
        raise NotImplementedError

    def ensure_state(self) -> None:
        """Create the layer's delayed scaling state inside a region, unless TransformerEngine has
        done so."""
        if "scaling_fwd" in self.fp8_meta or not self.te_state.te_recipe.delayed():
            return
        with torch.inference_mode(False):  # training could never write to an inference tensor
            self.init_fp8_metadata(num_gemms=self.matrices)
            FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(self.fp8_meta)
            if self.te_loaded is not None:
                self._copy_state(self.te_loaded)
                self.te_loaded = None
            self.te_used_scale = self.delayed_state("forward").scale.clone()

    def delayed_state(self, direction: str) -> Any:
        """Return TransformerEngine's recipe state, `scale` [n] and `amax_history` [L, n]; None
        before any forward."""
        return self.fp8_meta.get(DIRECTIONS[direction])

    @contextlib.contextmanager
    def _state_unchanged(self, scale: torch.Tensor | None = None) -> Iterator[None]:
        """Discard the amaxes recorded inside. Use `scale` as forward scales inside, if given."""
        if self.te_used_scale is None:
            yield
            return
        state = self.delayed_state("forward")
        with torch.no_grad():
            recorded, current = state.amax_history[0].clone(), state.scale.clone()
            if scale is not None:
                state.scale.copy_(scale)
        try:
            yield
        finally:
            with torch.no_grad():
                state.amax_history[0].copy_(recorded)
                state.scale.copy_(current)

    def scaling_state(self) -> dict[str, torch.Tensor]:
        """Copy scales [n] and amax histories [L, n], FP32: n is 3 forward (input, weight, output)
        and 2 backward (output's gradient, input's gradient), times the number of matrices. Empty
        for a rule without state."""
        if not self.te_state.te_recipe.delayed():
            return {}
        if self.te_loaded is not None:
            return {name: tensor.clone() for name, tensor in self.te_loaded.items()}
        state, length = {}, self.te_state.recipe.amax_history_len
        for direction, size in (("forward", 3 * self.matrices), ("backward", 2 * self.matrices)):
            live = self.delayed_state(direction)
            scale = (
                torch.ones(size, dtype=torch.float32, device="cpu")
                if live is None
                else live.scale.clone()
            )
            history = (
                torch.zeros(length, size, dtype=torch.float32, device="cpu")
                if live is None
                else live.amax_history.clone()
            )
            state |= {f"{direction}_scale": scale, f"{direction}_amax_history": history}
        return state

    def load_scaling_state(self, state: dict[str, torch.Tensor]) -> None:
        """Restore the result of `scaling_state`."""
        if state and "scaling_fwd" in self.fp8_meta:
            self._copy_state(state)
        elif state:
            self.te_loaded = {name: tensor.clone() for name, tensor in state.items()}

    @torch.no_grad()
    def _copy_state(self, state: dict[str, torch.Tensor]) -> None:
        for direction in DIRECTIONS:
            live = self.delayed_state(direction)
            live.scale.copy_(state[f"{direction}_scale"])
            live.amax_history.copy_(state[f"{direction}_amax_history"])

    def _fresh(self) -> dict[str, Any]:
        """Return a fresh layer's attributes: ours, and TransformerEngine's but for the
        constructor's arguments."""
        recipe = {"recipe": self.fp8_meta["recipe"]} if "recipe" in self.fp8_meta else {}
        return {
            # the forward scales of the last training forward; None for rules without state
            "te_used_scale": None,
            "te_recorded": True,  # the last forward's amaxes count
            "te_had_gradients": True,  # it ran with gradients
            "te_loaded": None,  # a scaling state to copy at the first forward
            "te_counts": ProductCounts(),
            "te_fsdp2": None,
            # the operand in place of a weight in scaled precision, until the optimizer's step
            "te_cast_weight": None,
            "te_copies": StateDictCopies(),  # plain copies of a frozen FP8 weight
            # added by TransformerEngine's forward otherwise
            "allow_different_data_and_param_types": False,
            "forwarded_at_least_once": False,
            "fp8_parameters": False,
            "debug_last_iteration": None,
            "debug_enabled_in_this_iteration": False,
            "_te_cached_parent_fsdp_state": None,
            "fp8_meta": {**recipe, "fp8_checkpoint": False, "fp8_group": None},
            "quantizers": {key: type(quantizers)() for key, quantizers in self.quantizers.items()},
            "param_init_meta": {},
            "_fp8_workspaces": {},
            "fp8_initialized": False,
            "fp8_meta_tensors_initialized": False,
        }

    def __getstate__(self) -> dict[str, Any]:
        # a copy gets its own scaling state, equal to this one; TransformerEngine registers each in
        # a global table
        return {**self.__dict__, **self._fresh(), "te_loaded": self.scaling_state() or None}

    @property
    def rule_in_words(self) -> str:
        """Describe the rule, such as `te:delayed i:E4M3,w:E4M3,go:E5M2`."""
        recipe, high = self.te_state.recipe, ",high:wgrad" if self.te_state.plain_wgrad else ""
        high += "" if self.te_fast_accumulation else ",fast accumulation off"
        gradient = "E5M2" if recipe.fp8_format == "HYBRID" else "E4M3"
        return f"te:{recipe.scaling} i:E4M3,w:E4M3,go:{gradient}{high}"
