"""Guard a training: detect faults before each optimizer step, name their origin, and act as the
recipe's `guard` says.

    backward     note the loss and the non-finite gradients, before anybody clips them
    step         count faults in losses, gradients and scaling states on the device; sum the counts over the ranks in
                 one small all-reduce, so that all ranks decide alike
    fault        log each kind once, remember it, and warn, skip the step or stop

guard="off" installs nothing.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ..announcement import is_main_process, logger
from ..comm import replicas
from ..convert.conversion import Prepared, prepared_roots
from ..errors import FP8BackendError
from ..formats import scaling
from ..formats.formats import RECIPE_FORMATS
from ..formats.scaling import HISTORY, INPUT, ROLLS
from ..recipes.handlers import Recipe
from ..states.gradient_release import is_dropped
from ..tensors.scaled_tensor import stored_parts
from ..tensors.sharded_tensor import local_part
from ..torch_tools.modules import is_traced, plain_name
from ..torch_tools.optimizers import has_closure, parameters_of, steps_of, unwrapped
from ..words import counted, listed

LOSS, GRADIENT, PARAMETER = "loss", "gradient", "parameter"
CLIPPED, STUCK, APART, ALONE, POLICY = "clipped", "stuck", "apart", "alone", "policy_gap"
"""Kinds of faults; `Fault` explains them."""
OF_STATE = ", its optimizer state"
FOREIGN = "a parameter of no prepared model"
OPERANDS = ("input", "weight", "output's gradient")
"""Names of the rows of a scaling state."""

CLIPS_SOUGHT_EVERY = 16
"""Optimizer steps between two looks of `ClippingWatch`."""
RECENT, OFTEN = 64, 8
"""Amaxes in a look; number of those over twice the range of the scale made of the one before, for a
warning."""
_INPUT_AMAXES = {
    "fp8_scaling": lambda state: state.view(torch.float32)[..., INPUT, HISTORY:],
    "te_forward_amax_history": lambda history: history.t()[::3],
}
"""Name of a delayed state -> its amaxes of inputs, FP32 [..., history length], the next one first,
then by age."""

REMEMBERED = 1000
COMPARED_EVERY = 100
"""Steps between two comparisons of the ranks' replicas."""
LEFT_OUT_AT_MOST = 50
"""Steps in a row skipped by guard=skip before it stops the training."""
STUCK_AFTER = 16
"""Optimizer steps after which a history that records and does not roll counts as stuck."""

Roots = list[tuple[nn.Module, Prepared]]


class Fault(NamedTuple):
    """A fault at one optimizer step."""

    step: int
    """Steps counted by the optimizer's states, plus the steps skipped in this process, plus this
    one."""
    kind: str
    """`loss` or `gradient`: not finite. `parameter`: an inf or a NaN in a parameter, buffer or
    optimizer state, the cause of a non-finite loss or gradient. `clipped`: most values exceed the
    range of their scale. `stuck`: an invalid scale, or a history that does not move on. `apart`:
    ranks with different values. `alone`: a step of this rank without a backward pass shared by all.
    `policy_gap`: a rollout's policy is further from the trained one than the bound of
    `fp8_backends.trl`."""
    where: tuple[str, ...]
    """Parameters, layers or tensors at fault, the likely origin first; empty for a fault without a
    place."""
    figures: str
    """The observation."""
    done: str = ""
    """The guard's action."""

    def __str__(self) -> str:
        place = f" in {self.where[0]}" if self.where else ""
        place += f" first, of {listed(self.where)}" if len(self.where) > 1 else ""
        return f"step {self.step}: {self.kind}{place}: {self.figures}; {self.done}"


def faults(optimizer: Any) -> list[Fault]:
    """Return the latest 1000 faults found by the guard of an optimizer; none with guard="off".

    Args:
        optimizer: a prepared optimizer, bare or in Accelerate's wrapper.
    """
    guard = guard_of(unwrapped(optimizer))
    return [] if guard is None else list(guard.found)


