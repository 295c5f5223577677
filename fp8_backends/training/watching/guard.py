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
from torch.nn.modules.batchnorm import _NormBase

from ...announcement import is_main_process
from ...comm import replicas
from ...errors import FP8BackendError
from ...numerics import scaling
from ...numerics.modules import plain_name
from ...words import counted, listed
from ..auditing import parameters_of, steps_of, unwrapped
from ..conversion import prepared_roots
from .looks import Look, LossWindow, ScalingLooks, largest_of, on_its_way, spoiled

if TYPE_CHECKING:
    from ...recipes.handlers import Recipe
    from .looks import Roots

logger = logging.getLogger("fp8_backends")

KEPT = 1000
"""Faults that a guard remembers; of more it keeps the latest."""
LOSS, GRADIENT, PARAMETER, SPIKE = "loss", "gradient", "parameter", "spike"
CLIPPED, STUCK, APART, ALONE = "clipped", "stuck", "apart", "alone"
"""Kinds of faults; `Fault` explains them."""
OF_STATE = ", its optimizer state"

COMPARED_EVERY = 100
"""Steps from one comparison of the replicas of all ranks to the next."""
LEFT_OUT_AT_MOST = 50
"""Steps that guard=skip leaves out in a row before it stops the training."""

Save = Callable[[int], "str | None"]
"""Saves the training as it is before a step; returns where, or None where it has no place for it."""


class Fault(NamedTuple):
    """Something that went wrong at one step of an optimizer."""

    step: int
    """The steps that the optimizer's states have seen, those left out in this process, and this one."""
    kind: str
    """`loss` or `gradient`: not finite. `parameter`: one of them, a buffer or an optimizer state holds an inf or a NaN,
    which explains a loss or gradients that are not finite. `spike`: a loss far above those before it. `clipped`: most
    values beyond what the scale has codes for. `stuck`: a scale that is no number, or a history that does not move on.
    `apart`: ranks that hold different values. `alone`: a step of this rank without a backward pass that all shared."""
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
    guard = guard_of(unwrapped(optimizer))
    return [] if guard is None else list(guard.found)


def watch(models: Iterable[nn.Module], optimizer: torch.optim.Optimizer, recipe: Recipe) -> None:
    """Install the guard that the recipe asks for. Repeating it adds models, and the latest recipe says what is done.

    Raises:
        FP8BackendError: this optimizer makes its steps where no guard sees them.
    """
    guard = guard_of(optimizer)
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
    guards = [(guard, each) for each in optimizers if (guard := guard_of(each)) is not None]
    for guard, optimizer in guards:
        guard.shares_losses = len(guards) > 1
        guard.after_backward(optimizer, loss, is_complete, save)


def guard_of(optimizer: torch.optim.Optimizer | None) -> Guard | None:
    """The guard of an optimizer, if it has one."""
    hooks = getattr(optimizer, "_optimizer_step_pre_hooks", {}).values()
    return next((hook for hook in hooks if isinstance(hook, Guard)), None)


