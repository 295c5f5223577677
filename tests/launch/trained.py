"""Train like a typical script: FP8 appears only in the report at its end.

    trained.py OUTPUT [--import] [--handler JSON]

Writes OUTPUT.RANK with the recipe, products, losses and surroundings of this rank. `--import`
imports fp8_backends first, as scripts under stock Accelerate's launcher must.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys

parser = argparse.ArgumentParser()
parser.add_argument("output")
parser.add_argument("--import", action="store_true", dest="imports")
parser.add_argument("--handler", type=json.loads)
parser.add_argument(
    "--fp8_backend", help="the script's own argument, of the same name as the launcher's"
)
options = parser.parse_args()

if options.imports:
    import fp8_backends  # noqa: F401

import torch  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs  # noqa: E402
from torch import nn  # noqa: E402

STEPS = 3


def accelerator_arguments() -> dict:
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":  # on a CPU the script must choose gloo
        from deepspeed.ops import __compatible_ops__

        __compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled at its first use
        config = {
            "zero_optimization": {"stage": 2},
            "train_micro_batch_size_per_gpu": 16,
            "bf16": {"enabled": False},
        }
        handlers = [InitProcessGroupKwargs(backend="gloo")]
        if "ACCELERATE_DEEPSPEED_CONFIG_FILE" in os.environ:
            return {"kwargs_handlers": handlers}
        return {
            "deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=config),
            "kwargs_handlers": handlers,
        }
    return {}


def train() -> dict:
    arguments = accelerator_arguments()
    if options.handler:
        import fp8_backends

        fields = dict(options.handler)
        arguments["kwargs_handlers"] = [getattr(fp8_backends, fields.pop("class"))(**fields)]
    accelerator = Accelerator(**arguments)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
    x = torch.randn(16, 32)
    y = torch.tanh(x[:, :16])
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2))
    losses = []
    for _ in range(STEPS):
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, **described(accelerator, model)}


def described(accelerator, model) -> dict:
    import fp8_backends

    recipe = getattr(accelerator, "fp8_recipe", None)
    return {
        "recipe": recipe and recipe.to_dict(),
        "products": fp8_backends.audit(model).products if recipe else None,
        "kind": type(model).__name__,
        "rank": accelerator.process_index,
        "ranks": accelerator.num_processes,
        "argv": sys.argv,
        "folder": sys.path[0],
        "main": [__name__, os.path.abspath(sys.modules["__main__"].__file__)],
        "left": sorted(name for name in os.environ if name.upper().startswith("ACCELERATE_FP8_")),
    }


def main() -> None:
    try:
        outcome = train()
    except Exception as error:
        outcome = {
            "error": f"{type(error).__name__}: {error}",
            "rank": int(os.environ.get("RANK", 0)),
        }
        # a rank that leaves while others still connect would fail them
        if torch.distributed.is_initialized():
            torch.distributed.monitored_barrier(timeout=datetime.timedelta(seconds=30))
    with open(f"{options.output}.{outcome['rank']}", "w") as file:
        json.dump(outcome, file)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.exit("error" in outcome)


if __name__ == "__main__":
    main()
