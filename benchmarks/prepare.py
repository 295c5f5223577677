"""Measure the time of `prepare`, its growth with the number of layers, and its added memory.

* N small Linears and 2 N of them, in turn, by the median of the rounds' ratios. Target: 4,000 at
  most 2.2 times 2,000.
* A Llama of 8 billion parameters on the meta device. Target: seconds.
* Real weights in a few large Linears, in a separate process for each backend: the added highest
  resident memory over the bytes of all weights. A second copy of the weights would be 1; a level
  needs one layer's new storage before it frees the old one.
"""

from __future__ import annotations

import gc
import json
import time

import torch
from measuring import (
    RETURNING,
    answer,
    options,
    ratio,
    reset_highest,
    resident,
    settle,
    summary,
    write_json,
)
from tables import printed
from torch import nn

ON_META = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
}
"""Llama 3.1 8B; transformers' defaults give the rest."""


def seconds_of(model: nn.Module, backend: str) -> float:
    import fp8_backends

    gc.collect()
    gc.disable()  # a full collection scans all objects, in one run and not in another
    start = time.perf_counter()
    fp8_backends.prepare(model, None, backend)
    seconds = time.perf_counter() - start
    gc.enable()
    return seconds


def linears(layers: int, width: int) -> nn.Module:
    return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])


def growth(backend: str, arguments) -> dict:
    """Seconds of N and of 2 N layers, round by round, and the ratio."""
    seconds_of(linears(10, 32), backend)  # imports
    one, two = [], []
    for _ in range(arguments.rounds):
        one.append(seconds_of(linears(arguments.layers, arguments.width), backend))
        two.append(seconds_of(linears(2 * arguments.layers, arguments.width), backend))
    return {"backend": backend, "one": summary(one), "two": summary(two), "ratio": ratio(two, one)}


def on_meta(backend: str, layers: int) -> dict:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**ON_META, num_hidden_layers=layers))
    parameters = sum(p.numel() for p in model.parameters())
    return {"backend": backend, "parameters": parameters, "seconds": seconds_of(model, backend)}


def added_memory(backend: str, layers: int, width: int) -> dict:
    """Return the added memory for real FP32 weights in this process, with its highest resident
    memory reset before `prepare`."""
    seconds_of(linears(2, 64), backend)
    model = linears(layers, width)
    weights = sum(p.nbytes for p in model.parameters())
    pointers = [p.data_ptr() for p in model.parameters()]
    settle()
    before, was_reset = resident()["now"], reset_highest()
    seconds = seconds_of(model, backend)
    highest = resident()["highest"] - before if was_reset else None
    same = pointers == [p.data_ptr() for p in model.parameters()]
    return {
        "backend": backend,
        "weights": weights,
        "added": highest,
        "seconds": seconds,
        "same_storage": same,
    }


def main() -> None:
    arguments = options(
        __doc__,
        layers=2000,
        width=128,
        rounds=5,
        backends="native:dynamic,native:delayed,ao:tensorwise,msamp:O2,msamp:O3",
        meta_layers=32,
        large_layers=24,
        large_width=2048,
        worker=str,
    )
    torch.manual_seed(0)
    large = arguments.large_layers, arguments.large_width
    if arguments.worker:
        print(json.dumps(added_memory(arguments.worker, *large)))
        return
    backends = arguments.backends.split(",")
    words = ("--large-layers", large[0], "--large-width", large[1], "--worker")
    record = write_json(
        arguments,
        "cost of prepare",
        growth=[growth(backend, arguments) for backend in backends],
        on_meta=[on_meta(backend, arguments.meta_layers) for backend in backends],
        memory=[answer(__file__, *words, backend, **RETURNING) for backend in backends],
    )
    printed("prepare", record)


if __name__ == "__main__":
    main()
