"""`connect()`: the one patch of Accelerate. If arguments or environment request FP8,
`Accelerator.__init__` changes the class of the instance to `FP8<Accelerator>` (mixin.py) before the
original runs."""

import functools
import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import accelerate.state
import accelerate.utils
from accelerate import Accelerator
from accelerate.state import AcceleratorState, DistributedType

from ..announcement import is_main_process, logger
from ..errors import FP8BackendError, RecipeError
from ..recipes.handlers import (
    FP8RecipeKwargs,
    Recipe,
    code_over_launch,
    from_environment,
    resolve,
)
from ..recipes.sources import (
    LAUNCH,
    environment_name,
    environment_source,
    is_launched,
    variables,
)
from ..recipes.strings import names_backend
from ..rules.preconditions import check_machine
from ..words import shown
from .callers import around_fp8, for_trainer, precision_of_notebook, precision_of_trainer
from .engines import asked_by_deepspeed, with_zero_states, wraps_in_ddp
from .mixin import FP8Mixin, IgnoresFP8Environment, with_mixin

_MARK = "_connected_by_fp8_backends"

_NEEDED_PARAMETERS = {
    "__init__": ("mixed_precision", "kwargs_handlers"),
    "prepare": ("device_placement",),
    "prepare_model": ("model", "device_placement", "evaluation_mode"),
    "prepare_optimizer": ("optimizer", "device_placement"),
    "unscale_gradients": ("optimizer",),
    "unwrap_model": ("model", "keep_fp32_wrapper"),
    "autocast": ("autocast_handler",),
    "save_state": ("output_dir",),
    "load_state": ("input_dir",),
}
"""Methods of Accelerator that the mixin overrides or calls, with their parameters."""

_FP8_CHECKS = {"is_fp8_available": (), "check_cuda_fp8_capability": ()}
"""Accelerate's checks in `accelerate.state`, for its three libraries and for the first GPU."""

_STOCK_HANDLERS = tuple(
    getattr(accelerate.utils, name)
    for name in ("FP8RecipeKwargs", "TERecipeKwargs", "AORecipeKwargs", "MSAMPRecipeKwargs")
    if hasattr(accelerate.utils, name)
)


def connect() -> None:
    """Let stock `accelerate.Accelerator` train with the backends of this package.

    `import fp8_backends` does it already; repeating it changes nothing. An Accelerator without FP8
    behaves as before, to the bit. `FP8_BACKENDS_DISABLE=1` in the environment leaves Accelerate
    unpatched.
    """
    # another library may have wrapped our wrapper
    innermost = inspect.unwrap(Accelerator.__init__, stop=lambda function: hasattr(function, _MARK))
    if not is_disabled() and not hasattr(innermost, _MARK):
        Accelerator.__init__ = _patched(Accelerator.__init__)
        if AcceleratorState._shared_state.get("_mixed_precision") == "fp8" and is_main_process():
            logger.warning(
                'mixed precision "fp8" was set before fp8_backends was imported: Accelerators made '
                "until then train "
                "with stock FP8. Import fp8_backends before the Accelerator is made"
            )


def is_disabled() -> bool:
    return os.environ.get("FP8_BACKENDS_DISABLE", "0").lower() in ("1", "true", "yes", "on")


