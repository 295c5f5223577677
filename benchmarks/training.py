"""Train Llama-shaped models through stock Accelerate on real text, for `step.py`, `largest.py` and
`by_ranks.py`."""

from __future__ import annotations

import gc
import itertools

import torch
from measuring import precision_of

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


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def build(shape: str, sequence: int, device: str, layers: int | None = None):
    """The model in FP32 with random weights, the same for the same shape; `layers` in place of the
    shape's own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = SHAPES[shape] | ({"num_hidden_layers": layers} if layers else {})
    config = LlamaConfig(
        vocab_size=VOCABULARY.get(shape, SMALL_VOCABULARY),
        max_position_embeddings=sequence,
        use_cache=False,
        **sizes,
    )
    with torch.device(device):
        return LlamaForCausalLM(config)


class Text:
    """Windows of Python's own sources, one token a byte: the same batches for every backend."""

    def __init__(self, sequence: int) -> None:
        from fp8_backends.tools.compare.workload import load_text

        self.sequence, self.text = sequence, load_text(limit_mb=2)

    def batch(self, size: int, step: int, rank: int = 0) -> torch.Tensor:
        """Tokens [size, sequence] of one step on one rank."""
        starts = self.text.batches(1, size, self.sequence, seed=1000 * step + rank)[0]
        return self.text.windows(starts, self.sequence)


def fsdp2():
    from accelerate import FullyShardedDataParallelPlugin

    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )


class Training:
    """Train a model, prepared with its optimizer by `Accelerator` for one backend, step by step.

    Args:
        backend: `bf16` or `fp32`, or a string of this package.
        form: `compiled` compiles each decoder layer separately, after one eager step for the proof.
            All layers then share one piece of code, at any depth.
        layers: replaces the shape's own.
        engine: `ddp` or `fsdp2`, for several ranks.
    """

    def __init__(
        self,
        backend: str,
        shape: str,
        text: Text,
        batch: int,
        form: str = "eager",
        layers=None,
        engine: str = "ddp",
    ) -> None:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(not torch.distributed.is_initialized())
        torch._dynamo.reset()
        self.accelerator = Accelerator(
            **precision_of(backend),
            cpu=device() == "cpu",
            fsdp_plugin=fsdp2() if engine == "fsdp2" else None,
        )
        model = build(shape, text.sequence, str(self.accelerator.device), layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.text, self.batch, self.form, self.steps = text, batch, form, itertools.count()

    def step(self) -> torch.Tensor:
        """Take one training step on the next batch; return the loss [], on the device."""
        rank, step = self.accelerator.process_index, next(self.steps)
        if self.form == "compiled" and step == 1:
            for layer in self.accelerator.unwrap_model(self.model).model.layers:
                layer.compile()
        tokens = self.text.batch(self.batch, step, rank).to(self.accelerator.device)
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def peak(self) -> int | None:
        """Bytes of tensors at the highest point of one further step."""
        from fp8_backends.tools.compare.measuring import peak_memory

        return peak_memory(self.step, self.model, self.optimizer)

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


def free() -> None:
    """Free memory after a `Training` is dropped: collect cycles, and return the allocator's
    cache."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
