"""The flags of `fp8-backends launch`: all of `accelerate launch`, and every recipe field that a text can give.

Accelerate's parser is used, so its spellings hold: `--fp8_margin`, `--fp8-margin`. What follows the script is its own.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import NoReturn

from ..compute.fields import Field, Variable
from ..errors import FP8BackendError, RecipeError
from ..recipes.fields import FIELDS, help_of, registered_fields, variable_value
from ..recipes.sources import Source, unknown_variable
from ..recipes.strings import names_backend
from ..words import shortened


class _Formatter(argparse.HelpFormatter):
    """Each flag in one spelling, of the two that Accelerate's parser takes."""

    def add_argument(self, action: argparse.Action) -> None:
        action.option_strings = [spelling for spelling in action.option_strings if "-" not in spelling[2:]]
        super().add_argument(action)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The arguments as Accelerate's parser reads them, recipe fields as text. `nondefault` names what was given.

    Raises `FP8BackendError` in one line for what the parser refuses; an unknown flag comes with the nearest known one.
    """
    parser = launch_parser()
    args, unknown = parser.parse_known_args(arguments)
    for word in unknown:
        _refuse_unknown(word.partition("=")[0], parser)
    args.nondefault = getattr(args, "nondefault", set())
    if names_backend(args.mixed_precision) and "fp8_backend" not in args.nondefault:
        args.fp8_backend, args.mixed_precision = args.mixed_precision, "fp8"
        args.nondefault.add("fp8_backend")
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
    parser._option_string_actions["--mixed_precision"].choices = None  # it takes a backend string, too
    group = next(group for group in parser._action_groups if group.title == "FP8 Arguments")
    for name, (field, _) in _flags().items():
        values = f" ({field.values_and_default})" if field.values_and_default else ""
        described = f"{help_of(field).rstrip('.')}{values}".replace("%", "%%")
        action = parser._option_string_actions.get(f"--{name}")
        if action is None:
            group.add_argument(f"--{name}", default=None, help=described)
        else:
            action.choices = action.type = action.default = None
            action.help, action.metavar = described, None if action.nargs == 0 else field.name.upper()
    return parser


def _flags() -> dict[str, tuple[Field, Variable]]:
    """The fields that a text can give, also those of registered backends, by the name of their flag."""
    fields = (*FIELDS.values(), *registered_fields().values())
    pairs = [(field, variable) for field in fields for variable in field.variables]
    return {
        f"fp8_{variable.suffix.lower()}": (field, variable)
        for field, variable in pairs
        if variable.suffix == field.own_suffix or variable.reads
    }


def recipe_flags(args: argparse.Namespace) -> Source:
    """What the flags say about the recipe. A flag given at its default value is given."""
    fields, places = {}, {}
    for name, (field, variable) in _flags().items():
        if name in args.nondefault:
            value = getattr(args, name)
            place = f"--{name}" if value is True else f"--{name} {value}"
            try:
                parsed = variable_value(field, variable, value)
            except RecipeError as error:
                raise RecipeError(f"{place}: {error}") from None
            if parsed is None:
                continue
            if fields.setdefault(field.name, parsed) != parsed:
                raise RecipeError(f"{place} disagrees with {places[field.name]}: leave one of the two out")
            places.setdefault(field.name, place)
    return Source(fields, places)


def _refuse(message: str) -> NoReturn:
    raise FP8BackendError(f"{shortened(message, 1000)} (see fp8-backends launch --help)")


def _refuse_unknown(flag: str, parser: argparse.ArgumentParser) -> NoReturn:
    name = flag.lstrip("-").replace("-", "_").lower()
    suffix = name.removeprefix("fp8_").upper()
    if name.startswith("fp8_"):
        known = {each.removeprefix("fp8_").upper() for each in _flags()}
        raise unknown_variable(flag, suffix, lambda near: f"--fp8_{near.lower()}", known)
    near = difflib.get_close_matches(f"--{name}", list(parser._option_string_actions), n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    _refuse(f"unknown flag {flag}{hint}")
