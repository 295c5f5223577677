"""Print the completion script of a shell, with every command, option and backend string.

shtab writes it once; argcomplete would start Python, and import torch, at each Tab.
"""

import argparse
import importlib
from collections.abc import Mapping

from ..compute import chips
from ..errors import FP8BackendError

SHELLS = ("bash", "zsh")
_WHOLE_STRINGS = (
    "COMP_WORDBREAKS=${COMP_WORDBREAKS//:}  # else bash completes each part of native:dynamic alone"
)
_FILES = ("file", "source", "output", "out", "text", "target", "config_file", "training_script")


def backend_strings() -> list[str]:
    """Return the common backend strings: each rule of scaling, each level, and `auto`."""
    rules = [name for names in chips.DEFAULTS for name in names if name != "msamp"]
    return ["auto", *rules, *(f"msamp:O{level}" for level in (1, 2, 3, 4)), "te+msamp:O2"]


def completion_script(commands: Mapping[str, tuple[str, str]], shell: str) -> str:
    """Return the script for all commands. Raises `FP8BackendError` without shtab."""
    try:
        import shtab
    except ImportError:
        raise FP8BackendError("--print-completion needs shtab: pip install shtab") from None
    colon = r"\:" if shell == "zsh" else ":"  # zsh splits at others
    whole = argparse.ArgumentParser(prog="fp8-backends")
    whole.add_argument("--version", action="version")
    whole.add_argument("--print-completion", choices=SHELLS)
    subparsers = whole.add_subparsers(dest="command")
    for name, (module_name, purpose) in commands.items():
        module = importlib.import_module(module_name, __package__)
        parents = [module.launch_parser()] if name == "launch" else []
        of_command = subparsers.add_parser(
            name, help=purpose, parents=parents, conflict_handler="resolve"
        )
        if name != "launch":
            module.add_arguments(of_command)
        for action in of_command._actions:
            if action.dest in ("backend", "backends", "fp8_backend", "chip"):
                names = chips.CARDS if action.dest == "chip" else backend_strings()
                action.choices = [name.replace(":", colon) for name in names]
            elif action.dest in _FILES:
                action.complete = shtab.FILE
    script = shtab.complete(whole, shell)
    return script + f"\n{_WHOLE_STRINGS}\n" * (shell == "bash")
