"""Hold a training step on the CPU to a GPU's rules for FP8 products."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import ScalingType
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from fp8_backends.compute import products
from fp8_backends.compute.torchao.backend import cpu_multiplies_rowwise, mend_cpu_product
from fp8_backends.formats.scaling import e8m0_values

SCALED_MM, BLOCK_SCALED_MM = torch.ops.aten._scaled_mm.default, torch.ops.aten._scaled_mm_v2.default


class GPURules(TorchDispatchMode):
    """Repeat every `_scaled_mm` of a step on fake CUDA tensors of the same dtypes, sizes and
    strides.

    Fake CUDA tensors run torch's own checks for a GPU (layouts, multiples of 16, scales). Autograd
    itself cannot run on fake CUDA tensors in a CPU build, so the step is real and its products are
    replayed. We assert here what the fake kernel does not check: no E5M2 by E5M2, none in blocks of
    128, and a rowwise output in bf16. A CPU has no product with block scales, and before torch 2.13
    none with a scale a row: its result is made here, from the operands and the scales in the layout
    in which a GPU gets them.
    """

    def __init__(self, monkeypatch):
        super().__init__()
        mend_cpu_product()  # on some CPUs PyTorch's own takes a thousand times as long
        # without a driver: as for fake tensors
        on_a_gpu, device = products.engine_for, torch.device("cuda")
        monkeypatch.setattr(
            products, "engine_for", lambda _, *arguments: on_a_gpu(device, *arguments)
        )
        self.products = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (SCALED_MM, BLOCK_SCALED_MM):
            self._replay(func, args, kwargs)
        if func is BLOCK_SCALED_MM:
            return block_product(*args)
        if func is SCALED_MM and args[2].dim() and not cpu_multiplies_rowwise():
            return row_product(*args, **kwargs)
        return func(*args, **kwargs)

    def _replay(self, func, args, kwargs):
        def as_cuda(value):
            if not isinstance(value, torch.Tensor):
                return value
            return torch.empty_strided(
                value.size(), value.stride(), dtype=value.dtype, device="cuda"
            )

        with FakeTensorMode():
            out = func(*tree_map(as_cuda, args), **tree_map(as_cuda, kwargs))
        a, b, scale_a = args[0], args[1], args[2]
        # "TN": the one layout of FP8 products on Hopper, and of MXFP8 ones on compute capability 12
        # before cuBLAS 13.6
        assert a.stride() == (a.shape[1], 1) and b.stride() == (1, b.shape[0])
        assert not a.dtype == b.dtype == torch.float8_e5m2
        kind = ScalingType(args[3][0]) if func is BLOCK_SCALED_MM else None
        if kind not in (None, ScalingType.BlockWise1x32):
            assert a.dtype == b.dtype == torch.float8_e4m3fn  # as an H200 and torch 2.11 require
        assert func is BLOCK_SCALED_MM or scale_a.dim() == 0 or out.dtype == torch.bfloat16
        self.products.append((tuple(a.shape), tuple(b.shape)))


class Calls(TorchDispatchMode):
    """Collect the running operators."""

    def __enter__(self):
        self.seen = []
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Context:
    """Stand for the context of an autograd function; autograd has no fake CUDA tensors without a
    driver."""

    needs_input_grad = (True, True, True)

    def save_for_backward(self, *tensors) -> None:
        self.saved_tensors = tensors


def row_product(a, b, scale_a, scale_b, bias=None, scale_result=None, out_dtype=None, *_, **__):
    """`_scaled_mm` of FP8 a [m, k] and b [k, n] with scales [m, 1] and [1, n]."""
    return ((a.float() * scale_a) @ (b.float() * scale_b)).to(out_dtype)


def block_product(
    a, b, scale_a, kind_a, swizzle_a, scale_b, kind_b, swizzle_b, bias, out_dtype, *_
):
    """`_scaled_mm_v2` of FP8 a [m, k] and b [k, n] with block scales, by cuBLAS's description of
    their layouts."""
    assert len(swizzle_a) == len(swizzle_b)
    assert len(scale_a) == len(scale_b) == len(kind_a) == len(kind_b) == 1
    values = (
        block_values(a, scale_a[0], ScalingType(kind_a[0]))
        @ block_values(b.t(), scale_b[0], ScalingType(kind_b[0])).t()
    )
    return values.to(out_dtype)


def block_values(codes, scale_inv, kind):
    rows, k = codes.shape
    if kind == ScalingType.BlockWise1x32:
        scale_inv = e8m0_values(scale_inv.view(torch.uint8))
        r, c = torch.arange(rows)[:, None], torch.arange(k // 32)
        tile = (r // 128 * (-(-len(c) // 4) * 4) + c // 4 * 4) * 128
        scale_inv = scale_inv[tile + r % 32 * 16 + r % 128 // 32 * 4 + c % 4]
        return codes.float() * scale_inv.repeat_interleave(32, 1)
    if kind == ScalingType.BlockWise128x128:
        scale_inv = scale_inv.t()[: rows // 128, : k // 128].repeat_interleave(128, 0)
    return codes.float() * scale_inv.repeat_interleave(128, 1)