def watch(models: Iterable[nn.Module], optimizer: torch.optim.Optimizer, recipe: Recipe) -> None:
    """Install the recipe's guard. Repeated calls add models and replace the recipe. Raises
    `FP8BackendError` for an optimizer that steps without step hooks."""
    guard = guard_of(optimizer)
    if guard is not None:
        guard.recipe = recipe
    if recipe.guard == "off":
        return
    if not hasattr(optimizer, "register_step_pre_hook") or hasattr(optimizer, "fused_backward"):
        raise FP8BackendError(
            f"guard={recipe.guard!r}: {type(optimizer).__name__} makes its steps where no hook "
            "precedes them; use an "
            'optimizer whose step follows backward, or guard="off"'
        )
    if guard is None:
        guard = Guard(recipe)
        optimizer.register_step_pre_hook(guard)
        optimizer.register_step_post_hook(guard.after_step)
    guard.add(models)


def after_backward(accelerator: Accelerator, loss: Any) -> None:
    """Notify the guards of an Accelerator's optimizers of a backward pass."""
    optimizers = map(
        unwrapped, accelerator._optimizers if accelerator.fp8_recipe.guard != "off" else ()
    )
    guards = [
        (guard, optimizer) for optimizer in optimizers if (guard := guard_of(optimizer)) is not None
    ]
    for guard, optimizer in guards:
        guard.shares_losses = len(guards) > 1
        guard.after_backward(optimizer, loss, accelerator)


def join_uneven_inputs(accelerator: Accelerator) -> None:
    """Raise `FP8BackendError` with a guard, whose ranks would wait for each other."""
    if accelerator.fp8_recipe.guard != "off" and accelerator.num_processes > 1:
        raise FP8BackendError(
            "uneven inputs: a rank that has run out of them makes no steps, and at each the guard "
            "of the others "
            "waits for it: give all ranks as many batches (Accelerate: even_batches=True), or set "
            'guard="off"'
        )


