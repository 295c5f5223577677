"""`fp8-backends launch`: Accelerate's launcher, with every backend string and field, for scripts as they are.

Accelerate's own parser and launcher functions run in this process, as they are. What flags, configuration file and
environment say about FP8 is merged into one recipe and checked here. The workers find it in `FP8_BACKENDS_RECIPE`, and
what they run is `worker.py`, which connects this package and then runs the script. Accelerate's launcher is told of no
mixed precision: for "fp8" it asks for three libraries that few backends need. The worker sets "fp8" in its place. What
cannot run is refused here, where the workers run on this machine, and by the worker's `Accelerator` elsewhere.
"""

from __future__ import annotations

import argparse
import inspect
import json
import logging
import os
import subprocess
import sys
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from types import ModuleType
from typing import Any, NamedTuple

import accelerate
import torch

from ..compute.fields import flag, whole_number
from ..errors import BackendUnavailableError, FP8BackendError, RecipeError
from ..recipes.handlers import AUTO, FP8RecipeKwargs, Recipe
from ..recipes.merging import merged
from ..recipes.reading import read_file
from ..recipes.sources import LAUNCHED, PREFIX, Source, config_source, environment_fields, environment_name, is_launched
from ..recipes.strings import names_backend
from ..training.preparation import check_machine
from ..training.rules import RULES
from ..words import shortened, shown
from .launch_flags import parse, recipe_flags
from .plugin import is_disabled

logger = logging.getLogger("fp8_backends")

WORKER = f"{__package__}.worker"
_GATHER = "enable_fsdp_float8_all_gather"

_NEEDED_PARAMETERS = {
    "launch_command": ("args",),
    "_validate_launch_command": ("args",),
    "multi_gpu_launcher": ("args",),
    "load_config_from_file": ("config_file",),
}
"""Functions of `accelerate.commands.launch` that are called here."""


class _Configuration(NamedTuple):
    """A configuration file of Accelerate; empty where there is none."""

    path: str = ""
    values: Any = argparse.Namespace()
    """`ClusterConfig` or `SageMakerConfig`."""

    def get(self, name: str) -> Any:
        return getattr(self.values, name, None)


def run(arguments: Sequence[str]) -> int:
    """Launch as `accelerate launch` would with these arguments, in FP8. Returns the script's exit code.

    Raises `FP8BackendError`, before any process starts, for what cannot be done as asked.
    """
    if is_disabled():
        raise FP8BackendError("FP8_BACKENDS_DISABLE is set, which contradicts this command: unset it")
    from accelerate.commands import launch as commands

    _check_accelerate(commands)
    args = parse(arguments)
    config = _configuration(args, commands)
    _check_precision(args, config)
    _check_launcher(args, config)
    fields = recipe_fields(args, config)
    _check_machine(FP8RecipeKwargs(**fields), args, config)
    return _launch(args, config, fields, commands)


# What is asked for


def recipe_fields(args: argparse.Namespace, config: _Configuration) -> dict[str, Any]:
    """The fields of `FP8RecipeKwargs` that flags, configuration file and environment say together, in this order."""
    in_file = config_source(config.get("fp8_config"), config.path)
    if _GATHER in in_file.idle and not _uses_fsdp(args, config):  # what `accelerate config` recommends, for FSDP2
        in_file = in_file._replace(fields={name: v for name, v in in_file.fields.items() if name != _GATHER})
    return merged([recipe_flags(args), in_file, _environment()])


def _environment() -> Source:
    """The fields that the environment gives."""
    name = environment_name()
    try:
        fields = environment_fields()
    except RecipeError as error:
        raise RecipeError(f"{name} in the environment: {error}") from None
    sources = {field: f"{name} in the environment, {field}={shown(value)}" for field, value in fields.items()}
    return Source(fields, sources, selects_levels=is_launched())


def _configuration(args: argparse.Namespace, commands: ModuleType) -> _Configuration:
    """The file that Accelerate will read: the one that is named, else the user's default one, but not with --cpu."""
    default = commands.default_config_file
    path = args.config_file or (default if os.path.isfile(default) and not args.cpu else None)
    if path is None:
        return _Configuration()
    read_file(path)  # Accelerate's reader accepts a key that appears twice
    try:
        values = commands.load_config_from_file(path)
    except Exception as error:  # whatever the file makes of Accelerate's reader
        raise FP8BackendError(f"{path} is no configuration file of Accelerate: {_one_line(error)}") from error
    kind = getattr(values, "distributed_type", None)
    if kind is not None and not isinstance(kind, Enum):  # Accelerate reads text alone
        raise FP8BackendError(f"{path}: distributed_type={shown(kind)} must be a word such as NO, MULTI_GPU, FSDP")
    if names_backend(values.mixed_precision) and "backend" not in (values.fp8_config or {}):
        values.fp8_config = {**(values.fp8_config or {}), "backend": values.mixed_precision}
        values.mixed_precision = "fp8"
    return _Configuration(path, values)


