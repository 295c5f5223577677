"""Compile a prepared decoder layer of Llama, forward and backward, for an absent GPU, and trace the
code outside the layers. Prints JSON.

The model is the one of `training.py`: FP32 weights under bf16 autocast. Each decoder layer is
compiled; embedding, last norm, head and loss are eager.

    compiled_layers.py BACKEND [--shape 8b-4layers] [--tokens 8192] [--chip H200]
    [--no-machine-code] [--layer]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]
import inductor  # noqa: E402
import machine  # noqa: E402
import machine_code  # noqa: E402
import outside  # noqa: E402
import roofline  # noqa: E402
from measuring import options  # noqa: E402
from specs import convert  # noqa: E402
from tracing import Graph, Traced, traced  # noqa: E402
from training import build  # noqa: E402

from fp8_backends.tensors.scaled_tensor import ScaledTensor  # noqa: E402


class FeedForward(nn.Module):
    """Norm, feed-forward part and residual of a decoder layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.norm, self.mlp = layer.post_attention_layernorm, layer.mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Traces(NamedTuple):
    layer: Traced
    """A decoder layer."""
    block: Traced | None
    """Only its feed-forward block."""
    parameters: int
    """Parameters of the whole model."""
    scaled: int
    """Parameters of the layers stored in scaled precision by a level."""
    stored: int
    """Parameters of the whole model stored in scaled precision."""


def traces(spec: str, shape: str, tokens: int, with_block: bool = True) -> Traces:
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = build(shape, tokens, "meta").train()
    parameters = sum(each.numel() for each in model.parameters())
    with FakeTensorMode(allow_non_fake_inputs=True), torch.autocast("cuda", torch.bfloat16):
        convert(machine.on_fake_gpu(model), spec)
        # once a step, for all layers together: proof, and scales for the next step
        model._forward_pre_hooks.clear()
        layer, config = model.model.layers[0], model.config
        x = torch.empty(1, tokens, config.hidden_size, device="cuda", requires_grad=True)
        width = config.hidden_size // config.num_attention_heads
        rotations = tuple(torch.empty(1, tokens, width, device="cuda") for _ in range(2))
        table = select_decomp_table()
        whole = traced(layer, x, position_embeddings=rotations, decompositions=table)
        block = traced(FeedForward(layer), x, decompositions=table) if with_block else None
        scaled, stored = (
            sum(each.numel() for each in part.parameters() if isinstance(each, ScaledTensor))
            for part in (model.model.layers, model)
        )
    return Traces(whole, block, parameters, scaled, stored)


def saved_bytes(forward: list[Graph]) -> int:
    """Return the bytes saved by one layer's forward for its backward."""
    total = 0
    for graph in forward:
        (output,) = (node for node in graph.module.graph.nodes if node.op == "output")
        kept = {
            node
            for node in output.args[0]
            if isinstance(node, torch.fx.Node) and node.op != "placeholder"
        }
        total += sum(
            node.meta["val"].nbytes for node in kept if isinstance(node.meta["val"], torch.Tensor)
        )
    return total


def compiled(graphs: Traced) -> list[inductor.Compiled]:
    forward = [inductor.compiled(graph, False) for graph in graphs.forward]
    return forward + [inductor.compiled(graph, True) for graph in graphs.backward]


def summary(
    graphs: int, codes: list[inductor.Compiled], chip: machine.Chip, reads_code: bool
) -> dict:
    """Figures of compiled graphs. Seconds are of forward and backward together."""
    kernels = [each for code in codes for each in code.kernels]
    products = [each for code in codes for each in code.products]
    found = {
        "graphs": graphs,
        "kernels": len(kernels),
        "bytes": sum(each.bytes for each in kernels),
        "products": [each._asdict() for each in products],
        "other_calls": [name for code in codes for name in code.other_calls],
        "seconds": {
            "products": sum(roofline.of_product(each) for each in products),
            "attention": sum(
                roofline.of_attention(each) for code in codes for each in code.attentions
            ),
            "kernels": sum(roofline.of_generated(each, chip, reads_code) for each in kernels),
        },
    }
    if reads_code:
        found["largest"] = [
            largest(each, chip) for each in sorted(kernels, key=lambda each: -each.bytes)[:16]
        ]
    return found


def fp8_stores(codes: list[inductor.Compiled]) -> dict:
    """Look at the kernels with FP8 results: min.NaN and max.NaN, next to which Triton 3.8 may write
    garbage (triton-lang/triton#11111), and elements stored byte by byte."""
    kernels = {(each.name, each.source) for code in codes for each in code.kernels}
    kernels = [each for each in kernels if machine_code.has_fp8_results(each[1])]
    return {
        "kernels": len(kernels),
        "with_nan_instructions": sum(machine_code.nan_instructions(*each) > 0 for each in kernels),
        "bytewise": sum(machine_code.bytewise_stores(*each) for each in kernels),
    }


def largest(kernel: inductor.Kernel, chip: machine.Chip) -> dict:
    """Return one kernel's figures per element, from its machine code."""
    seconds, code = roofline.best(kernel, chip)
    an_element = {name: value / code.elements for name, value in code.work._asdict().items()}
    return {
        "kernel": kernel.name[:80],
        "bytes": kernel.bytes,
        "seconds": seconds,
        "registers": code.registers,
        "stack": code.stack,
        **an_element,
    }


def outside_of_layers(found: outside.Recorder, chip: machine.Chip) -> dict:
    """Return the figures of the eager code."""
    return {
        "kernels": len(found.kernels),
        "bytes": sum(size for _, size in found.kernels),
        "products": [each._asdict() for each in found.products],
        "seconds": {
            "products": sum(roofline.of_product(each) for each in found.products),
            "kernels": sum(roofline.of_bytes(size, chip) for _, size in found.kernels),
        },
    }


def main() -> None:
    arguments = options(
        __doc__,
        backend="native:dynamic",
        shape="8b-4layers",
        tokens=8192,
        chip=tuple(machine.CHIPS),
        no_machine_code=False,
        layer=False,
    )
    torch.set_num_threads(1)
    chip = machine.CHIPS[arguments.chip]
    machine.pretend(chip)
    shape, tokens = arguments.shape, arguments.tokens
    seen = traces(arguments.backend, shape, tokens, with_block=not arguments.layer)
    codes = compiled(seen.layer)
    layer = summary(len(seen.layer.forward), codes, chip, not arguments.no_machine_code)
    if arguments.layer:
        print(
            json.dumps(
                {
                    "backend": arguments.backend,
                    "torch": torch.__version__,
                    "layer": layer,
                    "fp8_stores": fp8_stores(codes),
                }
            )
        )
        return
    block = summary(len(seen.block.forward), compiled(seen.block), chip, False)
    around = outside.recorded(lambda: build(shape, tokens, "meta"), arguments.backend, tokens)
    found = {
        "backend": arguments.backend,
        "parameters": seen.parameters,
        "scaled": seen.scaled,
        "stored": seen.stored,
        "layer": layer,
        "mlp": block,
        "outside": outside_of_layers(around, chip),
        "saved_bytes_of_a_layer": saved_bytes(seen.layer.forward),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
