"""What all layers of `te` have in common, whatever they multiply: when they are in FP8, with which scales, and what
becomes of the scales.

Imports TransformerEngine, so it is imported only when a layer is converted or unpickled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ...numerics.engine import inside_backward
from .recipes import FP8GlobalStateManager
from .region import ModelState, Region, remember_scales

DIRECTIONS = {"forward": "scaling_fwd", "backward": "scaling_bwd"}
"""Our names of the two halves of a delayed scaling state, and TransformerEngine's."""


class TELayer:
    """Mixed into a class of TransformerEngine: correct outside of an FP8 region, and recomputed by plain
    `torch.utils.checkpoint`.

    A recomputed layer uses the scales of its last training forward, and changes none.
    """

    te_state: ModelState
    matrices = 1
    """How many weight matrices the layer has, each with scales of its own."""

    # a checkpoint holds weight and bias; scales are in `Compute.scaling_state`
    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state

    # forward

    def _in_region(self, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        """The products of the rows of x, in the region of the root's forward, or in one of its own.

        Args:
            arguments: those of `_multiply`, after x.
        """
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
        """The products of a recomputed forward, inside backward."""
        state = self.te_state
        unchanged = self._state_unchanged(self.te_used_scale if state.region is None else None)
        with Region(state, records=False), unchanged if self.te_recorded else contextlib.nullcontext():
            # the layer whose backward updates the scales was chosen in the first forward
            FP8GlobalStateManager.is_first_fp8_module()
            if not self.te_had_gradients and torch.is_grad_enabled() and self.te_used_scale is not None:
                state.update_after_backward(forward=not self.te_recorded)
            return self._products(x, *arguments)

    def _products(self, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        watchers = self.te_state.watchers
        for watcher in watchers:
            watcher.enter(self)
        try:
            y = self._multiply(x, *arguments)
        finally:
            for watcher in watchers:
                watcher.leave()
        for watcher in watchers:
            watcher.follow(self, y)
        return y

    def _multiply(self, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        """The output of TransformerEngine's own class, inside a region."""
        raise NotImplementedError

    # scaling state

    def ensure_state(self) -> None:
        """Make the layer's scaling state, inside a region, where TransformerEngine has not made it yet."""
        if "scaling_fwd" in self.fp8_meta or not self.te_state.te_recipe.delayed():
            return
        with torch.inference_mode(False):  # else training could never write to it
            self.init_fp8_metadata(num_gemms=self.matrices)
            FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(self.fp8_meta)
            if self.te_loaded is not None:
                self._copy_state(self.te_loaded)
                self.te_loaded = None
            self.te_used_scale = self.delayed_state("forward").scale.clone()

    def delayed_state(self, direction: str) -> Any:
        """TransformerEngine's recipe state of `forward` or `backward`, with `scale` [n] and `amax_history` [L, n]; None
        before the first forward."""
        return self.fp8_meta.get(DIRECTIONS[direction])

    @contextlib.contextmanager
    def _state_unchanged(self, scale: torch.Tensor | None = None) -> Iterator[None]:
        """Forget amaxes that are recorded inside. The forward scales are `scale` inside, if given."""
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
        """Copies of scales [n] and amax histories [L, n], FP32: n is 3 forward (input, weight, output) and 2 backward
        (output's gradient, input's gradient), times the number of matrices. Empty for a rule without state."""
        if not self.te_state.te_recipe.delayed():
            return {}
        if self.te_loaded is not None:
            return {name: tensor.clone() for name, tensor in self.te_loaded.items()}
        state, length = {}, self.te_state.recipe.amax_history_len
        for direction, size in (("forward", 3 * self.matrices), ("backward", 2 * self.matrices)):
            live = self.delayed_state(direction)
            scale = torch.ones(size, dtype=torch.float32) if live is None else live.scale.clone()
            history = torch.zeros(length, size, dtype=torch.float32) if live is None else live.amax_history.clone()
            state |= {f"{direction}_scale": scale, f"{direction}_amax_history": history}
        return state

    def load_scaling_state(self, state: dict[str, torch.Tensor]) -> None:
        """Take what `scaling_state` returned."""
        if not state:
            return
        if "scaling_fwd" in self.fp8_meta:
            self._copy_state(state)
        else:
            self.te_loaded = {name: tensor.clone() for name, tensor in state.items()}

    @torch.no_grad()
    def _copy_state(self, state: dict[str, torch.Tensor]) -> None:
        for direction in DIRECTIONS:
            live = self.delayed_state(direction)
            live.scale.copy_(state[f"{direction}_scale"])
            live.amax_history.copy_(state[f"{direction}_amax_history"])

    # copies

    def _fresh_meta(self) -> dict[str, Any]:
        """TransformerEngine's own part of a layer that has not run, but for what its constructor was given."""
        recipe = {"recipe": self.fp8_meta["recipe"]} if "recipe" in self.fp8_meta else {}
        return {
            "fp8_meta": {**recipe, "fp8_checkpoint": False, "fp8_group": None},
            "quantizers": {key: type(quantizers)() for key, quantizers in self.quantizers.items()},
            "param_init_meta": {},
            "_fp8_workspaces": {},
            "fp8_initialized": False,
            "fp8_meta_tensors_initialized": False,
        }

    def __getstate__(self) -> dict[str, Any]:
        # a copy has a scaling state of its own, equal to this one; TransformerEngine registers each in a global table
        state = {**self.__dict__, **RUNTIME, **self._fresh_meta()}
        state["te_loaded"] = self.scaling_state() or None
        return state

    @property
    def rule_in_words(self) -> str:
        """Such as `te:delayed i:E4M3,w:E4M3,go:E5M2`."""
        recipe, high = self.te_state.recipe, ",high:wgrad" if self.te_state.plain_wgrad else ""
        gradient = "E5M2" if recipe.fp8_format == "HYBRID" else "E4M3"
        return f"te:{recipe.scaling} i:E4M3,w:E4M3,go:{gradient}{high}"


RUNTIME: dict[str, Any] = {
    "te_used_scale": None,  # the forward scales of the last training forward; None for rules without state
    "te_recorded": True,  # whether the last forward's amaxes count
    "te_had_gradients": True,  # whether it ran with gradients
    "te_loaded": None,  # a scaling state that waits for the first forward
    "te_fsdp2": None,
    "te_cast_weight": None,  # what is multiplied for a weight in scaled precision, until the optimizer's step
    # what TransformerEngine's forward would add to the layer
    "allow_different_data_and_param_types": False,
    "forwarded_at_least_once": False,
    "fp8_parameters": False,
    "debug_last_iteration": None,
    "debug_enabled_in_this_iteration": False,
    "_te_cached_parent_fsdp_state": None,
}
