"""`fp8-backends launch`: run Accelerate's launcher with every backend string and field, for
unmodified scripts.

Flags, configuration file and environment are merged into one recipe, checked here and passed to the
workers (`worker.py`) in `FP8_BACKENDS_RECIPE`. Accelerate's launcher runs in this process and sees
no mixed precision: for "fp8" it requires three libraries that few backends need.
"""

import argparse
import difflib
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
from typing import Any, NamedTuple, NoReturn

import torch

from ..announcement import logger
from ..compute.fields import Field, Variable, flag, whole_number
from ..errors import BackendUnavailableError, FP8BackendError
from ..recipes import sources
from ..recipes.fields import FIELDS, help_of, registered_fields
from ..recipes.handlers import AUTO, FP8RecipeKwargs, Recipe
from ..recipes.merging import merged
from ..recipes.strings import names_backend
from ..rules import BY_NAME
from ..rules.preconditions import check_machine
from ..words import shortened, shown
from .plugin import incompatibilities, is_disabled, refuse_mismatches

WORKER = f"{__package__}.worker"
_GATHER = "enable_fsdp_float8_all_gather"

_NEEDED_PARAMETERS = {
    "launch_command": ("args",),
    "_validate_launch_command": ("args",),
    "multi_gpu_launcher": ("args",),
    "load_config_from_file": ("config_file",),
}
"""Functions of `accelerate.commands.launch` that this file calls."""


class Configuration(NamedTuple):
    path: str = ""
    values: Any = argparse.Namespace()

    def get(self, name: str) -> Any:
        return getattr(self.values, name, None)


def run(arguments: Sequence[str]) -> int:
    """Launch in FP8 as `accelerate launch` would with these arguments. Return the script's exit
    code."""
    if is_disabled():
        raise FP8BackendError(
            "FP8_BACKENDS_DISABLE is set, which contradicts this command: unset it"
        )
    from accelerate.commands import launch as commands

    refuse_mismatches(incompatibilities(commands, _NEEDED_PARAMETERS))
    args = parse(arguments)
    config = _configuration(args, commands)
    _check_precision(args, config)
    _check_launcher(args, config)
    fields = recipe_fields(args, config)
    _check_machine(FP8RecipeKwargs(**fields), args, config)
    return _launch(args, config, fields, commands)


# Flags


class _Formatter(argparse.HelpFormatter):
    def add_argument(self, action: argparse.Action) -> None:
        action.option_strings = [
            spelling for spelling in action.option_strings if "-" not in spelling[2:]
        ]
        super().add_argument(action)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse arguments with Accelerate's parser, recipe fields as text; `nondefault` names the given
    ones."""
    parser = launch_parser()
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        spelled = unknown[0].partition("=")[0]
        name = spelled.lstrip("-").replace("-", "_").lower()
        if name.startswith("fp8_"):
            suffixes = {flag_name.removeprefix("fp8_").upper() for flag_name in _flags()}
            suffix = name.removeprefix("fp8_").upper()
            raise sources.unknown_variable(spelled, suffix, "--fp8_", suffixes)
        near = difflib.get_close_matches(f"--{name}", list(parser._option_string_actions), n=1)
        _refuse(f"unknown flag {spelled}" + (f" (did you mean {near[0]!r}?)" if near else ""))
    args.nondefault = getattr(args, "nondefault", set())
    if names_backend(args.mixed_precision) and "fp8_backend" not in args.nondefault:
        args.fp8_backend = args.mixed_precision
        args.mixed_precision = "fp8"
        args.nondefault.add("fp8_backend")
    return args


def launch_parser() -> argparse.ArgumentParser:
    """Return Accelerate's parser with our fields. The recipe checks the values."""
    from accelerate.commands.launch import launch_command_parser

    parser = launch_command_parser()
    parser.prog = "fp8-backends launch"
    parser.formatter_class = _Formatter
    parser.error = _refuse
    parser.description = (
        "accelerate launch, in FP8, for scripts as they are: all of its flags, and every field of "
        "a recipe. Code overrides flags, flags override the configuration file, and that overrides "
        "the environment."
    )
    # a backend string is valid, too
    parser._option_string_actions["--mixed_precision"].choices = None
    group = next(group for group in parser._action_groups if group.title == "FP8 Arguments")
    for name, (field, _) in _flags().items():
        values = f" ({field.values_and_default})" if field.values_and_default else ""
        text = f"{help_of(field).rstrip('.')}{values}".replace("%", "%%")
        action = parser._option_string_actions.get(f"--{name}")
        if action is None:
            group.add_argument(f"--{name}", default=None, help=text)
        else:
            action.choices = action.type = action.default = None
            action.help = text
            action.metavar = None if action.nargs == 0 else field.name.upper()
    return parser


