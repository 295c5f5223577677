"""Made from `handlers.py` and the declared fields by tests/house/handler_stub.py."""

from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from typing import Any, ClassVar

from accelerate.utils import KwargsHandler
from torch import distributed, nn
from torchao.float8 import Float8LinearConfig

from ..compute.fields import Field
from .specs import Spec
from .strings import AUTO as AUTO

class Recipe(KwargsHandler):  # type: ignore[misc]  # Accelerate tells no types
    """What every recipe has. None stands for "not given"; a recipe that was made has every default filled in.

    A recipe is fixed once it is made. Two are equal when they mean the same, however they were written. Beside its
    fields it has `compute` ("native", "te", "ao", or a registered name), `scaling`, `level` ("O0" to "O4"), `name`
    (the canonical backend string), `given` (the names of what the user gave) and the fields of every other backend,
    at their defaults. A process group in it is described by its ranks.
    """

    backend_name: ClassVar[str]
    further_fields: ClassVar[Mapping[str, Any]]
    @property
    def name(self) -> str:
        """The canonical backend string; `auto` until `resolve` has picked one."""
    @property
    def comm(self) -> str:
        """How gradients travel between ranks, "fp8" or "plain": `gradient_comm`, by default as the level has it."""
    @property
    def shares_states(self) -> bool:
        """Whether under DDP the optimizer's states of each weight, and its master or residual, lie on one rank."""
    def to_kwargs(self) -> dict[str, Any]:
        """The fields that were given: `type(recipe)(**recipe.to_kwargs()) == recipe`."""
    def to_dict(self) -> dict[str, Any]:
        """Every field with its value."""
    backend: str | None
    compute: str
    scaling: str | None
    level: str
    opt_level: str
    given: frozenset[str]
    use_autocast_during_eval: bool
    margin: int
    interval: int
    fp8_format: str
    amax_history_len: int
    amax_compute_algo: str
    override_linear_precision: tuple[bool, bool, bool]
    use_mxfp8_block_scaling: bool
    fp8_params: bool
    fp8_group: distributed.ProcessGroup | None
    fuse_norms: bool
    fp8_dpa: bool
    fp8_mha: bool
    fused_head: bool
    config: Float8LinearConfig | None
    pad_inner_dim: bool | None
    enable_fsdp_float8_all_gather: bool | None
    auto_filter: bool
    fuse_activations: bool
    weight_comm: str
    rounding: str
    exp_avg_scaling: str
    implementation: str
    shard_states: bool
    gradient_release: bool
    include: tuple[str, ...] | None
    also_include: tuple[str, ...] | None
    exclude: tuple[str, ...] | None
    module_filter_func: Callable[[nn.Module, str], bool] | None
    autocast_dtype: str
    gradient_comm: str | None
    activation_comm: str
    on_unproven: str
    saved_activations: str
    monitor_every: int
    monitor_layers: tuple[str, ...] | None
    monitor_file: str
    guard: str
    guard_every: int
    guard_steps: int

