"""Compare training through this package with a manual TransformerEngine loop, bitwise.

Like in Accelerate's own benchmarks of TransformerEngine: one model, one data set, one seed, trained
by stock Accelerate with `TERecipeKwargs`, and by a loop that swaps the layers for
TransformerEngine's and enters its autocast itself. Every loss, the metrics before and after
training, and every weight must be equal. Exits with 1 otherwise, with 2 if TransformerEngine cannot
run.

    python tests/te/parity.py --recipe delayed
    python -m torch.distributed.run --nproc_per_node 2 tests/te/parity.py --mode ddp        (or fsdp2, deepspeed)
    TE_SITE=FOLDER python tests/te/parity.py --standin

The last rehearses on a CPU, over the tests' stand-in for TransformerEngine's kernels; FOLDER holds
the packages of tests/te/requirements.txt.
"""

from __future__ import annotations

import contextlib
import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]
from measuring import options, write_json  # noqa: E402
from training import fsdp2  # noqa: E402

from fp8_backends import BackendUnavailableError  # noqa: E402
from fp8_backends.compute import hardware  # noqa: E402
from fp8_backends.compute.te.backend import load  # noqa: E402

RECIPES = {
    "delayed": {"amax_history_len": 32, "amax_compute_algo": "max"},
    "most_recent": {"amax_history_len": 16, "amax_compute_algo": "most_recent", "margin": 1},
    "dynamic": {},
    "blockwise": {},
    "mxfp8": {},
}


class Size(NamedTuple):
    hidden: int
    layers: int
    sequence: int
    batch: int
    """Losses of one rank."""
    steps: int
    lr: float


SIZES = {"base": Size(768, 12, 128, 16, 60, 5e-5), "tiny": Size(64, 2, 32, 16, 16, 2e-3)}
VOCABULARY, HELD_OUT, SEED = 64, 256, 42


class Run(NamedTuple):
    """Hold the results of one side's training on this rank."""

    before: dict[str, float]
    losses: list[float]
    after: dict[str, float]
    weights: dict[str, torch.Tensor]
    converted: list[str]
    products: dict[str, dict[str, int]] = {}
    """FP8 products of the package's side, by layer and kind."""


# The task: were a sequence's tokens drawn from the upper half of the vocabulary with chance 0.9, or
# 0.1?


def stock_model(size: Size) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(SEED)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.hidden // 32,
        intermediate_size=4 * size.hidden,
        max_position_embeddings=size.sequence,
        # the fused kernels add up gradients in whatever order their blocks end
        attn_implementation="eager",
    )
    return BertForSequenceClassification(config)


def examples(count: int, size: Size, seed: int, device: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (count,), generator=generator)
    upper = torch.rand(count, size.sequence, generator=generator) < torch.tensor([0.1, 0.9])[
        labels
    ].unsqueeze(1)
    tokens = torch.randint(VOCABULARY // 2, (count, size.sequence), generator=generator) + upper * (
        VOCABULARY // 2
    )
    return {"input_ids": tokens.to(device), "labels": labels.to(device)}


def batches(size: Size, device: str) -> list[dict[str, torch.Tensor]]:
    """Each rank has its own."""
    return [
        examples(size.batch, size, 1000 * (rank() + 1) + step, device) for step in range(size.steps)
    ]


def metrics(weights: dict[str, torch.Tensor], size: Size, device: str) -> dict[str, float]:
    """Evaluate a stock model with these weights: trained weights must work without
    TransformerEngine."""
    model = stock_model(size)
    model.load_state_dict(weights)
    return evaluated(model.to(device).eval(), size, device)


@torch.no_grad()
def evaluated(model: nn.Module, size: Size, device: str) -> dict[str, float]:
    held_out = examples(HELD_OUT, size, 7, device)
    with hardware.fast_autocast(device):
        output = model(**held_out)
    said, true = output.logits.argmax(-1), held_out["labels"]
    hits = ((said == 1) & (true == 1)).sum().item()
    f1 = 2 * hits / max(1, (said.sum() + true.sum()).item())
    return {"loss": output.loss.item(), "accuracy": (said == true).float().mean().item(), "f1": f1}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