def _flags() -> dict[str, tuple[Field, Variable]]:
    """Map flags to the fields with a text form, also of registered backends."""
    fields = (*FIELDS.values(), *registered_fields().values())
    pairs = [(field, variable) for field in fields for variable in field.variables]
    return {
        f"fp8_{variable.suffix.lower()}": (field, variable)
        for field, variable in pairs
        if variable.suffix == field.own_suffix or variable.reads
    }


def recipe_flags(args: argparse.Namespace) -> sources.Source:
    """Read the recipe fields in the flags. A flag at its default value counts as given."""
    source = sources.Source()
    for name, match in _flags().items():
        if name in args.nondefault:
            value = getattr(args, name)
            source.read(match, value, f"--{name}" if value is True else f"--{name} {value}")
    return source


def _refuse(message: str) -> NoReturn:
    raise FP8BackendError(f"{shortened(message, 1000)} (see fp8-backends launch --help)")


# The request


def recipe_fields(args: argparse.Namespace, config: Configuration) -> dict[str, Any]:
    """Merge the fields of `FP8RecipeKwargs` from flags, configuration file and environment, the
    strongest first."""
    in_file = sources.config_source(config.get("fp8_config"), config.path)
    # `accelerate config` recommends it for FSDP2
    if _GATHER in in_file.idle and not _uses_fsdp(args, config):
        del in_file.fields[_GATHER]
    return merged([recipe_flags(args), in_file, sources.environment_source()])


def _configuration(args: argparse.Namespace, commands: ModuleType) -> Configuration:
    """Read the file that Accelerate will read: the given one, else the user's default one, but not
    with --cpu."""
    default = commands.default_config_file
    path = args.config_file or (default if os.path.isfile(default) and not args.cpu else None)
    if path is None:
        return Configuration()
    sources.read_file(path)  # Accelerate's reader accepts a repeated key
    try:
        values = commands.load_config_from_file(path)
    except Exception as error:  # Accelerate's reader may raise anything
        raise FP8BackendError(
            f"{path} is no configuration file of Accelerate: {_one_line(error)}"
        ) from error
    kind = getattr(values, "distributed_type", None)
    if kind is not None and not isinstance(kind, Enum):  # Accelerate reads only text
        raise FP8BackendError(
            f"{path}: distributed_type={shown(kind)} must be a word such as NO, MULTI_GPU, FSDP"
        )
    if names_backend(values.mixed_precision) and "backend" not in (values.fp8_config or {}):
        values.fp8_config = {**(values.fp8_config or {}), "backend": values.mixed_precision}
        values.mixed_precision = "fp8"
    return Configuration(path, values)


def _check_precision(args: argparse.Namespace, config: Configuration) -> None:
    """Refuse another precision as a flag; warn of one in the configuration file, which other
    commands read, too."""
    if args.mixed_precision not in (None, "fp8"):
        raise FP8BackendError(
            f"--mixed_precision {args.mixed_precision}: this command trains in FP8; leave the flag "
            "out (around FP8 training runs in --fp8_autocast_dtype, bf16 by default), or use "
            "accelerate launch"
        )
    in_file = config.get("mixed_precision")
    if args.mixed_precision is None and in_file not in (None, "fp8"):
        logger.warning(
            "mixed_precision: %s in %s has no effect: this command trains in FP8",
            in_file,
            config.path,
        )


