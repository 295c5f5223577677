"""What the rules look at, and what a rule is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from ...recipes.handlers import Recipe

if TYPE_CHECKING:
    from ...compute.chips import Chip
    from ..conversion import ConversionReport

Severity = Literal["error", "warning", "info"]
Parallel = Literal["none", "ddp", "fsdp1", "fsdp2", "deepspeed", "megatron", "tpu"]
Compiled = Literal["none", "full", "regional"]


@dataclass(frozen=True)
class Setup:
    """A recipe on a machine, with a model and what surrounds it. None: not known, and then no rule asks."""

    recipe: Recipe
    parallel: Parallel
    compiled: Compiled
    gpu: bool
    fp8_products: bool
    bf16_products: bool
    """In hardware, of the GPU or of the CPU that trains."""
    chip: Chip
    """Of this machine, as the hardware table knows it."""
    capabilities: tuple[tuple[int, int], ...]
    """The CUDA capability of every visible GPU; empty without an NVIDIA GPU."""
    cuda: tuple[int, int] | None
    """Release of the CUDA that this PyTorch was built for."""
    torch: tuple[int, int]
    """Release of PyTorch."""
    backward_override: str = ""
    """What NVTE_BACKWARD_OVERRIDE in the environment tells TransformerEngine."""
    activation_checkpointing: bool | None = None
    attention: str | None = None
    """As transformers names it: eager, sdpa, flash_attention_2, flex_attention, …"""
    sequence_length: int | None = None
    vocab_size: int | None = None
    optimizer: str | None = None
    """A name as transformers' and Axolotl's `optimizer` has it, or a class name."""
    cpu_ram_efficient_loading: bool | None = None
    world_size: int | None = None
    zero_stage: int | None = None
    """Of DeepSpeed."""
    tensor_parallel: int | None = None
    """Ranks that share one layer."""
    quantized_base: bool | None = None
    """Whether layers were loaded in 4 or 8 bits by bitsandbytes."""
    parameters: int | None = None
    """How many numbers the model's parameters hold."""
    linear_sizes: tuple[tuple[int, int], ...] = ()
    """(in_features, out_features) of the layers that would run in FP8; empty without a model."""
    linear_trains: bool = False
    """Whether a layer that FP8 takes has a weight that trains; False without a model."""
    expected: ConversionReport | None = None
    """What conversion would do to the model; None without one."""
    only_weights_train: bool = False
    """Whether what trains is nothing but weights of layers that would be converted."""
    persistent_buffers: tuple[str, ...] = ()
    """Names of the model's buffers that a state dict holds."""

    @property
    def capability(self) -> tuple[int, int] | None:
        """The lowest."""
        return min(self.capabilities, default=None)

    @property
    def gradient_comm(self) -> str:
        """How gradients travel between ranks, "fp8" or "plain"."""
        return self.recipe.gradient_comm or ("plain" if self.recipe.level == "O0" else "fp8")

    @property
    def has_level(self) -> bool:
        return self.recipe.level != "O0"


class Rule(NamedTuple):
    """One thing that is known to go wrong or slow."""

    name: str
    severity: Severity
    applies: Callable[[Setup], bool]
    reason: str
    fix: str
    here: Callable[[Setup], str] = lambda setup: ""
    """What of this setup made the rule apply, where it is not plain from the reason."""


def number(amount: int) -> str:
    """A count of parameters as people say it."""
    return f"{amount / 1e9:.3g} billion" if amount >= 1e9 else f"{amount / 1e6:.3g} million"


def release(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
