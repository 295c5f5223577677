"""`fp8-backends config FILE`: what a configuration of Accelerate or Axolotl means here, and the same for Accelerate."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..paragraphs import paragraph

if TYPE_CHECKING:
    from ...training.validators import Finding
    from .training_config import TrainingConfig

SUMMARY = "what a configuration file of Accelerate or Axolotl means, checked, and written for Accelerate"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Reads an Accelerate YAML or an Axolotl YAML, says what it means as backend string and fields, runs every "
        "validator on it, and writes an Accelerate YAML that means the same. Without --output that YAML goes to "
        "standard output and the explanations to standard error."
    )
    parser.add_argument("file", metavar="FILE", help="the configuration file")
    parser.add_argument("--from", dest="system", choices=("accelerate", "axolotl"), help="whose it is, if not told")
    parser.add_argument("--output", "-o", metavar="FILE", help="where the Accelerate YAML goes")
    parser.add_argument("--backend", metavar="STRING", help="write this backend in place of the file's")
    parser.add_argument(
        "--num_processes", "--num-processes", type=int, metavar="N", help="how many will train, over all machines"
    )
    parser.add_argument("--chip", metavar="CHIP", help="check for this chip and new libraries, such as hopper")
    parser.add_argument(
        "--check", action="store_true", help="write nothing and exit with 1 where a validator finds an error"
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of explanations and YAML")


def run(args: argparse.Namespace) -> int:
    from ...errors import RecipeError
    from .reading import read

    if args.num_processes is not None and args.num_processes < 1:
        raise RecipeError(f"--num_processes {args.num_processes}: at least 1 is wanted")
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
        _write(written, args)
    return int(refused)


def _write(written: dict[str, Any], args: argparse.Namespace) -> None:
    import yaml

    from ...errors import FP8BackendError

    text = yaml.safe_dump(written, sort_keys=False)
    if args.output:
        try:
            with open(args.output, "w", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise FP8BackendError(f"--output {args.output}: {error.strerror or error}") from None
    if args.json:
        return
    print(
        f"\nwritten: {args.output}; train with it: fp8-backends launch --config_file {args.output} SCRIPT"
        if args.output
        else text.rstrip("\n")
    )


def as_json(config: TrainingConfig, findings: list[Finding], written: dict[str, Any] | None) -> dict[str, Any]:
    """Everything as plain values; `accelerate` is None where --check refuses to write it."""
    recipe = config.recipe
    return {
        "file": config.source,
        "from": config.system,
        "mixed_precision": config.mixed_precision,
        "backend": recipe and recipe.name,
        "fields": _fields(config),
        "parallel": config.parallel,
        "processes": config.processes,
        "compiled": config.compiled,
        "surroundings": config.surroundings,
        "notes": config.notes,
        "passed_over": config.passed_over,
        "findings": [asdict(finding) for finding in findings],
        "accelerate": written,
    }


def _fields(config: TrainingConfig) -> dict[str, Any]:
    from .training_config import given_fields

    return {} if config.recipe is None else given_fields(config.recipe)


_ENGINES = {
    "none": "none",
    "ddp": "DDP",
    "fsdp1": "FSDP1",
    "fsdp2": "FSDP2",
    "deepspeed": "DeepSpeed",
    "megatron": "Megatron-LM",
    "tpu": "TPU",
}
_COMPILED = {"none": "no", "full": "the whole model", "regional": "the repeated blocks"}


def explained(config: TrainingConfig, findings: list[Finding]) -> str:
    """What the file means, and what is to know about it."""
    lines = [f"{config.source} ({config.system.capitalize()}) means:", ""]
    for label, text in _meaning(config):
        lines += paragraph(label, text, 10)
    for note in config.notes:
        lines += paragraph("note", note, 10)
    lines.append("")
    for finding in findings:
        lines += paragraph(finding.severity, f"{finding.reason} [{finding.rule}]", 10)
        lines += paragraph("", f"fix: {finding.fix}", 10)
    if not findings:
        nothing = "FP8 is off: nothing to check" if config.recipe is None else "no validator found anything"
        lines.append(nothing)
    return "\n".join(lines)


def _meaning(config: TrainingConfig) -> list[tuple[str, str]]:
    recipe = config.recipe
    said = []
    if recipe is None:
        said.append(("backend", f"none: mixed precision is {config.mixed_precision}; --backend STRING writes one"))
    else:
        said.append(("backend", _backend(config)))
        fields = ", ".join(f"{name}={value!r}" for name, value in _fields(config).items())
        said.append(("fields", fields or "none beyond the backend's defaults"))
    around = "" if recipe is None else f", {recipe.autocast_dtype} around it"
    said.append(("precision", config.mixed_precision + around))
    said.append(("sharding", _ENGINES[config.parallel] + _options(config)))
    said.append(("processes", "not said" if config.processes is None else str(config.processes)))
    said.append(("compiled", _COMPILED[config.compiled]))
    if config.passed_over:
        said.append(("passed by", f"{len(config.passed_over)} keys that say nothing about these"))
    return said


def _backend(config: TrainingConfig) -> str:
    from ...compute import registry
    from ...recipes.handlers import FP8RecipeKwargs

    name = config.recipe.name
    if name != "auto":
        return name
    here = FP8RecipeKwargs(**{**config.fields, "backend": registry.auto_backend()})
    return f"auto, which is {here.name} on this machine"


def _options(config: TrainingConfig) -> str:
    """What of the engine's options matters for FP8."""
    names = {
        "zero_stage": "ZeRO stage {}",
        "cpu_ram_efficient_loading": "efficient loading",
        "activation_checkpointing": "activation checkpointing",
    }
    found = [names[key].format(value) for key, value in config.surroundings.items() if key in names and value]
    return "".join(f", {each}" for each in found)
