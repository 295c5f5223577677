"""Trace one training step on fake tensors: the sizes and lifetimes of all tensors, without a
kernel's scratch."""

from __future__ import annotations

import contextlib
import inspect
import sys
import traceback
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from accelerate.utils import convert_outputs_to_fp32
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ... import preparation
from ...compute.counts import DGRAD, FPROP, WGRAD
from ...compute.products import exact_product
from ...convert import conversion
from ...convert.first_step import Work, WorkMeter
from ...convert.weight_products import FP8, find_weight_products
from ...errors import FP8BackendError
from ...evidence.auditing import residual_of, stored_bytes
from ...kernels import quantize as quantization
from ...kernels.adam import AdamSteps
from ...kernels.backward import cross_entropy
from ...kernels.triton_gate import PLAIN_TYPES
from ...preparation import optimizer_steps
from ...recipes.handlers import FP8RecipeKwargs, Recipe
from ...states.scaled_states import ScaledStates
from ...tensors.scaled_tensor import ScaledTensor
from ...tensors.sharded_tensor import inner_tensors
from ...torch_tools.modules import plain_name
from ...words import first_line
from .model_shapes import count_elements

PARTS = ("weights", "master", "gradients", "states", "buffers", "copies", "codes", "activations")
"""Uses of memory. `copies` of weights are autocast's, `codes` FP8; `activations`: all other tensors
of a step."""
WEIGHTS, MASTER, GRADIENTS, STATES, BUFFERS, COPIES, CODES, ACTIVATIONS = PARTS

FLOWS = ("attention", "attention_backward", "moved", "moved_outside", "calls")
"""Work of a step besides products with weights, of a sample: FLOPs of attention; bytes read and
written by other kernels, in and outside the blocks that repeat; and the number of these kernels, of
a batch."""

_KERNELS = frozenset(
    inspect.unwrap(function).__code__
    for function in (
        quantization.quantize, quantization.quantize_blocks, quantization.dequantize_blocks, exact_product,
        cross_entropy, AdamSteps.run, AdamSteps.amaxes, AdamSteps.write, AdamSteps.write_copies,
    )
)  # fmt: skip
"""Code of functions with one GPU kernel. Fake tensors run their reference, whose FP32 copies no
kernel makes."""

_PRODUCTS = frozenset(
    {"mm", "addmm", "_grouped_mm", "_scaled_mm", "convolution", "convolution_backward"}
)
"""Operators with weights, which the products of a trace count."""

MOST_ANSWERS = 20_000
"""Limit of numbers read from tensors in one trace: more is a loop that waits for a value."""

Bytes = dict[str, float]


class Storage(NamedTuple):
    reference: weakref.ref
    size: int
    part: str