def _patched(original):
    signature = inspect.signature(original)
    mismatches = incompatibilities(Accelerator, _NEEDED_PARAMETERS)
    mismatches += incompatibilities(accelerate.state, _FP8_CHECKS)

    @functools.wraps(original)
    def __init__(self, *args, **kwargs):
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError:
            return original(self, *args, **kwargs)  # raises the familiar error
        if isinstance(iterator := bound.arguments.get("kwargs_handlers"), Iterator):
            bound.arguments["kwargs_handlers"] = list(iterator)  # which Accelerate reads, too
        handlers = _handlers(bound.arguments)
        # whatever mixed_precision says
        is_asked_beside = _launch_in_fp8() or any(map(_is_fp8_handler, handlers))
        by_trainer = precision_of_trainer(bound.arguments) if is_asked_beside else None
        given = bound.arguments.get("mixed_precision") if by_trainer is None else None
        backend = os.environ.get("ACCELERATE_MIXED_PRECISION") if given is None else given
        if names_backend(backend):
            handlers = [*handlers, FP8RecipeKwargs(backend=backend)]
            bound.arguments |= {"mixed_precision": "fp8", "kwargs_handlers": handlers}
        elif by_trainer is not None or _precision(bound.arguments) == "fp8":
            # Accelerate does not read a notebook's precision
            bound.arguments["mixed_precision"] = "fp8"
        recipe = asked_recipe(bound.arguments, by_trainer)
        if recipe is None:
            _warn_of_fp8_in_environment(bound.arguments)
            if _backend_in_environment() and not isinstance(self, IgnoresFP8Environment):
                # without "fp8", Accelerate would still obey the variable and fail on it, or convert
                # the model
                self.__class__ = with_mixin(IgnoresFP8Environment, type(self))
            return original(*bound.args, **bound.kwargs)
        refuse_mismatches(mismatches)
        bound.arguments["kwargs_handlers"] = [
            handler for handler in handlers if not _is_fp8_handler(handler)
        ]
        check_machine(recipe)  # before there is a process group, or an AcceleratorState in FP8
        if not isinstance(self, FP8Mixin):
            self.__class__ = with_mixin(FP8Mixin, type(self))
        # Accelerate's checks pass during this call; the registry has its own
        with ExitStack() as undo:
            for name in _FP8_CHECKS:
                undo.callback(setattr, accelerate.state, name, getattr(accelerate.state, name))
                setattr(accelerate.state, name, lambda *args, **kwargs: True)
            # a DeepSpeedPlugin knows no O3
            if (stock := os.environ.pop("ACCELERATE_FP8_BACKEND", None)) is not None:
                undo.callback(os.environ.__setitem__, "ACCELERATE_FP8_BACKEND", stock)
            original(*bound.args, **bound.kwargs)
        ranks = int(os.environ.get("WORLD_SIZE", 1)) if "LOCAL_RANK" in os.environ else 1
        is_alone = self.num_processes == 1 or self.distributed_type == DistributedType.NO
        if is_alone and ranks > 1:
            raise FP8BackendError(
                f"{ranks} processes were started, and without a GPU Accelerate would train alone "
                "in each: for DDP set ACCELERATE_USE_CPU=true in the environment, or write "
                "Accelerator(cpu=True), both of which leave "
                'DeepSpeed and FSDP out; for DeepSpeed pass InitProcessGroupKwargs(backend="gloo") '
                "in kwargs_handlers"
            )
        self._start_fp8(with_zero_states(for_trainer(recipe, wraps_in_ddp(self)), self))

    setattr(__init__, _MARK, True)
    return __init__


def incompatibilities(owner: Any, needed: Mapping[str, Sequence[str]]) -> list[str]:
    """List the functions of `owner` that are missing or lack parameters, one sentence each."""
    problems = []
    for name, parameters in needed.items():
        function = getattr(owner, name, None)
        if function is None:
            problems.append(f"{owner.__name__}.{name} does not exist")
        elif missing := set(parameters) - set(inspect.signature(function).parameters):
            problems.append(f"{owner.__name__}.{name} takes no {', '.join(sorted(missing))}")
    return problems


def refuse_mismatches(mismatches: Sequence[str]) -> None:
    if mismatches:
        raise FP8BackendError(
            f"this version of Accelerate ({accelerate.__version__}) does not fit fp8_backends: "
            f"{'; '.join(mismatches)}. Install the version pinned in tests/constraints.txt, or "
            "another fp8_backends"
        )


def asked_recipe(arguments: Mapping[str, Any], by_trainer: str | None = None) -> Recipe | None:
    """Return the resolved recipe for these arguments of `Accelerator` and the environment; None
    without FP8.

    A handler overrides `ACCELERATE_FP8_*`, and both need mixed precision "fp8"; "fp8" without
    either means `auto`. `by_trainer` is the mixed precision in a Trainer's arguments.
    """
    precision = _precision(arguments)
    handlers = [
        handler for handler in arguments.get("kwargs_handlers") or () if _is_fp8_handler(handler)
    ]
    if len(handlers) > 1:
        names = " and ".join(type(handler).__name__ for handler in handlers)
        raise RecipeError(
            f"two FP8 recipes, {names}: pass one, in kwargs_handlers or as mixed_precision"
        )
    if precision != "fp8":
        if any(isinstance(handler, Recipe) for handler in handlers):
            raise RecipeError(
                f'{type(handlers[0]).__name__} is given, but mixed precision is "{precision}": '
                'set Accelerator(mixed_precision="fp8") or ACCELERATE_MIXED_PRECISION=fp8, or '
                "remove the handler. "
                "What stays outside FP8 runs in the recipe's autocast_dtype (bf16 by default)"
            )
        return None
    if is_launched() and (names := sorted(variables(os.environ))) and is_main_process():
        # the launcher leaves none of Accelerate's variables
        logger.warning(
            f"{', '.join(names)}, set by the script, has no effect: "
            "fp8-backends launch says what the recipe is, and a handler in kwargs_handlers comes "
            "before it"
        )
    if not handlers and (backend := asked_by_deepspeed(arguments)):
        handlers = [FP8RecipeKwargs(backend=backend)]
    recipe = resolve(_completed(handlers[0]) if handlers else from_environment())
    return recipe if by_trainer is None else around_fp8(recipe, by_trainer, arguments)


