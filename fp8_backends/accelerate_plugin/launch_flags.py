"""The flags of `fp8-backends launch`: all of `accelerate launch`, and every recipe field that a text can give.

Accelerate's parser is used, so its spellings hold: `--fp8_margin`, `--fp8-margin`. What follows the script is its own.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import NoReturn

from ..errors import FP8BackendError, RecipeError
from ..recipes.merging import Source
from ..recipes.sources import VARIABLES, field_value, unknown_variable

_GROUP = "FP8 Arguments"
_HELP = {
    "BACKEND": "COMPUTE[:SCALING][+msamp[:LEVEL]]: native:rowwise, ao, te+msamp:O3, msamp:O2, … (default: auto, which "
    "picks for this machine)",
    "SCALING": "the scaling rule, if not in --fp8_backend: delayed, dynamic, rowwise, blockwise, mxfp8, window, …",
    "OPT_LEVEL": "MS-AMP's level O0, O1, O2 or O3, if not in --fp8_backend",
    "USE_MXFP8_BLOCK_SCALING": "true: the same as --fp8_scaling mxfp8",
    "PARAMS": "true: weights that do not train are kept in FP8",
    "FUSE_NORMS": "true: a norm that one Linear reads is computed by TransformerEngine's kernel",
    "DPA": "attention in FP8: only false",
    "MHA": "as --fp8_dpa",
    "AUTO_FILTER": "true: TorchAO leaves layers out that are too small to gain",
    "ROUNDING": "of weights and states that a level stores: stochastic (default) or nearest",
    "EXP_AVG_SCALING": "one scale of a level's exp_avg for a tensor (default) or for a block",
    "IMPLEMENTATION": "of the levels: native (default) or original, the package msamp",
    "SHARD_STATES": "false: under DDP every rank keeps all masters and Adam states of O3",
    "INCLUDE": "name patterns of layers to convert, separated by commas",
    "EXCLUDE": "name patterns of layers to keep in high precision, separated by commas",
    "AUTOCAST_DTYPE": "what runs around FP8: bf16 (default; on a CPU without bf16 products fp32), fp16 or fp32",
    "GRADIENT_COMM": "how gradients travel between ranks: fp8 or plain",
    "ON_UNPROVEN": "when the first step ran no FP8 product: raise (default) or warn",
}
"""For flags that Accelerate does not have, or describes by less than they take."""
_OF_FILES = ("AMAX_HISTORY_LENGTH", "AMAX_COMPUTE_ALGORITHM", "OPTIMIZATION_LEVEL", "ALL_GATHER", "NUMBER_FORMAT")
"""Other names that are keys of YAML files only."""
_FLAGS = {f"fp8_{suffix.lower()}": VARIABLES[suffix] for suffix in VARIABLES if suffix not in _OF_FILES}


class _Formatter(argparse.HelpFormatter):
    """Each flag in one spelling, of the two that Accelerate's parser takes."""

    def add_argument(self, action: argparse.Action) -> None:
        action.option_strings = [spelling for spelling in action.option_strings if "-" not in spelling[2:]]
        super().add_argument(action)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The arguments, as Accelerate's parser has them; recipe fields as text. `nondefault` names what was given.

    Raises `FP8BackendError` in one line for what the parser refuses; an unknown flag comes with the nearest known one.
    """
    parser = launch_parser()
    args, unknown = parser.parse_known_args(arguments)
    for word in unknown:
        _refuse_unknown(word.partition("=")[0], parser)
    args.nondefault = getattr(args, "nondefault", set())
    return args


def launch_parser() -> argparse.ArgumentParser:
    """Accelerate's parser with our fields in it. What values a field takes is for the recipe to say."""
    from accelerate.commands.launch import launch_command_parser

    parser = launch_command_parser()
    parser.prog, parser.formatter_class, parser.error = "fp8-backends launch", _Formatter, _refuse
    parser.description = (
        "accelerate launch, in FP8, for scripts as they are: all of its flags, and every field of a recipe. "
        "What the code says comes before flags, flags before the configuration file, and that before the environment."
    )
    group = next(group for group in parser._action_groups if group.title == _GROUP)
    for name, variable in _FLAGS.items():
        action = parser._option_string_actions.get(f"--{name}")
        described = _HELP.get(name.removeprefix("fp8_").upper())
        if action is None:
            group.add_argument(f"--{name}", default=None, help=described)
        else:
            action.choices = action.type = action.default = None
            action.help = described or action.help
            action.metavar = None if action.nargs == 0 else variable.field.upper()
    return parser


def recipe_flags(args: argparse.Namespace) -> Source:
    """What the flags say about the recipe. A flag given at its default value is given."""
    fields, said = {}, {}
    for name, variable in _FLAGS.items():
        if name in args.nondefault:
            value = getattr(args, name)
            said[variable.field] = f"--{name}" if value is True else f"--{name} {value}"
            try:
                fields[variable.field] = field_value(variable.field, value)
            except RecipeError as error:
                raise RecipeError(f"{said[variable.field]}: {error}") from None
    return Source(fields, said)


def _refuse(message: str) -> NoReturn:
    raise FP8BackendError(f"{message} (see fp8-backends launch --help)")


def _refuse_unknown(flag: str, parser: argparse.ArgumentParser) -> NoReturn:
    name = flag.lstrip("-").replace("-", "_").lower()
    suffix = name.removeprefix("fp8_").upper()
    if name.startswith("fp8_"):
        known = {each.removeprefix("fp8_").upper() for each in _FLAGS}
        raise unknown_variable(flag, suffix, lambda near: f"--fp8_{near.lower()}", known)
    near = difflib.get_close_matches(f"--{name}", list(parser._option_string_actions), n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    _refuse(f"unknown flag {flag}{hint}")
