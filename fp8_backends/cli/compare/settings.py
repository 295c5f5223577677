"""Settings of a comparison, and their defaults for this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...compute import hardware

BASELINES = ("bf16", "fp32", "fp16")
REFERENCES = ("bf16", "fp32")
"""Precisions that backends can be compared with; they compute in the same around FP8."""


@dataclass(kw_only=True)
class Settings:
    """Settings of a comparison; all of them end up in its report."""

    backends: tuple[str, ...] = ("native:dynamic", "native:delayed", "ao:tensorwise", "msamp:O2")
    """Canonical backend strings and baselines, without the reference."""
    reference: str
    """A member of `REFERENCES`."""
    text: str | None = None
    limit_mb: float = 8.0
    model: str | None = None
    """A transformers configuration; None: a Llama of `shape`."""
    shape: dict[str, int]
    """Fields of LlamaConfig."""
    steps: int
    seeds: int
    batch: int
    sequence: int
    lr: float
    warmup_share: float = 0.5
    """Steps with rising learning rate; cosine to zero from there."""
    weight_decay: float = 0.1
    clip: float = 1.0
    held_out_share: float = 0.2
    """Held-out windows as a share of the windows trained on."""
    minutes: float | None = None
    """What the whole comparison may take; steps and seeds are then what fits."""
    compile: bool
    saved_activations: str = "off"
    """The recipe's field, of every backend in FP8."""
    loss_gap_bound: float
    """Nats; the check that the mean paired held-out gap must pass."""
    device: str
    nproc: int = 1
    """Ranks of a training run; they share each batch."""

    @property
    def held_out_windows(self) -> int:
        """Windows that a run is evaluated on; fewer where the text is short."""
        return max(self.batch, round(self.held_out_share * self.steps * self.batch))


SMALL = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3, "num_attention_heads": 4}
"""0.7 M parameters at 256 tokens: five seeds of five backends train in minutes on two cores."""

ONE_BILLION = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8,
}  # fmt: skip
"""The shape of Llama 3.2 1B: smaller models are slower in FP8 than in bf16 on every chip."""


def defaults(fast_fp8: bool) -> dict[str, Any]:
    """Return defaults of what a user may set, for a chip with FP8 products or without."""
    if fast_fp8:
        return {
            "shape": ONE_BILLION, "steps": 60, "seeds": 3, "batch": 2, "sequence": 4096, "lr": 3e-4, "compile": True,
        }  # fmt: skip
    return {"shape": SMALL, "steps": 80, "seeds": 5, "batch": 8, "sequence": 128, "lr": 1e-3, "compile": False}


def fast_fp8(device: str) -> bool:
    """Tell whether FP8's speed can be measured on this device."""
    return device == "cuda" and hardware.fp8_products()
