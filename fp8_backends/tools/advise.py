"""`fp8-backends advise`: choose layers to keep out of FP8, or a scaling, by measurements on a model
and a text."""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from ..accelerate_plugin.launch import launch_parser
from ..advice import Advice, advise, check_recipe_path
from ..compute import hardware
from ..errors import FP8BackendError
from ..recipes.fields import settings_of
from ..recipes.handlers import Recipe, resolve
from ..words import counted, first_line, share, shortened
from .compare.workload import (
    CAUSAL,
    Settings,
    TrainingText,
    build_model,
    defaults,
    inputs,
    load_text,
    task,
)
from .config import read
from .config.training_config import given_fields, yaml_fields
from .terminal import Progress, paragraphs, positive_int, table

_DESCRIPTION = """\
Measures how far a recipe turns the gradients of a model from those of FP32, and tries changes from mild to strong until
one halves that gap: single layers in another scaling or in high precision, or another scaling for all. Prints every
trial, and the advised recipe to paste. Nothing is fetched, and only --recipe writes a file."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    add = parser.add_argument
    add(
        "--model",
        metavar="MODEL",
        help="a config.json, its folder, or a cached model (a small Llama)",
    )
    add(
        "--backend",
        metavar="STRING",
        help="the recipe as given (default: auto, what this machine would train with)",
    )
    add(
        "--config_file",
        metavar="FILE",
        help="instead: that of a configuration of Accelerate or Axolotl",
    )
    add(
        "--text",
        metavar="PATH",
        help="a text file or a folder of them (the Python standard library's sources)",
    )
    add("--batches", type=positive_int, default=4, metavar="N", help="batches to measure with (4)")
    add("--batch", type=positive_int, default=8, metavar="N", help="sequences in a batch (8)")
    add(
        "--sequence", type=positive_int, default=128, metavar="N", help="tokens in a sequence (128)"
    )
    add(
        "--min_flops_share",
        type=float,
        default=0.95,
        metavar="X",
        help="share of the FLOPs in FP8 to keep (0.95)",
    )
    add("--max_trials", type=int, default=40, metavar="N", help="recipes to measure at most (40)")
    add(
        "--recipe",
        metavar="FILE",
        help="write the advised recipe: recipe.yaml, for launch --fp8_backend recipe.yaml",
    )
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    if args.recipe is not None:
        check_recipe_path(args.recipe)
    if args.config_file is None:
        recipe = resolve(args.backend)
    elif args.backend is not None:
        raise FP8BackendError("--backend and --config_file both name the recipe: give one of them")
    elif (recipe := read(args.config_file).recipe) is None:
        raise FP8BackendError(
            f"--config_file {args.config_file}: FP8 is off there, so there is no recipe to improve"
        )
    else:
        recipe = resolve(recipe)
    with Progress("measuring recipes") as progress:
        progress("the model")
        subject = load(args.model, args.text, args.batches, args.batch, args.sequence)
        limits = {"min_flops_share": args.min_flops_share, "max_trials": args.max_trials}
        advice = advise(subject.model, subject.batches, recipe, **limits, progress=progress)
    pasted = {form.__name__: form(advice.recipe) for form in (code, flags, yaml_block)}
    if args.json:
        about = {"model": subject.title, "text": subject.text, "notes": subject.notes}
        print(json.dumps({**about, **advice.to_dict(), "paste": pasted}, indent=1))
    else:
        print(text(subject, advice, pasted))
    if args.recipe is not None:
        advice.save(args.recipe)
        if not args.json:
            print(
                f"\nwritten: {args.recipe}; train with it: fp8-backends launch --fp8_backend "
                f"{args.recipe} SCRIPT"
            )
    return 0


def text(subject: Subject, advice: Advice, pasted: dict[str, str]) -> str:
    about = [
        ("model", subject.title),
        ("text", subject.text),
        *(("note", note) for note in subject.notes),
    ]
    legend = [
        ("advice", advice.verdict),
        (
            "FP8",
            "share of the FLOPs of weight products in FP8; kept: of those that the recipe as given "
            "has there",
        ),
        (
            "gap",
            f"relative error of the gradients against FP32, measured in {advice.passes} forwards "
            "and backwards",
        ),
        *(("also", line) for line in advice.further_lines()),
    ]
    parts = [paragraphs(about), table(advice.rows()), paragraphs(legend)]
    if (advised := advice.chosen) is not None:
        flops = share(advised.flops_share)
        parts += [f"The advised recipe, with {flops} of weight FLOPs in FP8:", *pasted.values()]
    return "\n\n".join(parts)


TEXT_MB = 1.0
"""Megabytes of text: more than the batches need, little for a slow tokenizer."""


@dataclass
class Subject:
    title: str
    model: nn.Module
    batches: list[Any]
    text: str
    notes: list[str] = field(default_factory=list)


def load(model: str | None, text: str | None, batches: int, batch: int, sequence: int) -> Subject:
    """Load the model of `--model`, with random weights if there are none beside its configuration,
    and batches of text.

    Raises `FP8BackendError` without such a model or text, or for another kind of model.
    """
    device = hardware.device()
    folder = None if model is None else _folder(model)
    sizes = defaults(fast_fp8=False) | {"batch": batch, "sequence": sequence}
    path = None if folder is None else str(folder)
    settings = Settings(reference="bf16", model=path, loss_gap_bound=0.0, device=device, **sizes)
    kind = task(settings)
    data = load_text(text, TEXT_MB)
    mask = None
    notes = []
    if folder is None or not any(
        any(folder.glob(pattern)) for pattern in ("*.safetensors", "*.bin")
    ):
        made = build_model(settings, data.vocab_size, seed=0)
        notes.append(
            "the weights are random: a model in mid-training errs in other places, so give --model "
            "its folder"
        )
    else:
        from transformers import AutoModelForCausalLM, AutoModelForMaskedLM  # takes seconds

        auto = AutoModelForCausalLM if kind == CAUSAL else AutoModelForMaskedLM
        try:
            made = auto.from_pretrained(folder, local_files_only=True, dtype=torch.float32).to(
                device
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise FP8BackendError(
                f"--model {folder.name}: transformers cannot load its weights: {error}"
            ) from error
        made.config.use_cache = False
        data, mask, note = _in_tokens_of(folder, data)
        notes += [note] if note else []
    mask = data.vocab_size if mask is None else mask
    starts = data.batches(batches, batch, sequence, seed=0)
    drawn = [
        inputs(data.windows(each, sequence), kind, mask, seed) for seed, each in enumerate(starts)
    ]
    count = sum(parameter.numel() for parameter in made.parameters())
    title = f"{model or 'a small Llama'}: {kind}, {counted(count, 'parameter')}"
    return Subject(title, made, drawn, data.description, notes)


def _folder(name: str) -> Path:
    """Return the folder of a configuration. Raises `FP8BackendError`."""
    from transformers.utils import cached_file

    path = Path(name)
    try:
        if path.exists():
            return path if path.is_dir() else path.parent
        return Path(cached_file(name, "config.json", local_files_only=True)).parent
    except (OSError, ValueError) as error:
        raise FP8BackendError(
            f"--model {shortened(name)}: no such config.json or folder, and no model of this name "
            "in the cache of transformers. Nothing is fetched: download it and name its folder"
        ) from error


def _in_tokens_of(folder: Path, data: TrainingText) -> tuple[TrainingText, int | None, str | None]:
    """Return (text in the tokens of the model's own tokenizer, id of its mask, note if there is no
    tokenizer)."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        note = f"the folder has no tokenizer, so each byte is a token ({first_line(error)})"
        return data, None, note

    def tokens(text: torch.Tensor) -> torch.Tensor:
        words = bytes(text.tolist()).decode("utf-8", errors="replace")
        return torch.tensor(
            tokenizer(words, add_special_tokens=False, verbose=False)["input_ids"],
            dtype=torch.int32,
        )

    description = data.description.replace("one token a byte", "the model's own tokenizer")
    train = tokens(data.train)
    held_out = tokens(data.held_out)
    return (
        replace(data, train=train, held_out=held_out, description=description),
        tokenizer.mask_token_id,
        None,
    )


