"""TransformerEngine's autocast, entered around the forward of a prepared root, or of one layer.

TransformerEngine's state is one for the process. A region belongs to one model, and leaves that state as it found it.

Imports TransformerEngine, so it is imported only when a layer is converted or unpickled.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import distributed, nn
from torch.autograd import Variable

from ...errors import RecipeError, Refusal
from ...numerics.engine import inside_backward
from ..interface import Recipe
from .recipes import FP8GlobalStateManager, autocast, recipe_object, rows_multiple

DELAYED_PIPELINE = Refusal(
    "delayed scales of te do not go with a pipeline: after each forward TransformerEngine takes the largest amaxes of "
    "all ranks, and ranks with other stages would never come to that",
    "use te:dynamic, whose scales need no agreement, or native:delayed",
)


class ModelState:
    """What the layers of one prepared model share: its recipe, the region of FP8 that is open now, if any, and the
    profiles that count its products now."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.te_recipe = recipe_object(recipe)
        self.in_eval = bool(recipe.use_autocast_during_eval)
        self.plain_wgrad = bool(recipe.override_linear_precision[2])
        self.rows_multiple = rows_multiple(recipe.scaling)
        self.region: Region | None = None
        self.watchers: list[Any] = []
        self._updates_after, self._updates_forward = -1, False

    def __deepcopy__(self, memo: dict) -> ModelState:
        return ModelState(self.recipe)

    def __reduce__(self):
        return ModelState, (self.recipe,)

    def update_after_backward(self, forward: bool) -> None:
        """Take the amaxes of gradients, and of inputs too if `forward`, into the scales when the backward that runs now
        has ended: for layers whose own backward TransformerEngine has not told to do so."""
        task = torch._C._current_graph_task_id()
        self._updates_forward |= forward
        if self._updates_after != task:
            self._updates_after = task
            Variable._execution_engine.queue_callback(self._update)

    def _update(self) -> None:
        if self._updates_forward:
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=True)
        FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        self._updates_after, self._updates_forward = -1, False


class Region:
    """TransformerEngine's autocast with the recipe of one model, around a forward.

    Args:
        records: whether it is a training forward, whose amaxes count: TransformerEngine takes them into the scales
            when the outermost region ends. After any other, scales and amaxes are as before.

    Raises:
        RecipeError: it records delayed scales in a stage of a pipeline.
    """

    def __init__(self, state: ModelState, records: bool) -> None:
        if records and _takes_amaxes_of_all_ranks(state) and _inside_pipeline():
            raise RecipeError(DELAYED_PIPELINE)
        self.records = records
        self._autocast = autocast(state.te_recipe)

    def __enter__(self) -> Region:
        self._autocast.__enter__()
        return self

    def __exit__(self, *error) -> None:
        # TransformerEngine updates where gradients are on
        with contextlib.nullcontext() if self.records else torch.no_grad():
            self._autocast.__exit__(None, None, None)


class Opened(NamedTuple):
    """A forward of a prepared root that runs now."""

    state: ModelState
    region: Region | None
    """None: FP8 was on already, or each layer enters by itself."""
    call: FrameType | None
    """The module call whose forward it is."""


class _Thread(threading.local):
    """The forwards of all models that run in this thread, the innermost last, as TransformerEngine's autocasts lie."""

    def __init__(self) -> None:
        self.opened: list[Opened] = []


_thread = _Thread()


class AroundRoot:
    """Forward hooks of the prepared root (a class, so that models pickle): FP8 is entered before its forward and left
    after it, also by an error."""

    def __init__(self, state: ModelState) -> None:
        self.state = state

    def before(self, root: nn.Module, args) -> None:
        if root.training or self.state.in_eval:
            self._enter(root)

    def after(self, root: nn.Module, args, output) -> None:
        if root.training or self.state.in_eval or self.state.region is not None:
            self._leave(root)

    @torch.compiler.disable
    def _enter(self, root: nn.Module) -> None:
        calls = _running_calls()
        _leave_interrupted(calls)
        region = None
        if self.state.region is None and not inside_backward():  # else every layer enters by itself
            region = Region(self.state, records=root.training and torch.is_grad_enabled()).__enter__()
            self.state.region = region
        _thread.opened.append(Opened(self.state, region, calls[0]))
        if region is not None and self.state.te_recipe.delayed():
            for layer in _layers(root, self.state):
                layer.ensure_state()  # all of them and in one order, so that ranks reduce the same amaxes

    @torch.compiler.disable
    def _leave(self, root: nn.Module) -> None:
        last = _thread.opened[-1] if _thread.opened else None
        if last is None or last.state is not self.state or last.call not in _running_calls():
            return  # this forward did not enter, or an earlier one was interrupted
        _thread.opened.pop()
        if last.region is not None:
            self.state.region = None
            if last.region.records:
                remember_scales(_layers(root, self.state))
            last.region.__exit__()


def _leave_interrupted(calls: list[FrameType | None]) -> None:
    """Leave what a KeyboardInterrupt left open in earlier forwards: hooks do not run then."""
    while _thread.opened and _thread.opened[-1].call not in calls:
        interrupted = _thread.opened.pop()
        if interrupted.region is not None:
            interrupted.state.region = None
            interrupted.region.records = False
            interrupted.region.__exit__()


def _takes_amaxes_of_all_ranks(state: ModelState) -> bool:
    if not state.te_recipe.delayed():
        return False
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _inside_pipeline() -> bool:
    """Whether a stage of `torch.distributed.pipelining` makes this forward."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") != "torch.distributed.pipelining.stage":
        frame = frame.f_back
    return frame is not None


def _running_calls() -> list[FrameType | None]:
    """Module calls that run in this thread, the innermost first. None stands for compiled ones, which are not seen."""
    calls: list[FrameType | None] = []
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__:
            calls.append(frame)
        frame = frame.f_back
    return [*calls, None]


def _layers(root: nn.Module, state: ModelState) -> list[nn.Linear]:
    return [module for module in root.modules() if module.__dict__.get("te_state") is state]


@torch.no_grad()
def remember_scales(layers: list[nn.Linear]) -> None:
    """Copy the scales that a training forward has used, for layers that are recomputed in backward."""
    layers = [layer for layer in layers if layer.te_used_scale is not None]
    if layers:
        torch._foreach_copy_(
            [layer.te_used_scale for layer in layers], [layer.delayed_state("forward").scale for layer in layers]
        )
