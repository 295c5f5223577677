"""A fused output head on two ranks, tied to the embedding. See `ranks`."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import ranks
import torch
import torch.distributed as dist
from fsdp2_training import mean, prepared_in, same_on_all_ranks, whole
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers.models.llama import modeling_llama  # noqa: F401, here for all ranks: they are forked afterwards

from fp8_backends.convert.fused_head.deferred_logits import DeferredLogits

sys.path.insert(0, str(Path(__file__).parent.parent / "trainers"))
from tiny_trainers import counting_batch, llama  # noqa: E402

SPEC = {"include": ["+lm_head"]}
LARGEST_GAP = 0.01
"""Nats: ranks scale their own halves of a batch."""


def _losses(
    wrap=None, rows: slice = slice(None), backend: str = "native:dynamic", **fields
) -> tuple[torch.nn.Module, list[float], type]:
    """(the model, mean losses of 5 steps on these rows of a batch, the class of its logits)"""
    spec = SPEC | fields | {"backend": backend}
    wrap = wrap or (lambda model: model)
    model, optimizer = prepared_in(wrap, llama(tie_word_embeddings=True), spec, lr=5e-3)
    batch, losses = counting_batch()[rows], []
    for _ in range(5):
        output = model(input_ids=batch, labels=batch, use_cache=False)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean(output.loss))
    return model, losses, type(output.logits)


def _own_rows() -> slice:
    return slice(dist.get_rank(), None, dist.get_world_size())


def check_ddp():
    _, alone, _ = _losses(fused_head=True)
    for backend, unused in (
        ("native:dynamic", False),
        ("native:dynamic", True),
        ("msamp:O2", False),
    ):
        wrap = functools.partial(DistributedDataParallel, find_unused_parameters=unused)
        model, losses, logits = _losses(wrap, _own_rows(), backend, fused_head=True)
        assert logits is DeferredLogits and losses[-1] < losses[0] - 0.2, losses
        assert max(abs(a - b) for a, b in zip(losses, alone, strict=True)) < LARGEST_GAP, (
            losses,
            alone,
        )
        assert all(same_on_all_ranks(value) for value in model.state_dict().values())


def check_fsdp2_runs_ordinary_head():
    def shard(model):
        for layer in model.model.layers:
            fully_shard(layer)
        return fully_shard(model)

    model, losses, logits = _losses(shard, _own_rows(), fused_head=True)
    assert logits is torch.Tensor and model.lm_head.fp8_is_ordinary
    assert losses == _losses(shard, _own_rows())[1]
    assert all(same_on_all_ranks(whole(value)) for value in model.state_dict().values())


if __name__ == "__main__":
    ranks.main(globals())