def _check_launcher(args: argparse.Namespace, config: Configuration) -> None:
    """Refuse a launcher that cannot train in FP8 here, and a missing script. Raises
    `FP8BackendError`."""
    if "sagemaker" in str(config.get("compute_environment")).lower():
        raise FP8BackendError(
            f"{config.path} is for Amazon SageMaker, which starts the script by itself: put "
            "`import fp8_backends` into the script, and use accelerate launch"
        )
    if args.no_python:
        raise FP8BackendError(
            "--no_python: only Python scripts can be connected to this package; leave the flag out"
        )
    for rule, flag_name, kind in (
        ("tpu", "tpu", "XLA"),
        ("megatron", "use_megatron_lm", "MEGATRON_LM"),
    ):
        if getattr(args, flag_name) or _distributed_type(args, config) == kind:
            reason = BY_NAME[rule].reason
            fix = BY_NAME[rule].fix
            raise FP8BackendError(f"--{flag_name} (distributed_type {kind}): {reason}. Fix: {fix}")
    by_fsdp = _uses_fsdp(args, config)
    uses_cpu = config.get("use_cpu") or _variable("ACCELERATE_USE_CPU", flag, False)
    if (
        (by_fsdp or (_uses_gpus(args, config) and not uses_cpu))
        and not args.cpu
        and not has_device()
    ):
        raise FP8BackendError(
            f"{'--use_fsdp' if by_fsdp else '--multi_gpu'}: this machine has no GPU, and without "
            "one Accelerate would train alone on every rank. For DDP on the CPU: --cpu "
            "--num_processes N"
        )
    if not args.module and not os.path.exists(args.training_script):
        raise FP8BackendError(f"there is no script {shown(args.training_script)}")


def _check_machine(recipe: Recipe, args: argparse.Namespace, config: Configuration) -> None:
    """Raise `BackendUnavailableError` if the recipe cannot run here; warn if another machine or GPU
    may train."""
    if recipe.compute == AUTO:
        return
    try:
        check_machine(recipe)
    except BackendUnavailableError as error:
        chosen_gpus = (args.gpu_ids or config.get("gpu_ids") or "all") != "all"
        if not (chosen_gpus or _by_mpirun(args, config) or _by_remote_shell(args, config)):
            raise
        logger.warning(
            "%s. The processes are started all the same: they may find another machine, or GPU",
            error,
        )


def _distributed_type(args: argparse.Namespace, config: Configuration) -> str:
    """Return the configuration file's distributed type; empty if a flag overrides it, or without
    one."""
    flags = (
        args.cpu,
        args.multi_gpu,
        args.tpu,
        args.use_deepspeed,
        args.use_fsdp,
        args.use_megatron_lm,
    )
    kind = config.get("distributed_type")
    return "" if any(flags) or kind is None else str(kind.value)


def _uses_fsdp(args: argparse.Namespace, config: Configuration) -> bool:
    return args.use_fsdp or _distributed_type(args, config) == "FSDP"


def _uses_gpus(args: argparse.Namespace, config: Configuration) -> bool:
    kind = _distributed_type(args, config)
    return args.multi_gpu or (kind.startswith("MULTI_") and kind != "MULTI_CPU")


def _uses_deepspeed(args: argparse.Namespace, config: Configuration) -> bool:
    return args.use_deepspeed or _distributed_type(args, config) == "DEEPSPEED"


def has_device() -> bool:
    return torch.accelerator.is_available()


_STARTED_RANKS = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "WORLD_SIZE")
"""Variables in which Accelerate finds the number of ranks that another launcher has started."""


