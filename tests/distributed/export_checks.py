"""FP8 checkpoints written from several ranks: all call `export`, the first writes, and every rank
may read at once."""

from __future__ import annotations

import functools
from pathlib import Path

import ranks
import torch
import torch.distributed as dist
from fsdp2_training import prepared_in
from safetensors.torch import load_file
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import fp8_backends
from fp8_backends.errors import FP8BackendError
from fp8_backends.tensors.block_codes import PACKED_NVFP4, BlockCodes
from fp8_backends.tensors.scaled_tensor import dequantize_shards
from fp8_backends.tensors.sharded_tensor import is_distributed


def llama(inner: int = 128) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 128,
        "intermediate_size": inner,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).train()


def in_fsdp2(model, policy=None):
    options = {"mp_policy": policy} if policy else {}
    for block in model.model.layers:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def trained(spec, wrap, **sizes):
    """Return (wrapped model, optimizer) after two steps with different rows on each rank."""
    model, optimizer = prepared_in(wrap, llama(**sizes), spec)
    for step in range(2):
        ids = (torch.arange(16).unsqueeze(0) * 7 + dist.get_rank() + step) % 64
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def same(a, b):
    return torch.equal(a.view(torch.uint8), b.contiguous().view(torch.uint8))


def check_ddp_exports_codes_when_masters_are_sharded():
    model, _ = trained("msamp:O3", DistributedDataParallel)
    to = Path(ranks.shared_folder())
    result = fp8_backends.checkpoints.export(model, to)
    assert len(result.exact) == 14
    tensors = load_file(to / "model.safetensors")
    for name in result.exact:
        codes = model.module.get_submodule(name).weight_codes()
        assert same(tensors[f"{name}.weight"], codes.codes)
        assert (tensors[f"{name}.weight_scale_inv"] == codes.scale_inv).all()
    yielded = dict(fp8_backends.checkpoints.rollout_weights(model))  # on every rank
    assert yielded.keys() == tensors.keys() and all(
        same(yielded[name], tensors[name]) for name in tensors
    )
    assert AutoModelForCausalLM.from_pretrained(to).dtype == torch.float32


def check_weight_outside_the_format_needs_its_master():
    model, optimizer = trained("msamp:O3", DistributedDataParallel, inner=257)
    to = Path(ranks.shared_folder())
    try:
        fp8_backends.checkpoints.export(model, to)
        raise AssertionError("the masters lie on other ranks")
    except FP8BackendError as error:
        assert "enter fp8_backends.checkpoints.whole_states(optimizer)" in str(error)
    with fp8_backends.checkpoints.whole_states(optimizer):
        result = fp8_backends.checkpoints.export(model, to)
    assert (
        len(result.exact) == 8
        and "equal blocks" in result.high_precision["model.layers.0.mlp.up_proj"]
    )


def check_fsdp2_hands_out_the_codes_of_one_process():
    """As a file and as weights of a rollout; with a mixed precision policy, codes of the rounded
    weights."""
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    formats = {
        "native:blockwise": "finegrained_fp8",
        "native:mxfp8": "compressed-tensors",
        "msamp:O3": None,
    }
    for (spec, format), policy in [
        *((each, None) for each in formats.items()),
        (("native:rowwise", None), bf16),
    ]:
        format = format or "compressed-tensors"
        model, _ = trained(spec, functools.partial(in_fsdp2, policy=policy))
        sharded = {
            name: tensor.clone()
            for name, tensor in fp8_backends.checkpoints.rollout_weights(model, format)
        }
        assert all(is_distributed(parameter) for parameter in model.parameters()), (
            "its units are sharded again"
        )
        to = Path(ranks.shared_folder())
        result = fp8_backends.checkpoints.export(model, to / "sharded", format)
        assert len(result.exact) == 14 and not result.rounded
        whole = {
            name: dequantize_shards(p).full_tensor() if is_distributed(p) else p.detach()
            for name, p in model.named_parameters()
        }
        alone = llama()
        alone.load_state_dict(whole)
        if policy:
            alone.model.layers.load_state_dict(
                {k: v.bfloat16() for k, v in alone.model.layers.state_dict().items()}
            )
        fp8_backends.prepare(alone, None, spec)
        expected = dict(fp8_backends.checkpoints.rollout_weights(alone, format))
        if policy:  # plain weights stay exact
            expected |= {
                name: whole[name]
                for name in expected.keys() & whole.keys()
                if name not in codes_of(expected)
            }
        file = load_file(to / "sharded" / "model.safetensors")
        assert sharded.keys() == expected.keys() == file.keys(), spec
        for name, tensor in expected.items():
            assert same(sharded[name], tensor) and same(file[name], tensor), (spec, name)


def codes_of(tensors):
    return {name for name, tensor in tensors.items() if tensor.dtype == torch.float8_e4m3fn}


def check_ddp_trains_over_four_bits_of_first_rank():
    spec = fp8_backends.NativeRecipeKwargs(exclude=["0"])
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 32))
    model[1].weight = torch.nn.Parameter(
        BlockCodes.encoded(weight, PACKED_NVFP4), requires_grad=False
    )
    first = [part.clone() for part in model[1].weight.parts]
    for part in first:
        dist.broadcast(part.view(torch.uint8), 0)
    fp8_backends.prepare(model, None, spec)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model[0].parameters(), lr=1e-2)
    fp8_backends.prepare(ddp, optimizer, spec)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            ddp(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(same(each, part) for each, part in zip(first, model[1].weight.parts, strict=True))


if __name__ == "__main__":
    ranks.main(globals())