def _handlers(arguments: Mapping[str, Any]) -> Any:
    given = arguments.get("kwargs_handlers") or []
    if _is_fp8_handler(given):
        raise RecipeError(
            f"kwargs_handlers must be a list: write kwargs_handlers=[{type(given).__name__}(...)]"
        )
    handlers = [given] if isinstance(given, (str, Mapping)) else given
    if text := next(filter(names_backend, handlers), None):
        raise RecipeError(
            f"kwargs_handlers: {shown(text)} is no handler. Write "
            f"Accelerator(mixed_precision={text!r})"
        )
    if any(isinstance(handler, Mapping) for handler in handlers):
        raise RecipeError(
            "kwargs_handlers: a dict is no handler. Write "
            "kwargs_handlers=[FP8RecipeKwargs(**fields)]"
        )
    return given


def _precision(arguments: Mapping[str, Any]) -> str:
    given = arguments.get("mixed_precision")
    if given is not None:
        return str(given)
    running = AcceleratorState._shared_state.get("_mixed_precision")
    if running is None and _launch_in_fp8():
        return "fp8"
    return running or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")


def _launch_in_fp8() -> str:
    """Name the launch or variable that requests FP8; empty without one."""
    asked = os.environ.get("ACCELERATE_MIXED_PRECISION", "")
    if asked.lower() == "fp8" or names_backend(asked):
        return f"ACCELERATE_MIXED_PRECISION={asked}"
    # Axolotl, for one, writes its own configuration's precision into the variable
    if is_launched():
        return "fp8-backends launch"
    return 'notebook_launcher(mixed_precision="fp8")' if precision_of_notebook() == "fp8" else ""


def _is_fp8_handler(handler: Any) -> bool:
    return isinstance(handler, (Recipe, *_STOCK_HANDLERS))


def _backend_in_environment() -> str | None:
    """Return the value of ACCELERATE_FP8_BACKEND (any case). The other variables only count with
    fp8."""
    texts = (
        text.strip() for key, text in os.environ.items() if key.upper() == "ACCELERATE_FP8_BACKEND"
    )
    return next((text for text in texts if text and text.upper() != "NO"), None)


def _completed(handler: Any) -> Any:
    """Complete the handler from the launch or the environment. The handler overrides both, with a
    warning."""
    try:
        source = environment_source()
        # Accelerate's have read the other variables
        if not is_launched() and not isinstance(handler, Recipe):
            source.fields = {
                name: value for name, value in source.fields.items() if name == "backend"
            }
        if not source.fields:
            return handler
        recipe, warning = code_over_launch(
            handler, source, LAUNCH if is_launched() else environment_name()
        )
    except RecipeError as error:
        name = type(handler).__name__
        raise RecipeError(
            f"{name} in the script, with {environment_name()} in the environment: {error}"
        ) from None
    if warning is not None and is_main_process():
        logger.warning("%s", warning)
    return recipe


def _warn_of_fp8_in_environment(arguments: Mapping[str, Any]) -> None:
    precision = _precision(arguments)
    backend = _backend_in_environment()
    if not is_main_process():
        return
    if launch := _launch_in_fp8():
        launch += f" and ACCELERATE_FP8_BACKEND={backend}" if backend else ""
        logger.warning(
            f"FP8 is off: this run was launched with {launch}, and the code says "
            f'Accelerator(mixed_precision="{precision}"): leave mixed_precision out there, or '
            "launch without fp8"
        )
    elif backend:
        logger.warning(
            f'ACCELERATE_FP8_BACKEND={backend} has no effect: mixed precision is "{precision}", '
            'not "fp8"'
        )
