"""`BlockCodes`: codes of an FP8 checkpoint in a Parameter, read as values and never changed by chance."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from fp8_backends.errors import FP8BackendError
from fp8_backends.numerics.block_codes import BlockCodes
from fp8_backends.numerics.kernels import reference


def made(rows: int = 200, columns: int = 300, dtype: torch.dtype = torch.float32) -> BlockCodes:
    """Random codes; scales that are no powers of two."""
    generator = torch.Generator().manual_seed(0)
    codes = (torch.randn(rows, columns, generator=generator) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-rows // 128), -(-columns // 128), generator=generator) * 1e-3 + 1e-4
    return BlockCodes(codes, scales, dtype)


def same(a: BlockCodes, b: BlockCodes) -> bool:
    assert isinstance(a, BlockCodes) and isinstance(b, BlockCodes)
    return torch.equal(a._data.view(torch.uint8), b._data.view(torch.uint8)) and torch.equal(a._scale_inv, b._scale_inv)


def test_values_are_those_of_the_reference_and_every_function_reads_them():
    tensor = made()
    values = reference.dequantize_blocks(tensor._data, tensor._scale_inv, 128, 128)
    assert torch.equal(tensor.exact(), values) and torch.equal(tensor + 0, values)
    x = torch.randn(4, 300)
    assert torch.equal(nn.functional.linear(x, tensor), nn.functional.linear(x, values))
    assert torch.equal(tensor.t().contiguous(), values.t().contiguous()) and tensor.sum() == values.sum()
    assert made(dtype=torch.bfloat16).exact().dtype == torch.bfloat16


def test_copies_of_every_kind_have_the_codes_to_the_bit():
    parameter = nn.Parameter(made(), requires_grad=False)
    buffer = io.BytesIO()
    torch.save(parameter, buffer)
    buffer.seek(0)
    module = nn.Linear(300, 200)
    module.weight = parameter
    copies = [copy.deepcopy(parameter), torch.load(buffer, weights_only=True), parameter.detach(), parameter.clone()]
    assert all(same(each, parameter) for each in (*copies, module.to(torch.bfloat16).weight))
    assert module.weight.dtype == torch.bfloat16 and isinstance(copies[1], nn.Parameter)
    assert not copies[1].requires_grad and "one scale for 128 x 128" in repr(parameter)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_that_were_saved_become_the_same_codes(dtype):
    tensor, target = made(dtype=dtype), made(dtype=dtype)
    target._data.zero_()
    target.copy_(tensor.exact())
    assert same(target, tensor)


def test_a_block_with_larger_values_gets_its_own_scale():
    target = made()
    values = target.exact()
    values[:128, :128] *= 1000
    scales = target._scale_inv.clone()
    target.copy_(values)
    assert (target.exact() - values).abs().max() <= values.abs().max() / 16
    assert target._scale_inv[0, 0] > scales[0, 0] and torch.equal(target._scale_inv[1], scales[1])


def test_nothing_else_writes_to_it():
    for write in (torch.Tensor.zero_, lambda tensor: tensor.add_(1), lambda tensor: torch.nn.init.ones_(tensor)):
        tensor = made()
        with pytest.raises(FP8BackendError, match=r"frozen codes of an FP8 checkpoint.*restore\(model\)"):
            write(tensor)
        assert same(tensor, made())