class TERecipeKwargs(Recipe):
    """TransformerEngine's products: `te:delayed`, or the scaling named. The fields of Accelerate's handler.

    Args:
        use_autocast_during_eval (True, False; default False):
            FP8 products in evaluation too; by default evaluation runs in high precision. Read by native, te.
        margin (a whole number from -64 to 64; default 0):
            The scale is divided by 2**margin. Read by native:delayed, te:delayed.
        interval (a whole number from 1 to 1000000; default 1):
            Steps between two computations of the scale (te takes 1 alone). Read by native:delayed, te:delayed.
        fp8_format (HYBRID, E4M3; default 'HYBRID'; 'E4M3' with rowwise, blockwise, mxfp8):
            HYBRID is E4M3 forward and E5M2 for gradients; E4M3 is E4M3 everywhere. Read by native, te.
        amax_history_len (a whole number from 1 to 1000000; default 1024):
            Steps that the amax history holds. Read by native:delayed, te:delayed.
        amax_compute_algo (most_recent, max; default 'most_recent'):
            The scale follows the most recent amax, or the largest of the history. Read by native:delayed, te:delayed.
        override_linear_precision (three bools; default (False, False, False)):
            Which of fprop, dgrad and wgrad stay in high precision (te takes wgrad alone). Read by native, te.
        use_mxfp8_block_scaling (True, False; default False):
            True is the same as scaling="mxfp8". Read by every backend.
        fp8_params (True, False; default False):
            Weights that do not train are stored in FP8, about 1 byte an element. Not with a level, which stores weights
            itself. Read by native, te.
        fp8_group:
            A torch.distributed.ProcessGroup: the ranks over which an amax is reduced (default: all). Read by
            te:delayed.
        fuse_norms (True, False; default False):
            A norm that one Linear alone reads is computed by that Linear's kernel. Read by te.
        fp8_dpa (False; default False):
            Attention in FP8, which this package does not have. Read by te.
        fp8_mha (False; default False):
            As fp8_dpa. Read by te.
        fused_head (True, False; default False):
            The output head and its loss are computed in chunks of tokens, and logits are never whole. The head stays in
            high precision unless also_include or include names it (native). Read by native, te, ao.
        scaling:
            The scaling rule, if the backend string does not name it: delayed, dynamic, rowwise, blockwise, mxfp8,
            window and so on. Read by every backend.
        include:
            Name patterns of layers to convert (fnmatch, over the full name; without a dot also any one part of it),
            separated by commas. Read by every backend.
        also_include:
            Name patterns of layers to convert beside those that are converted by default, such as the output head
            (lm_head), separated by commas. Not with include or module_filter_func, which choose all layers. Read by
            every backend.
        exclude:
            Name patterns of layers to keep in high precision, separated by commas. Read by every backend.
        module_filter_func:
            A function (module, name) -> whether to convert the module. Read by every backend.
        autocast_dtype (bf16, fp16, fp32; default 'bf16'):
            What runs around FP8 under Accelerate (on a CPU without bf16 products the default is fp32). Read by every
            backend.
        gradient_comm (fp8, plain):
            How gradients travel between ranks (default: fp8 at a level above O0, else plain). Read by every backend.
        activation_comm (plain, fp8; default 'plain'):
            How activations travel between ranks in forward: fp8 is E4M3 codes with their scales, of sequence-parallel
            activations that tensor parallelism gathers and of tokens that expert parallelism sends to their experts
            (native). Read by every backend.
        on_unproven (raise, warn; default 'raise'):
            What to do when no FP8 product ran in the first step. Read by every backend.
        saved_activations (off, fp8, fp8+attention; default 'off'):
            In what activations are kept for backward beside the codes of converted layers, such as those of norms and
            gates: fp8 keeps E4M3 codes, 33/32 bytes an element; fp8+attention those of attention, too. Read by every
            backend.
        monitor_every (a whole number from 0 to 1000000; default 0):
            Optimizer steps from one sample of the statistics of FP8 tensors to the next; 0: none are taken. Read by
            every backend.
        monitor_layers:
            Name patterns of the FP8 layers whose statistics are taken, as for include, separated by commas (default:
            all). Read by every backend.
        monitor_file (default 'fp8_monitor.jsonl'):
            The file to which statistics are added, a line a sample. Read by every backend.
        guard (off, warn, skip, stop; default 'off'):
            What to do when a step goes wrong: warn; skip leaves the step out; stop raises an error. Read by every
            backend.
        guard_every (a whole number from 1 to 1000000; default 100):
            Steps from one comparison of the replicas of all ranks to the next, where guard is not off. Read by every
            backend.
        guard_steps (a whole number from 1 to 1000000; default 50):
            Steps that guard=skip leaves out in a row before it stops the training. Read by every backend.

    Raises:
        RecipeError: a value that its field does not take, or fields that do not go together.
    """

    def __init__(
        self,
        use_autocast_during_eval: bool | None = None,
        margin: int | None = None,
        interval: int | None = None,
        fp8_format: str | Enum | None = None,
        amax_history_len: int | None = None,
        amax_compute_algo: str | None = None,
        override_linear_precision: Sequence[bool] | str | None = None,
        use_mxfp8_block_scaling: bool | None = None,
        fp8_params: bool | None = None,
        fp8_group: distributed.ProcessGroup | None = None,
        fuse_norms: bool | None = None,
        fp8_dpa: bool | None = None,
        fp8_mha: bool | None = None,
        fused_head: bool | None = None,
        scaling: str | None = None,
        *,
        include: str | Collection[str] | None = None,
        also_include: str | Collection[str] | None = None,
        exclude: str | Collection[str] | None = None,
        module_filter_func: Callable[[nn.Module, str], bool] | None = None,
        autocast_dtype: str | None = None,
        gradient_comm: str | None = None,
        activation_comm: str | None = None,
        on_unproven: str | None = None,
        saved_activations: str | None = None,
        monitor_every: int | None = None,
        monitor_layers: str | Collection[str] | None = None,
        monitor_file: str | None = None,
        guard: str | None = None,
        guard_every: int | None = None,
        guard_steps: int | None = None,
    ) -> None: ...