def _check_precision(args: argparse.Namespace, config: _Configuration) -> None:
    """Refuse a flag for another precision, and warn of a configuration file's, which other commands read too."""
    if args.mixed_precision not in (None, "fp8"):
        raise FP8BackendError(
            f"--mixed_precision {args.mixed_precision}: this command trains in FP8; leave the flag out (around FP8 "
            "training runs in --fp8_autocast_dtype, bf16 by default), or use accelerate launch"
        )
    in_file = config.get("mixed_precision")
    if args.mixed_precision is None and in_file not in (None, "fp8"):
        logger.warning("mixed_precision: %s in %s has no effect: this command trains in FP8", in_file, config.path)


_REFUSED = {"tpu": ("tpu", "XLA"), "megatron": ("use_megatron_lm", "MEGATRON_LM")}
"""Rules, each with the flag and the `distributed_type` to which it applies."""


def _check_launcher(args: argparse.Namespace, config: _Configuration) -> None:
    """Raise `FP8BackendError` for a launcher that cannot train in FP8 here, and for a script that is not there."""
    if "sagemaker" in str(config.get("compute_environment")).lower():
        raise FP8BackendError(
            f"{config.path} is for Amazon SageMaker, which starts the script by itself: put "
            "`import fp8_backends` into the script, and use accelerate launch"
        )
    if args.no_python:
        raise FP8BackendError(
            "--no_python: what is no Python script cannot be connected to this package; leave the flag out"
        )
    for rule, (flag_name, kind) in _REFUSED.items():
        if getattr(args, flag_name) or _distributed_type(args, config) == kind:
            reason, fix = RULES[rule].reason, RULES[rule].fix
            raise FP8BackendError(f"--{flag_name} (distributed_type {kind}): {reason}. Fix: {fix}")
    by_fsdp = _uses_fsdp(args, config)
    uses_cpu = config.get("use_cpu") or _variable("ACCELERATE_USE_CPU", flag, False)
    if (by_fsdp or (_uses_gpus(args, config) and not uses_cpu)) and not args.cpu and not _has_device():
        raise FP8BackendError(
            f"{'--use_fsdp' if by_fsdp else '--multi_gpu'}: this machine has no GPU, and without one Accelerate would "
            "train alone on every rank. For several ranks on the CPU: --cpu --num_processes N"
        )
    if not args.module and not os.path.exists(args.training_script):
        raise FP8BackendError(f"there is no script {shown(args.training_script)}")


def _check_machine(recipe: Recipe, args: argparse.Namespace, config: _Configuration) -> None:
    """Raise `BackendUnavailableError` where the recipe cannot run on the machine that trains. Where that may be another
    one, or some of the GPUs here, its workers decide, and a warning says what is missing here."""
    if recipe.compute == AUTO:
        return
    try:
        check_machine(recipe)
    except BackendUnavailableError as error:
        chosen_gpus = (args.gpu_ids or config.get("gpu_ids") or "all") != "all"
        if not (chosen_gpus or _by_mpirun(args, config) or _by_remote_shell(args, config)):
            raise
        logger.warning("%s. The processes are started all the same: they may find another machine, or GPU", error)


def _distributed_type(args: argparse.Namespace, config: _Configuration) -> str:
    """The configuration file's distributed type; empty where a flag names another, or there is none."""
    flags = (args.cpu, args.multi_gpu, args.tpu, args.use_deepspeed, args.use_fsdp, args.use_megatron_lm)
    kind = config.get("distributed_type")
    return "" if any(flags) or kind is None else str(kind.value)


def _uses_fsdp(args: argparse.Namespace, config: _Configuration) -> bool:
    return args.use_fsdp or _distributed_type(args, config) == "FSDP"


def _uses_gpus(args: argparse.Namespace, config: _Configuration) -> bool:
    kind = _distributed_type(args, config)
    return args.multi_gpu or (kind.startswith("MULTI_") and kind != "MULTI_CPU")


def _has_device() -> bool:
    return torch.accelerator.is_available()


def _wants_cpu_ranks(args: argparse.Namespace, config: _Configuration) -> bool:
    """Whether several processes on the CPU are asked for, and nobody starts them. Accelerate leaves that to mpirun, and
    without it trains in one process."""
    asked = args.num_processes if "num_processes" in args.nondefault else config.get("num_processes")
    elsewhere = args.use_deepspeed or _distributed_type(args, config) == "DEEPSPEED" or _uses_fsdp(args, config)
    on_cpu = not elsewhere and not _uses_gpus(args, config) and (bool(config.get("use_cpu")) or not _has_device())
    started = any(_variable(name, whole_number(), 1) > 1 for name in _STARTED_RANKS)
    return (args.cpu or on_cpu) and (asked or 1) > 1 and not _by_mpirun(args, config) and not started


