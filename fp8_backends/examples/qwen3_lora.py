"""Train LoRA adapters of Qwen3 8B on a card of 24 GB: the frozen base takes one byte for each
weight.

    python qwen3_lora.py --model Qwen/Qwen3-8B --text corpus.txt --backend native:dynamic

Estimated from the shapes: the base takes 9.4 GB, in bf16 16.4 GB. FP8 holds its layers, bf16
embedding and head.
"""

import argparse
from pathlib import Path

import fp8_backends
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 32,
}


def main(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    if args.tiny:
        base = AutoModelForCausalLM.from_config(
            Qwen3Config(vocab_size=128, num_key_value_heads=2, **SIZES)
        )
        sequences = (torch.arange(320)[:, None] + torch.arange(32)) % 100
    else:
        base = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
        ids = AutoTokenizer.from_pretrained(args.model)(
            Path(args.text).read_text(), return_tensors="pt"
        ).input_ids[0]
        sequences = ids[: len(ids) // args.length * args.length].view(-1, args.length)
    model = get_peft_model(
        base, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=5e-3 if args.tiny else 2e-4
    )

    recipe = fp8_backends.FP8RecipeKwargs(backend=args.backend, fp8_params=True)
    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe])
    loader = DataLoader(TensorDataset(sequences), batch_size=16 if args.tiny else 1, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()  # from_pretrained returns models in evaluation mode
    for step, (ids,) in enumerate(loader):
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")
    print(f"bytes of a base weight: {fp8_backends.audit(model).bytes_per_element['weight']:.2f}")

    model = accelerator.unwrap_model(model)
    model.save_pretrained(args.output)  # plain adapters, for any PEFT
    merged = model.merge_and_unload()
    fp8_backends.restore(merged)  # plain layers with plain weights
    print(f"merged: {type(merged.model.layers[0].mlp.up_proj).__name__}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a folder, or a name on the hub")
    parser.add_argument("--text", help="a text file to train on")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--output", default="adapters", help="folder of the adapters")
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="random weights of a tiny model, without a GPU or network",
    )
    parser.add_argument("--backend", default="native:dynamic")
    main(parser.parse_args())
