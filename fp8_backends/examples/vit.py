"""Train a vision transformer (ViT-L) in a plain Accelerate loop: only the recipe differs from
training in bf16.

    python vit.py --model google/vit-large-patch16-224 --images FOLDER --backend native:dynamic

Estimated peak for 64 images: 13.0 GiB, in bf16 15.7 GiB (fp8-backends estimate CONFIG --batch 64).
A model of 0.3 billion parameters gains no speed from FP8 on record: compare first.
"""

import argparse
from typing import Any

import fp8_backends
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoImageProcessor, AutoModelForImageClassification, ViTConfig

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def main(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    if args.tiny:
        model = AutoModelForImageClassification.from_config(
            ViTConfig(image_size=32, patch_size=8, num_labels=4, **SIZES)
        )
        labels = torch.arange(320) % 4
        images = torch.randn(4, 3, 32, 32)[labels] + 0.5 * torch.randn(320, 3, 32, 32)
        dataset: Any = [
            {"pixel_values": image, "labels": label}
            for image, label in zip(images, labels, strict=True)
        ]
    else:
        from datasets import load_dataset  # each subfolder of FOLDER is a class

        folder = load_dataset("imagefolder", data_dir=args.images, split="train")
        processor = AutoImageProcessor.from_pretrained(args.model)
        dataset = folder.with_transform(
            lambda rows: {
                **processor([image.convert("RGB") for image in rows["image"]]),
                "labels": rows["label"],
            }
        )
        model = AutoModelForImageClassification.from_pretrained(
            args.model,
            num_labels=folder.features["label"].num_classes,
            ignore_mismatched_sizes=True,
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3 if args.tiny else 5e-5)

    recipe = fp8_backends.FP8RecipeKwargs(backend=args.backend)
    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe])
    loader = DataLoader(dataset, batch_size=args.batch, shuffle=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(loader))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    model.train()  # from_pretrained returns models in evaluation mode
    for step, batch in enumerate(loader):
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        accelerator.print(f"step {step}: loss {loss.item():.4f}")
    # products by layer, FP8 share of the FLOPs, dtypes, bytes
    accelerator.print(fp8_backends.audit(model))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a folder, or a name on the hub")
    parser.add_argument(
        "--images", metavar="FOLDER", help="a folder with a folder of images for each class"
    )
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="random weights of a tiny model, without a GPU or network",
    )
    parser.add_argument("--backend", default="native:dynamic")
    main(parser.parse_args())
