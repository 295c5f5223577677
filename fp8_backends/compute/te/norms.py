"""Normalisation layers by TransformerEngine: the same module in a subclass of its class, whose
forward calls a norm of TransformerEngine on the same Parameters.

A class other than PyTorch's own is recognised by a trial: its result for a small FP32 input is
compared with the formula. The result has the autocast dtype if autocast is on, else the weight's;
PyTorch's own norms return FP32 under autocast. Evaluation runs the original class, as in the linear
layers. Imports TransformerEngine only at a swap.
"""

import copy
import copyreg
import functools
import inspect
import itertools
import math
from abc import ABCMeta

import torch
from torch import nn

from ...tensors.sharded_tensor import full_shape
from ...torch_tools.modules import forward_obstacle
from ..counts import Modes, result_dtype
from ..interface import COMPUTE_DTYPES, Norm

LAYER_NORM, RMS_NORM, CENTERED = "LayerNorm", "RMSNorm", "RMSNorm(zero_centered_gamma)"


def norms(root: nn.Module, in_eval: bool) -> list[Norm]:
    """Return the unswapped norms over last dimensions in `root`, with carrier or the reason against
    one."""
    found = []
    for module in root.modules():
        kind = type(module)  # PyTorch's other norms are of batches, groups, …
        is_named = (
            "norm" in kind.__name__.lower()
            and not kind.__module__.startswith("torch.")
            and not module._modules
        )
        if (is_named or isinstance(module, (nn.LayerNorm, nn.RMSNorm))) and not issubclass(
            kind, TENorm
        ):
            found.append(_norm(module, in_eval))
    return found


def _norm(module: nn.Module, in_eval: bool) -> Norm:
    formula = {nn.LayerNorm: LAYER_NORM, nn.RMSNorm: RMS_NORM}.get(type(module))
    result = _obstacle(module) or ((formula, module.eps) if formula else _tried(module))
    if isinstance(result, str):
        return Norm(module, None, result)
    carrier = object.__new__(_class_for(type(module)))
    added = {"te_norm": _te_norm(module, *result), "te_modes": Modes(), "te_in_eval": in_eval}
    carrier.__dict__.update(nn.Module().__dict__, **added)
    return Norm(module, carrier, None)


def _obstacle(module: nn.Module) -> str | None:
    """Return the reason against TransformerEngine's form apart from the formula, or None."""
    weight = module._parameters.get("weight")
    if weight is None:
        return "it has no weight, and TransformerEngine's norms always have one"
    if isinstance(module, nn.LayerNorm) and module.bias is None:
        return "it has no bias, and TransformerEngine's LayerNorm always has one"
    if type(module) is nn.RMSNorm and module.eps is None:
        return "eps=None follows the input's dtype, and TransformerEngine's is a number"
    others = [name for name, value in module._parameters.items() if value is not None]
    others = [name for name in others if name not in ("weight", "bias")]
    if others or any(buffer is not None for buffer in module._buffers.values()):
        return f"it holds more than a weight and a bias: {', '.join([*others, *module._buffers])}"
    if weight.dtype not in COMPUTE_DTYPES:
        return f"weight dtype {weight.dtype} is not one of fp32, bf16, fp16"
    if not type(weight).__module__.startswith("torch."):
        return f"its weight is a {type(weight).__name__}"
    return forward_obstacle(module)


def _tried(module: nn.Module) -> tuple[str, float] | str:
    """Return (formula, eps) of a module of any class, or the reason against it."""
    parameters = list(inspect.signature(type(module).forward).parameters)
    if len(parameters) != 2:
        return f"its forward takes {', '.join(parameters[1:])}, and not one tensor alone"
    try:
        formulas = (RMS_NORM, CENTERED) if module._parameters.get("bias") is None else (LAYER_NORM,)
        numbers = {
            value
            for value in module.__dict__.values()
            if isinstance(value, float) and 0 < value < 0.1
        }
        for eps, formula in itertools.product(numbers, formulas):
            if all(_follows(module, formula, eps, training) for training in (True, False)):
                return formula, eps
    except Exception as error:
        return f"it could not be tried on a small FP32 input: {error}"
    return "it computes neither LayerNorm nor RMSNorm with an eps that it holds"


