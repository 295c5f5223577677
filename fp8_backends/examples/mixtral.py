"""Train every weight of Mixtral 8x7B, experts included, on 8 GPUs under FSDP2: weights travel as one byte each.

    torchrun --nproc_per_node 8 mixtral.py --model mistralai/Mixtral-8x7B-v0.1 --text corpus.txt --backend msamp:O4

Estimated peak of a rank for a sequence of 2,048 tokens: 42.1 GiB, in bf16 102 GiB (fp8-backends estimate CONFIG
--devices 8 --checkpointing).
"""

import argparse
from pathlib import Path

import fp8_backends
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def main(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["MixtralDecoderLayer"],
        cpu_ram_efficient_loading=not args.tiny,
        activation_checkpointing=not args.tiny,
    )
    recipe = fp8_backends.FP8RecipeKwargs(backend=args.backend)
    accelerator = Accelerator(
        mixed_precision="fp8", fsdp_plugin=plugin, kwargs_handlers=[recipe], cpu=args.tiny
    )
    if args.tiny:
        config = MixtralConfig(vocab_size=128, num_local_experts=4, num_key_value_heads=2, **SIZES)
        model = AutoModelForCausalLM.from_config(config)
        sequences = (torch.arange(160)[:, None] + torch.arange(32)) % 100
    else:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        ids = AutoTokenizer.from_pretrained(args.model)(
            Path(args.text).read_text(), return_tensors="pt"
        ).input_ids[0]
        sequences = ids[: len(ids) // args.length * args.length].view(-1, args.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3 if args.tiny else 1e-5)

    loader = DataLoader(TensorDataset(sequences), batch_size=8 if args.tiny else 1, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()  # from_pretrained returns models in evaluation mode
    for step, (ids,) in enumerate(loader):
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), reduction="mean")
        accelerator.print(f"step {step}: loss {mean.item():.4f}")
    accelerator.save_model(model, "mixtral")  # plain weights; all ranks call it
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a folder, or a name on the hub")
    parser.add_argument("--text", help="a text file to train on")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="random weights of a tiny model, without a GPU or network",
    )
    parser.add_argument("--backend", default="msamp:O4")
    main(parser.parse_args())
