"""Train models through stock Accelerate, on Python's own sources or on a given batch."""

from __future__ import annotations

import gc
import itertools
import math
import statistics

import torch
import torch.nn.attention
from measuring import device, precision_of, split

SHAPES = {
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "small": {
        "hidden_size": 384,
        "intermediate_size": 1152,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
    },
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "8b-4layers": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}
"""Llama 3's 1B and layers of its 8B."""
SMALL_VOCABULARY = 32000
"""Vocabulary of these two: with Llama 3's own 128,256 words the head would be a third of the work
of four layers."""
VOCABULARY = {"tiny": 256, "small": 256}


def llama(hidden: int, layers: int, sequence: int, **more):
    """A Llama of random weights, the same for the same sizes; 256 words, one a byte, by default."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 256,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": max(1, hidden // 64),
        "max_position_embeddings": sequence,
        "use_cache": False,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes | more))


def build(shape: str, sequence: int, device: str, layers: int | None = None):
    """The model in FP32; `layers` in place of the shape's own."""
    sizes = SHAPES[shape] | {"vocab_size": VOCABULARY.get(shape, SMALL_VOCABULARY)}
    hidden, depth = (sizes.pop(name) for name in ("hidden_size", "num_hidden_layers"))
    with torch.device(device):
        return llama(hidden, layers or depth, sequence, **sizes)


class Text:
    """Windows of Python's own sources, one token a byte: the same batches for every backend."""

    def __init__(self, sequence: int) -> None:
        from fp8_backends.tools.compare.workload import load_text

        self.sequence, self.text = sequence, load_text(limit_mb=2)

    def batch(self, size: int, step: int, rank: int = 0) -> torch.Tensor:
        """Tokens [size, sequence] of one step on one rank."""
        starts = self.text.batches(1, size, self.sequence, seed=1000 * step + rank)[0]
        return self.text.windows(starts, self.sequence)


def fsdp2(layer: str = "LlamaDecoderLayer", **more):
    from accelerate import FullyShardedDataParallelPlugin

    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[layer],
        **more,
    )


class Prepared:
    """A model with AdamW, prepared by `Accelerator` for one backend.

    Args:
        backend: `bf16` or `fp32`, or a string of this package; `fields` are its recipe's.
        build: makes the model, in FP32.
        groups: makes the optimizer's parameter groups of the model; default: one of all.
        schedule: factor of the learning rate by step.
    """

    def __init__(
        self, backend: str, build, lr: float, *, groups=None, schedule=None, decay=0.01, plugin=None,
        on=None, **fields,
    ) -> None:  # fmt: skip
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(not torch.distributed.is_initialized())
        torch._dynamo.reset()
        precision = precision_of(backend, **fields)
        self.accelerator = Accelerator(
            **precision, cpu=(on or device()) == "cpu", fsdp_plugin=plugin
        )
        model = build()
        parameters = groups(model) if groups else model.parameters()
        optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=decay, fused=True)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.scheduler = None
        if schedule:
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
            self.scheduler = self.accelerator.prepare(scheduler)

    def update(self, clip: float | None = None, **inputs: torch.Tensor) -> torch.Tensor:
        """Take a step on a batch and keep its gradients; return the loss [], on the device."""
        placed = {name: given.to(self.accelerator.device) for name, given in inputs.items()}
        outputs = self.model(**placed)
        loss = outputs if isinstance(outputs, torch.Tensor) else outputs[0]
        del outputs  # logits are no part of a step's peak
        self.accelerator.backward(loss)
        if clip:
            self.accelerator.clip_grad_norm_(self.model.parameters(), clip)
        self.optimizer.step()
        if self.scheduler:
            self.scheduler.step()
        return loss.detach()

    def step(self, **inputs: torch.Tensor) -> torch.Tensor:
        loss = self.update(**inputs)
        self.optimizer.zero_grad()
        return loss

    def peak(self, **inputs: torch.Tensor) -> int | None:
        """Bytes of tensors at the highest point of one further step."""
        from fp8_backends.tools.compare.measuring import peak_memory

        return peak_memory(lambda: self.step(**inputs), self.model, self.optimizer)