class AORecipeKwargs(Recipe):
    """TorchAO's products: `ao:tensorwise`, or the scaling named. The fields of Accelerate's handler.

    Args:
        config:
            A torchao.float8.Float8LinearConfig, used as it is. Read by ao.
        pad_inner_dim (True, False):
            Pad products whose inner dimension is no multiple of 16 (on unless it is turned off). Read by ao.
        enable_fsdp_float8_all_gather (True, False):
            Gather weights in FP8 under FSDP2. Read by ao.
        scaling:
            The scaling rule, if the backend string does not name it: delayed, dynamic, rowwise, blockwise, mxfp8,
            window and so on. Read by every backend.
        auto_filter (True, False; default False):
            Leave layers in high precision that TorchAO finds too small to gain. Read by ao.
        fused_head (True, False; default False):
            The output head and its loss are computed in chunks of tokens, and logits are never whole. The head stays in
            high precision unless also_include or include names it (native). Read by native, te, ao.
        include:
            Name patterns of layers to convert (fnmatch, over the full name; without a dot also any one part of it),
            separated by commas. Read by every backend.
        also_include:
            Name patterns of layers to convert beside those that are converted by default, such as the output head
            (lm_head), separated by commas. Not with include or module_filter_func, which choose all layers. Read by
            every backend.
        exclude:
            Name patterns of layers to keep in high precision, separated by commas. Read by every backend.
        module_filter_func:
            A function (module, name) -> whether to convert the module. Read by every backend.
        autocast_dtype (bf16, fp16, fp32; default 'bf16'):
            What runs around FP8 under Accelerate (on a CPU without bf16 products the default is fp32). Read by every
            backend.
        gradient_comm (fp8, plain):
            How gradients travel between ranks (default: fp8 at a level above O0, else plain). Read by every backend.
        activation_comm (plain, fp8; default 'plain'):
            How activations travel between ranks in forward: fp8 is E4M3 codes with their scales, of sequence-parallel
            activations that tensor parallelism gathers and of tokens that expert parallelism sends to their experts
            (native). Read by every backend.
        on_unproven (raise, warn; default 'raise'):
            What to do when no FP8 product ran in the first step. Read by every backend.
        saved_activations (off, fp8, fp8+attention; default 'off'):
            In what activations are kept for backward beside the codes of converted layers, such as those of norms and
            gates: fp8 keeps E4M3 codes, 33/32 bytes an element; fp8+attention those of attention, too. Read by every
            backend.
        monitor_every (a whole number from 0 to 1000000; default 0):
            Optimizer steps from one sample of the statistics of FP8 tensors to the next; 0: none are taken. Read by
            every backend.
        monitor_layers:
            Name patterns of the FP8 layers whose statistics are taken, as for include, separated by commas (default:
            all). Read by every backend.
        monitor_file (default 'fp8_monitor.jsonl'):
            The file to which statistics are added, a line a sample. Read by every backend.
        guard (off, warn, skip, stop; default 'off'):
            What to do when a step goes wrong: warn; skip leaves the step out; stop raises an error. Read by every
            backend.
        guard_every (a whole number from 1 to 1000000; default 100):
            Steps from one comparison of the replicas of all ranks to the next, where guard is not off. Read by every
            backend.
        guard_steps (a whole number from 1 to 1000000; default 50):
            Steps that guard=skip leaves out in a row before it stops the training. Read by every backend.

    Raises:
        RecipeError: a value that its field does not take, or fields that do not go together.
    """

    def __init__(
        self,
        config: Float8LinearConfig | None = None,
        pad_inner_dim: bool | None = None,
        enable_fsdp_float8_all_gather: bool | None = None,
        scaling: str | None = None,
        auto_filter: bool | None = None,
        fused_head: bool | None = None,
        *,
        include: str | Collection[str] | None = None,
        also_include: str | Collection[str] | None = None,
        exclude: str | Collection[str] | None = None,
        module_filter_func: Callable[[nn.Module, str], bool] | None = None,
        autocast_dtype: str | None = None,
        gradient_comm: str | None = None,
        activation_comm: str | None = None,
        on_unproven: str | None = None,
        saved_activations: str | None = None,
        monitor_every: int | None = None,
        monitor_layers: str | Collection[str] | None = None,
        monitor_file: str | None = None,
        guard: str | None = None,
        guard_every: int | None = None,
        guard_steps: int | None = None,
    ) -> None: ...

