"""Measure the time of `prepare`, its growth with the number of layers, and its added memory.

* N small Linears and 2 N of them, in turn, by the median of the rounds' ratios. Target: 4,000 at
  most 2.2 times 2,000.
* A Llama of 8 billion parameters on the meta device. Target: seconds.
* Real weights in a few large Linears, in a separate process for each backend: the added highest
  resident memory over the bytes of all weights. A second copy of the weights would be 1; a level
  needs one layer's new storage before it frees the old one.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time

import torch
from measuring import interval, ratio, reset_highest, resident, settle, summary, table, write_json
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


def in_own_process(backend: str, arguments) -> dict:
    """Run `added_memory` with a C library that returns freed blocks to the system at once:
    otherwise resident memory would include its reserves."""
    environment = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
    }
    command = [sys.executable, __file__, "--worker", backend]
    command += [
        "--large-layers",
        str(arguments.large_layers),
        "--large-width",
        str(arguments.large_width),
    ]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{backend}: its process ended with {done.returncode}, see above")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=2000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--backends", default="native:dynamic,native:delayed,ao:tensorwise,msamp:O2,msamp:O3"
    )
    parser.add_argument(
        "--meta-layers", type=int, default=32, help="of the model on the meta device"
    )
    parser.add_argument("--large-layers", type=int, default=24)
    parser.add_argument("--large-width", type=int, default=2048)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.worker:
        print(
            json.dumps(
                added_memory(arguments.worker, arguments.large_layers, arguments.large_width)
            )
        )
        return
    backends = arguments.backends.split(",")
    record = {
        "question": "cost of prepare",
        "layers": arguments.layers,
        "growth": [growth(backend, arguments) for backend in backends],
        "on_meta": [on_meta(backend, arguments.meta_layers) for backend in backends],
        "memory": [in_own_process(backend, arguments) for backend in backends],
    }
    write_json(arguments.json, record)
    rows = []
    for grown, meta, memory in zip(
        record["growth"], record["on_meta"], record["memory"], strict=True
    ):
        share = "-" if memory["added"] is None else memory["added"] / memory["weights"]
        medians = [grown[key]["median_s"] for key in ("one", "two")]
        rows.append([grown["backend"], *medians, interval(grown["ratio"]), meta["seconds"], share])
        rows[-1].append(memory["same_storage"])
    n, billions = arguments.layers, record["on_meta"][0]["parameters"] / 1e9
    header = [
        "backend",
        f"{n} s",
        f"{2 * n} s",
        "ratio",
        f"{billions:.1f} billion on meta, s",
        "added / weights",
    ]
    print(table([*header, "same storage"], rows))


if __name__ == "__main__":
    main()
