"""FP8 training backends by name for stock Hugging Face Accelerate, with proof that FP8 is on.

Importing this package connects it to `accelerate.Accelerator` (`FP8_BACKENDS_DISABLE=1` in the environment leaves
Accelerate untouched). TorchAO, transformers, TransformerEngine and rich are imported only when they are used, and what
TorchAO says of libraries for other versions of CUDA while it loads stays off the screen.
"""

from .accelerate_plugin import connect
from .compute.hardware import Availability
from .compute.registry import available_backends, register_backend
from .compute.torchao import drop_import_messages
from .errors import BackendUnavailableError, FP8BackendError, RecipeError
from .recipes.handlers import (
    AORecipeKwargs,
    FP8RecipeKwargs,
    MSAMPRecipeKwargs,
    NativeRecipeKwargs,
    Recipe,
    TERecipeKwargs,
    resolve,
)
from .recipes.precision_plan import PrecisionPlan, plan
from .training.advice import Advice, advise
from .training.auditing import Audit, audit
from .training.conversion import restore
from .training.exporting import Export, export
from .training.manifest import newest_checkpoint
from .training.plain_weights import plain_weights
from .training.preparation import initialize, keep_weight_casts, prepare, whole_states
from .training.quantized_layers import dequantize
from .training.report import ConversionReport
from .training.validators import Finding, validate
from .training.watching.guard import Fault, faults

__version__ = "0.1.0"

__all__ = [
    "AORecipeKwargs",
    "Advice",
    "Audit",
    "Availability",
    "BackendUnavailableError",
    "ConversionReport",
    "Export",
    "FP8BackendError",
    "FP8RecipeKwargs",
    "Fault",
    "Finding",
    "MSAMPRecipeKwargs",
    "NativeRecipeKwargs",
    "PrecisionPlan",
    "Recipe",
    "RecipeError",
    "TERecipeKwargs",
    "advise",
    "audit",
    "available_backends",
    "connect",
    "dequantize",
    "export",
    "faults",
    "initialize",
    "keep_weight_casts",
    "newest_checkpoint",
    "plain_weights",
    "plan",
    "prepare",
    "register_backend",
    "resolve",
    "restore",
    "validate",
    "whole_states",
]

connect()
drop_import_messages()