@torch.no_grad()
def _follows(module: nn.Module, formula: str, eps: float, training: bool) -> bool:
    """Return True if a copy of the module with other Parameters computes the formula in FP32, on
    the CPU."""
    # rows from far below to far above sqrt(eps), so that eps counts, and with a mean. Two sums of
    # `features` squares in FP32 differ by far less than 1e-5, and another eps or formula by more
    generator = torch.Generator().manual_seed(0)
    shape = full_shape(module.weight)
    row_sizes = math.sqrt(eps) * torch.tensor([0.3, 1.0, 3.0, 1e3], device="cpu").reshape(
        4, *(1 for _ in shape)
    )
    x = (torch.randn(4, *shape, generator=generator, device="cpu") + 0.5) * row_sizes
    names = [name for name, value in module._parameters.items() if value is not None]
    random = {name: torch.randn(shape, generator=generator, device="cpu") for name in names}
    trial = copy.copy(module)
    trial.__dict__ = {**module.__dict__, "training": training}
    trial._parameters = {
        **module._parameters,
        **{name: nn.Parameter(value) for name, value in random.items()},
    }
    with torch.autocast("cpu", enabled=False):
        result = type(module).forward(trial, x)
    expected = _formula(formula, x, random["weight"], random.get("bias"), eps)
    return result.dtype == x.dtype and torch.allclose(result, expected, rtol=1e-5, atol=1e-6)


def _formula(
    formula: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    dimensions = tuple(range(-weight.dim(), 0))
    if formula == LAYER_NORM:
        x = x - x.mean(dimensions, keepdim=True)
    y = x * (x.square().mean(dimensions, keepdim=True) + eps).rsqrt()
    y = y * (1 + weight if formula == CENTERED else weight)
    return y if bias is None else y + bias


def _te_norm(module: nn.Module, formula: str, eps: float) -> nn.Module:
    """Return TransformerEngine's norm on the Parameters of the module."""
    import transformer_engine.pytorch as te

    kind = te.LayerNorm if formula == LAYER_NORM else te.RMSNorm
    shape, is_centered = tuple(full_shape(module.weight)), formula == CENTERED
    norm = kind(shape, eps=eps, zero_centered_gamma=is_centered, device="meta")
    norm.__dict__["_parameters"] = module._parameters
    return norm


class TENorm:
    """Mixed into the class of a norm."""

    te_norm: nn.Module
    """TransformerEngine's, no child: it shares the Parameters."""
    te_modes: Modes
    te_in_eval: bool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        in_use = self.te_modes.is_training(self) or self.te_in_eval
        if (
            not in_use
            or result_dtype(x) not in COMPUTE_DTYPES
            or not x.is_floating_point()
            or x.numel() == 0
        ):
            return super().forward(x)
        return self._in_te(x)

    @torch.compiler.disable
    def _in_te(self, x: torch.Tensor) -> torch.Tensor:
        from .recipes import refuse_cpu

        refuse_cpu(x)
        self.te_norm.__dict__["_parameters"] = self._parameters  # a copy may have others
        y = self.te_norm.forward(x)
        # no view, as with PyTorch's own: FSDP2 warns of views as outputs, and autograd may refuse
        # to change them
        return torch.ops.aten._unsafe_view(y, y.shape)


@functools.cache
def _class_for(original: type[nn.Module]) -> type[nn.Module]:
    members = {"te_original": original, "__module__": __name__}
    return _Swapped(f"TE{original.__name__}", (TENorm, original), members)


class _Swapped(ABCMeta):
    """The metaclass of the swapped norms. No name imports them, so pickles hold the argument of
    `_class_for`."""


def _reduce(swapped: _Swapped):
    original = swapped.te_original
    # of a subclass
    return (_class_for, (original,)) if swapped is _class_for(original) else swapped.__qualname__


copyreg.pickle(_Swapped, _reduce)