class MSAMPRecipeKwargs(Recipe):
    """MS-AMP's levels on native products: `msamp:LEVEL`.

    Args:
        opt_level:
            The level, O0 (no level) to O4, if the backend string does not name it. Read by every backend.
        rounding (stochastic, nearest; default 'stochastic'):
            How stored weights and Adam states are rounded; nearest, MS-AMP's own, loses small updates. Read by levels
            O1, O2, O3, O4.
        exp_avg_scaling (tensor, block; default 'tensor'):
            One scale of the E4M3 exp_avg for the tensor, or one for each block of 128 elements, which keeps magnitudes
            apart that differ by more than 1e5 inside one tensor. Read by levels O2, O3.
        implementation (native, original; default 'native'):
            Of the levels: this package's own, or the package msamp where it is installed. Read by levels O1, O2, O3,
            O4.
        shard_states (True, False; default True):
            Under DDP masters, residuals and Adam states lie on one rank each: 2 + 5/N bytes an element at O3, not 7,
            and 2 + 3/N at O4, not 5. Read by levels O3, O4.
        gradient_release (True, False; default False):
            Each parameter is stepped inside backward, as soon as its gradient is complete, and the gradient is dropped:
            not with accumulation or clipping. Read by levels O1, O2, O3, O4.
        include:
            Name patterns of layers to convert (fnmatch, over the full name; without a dot also any one part of it),
            separated by commas. Read by every backend.
        also_include:
            Name patterns of layers to convert beside those that are converted by default, such as the output head
            (lm_head), separated by commas. Not with include or module_filter_func, which choose all layers. Read by
            every backend.
        exclude:
            Name patterns of layers to keep in high precision, separated by commas. Read by every backend.
        module_filter_func:
            A function (module, name) -> whether to convert the module. Read by every backend.
        autocast_dtype (bf16, fp16, fp32; default 'bf16'):
            What runs around FP8 under Accelerate (on a CPU without bf16 products the default is fp32). Read by every
            backend.
        gradient_comm (fp8, plain):
            How gradients travel between ranks (default: fp8 at a level above O0, else plain). Read by every backend.
        activation_comm (plain, fp8; default 'plain'):
            How activations travel between ranks in forward: fp8 is E4M3 codes with their scales, of sequence-parallel
            activations that tensor parallelism gathers and of tokens that expert parallelism sends to their experts
            (native). Read by every backend.
        on_unproven (raise, warn; default 'raise'):
            What to do when no FP8 product ran in the first step. Read by every backend.
        saved_activations (off, fp8, fp8+attention; default 'off'):
            In what activations are kept for backward beside the codes of converted layers, such as those of norms and
            gates: fp8 keeps E4M3 codes, 33/32 bytes an element; fp8+attention those of attention, too. Read by every
            backend.
        monitor_every (a whole number from 0 to 1000000; default 0):
            Optimizer steps from one sample of the statistics of FP8 tensors to the next; 0: none are taken. Read by
            every backend.
        monitor_layers:
            Name patterns of the FP8 layers whose statistics are taken, as for include, separated by commas (default:
            all). Read by every backend.
        monitor_file (default 'fp8_monitor.jsonl'):
            The file to which statistics are added, a line a sample. Read by every backend.
        guard (off, warn, skip, stop; default 'off'):
            What to do when a step goes wrong: warn; skip leaves the step out; stop raises an error. Read by every
            backend.
        guard_every (a whole number from 1 to 1000000; default 100):
            Steps from one comparison of the replicas of all ranks to the next, where guard is not off. Read by every
            backend.
        guard_steps (a whole number from 1 to 1000000; default 50):
            Steps that guard=skip leaves out in a row before it stops the training. Read by every backend.

    Raises:
        RecipeError: a value that its field does not take, or fields that do not go together.
    """

    def __init__(
        self,
        opt_level: str | None = None,
        rounding: str | None = None,
        exp_avg_scaling: str | None = None,
        implementation: str | None = None,
        shard_states: bool | None = None,
        gradient_release: bool | None = None,
        *,
        include: str | Collection[str] | None = None,
        also_include: str | Collection[str] | None = None,
        exclude: str | Collection[str] | None = None,
        module_filter_func: Callable[[nn.Module, str], bool] | None = None,
        autocast_dtype: str | None = None,
        gradient_comm: str | None = None,
        activation_comm: str | None = None,
        on_unproven: str | None = None,
        saved_activations: str | None = None,
        monitor_every: int | None = None,
        monitor_layers: str | Collection[str] | None = None,
        monitor_file: str | None = None,
        guard: str | None = None,
        guard_every: int | None = None,
        guard_steps: int | None = None,
    ) -> None: ...

