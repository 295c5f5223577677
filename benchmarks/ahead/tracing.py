"""Trace forward and backward of a module on an absent GPU, as graphs of PyTorch's operators.

Dynamo traces with fake GPU tensors, so device checks take the GPU's branch. PyTorch's autograd
cannot run on these: Dynamo's graph passes AOTAutograd on fake CPU tensors, and the result moves
back to the GPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

PRODUCT = re.compile(r"^_?(scaled_)?(grouped_)?(mm|addmm|bmm|baddbmm)(_v2)?$")
VIEWS = frozenset(
    "view t transpose permute reshape unsqueeze select slice detach alias expand _unsafe_view "
    "empty empty_like new_empty empty_strided unbind split narrow as_strided squeeze "
    "_reshape_alias view_as new_empty_strided split_with_sizes is_same_size lift_fresh".split()
)
"""Operators without a launch."""
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Graph(NamedTuple):
    """List ATen operators with their inputs."""

    module: fx.GraphModule
    inputs: list[Any]


class Traced(NamedTuple):
    forward: list[Graph]
    """More than one after a graph break of Dynamo."""
    backward: list[Graph]


class _Piece(NamedTuple):
    """Hold Dynamo's graph between two breaks."""

    module: fx.GraphModule
    inputs: list[Any]
    autocast: torch.dtype | None


def traced(
    function: Callable, *arguments, decompositions: dict | None = None, **keywords
) -> Traced:
    """Call inside `FakeTensorMode`, with fake GPU tensors; the current autocast applies. Without
    decompositions the graphs have the operators that eager PyTorch would call."""
    pieces: list[_Piece] = []

    def keep(module: fx.GraphModule, inputs: list) -> Callable:
        enabled = torch.is_autocast_enabled("cuda")
        pieces.append(_Piece(module, inputs, torch.get_autocast_dtype("cuda") if enabled else None))
        return module.forward

    torch._dynamo.reset()
    torch.compile(function, backend=keep)(*arguments, **keywords)
    found = Traced([], [])
    with _no_fake_mode():
        for piece in pieces:
            for graphs, more in zip(found, _differentiated(piece, decompositions), strict=True):
                graphs += more
    return found


def _no_fake_mode():
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


class _Enough(Exception):
    pass


def _differentiated(piece: _Piece, decompositions: dict | None) -> Traced:
    import torch._functorch.config as functorch
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
    from torch._inductor.compile_fx import _recursive_joint_graph_passes

    found = Traced([], [])

    def kept_in(graphs: list[Graph]) -> Callable:
        def compiler(module: fx.GraphModule, inputs) -> Callable:
            graphs.append(Graph(module, list(inputs)))

            def never(*_):
                raise _Enough

            never._boxed_call = True
            return never

        return compiler

    def partition(joint: fx.GraphModule, inputs, **more):
        more.pop("static_lifetime_input_indices", None)
        if not decompositions:
            return default_partition(joint, inputs, **more)
        joint = _recursive_joint_graph_passes(joint, skip_invoke_subgraph=True, input_device=CPU)
        return min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **more)

    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        inputs = [_on(CPU, each) for each in piece.inputs]
    for module in piece.module.modules():
        if isinstance(module, fx.GraphModule):
            _move(module, CPU)
    autocast = torch.autocast("cpu", piece.autocast, enabled=piece.autocast is not None)
    context = tracing(TracingContext(fake))  # scaled tensors show storages to compilers only
    with autocast, context, functorch.patch(force_non_lazy_backward_lowering=True):
        aot_module_simplified(
            piece.module,
            inputs,
            fw_compiler=kept_in(found.forward),
            bw_compiler=kept_in(found.backward),
            partition_fn=partition,
            decompositions=decompositions or {},
            keep_inference_input_mutations=True,
        )
    return found


def on_gpu(graph: Graph) -> tuple[FakeTensorMode, list[Any]]:
    """Bring a graph to the GPU: devices, and the fake results in its metadata. Returns the mode and
    inputs of it."""
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    _move(graph.module, GPU)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with _no_fake_mode(), fake:
        inputs = [_on(GPU, each) for each in graph.inputs]
        for node in graph.module.graph.nodes:
            node.meta.pop("val", None)
        FakeTensorProp(graph.module, mode=fake).propagate_dont_convert_inputs(*inputs)
    return fake, inputs


def _on(device: torch.device, value: Any) -> Any:
    """Return a fake tensor of this device for a tensor; anything else unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    if is_traceable_wrapper_subclass(value):
        names, context = value.__tensor_flatten__()
        parts = {name: _on(device, getattr(value, name)) for name in names}
        made = type(value).__tensor_unflatten__(parts, context, value.size(), value.stride())
    else:
        made = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)
    if isinstance(value, nn.Parameter):
        return nn.Parameter(made, value.requires_grad)
    return made.requires_grad_(value.requires_grad and value.is_leaf)


def _move(module: fx.GraphModule, device: torch.device) -> None:
    """Replace every device in a graph by this one."""

    def moved(value: Any) -> Any:
        if isinstance(value, torch.device):
            return device
        return device.type if value in ("cpu", "cuda") else value

    for node in module.graph.nodes:
        if node.op in ("call_function", "call_method"):
            node.args = fx.node.map_aggregate(node.args, moved)
            node.kwargs = fx.node.map_aggregate(node.kwargs, moved)
    module.recompile()
