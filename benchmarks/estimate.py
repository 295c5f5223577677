"""Compare `fp8-backends estimate` with live training.

For three models and each backend, run a whole training step and compare its bytes with the estimate
from the model's configuration.

* static: weights, masters, gradients and optimizer states, as `audit` reads them from the live
  model. Copies from forward to backward, added by `audit`, are excluded on both sides.
* peak: the highest moment of the third step (on a GPU the allocator's, on a CPU the profiler's).

`--ranks 2` does the same for a small Llama on that many processes, under DDP and FSDP2, through
Accelerate: static and peak of rank 0, and the bytes sent by a rank. Over gloo, without a
reduce-scatter, FSDP2's plain gradients take an all-reduce, twice the bytes; the estimate assumes a
reduce-scatter.

`estimated_and_measured_peak` compares the peak of any other model, with or without a configuration
of transformers.

On a CPU without bf16 products FP32 takes the place of bf16, in training and in the estimate, unless
`--precision bf16` is given; FSDP2's traffic is still estimated in bf16, Accelerate's setting for
FP8.

    benchmarks/estimate.py --precision bf16 --ranks 2 --models "" --json
    benchmarks/results/wire_cpu_avx2.json \
        --backends bf16,native:dynamic,msamp:O1,msamp:O2,msamp:O3,msamp:O4      the bytes of the picture `wire`
"""

from __future__ import annotations

import gc
import itertools
import json
from collections.abc import Callable
from typing import Any

import torch
from measuring import DTYPES, answer, device, options, plain, write_json
from tables import printed
from training import Prepared, fsdp2

BACKENDS = "native:dynamic,native:delayed,native:rowwise,native:mxfp8,msamp:O1,msamp:O2,msamp:O3,ao"
ENGINES = ("ddp", "fsdp2")
Build = Callable[[], torch.nn.Module]
Inputs = Callable[[], dict[str, torch.Tensor]]
precision = plain()
"""Precision around FP8."""


