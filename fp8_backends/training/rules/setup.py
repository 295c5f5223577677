"""What the rules look at, and what a rule is."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from ...compute import chips, hardware
from ...compute.chips import Cell, Chip
from ...compute.fields import check_known
from ...recipes.handlers import Recipe

if TYPE_CHECKING:
    from ..weight_products import ConversionReport

Severity = Literal["error", "warning", "info"]
Parallel = Literal["none", "ddp", "fsdp1", "fsdp2", "deepspeed", "megatron", "tpu"]
Compiled = Literal["none", "full", "regional"]


@dataclass(frozen=True)
class Machine:
    """The chip that trains, with its libraries."""

    chip: Chip
    """Where the GPUs of a machine differ, the one that does least."""
    capabilities: tuple[tuple[int, int], ...] = ()
    """The CUDA capability of every visible GPU; empty without an NVIDIA GPU."""
    cuda: tuple[int, int] | None = None
    """The release of CUDA that PyTorch was built for; None: new enough, or not CUDA."""
    bf16_products: bool = True
    """Whether the GPU, or the CPU that trains, multiplies bf16 in hardware."""
    own_scaled_mm: bool = True
    """Whether FP8 products of a CPU that trains are PyTorch's own; else they are mended, those of rows too."""
    torch: tuple[int, int] = field(default_factory=hardware.torch_release)
    """The release of PyTorch."""
    backward_override: str = field(default_factory=lambda: os.environ.get("NVTE_BACKWARD_OVERRIDE", ""))
    """What the environment tells TransformerEngine."""

    @property
    def has_gpu(self) -> bool:
        return self.chip is not chips.CPU

    @classmethod
    def this(cls) -> Machine:
        """The machine that runs this process."""
        fast_bf16 = hardware.has_gpu() or hardware.cpu_bf16()
        libraries = hardware.cuda_release(), fast_bf16, hardware.cpu_scaled_mm()
        return cls(hardware.chip(), tuple(hardware.capabilities()), *libraries)

    @classmethod
    def with_chip(cls, name: str) -> Machine:
        """A machine with this chip, by a name that `chips.product_named` takes, and new libraries."""
        product = chips.product_named(name)
        capabilities = (product.gpu,) if isinstance(product.gpu, tuple) else ()
        return cls(product.chip, capabilities, bf16_products=product.gpu is not None or hardware.cpu_bf16())


@dataclass(frozen=True)
class Setup:
    """A recipe on a machine, with a model and what surrounds it. None means not known, and then no rule asks.
    `validate` explains the fields that it has as arguments. Raises `RecipeError` for a word that no rule knows."""

    recipe: Recipe
    machine: Machine
    parallel: Parallel | None = None
    compiled: Compiled | None = None
    activation_checkpointing: bool | None = None
    attention: str | None = None
    sequence_length: int | None = None
    vocab_size: int | None = None
    optimizer: str | None = None
    cpu_ram_efficient_loading: bool | None = None
    world_size: int | None = None
    zero_stage: int | None = None
    engine_bf16: bool | None = None
    """Whether DeepSpeed's configuration has bf16 around FP8."""
    tensor_parallel: int | None = None
    experts_alone: bool = False
    """Whether these ranks share out whole experts and nothing else (expert parallelism)."""
    comm_hook: str | None = None
    """The communication hook that Accelerate would register with DDP."""
    accumulation_steps: int | None = None
    """Backward passes for each step of the optimizer (Accelerate's `gradient_accumulation_steps`)."""
    max_grad_norm: float | None = None
    """The norm to which gradients are clipped; 0: they are not."""
    quantized_base: bool | None = None
    parameters: int | None = None
    """How many numbers the model's parameters hold."""
    linear_sizes: tuple[tuple[int, int], ...] = ()
    """(in_features, out_features) of the layers that would run in FP8; empty without a model."""
    linear_trains: bool = False
    """Whether a layer that FP8 takes has a weight that trains; False without a model."""
    codes_that_train: tuple[str, ...] = ()
    """Names of layers that an FP8 checkpoint stores as codes, and that are not frozen."""
    expected: ConversionReport | None = None
    """What conversion would do to the model; None without one."""
    only_weights_train: bool = False
    """Whether what trains is nothing but weights of layers that would be converted."""
    persistent_buffers: tuple[str, ...] = ()
    """Names of the model's buffers that a state dict holds."""

    def __post_init__(self) -> None:
        for what, words in (("parallel", Parallel), ("compiled", Compiled)):
            if (word := getattr(self, what)) is not None:
                check_known(what, word, get_args(words))

    @property
    def has_level(self) -> bool:
        return self.recipe.level != "O0"

    @property
    def is_compiled(self) -> bool:
        return self.compiled in ("full", "regional")

    @property
    def cell(self) -> Cell | None:
        """What the recipe's backend does on the chip; None for a backend that is not of this package."""
        return chips.cell_of(f"{self.recipe.compute}:{self.recipe.scaling}", self.machine.chip)

    @property
    def state(self) -> chips.State | None:
        """The same with the machine's release of CUDA: "FP8", "emulated" or "refused"."""
        return self.cell and self.cell.state_with(self.machine.cuda)


class Rule(NamedTuple):
    """One thing that is known to go wrong or slow."""

    name: str
    severity: Severity
    applies: Callable[[Setup], bool]
    reason: str
    fix: str
    detail: Callable[[Setup], str] = lambda setup: ""
    """What of this setup made the rule apply, where it is not plain from the reason."""
    is_raised: Callable[[Setup], bool] = lambda setup: False
    """Whether `refuse` raises it, where it applies."""

    def reason_in(self, setup: Setup) -> str:
        detail = self.detail(setup)
        return f"{self.reason} (here: {detail})" if detail else self.reason


def always(setup: Setup) -> bool:
    return True


def number(amount: int) -> str:
    """A count of parameters as people say it."""
    return f"{amount / 1e9:.3g} billion" if amount >= 1e9 else f"{amount / 1e6:.3g} million"
