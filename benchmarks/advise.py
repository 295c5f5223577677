"""Test if `advise` halves the gap of models in trouble with 95 % of the weight FLOPs in FP8, on
other batches, too.

    benchmarks/advise.py [--quick] [--json FILE]

A small Llama is trained in FP32 on Python's sources, and then gets the outliers of large models
after a long run: activation channels many times larger than the others. A channel is multiplied by
its producer and divided by its reader, so the FP32 function stays the same. The layers on both
sides are frozen: AdamW would take far too large steps at their weights in any precision. A model
without norms gets batches of unlike magnitude instead.

It exits with 1 if a model in trouble gets no help, if the healthy one gets a change, or if the
advised recipe trains worse than the given one. One model is beyond help: its row shows the result.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from measuring import options, write_json
from tables import printed
from torch import nn

SHARE, RATIO = 0.95, 0.5
HARM = 0.01
"""Largest excess of the advised recipe's held-out loss over the given one's, or over FP32's, the
larger of the two."""


@dataclass(frozen=True)
class Sizes:
    """Set the amount of training and measurement."""

    base_steps: int = 150
    base_batch: int = 8
    batch: int = 4
    sequence: int = 64
    steps: int = 30
    lr: float = 1e-3


QUICK = Sizes(base_steps=20, base_batch=2, batch=2, sequence=32, steps=5)


@dataclass(frozen=True)
class Case:
    """Describe a model in some trouble, and the expected advice."""

    name: str
    trouble: str
    given: str
    expected: str
    """Help by "layers" or by "scaling" for all (the one found must keep the promise), "nothing" for
    a healthy model, or "no help" for one beyond help, with its result shown and not judged."""
    make: Callable[[nn.Module], nn.Module]


def in_attention(model: nn.Module, power: int, blocks: range) -> nn.Module:
    """Scale two input channels of queries, keys and values in these blocks by 2**power."""
    for block in list(model.model.layers)[blocks.start : blocks.stop]:
        attention = block.self_attn
        readers = [attention.q_proj, attention.k_proj, attention.v_proj]
        with torch.no_grad():
            block.input_layernorm.weight[[5, 40]] *= 2.0**power
            for each in readers:
                each.weight[:, [5, 40]] /= 2.0**power
        _freeze(block.input_layernorm, *readers)
    return model


def in_mlp(model: nn.Module, power: int, blocks: range) -> nn.Module:
    """Scale two channels inside the SwiGLU of these blocks, the input of `down_proj`, by
    2**power."""
    for block in list(model.model.layers)[blocks.start : blocks.stop]:
        with torch.no_grad():
            block.mlp.up_proj.weight[[3, 77]] *= 2.0**power
            block.mlp.down_proj.weight[:, [3, 77]] /= 2.0**power
        _freeze(block.mlp.up_proj, block.mlp.down_proj)
    return model


def _freeze(*modules: nn.Module) -> None:
    for module in modules:
        module.requires_grad_(False)


LAYERS = 12
ALL = range(LAYERS)
CASES = (
    Case(
        "attention, one block",
        "2 of 64 channels 2^20 as large",
        "native:delayed",
        "layers",
        lambda m: in_attention(m, 20, range(1, 2)),
    ),
    Case(
        "SwiGLU, one block",
        "2 of 192 channels 2^20 as large",
        "native:dynamic",
        "layers",
        lambda m: in_mlp(m, 20, range(3, 4)),
    ),
    Case(
        "SwiGLU, every block",
        "2 of 192 channels 2^18 as large",
        "native:delayed",
        "scaling",
        lambda m: in_mlp(m, 18, ALL),
    ),
    Case("healthy", "none", "native:delayed", "nothing", lambda m: m),
    Case(
        "both, every block",
        "2 channels 2^18 as large, twice",
        "native:delayed",
        "no help",
        lambda m: in_mlp(in_attention(m, 18, ALL), 18, ALL),
    ),
)
UNLIKE = Case("MLP without norms", "batches 2^10 apart", "native:delayed", "scaling", lambda m: m)
QUICK_CASES = ("attention, one block", "MLP without norms")


class LanguageModel:
    """A small Llama trained on Python's sources, and batches of these."""

    def __init__(self, sizes: Sizes) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        from fp8_backends.tools.compare.workload import load_text

        self.sizes, self.text = sizes, load_text(limit_mb=1)
        torch.manual_seed(0)
        shape = {
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 2,
        }
        config = LlamaConfig(
            vocab_size=256, max_position_embeddings=sizes.sequence, use_cache=False, **shape
        )
        self.model = LlamaForCausalLM(config)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        for starts in self.text.batches(sizes.base_steps, sizes.base_batch, sizes.sequence, seed=0):
            self.model(**self._inputs(self.text.windows(starts, sizes.sequence))).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def batches(self, count: int, seed: int) -> list[dict[str, torch.Tensor]]:
        starts = self.text.batches(count, self.sizes.batch, self.sizes.sequence, seed)
        return [self._inputs(self.text.windows(each, self.sizes.sequence)) for each in starts]

    def held_out(self, count: int) -> list[dict[str, torch.Tensor]]:
        windows = self.text.held_out_windows(count * self.sizes.batch, self.sizes.sequence)
        return [self._inputs(each) for each in windows.split(self.sizes.batch)]

    def arguments(self, case: Case) -> tuple[nn.Module, dict[str, Any]]:
        """Return the model in its trouble, and the other arguments of `advise`."""
        data = {
            "batches": self.batches(4, seed=1),
            "held_out": self.held_out(4),
            "unseen": self.batches(4, seed=3),
        }
        data["train_on"] = self.batches(self.sizes.steps, seed=2)
        return case.make(copy.deepcopy(self.model)), data

    @staticmethod
    def _inputs(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"input_ids": tokens, "labels": tokens}