# One side: stock Accelerate with this package


def accelerator_of(mode: str, recipe: str, size: Size, device: str) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    import fp8_backends

    fp8_backends.connect()
    AcceleratorState._reset_state()
    GradientState._reset_state()
    scaling = "delayed" if recipe == "most_recent" else recipe
    handler = fp8_backends.TERecipeKwargs(scaling=scaling, **RECIPES[recipe])
    arguments: dict[str, Any] = {
        "kwargs_handlers": [handler],
        "cpu": device == "cpu" and mode != "deepspeed",
    }
    if mode == "fsdp2":
        arguments["fsdp_plugin"] = fsdp2("BertLayer", cpu_ram_efficient_loading=False)
    if mode == "deepspeed":
        from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs

        arguments["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=deepspeed_config(size))
        arguments["kwargs_handlers"].append(InitProcessGroupKwargs(backend=dist.get_backend()))
    accelerator = Accelerator(mixed_precision="fp8", **arguments)
    if mode == "fsdp2" and device == "cpu":  # there Accelerate always chooses DDP
        from engines import start_engine

        start_engine(accelerator, "FSDP2", arguments)
    return accelerator


ENGINES = {
    "single": "Module",
    "recompute": "Module",
    "ddp": "DistributedDataParallel",
    "fsdp2": "FSDPModule",
    "deepspeed": "DeepSpeedEngine",
}
"""By mode, the class of a prepared model. `recompute`: `single` with layers recomputed on the
package's side."""


def check_engine(mode: str, model: nn.Module) -> None:
    """Check that this engine wraps the prepared model."""
    names = {cls.__name__ for cls in type(model).__mro__}
    assert ENGINES[mode] in names and not names & set(ENGINES.values()) - {
        "Module",
        ENGINES[mode],
    }, names


def through_package(mode: str, recipe: str, size: Size, device: str) -> Run:
    import fp8_backends

    accelerator = accelerator_of(mode, recipe, size, device)
    model = stock_model(size)
    stock = {name: p.detach().clone() for name, p in model.state_dict().items()}
    if mode == "recompute":
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.lr)
    model, optimizer = accelerator.prepare(model, optimizer)
    check_engine(mode, model)
    plain = accelerator.unwrap_model(model)
    losses = []
    model.train()
    torch.manual_seed(SEED + rank())
    for batch in batches(size, device):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = whole(plain)
    before, after = metrics(stock, size, device), metrics(weights, size, device)
    return Run(
        before, losses, after, weights, converted_names(plain), fp8_backends.audit(plain).products
    )


def converted_names(model: nn.Module) -> list[str]:
    """Return the modules replaced by TransformerEngine's."""
    ours = ("fp8_backends.compute", "transformer_engine")
    found = [
        name for name, module in model.named_modules() if type(module).__module__.startswith(ours)
    ]
    assert found, "the package converted nothing"
    return [name.replace("_checkpoint_wrapped_module.", "") for name in found]


# The other side: TransformerEngine directly


def by_hand(mode: str, recipe: str, size: Size, device: str, converted: list[str]) -> Run:
    import transformer_engine.pytorch as te

    model = stock_model(size)
    stock = {name: p.detach().clone() for name, p in model.state_dict().items()}
    for name in converted:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, of_te(model.get_submodule(name), device))
    model.to(device)
    wrapped, backward, step = engine(mode, model, size, device)
    check_engine(mode, wrapped)
    autocast = te.autocast if hasattr(te, "autocast") else te.fp8_autocast  # before 2.9
    keyword = "recipe" if hasattr(te, "autocast") else "fp8_recipe"
    losses = []
    wrapped.train()
    torch.manual_seed(SEED + rank())
    for batch in batches(size, device):
        # DeepSpeed's engine has made the model bf16, and Accelerate leaves the precision to FSDP2's
        # policy
        around = (
            contextlib.nullcontext()
            if mode in ("deepspeed", "fsdp2")
            else hardware.fast_autocast(device)
        )
        with around, autocast(enabled=True, **{keyword: te_recipe(recipe)}):
            loss = wrapped(**batch).loss
        backward(loss)
        step()
        losses.append(loss.item())
    weights = whole(model)
    return Run(
        metrics(stock, size, device), losses, metrics(weights, size, device), weights, converted
    )


