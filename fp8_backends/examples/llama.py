"""Train every weight of Llama 3 8B on one H100 with `msamp:O4`, and write an FP8 checkpoint for
inference servers.

    python llama.py --model meta-llama/Meta-Llama-3-8B --text corpus.txt --backend msamp:O4

Estimated peak for a sequence of 2,048 tokens: 48.5 GiB, in bf16 121 GiB (fp8-backends estimate
--params 8B).
"""

import argparse
from pathlib import Path

import fp8_backends
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def main(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    if args.tiny:
        model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=128, **SIZES))
        sequences = (torch.arange(160)[:, None] + torch.arange(32)) % 100
    else:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        ids = tokenizer(Path(args.text).read_text(), return_tensors="pt").input_ids[0]
        sequences = ids[: len(ids) // args.length * args.length].view(-1, args.length)
        tokenizer.save_pretrained(args.output)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3 if args.tiny else 1e-5)

    recipe = fp8_backends.FP8RecipeKwargs(backend=args.backend)
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

    # for vLLM and SGLang
    fp8_backends.checkpoints.export(model, args.output, format="compressed-tensors")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a folder, or a name on the hub")
    parser.add_argument("--text", help="a text file to train on")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--output", default="llama-fp8", help="folder of the FP8 checkpoint")
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="random weights of a tiny model, without a GPU or network",
    )
    parser.add_argument("--backend", default="msamp:O4")
    main(parser.parse_args())
