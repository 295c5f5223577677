"""`fp8-backends config FILE`: explain a configuration of Accelerate or Axolotl, and write the same
for Accelerate."""

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import yaml

from ...errors import RecipeError
from ...recipes.handlers import chosen_by_auto
from ...recipes.sources import read_file
from ...rules.validate import Finding
from ...words import counted
from ..terminal import paragraphs, positive_int, write_text
from .accelerate_config import read_accelerate
from .axolotl_config import read_axolotl
from .training_config import TrainingConfig, given_fields

_READERS = {"accelerate": read_accelerate, "axolotl": read_axolotl}
_MARKS = {
    "accelerate": (
        "compute_environment",
        "distributed_type",
        "mixed_precision",
        "num_machines",
        "downcast_bf16",
    ),
    "axolotl": (
        "base_model",
        "datasets",
        "sequence_len",
        "micro_batch_size",
        "fp8",
        "fp16",
        "bf16",
        "adapter",
    ),
}


def read(path: str, system: str | None = None, processes: int | None = None) -> TrainingConfig:
    """Read a YAML (or JSON) file of Accelerate or Axolotl (`system`; by default inferred from the
    keys).

    `processes` overrides the file's number. Raises `RecipeError` for a wrong file, or unknown keys
    or values.
    """
    values = read_file(path)
    if system is None:
        counts = {name: sum(mark in values for mark in marks) for name, marks in _MARKS.items()}
        if counts["accelerate"] == counts["axolotl"]:
            listed = " or ".join(
                f"{name.capitalize()} ({', '.join(marks)}, …)" for name, marks in _MARKS.items()
            )
            raise RecipeError(
                f"{path}: its keys do not tell whether it is made for {listed}: say it with --from"
            )
        system = max(counts, key=counts.get)
    return _READERS[system](values, path, processes)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Reads an Accelerate YAML or an Axolotl YAML, says what it means as backend string and "
        "fields, runs every validator on it, and writes an Accelerate YAML that means the same. "
        "Without --output that YAML goes to standard output and the explanations to standard error."
    )
    add = parser.add_argument
    add(
        "file",
        metavar="FILE",
        nargs="?",
        help="the configuration file; with --new, the file to write",
    )
    add(
        "--new",
        action="store_true",
        help="ask for chip, model and ranks, and write a new configuration",
    )
    add("--from", dest="system", choices=("accelerate", "axolotl"), help="whose it is, if not told")
    add("--output", "-o", metavar="FILE", help="where the Accelerate YAML goes")
    add("--backend", metavar="STRING", help="write this backend in place of the file's")
    add(
        "--num_processes",
        "--num-processes",
        type=positive_int,
        metavar="N",
        help="how many will train, over all machines",
    )
    add(
        "--chip",
        metavar="CHIP",
        help="check for this chip and new libraries: h100, l40s, hopper, …",
    )
    add(
        "--check",
        action="store_true",
        help="write nothing and exit with 1 where a validator finds an error",
    )
    add("--json", action="store_true", help="print JSON in place of explanations and YAML")


def run(args: argparse.Namespace) -> int:
    if args.new:
        return _new(args)
    if args.file is None:
        raise RecipeError("name a configuration file, or give --new to write one")
    config = read(args.file, args.system, args.num_processes)
    if args.backend is not None:
        config.use(args.backend)
    findings = config.findings(args.chip)
    refused = args.check and any(finding.severity == "error" for finding in findings)
    written = None if refused else config.for_accelerate()
    if args.json:
        print(json.dumps(as_json(config, findings, written), indent=1))
    else:
        print(explained(config, findings), file=sys.stdout if args.output else sys.stderr)
    if written is not None:
        text = _as_yaml(written)
        if args.output:
            write_text(args.output, text)
        if not args.json:
            launch = f"train with it: fp8-backends launch --config_file {args.output} SCRIPT"
            print(f"\nwritten: {args.output}; {launch}" if args.output else text.rstrip("\n"))
    return int(refused)


