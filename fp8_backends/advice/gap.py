"""Measure how far recipes turn a model's gradients from FP32's."""

import contextlib
import copy
import math
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy
import torch
from accelerate.utils import convert_to_fp32, send_to_device
from torch import nn

from .. import preparation
from ..convert import conversion
from ..convert.conversion import Prepared
from ..convert.first_step import WorkMeter
from ..convert.weight_products import find_weight_products
from ..errors import FP8BackendError, RecipeError
from ..recipes.handlers import Recipe
from ..tensors.sharded_tensor import is_distributed

LossFunction = Callable[[nn.Module, Any], torch.Tensor]

WARM_UP = 2
"""Passes of the first batch before a measurement, for scaling rules with a history."""
NOISE = 0.1
"""Largest mean error of a counted gradient without FP8. A key's bias has more: softmax is blind to
it."""


class Measurement(NamedTuple):
    """Errors of one recipe, means over the batches."""

    gap: float
    """Relative error of the gradients; infinite if a gradient is not finite, or without a
    measurement."""
    loss_error: float


class GradientGap:
    """Measure the gap of recipes to FP32, for one model on fixed batches.

    The gap of a batch is `sqrt(sum(n_p * min(1, r_p) ** 2) / sum(n_p))` over the trainable
    parameters p with n_p elements and a nonzero gradient: `r_p = ||g_p - g32_p|| / ||g32_p||`, with
    FP32 gradients g32. Parameters beyond `NOISE` without FP8 do not count. The model is only read:
    everything runs on copies, one at a time.

    Raises `FP8BackendError` without a batch or loss, for sharded weights, nothing that trains, a
    model without a copy, or a loss or gradient that is not finite in FP32.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Any],
        around: str,
        loss: LossFunction | None = None,
    ) -> None:
        conversion.check_is_module(model)
        self.around = around
        self.model = conversion.unwrapped(model)
        self.batches = list(batches)
        self.loss = loss or _loss_of_output
        self.passes = 0
        parameters = list(self.model.parameters())
        if not self.batches:
            raise FP8BackendError("no batch is given: batches must hold at least one, better four")
        if not any(parameter.requires_grad for parameter in parameters):
            raise FP8BackendError(
                "no parameter of this model trains, so there is no gradient to measure"
            )
        if any(
            is_distributed(p) or hasattr(p, "ds_id") or getattr(p, "shared_out", False)
            for p in parameters
        ):
            raise FP8BackendError(
                "weights are sharded: measure the model on one device, before it is shared out"
            )
        self.device = parameters[0].device
        work = self._plain_copy()
        meter = WorkMeter(work, find_weight_products(work))
        self.reference = list(self._gradients(work.float(), "fp32", self.batches))
        meter.detach()
        self.work = meter.work
        if not all(
            math.isfinite(loss)
            and all(bool(gradient.isfinite().all()) for gradient in gradients.values())
            for loss, gradients in self.reference
        ):
            raise FP8BackendError(
                "a loss or a gradient is not finite in FP32 already: no recipe can be measured by "
                "it"
            )
        errors, loss_error = self._errors(self._plain_copy())
        by_name: dict[str, list[float]] = {}
        for name, error in (item for batch_errors in errors for item in batch_errors.items()):
            by_name.setdefault(name, []).append(error)
        noisy = [name for name, values in by_name.items() if _mean(values) > NOISE]
        # otherwise the gap of nothing would be 0
        self.not_counted = noisy if len(noisy) < len(by_name) else []
        self.floor = Measurement(self._gap(errors), loss_error)
        """The measurement without FP8."""

    def _plain_copy(self) -> nn.Module:
        """Copy the model as before `prepare`; in training mode if it was in evaluation as a
        whole."""
        try:
            work = copy.deepcopy(self.model)
        except (RuntimeError, TypeError, ValueError) as error:
            raise FP8BackendError(
                f"the model cannot be copied, and recipes are measured on copies: {error}"
            ) from error
        conversion.restore(work)
        return work if work.training else work.train()

    def prepared(self, recipe: Recipe) -> tuple[nn.Module, Prepared]:
        """Return a copy prepared with a recipe. Raises as `fp8_backends.prepare` does."""
        if recipe.implementation == "original":
            raise RecipeError(
                'implementation="original": only the levels of this package can be measured'
            )
        work = self._plain_copy()
        with _same_draws(0, self.device):  # a level rounds weights
            preparation.prepare_model(work, recipe)
        return work, work.__dict__[conversion.PREPARED]

    def of(self, work: nn.Module, prepared: Prepared) -> Measurement:
        """Measure a prepared copy. Scaling rules with a history see the first batch `WARM_UP` times
        before."""
        warm_up = self.batches[:1] * WARM_UP if prepared.compute.scaling_state(work) else []
        for _ in self._gradients(work, self.around, warm_up):
            pass
        errors, loss_error = self._errors(work)
        return Measurement(self._gap(errors), loss_error)

    def _gradients(
        self, work: nn.Module, precision: str, batches: list[Any]
    ) -> Iterator[tuple[float, dict[str, torch.Tensor]]]:
        """Yield loss and gradients on the CPU for each batch, with the same random draws in every
        call."""
        trained = {
            name: parameter
            for name, parameter in work.named_parameters()
            if parameter.requires_grad
        }
        reads_16_bits = any(
            p.dtype != torch.float32 for p in work.parameters() if p.is_floating_point()
        )
        for seed, batch in enumerate(batches):
            # such as a tensor with a grad_fn
            with contextlib.suppress(RuntimeError, TypeError, ValueError):
                # the model may change it, and the next pass reads it again
                batch = copy.deepcopy(batch)
            batch = send_to_device(batch, self.device)
            batch = batch if reads_16_bits else convert_to_fp32(batch)
            with _same_draws(seed, self.device):
                with torch.autocast(self.device.type, torch.bfloat16, enabled=precision == "bf16"):
                    loss = self.loss(work, batch)
                if (
                    not isinstance(loss, torch.Tensor)
                    or loss.numel() != 1
                    or not loss.requires_grad
                ):
                    raise FP8BackendError(
                        "a batch's loss must be a tensor of one element that requires a gradient"
                    )
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
        """Return each batch's relative errors of nonzero gradients, and the mean error of the
        loss."""
        errors = []
        loss_errors = []
        measured = self._gradients(work, self.around, self.batches)
        for (loss, gradients), (expected_loss, expected) in zip(
            measured, self.reference, strict=True
        ):
            norms = {name: _norm(gradient) for name, gradient in expected.items()}
            pairs = [
                (name, gradients.get(name), expected[name])
                for name, norm in norms.items()
                if norm > 0
            ]
            errors.append(
                {
                    name: math.inf if g is None else _norm(g - e) / norms[name]
                    for name, g, e in pairs
                }
            )
            loss_errors.append(abs(loss - expected_loss))
        return errors, _mean(loss_errors)

    def _gap(self, errors: list[dict[str, float]]) -> float:
        gaps = []
        for batch_errors, (_, expected) in zip(errors, self.reference, strict=True):
            counted = {
                name: error for name, error in batch_errors.items() if name not in self.not_counted
            }
            if not all(map(math.isfinite, counted.values())):
                return math.inf
            sizes = [expected[name].numel() for name in counted]
            total = sum(
                n * min(1.0, error) ** 2 for n, error in zip(sizes, counted.values(), strict=True)
            )
            gaps.append(math.sqrt(total / max(1, sum(sizes))))
        return statistics.fmean(gaps)


def _loss_of_output(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the `loss` of a model's output, or the output if it is a single number."""
    arguments = batch if isinstance(batch, (tuple, list)) else [batch]
    output = model(**batch) if isinstance(batch, Mapping) else model(*arguments)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise FP8BackendError(
            f"{type(model).__name__} returns no loss for this batch: put labels into it, or give "
            "loss=function(model, batch)"
        )
    return loss


@contextlib.contextmanager
def _same_draws(seed: int, device: torch.device) -> Iterator[None]:
    """Seed PyTorch, NumPy and Python inside, and restore their states afterwards."""
    python_state = random.getstate()
    numpy_state = numpy.random.get_state()
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
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)


def _norm(tensor: torch.Tensor) -> float:
    return torch.linalg.vector_norm(tensor).item()


def _mean(values: list[float]) -> float:
    return statistics.fmean(value if math.isfinite(value) else math.inf for value in values)