class NativeRecipeKwargs(Recipe):
    """This package's own products: `native:dynamic`, or the scaling named.

    Args:
        scaling:
            The scaling rule, if the backend string does not name it: delayed, dynamic, rowwise, blockwise, mxfp8,
            window and so on. Read by every backend.
        fp8_format (HYBRID, E4M3; default 'HYBRID'; 'E4M3' with rowwise, blockwise, mxfp8):
            HYBRID is E4M3 forward and E5M2 for gradients; E4M3 is E4M3 everywhere. Read by native, te.
        margin (a whole number from -64 to 64; default 0):
            The scale is divided by 2**margin. Read by native:delayed, te:delayed.
        interval (a whole number from 1 to 1000000; default 1):
            Steps between two computations of the scale (te takes 1 alone). Read by native:delayed, te:delayed.
        amax_history_len (a whole number from 1 to 1000000; default 1024):
            Steps that the amax history holds. Read by native:delayed, te:delayed.
        amax_compute_algo (most_recent, max; default 'most_recent'):
            The scale follows the most recent amax, or the largest of the history. Read by native:delayed, te:delayed.
        override_linear_precision (three bools; default (False, False, False)):
            Which of fprop, dgrad and wgrad stay in high precision (te takes wgrad alone). Read by native, te.
        use_autocast_during_eval (True, False; default False):
            FP8 products in evaluation too; by default evaluation runs in high precision. Read by native, te.
        fp8_params (True, False; default False):
            Weights that do not train are stored in FP8, about 1 byte an element. Not with a level, which stores weights
            itself. Read by native, te.
        fuse_activations (True, False; default False):
            In eager training on a GPU one kernel computes an RMSNorm or a gated activation, and its amax, forward and
            backward. Read by native.
        fused_head (True, False; default False):
            The output head and its loss are computed in chunks of tokens, and logits are never whole. The head stays in
            high precision unless also_include or include names it (native). Read by native, te, ao.
        weight_comm (auto, plain, fp8; default 'auto'):
            What FSDP2 gathers of a weight: fp8 is the codes that products read, 1 byte an element; plain is the weight
            as it is stored; auto is fp8 at a level above O0 with codes that serve both products (not rowwise, mxfp8),
            else plain. (ao has enable_fsdp_float8_all_gather; te gathers weights as they are stored.) Read by native.
        include:
            Name patterns of layers to convert (fnmatch, over the full name; without a dot also any one part of it),
            separated by commas. Read by every backend.
        also_include:
            Name patterns of layers to convert beside those that are converted by default, such as the output head
            (lm_head), separated by commas. Not with include or module_filter_func, which choose all layers. Read by
            every backend.
        exclude:
            Name patterns of layers to keep in high precision, separated by commas. Read by every backend.
        module_filter_func:
            A function (module, name) -> whether to convert the module. Read by every backend.
        autocast_dtype (bf16, fp16, fp32; default 'bf16'):
            What runs around FP8 under Accelerate (on a CPU without bf16 products the default is fp32). Read by every
            backend.
        gradient_comm (fp8, plain):
            How gradients travel between ranks (default: fp8 at a level above O0, else plain). Read by every backend.
        activation_comm (plain, fp8; default 'plain'):
            How activations travel between ranks in forward: fp8 is E4M3 codes with their scales, of sequence-parallel
            activations that tensor parallelism gathers and of tokens that expert parallelism sends to their experts
            (native). Read by every backend.
        on_unproven (raise, warn; default 'raise'):
            What to do when no FP8 product ran in the first step. Read by every backend.
        saved_activations (off, fp8, fp8+attention; default 'off'):
            In what activations are kept for backward beside the codes of converted layers, such as those of norms and
            gates: fp8 keeps E4M3 codes, 33/32 bytes an element; fp8+attention those of attention, too. Read by every
            backend.
        monitor_every (a whole number from 0 to 1000000; default 0):
            Optimizer steps from one sample of the statistics of FP8 tensors to the next; 0: none are taken. Read by
            every backend.
        monitor_layers:
            Name patterns of the FP8 layers whose statistics are taken, as for include, separated by commas (default:
            all). Read by every backend.
        monitor_file (default 'fp8_monitor.jsonl'):
            The file to which statistics are added, a line a sample. Read by every backend.
        guard (off, warn, skip, stop; default 'off'):
            What to do when a step goes wrong: warn; skip leaves the step out; stop raises an error. Read by every
            backend.
        guard_every (a whole number from 1 to 1000000; default 100):
            Steps from one comparison of the replicas of all ranks to the next, where guard is not off. Read by every
            backend.
        guard_steps (a whole number from 1 to 1000000; default 50):
            Steps that guard=skip leaves out in a row before it stops the training. Read by every backend.

    Raises:
        RecipeError: a value that its field does not take, or fields that do not go together.
    """

    def __init__(
        self,
        scaling: str | None = None,
        fp8_format: str | Enum | None = None,
        margin: int | None = None,
        interval: int | None = None,
        amax_history_len: int | None = None,
        amax_compute_algo: str | None = None,
        override_linear_precision: Sequence[bool] | str | None = None,
        use_autocast_during_eval: bool | None = None,
        fp8_params: bool | None = None,
        fuse_activations: bool | None = None,
        fused_head: bool | None = None,
        weight_comm: str | None = None,
        *,
        include: str | Collection[str] | None = None,
        also_include: str | Collection[str] | None = None,
        exclude: str | Collection[str] | None = None,
        module_filter_func: Callable[[nn.Module, str], bool] | None = None,
        autocast_dtype: str | None = None,
        gradient_comm: str | None = None,
        activation_comm: str | None = None,
        on_unproven: str | None = None,
        saved_activations: str | None = None,
        monitor_every: int | None = None,
        monitor_layers: str | Collection[str] | None = None,
        monitor_file: str | None = None,
        guard: str | None = None,
        guard_every: int | None = None,
        guard_steps: int | None = None,
    ) -> None: ...

