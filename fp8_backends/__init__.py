"""FP8 training backends by name for stock Hugging Face Accelerate, with proof that FP8 is on.

Importing this package connects it to `accelerate.Accelerator`, unless the environment has
`FP8_BACKENDS_DISABLE=1`. TorchAO, transformers, TransformerEngine and rich are imported on first
use, and TorchAO's messages about libraries for other versions of CUDA are hidden.
"""

from . import checkpoints as checkpoints
from . import watch as watch
from .accelerate_plugin import connect
from .advice import advise
from .compute.registry import available_backends, register_backend
from .compute.torchao import drop_import_messages
from .convert.conversion import restore
from .errors import BackendUnavailableError, FP8BackendError, RecipeError
from .evidence.auditing import audit
from .evidence.policy_gap import policy_gap
from .preparation import initialize, prepare
from .recipes.handlers import (
    AORecipeKwargs,
    FP8RecipeKwargs,
    MSAMPRecipeKwargs,
    NativeRecipeKwargs,
    TERecipeKwargs,
    resolve,
)
from .recipes.precision_plan import plan
from .rules.validate import validate

__version__ = "0.6.0"

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
    "policy_gap",
    "prepare",
    "register_backend",
    "resolve",
    "restore",
    "validate",
]

connect()
drop_import_messages()
