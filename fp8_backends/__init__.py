"""FP8 training backends by name for stock Hugging Face Accelerate, with proof that FP8 is on.

Importing this package connects it to `accelerate.Accelerator`, unless the environment has `FP8_BACKENDS_DISABLE=1`.
TorchAO, transformers, TransformerEngine and rich are imported on first use, and TorchAO's messages about libraries for
other versions of CUDA are hidden.
"""

from . import checkpoints as checkpoints
from .accelerate_plugin import connect
from .compute.registry import available_backends, register_backend
from .compute.torchao import drop_import_messages
from .errors import BackendUnavailableError, FP8BackendError, RecipeError
from .recipes.handlers import (
    AORecipeKwargs,
    FP8RecipeKwargs,
    MSAMPRecipeKwargs,
    NativeRecipeKwargs,
    TERecipeKwargs,
    resolve,
)
from .recipes.precision_plan import plan
from .training.advice import advise
from .training.auditing import audit
from .training.conversion import restore
from .training.preparation import initialize, prepare
from .training.validators import validate

__version__ = "0.1.0"

__all__ = [
    "AORecipeKwargs",
    "BackendUnavailableError",
    "FP8BackendError",
    "FP8RecipeKwargs",
    "MSAMPRecipeKwargs",
    "NativeRecipeKwargs",
    "RecipeError",
    "TERecipeKwargs",
    "advise",
    "audit",
    "available_backends",
    "connect",
    "initialize",
    "plan",
    "prepare",
    "register_backend",
    "resolve",
    "restore",
    "validate",
]

connect()
drop_import_messages()
