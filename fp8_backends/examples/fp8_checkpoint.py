"""Write an FP8 checkpoint with `fp8_backends.checkpoints.export`, load it with stock transformers, and train on.

python fp8_checkpoint.py --backend native:blockwise
"""

import argparse
import tempfile

import fp8_backends
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}


def fp8_checkpoint() -> str:
    """A folder with a small model whose weights are FP8 codes, as a model hub has large ones."""
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, **SIZES))
    fp8_backends.prepare(model, None, "native:blockwise")
    folder = tempfile.mkdtemp()
    fp8_backends.checkpoints.export(model, folder)
    return folder


def main(backend: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(fp8_checkpoint(), dtype=torch.float32).train()
    fp8_backends.checkpoints.dequantize(model)  # codes, which transformers loads on a GPU, become plain weights
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    recipe = fp8_backends.FP8RecipeKwargs(backend=backend)
    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe])
    model, optimizer = accelerator.prepare(model, optimizer)

    ids = ((torch.arange(16)[:, None] + torch.arange(32)) % 100).to(accelerator.device)
    for step in range(10):
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")
    fp8_backends.checkpoints.export(model, tempfile.mkdtemp())  # and out again


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="native:blockwise")
    main(parser.parse_args().backend)
