"""How long does `prepare` take, and does it allocate a second copy of the weights?

Models of N small Linears, for two sizes; targets: time linear in layers (4,000 at most 2.2 times 2,000), and added
memory far below one copy of the weights.
"""

from __future__ import annotations

import argparse
import gc
import resource
import time

import torch
from measuring import table, write_json
from torch import nn


def measure(layers: int, width: int, backend: str) -> dict:
    import fp8_backends

    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])
    weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    pointers = [p.data_ptr() for p in model.parameters()]
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    gc.disable()  # a full collection scans everything that is loaded, and falls into one run and not into another
    start = time.perf_counter()
    fp8_backends.prepare(model, None, backend)
    seconds = time.perf_counter() - start
    gc.enable()
    added = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    kept = pointers == [p.data_ptr() for p in model.parameters()]
    return {"layers": layers, "seconds": seconds, "weights": weight_bytes, "peak_added": added, "same_storage": kept}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--backends", default="native:dynamic,native:delayed,ao:tensorwise")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows, results = [], {}
    for backend in arguments.backends.split(","):
        measure(10, 32, backend)  # imports
        one = min((measure(arguments.layers, arguments.width, backend) for _ in range(7)), key=lambda r: r["seconds"])
        two = min(
            (measure(2 * arguments.layers, arguments.width, backend) for _ in range(7)), key=lambda r: r["seconds"]
        )
        results[backend] = {"one": one, "two": two, "ratio": two["seconds"] / one["seconds"]}
        share = max(one["peak_added"], two["peak_added"]) / one["weights"]
        rows.append(
            [backend, one["seconds"], two["seconds"], two["seconds"] / one["seconds"], share, two["same_storage"]]
        )
    n = arguments.layers
    print(table(["backend", f"{n} s", f"{2 * n} s", "ratio", "added peak / weights", "same storage"], rows))
    write_json(arguments.json, {"question": "cost of prepare", "results": results})


if __name__ == "__main__":
    main()
