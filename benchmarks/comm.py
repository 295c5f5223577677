"""Measure the sum of gradients over ranks in FP8, in FP32 and in bf16.

    python benchmarks/comm.py                                                          two ranks on this CPU, over gloo
    python -m torch.distributed.run --nproc_per_node 8 benchmarks/comm.py              GPUs, over NCCL

For each size: seconds and bytes sent of an all-reduce (DDP's collective) and a reduce-scatter
(FSDP2's) of FP32 gradients, sent in FP8, in bf16 (cast, summed and cast back, like DDP's own bf16
hook) and in FP32, with ratios of this run. Bytes come from a trace. On one machine without a
network bytes cost little: ratios of seconds show the added work, and ratios of bytes the saving of
a network.

Then the passes that write and read FP8 messages: their bandwidth as a share of a copy's in the same
run.

`--trace FILE` writes a Chrome trace (chrome://tracing, ui.perfetto.dev) of steps under DDP, and
prints the share of communication time that overlaps with backward.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from measuring import device, interleaved, options, ratio, summary, write_json
from tables import printed
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import fp8_backends
from fp8_backends.comm.two_shot import MESSAGE_BLOCK, AllReduce, Part, reduce_scatter
from fp8_backends.kernels import messages
from fp8_backends.tools.compare.measuring import sent_bytes

BACKWARD = re.compile(r"evaluate_function: \w+Backward\d*$")
MESSAGE_KERNELS = ("pack_kernel", "sum_kernel", "unpack_kernel")


def all_reduces(gradient: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Each leaves the mean in `gradient`."""
    parts = [Part(gradient, 0)]

    def in_bf16() -> None:
        compressed = gradient.to(torch.bfloat16).div_(dist.get_world_size())
        dist.all_reduce(compressed)
        gradient.copy_(compressed)

    def in_fp32() -> None:
        dist.all_reduce(gradient)
        gradient.div_(dist.get_world_size())

    return {"FP8": lambda: AllReduce(parts).write(parts), "bf16": in_bf16, "FP32": in_fp32}


