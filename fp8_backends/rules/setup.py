"""Define a setup, the input of the rules, and a rule."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple, get_args

from ..compute import chips, hardware
from ..compute.chips import Cell, Chip
from ..compute.fields import check_known
from ..convert.weight_products import ConversionReport
from ..recipes.handlers import Recipe

Severity = Literal["error", "warning", "info"]
Parallel = Literal["none", "ddp", "fsdp1", "fsdp2", "deepspeed", "megatron", "tpu"]
Compiled = Literal["none", "full", "regional"]


@dataclass(frozen=True)
class Machine:
    """The chip for training, with its libraries."""

    chip: Chip
    """The least capable one of a machine with different GPUs."""
    capabilities: tuple[tuple[int, int], ...] = ()
    """CUDA capability of every visible GPU; empty without an NVIDIA GPU."""
    cuda: tuple[int, int] | None = None
    """CUDA release of PyTorch; None: new enough, or not CUDA."""
    bf16_products: bool = True
    """The GPU, or a CPU that trains, multiplies bf16 in hardware."""
    own_scaled_mm: bool = True
    """PyTorch itself computes the FP8 products of a CPU that trains; otherwise this package does,
    rowwise ones too."""
    torch: tuple[int, int] = field(default_factory=hardware.torch_release)
    backward_override: str = field(
        default_factory=lambda: os.environ.get("NVTE_BACKWARD_OVERRIDE", "")
    )

    @property
    def has_gpu(self) -> bool:
        return self.chip is not chips.CPU

    @classmethod
    def this(cls) -> Machine:
        fast_bf16 = hardware.has_gpu() or hardware.cpu_bf16()
        libraries = hardware.cuda_release(), fast_bf16, hardware.cpu_scaled_mm()
        return cls(hardware.chip(), tuple(hardware.capabilities()), *libraries)

    @classmethod
    def with_chip(cls, name: str) -> Machine:
        """Return a machine with this chip, a name for `chips.product_named`, and new libraries."""
        product = chips.product_named(name)
        capabilities = (product.gpu,) if isinstance(product.gpu, tuple) else ()
        return cls(
            product.chip, capabilities, bf16_products=product.gpu is not None or hardware.cpu_bf16()
        )


@dataclass(frozen=True)
class Setup:
    """A recipe on a machine, with a model and its surroundings. None means unknown, and matches no
    rule. `validate` explains the fields it has as arguments. Raises `RecipeError` for an unknown
    word."""

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
    zero_offload: bool | None = None
    """DeepSpeed keeps optimizer states or weights on the CPU or a disk."""
    engine_bf16: bool | None = None
    """DeepSpeed's configuration has bf16 around FP8."""
    unused_engine: str | None = None
    """The engine of a plug-in or launcher that Accelerate leaves out."""
    tensor_parallel: int | None = None
    whole_layers: bool = False
    """The ranks share whole layers and cut none (expert parallelism)."""
    comm_hook: str | None = None
    accumulation_steps: int | None = None
    max_grad_norm: float | None = None
    quantized_base: bool | None = None
    linear_sizes: tuple[tuple[int, int], ...] = ()
    """(in_features, out_features) of the layers in FP8; empty without a model."""
    linear_trains: bool = False
    """The weight of a layer in FP8 trains; False without a model."""
    codes_that_train: tuple[str, ...] = ()
    """Names of layers stored as codes by an FP8 checkpoint and not frozen."""
    expected: ConversionReport | None = None
    only_weights_train: bool = False
    persistent_buffers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, words in (("parallel", Parallel), ("compiled", Compiled)):
            if (word := getattr(self, name)) is not None:
                check_known(name, word, get_args(words))

    @property
    def has_level(self) -> bool:
        return self.recipe.level != "O0"

    @property
    def is_compiled(self) -> bool:
        return self.compiled in ("full", "regional")

    @property
    def cell(self) -> Cell | None:
        """Support of the recipe's backend on the chip; None for a backend of another package."""
        return chips.cell_of(f"{self.recipe.compute}:{self.recipe.scaling}", self.machine.chip)

    @property
    def state(self) -> chips.State | None:
        """The same with the machine's CUDA and PyTorch, unless new enough: "FP8", "emulated" or
        "refused"."""
        return self.cell and self.cell.state_with(
            self.machine.cuda, self.machine.cuda and self.machine.torch
        )


class Rule(NamedTuple):
    severity: Severity
    is_raised: Callable[[Setup], bool]
    """True if `refuse` raises the rule where it applies."""
    name: str
    applies: Callable[[Setup], bool | str]
    """A false value if the rule does not apply; otherwise the cause in this setup, or True if the
    reason says it."""
    reason: str
    fix: str

    def reason_in(self, setup: Setup) -> str:
        cause = self.applies(setup)
        return f"{self.reason} (here: {cause})" if cause and isinstance(cause, str) else self.reason


refused = partial(Rule, "error", lambda setup: True)
error, warning, info = (
    partial(Rule, severity, lambda setup: False) for severity in get_args(Severity)
)
