"""Train with MS-AMP's levels on two DDP ranks: FP8 gradients, and at O3 masters and Adam states
sharded over the ranks.

torchrun --nproc_per_node 2 two_ranks.py --backend msamp:O3
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
    model = nn.Sequential(
        nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 16)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    recipe = fp8_backends.FP8RecipeKwargs(backend=backend)
    accelerator = Accelerator(
        mixed_precision="fp8", kwargs_handlers=[recipe], cpu=not torch.cuda.is_available()
    )
    loader = DataLoader(dataset, batch_size=32, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for epoch in range(3):
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), reduction="mean")
        accelerator.print(
            f"epoch {epoch}: loss {mean.item():.4f}, the mean over {accelerator.num_processes} "
            "rank(s)"
        )

    stored = fp8_backends.audit(model, optimizer).bytes_per_element
    accelerator.print(f"bytes for each weight on the first rank: {stored['total']:.2f}")
    weights = accelerator.get_state_dict(model)  # plain tensors; all ranks call it
    accelerator.print({name: str(weight.dtype) for name, weight in weights.items()})
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="msamp:O3")
    main(parser.parse_args().backend)
