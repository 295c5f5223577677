"""`fp8-backends config --new`: ask for chip, model, ranks and memory, and propose a configuration
for Accelerate."""

import os
import platform
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from ...compute import chips, hardware, registry
from ...compute.fields import one_of, whole_number, word
from ...errors import FP8BackendError
from ...recipes.handlers import resolve
from ...recipes.merging import refusal_of
from ...words import share, shown
from ..completion import backend_strings
from ..estimate.command import GIB, SEQUENCE, Device, device_named
from ..estimate.estimates import SHARE_OF_MEMORY, Workload, estimate
from ..estimate.model_shapes import ModelShape, from_parameters, from_transformers, parse_count
from ..terminal import Progress, paragraphs, table, wrapped
from .accelerate_config import read_accelerate
from .training_config import TrainingConfig

Answer = TypeVar("Answer")

LONG_SEQUENCE = 8192
"""Tokens of a sequence from which on FP8 activations are proposed if memory is short."""
ENGINE_CHOICES = {
    "ddp": "each rank holds the whole model: least traffic, if it fits",
    "fsdp2": "ranks share weights, gradients and Adam states, and gather each layer in turn",
    "deepspeed": "ZeRO-2, for scripts made for it",
}


def new_config(path: str | None) -> tuple[str, TrainingConfig, str | None]:
    """Ask everything. Return path and content of the file, and the chip's name; None is this
    machine."""
    print(
        wrapped(
            "A new configuration for FP8 training. Enter takes the answer in brackets; Ctrl-C "
            "writes no file."
        )
    )
    path = _ask_path(path)
    rented, device = _ask(
        "chip",
        "here",
        _chip,
        ("here", device_named(None).title),
        ("others", f"cpu, {', '.join(chips.SOLD)}"),
    )
    gpu = chips.product_named(device.chip).gpu
    te_runs = rented is None and registry.auto_choice().backend == "te"
    advice = chips.advice_for(gpu, te_runs, hardware.cpu_bf16())
    if not advice.backend:
        print(wrapped(f"Note: for speed train in {advice.precision} there: {advice.reason}."))
    workload, machines = _ask_workload(is_here=rented is None, on_gpu=gpu is not None)
    engine, fits = _ask_engine(
        workload, device, advice.backend or "native:dynamic", on_gpu=gpu is not None
    )
    proposal, is_short = _ask_memory(engine, fits, workload.sequence >= LONG_SEQUENCE)
    values = {
        **{"compute_environment": "LOCAL_MACHINE", "num_machines": machines, "machine_rank": 0},
        **{"num_processes": workload.devices, "use_cpu": gpu is None, "mixed_precision": "fp8"},
        **_engine_keys(engine, gpu is not None),
    }
    if machines > 1:
        values["main_process_ip"] = _ask(
            "address", platform.node(), word, ("address", "of the first machine")
        )
        values |= {"main_process_port": 29500, "rdzv_backend": "static", "same_network": True}
    compiled = "fewer kernels for FP8's casts; the first step takes minutes. Repeated layers only"
    if _ask_yes("torch.compile", gpu is not None, ("yes", compiled), ("no", "starts at once")):
        values["dynamo_config"] = {
            "dynamo_backend": "INDUCTOR",
            "dynamo_use_regional_compilation": True,
        }

    def configured(backend: str) -> TrainingConfig:
        fields: dict[str, Any] = (
            {"saved_activations": "fp8"} if is_short and workload.sequence >= LONG_SEQUENCE else {}
        )
        if engine == "fsdp2" and resolve(backend).level == "O0":
            fields["enable_fsdp_float8_all_gather"] = True
        config = read_accelerate(values, path)
        config.fields = {
            name: value for name, value in fields.items() if not refusal_of(backend, {name: value})
        }
        config.fields["backend"] = backend
        error = next(
            (finding for finding in config.findings(rented) if finding.severity == "error"), None
        )
        if error is not None:
            raise FP8BackendError(f"{error.reason}. Fix: {error.fix}")
        return config

    choices = (
        ("proposed", proposal + (f": {advice.reason}" if advice.backend else "")),
        ("others", ", ".join(backend_strings())),
    )
    return path, _ask("backend", proposal, configured, *choices), rented


def launch_commands(path: str, machines: int) -> str:
    """Return the command to train with this file: one line for each machine."""
    ranks = [f"--machine_rank {rank} " for rank in range(machines)] if machines > 1 else [""]
    return "\n".join(
        f"    fp8-backends launch --config_file {shlex.quote(path)} {rank}train.py"
        for rank in ranks
    )


def _ask(
    name: str, default: object, parse: Callable[[str], Answer], *choices: tuple[str, str]
) -> Answer:
    """Explain the choices, and ask until `parse` accepts the answer. Raises `FP8BackendError` if
    the input ends."""
    print(f"\n{paragraphs(choices, 10)}")
    while True:
        try:
            answer = input(f"{name} [{default}]: ").strip() or str(default)
        except KeyboardInterrupt:
            print()  # main's line follows
            raise
        except EOFError:
            print()
            raise FP8BackendError(
                f"the input ended before the answer for {name}: no file is written"
            ) from None
        if not sys.stdin.isatty():
            print(answer)  # as a terminal shows it
        try:
            return parse(answer)
        # plain ones are of parsers of fields: "must be …"
        except (FP8BackendError, ValueError) as error:
            print(
                wrapped(
                    f"{error}."
                    if isinstance(error, FP8BackendError)
                    else f"{shown(answer)} {error}."
                )
            )


