"""Train PEFT's LoRA over a frozen base in FP8, one byte for each weight. Adapters stay in full precision.

python lora.py --backend native:dynamic
"""

import argparse
import tempfile

import fp8_backends
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}


def main(backend: str) -> None:
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(vocab_size=128, **SIZES))  # yours: LlamaForCausalLM.from_pretrained(...)
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)

    recipe = fp8_backends.FP8RecipeKwargs(backend=backend, fp8_params=True)
    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe])
    model, optimizer = accelerator.prepare(model, optimizer)

    ids = ((torch.arange(16)[:, None] + torch.arange(32)) % 100).to(accelerator.device)
    for step in range(20):
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 4:
            accelerator.print(f"step {step}: loss {loss.item():.4f}")
    stored = fp8_backends.audit(model).bytes_per_element
    accelerator.print(f"bytes of a base weight: {stored['weight']:.2f}")

    model = accelerator.unwrap_model(model)
    model.save_pretrained(tempfile.mkdtemp())  # plain adapters, for any PEFT
    merged = model.merge_and_unload()
    fp8_backends.restore(merged)  # plain layers with plain weights
    accelerator.print(f"merged: {type(merged.model.layers[0].mlp.up_proj).__name__}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="native:dynamic")
    main(parser.parse_args().backend)
