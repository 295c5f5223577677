"""Train the models named in SageMaker's guide to FP8, under FSDP2 with a mixed precision policy."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable

import ranks
import torch
import torch.distributed as dist
from fsdp2_training import mean
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import fp8_backends

sys.path.append(str(ranks.REPOSITORY / "benchmarks"))
import architectures  # noqa: E402

UNITS = {
    "gpt-neox": "GPTNeoXLayer",
    "llama 2": "LlamaDecoderLayer",
    "mixtral 8x7b": "MixtralDecoderLayer",
    "mixtral 8x22b": "MixtralDecoderLayer",
}
"""Model, as in the guide's table -> class of FSDP2's units."""
POLICIES = {
    "native:delayed": (torch.bfloat16, torch.float32),
    "msamp:O2": (torch.bfloat16, torch.bfloat16),
    "msamp:O4": (torch.float16, torch.float32),
    "te:delayed": (torch.bfloat16, torch.float32),
}
"""Dtypes of parameters and of reductions."""
SAGEMAKER = {"fp8_format": "HYBRID", "amax_history_len": 32, "amax_compute_algo": "max"}
"""The guide's recipe, for delayed scales."""
STEPS = 6
LARGEST_GAP = 2e-3
"""Relative to losses of one process in FP32: rounding to FP8 and bf16 gives 8e-4, a block without
training 4e-3 or more, gradients of only one rank 2e-2."""


class Mixing(nn.Module):
    """A product with a Parameter of a class unknown to every backend."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width)

    def forward(self, x):
        return x @ self.weight


class Unusual(nn.Module):
    """Add a custom layer, and two with 20 features: native pads these, TransformerEngine cannot."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mixing, self.narrow, self.widen = (
            Mixing(width),
            nn.Linear(width, 20),
            nn.Linear(20, width),
        )

    def forward(self, x):
        return x + self.mixing(x) + self.widen(self.narrow(x))


def build(name: str, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a tiny model with unusual layers behind the second norm of each block, and its
    optimizer."""
    model = architectures.build(name, seed=seed)
    for block in [module for module in model.modules() if type(module).__name__ == UNITS[name]]:
        norm = block.post_attention_layernorm
        block.post_attention_layernorm = nn.Sequential(norm, Unusual(len(norm.weight)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(
    model: nn.Module, optimizer, backward: Callable, inputs: dict[str, torch.Tensor]
) -> list[float]:
    losses = []
    for _ in range(STEPS):
        loss = architectures.loss_of(model, inputs)
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean(loss))
    return losses


@functools.cache
def losses_of_one_process(name: str) -> list[float]:
    """Train on all rows in FP32, without this package."""
    return train(*build(name), torch.Tensor.backward, architectures.batch(name, rows=8))


def record_precisions(model: nn.Module) -> dict[str, set[torch.dtype]]:
    """Return a dictionary for the dtypes of each module's input, own Parameters and output in later
    forwards."""
    found: dict[str, set[torch.dtype]] = {}

    def before(name: str, module: nn.Module, inputs: tuple) -> None:
        found.setdefault(name, set()).update(
            x.dtype for x in (*inputs, *module.parameters(recurse=False))
        )

    def after(name: str, module: nn.Module, inputs: tuple, output) -> None:
        found[name].add((output[0] if isinstance(output, tuple) else output).dtype)

    for name, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.register_forward_pre_hook(functools.partial(before, name))
            module.register_forward_hook(functools.partial(after, name))
    return found


def check_model(accelerator: Callable, name: str, backend: str) -> dict:
    """FP8 is proven in all layers that support it. The others run in the policy's dtype, and are
    named. RoPE's buffers keep FP32. Losses fall as on one process. Only the first rank has the
    initial weights."""
    compute, reduced = POLICIES[backend]
    acc = accelerator(
        fp8_backends.FP8RecipeKwargs(
            backend=backend, **(SAGEMAKER if ":delayed" in backend else {})
        ),
        mixed_precision_policy=MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduced),
        transformer_cls_names_to_wrap=[UNITS[name]],
        cpu_ram_efficient_loading=True,
    )
    model, optimizer = acc.prepare(*build(name, seed=dist.get_rank()))
    precisions, inputs = record_precisions(model), architectures.batch(name, rows=8)
    losses = train(
        model,
        optimizer,
        acc.backward,
        {key: rows[dist.get_rank() :: 2] for key, rows in inputs.items()},
    )

    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    audit = fp8_backends.audit(model, optimizer.optimizer)
    for layer, counts in audit.products.items():
        made = {counts[kind] for kind in ("fprop", "dgrad", "wgrad")}
        assert 0 not in made if backend.startswith("te") else made == {STEPS}, (layer, counts)
    weights = [
        key
        for key, parameter in model.named_parameters()
        if parameter.dim() > 1 and "embed" not in key
    ]
    layers = {key.removesuffix(".weight"): key for key in (*audit.products, *audit.high_precision)}
    assert set(layers) == {key.removesuffix(".weight") for key in weights}
    unfit = (
        "lm_head",
        "mixing",
        "gate",
        *(("narrow", "widen") if backend.startswith("te") else ()),
    )
    assert {layers[key] for key in layers if key.endswith(unfit)} == set(audit.high_precision)
    for layer in audit.high_precision:
        assert precisions[layer.removesuffix(".weight")] == {compute}, (layer, precisions)
    for key, buffer in build(name)[0].named_buffers():
        assert buffer.dtype == torch.float32 and torch.equal(buffer, model.get_buffer(key)), key
    gaps = [
        abs(loss / expected - 1)
        for loss, expected in zip(losses, losses_of_one_process(name), strict=True)
    ]
    assert losses[-1] < losses[0] - 0.2 and max(gaps) < LARGEST_GAP, (losses, gaps)
    return {"losses": losses, "gap": max(gaps)}


def checks(accelerator: Callable, *backends: str) -> dict[str, Callable]:
    """Return name -> check for every model; the backends take turns."""
    made = {}
    for name, backend in zip(UNITS, itertools.cycle(backends), strict=False):
        title = f"check_{name}_{backend}".translate(str.maketrans("- :", "___"))
        made[title] = functools.partial(check_model, accelerator, name, backend)
    return made
