"""Record the eager GPU code outside the decoder layers: embedding, last norm, head and loss,
forward and backward. It consists of PyTorch's operators, this package's kernels, and products.

The step runs on fake CPU tensors, without values but with autograd. Several operators that replace
one GPU kernel of the package count as that kernel.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator

import torch
from inductor import Product
from specs import convert
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from tracing import PRODUCT, VIEWS

Kernels = list[tuple[str, int]]
"""(name, bytes read and written) of launches."""


class Recorder(TorchDispatchMode):
    """Record launches while active."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Kernels = []
        self.products: list[Product] = []
        self._inside = 0

    def stand_in(self) -> None:
        """Record kernels and FP8 products of this package as such, from now on and in this whole
        process."""
        from eager_calls import everywhere

        from fp8_backends.compute import products
        from fp8_backends.kernels import backward as loss
        from fp8_backends.kernels import quantize as quantization

        costs = {
            quantization.quantize: of_cast,
            quantization.quantize_blocks: of_cast,
            loss.cross_entropy: of_loss,
        }
        for function, kernels_of in costs.items():
            everywhere(function, self._noted(function, kernels_of))
        everywhere(products.engine_for, lambda *_: products.SCALED_MM)
        everywhere(products.plain_product, lambda a, b: torch.mm(a, b.t()))
        everywhere(products.scaled_product, self._scaled_product)
        everywhere(
            products.block_scaled_product,
            lambda a, blocks, b, b_blocks, out_dtype: self._scaled_product(a, b, out_dtype),
        )

    def _noted(self, function: Callable, kernels_of: Callable[[dict], Kernels]) -> Callable:
        """Wrap a function: record its kernels, and nothing inside."""
        signature = inspect.signature(function)

        @functools.wraps(function)
        def wrapped(*args, **kwargs):
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            self.kernels += kernels_of(given.arguments)
            self._inside += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._inside -= 1

        return wrapped

    def _scaled_product(self, a, b, out_dtype, fast_accumulation=False) -> torch.Tensor:
        (m, k), n = a.codes.shape, b.codes.shape[0]
        dtype, out = (str(each).removeprefix("torch.") for each in (a.codes.dtype, out_dtype))
        rowwise = a.scale_inv.numel() == m
        self.products.append(Product("_scaled_mm", m, k, n, dtype, out, fast_accumulation, rowwise))
        return a.codes.new_empty(m, n, dtype=out_dtype)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not {torch.Tensor, FakeTensor, nn.Parameter}.issuperset(types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        if not self._inside and name not in VIEWS:
            self._note(name, list(_tensors((args, kwargs))), list(_tensors(out)))
        return out

    def _note(self, name: str, read: list[torch.Tensor], made: list[torch.Tensor]) -> None:
        if PRODUCT.match(name):
            a, b = read[-2:]
            dtype = str(a.dtype).removeprefix("torch.")
            self.products.append(Product(name, *a.shape, b.shape[1], dtype, dtype, False))
        elif made and not all(each.is_meta for each in made):
            read = made if name == "embedding" else read  # the returned rows
            self.kernels.append((name, sum(each.nbytes for each in (*read, *made))))


def _tensors(values: object) -> Iterator[torch.Tensor]:
    return (each for each in tree_iter(values) if isinstance(each, torch.Tensor))


def of_cast(given: dict) -> Kernels:
    """Count a cast of a matrix to FP8: a pass for the amax, unless it or a scale is known, and a
    pass that writes the codes."""
    x, read = given["x"], given["x"].nbytes
    cast = ("cast", read + x.numel() * (given["rows"] + given["columns"]))
    is_known = "blocks" in given or given["scale"] is not None or given["amax"] is not None
    return [cast] if is_known else [("amax", read), cast]


def of_loss(given: dict) -> Kernels:
    """The cross-entropy with its gradient: logits are read twice, and written once."""
    return [("cross_entropy", 3 * given["logits"].nbytes)]


def recorded(build: Callable[[], nn.Module], spec: str, tokens: int) -> Recorder:
    """Record one step of a meta-device language model without its layers, converted with it."""
    recorder = Recorder()
    recorder.stand_in()
    model = build().train()
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        model = model.to_empty(device="cpu")
        # else it keeps swapped weights alive
        fake.fake_tensor_converter.meta_converter.tensor_memo.clear()
        convert(model, spec)
        model._forward_pre_hooks.clear()  # once a step, for all layers together
        model.model.layers = nn.ModuleList()
        ids, no_mask = torch.zeros(1, tokens, dtype=torch.int64), torch.zeros(1, 1, 1, 1)
        with recorder:
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=ids, labels=ids, attention_mask=no_mask).loss
            loss.backward()
    return recorder
