"""Buckets leave while backward computes, as a trace of real ranks shows, one of which is slow; and no gradient depends
on how buckets are laid out."""

from __future__ import annotations

import re
import time

import torch
import torch.distributed as dist
from ddp_training import everything, mine, mlp, mse, wrapped
from torch import nn
from torch.profiler import ProfilerActivity, profile

from fp8_backends.comm.reducer import GradientReducer

LAYERS, WIDTH, LATE = 6, 128, 0.02
BUCKET_MB = WIDTH * WIDTH * 4 / 2**20
"""One weight each."""
SPECS = {"reducer": "msamp:O2", "hook": {"backend": "native:dynamic", "gradient_comm": "fp8"}}


def linears() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)), nn.LayerNorm(WIDTH))


def slow(model: nn.Module) -> None:
    """The backward of each layer takes LATE seconds longer: what the other ranks have sent is on its way so long."""
    for layer in model:
        layer.register_forward_hook(lambda module, args, out: out.register_hook(lambda _: time.sleep(LATE)) and None)


def backward_trace(spec) -> list[tuple[str, float, float]]:
    """(name, begin, end) of what rank 0 does in one backward pass."""
    model = linears()
    ddp, optimizer = wrapped(spec, model, bucket_mb=BUCKET_MB)
    if dist.get_rank() == 1:
        slow(model)
    x = torch.randn(64, WIDTH)
    for _ in range(2):  # DDP lays its buckets out anew after the first
        ddp(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    loss = ddp(x).square().mean()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        loss.backward()
    return [(event.name, event.time_range.start, event.time_range.end) for event in profiled.events()]


def overlapped(trace: list[tuple[str, float, float]]) -> tuple[int, int]:
    """(layers throughout whose backward a first shot is on its way, layers)."""
    layers = [event for event in trace if re.fullmatch(r"autograd::engine::.* \w*Linear\w*Backward", event[0])]
    shots = [event for event in trace if event[0] == "gloo:all_to_all"]
    during = [any(shot[1] <= begin and end <= shot[2] for shot in shots) for _, begin, end in layers]
    return sum(during), len(layers)


def check_gradients_travel_while_backward_computes():
    """The layer that backward reaches first has nothing to go beside it, five have; half must be seen where a busy
    machine lets rank 0 wait longer than the slow rank is late."""
    figures = {name: overlapped(backward_trace(spec)) for name, spec in SPECS.items()}
    for beside, layers in figures.values() if dist.get_rank() == 0 else ():
        assert layers == LAYERS and LAYERS // 2 <= beside < LAYERS, figures
    return figures


def check_buckets_that_wait_for_the_end_are_found():
    """Planted: what the check above measures is zero where every bucket leaves when backward is over."""
    add = GradientReducer.add
    GradientReducer.add = lambda self, index: None
    try:
        trace = backward_trace(SPECS["reducer"])
    finally:
        GradientReducer.add = add
    assert dist.get_rank() or overlapped(trace) == (0, LAYERS)


def check_a_mean_does_not_depend_on_the_bucket():
    """DDP lays its buckets out anew after its first backward, also in a run that is resumed. Here one bucket has all
    gradients, then each has few."""
    gradients = []
    for bucket_mb in (25, 0.01):
        ddp, _ = wrapped(SPECS["hook"], mlp(), bucket_mb=bucket_mb)
        for _ in range(2):
            ddp.zero_grad()
            mse(ddp, mine(0)).backward()
            gradients.append({name: digest for name, digest in everything(ddp.module).items() if "grad" in name})
    assert all(each == gradients[0] for each in gradients[1:]) and len(gradients[0]) == 6
