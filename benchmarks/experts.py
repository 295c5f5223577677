"""Compare mixtures of experts at the levels with bf16: losses, and bytes per element of their
weights.

Four families of transformers, small, over Python's own sources, one token a byte. Each backend has
the same initial weights, batches and schedule (a warm-up, then cosine to zero) for each seed;
held-out losses are compared in pairs, with their 95 % interval. Bytes cover the experts' 3-D
Parameters, masters or residuals, gradients and optimizer states after the last step.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import asdict

import torch
from long_run import held_out_loss, schedule
from measuring import plain, precision_of, table, write_json

from fp8_backends.tensors.scaled_tensor import stored_parts
from fp8_backends.tools.compare.summary import paired_gap
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
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    family, backend, seed, arguments = unit
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(**precision_of(backend), cpu=True)
    text, model = load_text(limit_mb=2), build(family, arguments.sequence, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, weight_decay=0.1, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule(arguments.steps))
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    starts = text.batches(arguments.steps, arguments.batch, arguments.sequence, seed=seed)
    for step in range(arguments.steps):
        optimizer.zero_grad()  # not after the step: gradients are weighed
        tokens = text.windows(starts[step], arguments.sequence)
        accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    loss = held_out_loss(model, text.held_out_windows(arguments.held_out, arguments.sequence))
    stored = bytes_per_element(model, optimizer.optimizer)
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


def summarized(runs: list[dict], reference: str) -> list[dict]:
    """Return one row per family and backend, the reference first."""
    losses: dict[tuple[str, str], dict[int, float]] = {}
    for run in runs:
        losses.setdefault((run["family"], run["backend"]), {})[run["seed"]] = run["held_out_loss"]
    stored = {(run["family"], run["backend"]): run["bytes_per_element"] for run in runs}
    found = []
    for (family, backend), by_seed in losses.items():
        gap = None
        if backend != reference:
            paired = paired_gap(by_seed, losses[family, reference])
            gap = {**asdict(paired), "verdict": paired.verdict()}
        row = {
            "family": family,
            "backend": backend,
            "held_out_loss": statistics.fmean(by_seed.values()),
        }
        found.append(
            {**row, "gap": gap, "bytes_per_element": stored[family, backend], "by_seed": by_seed}
        )
    return found


def printed(found: list[dict], reference: str) -> str:
    rows = []
    for each in found:
        gap = each["gap"]
        half = f" ± {gap['half_width']:.4f}" if gap and gap["half_width"] is not None else ""
        shown = f"{gap['mean']:+.4f}{half} ({gap['verdict']})" if gap else ""
        stored = f"{each['bytes_per_element']:.2f}"
        rows.append(
            [each["family"], each["backend"], f"{each['held_out_loss']:.4f}", shown, stored]
        )
    return table(
        ["family", "backend", "held-out loss", f"gap to {reference}, nats", "bytes/element"], rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--backends", default="msamp:O2,msamp:O4")
    parser.add_argument("--reference", default=plain())
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--held-out", type=int, default=512, help="windows")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    backends = dict.fromkeys([arguments.reference, *arguments.backends.split(",")])
    families = arguments.families.split(",")
    units = [
        (family, backend, seed, arguments)
        for family in families
        for backend in backends
        for seed in range(arguments.seeds)
    ]
    pool = torch.multiprocessing.get_context("spawn").Pool(
        arguments.workers, torch.set_num_threads, (1,)
    )
    with pool:
        found = summarized(pool.map(train, units, chunksize=1), arguments.reference)
    print(printed(found, arguments.reference))
    told = vars(arguments) | {"json": None}
    question = {"question": "mixtures of experts at the levels", "precision": arguments.reference}
    write_json(arguments.json, {**question, "arguments": told, "results": found})


if __name__ == "__main__":
    main()
