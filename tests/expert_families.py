"""Build tiny mixtures of experts of transformers, and twins with a Linear per expert.

    model = build("gpt_oss")            # as `model_families.build`
    experts = make_experts("mixtral")   # one module of experts alone
    twin = Twin(experts)                # the same weights, as Linears

`transformers` is imported when one is built.
"""

from __future__ import annotations

import torch
from model_families import HEADS, LENGTH, SIZES, VOCABULARY, WIDTH
from torch import nn

from fp8_backends.tensors.scaled_tensor import ScaledTensor

EXPERTS, TOP_K = 4, 2

_ATTENTION = {"num_key_value_heads": 1, "head_dim": WIDTH // HEADS}
_LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "qk_nope_head_dim": 16,
}

# family -> (beginning of its classes, configuration). Experts 32 -> 128 -> gate -> 64 -> 32, or
# half of it
_FAMILIES = {
    "mixtral": ("Mixtral", {**_ATTENTION, "intermediate_size": 64, "num_local_experts": EXPERTS}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            **_ATTENTION,
            "intermediate_size": 64,
            "moe_intermediate_size": 32,
            "num_experts": EXPERTS,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **_LATENT,
            "num_key_value_heads": HEADS,
            "intermediate_size": 64,
            "moe_intermediate_size": 32,
            "n_routed_experts": EXPERTS,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "gpt_oss": ("GptOss", {**_ATTENTION, "intermediate_size": 32, "num_local_experts": EXPERTS}),
}
FAMILIES = tuple(_FAMILIES)
"""The first three have [experts, out, in]; GPT-OSS has [experts, in, out], biases, and interleaved
gates."""


def build(family: str, seed: int = 0, **config) -> nn.Module:
    """A model in training mode with FP32 weights, and a batch is `model_families.batch()`."""
    import transformers

    name, _ = _FAMILIES[family]
    torch.manual_seed(seed)
    return getattr(transformers, f"{name}ForCausalLM")(_config(family, **config)).train()


def _config(family: str, **config):
    import transformers

    name, fields = _FAMILIES[family]
    fields = {**SIZES, "pad_token_id": 0, "num_experts_per_tok": TOP_K, **fields, **config}
    return getattr(transformers, f"{name}Config")(**fields)


def make_experts(family: str, dtype: torch.dtype = torch.float32, **config) -> nn.Module:
    """The experts of one block, in a root of their own: `root.experts`."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    torch.manual_seed(0)
    made_of = _config(family, **config)
    made_of._experts_implementation = "grouped_mm"
    root = nn.Module()
    root.experts = {"mixtral": MixtralExperts, "gpt_oss": GptOssExperts}[family](made_of)
    with torch.no_grad():
        for parameter in root.experts.parameters():
            parameter.normal_(0, 0.05)
    return root.to(dtype).train()


def routed(tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32, experts: int = EXPERTS):
    """(hidden states [tokens, WIDTH], experts of each token [tokens, TOP_K], their weights), as a
    router gives them."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, WIDTH, generator=generator).to(dtype)
    chosen = [torch.randperm(experts, generator=generator)[:TOP_K] for _ in range(tokens)]
    weights = torch.rand(tokens, TOP_K, generator=generator).to(dtype)
    return (
        hidden,
        torch.stack(chosen) if chosen else torch.empty(0, TOP_K, dtype=torch.long),
        weights,
    )


class Twin(nn.Module):
    """Run the experts as Linears, each on its own tokens as a batch. They have the values of stored
    weights as products read them."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.up = nn.ModuleList(
            self._linear(experts, "gate_up_proj", e) for e in range(len(experts.down_proj))
        )
        self.down = nn.ModuleList(
            self._linear(experts, "down_proj", e) for e in range(len(experts.down_proj))
        )
        self.gate = experts._apply_gate
        self.train()

    @staticmethod
    def _linear(experts: nn.Module, part: str, expert: int) -> nn.Linear:
        weight = getattr(experts, part).detach()
        weight = (weight.dequantize() if isinstance(weight, ScaledTensor) else weight)[expert]
        weight = weight.t() if experts.is_transposed else weight
        linear = nn.Linear(*reversed(weight.shape), bias=experts.has_bias)
        linear.weight = nn.Parameter(weight.detach().clone())
        if experts.has_bias:
            linear.bias = nn.Parameter(getattr(experts, f"{part}_bias")[expert].detach().clone())
        return linear

    def forward(self, hidden, chosen, weights):
        ids, order = torch.sort(chosen.reshape(-1), stable=True)
        rows = hidden[order // chosen.shape[1]]
        parts = [
            self.down[e](self.gate(self.up[e](rows[ids == e])))
            for e in range(len(self.up))
            if (ids == e).any()
        ]
        weighted = torch.cat(parts) * weights.reshape(-1)[order].unsqueeze(1)
        out = torch.empty_like(weighted).index_copy(0, order, weighted)
        return out.view(len(hidden), chosen.shape[1], -1).sum(1).to(hidden.dtype)

    def gradient(self, part: str) -> torch.Tensor:
        """[experts, out, in]; zeros for an expert without tokens."""
        layers = {"gate_up_proj": self.up, "down_proj": self.down}[part]
        grads = [
            torch.zeros_like(each.weight) if each.weight.grad is None else each.weight.grad
            for each in layers
        ]
        return torch.stack(grads)


__all__ = [
    "EXPERTS",
    "FAMILIES",
    "LENGTH",
    "TOP_K",
    "VOCABULARY",
    "Twin",
    "build",
    "make_experts",
    "routed",
]
