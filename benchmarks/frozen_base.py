"""Measure bytes an element and the peak memory of a LoRA step over a frozen base in bf16, FP8,
NVFP4 and MXFP4.

A Llama with random weights, nearly all in Linears, is written once in each 4-bit format by
`export`; each base then trains in a process of its own: one step to warm up, and the highest bytes
of tensors in the next one.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from measuring import answer, options, write_json
from tables import printed
from training import llama

BASES = {"bf16": {}, "FP8": {"fp8_params": True}, "NVFP4": {}, "MXFP4": {}}


def written(folder: Path, name: str, arguments) -> str:
    """Write the base, and return its folder."""
    import fp8_backends

    words = {"vocab_size": 1024, "intermediate_size": 4 * arguments.hidden}
    model = llama(arguments.hidden, arguments.layers, 512, **words).bfloat16()
    if "MX" in name or "NV" in name:
        fp8_backends.prepare(model, None, "native:rowwise")
        fp8_backends.checkpoints.export(model, folder / name, f"{name.lower()}-pack-quantized")
    else:
        model.save_pretrained(folder / name)
    return str(folder / name)


def measure(folder: str, scaling: str, sequence: int) -> dict:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    import fp8_backends
    from fp8_backends.tools.compare.measuring import peak_memory

    name = Path(folder).name
    model = AutoModelForCausalLM.from_pretrained(folder)
    fp8_backends.checkpoints.freeze_codes(model)
    model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear")).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    fp8_backends.prepare(
        model, optimizer, fp8_backends.NativeRecipeKwargs(scaling=scaling, **BASES[name])
    )
    ids = torch.randint(1024, (1, sequence), generator=torch.Generator().manual_seed(0))

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    peak = peak_memory(step, model, optimizer)
    elements = sum(p.numel() for n, p in model.named_parameters() if "base_layer" in n)
    bytes_per_element = fp8_backends.audit(model).bytes_per_element["weight"]
    return {
        "base": name,
        "scaling": scaling,
        "bytes": bytes_per_element,
        "peak": peak,
        "elements": elements,
    }


def main() -> None:
    arguments = options(
        __doc__, hidden=1024, layers=8, sequence=64, scalings="rowwise,dynamic", worker=str
    )
    if arguments.worker:
        print(json.dumps(measure(arguments.worker, arguments.scalings, arguments.sequence)))
        return
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        folders = [written(Path(temporary), name, arguments) for name in BASES]
        for scaling in arguments.scalings.split(","):
            words = ("--sequence", arguments.sequence, "--scalings", scaling, "--worker")
            results += [answer(__file__, *words, folder) for folder in folders]
    question = "memory of a LoRA step over a frozen base"
    printed("frozen-base", write_json(arguments, question, results=results))


if __name__ == "__main__":
    main()