def _new(args: argparse.Namespace) -> int:
    """Ask, show the meaning and the text of the file, write it, and print the next command."""
    if idle := [
        name
        for name, value in vars(args).items()
        if value and name not in ("command", "file", "new")
    ]:
        raise RecipeError(f"--new asks for everything: leave out {', '.join(idle)}")
    from .wizard import launch_commands, new_config  # estimates load transformers

    path, config, chip = new_config(args.file)
    written = config.for_accelerate()
    text = _as_yaml(written)
    write_text(path, text)
    print(
        f"\n{explained(config, config.findings(chip))}\n\nwritten to "
        f"{path}:\n\n{textwrap.indent(text, '    ')}"
    )
    where = f"train with it{'' if chip is None else f' on {chip}'}"
    print(f"{where}:\n\n{launch_commands(path, written['num_machines'])}")
    return 0


def _as_yaml(written: dict[str, Any]) -> str:
    return _WITHOUT_IMPORT * ("fp8_config" in written) + yaml.safe_dump(written, sort_keys=False)


_WITHOUT_IMPORT = """\
# For `fp8-backends launch`, or for `accelerate launch` of a script that
# imports fp8_backends. Without the import, stock Accelerate ends with
# "... is not a valid FP8BackendType".
"""
"""Comment at the head of a file, since stock Accelerate's message does not name this package."""


def as_json(
    config: TrainingConfig, findings: list[Finding], written: dict[str, Any] | None
) -> dict[str, Any]:
    """Return everything as plain values; `accelerate` is None if --check refuses to write it."""
    recipe = config.recipe
    same = (
        "mixed_precision",
        "parallel",
        "processes",
        "compiled",
        "surroundings",
        "notes",
        "passed_over",
    )
    return {
        "file": config.source,
        "from": config.system,
        "backend": recipe and recipe.name,
        "fields": {} if recipe is None else given_fields(recipe),
        **{name: getattr(config, name) for name in same},
        "findings": [asdict(finding) for finding in findings],
        "accelerate": written,
    }


_ENGINES = {
    "ddp": "DDP",
    "fsdp1": "FSDP1",
    "fsdp2": "FSDP2",
    "deepspeed": "DeepSpeed",
    "megatron": "Megatron-LM",
}
_ENGINES |= {"tpu": "TPU", "none": "none"}
_COMPILED = {"none": "no", "full": "the whole model", "regional": "the repeated blocks"}
_OPTIONS = {
    "zero_stage": "ZeRO stage {}",
    "zero_offload": "offload",
    "cpu_ram_efficient_loading": "efficient loading",
    "activation_checkpointing": "activation checkpointing",
}


def explained(config: TrainingConfig, findings: list[Finding]) -> str:
    meaning = paragraphs([*_meaning(config), *(("note", note) for note in config.notes)], 10)
    rows = []
    for finding in findings:
        rows += [
            (finding.severity, f"{finding.reason} [{finding.rule}]"),
            ("", f"fix: {finding.fix}"),
        ]
    nothing = "no validator found anything"
    if config.recipe is None:
        nothing = "FP8 is off: nothing to check"
    title = f"{config.source} ({config.system.capitalize()}) means:"
    return f"{title}\n\n{meaning}\n\n{paragraphs(rows, 10) if rows else nothing}"


def _meaning(config: TrainingConfig) -> Iterator[tuple[str, str]]:
    recipe = config.recipe
    if recipe is None:
        yield (
            "backend",
            f"none: mixed precision is {config.mixed_precision}; --backend STRING writes one",
        )
        yield "precision", config.mixed_precision
    else:
        fields = ", ".join(f"{name}={value!r}" for name, value in given_fields(recipe).items())
        backend = recipe.name
        if backend == "auto":
            on_this_machine, reason = chosen_by_auto(recipe)
            backend = f"auto, which is {on_this_machine.name} on this machine ({reason})"
        yield "backend", backend
        yield "fields", fields or "none beyond the backend's defaults"
        yield "precision", f"{config.mixed_precision}, {recipe.autocast_dtype} around it"
    options = [
        _OPTIONS[key].format(value)
        for key, value in config.surroundings.items()
        if key in _OPTIONS and value
    ]
    yield "sharding", ", ".join([_ENGINES[config.parallel], *options])
    yield "processes", "not given" if config.processes is None else str(config.processes)
    yield "compiled", _COMPILED[config.compiled]
    if config.passed_over:
        yield "passed by", f"{counted(len(config.passed_over), 'key')} without a word about these"