class Guard:
    """Step pre-hook of an optimizer: looks at the models that it trains before each of its steps."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.step = 0
        """Calls of `optimizer.step` in this process."""
        self.skipped = 0
        """How many of them left the step out."""
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
        self._was_not_finite = False
        """Whether the last look showed a loss or gradients that are not finite."""
        self._statistics: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Running statistics of norm layers, and their values before this step's forwards."""
        # not a decorator, since importing the compiler takes a second
        self._before_step = torch.compiler.disable(self._before_step)

    def add(self, models: Iterable[nn.Module]) -> None:
        known = [reference() for reference in self._models]
        self._models += [weakref.ref(model) for model in models if not any(model is each for each in known)]
        for model in self._live_models():
            replicas.SharedBackwards.of(model)  # counts from the first backward on
        self._keep_statistics()

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
        if self.recipe.guard == "off" or not self._roots():  # switched off, or all models were restored
            return
        groups = next(filter(None, map(replicas.rank_groups, self._live_models())), [])
        if groups and not self._shared_a_backward():
            self._act_alone(optimizer)
            return
        look: Look | None = self._look(optimizer, groups)
        if self.recipe.guard == "warn" and look.totals.is_cuda:
            late, self._late, look = self._late, on_its_way(look), None
            if late is not None:  # what was seen before the last step, whose totals are on the host by now
                look, arrived = late
                arrived.synchronize()
        found = [] if look is None else self._faults_in(look, optimizer, groups)
        self._together += 1
        if groups and self._together % COMPARED_EVERY == 0:
            found += self._replicas_apart(groups)
        self._left_out = self._left_out if found else 0
        if found:
            self._act(found, look, optimizer)
        else:
            self._keep_statistics()

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
        clipped = None if over is None else scaling.is_clipped(over)
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

    # What is wrong

    def _faults_in(self, look: Look, optimizer: torch.optim.Optimizer, groups: list[dist.ProcessGroup]) -> list[Fault]:
        """The faults of a step, without what was done. All ranks find the same."""
        loss, finite, not_finite, gradients, clipped, stuck = look.totals.tolist()
        found: list[Fault] = []
        is_lost = bool(not_finite and (gradients or not self.shares_losses))
        broken = ()
        # a step that was made meanwhile, on a GPU that "warn" does not wait for, has spread what was not finite
        if (is_lost or gradients) and (look.step == self.step or self._was_not_finite):
            self._restore_statistics()
            broken = self._broken(optimizer, groups)
        self._was_not_finite = bool(is_lost or gradients)
        if is_lost:
            figures = f"{not_finite:.0f} of the {finite + not_finite:.0f} losses of this step are not finite"
            found.append(Fault(look.step, LOSS, (), figures, ""))
        if broken:
            figures = f"an inf or a NaN in {counted(len(broken), 'tensor')}"
            found.append(Fault(look.step, PARAMETER, broken, figures, ""))
        elif gradients:
            where = self._spoiled_parameters(look, parameters_of(optimizer), groups)
            figures = f"{counted(len(where), 'gradient')} not finite"
            found.append(Fault(look.step, GRADIENT, where, figures, ""))
        if finite and not not_finite and (spike := self._window.see(loss / finite)) is not None:
            figures = f"{spike.loss:.4g} after a median of {spike.median:.4g}; up to {spike.threshold:.4g} is usual"
            found.append(Fault(look.step, SPIKE, (), figures, ""))
        if clipped:
            over = look.overshoot.where(torch.isfinite(look.overshoot), 0.0)
            where = self._scaling.places(self._roots(), scaling.is_clipped(over))
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

    def _broken(self, optimizer: torch.optim.Optimizer, groups: list[dist.ProcessGroup]) -> tuple[str, ...]:
        """Names of the parameters, buffers and optimizer states that hold an inf or a NaN on any rank, in the order of
        the model. A buffer or a frozen parameter may hold an inf, as masks do."""
        trained = {id(p): p for p in parameters_of(optimizer)}
        held: list[tuple[str, list[torch.Tensor], bool]] = []
        for model in self._live_models():
            for full_name, tensor in (*model.named_parameters(), *model.named_buffers()):
                name, trains = plain_name(full_name).removeprefix("module."), trained.pop(id(tensor), None) is not None
                held.append((name, [tensor], trains))
                if trains:
                    held.append((name + OF_STATE, _states_of(optimizer, tensor), True))
        for tensor in trained.values():
            held.append(("a parameter of no prepared model", [tensor, *_states_of(optimizer, tensor)], True))
        largest = largest_of([tensors for _, tensors, _ in held], parameters_of(optimizer)[0].device)
        trains = torch.tensor([trains for *_, trains in held], device=largest.device)
        at = replicas.sum_over((torch.isnan(largest) | trains & torch.isinf(largest)).float(), groups)
        names = [held[i][0] for i in at.nonzero().flatten().tolist()]
        return tuple(name for name in names if name.removesuffix(OF_STATE) not in names[: names.index(name)])

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
        found = self._numbered(found, optimizer)
        # a parameter does not heal, whatever is left out, and such a training is not worth a checkpoint
        if action == "stop" or (action == "skip" and PARAMETER in kinds):
            self._stop(found, None if kinds & {APART, PARAMETER} else self._save(found[0].step))
        if action == "warn" or kinds == {APART}:
            self._note(found, "nothing was done")
            return
        done = "the step was left out"
        self._leave_out(optimizer)
        if STUCK in kinds:  # nor does a stuck state
            done += f", {counted(self._scaling.renew(self._roots(), look.stuck), 'scaling state')} began anew"
        self._note(found, done)
        self._left_out += 1
        if self._left_out > LEFT_OUT_AT_MOST:
            raise FP8BackendError(
                f"guard: {self.found[-1]}. {LEFT_OUT_AT_MOST} steps in a row were left out before "
                "it, so the fault stays: look at the data and the learning rate, or resume from an earlier checkpoint"
            )

    def _act_alone(self, optimizer: torch.optim.Optimizer) -> None:
        """Do what this rank can do by itself: the others may be waiting in a backward for its gradients."""
        if not self._backwards:
            return  # nothing was ever shared, such as where a first step only sets the optimizer up
        figures = f"rank {dist.get_rank()} ran no backward that the other ranks shared since its last step"
        (fault,) = self._numbered([Fault(self.step, ALONE, (), figures, "")], optimizer)
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
                logger.warning(
                    "guard: %s. Later ones of this kind are in fp8_backends.training.watching.guard.faults(optimizer)",
                    fault,
                )
            self._logged.add(fault.kind)

    def _stop(self, found: list[Fault], saved: str | None) -> None:
        """Raise `FP8BackendError` before the step changes anything."""
        stopped = [fault._replace(done="training was stopped before the step") for fault in found]
        self.found.extend(stopped)
        place = f" A checkpoint of before the step is in {saved}." if saved else ""
        other = 'guard="skip" goes on without such a step'
        if broken := next((fault.where for fault in found if fault.kind == PARAMETER), None):
            other = f"leaving steps out does not heal {listed(broken)}"
        raise FP8BackendError(
            f"guard: {'; '.join(map(str, stopped))}.{place} Fix: look at the data and the learning rate, and resume "
            f"from the last good checkpoint; {other}"
        )

    def _numbered(self, found: list[Fault], optimizer: torch.optim.Optimizer) -> list[Fault]:
        """The faults by the steps of the optimizer's states, which may have been loaded. Waits for the device."""
        made = self.step - 1 - self.skipped
        known = steps_of(optimizer)
        return [fault._replace(step=fault.step + (0 if known is None else known - made)) for fault in found]

    def _leave_out(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the step find no gradient: PyTorch's optimizers then leave weights, states and counters as they are."""
        self.skipped += 1
        self._restore_statistics()
        self._held = [(p, p.grad) for p in parameters_of(optimizer) if p.grad is not None]
        for p, _ in self._held:
            p.grad = None

    def after_step(self, optimizer: torch.optim.Optimizer, args, kwargs) -> None:
        """Step post-hook: gradients are there again after a step that was left out, as after any other."""
        held, self._held = self._held, []
        for p, gradient in held:
            p.grad = gradient

    def _keep_statistics(self) -> None:
        """Keep the running statistics of norm layers: forward changes them before the guard can judge it."""
        models = self._live_models() if self.recipe.guard in ("skip", "stop") else []
        norms = [module for model in models for module in model.modules() if isinstance(module, _NormBase)]
        self._statistics = [(each, each.clone()) for norm in norms for each in norm.buffers(recurse=False)]

    def _restore_statistics(self) -> None:
        for buffer, kept in self._statistics:
            buffer.copy_(kept)


def _states_of(optimizer: torch.optim.Optimizer, p: torch.Tensor) -> list[torch.Tensor]:
    return [value for value in optimizer.state.get(p, {}).values() if isinstance(value, torch.Tensor)]


def _wrapped(model: nn.Module) -> nn.Module:
    wrappers = [prepared.observed.wrapper for _, _, prepared in prepared_roots(model)]
    return next((wrapper() or model for wrapper in wrappers if wrapper is not None), model)