def of_te(module: nn.Module, device: str) -> nn.Module:
    """TransformerEngine's module with the same weights."""
    import transformer_engine.pytorch as te

    if isinstance(module, nn.LayerNorm):
        made = te.LayerNorm(module.normalized_shape[0], eps=module.eps, device=device)
    else:
        bias = module.bias is not None
        made = te.Linear(
            module.in_features,
            module.out_features,
            bias=bias,
            params_dtype=torch.float32,
            device=device,
        )
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            made.get_parameter(name).copy_(parameter)
    return made


_RECIPES_MADE: dict[str, Any] = {}


def te_recipe(recipe: str) -> Any:
    """Return one object for the whole training."""
    from transformer_engine.common import recipe as recipes

    classes = {
        "dynamic": "Float8CurrentScaling",
        "blockwise": "Float8BlockScaling",
        "mxfp8": "MXFP8BlockScaling",
    }
    if recipe not in _RECIPES_MADE:
        _RECIPES_MADE[recipe] = getattr(recipes, classes.get(recipe, "DelayedScaling"))(
            **RECIPES[recipe]
        )
    return _RECIPES_MADE[recipe]


def engine(mode: str, model: nn.Module, size: Size, device: str):
    """Return the wrapped model, its backward and its step."""
    if mode == "deepspeed":
        import deepspeed

        optimizer = torch.optim.AdamW(model.parameters(), lr=size.lr)
        wrapped, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=deepspeed_config(size)
        )
        return wrapped, wrapped.backward, wrapped.step
    wrapped = model
    if mode == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model)
    if mode == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for layer in model.bert.encoder.layer:
            fully_shard(layer, mp_policy=fsdp2_policy())
        fully_shard(model, mp_policy=fsdp2_policy())
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.lr)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return wrapped, lambda loss: loss.backward(), step


def fsdp2_policy() -> Any:
    """Return Accelerate's FSDP2 policy around FP8."""
    from accelerate.state import AcceleratorState
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return AcceleratorState().fsdp_plugin.mixed_precision_policy or MixedPrecisionPolicy()


def deepspeed_config(size: Size) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": size.batch,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every weight under its stock name, gathered from shards."""
    found = {}
    for name, parameter in model.named_parameters():
        value = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        found[name] = value.detach().clone().cpu()
    return found


# Comparing


def differences(package: Run, hand: Run) -> list[str]:
    """Describe differences. Empty: parity."""
    found = []
    for step, (a, b) in enumerate(zip(package.losses, hand.losses, strict=True)):
        if a != b:
            found.append(f"loss of step {step}: {a!r} and {b!r}")
    for when in ("before", "after"):
        for name, value in getattr(package, when).items():
            if value != getattr(hand, when)[name]:
                found.append(f"{name} {when} training: {value!r} and {getattr(hand, when)[name]!r}")
    for name, weight in package.weights.items():
        if not torch.equal(weight, hand.weights[name]):
            found.append(
                f"weight {name}: up to {(weight - hand.weights[name]).abs().max().item():g} apart"
            )
    for layer, counts in package.products.items():
        if missing := [kind for kind in ("fprop", "dgrad", "wgrad") if not counts[kind]]:
            found.append(f"no FP8 product was counted in {layer}: {', '.join(missing)}")
    if not package.products:
        found.append("no FP8 product was counted at all")
    if not package.after["accuracy"] > package.before["accuracy"]:
        found.append(f"nothing was learnt: {package.before} before, {package.after} after")
    return found