def reduce_scatters(gradient: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Each leaves this rank's part of the sum in `out`."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    rows = gradient.view(dist.get_world_size(), -1)
    out, of_bf16 = torch.empty_like(rows[0]), torch.empty_like(rows[0], dtype=torch.bfloat16)

    def in_bf16() -> None:
        scatter(of_bf16, gradient.to(torch.bfloat16))
        out.copy_(of_bf16)

    in_fp8 = {"FP8": lambda: reduce_scatter(rows, out=out)}
    return in_fp8 | {"bf16": in_bf16, "FP32": lambda: scatter(out, gradient)}


COLLECTIVES = {"all-reduce": all_reduces, "reduce-scatter": reduce_scatters}


def measured(name: str, elements: int, device: str, runs: int) -> dict:
    gradient = torch.randn(elements, generator=torch.Generator().manual_seed(dist.get_rank())).to(
        device
    )
    calls = COLLECTIVES[name](gradient)
    seconds = interleaved(calls, runs)
    sent = {form: sent_bytes(call) for form, call in calls.items()}
    if name == "reduce-scatter":  # gloo runs an all-reduce instead; this is its time
        others = 1 - 1 / dist.get_world_size()
        sent |= {"bf16": round(2 * elements * others), "FP32": round(4 * elements * others)}
    return {
        "collective": name,
        "elements": elements,
        "seconds": {form: summary(times) for form, times in seconds.items()},
        "sent_bytes": sent,
        "seconds_over": {form: ratio(seconds["FP8"], seconds[form]) for form in ("bf16", "FP32")},
        "bytes_over": {
            form: sent["FP8"] / sent[form] if sent[form] else None for form in ("bf16", "FP32")
        },
    }


def passes(elements: int, device: str, runs: int) -> dict:
    """Time the passes of one all-reduce over two ranks, without communication. All count the
    minimum of bytes moved."""
    gradient, copied = torch.randn(elements, device=device), torch.empty(elements, device=device)
    columns = elements // 2
    sent, own = messages.pack([Part(gradient, 0)], 2, columns, 0, rounded=True)
    message = sent.numel() // 2
    calls = {
        "copy": (8 * elements, lambda: copied.copy_(gradient)),
        "pack": (
            4 * elements + 2 * message + 4 * columns,
            lambda: messages.pack([Part(gradient, 0)], 2, columns, 0, True),
        ),
        "reduce": (2 * message + 4 * columns + message, lambda: messages.reduce(sent, own, 0, 2)),
        "unpack": (2 * message + 4 * elements, lambda: messages.unpack(sent, [Part(gradient, 0)])),
        "codes": (4 * message, lambda: messages.decode(sent)),
    }
    seconds = interleaved({name: call for name, (_, call) in calls.items()}, runs)
    moved = {name: moves / statistics.median(seconds[name]) for name, (moves, _) in calls.items()}
    return {
        name: {
            **summary(seconds[name]),
            "bytes_per_second": rate,
            "share_of_copy": rate / moved["copy"],
        }
        for name, rate in moved.items()
    }


# overlap with backward


def trace(
    path: str, device: str, backend: str, layers: int, width: int, rows: int, steps: int = 2
) -> dict:
    """Steps under DDP; a Chrome trace of rank 0's in a file."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(part for _ in range(layers) for part in (nn.Linear(width, width), nn.GELU()))
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    spec = fp8_backends.FP8RecipeKwargs(backend=backend, gradient_comm="fp8")
    fp8_backends.prepare(model, None, spec)
    ddp = DistributedDataParallel(model, bucket_cap_mb=width * width * 4 / 2**20)
    ddp, optimizer = fp8_backends.prepare(ddp, optimizer, spec)
    x = torch.randn(rows, width, device=device)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16):
            loss = ddp(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    dist.barrier()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities) as profiled:
        for _ in range(steps):
            step()
        if device == "cuda":
            torch.cuda.synchronize()
    if dist.get_rank():
        return {}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    profiled.export_chrome_trace(path)
    return overlap(json.loads(Path(path).read_text())["traceEvents"])


def overlap(events: list[dict]) -> dict:
    """Return the share of the time of gloo's or NCCL's collectives that overlaps with backward."""
    timed = [
        (e["name"], e.get("cat", ""), e["ts"], e["ts"] + e["dur"])
        for e in events
        if e.get("ph") == "X"
    ]
    travels = [
        (begin, end) for name, _, begin, end in timed if name.startswith(("gloo:", "ncclDevKernel"))
    ]
    kernels = [(name, begin, end) for name, category, begin, end in timed if category == "kernel"]
    # backward is everything that overlaps with gradient messages, except the passes over messages
    if kernels:
        backward = [
            (begin, end)
            for name, begin, end in kernels
            if not name.startswith(("nccl", *MESSAGE_KERNELS))
        ]
    else:
        backward = [(begin, end) for name, _, begin, end in timed if BACKWARD.search(name)]
    travels = list(_merged(travels))
    total = sum(end - begin for begin, end in travels)
    beside = sum(
        max(0, min(end, its_end) - max(begin, its_begin))
        for begin, end in travels
        for its_begin, its_end in _merged(backward)
    )
    return {
        "travel_us": total,
        "beside_backward_us": beside,
        "share": beside / total if total else None,
    }


def _merged(spans: Iterable[tuple[float, float]]) -> Iterable[tuple[float, float]]:
    """Merge overlapping spans, in order."""
    last: tuple[float, float] | None = None
    for begin, end in sorted(spans):
        if last is not None and begin <= last[1]:
            last = last[0], max(last[1], end)
            continue
        if last is not None:
            yield last
        last = begin, end
    if last is not None:
        yield last


# the run


def run(args: Namespace, **rendezvous) -> None:
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo", **rendezvous)
    rank, size = dist.get_rank(), dist.get_world_size()
    if args.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    sizes = [
        -(-int(n) // (size * MESSAGE_BLOCK)) * size * MESSAGE_BLOCK
        for n in args.elements.split(",")
    ]
    results = [measured(name, n, args.device, args.runs) for name in COLLECTIVES for n in sizes]
    record = {
        "ranks": size,
        "backend": dist.get_backend(),
        "collectives": results,
        "passes": passes(max(sizes), args.device, args.runs),
    }
    if args.trace:
        sizes = args.trace_layers, args.trace_width, args.trace_rows
        record["overlap"] = trace(args.trace, args.device, args.trace_backend, *sizes)
    if rank == 0:
        report(write_json(args, "gradients over ranks in FP8, bf16 and FP32", **record))
    dist.destroy_process_group()


def report(record: dict) -> None:
    print(f"{record['ranks']} ranks, {record['backend']}")
    printed("communication", record)
    for name, of in record["passes"].items():
        print(f"{name}: {of['share_of_copy']:.2f} of a copy's bandwidth")
    if record.get("overlap"):
        share = record["overlap"]["share"]
        print(f"backward computes for {share:.0%} of the time in which gradients travel")


def _start(rank: int, file: str, args: Namespace) -> None:
    run(args, init_method=f"file://{file}", rank=rank, world_size=args.ranks)


def main() -> None:
    on = device()
    args = options(
        __doc__,
        elements="65536,1048576,8388608",
        runs=15,
        ranks=2,
        device=(on, *{"cpu", "cuda"} - {on}),
        trace=str,
        trace_backend="msamp:O2",
        trace_layers=8,
        trace_width=1024,
        trace_rows=1024,
    )
    if "RANK" in os.environ:
        run(args)
    else:
        method = "spawn" if args.device == "cuda" else "fork"
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder, "ranks"))
            multiprocessing.start_processes(_start, (file, args), args.ranks, start_method=method)


if __name__ == "__main__":
    main()