class MemoryTracker(TorchDispatchMode):
    """Count live storages by part, and keep the highest moment of each region of the step.

    Fake tensors have no values: `item()` returns 1, or False for a boolean, since code asks for
    errors that way.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live: Bytes = dict.fromkeys(PARTS, 0)
        self.total = 0
        self.region = "preparation"
        self.peaks: dict[str, Bytes] = {}
        self.peak_totals: dict[str, int] = {}
        self.flows: dict[str, float] = defaultdict(float)
        """By names of FLOWS, of a batch."""
        self.weight_shapes: set[torch.Size] = set()
        self._storages: dict[int, Storage] = {}
        self._answers = 0

    def __enter__(self):
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> object:
            result = resize(storage, size)
            if (known := self._storages.get(storage._cdata)) is not None:
                self._change(storage._cdata, known._replace(size=storage.nbytes()))
            return result

        # no operator: FSDP2 allocates and frees gathered weights by it
        torch.UntypedStorage.resize_ = resize_
        return super().__enter__()

    def __exit__(self, *error) -> None:
        del torch.UntypedStorage.resize_  # its base class has it
        super().__exit__(*error)

    def enter(self, region: str) -> None:
        self.region = region
        self._note_peak()

    def assign(self, tensor: torch.Tensor, part: str) -> None:
        for inner in inner_tensors(tensor):
            key = inner.untyped_storage()._cdata
            storage = self._storages.get(key)
            if storage is None:
                self._add(inner, part)
            elif storage.part != part:
                self._change(key, storage._replace(part=part))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not set(PLAIN_TYPES).issuperset(types):
            return NotImplemented  # a wrapper subclass dispatches to its inner tensors first
        if func is torch.ops.aten._local_scalar_dense.default:
            self._answers += 1
            if self._answers > MOST_ANSWERS:
                raise FP8BackendError(
                    "the code of the model asks for values of tensors without end, and here are "
                    "none"
                )
            dtype = args[0].dtype
            return False if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        if func is torch.ops.aten._grouped_mm.default:
            # PyTorch multiplies fake tensors of experts only in bf16, real ones in every dtype
            out = func(args[0].bfloat16(), args[1].bfloat16(), *args[2:], **(kwargs or {})).to(
                args[0].dtype
            )
        else:
            out = func(*args, **(kwargs or {}))
        operands = [each for each in tree_iter((args, kwargs)) if isinstance(each, torch.Tensor)]
        storages = [self._storages.get(tensor.untyped_storage()._cdata) for tensor in operands]
        parts = {ACTIVATIONS if storage is None else storage.part for storage in storages}
        from_weights = parts <= {WEIGHTS, MASTER, BUFFERS, COPIES, CODES} and parts not in (
            set(),
            {BUFFERS},
        )
        part = ACTIVATIONS
        if not operands and isinstance(out, torch.Tensor) and out.dim() == 0:
            part = BUFFERS  # a number, such as a scale of 1: codes of weights stay theirs
        if not from_weights:
            self._note_flow(
                func,
                args,
                operands,
                [each for each in tree_iter(out) if isinstance(each, torch.Tensor)],
            )
        for tensor in tree_iter(out):
            has_memory = isinstance(tensor, torch.Tensor) and not tensor.is_meta
            if has_memory and tensor.untyped_storage()._cdata not in self._storages:
                self._add(tensor, _copies(tensor) if from_weights else part)
        if func._schema.name == "fsdp::split_with_sizes_copy":  # whole weights from FSDP2's message
            for tensor in kwargs["out"]:
                self.assign(tensor, _copies(tensor))
        return out

    def _note_flow(
        self, func: torch._ops.OpOverload, args: tuple, operands: list, results: list
    ) -> None:
        name = func._schema.name.removeprefix("aten::")
        if "dot_product" in name:
            goes_back = "backward" in name
            query, key = args[goes_back : goes_back + 2]
            causal = 0.5 if any(each is True for each in args) else 1
            flops = 4 * query.numel() * key.shape[-2] * causal
            self.flows["attention_backward" if goes_back else "attention"] += flops * (
                2.5 if goes_back else 1
            )
        elif name in ("bmm", "baddbmm"):
            self.flows["attention"] += 2 * results[0].numel() * args[-1].shape[-2]
        elif name not in _PRODUCTS and not any(
            each.shape in self.weight_shapes for each in results
        ):
            known = {each.untyped_storage()._cdata for each in operands}
            new = [each for each in results if each.untyped_storage()._cdata not in known]
            if operands and (new or func._schema.is_mutable):
                sizes = [
                    min(each.nbytes, each.untyped_storage().nbytes()) for each in (*operands, *new)
                ]
                self.flows["moved" if "block" in self.region else "moved_outside"] += sum(sizes)
                self.flows["calls"] += 1

    def _add(self, tensor: torch.Tensor, part: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = storage.nbytes()
        self._storages[key] = Storage(weakref.ref(storage, lambda _: self._drop(key)), size, part)
        self.live[part] += size
        self.total += size
        self._note_peak()

    def rename(self, part: str, other: str) -> None:
        """Assign all storages of a part to another."""
        for key, storage in self._storages.items():
            if storage.part == part:
                self._storages[key] = storage._replace(part=other)
        self.live[other] += self.live[part]
        self.live[part] = 0

    def _change(self, key: int, storage: Storage) -> None:
        before = self._storages[key]
        self._storages[key] = storage
        self.live[before.part] -= before.size
        self.live[storage.part] += storage.size
        self.total += storage.size - before.size
        self._note_peak()

    def _drop(self, key: int) -> None:
        self._note_peak()  # counts a kernel's result
        gone = self._storages.pop(key)
        self.live[gone.part] -= gone.size
        self.total -= gone.size

    def _note_peak(self) -> None:
        if self.total < self.peak_totals.get(self.region, 0):
            return
        # inside a kernel nothing counts: its result counts with the next tensor
        if all(frame.f_code not in _KERNELS for frame, _ in traceback.walk_stack(None)):
            self.peak_totals[self.region] = self.total
            self.peaks[self.region] = dict(self.live)


def _copies(tensor: torch.Tensor) -> str:
    return CODES if tensor.dtype.itemsize == 1 else COPIES


@dataclass
class StepTrace:
    """Bytes of one training step on one device that holds the whole model."""

    resting: Bytes
    sizes: dict[str, float]
    """Elements, bytes and FLOPs of the model: see `_sizes`."""
    saved: Bytes = field(default_factory=dict)
    """`copies`, `codes` and `activations` between forward and backward, and `gradients` after
    it."""
    peaks: dict[str, Bytes] = field(default_factory=dict)
    products: dict[tuple, float] = field(default_factory=dict)
    """Number of products by (kind, rows of a sample, in, out, is in FP8): kind is one of
    `counts.KINDS`."""

    def combined(self, combine: Callable[..., float], *others: StepTrace) -> StepTrace:
        """Return the trace of the numbers `combine(name, *numbers)`, one number of each trace."""

        def numbers(*groups: dict) -> dict:
            return {name: combine(name, *(group[name] for group in groups)) for name in groups[0]}

        traces = (self, *others)
        groups = {
            name: numbers(*(getattr(trace, name) for trace in traces))
            for name in ("resting", "sizes", "saved", "products")
        }
        peaks = {
            region: numbers(*(trace.peaks[region] for trace in traces)) for region in self.peaks
        }
        return StepTrace(**groups, peaks=peaks)


@dataclass(kw_only=True)
class StepSettings:
    recipe: Recipe | None
    """None: no FP8. TransformerEngine, which runs only on GPUs, is traced as its native
    equivalent."""
    autocast: torch.dtype | None = torch.bfloat16
    """Dtype of products outside FP8; None: that of the weights."""
    checkpointing: bool = False
    releases: Literal["all", "scaled", "none"] = "none"
    """Gradients to drop inside backward; under DDP only those of scaled weights."""
    accumulates: bool = False
    """Add to gradients of an earlier microbatch."""


def trace_step(
    make_model: Callable[[], nn.Module],
    make_batch: Callable[[], dict[str, torch.Tensor]],
    settings: StepSettings,
    find_stacks: Callable[[nn.Module], list[list[nn.Module]]] = lambda model: [],
) -> StepTrace:
    """Trace a training step of AdamW with its states in place. The model's forward returns a loss,
    alone or first.

    `find_stacks` lists the blocks that repeat in depth, for the regions of the trace. Raises
    `FP8BackendError` if the model's code depends on values, or its step fails.
    """
    with on_fake_tensors(make_model) as (model, tracker):
        return _Step(model, settings, tracker).trace(make_batch, find_stacks)


@contextlib.contextmanager
def on_fake_tensors(
    make_model: Callable[[], nn.Module],
) -> Iterator[tuple[nn.Module, MemoryTracker]]:
    """Run the body on fake tensors, with a model in training mode. Raises `FP8BackendError` as
    `trace_step`."""
    try:
        with (
            FakeTensorMode(allow_non_fake_inputs=True) as fake,
            torch.device("cpu"),
            MemoryTracker() as tracker,
        ):
            model = make_model().train()
            # its weak references prevent replacing a weight
            fake.fake_tensor_converter.tensor_memo.clear()
            with _attending_without_padding(model):
                yield model, tracker
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise FP8BackendError(
            "the memory of this model cannot be told without running it: its code asks for values "
            f"of tensors ({error.func if hasattr(error, 'func') else error}), as mixtures of "
            "experts do that loop over experts"
        ) from error
    except FP8BackendError:
        raise
    except Exception as error:  # the model's own code may raise anything
        raise FP8BackendError(
            f"a training step of this model fails: {type(error).__name__}: {first_line(error)}"
        ) from error


UNPADDED = "sdpa_without_padding"
"""Name of transformers' own `scaled_dot_product_attention`, with masks for batches without
padding."""


@contextlib.contextmanager
def _attending_without_padding(model: nn.Module) -> Iterator[None]:
    """Let causal language models of transformers mask a batch without padding, mostly with no mask:
    for fake tensors they always create one, of the square of the sequence, as they cannot see
    packed sequences in them."""
    changed = []
    if "transformers" in sys.modules:
        from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.masking_utils import sdpa_mask

        AttentionInterface.register(UNPADDED, sdpa_attention_forward)
        AttentionMaskInterface.register(
            UNPADDED, lambda **given: sdpa_mask(**given | {"allow_is_causal_skip": True})
        )
        models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
        causal = [each for each in models if type(each).__name__.endswith("ForCausalLM")]
        changed = [each for each in causal if each.config._attn_implementation == "sdpa"]
    for each in changed:
        each.set_attn_implementation(UNPADDED)
    try:
        yield
    finally:  # its configuration may be the caller's
        for each in changed:
            each.set_attn_implementation("sdpa")


def traced_recipe(model: nn.Module, recipe: Recipe) -> Recipe:
    """Return the recipe, for TransformerEngine its native equivalent. Raises `FP8BackendError`
    without FP8 layers."""
    expected = conversion.expected(model, recipe)
    if not expected.converted and recipe.on_unproven == "raise":
        reasons = "; ".join(dict.fromkeys(expected.high_precision.values()))
        raise FP8BackendError(
            f"no layer of this model can run in FP8: {reasons or 'it has no Linear'}"
        )
    if recipe.compute != "te":
        return recipe
    chosen = set(expected.converted)
    fields = recipe.given_settings | {
        "include": None,
        "exclude": None,
        "module_filter_func": lambda module, name: name in chosen,
        "layers": {
            name: str(word).replace("te:", "native:")
            for name, word in (recipe.layers or {}).items()
        }
        or None,
    }
    return FP8RecipeKwargs(backend=recipe.name.replace("te:", "native:", 1), **fields)


def enable_checkpointing(model: nn.Module) -> None:
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()


def run_in_autocast(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Run the forward as Accelerate does: in autocast, with outputs in FP32. None: change
    nothing."""
    if dtype is not None:
        forward = torch.autocast("cpu", dtype)(type(model).forward)
        model.forward = types.MethodType(convert_outputs_to_fp32(forward), model)


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    outputs = model(**batch)
    return outputs if isinstance(outputs, torch.Tensor) else outputs[0]