def counts_of(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return the faults found and the steps skipped so far, for a record of the monitor."""
    guard = guard_of(optimizer)
    return {} if guard is None else {"guard_faults": guard.faults, "guard_skipped": guard.skipped}


def watch_clipping(
    models: Iterable[nn.Module], optimizer: torch.optim.Optimizer, recipe: Recipe
) -> None:
    """Watch scales of the most recent amax, with any `guard`. Repeating it does nothing."""
    if not any(
        isinstance(hook, ClippingWatch) for hook in optimizer._optimizer_step_post_hooks.values()
    ):
        optimizer.register_step_post_hook(ClippingWatch(models, recipe.stateful))


def guard_of(optimizer: torch.optim.Optimizer | None) -> Guard | None:
    """Return the guard of an optimizer, if any."""
    hooks = getattr(optimizer, "_optimizer_step_pre_hooks", {}).values()
    return next((hook for hook in hooks if isinstance(hook, Guard)), None)


class Look(NamedTuple):
    """Observations before one step."""

    step: int
    totals: torch.Tensor
    """FP32 [6] of all ranks: sum of finite losses; numbers of finite, bad losses, bad gradients,
    clipped, stuck."""
    gradients: torch.Tensor | None
    """`spoiled` of the parameters on this rank; None where a loss scaler checks them."""
    after_backward: torch.Tensor | None
    """The same before gradients were clipped."""
    overshoot: torch.Tensor | None
    """FP32 [states, 3], see `scaling.overshoot`."""
    stuck: torch.Tensor | None
    """Bool [states, 3]."""


class Guard:
    """Check the models of an optimizer before each of its steps: a step pre-hook."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.step = 0
        """Calls of `optimizer.step` in this process."""
        self.skipped = 0
        self.faults = 0
        """Faults found, also those beyond the latest in `found`."""
        self.found: deque[Fault] = deque(maxlen=REMEMBERED)
        self.shares_losses = False
        """Other optimizers get the same losses, so a bad loss may be theirs."""
        self._models: list[weakref.ref[nn.Module]] = []
        self._accelerator: Accelerator | None = None
        self._logged_kinds: set[str] = set()
        self._rolls: torch.Tensor | None = None
        self._unmoved: torch.Tensor | None = None
        """Counts of all scaling states: rolls at the last look, and steps since it changed."""
        self._losses: torch.Tensor | None = None
        """FP32 [3], since the last step: sum of the finite losses, number of finite and of
        non-finite losses."""
        self._after_backward: torch.Tensor | None = None
        """`spoiled`, before clipping."""
        self._backwards = 0
        """Backward passes shared by all ranks, up to the last step."""
        self._late: tuple[Look, torch.cuda.Event] | None = None
        """On a GPU, the look before the last step, on its way to the host."""
        self._reported: list[tuple[str, str]] = []
        """Kinds and figures of the next step's faults found by others, alike on all ranks."""
        self._held: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Parameters and their gradients, during a skipped step."""
        self._steps_together = 0
        """Equal on all ranks, which compare their replicas at the same ones."""
        self._skipped_in_a_row = 0
        self._was_not_finite = False
        """The last look showed a non-finite loss or gradient."""
        self._statistics: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Running statistics of norm layers, and their values before this step's forwards."""
        # not a decorator: importing the compiler takes a second
        self._before_step = torch.compiler.disable(self._before_step)

    def add(self, models: Iterable[nn.Module]) -> None:
        watched = [reference() for reference in self._models]
        self._models += [
            weakref.ref(model) for model in models if not any(model is other for other in watched)
        ]
        for model in self._live_models():
            replicas.SharedBackwards.of(model)  # counts from the first backward on
        self._keep_statistics()

    def report(self, kind: str, figures: str) -> None:
        """Add a fault to the next step. All ranks report it."""
        self._reported.append((kind, figures))

    def _live_models(self) -> list[nn.Module]:
        """Return the models, each in its DDP wrapper."""
        models: dict[int, nn.Module] = {}
        for model in (model for reference in self._models if (model := reference()) is not None):
            wrappers = (prepared.observed.wrapper for _, _, prepared in prepared_roots(model))
            model = next((wrapper() or model for wrapper in wrappers if wrapper is not None), model)
            models[id(model)] = model
        return list(models.values())

    def _roots(self) -> Roots:
        roots = {
            id(root): (root, prepared) for _, root, prepared in prepared_roots(*self._live_models())
        }
        return list(roots.values())

    # Observe

    @torch.no_grad()
    def after_backward(
        self, optimizer: torch.optim.Optimizer, loss: Any, accelerator: Accelerator
    ) -> None:
        """Note a loss and, if a step may follow, the non-finite gradients, without
        synchronizing."""
        self._accelerator = accelerator
        if isinstance(loss, torch.Tensor):
            finite = torch.isfinite(loss.detach().float().mean()).float()
            noted = torch.stack([finite, 1 - finite])
            self._losses = noted if self._losses is None else self._losses + noted
        self._after_backward = (
            spoiled(parameters_of(optimizer)) if accelerator.sync_gradients else None
        )

    def __call__(self, optimizer: torch.optim.Optimizer, args, kwargs) -> None:
        if self.recipe.guard in ("skip", "stop") and has_closure(args, kwargs):
            raise FP8BackendError(
                f"guard={self.recipe.guard!r} looks at gradients before the step, and "
                "step(closure) computes them inside it: call loss.backward() and then "
                'optimizer.step(), or use guard="warn", which looks at those of the step before'
            )
        self._before_step(optimizer)

    @torch.no_grad()
    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.step += 1
        # switched off, or all models were restored
        if self.recipe.guard == "off" or not self._roots():
            return
        groups = next(filter(None, map(replicas.rank_groups, self._live_models())), [])
        if groups:
            before = self._backwards
            self._backwards = sum(
                each.count for m in self._live_models() for each in replicas.SharedBackwards.of(m)
            )
            if self._backwards == before:
                self._act_alone(optimizer)
                return
        look: Look | None = self._look(optimizer, groups)
        if self.recipe.guard == "warn" and look.totals.is_cuda:
            late, self._late, look = self._late, _on_its_way(look), None
            if late is not None:
                look, arrived = late
                arrived.synchronize()
        found = [] if look is None else self._faults_in(look, optimizer, groups)
        found += [Fault(self.step, kind, (), figures) for kind, figures in self._reported]
        self._reported = []
        self._steps_together += 1
        if groups and self._steps_together % COMPARED_EVERY == 0:
            found += self._replicas_apart(groups)
        self._skipped_in_a_row = self._skipped_in_a_row if found else 0
        if found:
            self._act(found, look, optimizer)
        else:
            self._keep_statistics()

    def _look(self, optimizer: torch.optim.Optimizer, groups: list[dist.ProcessGroup]) -> Look:
        parameters = parameters_of(optimizer)
        # a fused optimizer skips its step itself when a loss scaler has found an inf
        scaler_looks = getattr(optimizer, "found_inf", None) is not None
        gradients = None if scaler_looks else spoiled(parameters)
        over, stuck = self._look_at_scaling(self._roots())
        clipped = None if over is None else scaling.is_clipped(over)
        zeros = torch.zeros(2, dtype=torch.float32, device=parameters[0].device)
        losses = zeros if self._losses is None else self._losses.to(zeros.device)
        counts = [
            zeros[0] if flags is None else flags.sum().to(zeros)
            for flags in (gradients, clipped, stuck)
        ]
        totals = torch.cat([losses, torch.stack(counts)])
        look = Look(
            self.step,
            replicas.sum_over(totals, groups),
            gradients,
            self._after_backward,
            over,
            stuck,
        )
        self._losses = self._after_backward = None
        return look

    def _look_at_scaling(self, roots: Roots) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the overshoot of all states, FP32 [states, 3], and the stuck ones, bool [states,
        3], or None."""
        over, stuck, rolls, records = [], [], [], []
        for root, prepared in roots:
            if not (buffers := prepared.compute.scaling_buffers(root)):
                continue
            recipe = prepared.recipe.stateful
            states = torch.cat([rows.to(buffers[0].device) for rows in map(_rows, buffers)])
            rule = scaling.RULES[recipe.scaling]
            reads_history = not rule.moves_in_forward or recipe.amax_compute_algo == "max"
            over.append(scaling.overshoot(states, _format_max(recipe, states), rule.warm_from))
            stuck.append(scaling.is_invalid(states, reads_history))
            rolls.append(states[..., ROLLS])
            records.append(states[..., HISTORY] != 0)
        if not over:
            return None, None
        before, self._rolls = self._rolls, torch.cat(rolls)
        if before is None or before.shape != self._rolls.shape:
            self._unmoved = torch.zeros_like(self._rolls)
        else:
            self._unmoved = torch.where(
                torch.cat(records) & (self._rolls == before), self._unmoved + 1, 0
            )
        frozen = self._unmoved >= STUCK_AFTER
        self._unmoved.masked_fill_(frozen, 0)  # count anew
        return torch.cat(over), torch.cat(stuck) | frozen

    # Name the faults

    def _faults_in(
        self, look: Look, optimizer: torch.optim.Optimizer, groups: list[dist.ProcessGroup]
    ) -> list[Fault]:
        """Return the faults of a step, the same on all ranks."""
        finite, not_finite, gradients, clipped, stuck = look.totals.tolist()
        found: list[tuple[str, tuple[str, ...], str]] = []
        is_lost = bool(not_finite and (gradients or not self.shares_losses))
        broken = ()
        # after a late look ("warn" on a GPU) the step has spread the NaN already
        if (is_lost or gradients) and (look.step == self.step or self._was_not_finite):
            self._restore_statistics()
            broken = self._broken(optimizer, groups)
        self._was_not_finite = bool(is_lost or gradients)
        if is_lost:
            total = finite + not_finite
            found.append(
                (
                    LOSS,
                    (),
                    f"{not_finite:.0f} of the {total:.0f} losses of this step are not finite",
                )
            )
        if broken:
            found.append(
                (PARAMETER, broken, f"an inf or a NaN in {counted(len(broken), 'tensor')}")
            )
        elif gradients:
            where = self._spoiled_parameters(look, parameters_of(optimizer), groups)
            found.append((GRADIENT, where, f"{counted(len(where), 'gradient')} not finite"))
        if clipped:
            over = look.overshoot.where(torch.isfinite(look.overshoot), 0.0)
            figures = f"values up to {over.max().item():.3g} times the largest that the scale has a code for"
            found.append((CLIPPED, _places(self._roots(), scaling.is_clipped(over)), figures))
        if stuck:
            figures = (
                "a scale or an amax in its history is no number, or the history does not move on "
                "(is the prepared model called as a whole?)"
            )
            found.append((STUCK, _places(self._roots(), look.stuck), figures))
        return [Fault(look.step, *fault) for fault in found]

    def _spoiled_parameters(
        self, look: Look, parameters: list[torch.Tensor], groups: list[dist.ProcessGroup]
    ) -> tuple[str, ...]:
        """Return the names of parameters with non-finite gradients, in the order of backward: the
        origin is first."""
        # clipping spreads a NaN to all gradients, so prefer the look before it, unless the fault
        # came later
        candidates = [flags for flags in (look.after_backward, look.gradients) if flags is not None]
        spoiled_of = [
            replicas.sum_over(flags.clone(), groups).nonzero().flatten().tolist()
            for flags in candidates
        ]
        at = {id(parameters[i]) for i in next(filter(None, spoiled_of), [])}
        named = [pair for model in self._live_models() for pair in model.named_parameters()]
        names = [plain_name(name).removeprefix("module.") for name, p in named if id(p) in at]
        return (*reversed(names), *[FOREIGN] * (len(at) - len(names)))

    def _broken(
        self, optimizer: torch.optim.Optimizer, groups: list[dist.ProcessGroup]
    ) -> tuple[str, ...]:
        """Name parameters, buffers and states with a NaN (trained ones: or inf) on any rank, in the
        model's order."""
        trained = {id(p): p for p in parameters_of(optimizer)}
        states = {
            id(p): [
                value
                for value in optimizer.state.get(p, {}).values()
                if isinstance(value, torch.Tensor)
            ]
            for p in trained.values()
        }
        held: list[tuple[str, list[torch.Tensor], bool]] = []
        for model in self._live_models():
            for full_name, tensor in (*model.named_parameters(), *model.named_buffers()):
                name, trains = (
                    plain_name(full_name).removeprefix("module."),
                    trained.pop(id(tensor), None) is not None,
                )
                held.append((name, [tensor], trains))
                if trains:
                    held.append((name + OF_STATE, states[id(tensor)], True))
        held += [(FOREIGN, [tensor, *states[id(tensor)]], True) for tensor in trained.values()]
        largest = _largest_of(
            [tensors for _, tensors, _ in held], parameters_of(optimizer)[0].device
        )
        trains = torch.tensor([trains for *_, trains in held], device=largest.device)
        at = replicas.sum_over(
            (torch.isnan(largest) | trains & torch.isinf(largest)).float(), groups
        )
        names = [held[i][0] for i in at.nonzero().flatten().tolist()]
        return tuple(
            name for name in names if name.removesuffix(OF_STATE) not in names[: names.index(name)]
        )

    def _replicas_apart(self, groups: list[dist.ProcessGroup]) -> list[Fault]:
        states = [(name, state) for name, _, state in _named_states(self._roots())]
        held = [
            tensor for model in self._live_models() for tensor in replicas.held_alike(model, states)
        ]
        if not held:
            return []
        differing = replicas.apart(held)
        # in a hybrid mesh, each group of replicas has compared its own part
        count = held[0].tensor.new_full((), len(differing), dtype=torch.float32)
        if not replicas.sum_over(count, groups).item():
            return []
        ranks = sorted({rank for others in differing.values() for rank in others})
        figures = (
            f"rank {', '.join(map(str, ranks))} holds other values than the first"
            if ranks
            else "on other ranks"
        )
        return [Fault(self.step, APART, tuple(differing), figures)]

    # Act

    def _act(self, found: list[Fault], look: Look | None, optimizer: torch.optim.Optimizer) -> None:
        """Do what the recipe says. Raises `FP8BackendError` to stop."""
        action, kinds = self.recipe.guard, {fault.kind for fault in found}
        found = self._numbered(found, optimizer)
        # skipping does not heal a parameter, and such a training is not worth a checkpoint
        if action == "stop" or (action == "skip" and PARAMETER in kinds):
            self._stop(found, None if kinds & {APART, PARAMETER} else self._save(found[0].step))
        if action == "warn" or kinds == {APART}:
            self._note(found, "nothing was done")
            return
        done = "the step was left out"
        self._leave_out(optimizer)
        if STUCK in kinds:  # nor a stuck state
            done += f", {counted(_renew(self._roots(), look.stuck), 'scaling state')} began anew"
        self._note(found, done)
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row > LEFT_OUT_AT_MOST:
            raise FP8BackendError(
                f"guard: {self.found[-1]}. {LEFT_OUT_AT_MOST} steps in a row were left out before "
                "it, so the fault stays: look at the data and the learning rate, or resume from an "
                "earlier checkpoint"
            )

    def _act_alone(self, optimizer: torch.optim.Optimizer) -> None:
        """Act without the other ranks: they may be waiting in a backward for this one's
        gradients."""
        if not self._backwards:
            return  # nothing was ever shared, such as where a first step only sets the optimizer up
        figures = f"rank {dist.get_rank()} ran no backward that the other ranks shared since its last step"
        (fault,) = self._numbered([Fault(self.step, ALONE, (), figures)], optimizer)
        # with sharded states, a step would wait for all ranks forever
        if self.recipe.guard == "stop" or getattr(optimizer, "fp8_owners", None) is not None:
            self._stop([fault], None)
        if self.recipe.guard != "warn":
            self._leave_out(optimizer)
        self._note(
            [fault],
            "nothing was done" if self.recipe.guard == "warn" else "the step was left out",
            True,
        )

    def _note(self, found: list[Fault], done: str, on_every_rank: bool = False) -> None:
        """Remember faults, and log the first of each kind."""
        for fault in (fault._replace(done=done) for fault in found):
            self.found.append(fault)
            self.faults += 1
            if fault.kind not in self._logged_kinds and (on_every_rank or is_main_process()):
                logger.warning(
                    "guard: %s. Later ones of this kind are in "
                    "fp8_backends.watch.guard.faults(optimizer)",
                    fault,
                )
            self._logged_kinds.add(fault.kind)

    def _save(self, step: int) -> str | None:
        """Save the training if its project has a folder, and return the path. All ranks call it."""
        accelerator = self._accelerator
        if accelerator is None or accelerator.project_dir is None:
            return None
        named = accelerator.project_configuration.automatic_checkpoint_naming
        return accelerator.save_state(
            None if named else os.path.join(accelerator.project_dir, f"guard_step_{step}")
        )

    def _stop(self, found: list[Fault], saved: str | None) -> None:
        """Raise `FP8BackendError` before the step changes anything."""
        stopped = [fault._replace(done="training was stopped before the step") for fault in found]
        self.found.extend(stopped)
        place = f" A checkpoint of before the step is in {saved}." if saved else ""
        other = 'guard="skip" goes on without such a step'
        if broken := next((fault.where for fault in found if fault.kind == PARAMETER), None):
            other = f"leaving steps out does not heal {listed(broken)}"
        raise FP8BackendError(
            f"guard: {'; '.join(map(str, stopped))}.{place} Fix: look at the data and the learning "
            f"rate, and resume from the last good checkpoint; {other}"
        )

    def _numbered(self, found: list[Fault], optimizer: torch.optim.Optimizer) -> list[Fault]:
        """Number the faults by the steps of the optimizer's states, loaded ones included. Waits for
        the device."""
        counted_steps = steps_of(optimizer)
        # which has counted this step, too
        before = self.step - 1 - self.skipped + self.recipe.gradient_release
        loaded = 0 if counted_steps is None else counted_steps - before
        return [fault._replace(step=fault.step + loaded) for fault in found]

    def _leave_out(self, optimizer: torch.optim.Optimizer) -> None:
        """Hide the gradients from the step: PyTorch's optimizers then keep weights, states and
        counters."""
        self.skipped += 1
        optimizer.fp8_skipped = self.skipped  # for samples, which are numbered by steps
        self._restore_statistics()
        self._held = [(p, p.grad) for p in parameters_of(optimizer) if p.grad is not None]
        for p, _ in self._held:
            p.grad = None

    def after_step(self, optimizer: torch.optim.Optimizer, args, kwargs) -> None:
        """Give the gradients back after a skipped step: a step post-hook."""
        held, self._held = self._held, []
        for p, gradient in held:
            p.grad = gradient

    def _keep_statistics(self) -> None:
        """Keep the running statistics of norm layers: forward changes them before the guard's
        look."""
        models = self._live_models() if self.recipe.guard in ("skip", "stop") else []
        norms = [
            module
            for model in models
            for module in model.modules()
            if isinstance(module, _NormBase)
        ]
        self._statistics = [
            (buffer, buffer.clone()) for norm in norms for buffer in norm.buffers(recurse=False)
        ]

    def _restore_statistics(self) -> None:
        for buffer, kept in self._statistics:
            buffer.copy_(kept)


class ClippingWatch:
    """Name layers whose scale of the most recent amax clips inputs step after step, once: a step
    post-hook. Reads the copies of its look before, so that nothing waits for the device."""

    def __init__(self, models: Iterable[nn.Module], recipe: Recipe) -> None:
        self.models = weakref.WeakSet(models)
        self.recipe = recipe
        self.steps = 0
        self.amaxes: dict[str, torch.Tensor] = {}

    def __call__(self, optimizer: torch.optim.Optimizer, args, kwargs) -> None:
        if is_traced():
            return
        self.steps += 1
        if self.steps % CLIPS_SOUGHT_EVERY:
            return
        if clipped := [name for name, amaxes in self.amaxes.items() if self._clips_often(amaxes)]:
            self.models.clear()
            figures = (
                f"scales clip inputs of {listed(clipped)} step after step; leave out "
                'amax_compute_algo="most_recent": the default, "max", follows all calls of the '
                "model"
            )
            if (guard := guard_of(optimizer)) is not None:
                guard.report(CLIPPED, figures)
            elif is_main_process():
                logger.warning("%s: %s", self.recipe.name, figures)
        self.amaxes = {}
        for _, root, prepared in prepared_roots(*self.models):
            for name, state in prepared.compute.scaling_state(root).items():
                layer, _, part = plain_name(name).rpartition(".")
                if part in _INPUT_AMAXES:
                    recent = _INPUT_AMAXES[part](state)[..., 1:][..., -RECENT:]
                    self.amaxes[layer] = recent.to("cpu", non_blocking=True)

    def _clips_often(self, amaxes: torch.Tensor) -> bool:
        before, after = amaxes[..., :-1], amaxes[..., 1:]
        clips = (before > 0) & (after > 2.0 ** (1 + self.recipe.margin) * before)
        return bool((clips.sum(-1) >= OFTEN).any())


def _on_its_way(look: Look) -> tuple[Look, torch.cuda.Event]:
    """Copy the totals to the host without waiting; return the look with them, and an event for
    their arrival."""
    totals = torch.empty_like(look.totals, device="cpu", pin_memory=True)
    totals.copy_(look.totals, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return look._replace(totals=totals), arrived


# Gradients and parameters


def spoiled(parameters: list[torch.Tensor]) -> torch.Tensor:
    """Return 1 for each parameter with an inf or a NaN in its gradient on this rank, else 0: FP32
    [parameters]. A level has stepped with zero in place of a dropped one."""
    gradients = [[] if p.grad is None or is_dropped(p.grad) else [p.grad] for p in parameters]
    return (~torch.isfinite(_largest_of(gradients, parameters[0].device))).float()


def _largest_of(held: Sequence[Sequence[torch.Tensor]], device: torch.device) -> torch.Tensor:
    """Return the largest magnitude in each sequence of tensors on this rank, FP32 [held], inf and
    NaN included (of FP8 codes, the scale's), with a few launches for each dtype."""
    alike: dict[tuple, list[tuple[int, torch.Tensor]]] = {}
    for i, local in (
        (i, local_part(tensor.detach())) for i, tensors in enumerate(held) for tensor in tensors
    ):
        for part in (local._values(),) if local.is_sparse else stored_parts(local, exact=True):
            if (
                part.element_size() > 1
                and part.numel()
                and (part.is_floating_point() or part.is_complex())
            ):
                part = torch.view_as_real(part) if part.is_complex() else part
                alike.setdefault((part.device, part.dtype), []).append((i, part))
    zero = torch.zeros((), dtype=torch.float32, device=device)
    largest = [zero] * len(held)
    for members in alike.values():
        norms = (
            torch.stack(torch._foreach_norm([part for _, part in members], float("inf")))
            .to(zero)
            .unbind()
        )
        for (i, _), norm in zip(members, norms, strict=True):
            largest[i] = norm if largest[i] is zero else torch.maximum(largest[i], norm)
    return torch.stack(largest)


# Scaling states, int32 [3, 2 + history length] each: one for a layer, one for each expert


def _named_states(roots: Roots) -> Iterator[tuple[str, Recipe, torch.Tensor]]:
    """Yield layer name, recipe and live state, the states of experts as one tensor, in a fixed
    order."""
    for root, prepared in roots:
        if buffers := prepared.compute.scaling_buffers(root):
            for name, state in zip(prepared.compute.scaling_state(root), buffers, strict=True):
                yield plain_name(name.rpartition(".")[0]), prepared.recipe.stateful, state


def _places(roots: Roots, at: torch.Tensor) -> tuple[str, ...]:
    """Name the layers and operands marked by a bool [states, 3], such as `mlp.down_proj
    (input)`."""
    names = [name for name, _, state in _named_states(roots) for _ in _rows(state)]
    return tuple(
        f"{names[state]} ({OPERANDS[operand]})" for state, operand in at.nonzero().tolist()
    )


def _renew(roots: Roots, at_fault: torch.Tensor) -> int:
    """Reset the states marked by a bool [states, 3] to this step's amaxes. Return the number of
    marked states."""
    begin = 0
    for _, recipe, state in _named_states(roots):
        rows = _rows(state)
        marked = at_fault[begin : begin + len(rows)].unsqueeze(-1).to(rows.device)
        new = scaling.anew(rows, _format_max(recipe, rows), recipe.margin)
        state.copy_(torch.where(marked, new, rows).view(state.shape))
        begin += len(rows)
    return int(at_fault.any(-1).sum())


def _rows(state: torch.Tensor) -> torch.Tensor:
    return state.reshape(-1, *state.shape[-2:])


def _format_max(recipe: Recipe, like: torch.Tensor) -> torch.Tensor:
    """Return the largest code of each operand's format, FP32 [3], on the device of `like`."""
    forward, gradient = RECIPE_FORMATS[recipe.fp8_format]
    return scaling.on_device((forward.max, forward.max, gradient.max), like.device)