def code(recipe: Recipe) -> str:
    """Write a handler for `Accelerator(mixed_precision="fp8", kwargs_handlers=[…])`."""
    fields = {"backend": recipe.name, **given_fields(recipe)}
    arguments = [
        f"{name}={list(value) if isinstance(value, tuple) else value!r}"
        for name, value in fields.items()
    ]
    line = f"FP8RecipeKwargs({', '.join(arguments)})"
    if len(line) <= 80:
        return line
    return "\n".join(["FP8RecipeKwargs(", *(f"    {each}," for each in arguments), ")"])


def flags(recipe: Recipe) -> str:
    options = launch_parser()._option_string_actions
    settings = settings_of(recipe.compute)
    words = ["--fp8_backend", recipe.name]
    for name, value in given_fields(recipe).items():
        flag = f"--fp8_{settings[name].own_suffix.lower()}"
        text = str(value)
        if isinstance(value, tuple):
            joined = ",".join(map(str, value))
            text = joined
            if [part.strip() for part in joined.split(",")] != [*map(str, value)]:
                text = str([*value])
        elif isinstance(value, dict):
            text = ", ".join(f"{key}={word}" for key, word in value.items())
        if options[flag].nargs == 0:
            words.append(flag)
        else:  # after a space, a leading hyphen would make it a flag
            words += [f"{flag}={text}"] if text.startswith("-") else [flag, text]
    return shlex.join(["fp8-backends", "launch", *words, "SCRIPT"])


def yaml_block(recipe: Recipe) -> str:
    written = {"mixed_precision": "fp8", "fp8_config": yaml_fields(recipe)}
    return yaml.safe_dump(written, sort_keys=False).rstrip("\n")