class FP8RecipeKwargs(Recipe):
    """Any backend by its string, with the fields that this backend reads, also those of a registered backend.

    Args:
        backend:
            COMPUTE[:SCALING][+msamp[:LEVEL]]: native:rowwise, ao, te+msamp:O3, msamp:O2, … (default: auto, which picks
            for this machine). Read by every backend.
        opt_level:
            The level, O0 (no level) to O4, if the backend string does not name it. Read by every backend.
        rounding (stochastic, nearest; default 'stochastic'):
            How stored weights and Adam states are rounded; nearest, MS-AMP's own, loses small updates. Read by levels
            O1, O2, O3, O4.
        exp_avg_scaling (tensor, block; default 'tensor'):
            One scale of the E4M3 exp_avg for the tensor, or one for each block of 128 elements, which keeps magnitudes
            apart that differ by more than 1e5 inside one tensor. Read by levels O2, O3.
        implementation (native, original; default 'native'):
            Of the levels: this package's own, or the package msamp where it is installed. Read by levels O1, O2, O3,
            O4.
        shard_states (True, False; default True):
            Under DDP masters, residuals and Adam states lie on one rank each: 2 + 5/N bytes an element at O3, not 7,
            and 2 + 3/N at O4, not 5. Read by levels O3, O4.
        gradient_release (True, False; default False):
            Each parameter is stepped inside backward, as soon as its gradient is complete, and the gradient is dropped:
            not with accumulation or clipping. Read by levels O1, O2, O3, O4.
        scaling:
            The scaling rule, if the backend string does not name it: delayed, dynamic, rowwise, blockwise, mxfp8,
            window and so on. Read by every backend.
        use_autocast_during_eval (True, False; default False):
            FP8 products in evaluation too; by default evaluation runs in high precision. Read by native, te.
        margin (a whole number from -64 to 64; default 0):
            The scale is divided by 2**margin. Read by native:delayed, te:delayed.
        interval (a whole number from 1 to 1000000; default 1):
            Steps between two computations of the scale (te takes 1 alone). Read by native:delayed, te:delayed.
        fp8_format (HYBRID, E4M3; default 'HYBRID'; 'E4M3' with rowwise, blockwise, mxfp8):
            HYBRID is E4M3 forward and E5M2 for gradients; E4M3 is E4M3 everywhere. Read by native, te.
        amax_history_len (a whole number from 1 to 1000000; default 1024):
            Steps that the amax history holds. Read by native:delayed, te:delayed.
        amax_compute_algo (most_recent, max; default 'most_recent'):
            The scale follows the most recent amax, or the largest of the history. Read by native:delayed, te:delayed.
        override_linear_precision (three bools; default (False, False, False)):
            Which of fprop, dgrad and wgrad stay in high precision (te takes wgrad alone). Read by native, te.
        use_mxfp8_block_scaling (True, False; default False):
            True is the same as scaling="mxfp8". Read by every backend.
        fp8_params (True, False; default False):
            Weights that do not train are stored in FP8, about 1 byte an element. Not with a level, which stores weights
            itself. Read by native, te.
        fp8_group:
            A torch.distributed.ProcessGroup: the ranks over which an amax is reduced (default: all). Read by
            te:delayed.
        fuse_norms (True, False; default False):
            A norm that one Linear alone reads is computed by that Linear's kernel. Read by te.
        fp8_dpa (False; default False):
            Attention in FP8, which this package does not have. Read by te.
        fp8_mha (False; default False):
            As fp8_dpa. Read by te.
        fused_head (True, False; default False):
            The output head and its loss are computed in chunks of tokens, and logits are never whole. The head stays in
            high precision unless also_include or include names it (native). Read by native, te, ao.
        config:
            A torchao.float8.Float8LinearConfig, used as it is. Read by ao.
        pad_inner_dim (True, False):
            Pad products whose inner dimension is no multiple of 16 (on unless it is turned off). Read by ao.
        enable_fsdp_float8_all_gather (True, False):
            Gather weights in FP8 under FSDP2. Read by ao.
        auto_filter (True, False; default False):
            Leave layers in high precision that TorchAO finds too small to gain. Read by ao.
        fuse_activations (True, False; default False):
            In eager training on a GPU one kernel computes an RMSNorm or a gated activation, and its amax, forward and
            backward. Read by native.
        weight_comm (auto, plain, fp8; default 'auto'):
            What FSDP2 gathers of a weight: fp8 is the codes that products read, 1 byte an element; plain is the weight
            as it is stored; auto is fp8 at a level above O0 with codes that serve both products (not rowwise, mxfp8),
            else plain. (ao has enable_fsdp_float8_all_gather; te gathers weights as they are stored.) Read by native.
        include:
            Name patterns of layers to convert (fnmatch, over the full name; without a dot also any one part of it),
            separated by commas. Read by every backend.
        also_include:
            Name patterns of layers to convert beside those that are converted by default, such as the output head
            (lm_head), separated by commas. Not with include or module_filter_func, which choose all layers. Read by
            every backend.
        exclude:
            Name patterns of layers to keep in high precision, separated by commas. Read by every backend.
        module_filter_func:
            A function (module, name) -> whether to convert the module. Read by every backend.
        autocast_dtype (bf16, fp16, fp32; default 'bf16'):
            What runs around FP8 under Accelerate (on a CPU without bf16 products the default is fp32). Read by every
            backend.
        gradient_comm (fp8, plain):
            How gradients travel between ranks (default: fp8 at a level above O0, else plain). Read by every backend.
        activation_comm (plain, fp8; default 'plain'):
            How activations travel between ranks in forward: fp8 is E4M3 codes with their scales, of sequence-parallel
            activations that tensor parallelism gathers and of tokens that expert parallelism sends to their experts
            (native). Read by every backend.
        on_unproven (raise, warn; default 'raise'):
            What to do when no FP8 product ran in the first step. Read by every backend.
        saved_activations (off, fp8, fp8+attention; default 'off'):
            In what activations are kept for backward beside the codes of converted layers, such as those of norms and
            gates: fp8 keeps E4M3 codes, 33/32 bytes an element; fp8+attention those of attention, too. Read by every
            backend.
        monitor_every (a whole number from 0 to 1000000; default 0):
            Optimizer steps from one sample of the statistics of FP8 tensors to the next; 0: none are taken. Read by
            every backend.
        monitor_layers:
            Name patterns of the FP8 layers whose statistics are taken, as for include, separated by commas (default:
            all). Read by every backend.
        monitor_file (default 'fp8_monitor.jsonl'):
            The file to which statistics are added, a line a sample. Read by every backend.
        guard (off, warn, skip, stop; default 'off'):
            What to do when a step goes wrong: warn; skip leaves the step out; stop raises an error. Read by every
            backend.
        guard_every (a whole number from 1 to 1000000; default 100):
            Steps from one comparison of the replicas of all ranks to the next, where guard is not off. Read by every
            backend.
        guard_steps (a whole number from 1 to 1000000; default 50):
            Steps that guard=skip leaves out in a row before it stops the training. Read by every backend.

    Raises:
        RecipeError: a value that its field does not take, or fields that do not go together.
    """

    def __init__(
        self,
        backend: str | None = None,
        opt_level: str | None = None,
        rounding: str | None = None,
        exp_avg_scaling: str | None = None,
        implementation: str | None = None,
        shard_states: bool | None = None,
        gradient_release: bool | None = None,
        scaling: str | None = None,
        use_autocast_during_eval: bool | None = None,
        margin: int | None = None,
        interval: int | None = None,
        fp8_format: str | Enum | None = None,
        amax_history_len: int | None = None,
        amax_compute_algo: str | None = None,
        override_linear_precision: Sequence[bool] | str | None = None,
        use_mxfp8_block_scaling: bool | None = None,
        fp8_params: bool | None = None,
        fp8_group: distributed.ProcessGroup | None = None,
        fuse_norms: bool | None = None,
        fp8_dpa: bool | None = None,
        fp8_mha: bool | None = None,
        fused_head: bool | None = None,
        config: Float8LinearConfig | None = None,
        pad_inner_dim: bool | None = None,
        enable_fsdp_float8_all_gather: bool | None = None,
        auto_filter: bool | None = None,
        fuse_activations: bool | None = None,
        weight_comm: str | None = None,
        *,
        include: str | Collection[str] | None = None,
        also_include: str | Collection[str] | None = None,
        exclude: str | Collection[str] | None = None,
        module_filter_func: Callable[[nn.Module, str], bool] | None = None,
        autocast_dtype: str | None = None,
        gradient_comm: str | None = None,
        activation_comm: str | None = None,
        on_unproven: str | None = None,
        saved_activations: str | None = None,
        monitor_every: int | None = None,
        monitor_layers: str | Collection[str] | None = None,
        monitor_file: str | None = None,
        guard: str | None = None,
        guard_every: int | None = None,
        guard_steps: int | None = None,
    ) -> None: ...