def compare(mode: str, recipe: str, size: Size, device: str) -> dict[str, Any]:
    package = through_package(mode, recipe, size, device)
    _reset_te()
    hand = by_hand(mode, recipe, size, device, package.converted)
    _reset_te()
    found = differences(package, hand)
    if dist.is_initialized():
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, found)
        found = [f"rank {i}: {each}" for i, mine in enumerate(of_ranks) for each in mine]
    if found:
        again = by_hand(mode, recipe, size, device, package.converted)
        if again.losses != hand.losses:
            found.insert(0, "TransformerEngine by hand does not repeat its own losses here")
        _reset_te()
    return {
        "mode": mode,
        "recipe": recipe,
        "equal": not found,
        "differences": found[:20],
        "modules": len(package.converted),
        "fp8_products": {
            kind: sum(counts[kind] for counts in package.products.values()) / size.steps
            for kind in ("fprop", "dgrad", "wgrad")
        },
        "steps": size.steps,
        "losses": package.losses,
        "before": package.before,
        "after": package.after,
    }


def _reset_te() -> None:
    """TransformerEngine keeps the amaxes of every module it has seen."""
    try:
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager
    except ImportError:  # before 2.9
        from transformer_engine.pytorch.fp8 import FP8GlobalStateManager
    FP8GlobalStateManager.reset()


def cannot_run(standin: bool) -> str:
    """Return the reason that TransformerEngine cannot run here; empty if it can."""
    if standin:
        sys.path[:0] = [str(ROOT / "tests" / folder) for folder in ("te", "distributed")]
        os.environ["DS_ACCELERATOR"] = "cpu"
        # with it Accelerate takes DDP in place of DeepSpeed
        os.environ.pop("ACCELERATE_USE_CPU", None)
        from standin import activate

        activate()
    elif not torch.cuda.is_available():
        return "there is no GPU here (on a CPU, --standin rehearses)"
    try:
        load()
    except BackendUnavailableError as error:
        return str(error)
    return ""


def main() -> int:
    arguments = options(__doc__, mode=tuple(ENGINES), recipe="delayed", size=str, standin=False)
    if reason := cannot_run(arguments.standin):
        print(f"parity with TransformerEngine cannot be tried: {reason}", file=sys.stderr)
        return 2
    device = "cpu" if arguments.standin else "cuda"
    size = SIZES[arguments.size or ("base" if device == "cuda" else "tiny")]
    if ENGINES[arguments.mode] != "Module":
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
        if device == "cuda":
            torch.cuda.set_device(rank() % torch.cuda.device_count())
    results = [
        compare(arguments.mode, recipe, size, device) for recipe in arguments.recipe.split(",")
    ]
    if rank() == 0:
        report(results, arguments)
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0 if all(result["equal"] for result in results) else 1


def report(results: list[dict[str, Any]], arguments: Namespace) -> None:
    for result in results:
        before, after = result["before"], result["after"]
        figures = ", ".join(f"{name} {before[name]:.4f} -> {after[name]:.4f}" for name in after)
        verdict = "equal to the bit" if result["equal"] else "DIFFERENT"
        counted = ", ".join(f"{count:g} {kind}" for kind, count in result["fp8_products"].items())
        print(
            f"{result['mode']} {result['recipe']}: {verdict} in {result['steps']} steps; {figures}"
        )
        print(f"    FP8 products of a step: {counted}")
        for each in result["differences"]:
            print(f"    {each}")
    kernels = "the tests' stand-in on a CPU" if arguments.standin else "TransformerEngine's"
    question = "parity with TransformerEngine by hand"
    write_json(arguments, question, kernels=kernels, results=results)


if __name__ == "__main__":
    sys.exit(main())