def workloads() -> dict:
    """Name -> (shape, sequences, tokens of each, activation checkpointing)."""
    from transformers import BertConfig, LlamaConfig, Qwen3Config

    llama = LlamaConfig(
        vocab_size=1024,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        max_position_embeddings=512,
        use_cache=False,
    )
    bert = BertConfig(
        vocab_size=8192,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=4,
        hidden_dropout_prob=0.1,
    )
    qwen = Qwen3Config(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return {
        "Llama, 115 M": (llama, 1, 64, False),
        "BERT, 7 M": (bert, 8, 128, False),
        "Qwen3, tied, checkpointing": (qwen, 4, 256, True),
        "small Llama": (small_llama(), 4, 128, False),
    }


def small_llama():
    """Return the Llama of `fp8-backends compare`."""
    from transformers import LlamaConfig

    from fp8_backends.tools.compare.workload import SMALL

    return LlamaConfig(
        **SMALL,
        vocab_size=256,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        use_cache=False,
    )


class Training(Prepared):
    """A model with one batch."""

    def __init__(
        self, build_model: Build, make_inputs: Inputs, backend: str, engine: str = "none"
    ) -> None:
        def build() -> torch.nn.Module:
            if engine == "fsdp2":
                _take_fsdp2()
            torch.manual_seed(0)
            return build_model().train()

        super().__init__(backend, build, 1e-4, autocast_dtype=precision)
        self.inputs = make_inputs()

    def update(self, **inputs: torch.Tensor) -> torch.Tensor:
        return super().update(**self.inputs)


def training_of(name: str, backend: str, engine: str) -> Training:
    """The training of one of the workloads."""
    from fp8_backends.tools.estimate import ModelShape

    config, batch, sequence, checkpointing = workloads()[name]

    def build_model() -> torch.nn.Module:
        model = ModelShape(name, config).make_model(torch.float32)
        if checkpointing:
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        return model

    def make_inputs() -> dict[str, torch.Tensor]:
        tokens = torch.randint(config.vocab_size, (batch, sequence))
        return {"input_ids": tokens, "labels": tokens}

    return Training(build_model, make_inputs, backend, engine)


def estimated_and_measured_peak(
    build_model: Build, make_inputs: Inputs, backend: str
) -> tuple[int, int]:
    """Estimate and measure the peak memory of a training step with AdamW, for any model with a
    loss.

    Args:
        build_model: makes the model, in FP32 on the CPU. Its forward takes the inputs by name, and
            returns the loss, alone or first among others.
        make_inputs: makes one batch, on the CPU.
        backend: a backend string, or `bf16` or `fp32` for training without FP8.

    Returns:
        (bytes by the estimate's trace on fake tensors, bytes of the third step on this machine's
        GPU or CPU)

    Raises:
        FP8BackendError: no layer of the model can run in FP8, or its step cannot be traced.
    """
    from fp8_backends.tools.estimate.estimates import highest
    from fp8_backends.tools.estimate.step_trace import StepSettings, trace_step

    training = Training(build_model, make_inputs, backend)
    for _ in range(2):
        training.step()
    measured = training.peak()
    del training
    gc.collect()
    asked = asked_of(backend)
    recipe = None if asked in DTYPES else asked
    autocast = torch.bfloat16 if precision == "bf16" and backend != "fp32" else None
    _, estimated = highest(
        trace_step(build_model, make_inputs, StepSettings(recipe=recipe, autocast=autocast))
    )
    return round(estimated), measured


def asked_of(backend: str) -> Any:
    """Return the estimate's arguments: this backend, with this machine's precision around FP8."""
    from fp8_backends import FP8RecipeKwargs

    return (
        backend if backend in DTYPES else FP8RecipeKwargs(backend=backend, autocast_dtype=precision)
    )


def _take_fsdp2() -> None:
    """Choose FSDP2 like Accelerate on GPUs; on ranks without a GPU it would choose DDP."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    plugin = fsdp2(cpu_ram_efficient_loading=False)
    plugin.set_mixed_precision(precision)
    for state in (PartialState, AcceleratorState):
        state._shared_state["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state["fsdp_plugin"] = plugin


def measure(name: str, backend: str, engine: str = "none") -> dict:
    """Static bytes, peak and sent bytes of a live training."""
    training = training_of(name, backend, engine)
    training.update()
    static = static_bytes(training.model, training.optimizer)
    training.optimizer.zero_grad()
    training.step()
    found = {"static": static, "peak": training.peak() + _bucket_bytes(training.model)}
    if engine != "none":
        from fp8_backends.tools.compare.measuring import sent_bytes

        found["sent"] = sent_bytes(training.step)
    return found


def _bucket_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of DDP's buckets: created earlier, they are missing in one step's
    profile."""
    if (
        not isinstance(model, torch.nn.parallel.DistributedDataParallel)
        or torch.cuda.is_available()
    ):
        return 0
    return sum(map(int, model._get_ddp_logging_data().get("rebuilt_bucket_sizes", "0").split(",")))


def static_bytes(model: torch.nn.Module, optimizer) -> int:
    """Return the bytes of weights, masters, gradients and optimizer states on this rank."""
    from fp8_backends.evidence.auditing import stored_bytes
    from fp8_backends.torch_tools.optimizers import unwrapped

    state = unwrapped(optimizer).state
    total = 0
    for parameter in model.parameters():
        kept = [
            value for value in state.get(parameter, {}).values() if isinstance(value, torch.Tensor)
        ]
        tensors = [parameter, *([] if parameter.grad is None else [parameter.grad]), *kept]
        total += sum(map(stored_bytes, tensors))
        master = getattr(parameter, "master", None)
        if master is not None:
            total += stored_bytes(master)
    return total


def compare(name: str, backend: str, measured: dict, engine: str = "none", ranks: int = 1) -> dict:
    """Pair the estimate with the measurement."""
    from fp8_backends.tools.estimate import ModelShape, Workload, estimate

    config, batch, sequence, checkpointing = workloads()[name]
    workload = Workload(
        model=ModelShape(name, config),
        batch=batch,
        sequence=sequence,
        checkpointing=checkpointing,
        devices=ranks,
    )
    (found,) = estimate(workload, [asked_of(backend)], [engine])
    estimated = {key: round(getattr(found, key)) for key in measured}
    ratios = {key: estimated[key] / measured[key] for key in measured if measured[key]}
    return {
        "model": name,
        "backend": backend,
        "sharding": engine,
        "ranks": ranks,
        "parameters": round(found.parameters),
        "measured": measured,
        "estimated": estimated,
        "ratio": ratios,
        "peak_at": found.peak_at,
    }


def on_ranks(arguments) -> list[dict]:
    """Measured on several processes, compared here."""
    words = ("--backends", arguments.backends, "--precision", precision, "--worker", "yes")
    environment = {"ACCELERATE_USE_CPU": "true"} if device() == "cpu" else {}
    ranks = arguments.ranks
    measured = answer(__file__, *words, ranks=ranks, OMP_NUM_THREADS="1", **environment)
    return [
        compare("small Llama", each["backend"], each["measured"], each["engine"], ranks)
        for each in measured
    ]


def worker(arguments) -> None:
    measured = []
    for engine, backend in itertools.product(ENGINES, arguments.backends.split(",")):
        found = measure("small Llama", backend, engine)
        measured.append({"engine": engine, "backend": backend, "measured": found})
        gc.collect()
    if torch.distributed.get_rank() == 0:
        print(json.dumps(measured), flush=True)
    torch.distributed.destroy_process_group()


def main() -> None:
    global precision
    arguments = options(
        __doc__,
        backends=str,
        models="Llama, 115 M;BERT, 7 M;Qwen3, tied, checkpointing",
        ranks=0,
        precision=tuple(dict.fromkeys([precision, *DTYPES])),
        worker=str,
    )
    precision = arguments.precision
    arguments.backends = arguments.backends or f"{precision},{BACKENDS}"
    if arguments.worker:
        worker(arguments)
        return
    results = []
    for name in filter(None, arguments.models.split(";")):
        for backend in arguments.backends.split(","):
            results.append(compare(name, backend, measure(name, backend)))
            print(results[-1]["model"], backend, results[-1]["ratio"], flush=True)
            gc.collect()
    if arguments.ranks:
        results += on_ranks(arguments)
    printed("estimate", write_json(arguments, "estimate over measured", results=results))


if __name__ == "__main__":
    main()