HANDLERS: tuple[type[Recipe], ...]

def settings_of(compute: str) -> dict[str, Field]:
    """Every field that a recipe of this backend holds: those of this package, and its own in their place."""

def resolve(spec: Spec = None) -> Recipe:
    """The recipe that `spec` means, with every default filled in.

    Args:
        spec: a backend string, a recipe of this package, a recipe handler of Accelerate, a dict
            `{"backend": …, field: value}`, a recipe object of TransformerEngine; None or "auto" picks for this machine.

    Raises:
        RecipeError: unknown strings, fields and combinations, each with what is valid. A valid name never fails here
            for want of hardware or libraries: that is for `prepare` to say.
    """

def chosen_by_auto(recipe: Recipe) -> tuple[Recipe, str]:
    """The recipe that an `auto` recipe means on this machine, and why. Raises `RecipeError` where no backend that auto
    may choose honours its fields.
    """

def from_environment(environ: Mapping[str, str] | None = None) -> Recipe | None:
    """What `FP8_BACKENDS_RECIPE` (from `fp8-backends launch`), else `ACCELERATE_FP8_*` (any case) asks for, or None.

    A value of `ACCELERATE_FP8_*` that equals the default of Accelerate's launcher counts as not given. Without
    `ACCELERATE_FP8_BACKEND`, other values belong to the backend that `auto` picks.
    """

def with_environment(recipe: Recipe, environ: Mapping[str, str] | None = None) -> Recipe:
    """The recipe, completed by the fields that `ACCELERATE_FP8_*` gives, as Accelerate completes its own handlers.

    The backend's name is left to the recipe. A field for which both say something different is a `RecipeError`.
    """
