"""How far a recipe turns the gradients of a model from those of FP32, measured on the user's own batches.

Everything runs on copies of the model, one at a time: the model itself is only read.
"""

from __future__ import annotations

import contextlib
import copy
import math
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from accelerate.utils import send_to_device
from torch import nn

from ..compute import hardware
from ..errors import FP8BackendError, RecipeError
from ..numerics.modules import check_is_module
from ..numerics.sharded_tensor import is_distributed
from ..recipes.handlers import Recipe
from . import conversion, preparation
from .auditing import Flops, count_flops
from .conversion import Prepared
from .observed import WorkMeter
from .weight_products import find_weight_products

LossFunction = Callable[[nn.Module, Any], torch.Tensor]

WARM_UP = 2
"""Forwards and backwards of the first batch before anything is measured, for scaling rules that remember steps."""

NOISE = 0.1
"""A parameter does not count whose gradient the precision around FP8 turns by more by itself, such as a key's bias, to
which softmax is blind: FP8's rounding is sixteen times as coarse at least, and would leave nothing of it."""


@dataclass(frozen=True)
class Measurement:
    """What was measured of one recipe."""

    gap: float
    """Mean over the batches of the relative error of the gradients; infinite where one is not finite."""
    loss_error: float
    """Mean over the batches of the absolute error of the loss."""


class GradientGap:
    """The gap of any recipe to FP32, for one model on fixed batches.

    The gap of a batch is `sqrt(sum(n_p * min(1, r_p) ** 2) / sum(n_p))` over the trainable parameters p, of n_p
    elements, whose gradient is not zero: `r_p = ||g_p - g32_p|| / ||g32_p||`. The gradients g32 are those of the model
    in FP32. Parameters beyond `NOISE` without any FP8 do not count.

    Args:
        model: any module, prepared or not; on one device, or DDP around it.
        batches: what a forward takes, each; moved to the model's device.
        around: what runs around FP8, "bf16" or "fp32".
        loss: a function (model, batch) -> scalar tensor; by default what the model returns as its loss.

    Raises:
        FP8BackendError: no batch, no loss, sharded weights, nothing that trains, a model that cannot be copied, or a
            loss or a gradient that is not finite in FP32 already.
    """

    def __init__(self, model: nn.Module, batches: Iterable[Any], around: str, loss: LossFunction | None = None) -> None:
        check_is_module(model)
        self.around = around
        self.model = conversion.unwrapped(model)
        self.batches = list(batches)
        self.loss = loss or loss_of_output
        self.passes = 0
        """Forwards with their backwards so far."""
        parameters = list(self.model.parameters())
        if not self.batches:
            raise FP8BackendError("no batch is given: batches must hold at least one, better four")
        if not any(parameter.requires_grad for parameter in parameters):
            raise FP8BackendError("no parameter of this model trains, so there is no gradient to measure")
        if any(is_distributed(p) or hasattr(p, "ds_id") or getattr(p, "shared_out", False) for p in parameters):
            raise FP8BackendError("weights are sharded: measure the model on one device, before it is shared out")
        self.device = next(self.model.parameters()).device
        work = self.plain_copy()
        meter = WorkMeter(work, find_weight_products(work))
        self.reference = list(self._gradients(work.float(), "fp32"))
        meter.detach()
        self.work = meter.work
        if not all(
            math.isfinite(loss) and all(bool(gradient.isfinite().all()) for gradient in gradients.values())
            for loss, gradients in self.reference
        ):
            raise FP8BackendError("a loss or a gradient is not finite in FP32 already: no recipe can be measured by it")
        errors, loss_error = self._errors(self.plain_copy())
        by_name: dict[str, list[float]] = {}
        for name, error in (item for of in errors for item in of.items()):
            by_name.setdefault(name, []).append(error)
        noisy = [name for name, of in by_name.items() if _mean(of) > NOISE]
        self.not_counted = noisy if len(noisy) < len(by_name) else []  # else a gap of nothing would be 0
        """Parameters that do not count."""
        self.floor = Measurement(self._gap(errors), loss_error)
        """The same without any FP8."""

    def plain_copy(self) -> nn.Module:
        """A copy that trains, as it was before it was prepared. Parts that the user set to evaluation stay so, unless
        the whole model is."""
        try:
            work = copy.deepcopy(self.model)
        except (RuntimeError, TypeError, ValueError) as error:
            raise FP8BackendError(
                f"this model cannot be copied, and recipes are measured on copies: {error}"
            ) from error
        conversion.restore(work)
        return work if work.training else work.train()

    def prepared(self, recipe: Recipe) -> tuple[nn.Module, Prepared]:
        """A copy that is prepared with a recipe. Raises as `fp8_backends.prepare` does."""
        if recipe.implementation == "original":
            raise RecipeError('implementation="original": only the levels of this package can be measured')
        work = self.plain_copy()
        with same_draws(0, self.device):  # a level rounds weights
            preparation.prepare_model(work, recipe)
        return work, work.__dict__[conversion.PREPARED]

    def flops(self, work: nn.Module, prepared: Prepared) -> Flops:
        """FLOPs of weight products in these batches, and of those that this copy has in FP8."""
        return count_flops(work, prepared, None, self.work)

    def of(self, work: nn.Module, prepared: Prepared) -> Measurement:
        """The gap of a prepared copy. A scaling rule that remembers steps has seen the first batch `WARM_UP` times."""
        warm_up = self.batches[:1] * WARM_UP if prepared.compute.scaling_state(work) else []
        for _ in self._gradients(work, self.around, warm_up):
            pass
        errors, loss_error = self._errors(work)
        return Measurement(self._gap(errors), loss_error)

    def _gradients(
        self, work: nn.Module, precision: str, batches: list[Any] | None = None
    ) -> Iterator[tuple[float, dict[str, torch.Tensor]]]:
        """Loss and gradients on the CPU of each batch, every one with the same random draws in every call."""
        trained = {name: parameter for name, parameter in work.named_parameters() if parameter.requires_grad}
        for seed, batch in enumerate(self.batches if batches is None else batches):
            with same_draws(seed, self.device):
                loss = loss_of(work, batch, self.loss, precision)
                loss.backward()
            prepared = work.__dict__.get(conversion.PREPARED)
            if prepared is not None:
                prepared.compute.after_optimizer_step(work)  # as a watched optimizer does
            self.passes += 1
            gradients = {
                name: parameter.grad.detach().to("cpu", torch.float32, copy=True)
                for name, parameter in trained.items()
                if parameter.grad is not None
            }
            yield loss.item(), gradients
            work.zero_grad(set_to_none=True)

    def _errors(self, work: nn.Module) -> tuple[list[dict[str, float]], float]:
        """Of each batch the relative error of every gradient that is not zero, and the mean error of the loss."""
        errors, of_losses = [], []
        found = self._gradients(work, self.around)
        for (loss, gradients), (expected_loss, expected) in zip(found, self.reference, strict=True):
            norms = {name: _norm(each) for name, each in expected.items()}
            pairs = [(name, gradients.get(name), expected[name]) for name, norm in norms.items() if norm > 0]
            errors.append({name: math.inf if g is None else _norm(g - e) / norms[name] for name, g, e in pairs})
            of_losses.append(abs(loss - expected_loss))
        return errors, _mean(of_losses)

    def _gap(self, errors: list[dict[str, float]]) -> float:
        """The mean over the batches of the gap of each."""
        gaps = []
        for of, (_, expected) in zip(errors, self.reference, strict=True):
            counted = {name: error for name, error in of.items() if name not in self.not_counted}
            if not all(map(math.isfinite, counted.values())):
                return math.inf
            sizes = [expected[name].numel() for name in counted]
            total = sum(n * min(1.0, error) ** 2 for n, error in zip(sizes, counted.values(), strict=True))
            gaps.append(math.sqrt(total / max(1, sum(sizes))))
        return statistics.fmean(gaps)


