"""Measure bytes an element and the peak memory of a LoRA step over a frozen base in bf16, FP8,
NVFP4 and MXFP4.

A Llama with random weights, nearly all in Linears, is written once in each 4-bit format by
`export`; each base then trains in a process of its own: one step to warm up, and the highest bytes
of tensors in the next one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from measuring import table, write_json
from memory import llama

BASES = {"bf16": {}, "FP8": {"fp8_params": True}, "NVFP4": {}, "MXFP4": {}}


def written(folder: Path, name: str, arguments) -> str:
    """Write the base, and return its folder."""
    import fp8_backends

    model = llama(arguments.hidden, arguments.layers, 1024, arguments.sequence).bfloat16()
    if "MX" in name or "NV" in name:
        fp8_backends.prepare(model, None, "native:rowwise")
        fp8_backends.checkpoints.export(model, folder / name, f"{name.lower()}-pack-quantized")
    else:
        model.save_pretrained(folder / name)
    return str(folder / name)


def measure(folder: str, scaling: str) -> dict:
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
    ids = torch.randint(1024, (1, arguments.sequence), generator=torch.Generator().manual_seed(0))

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


parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--hidden", type=int, default=1024)
parser.add_argument("--layers", type=int, default=8)
parser.add_argument("--sequence", type=int, default=64)
parser.add_argument("--scalings", default="rowwise,dynamic")
parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
parser.add_argument("--json")
arguments = parser.parse_args()

if arguments.worker:
    print(json.dumps(measure(*arguments.worker)))
    sys.exit()
results = []
with tempfile.TemporaryDirectory() as temporary:
    folders = [written(Path(temporary), name, arguments) for name in BASES]
    for scaling in arguments.scalings.split(","):
        for folder in folders:
            command = [
                sys.executable,
                __file__,
                "--sequence",
                str(arguments.sequence),
                "--worker",
                folder,
                scaling,
            ]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            results.append(json.loads(done.stdout.splitlines()[-1]))
write_json(
    arguments.json, {"question": "memory of a LoRA step over a frozen base", "results": results}
)
first = {result["scaling"]: result["peak"] for result in results if result["base"] == "bf16"}
print(f"{results[0]['elements'] / 1e6:.0f} M elements in the base's Linears")
rows = [
    [r["scaling"], r["base"], r["bytes"], r["peak"] / 1e6, r["peak"] / first[r["scaling"]]]
    for r in results
]
print(table(["scaling", "base", "bytes/element", "peak, MB", "/ bf16's"], rows))
