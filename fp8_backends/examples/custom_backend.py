"""Register a custom backend: native products, FP8 only for wide layers, and a new field.

python custom_backend.py --backend wide:rowwise
"""

import argparse

import fp8_backends
import torch
from accelerate import Accelerator
from fp8_backends.compute.fields import Field, whole_number
from fp8_backends.compute.interface import Recipe
from fp8_backends.compute.native import NativeCompute
from torch import nn

NARROWEST = Field("narrowest", 64, whole_number(1), "Layers with fewer features on a side stay in high precision.")


class WideCompute(NativeCompute):
    name = "wide"
    fields = (*NativeCompute.fields, NARROWEST)

    def unfit(self, linear: nn.Linear, recipe: Recipe) -> str | None:
        side = min(linear.in_features, linear.out_features)
        if side < recipe.narrowest:
            return f"{side} features on a side, fewer than {recipe.narrowest}"
        return super().unfit(linear, recipe)


def main(backend: str) -> None:
    torch.manual_seed(0)
    fp8_backends.register_backend("wide", WideCompute)
    recipe = fp8_backends.resolve({"backend": backend, "narrowest": 128})

    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe])
    model, optimizer = accelerator.prepare(model, optimizer)

    x = torch.randn(128, 64, device=accelerator.device)
    y = x[:, :16].sin()
    for step in range(10):
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")
    print(fp8_backends.audit(model).high_precision)  # each layer that stayed, with the reason


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="wide:dynamic")
    main(parser.parse_args().backend)
