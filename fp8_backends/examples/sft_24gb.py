"""Fine-tune every weight of Llama 3 8B on one card of 24 GB, with TRL's SFTTrainer: the optimizer
steps in the host's memory.

    python sft_24gb.py --model meta-llama/Meta-Llama-3-8B --text corpus.txt --backend msamp:O4

Estimated for a sequence of 2,048 tokens: 14.0 GiB on the card, 28.4 GB in the host (fp8-backends
estimate --params 8B --weights bf16 --checkpointing --gradient-release --offload). Not run on a card
yet.
"""

import argparse
import os
from pathlib import Path

import fp8_backends  # noqa: F401 (the import connects it)
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def main(args: argparse.Namespace) -> None:
    os.environ["ACCELERATE_MIXED_PRECISION"] = "fp8"
    os.environ["ACCELERATE_FP8_BACKEND"] = args.backend
    os.environ["ACCELERATE_FP8_OFFLOAD"] = "states"
    os.environ["ACCELERATE_FP8_GRADIENT_RELEASE"] = "true"
    torch.manual_seed(0)
    batch = 1
    rate = 1e-5
    if args.tiny:
        batch = 16
        rate = 5e-3
        model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=128, **SIZES))
        sequences = (torch.arange(160)[:, None] + torch.arange(32)) % 100
        words = Tokenizer(models.WordLevel({"<pad>": 0}, unk_token="<pad>"))
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token="<pad>", eos_token="<pad>"
        )
    else:
        # in FP32 it would not fit until `prepare` stores a byte a weight
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        ids = tokenizer(Path(args.text).read_text(), return_tensors="pt").input_ids[0]
        sequences = ids[: len(ids) // args.length * args.length].view(-1, args.length)
    config = SFTConfig(
        output_dir=args.output,
        num_train_epochs=1,
        per_device_train_batch_size=batch,
        learning_rate=rate,
        gradient_checkpointing=True,
        max_grad_norm=0,  # gradients are gone before their norm is known
        max_length=args.length,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),  # else TRL's bf16=True is refused without a GPU
    )
    dataset = Dataset.from_dict({"input_ids": sequences.tolist()})
    SFTTrainer(model, args=config, train_dataset=dataset, processing_class=tokenizer).train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a folder, or a name on the hub")
    parser.add_argument("--text", help="a text file to train on")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--output", default="sft-24gb", help="folder of the Trainer")
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="random weights of a tiny model, without a GPU or network",
    )
    parser.add_argument("--backend", default="msamp:O4")
    main(parser.parse_args())
