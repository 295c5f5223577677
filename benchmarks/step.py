"""What does a whole training step cost in FP8 against bf16: tokens a second and peak memory?

A Llama-shaped model through stock Accelerate, one backend after another in one process, the ratio to bf16's.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

import torch
from measuring import synchronize, table, write_json

SHAPES = {
    "tiny": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
    "8b-4layers": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4, "num_attention_heads": 32},
}


def build(shape: str, sequence: int, device: str):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256 if shape == "tiny" else 32000, max_position_embeddings=sequence, use_cache=False, **SHAPES[shape]
    )
    with torch.device(device):
        return LlamaForCausalLM(config)


def measure(backend: str, arguments, device: str) -> dict:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    import fp8_backends

    AcceleratorState._reset_state(True)
    precision = backend if backend in ("bf16", "fp16", "no") else "fp8"
    handlers = [fp8_backends.FP8RecipeKwargs(backend=backend)] if precision == "fp8" else None
    accelerator = Accelerator(mixed_precision=precision, kwargs_handlers=handlers, cpu=device == "cpu")
    model = build(arguments.shape, arguments.sequence, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
    model, optimizer = accelerator.prepare(model, optimizer)
    run = torch.compile(model) if arguments.compile else model
    vocabulary = model.config.vocab_size
    batch = torch.randint(vocabulary, (arguments.batch, arguments.sequence), device=device)
    seconds, losses = [], []
    for step in range(arguments.warmup + arguments.steps):
        if step == arguments.warmup and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        synchronize()
        start = time.perf_counter()
        loss = run(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        synchronize()
        if step >= arguments.warmup:
            seconds.append(time.perf_counter() - start)
    tokens = arguments.batch * arguments.sequence / statistics.median(seconds)
    audit = fp8_backends.audit(model, optimizer)
    result = {
        "backend": backend,
        "tokens_per_second": tokens,
        "median_s": statistics.median(seconds),
        "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
        "flops_share": audit.flops_share,
        "losses": [loss.item() for loss in losses],
    }
    del model, optimizer, accelerator, run, audit
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--backends", default="bf16,native:dynamic,native:delayed,native:rowwise,ao:tensorwise")
    parser.add_argument("--shape", choices=list(SHAPES), default="1b" if cuda else "tiny")
    parser.add_argument("--sequence", type=int, default=4096 if cuda else 128)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    results = []
    for backend in dict.fromkeys(["bf16", *arguments.backends.split(",")]):
        try:
            results.append(measure(backend, arguments, "cuda" if cuda else "cpu"))
        except ImportError as error:  # a backend whose library is not on this machine: named, not hidden
            print(f"{backend}: {error}")
        write_json(arguments.json, {"question": "cost of a step", "arguments": vars(arguments), "results": results})
    bf16 = results[0]
    rows = [
        [
            r["backend"],
            r["tokens_per_second"],
            r["tokens_per_second"] / bf16["tokens_per_second"],
            r["peak_bytes"] / 2**30 if r["peak_bytes"] else "-",
            r["peak_bytes"] / bf16["peak_bytes"] if r["peak_bytes"] else "-",
            r["flops_share"],
            r["losses"][-1],
        ]
        for r in results
    ]
    header = ["backend", "tokens/s", "x bf16", "peak GiB", "peak / bf16", "FP8 share", "last loss"]
    print(table(header, rows))


if __name__ == "__main__":
    main()