class _Step:
    def __init__(self, model: nn.Module, settings: StepSettings, tracker: MemoryTracker) -> None:
        self.model = model
        self.settings = settings
        self.tracker = tracker
        if settings.checkpointing:
            enable_checkpointing(model)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        if settings.recipe is not None:
            recipe = traced_recipe(model, settings.recipe)
            preparation.prepare_model(model, recipe)
            optimizer_steps.convert_optimizer(self.optimizer, recipe)
        run_in_autocast(model, settings.autocast)
        self.plain_gradients = 0
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in self.trained:
            parameter.register_post_accumulate_grad_hook(self._after_gradient)

    def _after_gradient(self, parameter: torch.Tensor) -> None:
        self.tracker.assign(parameter.grad, GRADIENTS)
        is_scaled = isinstance(parameter.grad, ScaledTensor)
        self.plain_gradients += 0 if is_scaled else stored_bytes(parameter.grad)
        if self.settings.releases == "all" or (is_scaled and self.settings.releases == "scaled"):
            parameter.grad = None

    def trace(self, make_batch: Callable, find_stacks: Callable) -> StepTrace:
        tracker = self.tracker
        create_states(tracker, self.model, self.optimizer)
        if self.settings.accumulates:
            loss_of(self.model, make_batch()).backward()
            self.plain_gradients = 0
        stacks = find_stacks(self.model)
        regions = Regions(tracker, stacks)
        tracker.peaks.clear()
        tracker.peak_totals.clear()
        trace = StepTrace(
            resting=dict(tracker.live), sizes=_sizes(self.model, self.optimizer, sum(stacks, []))
        )
        tracker.enter("forward")
        tracker.flows.clear()
        tracker.weight_shapes = {
            parameter.shape for parameter in self.model.parameters() if parameter.dim() > 1
        }
        meter = WorkMeter(self.model, find_weight_products(self.model))
        batch = make_batch()
        samples = len(next(iter(batch.values())))
        loss = loss_of(self.model, batch)
        del batch
        regions.goes_back = True
        tracker.enter("backward of the head")
        trace.saved = {
            part: tracker.live[part] - trace.resting[part] for part in (COPIES, CODES, ACTIVATIONS)
        }
        loss.backward()
        meter.detach()
        per_sample = {
            name: flow / (1 if name == "calls" else samples) for name, flow in tracker.flows.items()
        }
        trace.sizes |= dict.fromkeys(FLOWS, 0.0) | per_sample
        trace.products, flops = self._products(meter.work, samples, sum(stacks, []))
        trace.sizes |= {"flops": sum(flops.values()), "flops_fp8": flops[True]}
        del loss
        trace.saved[GRADIENTS] = tracker.live[GRADIENTS]
        trace.sizes["plain_gradients"] = self.plain_gradients
        tracker.enter("step")
        # the kernel of ScaledStates makes no copies, but its eager code would here
        if not isinstance(self.optimizer, ScaledStates):
            self.optimizer.step()
        trace.peaks = tracker.peaks
        return trace

    def _products(
        self, work: dict[str, Work], samples: int, blocks: list[nn.Module]
    ) -> tuple[dict[tuple, float], dict[bool, float]]:
        """Count the products of a step by kind and shape, recomputed ones twice; and the FLOPs of a
        sample in FP8 and in high precision, recomputed ones once."""
        roots = conversion.prepared_roots(self.model)
        prepared = roots[0].prepared if roots else None
        high = prepared.compute.high_precision_products(prepared.recipe) if prepared else ()
        if prepared:
            found = prepared.report.products
        else:
            found = [each.product for each in find_weight_products(self.model)]
        trains = {
            plain_name(name): p.requires_grad
            for name, p in self.model.named_parameters(remove_duplicate=False)
        }
        inside = {id(part) for block in blocks for part in block.modules()}
        again = {
            plain_name(name)
            for name, part in self.model.named_modules()
            if id(part) in inside or not blocks
        }
        counts: dict[tuple, float] = defaultdict(float)
        flops = {True: 0.0, False: 0.0}
        for product in found:
            seen = work.get(product.name)
            if seen is None or not seen.rows:
                continue
            number = seen.flops / (2 * seen.rows * product.in_features * product.out_features)
            weight = (
                product.name if product.name in trains else f"{product.name}.weight".lstrip(".")
            )
            kinds = {FPROP: 1 + (self.settings.checkpointing and product.name in again)}
            if seen.backward:
                kinds[DGRAD] = seen.input_gradient
                kinds[WGRAD] = trains.get(weight, True)
            for kind in filter(kinds.get, kinds):
                in_fp8 = product.state == FP8 and kind not in high
                key = (kind, seen.rows / samples, product.in_features, product.out_features, in_fp8)
                counts[key] += number * kinds[kind]
                flops[in_fp8] += seen.flops / samples
        return counts, flops