def _ask_yes(name: str, is_default: bool, *choices: tuple[str, str]) -> bool:
    return (
        _ask(name, "yes" if is_default else "no", one_of("yes", "no", "y", "n"), *choices)[0] == "y"
    )


def _ask_path(path: str | None) -> str:
    free = next(
        name for i in range(1, 1000) if not os.path.exists(name := f"fp8{f'_{i}' * (i > 1)}.yaml")
    )
    while True:
        path = path or _ask(
            "file", free, _in_folder, ("file", "where the configuration is written")
        )
        if not os.path.exists(path) or _ask_yes("overwrite", False, (path, "exists already")):
            return _in_folder(path)
        path = None


def _in_folder(path: str) -> str:
    if os.path.isdir(path) or not Path(path).resolve().parent.is_dir():
        raise FP8BackendError(f"{path} is a folder, or in none: name a file")
    return path


def _chip(name: str) -> tuple[str | None, Device]:
    rented = None if name.lower() == "here" else chips.product_named(name).name
    return rented, device_named(rented)


def _model(text: str) -> ModelShape:
    is_count = text[0].isdigit() and not os.path.exists(text)
    return from_parameters(parse_count(text)) if is_count else from_transformers(text)


def _ask_workload(is_here: bool, on_gpu: bool) -> tuple[Workload, int]:
    """Return what one rank trains, and the number of machines."""
    sizes = (
        "model",
        "parameters of a Llama, such as 8B or 350M, or a config.json of transformers, or its "
        "folder",
    )
    model = _ask("model", "8B" if on_gpu else "100M", _model, sizes)
    longest = model.longest or 2**30
    tokens = ("sequence", "tokens at a time on each rank: activations grow with them")
    sequence = 1
    if model.reads_tokens:
        sequence = _ask("sequence", min(SEQUENCE, longest), whole_number(1, longest), tokens)
    machines = _ask("machines", 1, whole_number(1), ("machines", "computers that train together"))

    def shared_evenly(text: str) -> int:
        if (ranks := whole_number(1)(text)) % machines:
            raise ValueError(f"is not a multiple of {machines} machines")
        return ranks

    gpus = torch.cuda.device_count() if is_here else 0
    ranks = _ask(
        "ranks",
        max(1, gpus) * machines,
        shared_evenly,
        ("ranks", "processes in all, one for each GPU"),
    )
    return Workload(model=model, sequence=sequence, devices=ranks), machines


def _ask_engine(
    workload: Workload, device: Device, plain: str, on_gpu: bool
) -> tuple[str, dict[str, bool]]:
    """Return the engine, and for plain storage first, then levels, if they fit under it."""
    alone = workload.devices == 1
    usable = SHARE_OF_MEMORY * device.memory
    stored = "te+msamp:O2" if plain.startswith("te") else "msamp:O2" if alone else "msamp:O4"
    shardings = ["none"] if alone else ["ddp", "fsdp2"] if on_gpu else ["ddp"]
    with Progress(f"estimating memory of {workload.model.title}") as progress:
        estimates = estimate(workload, [plain, stored], shardings, progress)
        if stored == "msamp:O2" and estimates[-1].peak > usable:
            estimates += estimate(workload, ["msamp:O4"], shardings, progress)
    peaks: dict[str, list[str]] = {}
    for each in estimates:
        peaks.setdefault(each.backend, []).append(f"{each.peak / GIB:.3g} GiB")
    print(
        f"\n{wrapped(f'Estimated peak of each rank. {device.title}: {share(SHARE_OF_MEMORY)} is for tensors.')}"
    )
    heads = ["", *("peak" if name == "none" else name for name in shardings)]
    print(table([heads, *([name, *row] for name, row in peaks.items())]))
    fits = {
        name: {e.backend: e.peak <= usable for e in estimates if e.sharding == name}
        for name in shardings
    }
    engine = shardings[0]
    if len(shardings) > 1:
        engine = _ask(
            "engine",
            "ddp" if fits["ddp"][plain] else "fsdp2",
            one_of(*ENGINE_CHOICES),
            *ENGINE_CHOICES.items(),
        )
    return engine, fits["ddp" if engine == "deepspeed" else engine]


def _ask_memory(engine: str, fits: dict[str, bool], is_long: bool) -> tuple[str, bool]:
    """Return the proposed backend, and if memory is short."""
    plain, *levels = fits
    stored = next((level for level in levels if fits[level]), [plain, *levels][-1])
    saves = f"{stored} stores weights, gradients and Adam states in 8 and 16 bits{'; and activations in FP8' * is_long}"
    choices = [("no", f"{plain} stores them as bf16 training does"), ("yes", saves)]
    is_short = _ask_yes("memory is short", not fits[plain], *choices)
    return stored if is_short else plain, is_short


def _engine_keys(engine: str, on_gpu: bool) -> dict[str, Any]:
    if engine == "fsdp2":
        block = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
        block |= {"fsdp_reshard_after_forward": True, "fsdp_state_dict_type": "SHARDED_STATE_DICT"}
        return {"distributed_type": "FSDP", "fsdp_config": block}
    if engine == "deepspeed":
        return {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2}}
    return {
        "distributed_type": "NO" if engine == "none" else "MULTI_GPU" if on_gpu else "MULTI_CPU"
    }
