"""Measure the cost of Accelerate with the `ao` backend, relative to a hand-written TorchAO loop.

Both train the same Llama-shaped model on the same batches; steps alternate in random order, paired
by round. Each loop has several instances, created in turn, and a round takes their sum: a model's
memory addresses make two equal loops differ by a per cent. Target: the upper end of the ratio's
interval at most 1.02.
"""

from __future__ import annotations

import copy

import torch
from measuring import device, interleaved, options, ratio, summary, write_json
from tables import printed
from training import Prepared, llama


def raw_step(model, batch):
    """The loop as TorchAO's own documentation has it, under bf16 autocast (none on a CPU without
    bf16 products)."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    from fp8_backends.compute import hardware

    config = Float8LinearConfig(pad_inner_dim=True)
    convert_to_float8_training(
        model, config=config, module_filter_fn=lambda m, name: name != "lm_head"
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step():
        with hardware.fast_autocast(batch.device.type):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def accelerate_step(model, batch):
    prepared = Prepared("ao:tensorwise", lambda: model, 1e-4)
    return lambda: prepared.step(input_ids=batch, labels=batch)


def main() -> None:
    arguments = options(__doc__, runs=60, instances=3, hidden=384, layers=4, batch=4, sequence=128)
    model = llama(arguments.hidden, arguments.layers, 512).to(device())
    batch = torch.randint(256, (arguments.batch, arguments.sequence), device=device())
    loops = {"raw": raw_step, "accelerate": accelerate_step}
    steps = {
        (name, instance): loop(copy.deepcopy(model), batch)
        for instance in range(arguments.instances)
        for name, loop in loops.items()
    }
    first = {key: [step().item() for _ in range(3)] for key, step in steps.items()}
    losses = {name: [first[name, i] for i in range(arguments.instances)] for name in loops}
    measured = interleaved(steps, arguments.runs)
    seconds = {}
    for name in loops:
        instances = (measured[name, i] for i in range(arguments.instances))
        seconds[name] = [sum(times) for times in zip(*instances, strict=True)]
    record = write_json(
        arguments,
        "adapter cost",
        seconds={name: summary(times) for name, times in seconds.items()},
        ratio=ratio(seconds["accelerate"], seconds["raw"]),
        losses_equal=losses["raw"] == losses["accelerate"],
    )
    printed("overhead", record)


if __name__ == "__main__":
    main()