def _variable(name: str, parse: Callable[[Any], Any], default: Any) -> Any:
    """What a variable says that Accelerate reads, too. Raises `FP8BackendError` where it says something else."""
    text = os.environ.get(name)
    try:
        return default if text is None else parse(text)
    except ValueError as error:
        raise FP8BackendError(f"{name}={shown(text)} in the environment {error}: correct it, or unset it") from None


def _by_mpirun(args: argparse.Namespace, config: _Configuration) -> bool:
    return bool(args.mpirun_hostfile or (config.get("mpirun_config") or {}).get("mpirun_hostfile"))


_STARTED_RANKS = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "WORLD_SIZE")
"""Variables by which Accelerate counts ranks that something else has started."""


# Launching


def _launch(args: argparse.Namespace, config: _Configuration, fields: dict[str, Any], commands: ModuleType) -> int:
    """Run Accelerate's launcher and return the exit code of the first process that failed, or 0."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    on_cpu_ranks = _wants_cpu_ranks(args, config)
    recipe = json.dumps(fields, separators=(",", ":"))
    if _by_remote_shell(args, config):  # DeepSpeed writes it into a file and hands it to a shell, unquoted
        recipe = urllib.parse.quote(recipe, safe="")
    script, quiet, args.quiet = args.training_script, args.quiet, False  # quietly, Accelerate hides the exit code
    # what Accelerate starts is the worker, which runs the script
    args.training_script_args = [*(["-m"] if args.module else []), script, *args.training_script_args]
    args.training_script, args.module = WORKER, True
    args.mixed_precision = "no"  # until the worker says "fp8"
    try:
        with _launch_environment(recipe, on_cpu_ranks):
            if on_cpu_ranks:
                checked, *_ = commands._validate_launch_command(args)
                commands.multi_gpu_launcher(checked)
            else:
                commands.launch_command(args)
    except subprocess.CalledProcessError as error:
        code, details = error.returncode, ""
    except ChildFailedError as error:
        code, details = error.get_first_failure()[1].exitcode, f"\n{error}"
    except (ValueError, TypeError, AssertionError, ImportError, OSError) as error:
        if args.debug:
            raise
        raise FP8BackendError(_one_line(error)) from error
    else:
        return 0
    code = code if code >= 0 else 128 - code  # as a shell says it: 128 + the signal that ended the process
    if not quiet:
        print(f"fp8-backends launch: {script} ended with exit code {code}{details}", file=sys.stderr)
    return code


def _by_remote_shell(args: argparse.Namespace, config: _Configuration) -> bool:
    """Whether DeepSpeed starts the workers on several machines by a shell on each."""
    by_deepspeed = args.use_deepspeed or _distributed_type(args, config) == "DEEPSPEED"
    machines = args.num_machines or config.get("num_machines") or 1
    launcher = (config.get("deepspeed_config") or {}).get("deepspeed_multinode_launcher")
    if "deepspeed_multinode_launcher" in args.nondefault or launcher is None:
        launcher = args.deepspeed_multinode_launcher
    return by_deepspeed and machines > 1 and launcher != "standard"


@contextmanager
def _launch_environment(recipe: str, on_cpu_ranks: bool) -> Iterator[None]:
    """The environment that the workers inherit, in which only the recipe's variable speaks about FP8."""
    saved = dict(os.environ)
    for name in saved:
        if name.upper().startswith(PREFIX):
            del os.environ[name]
    os.environ[LAUNCHED] = recipe
    if on_cpu_ranks:
        os.environ["ACCELERATE_USE_CPU"] = "true"
    launcher_log = logging.getLogger("accelerate.commands.launch")
    launcher_log.addFilter(_is_not_about_defaults)
    try:
        yield
    finally:
        launcher_log.removeFilter(_is_not_about_defaults)
        os.environ.clear()
        os.environ.update(saved)


def _is_not_about_defaults(record: logging.LogRecord) -> bool:
    """Log filter: drop the list of flags that were not given. One of them is the precision, which is FP8 here."""
    return "had defaults used instead" not in record.getMessage()


def _one_line(error: Exception) -> str:
    return shortened(" ".join(str(error).split()), 1000) or type(error).__name__


def _check_accelerate(commands: ModuleType) -> None:
    """Raise `FP8BackendError` where the installed Accelerate lacks what this file calls."""
    for name, needed in _NEEDED_PARAMETERS.items():
        function = getattr(commands, name, None)
        if function is None or set(needed) - set(inspect.signature(function).parameters):
            raise FP8BackendError(
                f"this version of Accelerate ({accelerate.__version__}) has no {name}({', '.join(needed)}) in its "
                "launcher: install the version pinned in tests/constraints.txt"
            )