def _wants_cpu_ranks(args: argparse.Namespace, config: Configuration) -> bool:
    """Return True if several CPU processes are requested and no launcher starts them: Accelerate
    would train in one."""
    count = (
        args.num_processes if "num_processes" in args.nondefault else config.get("num_processes")
    )
    elsewhere = _uses_deepspeed(args, config) or _uses_fsdp(args, config)
    on_cpu = (
        not elsewhere
        and not _uses_gpus(args, config)
        and (bool(config.get("use_cpu")) or not has_device())
    )
    started = any(_variable(name, whole_number(), 1) > 1 for name in _STARTED_RANKS)
    return (
        (args.cpu or on_cpu) and (count or 1) > 1 and not _by_mpirun(args, config) and not started
    )


def _variable(name: str, parse: Callable[[Any], Any], default: Any) -> Any:
    """Read a variable of Accelerate's launcher. Raises `FP8BackendError` for an invalid value."""
    text = os.environ.get(name)
    try:
        return default if text is None else parse(text)
    except ValueError as error:
        raise FP8BackendError(
            f"{name}={shown(text)} in the environment {error}: correct it, or unset it"
        ) from None


def _by_mpirun(args: argparse.Namespace, config: Configuration) -> bool:
    return bool(args.mpirun_hostfile or (config.get("mpirun_config") or {}).get("mpirun_hostfile"))


def _by_remote_shell(args: argparse.Namespace, config: Configuration) -> bool:
    """Return True if DeepSpeed starts the workers through a shell on each of several machines."""
    machines = args.num_machines or config.get("num_machines") or 1
    launcher = (config.get("deepspeed_config") or {}).get("deepspeed_multinode_launcher")
    if "deepspeed_multinode_launcher" in args.nondefault or launcher is None:
        launcher = args.deepspeed_multinode_launcher
    return _uses_deepspeed(args, config) and machines > 1 and launcher != "standard"


# Launching


def _launch(
    args: argparse.Namespace, config: Configuration, fields: dict[str, Any], commands: ModuleType
) -> int:
    """Run Accelerate's launcher and return the exit code of the first process that failed, or 0."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    on_cpu_ranks = _wants_cpu_ranks(args, config)
    recipe = json.dumps(fields, separators=(",", ":"))
    if _by_remote_shell(args, config):  # DeepSpeed writes it into a file for a shell, unquoted
        recipe = urllib.parse.quote(recipe, safe="")
    # with --quiet Accelerate hides the exit code
    script = args.training_script
    quiet = args.quiet
    args.quiet = False
    # Accelerate starts the worker, which runs the script
    args.training_script_args = [
        *(["-m"] if args.module else []),
        script,
        *args.training_script_args,
    ]
    args.training_script = WORKER
    args.module = True
    args.mixed_precision = "no"  # until the worker says "fp8"
    try:
        with _launch_environment(recipe, on_cpu_ranks):
            if on_cpu_ranks:
                checked, *_ = commands._validate_launch_command(args)
                commands.multi_gpu_launcher(checked)
            else:
                commands.launch_command(args)
    except subprocess.CalledProcessError as error:
        code = error.returncode
        details = ""
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        details = f"\n{error}"
    except (ValueError, TypeError, AssertionError, ImportError, OSError) as error:
        if args.debug:
            raise
        raise FP8BackendError(_one_line(error)) from error
    else:
        return 0
    code = code if code >= 0 else 128 - code  # as in a shell: 128 + signal
    if not quiet:
        print(
            f"fp8-backends launch: {script} ended with exit code {code}{details}", file=sys.stderr
        )
    return code


@contextmanager
def _launch_environment(recipe: str, on_cpu_ranks: bool) -> Iterator[None]:
    """Set the environment of the workers: the recipe's variable replaces all others about FP8."""
    saved = dict(os.environ)
    for name in saved:
        if name.upper().startswith(sources.PREFIX):
            del os.environ[name]
    os.environ[sources.LAUNCHED] = recipe
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
    return "had defaults used instead" not in record.getMessage()


def _one_line(error: Exception) -> str:
    return shortened(" ".join(str(error).split()), 1000) or type(error).__name__
