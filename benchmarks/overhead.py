"""Measure the cost of Accelerate with the `ao` backend, relative to a hand-written TorchAO loop.

Both train the same Llama-shaped model on the same batches; steps alternate in random order, paired
by round. Each loop has several instances, created in turn, and a round takes their sum: a model's
memory addresses make two equal loops differ by a per cent. Target: the upper end of the ratio's
interval at most 1.02.
"""

from __future__ import annotations

import argparse
import copy

import torch
from measuring import interleaved, plain, ratio, summary, table, write_json


def small_llama(hidden: int, layers: int):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=hidden * 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        max_position_embeddings=512,
    )
    return LlamaForCausalLM(config)


def raw_step(model, batch):
    """The loop as TorchAO's own documentation has it, under bf16 autocast (none on a CPU without
    bf16 products)."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    from fp8_backends.compute import hardware

    config = Float8LinearConfig(pad_inner_dim=True)
    convert_to_float8_training(
        model, config=config, module_filter_fn=lambda m, name: name != "lm_head"
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step():
        with hardware.fast_autocast(batch.device.type):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def accelerate_step(model, batch):
    from accelerate import Accelerator

    import fp8_backends

    accelerator = Accelerator(
        mixed_precision="fp8",
        cpu=batch.device.type == "cpu",
        kwargs_handlers=[fp8_backends.FP8RecipeKwargs(backend="ao:tensorwise")],
    )
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))

    def step():
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--instances", type=int, default=3, help="of each loop")
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--json")
    arguments = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = small_llama(arguments.hidden, arguments.layers).to(device)
    batch = torch.randint(256, (arguments.batch, arguments.sequence), device=device)
    loops = {"raw": raw_step, "accelerate": accelerate_step}
    steps = {
        (name, instance): loop(copy.deepcopy(model), batch)
        for instance in range(arguments.instances)
        for name, loop in loops.items()
    }
    first = {key: [step().item() for _ in range(3)] for key, step in steps.items()}
    losses = {name: [first[name, i] for i in range(arguments.instances)] for name in loops}
    measured = interleaved(steps, arguments.runs)
    seconds = {
        name: [
            sum(times)
            for times in zip(*[measured[name, i] for i in range(arguments.instances)], strict=True)
        ]
        for name in loops
    }
    cost = ratio(seconds["accelerate"], seconds["raw"])
    print(
        table(
            ["loop", "median s", "min s", "max s"],
            [[n, *list(summary(s).values())[:3]] for n, s in seconds.items()],
        )
    )
    pairs = f"{cost['runs']} pairs of {arguments.instances} steps"
    print(f"accelerate / raw: {cost['ratio']:.4f} [{cost['low']:.4f}, {cost['high']:.4f}], {pairs}")
    print(f"first losses equal to the bit: {losses['raw'] == losses['accelerate']}")
    record = {"question": "adapter cost", "precision": plain()}
    record |= {"seconds": {n: summary(s) for n, s in seconds.items()}, "ratio": cost}
    write_json(arguments.json, {**record, "losses_equal": losses["raw"] == losses["accelerate"]})


if __name__ == "__main__":
    main()