class Unlike:
    """Build a model without norms for alternating batches: small, and 1,024 times as large."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        torch.manual_seed(0)
        blocks = [part for _ in range(6) for part in (nn.Linear(64, 64), nn.ReLU())]
        self.model = nn.Sequential(*blocks, nn.Linear(64, 64))
        self.target = torch.randn(64, 64) / 8

    def batch(self, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.randn(128, 64, generator=torch.Generator().manual_seed(seed)) * 1024 ** (
            seed % 2
        )
        return inputs, inputs @ self.target

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        inputs, target = batch
        return ((model(inputs) - target) / inputs.abs().mean()).square().mean()

    def arguments(self, case: Case) -> tuple[nn.Module, dict[str, Any]]:
        data = {
            "batches": range(4),
            "held_out": range(10, 14),
            "unseen": range(20, 24),
            "train_on": range(100, 100 + self.sizes.steps),
        }
        return self.model, {name: list(map(self.batch, seeds)) for name, seeds in data.items()} | {
            "loss": self.loss
        }


def measure(case: Case, source: LanguageModel | Unlike) -> dict:
    """Ask for advice, and record it."""
    import fp8_backends
    from fp8_backends.advice import GradientGap

    model, data = source.arguments(case)
    loss = data.get("loss")
    began = time.perf_counter()
    advice = fp8_backends.advise(model, data["batches"], case.given, loss=loss)
    seconds = time.perf_counter() - began
    chosen = advice.chosen
    others = GradientGap(model, data["unseen"], advice.around, loss)
    recipes = {"FP32": None, "as given": advice.given.recipe} | (
        {"as advised": chosen.recipe} if chosen else {}
    )
    gaps = [others.of(*others.prepared(each.recipe)).gap for each in (advice.given, chosen) if each]
    shown = chosen or advice.best
    return {
        "model": case.name,
        "trouble": case.trouble,
        "given": advice.given.recipe.name,
        "expected": case.expected,
        "advised": chosen is not None,
        "change": chosen.change if chosen else f"none; best: {advice.best.change}",
        "layers": dict(shown.recipe.layers or {}),
        "flops_share": shown.flops_share,
        "kept": shown.kept,
        "floor": advice.floor.gap,
        "gap_given": advice.given.gap,
        "ratio": shown.gap / advice.given.gap,
        "ratio_on_others": gaps[1] / gaps[0] if chosen else None,
        "held_out_loss": {
            name: loss_after(model, recipe, data, source.sizes.lr)
            for name, recipe in recipes.items()
        },
        "passes": advice.passes,
        "seconds": seconds,
        "advice": advice.to_dict(),
    }


def loss_after(model: nn.Module, recipe: Any, data: dict[str, Any], lr: float) -> float:
    """The held-out loss of a copy after an AdamW step on each batch of `train_on`; without a recipe
    in FP32."""
    import fp8_backends

    work = copy.deepcopy(model).train()
    optimizer = torch.optim.AdamW([p for p in work.parameters() if p.requires_grad], lr=lr)
    if recipe is not None:
        fp8_backends.prepare(work, optimizer, recipe)
    loss = data.get("loss") or (lambda model, batch: model(**batch).loss)
    for batch in data["train_on"]:
        with torch.autocast("cpu", torch.bfloat16, enabled=recipe is not None):
            found = loss(work, batch)
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
    work.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=recipe is not None):
        return statistics.fmean(loss(work, batch).item() for batch in data["held_out"])


def broken(result: dict) -> Iterator[str]:
    """Return the violated promises of a result."""
    if result["expected"] == "no help":
        return
    if result["expected"] == "nothing":
        if result["advised"]:
            yield f"{result['model']}: nothing is wrong, and {result['change']} was advised"
        return
    if not result["advised"]:
        yield f"{result['model']}: not helped ({result['advice']['verdict']})"
        return
    if min(result["flops_share"], result["kept"]) < SHARE:
        yield f"{result['model']}: {result['flops_share']:.3f} of weight FLOPs in FP8"
    if max(result["ratio"], result["ratio_on_others"]) > RATIO:
        others = result["ratio_on_others"]
        yield f"{result['model']}: {result['ratio']:.2f} and, on other batches, {others:.2f} of the gap"
    losses = result["held_out_loss"]
    if losses["as advised"] > max(losses["as given"], losses["FP32"]) + HARM:
        yield f"{result['model']}: held-out loss {losses}"


def main() -> None:
    args = options(__doc__, quick=False)
    sizes = QUICK if args.quick else Sizes()
    language_model, results = LanguageModel(sizes), []
    for case in (*CASES, UNLIKE):
        if args.quick and case.name not in QUICK_CASES:
            continue
        results.append(measure(case, Unlike(sizes) if case is UNLIKE else language_model))
        print(f"{case.name}: {results[-1]['advice']['verdict']}", flush=True)
        # after each, in case the run is cut short
        record = write_json(args, "help by advise", sizes=vars(sizes), results=results)
    printed("advise", record)
    faults = [fault for result in results for fault in broken(result)]
    if faults:
        raise SystemExit("\n".join(["", *faults]))


if __name__ == "__main__":
    main()