def create_states(
    tracker: MemoryTracker, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Create the optimizer's states before its first step."""
    assign_parts(tracker, model, optimizer)
    trained = [
        (group, p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad
    ]
    if isinstance(optimizer, ScaledStates):
        for group, parameter in trained:
            if optimizer.owns(parameter):
                optimizer.state_of(group, parameter)
    else:
        for _, parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    assign_parts(tracker, model, optimizer)


def assign_parts(
    tracker: MemoryTracker, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Assign all tensors between two steps to their parts: those of no other part are buffers."""
    for parameter in model.parameters():
        tracker.assign(parameter, WEIGHTS)
        for exact in (getattr(parameter, "master", None), residual_of(parameter)):
            if exact is not None:
                tracker.assign(exact, MASTER)
    for buffer in model.buffers():
        tracker.assign(buffer, BUFFERS)
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                tracker.assign(value, STATES)
    tracker.rename(ACTIVATIONS, BUFFERS)


class Regions:
    """Tell the tracker the region of the step. The outer blocks of a stack have their own regions:
    live bytes grow or fall evenly from block to block."""

    def __init__(self, tracker: MemoryTracker, stacks: list[list[nn.Module]]) -> None:
        self.tracker = tracker
        self.goes_back = False
        for number, blocks in enumerate(stacks):
            self._watch(blocks, "the" if number == len(stacks) - 1 else "the encoder's")

    def _watch(self, blocks: list[nn.Module], whose: str) -> None:
        last = len(blocks) - 1
        names = {1: "second", last - 1: "next to last", 0: "first", last: "last"}
        for number, block in enumerate(blocks):
            name = f"{whose} blocks between"
            if number in names:
                name = f"{whose} {names[number]} block"
            block.register_forward_pre_hook(lambda *_, name=name: self._enter(f"forward of {name}"))
            block.register_forward_hook(
                lambda _, args, output, name=name: self._enter_in_backward(
                    output, f"backward of {name}"
                )
            )
        blocks[0].register_forward_hook(
            lambda _, args, output: self._enter_in_backward(args, f"backward of {whose} embedding")
        )
        blocks[last].register_forward_hook(
            lambda *_: self._enter("loss" if whose == "the" else "forward")
        )

    def _enter(self, region: str) -> None:
        if not self.goes_back:  # else checkpointing recomputes the block
            self.tracker.enter(region)

    def _enter_in_backward(self, values: object, region: str) -> None:
        """Enter the region when backward reaches these tensors."""
        for tensor in tree_iter(values):
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(lambda _: self.tracker.enter(region))


def _sizes(
    model: nn.Module, optimizer: torch.optim.Optimizer, blocks: list[nn.Module]
) -> dict[str, float]:
    """Return the sizes for sharding and communication.

    In elements: `parameters`, `trained`, `scaled` (trained and stored in scaled precision),
    `largest_scaled`, `converted` (in FP8 products), `scaling_states` (reduced over ranks), `block`
    and `block_scaled` (of the largest block), `outside` (the blocks). In bytes: `scaled_states`
    (moments of scaled weights).
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    scaled = [p for p in trained if isinstance(p, ScaledTensor)]
    states = [
        value
        for p in scaled
        for value in optimizer.state[p].values()
        if isinstance(value, torch.Tensor)
    ]
    block = max(blocks, key=count_elements, default=model)
    sizes = {
        "parameters": count_elements(model),
        "trained": sum(p.numel() for p in trained),
        "scaled": sum(p.numel() for p in scaled),
        "largest_scaled": max((p.numel() for p in scaled), default=0),
        "scaled_states": sum(map(stored_bytes, states)),
        "converted": 0,
        "scaling_states": 0,
        "block": count_elements(block),
        "block_scaled": sum(p.numel() for p in block.parameters() if isinstance(p, ScaledTensor)),
        "outside": count_elements(model) - sum(map(count_elements, blocks)),
    }
    for _, root, prepared in conversion.prepared_roots(model):
        for layer in prepared.compute.converted_layers(root).values():
            sizes["converted"] += layer.weight.numel()
        sizes["scaling_states"] += sum(
            state.numel() for state in prepared.compute.scaling_buffers(root)
        )
    return sizes
