"""Build engines that split a sequence among ranks (ring attention, Ulysses), and pipelines, which
split the layers."""

from __future__ import annotations

import contextlib
import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

ATTENTION = "sdpa"
LENGTH = 16
"""Tokens of a whole sequence."""
ENGINES = ("ring", "Ulysses")
"""Engines that split a sequence."""
PIPELINE = "pipeline"


def llama() -> nn.Module:
    """Build one decoder layer with seven Linear layers, and a head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    return LlamaForCausalLM(
        LlamaConfig(**sizes, vocab_size=64, max_position_embeddings=LENGTH, use_cache=False)
    )


def loss_of(
    model: nn.Module, ids: torch.Tensor, targets: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    logits = model(input_ids=ids, position_ids=positions).logits
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@contextlib.contextmanager
def shares(accelerator, engine: str, ids: torch.Tensor):
    """This rank's part of a batch [rows, length + 1] of whole sequences, for the time of its
    forward and backward."""
    parts = [ids[:, :-1], ids[:, 1:], torch.arange(LENGTH).expand(len(ids), LENGTH)]
    if engine == "Ulysses":  # as DeepSpeed's own adapter of data loaders cuts them
        yield [part.chunk(dist.get_world_size(), 1)[dist.get_rank()] for part in parts]
        return
    parts = [part.contiguous() for part in parts]
    with accelerator.maybe_context_parallel(parts, [1] * 3, no_restore_buffers=set(parts)):
        yield parts


# Gaps of PyTorch, Accelerate and DeepSpeed on ranks without a GPU, or in a second model of one
# process


def ring_attention_on_a_cpu() -> None:
    """Give PyTorch's ring attention a CPU kernel: it knows only GPU kernels, with the same
    signature."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    aten = torch.ops.aten
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    inputs = ("query", "key", "value")
    runs = {
        forward: (_attention._templated_ring_attention, (*inputs, "dropout_p", "is_causal")),
        backward: (
            functools.partial(
                _attention._templated_ring_attention_backward, grad_out_name="grad_out"
            ),
            ("grad_out", *inputs, "out", "logsumexp", "dropout_p", "is_causal"),
        ),
    }

    def run(op, args, kwargs):
        ring, names = runs[op]
        example = next(each for each in args if isinstance(each, DTensor))
        local = [each.to_local() if isinstance(each, DTensor) else each for each in args]
        mesh = example.device_mesh
        results = ring(mesh.get_group(), 2, op, **dict(zip(names, local, strict=False)), **kwargs)
        return tuple(
            DTensor.from_local(each, mesh, example.placements, run_check=False) for each in results
        )

    _attention.custom_ops |= dict.fromkeys(runs, run)


def forget_ulysses() -> None:
    """DeepSpeed sets up Ulysses once a process: it keeps the groups of ranks, and wraps
    transformers' attention."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    parallel_state_sp._SEQUENCE_PARALLEL_GROUP = parallel_state_sp._SEQUENCE_DATA_PARALLEL_GROUP = (
        None
    )
    ALL_ATTENTION_FUNCTIONS[ATTENTION] = sdpa_attention_forward


def forget_amaxes() -> None:
    """Clear amaxes: TransformerEngine reduces those of all earlier models over all ranks, if a
    recipe requests it."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reset()


# Pipelines


MICROBATCHES = 4
WIDTH = 64


class FirstStage(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.embedding, self.block = nn.Embedding(64, WIDTH), block

    def forward(self, ids):
        return self.block(self.embedding(ids))


class LastStage(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.head = block, nn.Linear(WIDTH, 64, bias=False)

    def forward(self, x):
        return self.head(self.block(x))


def pipeline_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def prepared(model: nn.Module, backend: str) -> torch.optim.Optimizer:
    """Prepare one or all stages, and make the optimizer. At a level, FSDP2 shards a stage over its
    single rank."""
    import fp8_backends

    own = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    recipe = fp8_backends.FP8RecipeKwargs(backend=backend)
    fp8_backends.prepare(model, None, recipe)
    if "msamp" in backend:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=DeviceMesh.from_group(own, "cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    fp8_backends.prepare(model, optimizer, recipe)
    return optimizer


def losses_of_one_process(
    stages: list[nn.Module], backend: str, data: list[torch.Tensor]
) -> list[float]:
    """Return one loss per batch [rows, length + 1], in the same microbatches. Each stage has its
    own optimizer here, too, since a step's random bits depend on a parameter's place in it."""
    optimizers = [prepared(stage, backend) for stage in stages]
    model, losses = nn.Sequential(*stages), []
    for ids in data:
        parts = [
            pipeline_loss(model(part[:, :-1]), part[:, 1:]) for part in ids.chunk(MICROBATCHES)
        ]
        for loss in parts:
            # a schedule lets gradients travel once, too
            for stage in stages if "msamp" in backend else ():
                stage.set_requires_gradient_sync(loss is parts[-1])
            loss.backward()
        for p in model.parameters():  # as a schedule does
            p.grad.div_(MICROBATCHES)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(sum(loss.item() for loss in parts) / MICROBATCHES)
    return losses


def losses_of_a_pipeline(
    stage: nn.Module, backend: str, schedule: type, data: list[torch.Tensor]
) -> list[float]:
    """Return the losses of this rank's stage; every rank returns the last one's."""
    from torch.distributed.pipelining import PipelineStage

    rank, losses = dist.get_rank(), []
    optimizer = prepared(stage, backend)
    # without these, PyTorch learns the sizes by a forward and a backward of ones, recorded as
    # amaxes by a state
    ids = data[0][: len(data[0]) // MICROBATCHES, :-1]
    between, logits = (
        torch.empty(*ids.shape, WIDTH, requires_grad=True),
        torch.empty(*ids.shape, 64, requires_grad=True),
    )
    sizes = (
        {"input_args": between, "output_args": logits}
        if rank
        else {"input_args": ids, "output_args": between}
    )
    staged = PipelineStage(stage, rank, dist.get_world_size(), torch.device("cpu"), **sizes)
    pipeline = schedule(staged, MICROBATCHES, loss_fn=pipeline_loss)
    for ids in data:
        parts = []
        if rank == 0:
            pipeline.step(ids[:, :-1].contiguous())  # torch 2.11 compares strides
        else:
            pipeline.step(target=ids[:, 1:], losses=parts)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(loss.item() for loss in parts) / MICROBATCHES)
    known = [losses]
    dist.broadcast_object_list(known, src=dist.get_world_size() - 1)
    return known[0]
