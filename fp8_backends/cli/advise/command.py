"""`fp8-backends advise`: which layers to keep out of FP8, or which scaling to take, measured on a model and a text."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ...errors import FP8BackendError
from ...recipes.handlers import Recipe, resolve
from ...training.advice import Advice, advise
from ...words import share
from ..config import read
from ..terminal import Progress, paragraphs, table
from . import recipe_texts
from .subject import Subject, load

_DESCRIPTION = """\
Measures how far a recipe turns the gradients of a model from those of FP32, and tries changes from mild to strong until
one halves that gap: single layers in high precision, another scaling, both. Prints every trial, and the advised recipe
to paste. Nothing is fetched and nothing is written."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    add = parser.add_argument
    add("--model", metavar="MODEL", help="a config.json, its folder, or a cached model (a small Llama)")
    add("--backend", metavar="STRING", help="the recipe as given (default: auto, what this machine would train with)")
    add("--config_file", metavar="FILE", help="instead: that of a configuration of Accelerate or Axolotl")
    add("--text", metavar="PATH", help="a text file or a folder of them (the Python standard library's sources)")
    add("--batches", type=int, default=2, metavar="N", help="batches to search with, and as many to check with (2)")
    add("--batch", type=int, default=8, metavar="N", help="sequences in a batch (8)")
    add("--sequence", type=int, default=128, metavar="N", help="tokens in a sequence (128)")
    add("--min_flops_share", type=float, default=0.95, metavar="X", help="share of the FLOPs in FP8 to keep (0.95)")
    add("--max_trials", type=int, default=40, metavar="N", help="recipes to measure at most (40)")
    add("--steps", type=int, default=0, metavar="N", help="compare the held-out loss after N training steps, too (0)")
    add("--lr", type=float, default=1e-4, metavar="X", help="learning rate of these steps (1e-4)")
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    for name, least in {"batches": 1, "batch": 1, "sequence": 1, "steps": 0}.items():
        if (value := getattr(args, name)) < least:
            raise FP8BackendError(f"--{name} {value}: at least {least}")
    recipe = _recipe(args)
    with Progress("measuring recipes") as progress:
        progress("the model")
        subject = load(args.model, args.text, args.batches, args.batch, args.sequence, args.steps)
        advice = advise(
            subject.model,
            subject.batches,
            recipe,
            min_flops_share=args.min_flops_share,
            max_trials=args.max_trials,
            held_out=subject.held_out,
            train_on=subject.train_on,
            lr=args.lr,
            progress=progress,
        )
    print(json.dumps(_plain(subject, advice), indent=1) if args.json else text(subject, advice))
    return 0


def _recipe(args: argparse.Namespace) -> Recipe:
    if args.config_file is None:
        return resolve(args.backend)
    if args.backend is not None:
        raise FP8BackendError("--backend and --config_file both name the recipe: give one of them")
    if (recipe := read(args.config_file).recipe) is None:
        raise FP8BackendError(f"--config_file {args.config_file}: FP8 is off there, so there is no recipe to improve")
    return resolve(recipe)


def _plain(subject: Subject, advice: Advice) -> dict[str, Any]:
    texts = {name: getattr(recipe_texts, name)(advice.recipe) for name in ("code", "flags", "yaml_block")}
    return {"model": subject.title, "text": subject.text, "notes": subject.notes, **advice.to_dict(), "paste": texts}


def text(subject: Subject, advice: Advice) -> str:
    """What is printed: the model, the table of trials, the answer, and the recipe to paste."""
    about = [("model", subject.title), ("text", subject.text), *(("note", note) for note in subject.notes)]
    legend = [
        ("advice", advice.verdict),
        ("FP8", "share of the FLOPs of weight products in FP8; kept: of those that the recipe as given has there"),
        ("gap", f"relative error of the gradients against FP32, measured in {advice.passes} forwards and backwards"),
        *(("also", line) for line in advice.further_lines()),
    ]
    recipe = advice.recipe
    parts = [paragraphs(about), table(advice.rows()), paragraphs(legend)]
    if advice.chosen is not None:
        pasted = [recipe_texts.code(recipe), recipe_texts.flags(recipe), recipe_texts.yaml_block(recipe)]
        parts += [f"The advised recipe, with {share(advice.chosen.flops_share)} of weight FLOPs in FP8:", *pasted]
    return "\n\n".join(parts)
