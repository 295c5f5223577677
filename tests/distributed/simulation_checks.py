"""Count collectives and memory of real steps, as `test_simulation.py` simulates them."""

from __future__ import annotations

import gc
import json
import os

import ranks
import torch
import torch.distributed as dist
from profiled_traffic import profiled_bytes
from transformers import LlamaConfig

from fp8_backends.recipes.handlers import resolve
from fp8_backends.tools.compare.measuring import Collectives, peak_memory
from fp8_backends.tools.estimate import ModelShape, Workload
from fp8_backends.tools.estimate.simulation import RankTraining

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
LLAMA = LlamaConfig(
    **SIZES, num_hidden_layers=2, vocab_size=1024, use_cache=False, tie_word_embeddings=False
)
WORKLOAD = Workload(model=ModelShape("Llama", LLAMA), batch=4, sequence=128)


def check_real_steps():
    figures = []
    for backend, sizes in json.loads(os.environ["CASES"]):
        torch.manual_seed(0)
        mesh = dist.init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        model = WORKLOAD.model.make_model(torch.float32)
        recipe = None if backend == "bf16" else resolve(backend)
        training = RankTraining(model, recipe, torch.bfloat16, mesh)

        def step(training=training):
            training.step(WORKLOAD.model.make_batch(WORKLOAD.batch, WORKLOAD.sequence))

        for _ in range(2):
            step()
        with Collectives(mesh) as collectives:
            step()
        counted = [[*key, traffic._asdict()] for key, traffic in collectives.seen.items()]
        sent, peaks = profiled_bytes(step), []
        for _ in range(4):  # threads of gloo hold tensors longer on a busy machine
            gc.collect()  # garbage of earlier steps, which Python drops at any time
            peaks.append(peak_memory(step, training.model, training.optimizer))
        peak = min(peaks)
        figures.append(
            {"counted": counted, "sent": sent, "peak": peak + bucket_bytes(training.model)}
        )
    return figures


def bucket_bytes(model):
    """Return the bytes of DDP's buckets, which are older than the profile of a step."""
    logged = getattr(model, "_get_ddp_logging_data", dict)()
    return sum(map(int, logged.get("rebuilt_bucket_sizes", "0").split(",")))


if __name__ == "__main__":
    ranks.main(globals())
