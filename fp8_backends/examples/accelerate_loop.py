"""Train in a plain Accelerate loop: only the recipe differs from training in bf16.

python accelerate_loop.py --backend native:dynamic
"""

import argparse

import fp8_backends
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main(backend: str) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(512, 64)
    dataset = TensorDataset(inputs, inputs.sin() @ torch.randn(64, 16) / 8)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=24)

    recipe = fp8_backends.FP8RecipeKwargs(backend=backend)
    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe])
    loader = DataLoader(dataset, batch_size=64, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    for epoch in range(3):
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}")

    accelerator.print(fp8_backends.audit(model))  # products by layer, FP8 share of the FLOPs, dtypes, bytes


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="native:dynamic")
    main(parser.parse_args().backend)
