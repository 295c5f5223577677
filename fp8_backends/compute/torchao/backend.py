"""The `ao` backend: TorchAO's float8 linear layer on the model's own Parameters.

TorchAO saves the input in high precision for backward, so it saves no memory. This module names the
sizes that a GPU cannot multiply, mends crashes, and keeps the optimizer's Parameters under FSDP2's
FP8 gathering.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import threading
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...errors import BackendUnavailableError, RecipeError
from ...formats.formats import FORMATS, Format
from ...formats.scaling import INPUT, WEIGHT, Blocks, scale_inv_of, tensor_amax
from ...tensors.sharded_tensor import is_distributed
from ...tensors.statistics import Cast
from .. import hardware
from ..fields import Field
from ..hardware import Availability
from ..interface import ALIGNMENT, Compute, Recipe
from ..products import exact_product
from ..refusals import note_whether_cut, part_obstacle
from . import CASTS, scaling_of

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig

    from .linear import AOProducts

CONFIG_OPTIONS = ("pad_inner_dim", "enable_fsdp_float8_all_gather")
"""Recipe fields with the name of a field of `Float8LinearConfig`."""


class TorchAOCompute(Compute):
    """`torchao.float8`, by one of its recipes or by the user's `Float8LinearConfig`."""

    name = "ao"
    scalings: tuple[str, ...] = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
    default_scaling = "tensorwise"
    unnamed_scalings: tuple[str, ...] = ("custom",)
    fields: tuple[Field | str, ...] = ("config", *CONFIG_OPTIONS, "fast_accumulation")
    casts_by = "TorchAO's formulas for the same values"
    takes_transposed = True

    def availability(self) -> Availability:
        if importlib.util.find_spec("torchao") is None:
            return Availability(False, "TorchAO is not installed", "pip install torchao")
        version = hardware.version("torchao")
        if _products_are_emulated():
            return Availability(
                True, f"torchao {version}, emulated: this GPU has no FP8 products, bf16 is faster"
            )
        return Availability(
            True, f"torchao {version} on {'cuda' if torch.cuda.is_available() else 'cpu'}"
        )

    def check(self, recipe: Recipe) -> None:
        config = recipe.config
        if config is None and recipe.scaling == "custom":
            raise RecipeError("ao:custom stands for a Float8LinearConfig of your own: pass config=")
        for field in CONFIG_OPTIONS if config is not None else ():
            given = getattr(recipe, field) if field in recipe.given else None
            if given is not None and given != getattr(config, field):
                raise RecipeError(
                    f"{field}={given} and config.{field}={getattr(config, field)} disagree: a "
                    f"config is used as it is, so say it there and leave {field} out"
                )
        if (
            config is not None
            and "scaling" in recipe.given
            and recipe.scaling != (casts := scaling_of(config))
        ):
            raise RecipeError(
                f"ao:{recipe.scaling} and a config with {casts} casts disagree: leave one of the "
                "two out"
            )
        if config is not None and recipe.fast_accumulation is not True:
            raise RecipeError(
                "fast_accumulation and config: a config is used as it is, so set its "
                "gemm_config_output=Float8GemmConfig(use_fast_accum=False) and leave the field out"
            )
        if asks_for_all_gather(recipe) and recipe.scaling != "tensorwise":
            raise RecipeError(
                "enable_fsdp_float8_all_gather: TorchAO gathers FP8 weights with ao:tensorwise "
                f"only, not with ao:{recipe.scaling}; drop one of the two"
            )

    def switches(self, recipe: Recipe) -> tuple[str, ...]:
        return () if asks_for_all_gather(recipe) else ("bf16",)

    def switch(self, layer: AOProducts, recipe: Recipe | None) -> None:
        layer.ao_paused = recipe is None

    def gathers_codes(self, recipe: Recipe) -> bool:
        return asks_for_all_gather(recipe)

    def unfit(self, linear: nn.Linear, recipe: Recipe) -> str | None:
        if (reason := super().unfit(linear, recipe)) is not None:
            return reason
        sizes, unaligned = (
            f"{linear.in_features} -> {linear.out_features}",
            f"not multiples of {ALIGNMENT}",
        )
        if linear.in_features % ALIGNMENT or linear.out_features % ALIGNMENT:
            return f"{sizes} are {unaligned}, and TorchAO cannot pad them"
        return part_obstacle(
            linear, linear.weight, ALIGNMENT, f"{unaligned}, and TorchAO cannot pad them"
        )

    def new_shared(self, root: nn.Module, recipe: Recipe) -> Float8LinearConfig:
        """Return the configuration of all layers of this model."""
        in_process_group = torch.distributed.is_available() and torch.distributed.is_initialized()
        if asks_for_all_gather(recipe) and not in_process_group:
            raise BackendUnavailableError(
                "enable_fsdp_float8_all_gather=True gathers the weights of FSDP2 in FP8, and this "
                "is one process without a process group: leave the field out, or start several "
                "ranks and shard with FSDP2"
            )
        config = linear_config(recipe)
        on_cpu = any(parameter.device.type == "cpu" for parameter in root.parameters())
        if on_cpu or not hardware.has_gpu():
            mend_cpu_product()
        if (
            on_cpu
            and scaling_of(config) != "tensorwise"
            and not config.emulate
            and not cpu_multiplies_rowwise()
        ):
            raise BackendUnavailableError(
                f"{recipe.name} on a CPU: torch {torch.__version__} has no rowwise FP8 product "
                "there; install torch 2.13 or newer, or use native:rowwise, which makes it by "
                "other means"
            )
        return config

    def build(self, linear: nn.Linear, recipe: Recipe, shared: Float8LinearConfig) -> AOProducts:
        from .linear import AOLinear

        # `attach` arranges it, and leaves the Parameters in place
        if shared.enable_fsdp_float8_all_gather:
            shared = replace(shared, enable_fsdp_float8_all_gather=False)
        layer = AOLinear.from_float(linear, shared)
        note_whether_cut(layer)
        return layer

    def turn_off_fast_accumulation(self, layer: AOProducts) -> None:
        gemm = replace(layer.config.gemm_config_output, use_fast_accum=False)
        layer.config = replace(layer.config, gemm_config_output=gemm)
        forward = layer.linear_mm_config.output._replace(use_fast_accum=False)
        layer.linear_mm_config = layer.linear_mm_config._replace(output=forward)

    def attach(self, root: nn.Module, recipe: Recipe, shared: Any) -> None:
        """Do as TorchAO's `convert_to_float8_training`, except for the swap of layers."""
        if shared.enable_fsdp_float8_all_gather:
            from .linear import gather_in_fp8

            gather_in_fp8(root)

    def after_optimizer_step(self, root: nn.Module) -> None:
        linear = sys.modules.get(f"{__package__}.linear")
        if linear is not None:
            linear.agree_scales(root)

    def is_converted(self, module: nn.Module) -> bool:
        linear = sys.modules.get(f"{__package__}.linear")
        return linear is not None and isinstance(module, linear.AOProducts)

    def engine(self, module: nn.Module) -> str:
        return "emulated" if module.config.emulate else "ao"

    def cast_of(self, module: AOProducts, tensor: int, values: torch.Tensor) -> Cast | None:
        """Return TorchAO's cast for fprop, or for dgrad of a gradient; None for a weight sharded or
        gathered in FP8."""
        from torchao.float8.config import ScalingGranularity, ScalingType
        from torchao.float8.float8_utils import amax_to_scale

        config = getattr(module.config, f"cast_config_{CASTS[tensor]}")
        is_plain = not is_distributed(values) and type(values.data) is torch.Tensor
        if config.scaling_type is ScalingType.DISABLED or not is_plain or module.ao_paused:
            return None
        values = values.detach()
        values = values.t() if tensor == WEIGHT and module.transposed_weight else values
        if tensor == INPUT and torch.is_autocast_enabled():
            values = values.to(torch.get_autocast_dtype("cuda"))  # as TorchAO's forward does
        matrix, fmt = values.reshape(-1, values.shape[-1]), FORMATS[config.target_dtype]
        amax = tensor_amax(matrix)

        def scale(amax: torch.Tensor, fmt: Format) -> torch.Tensor:
            power_of_two = module.config.round_scales_to_power_of_2
            return amax_to_scale(amax, fmt.dtype, round_scales_to_power_of_2=power_of_two)

        if config.scaling_granularity is ScalingGranularity.AXISWISE:
            return Cast(matrix, fmt, amax, blocks=Blocks(1, None, scale, scale_inv_of))
        return Cast(matrix, fmt, amax, scale(amax, fmt))

    def high_precision_products(self, recipe: Recipe) -> tuple[str, ...]:
        from .linear import products_in_high_precision

        return products_in_high_precision(linear_config(recipe))


