"""Average the weights (EMA) with torch.optim.swa_utils, in full precision.

python ema.py --backend msamp:O2
"""

import argparse

import fp8_backends
import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def main(backend: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    recipe = fp8_backends.FP8RecipeKwargs(backend=backend)
    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe])
    model, optimizer = accelerator.prepare(model, optimizer)

    inner = accelerator.unwrap_model(model)
    with fp8_backends.checkpoints.plain_weights(inner):  # the copy is averaged, never stepped: plain weights do
        average = AveragedModel(inner, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    x = torch.randn(128, 64, device=accelerator.device)
    y = x[:, :16].sin()
    for step in range(20):
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(inner)
        if step % 5 == 4:
            with torch.no_grad():
                averaged = nn.functional.mse_loss(average.eval()(x), y)
            print(f"step {step}: loss {loss.item():.4f}, of the average {averaged.item():.4f}")
    print({name: str(weight.dtype) for name, weight in average.module.state_dict().items()})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="msamp:O2")
    main(parser.parse_args().backend)
