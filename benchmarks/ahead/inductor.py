"""Inductor's code for compute capability 9.0, of a graph and without a GPU: kernels, their bytes,
products."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch
from tracing import PRODUCT, Graph, on_gpu


class Kernel(NamedTuple):
    """Describe one launch of a Triton kernel made by Inductor."""

    name: str
    bytes: int
    """Read and written, each once, as Inductor counts them."""
    source: str


class Product(NamedTuple):
    """[m, k] x [k, n]."""

    operator: str
    m: int
    k: int
    n: int
    dtype: str
    """Dtype of the operands."""
    out_dtype: str
    fast_accumulation: bool
    rowwise: bool = False
    """Scaled by one factor for each row of the first operand."""


class Attention(NamedTuple):
    """Scaled dot-product attention, forward or backward."""

    operator: str
    batch: int
    heads: int
    queries: int
    keys: int
    width: int
    causal: bool


class Compiled(NamedTuple):
    """Hold the code of one graph."""

    code: str
    kernels: list[Kernel]
    products: list[Product]
    attentions: list[Attention]
    other_calls: list[str]
    """Operators left to PyTorch by Inductor, except products and attention."""


def compiled(graph: Graph, backward: bool) -> Compiled:
    """Inductor's own passes, scheduler and code generator, as `torch.compile` runs them for a
    GPU."""
    from torch._inductor.debug import DebugContext
    from torch._inductor.fx_passes.post_grad import post_grad_passes
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    fake, _ = on_gpu(graph)
    with V.set_fake_mode(fake), fake:
        post_grad_passes(graph.module, False)
    fake, inputs = on_gpu(graph)  # the passes made new nodes
    with V.set_fake_mode(fake), fake:
        lowering = GraphLowering(
            graph.module, example_inputs=inputs, shape_env=None, is_backward=backward, graph_id=0
        )
        with (
            V.set_graph_handler(lowering),
            V.set_extern_kernel_nodes([]),
            V.set_debug_handler(DebugContext()),
        ):
            lowering.run(*inputs)
            code = lowering.codegen()[0].value
            kernels = _kernels(code, lowering.scheduler.nodes)
    return Compiled(code, kernels, *matrix_work(graph.module), _other_calls(code))


def _kernels(code: str, nodes: list) -> list[Kernel]:
    """Return kernels in the order of their launches, the scheduler's order."""
    sources = dict(
        re.findall(r"async_compile\.triton\('(\w+)', '''\n(.*?)''', device_str", code, re.S)
    )
    launched = re.findall(r"^\s+(triton_\w+)\.run\(", code, re.M)
    mixed = [node for node in nodes if type(node).__name__ == "FusedMixOrderReductions"]
    parts = {name for node in mixed for name in node.get_buffer_names()}
    of_triton = [node for node in nodes if _is_launched(node, parts)]
    assert len(launched) == len(of_triton), f"{len(launched)} launches of {len(of_triton)} nodes"
    sizes = [node.get_read_write_buffers_sizes() for node in of_triton]
    return [Kernel(name, size, sources[name]) for name, size in zip(launched, sizes, strict=True)]


def _is_launched(node, parts: set[str]) -> bool:
    """Tell if this node of the scheduler is a Triton kernel. PyTorch sums the parts left by a
    kernel of two reductions."""
    if re.search("Extern|Nop", type(node).__name__):
        return False
    return not (node.is_reduction() and {each.name for each in node.read_writes.reads} <= parts)


_ATTENTION = re.compile("scaled_dot_product.*attention")


def _other_calls(code: str) -> list[str]:
    found = re.findall(r"(?:extern_kernels|torch\.ops\.\w+)\.(\w+)(?:\.\w+)?\(", code)
    return [name for name in found if not (PRODUCT.match(name) or _ATTENTION.search(name))]


def matrix_work(module: torch.fx.GraphModule) -> tuple[list[Product], list[Attention]]:
    """The products and attentions of a graph."""
    products, attentions = [], []
    for node in module.graph.nodes:
        name = node.target._schema.name.split("::")[1] if hasattr(node.target, "_schema") else ""
        if _ATTENTION.search(name):
            attentions.append(_attention(name, node))
        elif PRODUCT.match(name):
            products.append(_product(name, node))
    return products, attentions


def _tensors(node: torch.fx.Node) -> list[torch.Tensor]:
    return [each.meta["val"] for each in node.args if isinstance(each, torch.fx.Node)]


def _product(name: str, node: torch.fx.Node) -> Product:
    tensors = _tensors(node)
    a, b = tensors[1:3] if name.startswith(("addmm", "baddbmm")) else tensors[:2]
    batch = a.shape[0] if a.dim() == 3 else 1
    out = node.meta["val"]
    told, m = _told(node), batch * a.shape[-2]
    scale = told["scale_a"].meta["val"] if isinstance(told.get("scale_a"), torch.fx.Node) else None
    return Product(
        name,
        m,
        a.shape[-1],
        b.shape[-1],
        _short(a.dtype),
        _short(out.dtype),
        fast_accumulation=bool(told.get("use_fast_accum")),
        rowwise=scale is not None and scale.numel() == m,
    )


def _attention(name: str, node: torch.fx.Node) -> Attention:
    first = 1 if "backward" in name else 0  # after the gradient
    query, key = _tensors(node)[first : first + 2]
    batch, heads, queries, width = query.shape
    return Attention(
        name, batch, heads, queries, key.shape[2], width, bool(_told(node).get("is_causal"))
    )


def _told(node: torch.fx.Node) -> dict[str, Any]:
    """The arguments of an operator by name."""
    names = [each.name for each in node.target._schema.arguments]
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
