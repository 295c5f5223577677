"""The guard of a recipe: it notices that FP8 training goes wrong, says where, and acts on it.

    backward     Accelerate's `backward` gives the loss, and the gradients before anybody clips them
    step         before each step of the optimizer the guard looks at losses, gradients and scaling states on the
                 device; the ranks add up what they saw in one small all-reduce, and so decide alike
    fault        is named once for each kind in the log, and kept; then the recipe's `guard` says what is done

Nothing of this is installed where the recipe says "off".
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ...announcement import is_main_process
from ...comm import replicas
from ...errors import FP8BackendError
from ...numerics import scaling_faults
from ...numerics.forwards import call_own, forward_obstacle, redirect
from ...numerics.modules import CONVERSION, plain_name
from ...words import counted, listed
from ..auditing import converted_layers, parameters_of, unwrapped
from ..conversion import prepared_roots
from ..observed import observed_of
from .looks import Look, ScalingLooks, on_its_way, spoiled
from .loss_window import LossWindow

if TYPE_CHECKING:
    from ...recipes.handlers import Recipe
    from .looks import Roots

logger = logging.getLogger("fp8_backends")

KEPT = 1000
"""Faults that a guard remembers; of more it keeps the latest."""
LOSS, GRADIENT, SPIKE, CLIPPED, STUCK = "loss", "gradient", "spike", "clipped", "stuck"
APART, ALONE = "apart", "alone"
"""Kinds of faults; `Fault` explains them."""

Save = Callable[[int], "str | None"]
"""Saves the training as it is before a step; returns where, or None where it has no place for it."""


class Fault(NamedTuple):
    """Something that went wrong at one step of an optimizer."""

    step: int
    """Of this optimizer in this process, from 1."""
    kind: str
    """`loss` or `gradient`: not finite. `spike`: a loss far above those before it. `clipped`: most values beyond what
    the scale has codes for. `stuck`: a scale that is no number, or a history that does not move on. `apart`: ranks that
    hold different values. `alone`: a step of this rank without a backward pass that all ranks shared."""
    where: tuple[str, ...]
    """Parameters, layers or tensors at fault, the likely origin first; empty where the fault has no place."""
    figures: str
    """What was seen."""
    done: str
    """What the guard did."""

    def __str__(self) -> str:
        place = f" in {self.where[0]}" if self.where else ""
        place += f" first, of {listed(self.where)}" if len(self.where) > 1 else ""
        return f"step {self.step}: {self.kind}{place}: {self.figures}; {self.done}"


def faults(optimizer: Any) -> list[Fault]:
    """What the guard of an optimizer has found so far, the latest 1000. Empty where the recipe's `guard` is "off".

    Args:
        optimizer: prepared, also one in Accelerate's wrapper.
    """
    guard = _guard_of(unwrapped(optimizer))
    return [] if guard is None else list(guard.found)


def watch(models: Iterable[nn.Module], optimizer: torch.optim.Optimizer, recipe: Recipe) -> None:
    """Install the guard that the recipe asks for. Repeating it adds models, and the latest recipe says what is done.

    Raises:
        FP8BackendError: this optimizer makes its steps where no guard sees them.
    """
    guard = _guard_of(optimizer)
    if guard is not None:
        guard.recipe = recipe
    if recipe.guard == "off":
        return
    if not hasattr(optimizer, "register_step_pre_hook") or hasattr(optimizer, "fused_backward"):
        raise FP8BackendError(
            f"guard={recipe.guard!r}: {type(optimizer).__name__} makes its steps where no hook precedes them; use an "
            'optimizer whose step follows backward, or guard="off"'
        )
    if guard is None:
        guard = Guard(recipe)
        optimizer.register_step_pre_hook(guard)
        optimizer.register_step_post_hook(guard.after_step)
    guard.add(models)


def after_backward(optimizers: Iterable[torch.optim.Optimizer], loss: Any, is_complete: bool, save: Save) -> None:
    """Tell the guards of these optimizers of a backward pass.

    Args:
        is_complete: whether a step may follow, so that gradients can be looked at before they are clipped.
    """
    guards = [(guard, each) for each in optimizers if (guard := _guard_of(each)) is not None]
    for guard, optimizer in guards:
        guard.shares_losses = len(guards) > 1
        guard.after_backward(optimizer, loss, is_complete, save)


def _guard_of(optimizer: torch.optim.Optimizer | None) -> Guard | None:
    hooks = getattr(optimizer, "_optimizer_step_pre_hooks", {}).values()
    return next((hook for hook in hooks if isinstance(hook, Guard)), None)


class Guard:
    """Step pre-hook of an optimizer: looks at the models that it trains before each of its steps."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.step = 0
        self.found: deque[Fault] = deque(maxlen=KEPT)
        self.shares_losses = False
        """Whether other optimizers are told of the same losses, so that one may be theirs alone."""
        self._models: list[weakref.ref[nn.Module]] = []
        self._save: Save = lambda step: None
        self._logged: set[str] = set()
        """Kinds of faults that the log has."""
        self._window, self._scaling = LossWindow(), ScalingLooks()
        self._losses: torch.Tensor | None = None
        """FP32 [3], since the last step: the sum of the finite losses, how many these are, how many are not finite."""
        self._after_backward: torch.Tensor | None = None
        """`spoiled` as the last backward left it."""
        self._backwards = 0
        """Backward passes that all ranks shared, up to the last step."""
        self._late: tuple[Look, torch.cuda.Event] | None = None
        """On a GPU, what was seen before the last step, on its way to the host."""
        self._held: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Parameters and their gradients, while a step is left out."""
        self._together = 0
        """Steps that all ranks made together: they compare their replicas at the same ones."""
        self._left_out = 0
        """Steps in a row that were left out."""
        self._high: dict[nn.Module, int] = {}
        """Layers in high precision, and the last step that they are."""
        # not a decorator, since importing the compiler takes a second
        self._before_step = torch.compiler.disable(self._before_step)

    def add(self, models: Iterable[nn.Module]) -> None:
        known = [reference() for reference in self._models]
        self._models += [weakref.ref(model) for model in models if not any(model is each for each in known)]
        for model in self._live_models():
            replicas.SharedBackwards.of(model)  # counts from the first backward on

    def _live_models(self) -> list[nn.Module]:
        """The models, each in the DDP in which it trains."""
        models = [model for reference in self._models if (model := reference()) is not None]
        return list({id(each): each for each in map(_wrapped, models)}.values())

    def _roots(self) -> Roots:
        found = {id(root): (root, prepared) for m in self._live_models() for _, root, prepared in prepared_roots(m)}
        return list(found.values())

    # What is seen

    @torch.no_grad()
    def after_backward(self, optimizer: torch.optim.Optimizer, loss: Any, is_complete: bool, save: Save) -> None:
        """Note a loss and, where a step may follow, which gradients are not finite. Waits for nothing."""
        self._save = save
        if isinstance(loss, torch.Tensor):
            mean = loss.detach().float().mean()
            finite = torch.isfinite(mean)
            noted = torch.stack([mean.where(finite, 0.0), finite.float(), 1 - finite.float()])
            self._losses = noted if self._losses is None else self._losses + noted
        self._after_backward = spoiled(parameters_of(optimizer)) if is_complete else None

    def __call__(self, optimizer: torch.optim.Optimizer, args, kwargs) -> None:
        self._before_step(optimizer)

    @torch.no_grad()
    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.step += 1
        self._end_high_precision()
        if self.recipe.guard == "off" or not self._roots():  # switched off, or all models were restored
            return
        groups = next(filter(None, map(replicas.rank_groups, self._live_models())), [])
        if groups and not self._shared_a_backward():
            self._act_alone(optimizer)
            return
        look: Look | None = self._look(optimizer, groups)
        if self.recipe.guard == "warn" and look.totals.is_cuda:
            look, self._late = self._look_before(), on_its_way(look)
        found = [] if look is None else self._faults_in(look, optimizer, groups)
        self._together += 1
        if groups and self._together % self.recipe.guard_every == 0:
            found += self._replicas_apart(groups)
        self._left_out = self._left_out if found else 0
        if found:
            self._act(found, look, optimizer)

    def _shared_a_backward(self) -> bool:
        """Whether a backward pass that all ranks shared came since the last step."""
        before = self._backwards
        self._backwards = sum(each.count for m in self._live_models() for each in replicas.SharedBackwards.of(m))
        return self._backwards > before

    def _look(self, optimizer: torch.optim.Optimizer, groups: list[dist.ProcessGroup]) -> Look:
        parameters = parameters_of(optimizer)
        # where a loss scaler has found an inf, a fused optimizer leaves its step out by itself
        scaler_looks = getattr(optimizer, "found_inf", None) is not None
        gradients = None if scaler_looks else spoiled(parameters)
        over, stuck = self._scaling.look(self._roots())
        clipped = None if over is None else scaling_faults.is_clipped(over)
        device = parameters[0].device
        counts = [
            torch.zeros((), dtype=torch.float32, device=device) if each is None else each.sum()
            for each in (gradients, clipped, stuck)
        ]
        losses = torch.zeros(3, dtype=torch.float32, device=device) if self._losses is None else self._losses.to(device)
        totals = torch.cat([losses, torch.stack([each.to(losses) for each in counts])])
        look = Look(self.step, replicas.sum_over(totals, groups), gradients, self._after_backward, over, stuck)
        self._losses = self._after_backward = None
        return look

    def _look_before(self) -> Look | None:
        """What was seen before the last step, whose totals are on the host by now."""
        if self._late is None:
            return None
        look, arrived = self._late
        arrived.synchronize()
        return look

    # What is wrong

    def _faults_in(self, look: Look, optimizer: torch.optim.Optimizer, groups: list[dist.ProcessGroup]) -> list[Fault]:
        """The faults of a step, without what was done. All ranks find the same."""
        loss, finite, not_finite, gradients, clipped, stuck = look.totals.tolist()
        found = []
        if not_finite and (gradients or not self.shares_losses):
            figures = f"{not_finite:.0f} of the {finite + not_finite:.0f} losses of this step are not finite"
            found.append(Fault(look.step, LOSS, (), figures, ""))
        if gradients:
            where = self._spoiled_parameters(look, parameters_of(optimizer), groups)
            figures = f"{counted(len(where), 'gradient')} not finite"
            found.append(Fault(look.step, GRADIENT, where, figures, ""))
        if finite and not not_finite and (spike := self._window.see(loss / finite)) is not None:
            figures = f"{spike.loss:.4g} after a median of {spike.median:.4g}; up to {spike.threshold:.4g} is usual"
            found.append(Fault(look.step, SPIKE, (), figures, ""))
        if clipped:
            over = look.overshoot.where(torch.isfinite(look.overshoot), 0.0)
            where = self._scaling.places(self._roots(), scaling_faults.is_clipped(over))
            figures = f"values up to {over.max().item():.3g} times the largest that the scale has a code for"
            found.append(Fault(look.step, CLIPPED, where, figures, ""))
        if stuck:
            where = self._scaling.places(self._roots(), look.stuck)
            figures = (
                "a scale or an amax in its history is no number, or the history does not move on (is the prepared "
                "model called as a whole?)"
            )
            found.append(Fault(look.step, STUCK, where, figures, ""))
        return found

    def _spoiled_parameters(
        self, look: Look, parameters: list[torch.Tensor], groups: list[dist.ProcessGroup]
    ) -> tuple[str, ...]:
        """Names of the parameters whose gradients are not finite. The model's last comes first: backward reaches it
        first, and what is not finite goes on to all that follows."""
        # clipping spreads a NaN to all gradients: what backward left tells more, unless it came later
        candidates = [each for each in (look.after_backward, look.gradients) if each is not None]
        spoiled_of = [replicas.sum_over(each.clone(), groups).nonzero().flatten().tolist() for each in candidates]
        at = {id(parameters[i]) for i in next(filter(None, spoiled_of), [])}
        named = [pair for model in self._live_models() for pair in model.named_parameters()]
        names = [plain_name(name).removeprefix("module.") for name, p in named if id(p) in at]
        return (*reversed(names), *["a parameter of no prepared model"] * (len(at) - len(names)))

    def _replicas_apart(self, groups: list[dist.ProcessGroup]) -> list[Fault]:
        states = self._scaling.named_states(self._roots())
        held = [each for model in self._live_models() for each in replicas.held_alike(model, states)]
        if not held:
            return []
        differing = replicas.apart(held)
        # of a hybrid mesh, each group of replicas has compared its own part
        count = held[0].tensor.new_full((), len(differing), dtype=torch.float32)
        if not replicas.sum_over(count, groups).item():
            return []
        ranks = sorted({rank for others in differing.values() for rank in others})
        figures = f"rank {', '.join(map(str, ranks))} holds other values than the first" if ranks else "on other ranks"
        return [Fault(self.step, APART, tuple(differing), figures, "")]

    # What is done

    def _act(self, found: list[Fault], look: Look | None, optimizer: torch.optim.Optimizer) -> None:
        """Do what the recipe says. Raises `FP8BackendError` where that is to stop."""
        action, kinds = self.recipe.guard, {fault.kind for fault in found}
        if action == "stop":
            self._stop(found, self._save(self.step) if APART not in kinds else None)
        if action == "warn" or kinds == {APART}:
            self._note(found, "nothing was done")
            return
        done = ["the step was left out"]
        self._leave_out(optimizer)
        if action == "rescale" or STUCK in kinds:  # a stuck state cannot heal by itself
            done.append(self._rescale(look, kinds))
        if action == "high_precision":
            done.append(self._run_in_high_precision(found))
        self._note(found, ", ".join(filter(None, done)))
        self._left_out += 1
        if self._left_out > self.recipe.guard_steps:
            raise FP8BackendError(
                f"guard: {self.found[-1]}. guard_steps={self.recipe.guard_steps} steps in a row were left out before "
                "it, so the fault stays: look at the data and the learning rate, or resume from an earlier checkpoint"
            )

    def _act_alone(self, optimizer: torch.optim.Optimizer) -> None:
        """Do what this rank can do by itself: the others may be waiting in a backward for its gradients."""
        if not self._backwards:
            return  # nothing was ever shared, such as where a first step only sets the optimizer up
        figures = f"rank {dist.get_rank()} ran no backward that the other ranks shared since its last step"
        fault = Fault(self.step, ALONE, (), figures, "")
        # where the ranks share the states out, a step waits for all of them, who will not come
        if self.recipe.guard == "stop" or getattr(optimizer, "fp8_owners", None) is not None:
            self._stop([fault], None)
        if self.recipe.guard != "warn":
            self._leave_out(optimizer)
        self._note([fault], "nothing was done" if self.recipe.guard == "warn" else "the step was left out", True)

    def _note(self, found: list[Fault], done: str, on_every_rank: bool = False) -> None:
        """Remember faults, and log the first of each kind."""
        for fault in (fault._replace(done=done) for fault in found):
            self.found.append(fault)
            if fault.kind not in self._logged and (on_every_rank or is_main_process()):
                logger.warning("guard: %s. Later ones of this kind are in fp8_backends.faults(optimizer)", fault)
            self._logged.add(fault.kind)

    def _stop(self, found: list[Fault], saved: str | None) -> None:
        """Raise `FP8BackendError` before the step changes anything."""
        stopped = [fault._replace(done="training was stopped before the step") for fault in found]
        self.found.extend(stopped)
        place = f" A checkpoint of before the step is in {saved}." if saved else ""
        raise FP8BackendError(
            f"guard: {'; '.join(map(str, stopped))}.{place} Fix: look at the data and the learning rate, and resume "
            'from the last good checkpoint; guard="skip" goes on without such a step'
        )

    def _leave_out(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the step find no gradient: PyTorch's optimizers then leave weights, states and counters as they are."""
        self._held = [(p, p.grad) for p in parameters_of(optimizer) if p.grad is not None]
        for p, _ in self._held:
            p.grad = None

    def after_step(self, optimizer: torch.optim.Optimizer, args, kwargs) -> None:
        """Step post-hook: gradients are there again after a step that was left out, as after any other."""
        held, self._held = self._held, []
        for p, gradient in held:
            p.grad = gradient

    def _rescale(self, look: Look, kinds: set[str]) -> str:
        """Make the scaling states at fault anew; where the loss or the gradients are at fault, take what this step
        recorded out of all."""
        if kinds & {CLIPPED, STUCK}:
            at_fault = scaling_faults.is_clipped(look.overshoot) | look.stuck
            return f"{counted(self._scaling.renew(self._roots(), at_fault), 'scaling state')} began anew"
        states = self._scaling.forget_step(self._roots())
        return f"its amaxes were taken out of {counted(states, 'scaling state')}" if states else ""

    def _run_in_high_precision(self, found: list[Fault]) -> str:
        """Let the layers at fault run as the layers that they were, or all where no layer is."""
        layers = [each for root, prepared in self._roots() for each in converted_layers(root, prepared).items()]
        at = {place.split(" (")[0] for fault in found if fault.kind in (CLIPPED, STUCK) for place in fault.where}
        # of several gradients that are not finite, only the first is known to have its origin in its layer
        at |= {fault.where[0].rpartition(".")[0] for fault in found if fault.kind == GRADIENT}
        chosen = [layer for name, layer in layers if name in at and not {LOSS, SPIKE} & {f.kind for f in found}]
        chosen = [layer for layer in chosen or (layer for _, layer in layers) if layer in self._high or _is_free(layer)]
        for layer in chosen:
            conversion = layer.__dict__[CONVERSION]
            redirect(layer, conversion.original.forward)
            if call_own not in conversion.undo:  # such as of a copy that is made meanwhile
                conversion.undo.append(call_own)
            self._high[layer] = self.step + self.recipe.guard_steps
        return f"high precision for {counted(self.recipe.guard_steps, 'step')} in {counted(len(chosen), 'layer')}"

    def _end_high_precision(self) -> None:
        for layer in [layer for layer, last in self._high.items() if self.step >= last]:
            del self._high[layer]
            call_own(layer)


def _wrapped(model: nn.Module) -> nn.Module:
    wrappers = [observed_of(prepared).wrapper for _, _, prepared in prepared_roots(model)]
    return next((wrapper() or model for wrapper in wrappers if wrapper is not None), model)


def _is_free(layer: nn.Module) -> bool:
    """Whether a layer can run as what it was: nothing else runs in its place, and it is no expert, which was none."""
    conversion = layer.__dict__[CONVERSION]
    return conversion.original is not type(layer) and forward_obstacle(layer) is None