def precision_around(recipe: Recipe, device: torch.device) -> str:
    """What runs around FP8 on this device, "bf16" or "fp32", as under Accelerate. Raises `RecipeError` for FP16, which
    would need a scaled loss."""
    given = recipe.autocast_dtype if "autocast_dtype" in recipe.given else hardware.fast_precision(device)
    if given == "fp16":
        raise RecipeError("autocast_dtype='fp16': gradients are measured with bf16 or fp32 around FP8; say one of them")
    return given


def loss_of(work: nn.Module, batch: Any, loss: LossFunction, precision: str) -> torch.Tensor:
    """The loss of a batch, moved to the model's device. Raises `FP8BackendError` where it cannot have a gradient."""
    device = next(work.parameters()).device
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
        found = loss(work, _as_read_by(work, send_to_device(_copied(batch), device)))
    if not isinstance(found, torch.Tensor) or found.numel() != 1 or found.requires_grad != torch.is_grad_enabled():
        raise FP8BackendError("the loss of a batch must be a tensor of one element that requires a gradient")
    return found


def loss_of_output(model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss that a model returns by itself: `loss` of what it returns, or that where it is a single number.

    Raises:
        FP8BackendError: there is none.
    """
    output = (
        model(**batch)
        if isinstance(batch, Mapping)
        else model(*(batch if isinstance(batch, (tuple, list)) else [batch]))
    )
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if not isinstance(found, torch.Tensor) or found.numel() != 1:
        raise FP8BackendError(
            f"{type(model).__name__} returns no loss for this batch: put labels into it, or give "
            "loss=function(model, batch)"
        )
    return found


@contextlib.contextmanager
def same_draws(seed: int, device: torch.device) -> Iterator[None]:
    """Random numbers of PyTorch, NumPy and Python begin at a seed inside, and go on afterwards as if nothing had been
    drawn."""
    of_python, of_numpy = random.getstate(), numpy.random.get_state()
    on_gpu = device.type == "cuda"
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count()) if on_gpu else []):
            torch.default_generator.manual_seed(seed)
            if on_gpu:
                torch.cuda.manual_seed_all(seed)
            random.seed(seed)
            numpy.random.seed(seed)
            yield
    finally:
        random.setstate(of_python)
        numpy.random.set_state(of_numpy)


def _copied(batch: Any) -> Any:
    """A batch of which the model and the loss may change and take what they like: the next pass wants the same."""
    try:
        return copy.deepcopy(batch)
    except (RuntimeError, TypeError, ValueError):  # such as a tensor that another model has made
        return batch


def _as_read_by(work: nn.Module, batch: Any) -> Any:
    """The batch with 16-bit numbers in FP32 where the model's parameters are."""
    if any(parameter.dtype != torch.float32 for parameter in work.parameters() if parameter.is_floating_point()):
        return batch
    return _in_fp32(batch)


def _in_fp32(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
    if isinstance(value, Mapping):
        return {key: _in_fp32(item) for key, item in value.items()}
    return type(value)(map(_in_fp32, value)) if type(value) in (list, tuple) else value


def _norm(tensor: torch.Tensor) -> float:
    return torch.linalg.vector_norm(tensor).item()


def _mean(values: list[float]) -> float:
    """The mean; infinite where one of them is not finite."""
    return statistics.fmean(value if math.isfinite(value) else math.inf for value in values)
