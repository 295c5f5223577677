"""What the first optimizer step showed of a prepared model, for the proof and for later audits."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..numerics.engine import inside_backward
from ..numerics.modules import plain_name
from .weight_products import find_weight_products
from .work import Work, WorkMeter

if TYPE_CHECKING:
    from .conversion import Prepared


class Observed:
    """The record of one prepared model."""

    def __init__(self) -> None:
        self.proven = False
        self.gradient_dtypes: dict[str, torch.dtype] = {}
        self.lost_updates: float | None = None
        self.work: dict[str, Work] = {}
        """How much the first step multiplied by each weight; nothing of what was compiled."""
        self.left_out: set[str] | None = None
        """Trainable parameters that no optimizer holds, as the user knows; None until an optimizer is prepared."""
        self.idle: set[str] = set()
        """Weights that took no part in it, by the names of their modules and by their own: they train and got no
        gradient, or PEFT trains a copy in their place (`modules_to_save`)."""
        self.meter: WorkMeter | None = None
        """What measures that, from the first training forward on."""
        self.first_steps: list[Any] = []
        """What watches this model for its proof (`proof.FirstStep`)."""
        self.wrapper: weakref.ref[nn.Module] | None = None
        """The `DistributedDataParallel` in which it trains, of which Accelerate tells nobody."""
        self._optimizers: list[weakref.ref] = []

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those still alive that train this model."""
        return [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizers.append(weakref.ref(optimizer))

    def measure(self, root: nn.Module) -> None:
        """Measure the forward of the model that begins now, if it is one of training before the proof."""
        trains = torch.is_grad_enabled()
        if self.meter is None and trains and not self.proven and not inside_backward():
            self.meter = WorkMeter(root, find_weight_products(root))
        if self.meter is not None:
            self.meter.paused = not trains

    def prove(self, root: nn.Module) -> None:
        """End what was measured for the proof."""
        self.proven = True
        if self.meter is not None:
            self.meter.detach()
            self.work, self.meter = self.meter.work, None
        trains = trainable_by_name(root)
        got_gradients = _under_module(dict.fromkeys(self.gradient_dtypes, True))
        if got_gradients:  # else an engine keeps them to itself
            self.idle = {
                name
                for name in trains.keys() - self.work.keys() - got_gradients.keys()
                if trains[name] or "original_module" in name.split(".")
            }

    def __getstate__(self) -> dict[str, Any]:
        # a copy of the model is not what these optimizers train, and weak references do not pickle
        none_yet = {"_optimizers": [], "first_steps": [], "meter": None, "proven": False, "left_out": None}
        return {**self.__dict__, **none_yet, "wrapper": None}


def observed_of(prepared: Prepared) -> Observed:
    """The record of a prepared model; made when first asked for."""
    if prepared.observed is None:
        prepared.observed = Observed()
    return prepared.observed


def trainable_by_name(root: nn.Module) -> dict[str, bool]:
    """Whether a weight trains, under the name of its module and under its own."""
    named = root.named_parameters(remove_duplicate=False)
    return _under_module({plain_name(name): parameter.requires_grad for name, parameter in named})


def _under_module(by_name: dict[str, bool]) -> dict[str, bool]:
    """What is known of Parameters by their names, under the names of the modules too whose `weight` they are."""
    weights = {name: value for name, value in by_name.items() if name.split(".")[-1] == "weight"}
    return by_name | {name.removesuffix("weight").removesuffix("."): value for name, value in weights.items()}
