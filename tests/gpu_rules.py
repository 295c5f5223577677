"""Hold a training step that runs on the CPU to a GPU's rules for FP8 products."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fp8_backends.compute import products


class GPURules(TorchDispatchMode):
    """Repeats every `_scaled_mm` of a step on fake CUDA tensors of the same dtypes, sizes and strides.

    Fake CUDA tensors run torch's own checks for a GPU (layouts, multiples of 16, scales). Autograd itself cannot run
    on fake CUDA tensors in a CPU build, so the step is real and its products are replayed. What the fake kernel does
    not check, E5M2 by E5M2 and a rowwise output that is not bf16, is asserted here.
    """

    def __init__(self, monkeypatch):
        super().__init__()
        monkeypatch.setattr(products, "engine_for", lambda device, out_dtype: products.SCALED_MM)
        self.products = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._scaled_mm.default:
            self._replay(func, args, kwargs)
        return func(*args, **kwargs)

    def _replay(self, func, args, kwargs):
        def as_cuda(value):
            if not isinstance(value, torch.Tensor):
                return value
            return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="cuda")

        with FakeTensorMode():
            out = func(*map(as_cuda, args), **{key: as_cuda(value) for key, value in kwargs.items()})
        a, b, scale_a = args[0], args[1], args[2]
        assert not a.dtype == b.dtype == torch.float8_e5m2
        assert scale_a.dim() == 0 or out.dtype == torch.bfloat16
        self.products.append((tuple(a.shape), tuple(b.shape)))