class Training(Prepared):
    """Train a Llama on the text, step by step.

    Args:
        backend: with fields, as `split` reads them; `bf16?liger=True` has Liger's fused loss.
        form: `compiled` compiles each decoder layer separately, after one eager step for the proof.
            All layers then share one piece of code, at any depth.
        layers: replaces the shape's own.
        engine: `ddp` or `fsdp2`, for several ranks.
        fields: of the recipe.
    """

    def __init__(
        self, backend: str, shape: str, text: Text, batch: int, form="eager", layers=None,
        engine="ddp", **fields,
    ) -> None:  # fmt: skip
        plugin = fsdp2() if engine == "fsdp2" else None
        is_fused = split(backend)[1].get("liger", False)

        def made():
            model = build(shape, text.sequence, device(), layers)
            if is_fused:
                from liger_kernel.transformers import apply_liger_kernel_to_llama

                others = dict.fromkeys(("rope", "rms_norm", "swiglu", "cross_entropy"), False)
                apply_liger_kernel_to_llama(model=model, fused_linear_cross_entropy=True, **others)
            return model

        super().__init__(backend, made, 3e-4, plugin=plugin, **fields)
        self.text, self.batch, self.form, self.steps = text, batch, form, itertools.count()

    def step(self) -> torch.Tensor:
        """Take one training step on the next batch; return the loss [], on the device."""
        rank, step = self.accelerator.process_index, next(self.steps)
        if self.form == "compiled" and step == 1:
            for layer in self.accelerator.unwrap_model(self.model).model.layers:
                layer.compile()
        tokens = self.text.batch(self.batch, step, rank)
        return super().step(input_ids=tokens, labels=tokens)

    def attention(self) -> str:
        """Name the implementation of attention that PyTorch takes for this model's sizes."""
        config, sequence = self.accelerator.unwrap_model(self.model).config, self.text.sequence
        width = config.hidden_size // config.num_attention_heads
        query, key = (
            torch.empty(
                self.batch,
                heads,
                sequence,
                width,
                dtype=torch.bfloat16,
                device=device(),
                requires_grad=True,
            )
            for heads in (config.num_attention_heads, config.num_key_value_heads)
        )
        chosen = torch._fused_sdp_choice(query, key, key, None, 0.0, True, enable_gqa=True)
        return torch.nn.attention.SDPBackend(chosen).name

    def flops(self) -> dict[str, float]:
        """Operations of one step, forward and backward: of products with weights, and of causal
        attention."""
        model = self.accelerator.unwrap_model(self.model)
        tokens = self.batch * self.text.sequence
        weights = sum(
            m.weight.numel()
            for m in model.modules()
            if isinstance(getattr(m, "in_features", None), int)
        )
        config = model.config
        attention = 6 * config.num_hidden_layers * config.hidden_size * self.text.sequence * tokens
        return {"weights": 6.0 * weights * tokens, "attention": float(attention)}

    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())


def schedule(steps: int):
    """Rising over a twentieth of the steps, then cosine to zero."""
    warmup = max(1, steps // 20)
    return lambda step: min(
        (step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * min(1, step / steps))
    )


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, windows: torch.Tensor) -> float:
    model.eval()
    losses = [
        model(input_ids=part, labels=part).loss.item() * len(part) for part in windows.split(64)
    ]
    model.train()
    return sum(losses) / len(windows)


def summaries(runs: list[dict], reference: str, *keys: str) -> list[dict]:
    """Return one row for each value of the keys and backend, with the mean held-out loss over the
    seeds, and its gap to the reference's, paired by seed; of other figures the first run's."""
    from fp8_backends.tools.compare.summary import paired_gap

    groups: dict[tuple, list[dict]] = {}
    for run in runs:
        groups.setdefault((*map(run.get, keys), run["backend"]), []).append(run)
    losses = {
        group: {run["seed"]: run["held_out_loss"] for run in of} for group, of in groups.items()
    }
    rows = []
    for group, of in groups.items():
        by_seed = losses[group]
        gap = None
        if group[-1] != reference:
            found = paired_gap(by_seed, losses[(*group[:-1], reference)])
            gap = {**found.to_dict(), "verdict": found.verdict()}
        mean = statistics.fmean(by_seed.values())
        rows.append({**of[0], "held_out_loss": mean, "gap": gap, "by_seed": by_seed})
    return rows


def free() -> None:
    """Free memory after a `Training` is dropped: collect cycles, and return the allocator's
    cache."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