def linear_config(recipe: Recipe) -> Float8LinearConfig:
    """Return TorchAO's configuration for a resolved recipe: the user's own, if given.
    `pad_inner_dim` is on by default: it changes no number, and without it a GPU refuses token
    counts that are no multiple of 16."""
    if recipe.config is not None:
        if _products_are_emulated() and not recipe.config.emulate:
            raise BackendUnavailableError(
                "config: this GPU has no FP8 products, and the given Float8LinearConfig has "
                "emulate=False; give one with emulate=True, or use bf16, which is faster here"
            )
        return recipe.config
    from torchao.float8 import Float8LinearConfig

    return replace(
        Float8LinearConfig.from_recipe_name(recipe.scaling),
        pad_inner_dim=recipe.pad_inner_dim is not False,
        emulate=_products_are_emulated(),
        enable_fsdp_float8_all_gather=asks_for_all_gather(recipe),
    )


def asks_for_all_gather(recipe: Recipe) -> bool:
    """Return True if the user set `enable_fsdp_float8_all_gather`, unlike Accelerate's default."""
    if recipe.config is not None and recipe.config.enable_fsdp_float8_all_gather:
        return True
    return (
        bool(recipe.enable_fsdp_float8_all_gather)
        and "enable_fsdp_float8_all_gather" in recipe.given
    )


