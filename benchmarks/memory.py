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

import argparse
import itertools
import json
import os
import subprocess
import sys

import torch
from measuring import plain, precision_of, reset_highest, resident, settle, table, write_json

MEGABYTE = 1e6


def llama(hidden: int, layers: int, vocabulary: int, sequence: int):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        max_position_embeddings=max(512, sequence),
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def fields(backend: str, arguments) -> dict[str, str | bool]:
    """Return the recipe's non-default fields."""
    released = {"gradient_release": True} if arguments.gradient_release == "on" else {}
    saved = (
        {}
        if arguments.saved_activations == "off"
        else {"saved_activations": arguments.saved_activations}
    )
    return {**saved, **released}


class Training:
    """A prepared model with its optimizer and one batch."""

    def __init__(self, backend: str, hidden: int, layers: int, arguments) -> None:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(True)
        precision = precision_of(backend, **fields(backend, arguments))
        self.accelerator = Accelerator(**precision, cpu=not torch.cuda.is_available())
        model = llama(hidden, layers, arguments.vocabulary, arguments.sequence)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.batch = torch.randint(
            arguments.vocabulary, (1, arguments.sequence), device=self.accelerator.device
        )

    def update(self) -> float:
        loss = self.model(input_ids=self.batch, labels=self.batch).loss
        self.accelerator.backward(loss)
        self.optimizer.step()
        return loss.item()

    def step(self) -> float:
        loss = self.update()
        self.optimizer.zero_grad()
        return loss


def measure(backend: str, arguments) -> dict:
    import fp8_backends
    from fp8_backends.tools.compare.measuring import peak_memory

    small = Training(backend, arguments.hidden, 1, arguments)
    for _ in range(2):
        small.step()
    del small
    settle()
    before = resident()["now"]
    training = Training(backend, arguments.hidden, arguments.layers, arguments)
    losses = [training.update()]
    audit = fp8_backends.audit(training.model, training.optimizer)
    training.optimizer.zero_grad()
    settle()
    whole_life = resident()["highest"] - before
    was_reset = reset_highest()
    losses.append(training.step())
    step = resident()["highest"] - before
    peak = peak_memory(lambda: losses.append(training.step()), training.model, training.optimizer)
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


def in_own_process(backend: str, saved: str, released: str, arguments) -> dict:
    """Run `measure` in a new process with a C library that returns blocks of 64 KB and more to the
    system at once: otherwise resident memory would include its reserves."""
    environment = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
    }
    command = [sys.executable, __file__, "--worker", backend]
    command += ["--saved-activations", saved, "--gradient-release", released]
    for name in ("hidden", "layers", "vocabulary", "sequence"):
        command += [f"--{name}", str(getattr(arguments, name))]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{backend}: its process ended with {done.returncode}, see above")
    return json.loads(done.stdout.splitlines()[-1])


def name_of(result: dict) -> str:
    if result["backend"] == "bf16":
        return "FP32 + bf16 autocast"
    name, saved = result["backend"], result.get("saved_activations")
    name += f", saved {saved}" if saved else ""
    return f"{name}, released" if result.get("gradient_release") else name


def printed(results: list[dict]) -> str:
    first, over = results[0], f"/ {plain()}"
    header = ["level", "peak tensors, MB", over, "peak resident, MB", over, "bytes/element"]
    rows = []
    for result in results:
        row = [name_of(result)]
        for key in ("peak_tensor_bytes", "peak_resident_bytes"):
            known = result[key] is not None and first[key] is not None
            row += (
                [round(result[key] / MEGABYTE), result[key] / first[key]] if known else ["-", "-"]
            )
        rows.append([*row, result["bytes_per_element"]["total"]])
    return table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backends", default="native:dynamic,msamp:O1,msamp:O2,msamp:O3")
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument(
        "--saved-activations", default="off", help="of off, fp8 and fp8+attention, by commas"
    )
    parser.add_argument(
        "--gradient-release",
        default="off",
        help="of off and on, by commas; on is for levels above O0",
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(measure(arguments.worker, arguments)))
        return
    results, options = (
        [],
        (arguments.backends, arguments.saved_activations, arguments.gradient_release),
    )
    for each in dict.fromkeys(
        [(plain(), "off", "off"), *itertools.product(*(of.split(",") for of in options))]
    ):
        results.append(in_own_process(*each, arguments))
        told = {
            name: value for name, value in vars(arguments).items() if name not in ("json", "worker")
        }
        record = {
            "question": "peak memory of a step",
            "precision": plain(),
            "arguments": told,
            "results": results,
        }
        write_json(arguments.json, record)
    print(
        f"{results[0]['parameters'] / 1e6:.0f} M parameters, {results[0]['in_linears'] / 1e6:.0f} "
        "M in Linears"
    )
    print(printed(results))


if __name__ == "__main__":
    main()
