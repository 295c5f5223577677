"""Compare mixtures of experts at the levels with bf16: losses, and bytes per element of their
weights.

Four families of transformers, small, over Python's own sources, one token a byte. Each backend has
the same initial weights, batches and schedule (a warm-up, then cosine to zero) for each seed;
held-out losses are compared in pairs, with their 95 % interval. Bytes cover the experts' 3-D
Parameters, masters or residuals, gradients and optimizer states after the last step.
"""

from __future__ import annotations

import torch
from measuring import options, plain, pool, write_json
from tables import printed
from training import Prepared, held_out_loss, schedule, summaries

from fp8_backends.tensors.scaled_tensor import stored_parts
from fp8_backends.tools.compare.workload import load_text

_GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
_LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "qk_nope_head_dim": 16,
}
_ROUTED = {"n_routed_experts": 4, "n_group": 2, "topk_group": 2, "first_k_dense_replace": 1}
FAMILIES = {
    "Mixtral": {**_GROUPED, "num_local_experts": 4},
    "Qwen3Moe": {**_GROUPED, "num_experts": 4, "moe_intermediate_size": 64},
    "DeepseekV3": {**_LATENT, **_ROUTED, "num_key_value_heads": 4, "moe_intermediate_size": 64},
    "GptOss": {**_GROUPED, "num_local_experts": 4},
}
"""Prefixes of the classes' names, with each configuration's own fields."""


def build(family: str, sequence: int, seed: int) -> torch.nn.Module:
    import transformers

    shape = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    shape |= {
        "num_attention_heads": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": sequence,
    }
    shape |= {"pad_token_id": 0, "use_cache": False, "tie_word_embeddings": False}
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**shape, **FAMILIES[family])
    return getattr(transformers, f"{family}ForCausalLM")(config)


def train(unit: tuple) -> dict:
    """Run one family and backend with one seed."""
    family, backend, seed, arguments = unit
    sequence, text = arguments.sequence, load_text(limit_mb=2)
    prepared = Prepared(
        backend,
        lambda: build(family, sequence, seed),
        arguments.lr,
        schedule=schedule(arguments.steps),
        decay=0.1,
        on="cpu",
    )
    for starts in text.batches(arguments.steps, arguments.batch, sequence, seed=seed):
        prepared.optimizer.zero_grad()  # not after the step: gradients are weighed
        tokens = text.windows(starts, sequence)
        prepared.update(clip=1.0, input_ids=tokens, labels=tokens)
    loss = held_out_loss(prepared.model, text.held_out_windows(arguments.held_out, sequence))
    stored = bytes_per_element(prepared.model, prepared.optimizer.optimizer)
    return {
        "family": family,
        "backend": backend,
        "seed": seed,
        "held_out_loss": loss,
        "bytes_per_element": stored,
    }


def bytes_per_element(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Bytes of the storages behind each element of an expert's weight."""
    experts = [p for name, p in model.named_parameters() if p.dim() == 3 and ".experts." in name]
    held: dict[int, int] = {}
    for parameter in experts:
        states = (state for state in optimizer.state[parameter].values() if state.dim())
        for tensor in (parameter.detach(), parameter.grad, *states):
            storages = (part.untyped_storage() for part in stored_parts(tensor, exact=True))
            held |= {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(held.values()) / sum(parameter.numel() for parameter in experts)


def main() -> None:
    arguments = options(
        __doc__,
        families=",".join(FAMILIES),
        backends="msamp:O2,msamp:O4",
        reference=plain(),
        seeds=5,
        steps=160,
        lr=2e-3,
        sequence=64,
        batch=8,
        held_out=512,
        workers=2,
    )
    backends = dict.fromkeys([arguments.reference, *arguments.backends.split(",")])
    units = [
        (family, backend, seed, arguments)
        for family in arguments.families.split(",")
        for backend in backends
        for seed in range(arguments.seeds)
    ]
    with pool(arguments.workers) as processes:
        runs = processes.map(train, units, chunksize=1)
    found = summaries(runs, arguments.reference, "family")
    printed("experts", write_json(arguments, "mixtures of experts at the levels", results=found))


if __name__ == "__main__":
    main()
