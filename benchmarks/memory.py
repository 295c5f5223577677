"""Measure the peak memory of a whole training step at each level, relative to FP32 weights under
bf16 autocast (plain FP32 on a CPU without bf16 products).

A Llama with random weights of at least 100 M parameters, nearly all in Linears, and one short
sequence: weights, gradients and states dominate, activations do not. Each level has a separate
process, which first trains one layer of the same width, to exclude imports and compiled code. Then,
of the whole model:

* step 1 creates the optimizer's states; `audit` reads bytes per element of converted weights, and
  the bytes of activations saved in FP8.
* step 2: the highest resident memory of the process, minus its value before the model.
* step 3: the allocator's highest memory of tensors.

Longer sequences include activations: `--sequence 2048 --saved-activations off,fp8` measures each
level with both, and `--gradient-release off,on` with and without gradients kept for the step.
"""

from __future__ import annotations

import itertools
import json

import torch
from measuring import (
    RETURNING,
    answer,
    options,
    plain,
    reset_highest,
    resident,
    settle,
    write_json,
)
from tables import printed
from training import Prepared, llama


def fields(backend: str, arguments) -> dict[str, str | bool]:
    """Return the recipe's non-default fields."""
    released = {"gradient_release": True} if arguments.gradient_release == "on" else {}
    saved = (
        {}
        if arguments.saved_activations == "off"
        else {"saved_activations": arguments.saved_activations}
    )
    return {**saved, **released}


class Training(Prepared):
    """A Llama with one batch."""

    def __init__(self, backend: str, layers: int, arguments) -> None:
        hidden, sequence = arguments.hidden, arguments.sequence
        words = {"vocab_size": arguments.vocabulary, "intermediate_size": 4 * hidden}
        super().__init__(
            backend,
            lambda: llama(hidden, layers, max(512, sequence), **words),
            1e-4,
            **fields(backend, arguments),
        )
        tokens = torch.randint(arguments.vocabulary, (1, sequence))
        self.batch = {"input_ids": tokens, "labels": tokens}

    def update(self) -> torch.Tensor:
        return super().update(**self.batch)


def measure(backend: str, arguments) -> dict:
    import fp8_backends

    small = Training(backend, 1, arguments)
    for _ in range(2):
        small.step()
    del small
    settle()
    before = resident()["now"]
    training = Training(backend, arguments.layers, arguments)
    losses = [training.update().item()]
    audit = fp8_backends.audit(training.model, training.optimizer)
    training.optimizer.zero_grad()
    settle()
    whole_life = resident()["highest"] - before
    was_reset = reset_highest()
    losses.append(training.step().item())
    step = resident()["highest"] - before
    peak = training.peak()
    linears = sum(
        m.weight.numel() for m in training.model.modules() if isinstance(m, torch.nn.Linear)
    )
    return {
        "backend": backend,
        **fields(backend, arguments),
        "parameters": sum(p.numel() for p in training.model.parameters()),
        "in_linears": linears,
        "peak_tensor_bytes": peak,
        "peak_resident_bytes": step if was_reset else None,
        "peak_resident_bytes_since_model": max(step, whole_life),
        "bytes_per_element": audit.bytes_per_element,
        "bytes_per_parameter": audit.bytes_per_parameter,
        "flops_share": audit.flops_share,
        **({"audit_saved_activations": audit.saved_activations} if audit.saved_activations else {}),
        "losses": losses,
    }


def main() -> None:
    arguments = options(
        __doc__,
        backends="native:dynamic,msamp:O1,msamp:O2,msamp:O3",
        hidden=768,
        layers=12,
        vocabulary=1024,
        sequence=64,
        saved_activations="off",
        gradient_release="off",
        worker=str,
    )
    if arguments.worker:
        print(json.dumps(measure(arguments.worker, arguments)))
        return
    words = []
    for name in ("hidden", "layers", "vocabulary", "sequence"):
        words += [f"--{name}", getattr(arguments, name)]
    names = ("worker", "saved-activations", "gradient-release")
    lists = (arguments.backends, arguments.saved_activations, arguments.gradient_release)
    others = itertools.product(*(each.split(",") for each in lists))
    results = []
    for values in dict.fromkeys([(plain(), "off", "off"), *others]):
        pairs = zip(names, values, strict=True)
        chosen = [word for name, value in pairs for word in (f"--{name}", value)]
        results.append(answer(__file__, *words, *chosen, **RETURNING))
        record = write_json(arguments, "peak memory of a step", results=results)
    printed("memory", record)


if __name__ == "__main__":
    main()