def cpu_multiplies_rowwise() -> bool:
    """Try the product: torch 2.11 has it only for CUDA, 2.13 for CPUs too."""
    codes = torch.zeros(16, 16, dtype=torch.float8_e4m3fn, device="cpu")
    scales = torch.ones(16, 1, device="cpu")
    try:
        torch._scaled_mm(
            codes, codes.t(), scale_a=scales, scale_b=scales.t(), out_dtype=torch.bfloat16
        )
    except RuntimeError:
        return False
    return True


def _products_are_emulated() -> bool:
    return hardware.has_gpu() and not hardware.fp8_products()  # a CPU has `torch._scaled_mm`


_lock = threading.Lock()


def mend_cpu_product() -> None:
    """Replace the CPU kernel of `torch._scaled_mm` in this process, if this CPU needs it. Repeating
    it does nothing.

    On a CPU with AMX and without AMX-FP16, oneDNN's reference loop takes 75 s for 1024 x 2048 x
    2048, and FP32 0.025 s. TorchAO's `emulate` would leave no FP8 product in compiled code for the
    proof.
    """
    if not hardware.cpu_scaled_mm():
        with _lock:
            _cpu_product()


def restore_cpu_product() -> None:
    """Restore PyTorch's own kernel."""
    if _cpu_product.cache_info().currsize:
        _cpu_product()._destroy()
        _cpu_product.cache_clear()


@functools.cache
def _cpu_product() -> torch.library.Library:
    """Register our kernels, and return the library that holds them."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # of the override
        library.impl("_scaled_mm", _scaled_mm, "CPU", allow_override=True)
        library.impl("_scaled_mm.out", _scaled_mm_out, "CPU", allow_override=True)
    return library


def _scaled_mm(
    a, b, scale_a, scale_b, bias=None, scale_result=None, out_dtype=None, use_fast_accum=False
) -> torch.Tensor:
    """Multiply a [m, k] and b [k, n] in FP8 by an FP32 product, PyTorch's definition for other
    CPUs."""
    if scale_a.numel() == scale_b.numel() == 1:
        scale_a, scale_b = scale_a.reshape(()), scale_b.reshape(())
    product = exact_product(a, scale_a, b.t(), scale_b.t(), torch.float32, torch.float32)
    if bias is not None:
        product += bias
    out_dtype = a.dtype if out_dtype is None else out_dtype
    if scale_result is not None and out_dtype.itemsize == 1:
        product /= scale_result
    return product.to(out_dtype)


def _scaled_mm_out(
    a,
    b,
    scale_a,
    scale_b,
    bias=None,
    scale_result=None,
    out_dtype=None,
    use_fast_accum=False,
    *,
    out,
):
    result = _scaled_mm(a, b, scale_a, scale_b, bias, scale_result, out_dtype or out.dtype)
    return out.resize_(result.shape).copy_(result)
