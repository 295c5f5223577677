"""`BlockCodes`: codes of an FP8 checkpoint in a Parameter, read as values and never changed by
chance."""

from __future__ import annotations

import copy
import io

import pytest
import reference
import torch
from torch import nn

from fp8_backends.errors import FP8BackendError
from fp8_backends.tensors.block_codes import BlockCodes


def made(rows: int = 200, columns: int = 300, dtype: torch.dtype = torch.float32) -> BlockCodes:
    """Return random codes with scales other than powers of two."""
    generator = torch.Generator().manual_seed(0)
    codes = (
        (torch.randn(rows, columns, generator=generator) * 100)
        .clamp(-448, 448)
        .to(torch.float8_e4m3fn)
    )
    scales = torch.rand(-(-rows // 128), -(-columns // 128), generator=generator) * 1e-3 + 1e-4
    return BlockCodes((codes, scales), dtype)


def same(a: BlockCodes, b: BlockCodes) -> bool:
    assert isinstance(a, BlockCodes) and isinstance(b, BlockCodes)
    return torch.equal(a.codes.view(torch.uint8), b.codes.view(torch.uint8)) and torch.equal(
        a.scale_inv, b.scale_inv
    )


def test_values_match_reference_in_every_function():
    tensor = made()
    values = reference.dequantize_blocks(tensor.codes, tensor.scale_inv, 128, 128)
    assert torch.equal(tensor.exact(), values) and torch.equal(tensor + 0, values)
    x = torch.randn(4, 300)
    assert torch.equal(nn.functional.linear(x, tensor), nn.functional.linear(x, values))
    assert (
        torch.equal(tensor.t().contiguous(), values.t().contiguous())
        and tensor.sum() == values.sum()
    )
    assert made(dtype=torch.bfloat16).exact().dtype == torch.bfloat16


def test_copies_of_every_kind_keep_codes_bitwise():
    parameter = nn.Parameter(made(), requires_grad=False)
    module = nn.Linear(300, 200)
    module.weight = parameter
    copies = [
        copy.deepcopy(parameter),
        saved_and_loaded(parameter),
        parameter.detach(),
        parameter.clone(),
    ]
    assert all(same(each, parameter) for each in (*copies, module.to(torch.bfloat16).weight))
    assert module.weight.dtype == torch.bfloat16 and isinstance(copies[1], nn.Parameter)
    assert not copies[1].requires_grad and "one scale for 128 x 128" in repr(parameter)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_values_become_the_same_codes(dtype):
    tensor, target = made(dtype=dtype), made(dtype=dtype)
    target.codes.zero_()
    target.copy_(tensor.exact())
    assert same(target, tensor)


def test_a_block_with_larger_values_gets_its_own_scale():
    target = made()
    values = target.exact()
    values[:128, :128] *= 1000
    scales = target.scale_inv.clone()
    target.copy_(values)
    assert (target.exact() - values).abs().max() <= values.abs().max() / 16
    assert target.scale_inv[0, 0] > scales[0, 0] and torch.equal(target.scale_inv[1], scales[1])


VIEWS = {
    "itself": lambda w: w,
    "detach": lambda w: w.detach(),
    "data": lambda w: w.data,
    "select": lambda w: w[0],
    "slice": lambda w: w[1:3],
    "a slice of a slice": lambda w: w[1:3][:, 5:],
    "t": lambda w: w.t(),
    "view": lambda w: w.view(-1),
    "view of bytes": lambda w: w.view(torch.int32),
    "reshape": lambda w: w.reshape(2, -1),
    "unbind": lambda w: w.unbind()[1],
    "split": lambda w: w.split(100)[1],
    "unsafe_chunk": lambda w: torch.unsafe_chunk(w, 2)[0],
    "as_strided": lambda w: w.as_strided((3, 2), (300, 1)),
    "expand": lambda w: w.expand(1, 200, 300),
    "diagonal": lambda w: w.diagonal(),
    "contiguous": lambda w: w.contiguous(),
    "to": lambda w: w.to(torch.float32),
    "as_subclass": lambda w: w.as_subclass(torch.Tensor),
    "detached view": lambda w: w.t().detach(),
}
WRITES = {
    "zero_": lambda v: v.zero_(),
    "mul_": lambda v: v.mul_(2),
    "setitem": lambda v: v.__setitem__(0, 1),
    "out": lambda v: torch.add(v, 1, out=v),
    "foreach": lambda v: torch._foreach_mul_([torch.ones(3), v], 2),
    "shape": lambda v: v.unsqueeze_(0),
    "init": lambda v: nn.init.ones_(v),
    "another's data": lambda v: setattr(v, "data", torch.ones(v.shape)),
}


@pytest.mark.parametrize("view", VIEWS)
def test_writes_through_views_are_refused(view):
    tensor = nn.Parameter(made(), requires_grad=False)
    for write in WRITES.values():
        with pytest.raises(
            FP8BackendError, match=r"frozen codes of a checkpoint in place.*restore\(model\)"
        ):
            write(VIEWS[view](tensor))
        assert same(tensor, made())


@pytest.mark.parametrize("view", VIEWS)
def test_views_read_plain_values_and_copies_are_plain(view):
    tensor = nn.Parameter(made(), requires_grad=False)
    seen, plain = VIEWS[view](tensor), VIEWS[view](tensor.exact())
    assert (
        torch.equal(seen, plain)
        and seen.stride() == plain.stride()
        and seen.tolist() == plain.tolist()
    )
    copied = seen + 0
    assert type(copied) is torch.Tensor and torch.equal(copied.zero_(), torch.zeros_like(plain))
    if isinstance(seen, BlockCodes):
        seen.data = seen.data  # changes nothing, as requested
    else:
        for copied in (copy.deepcopy(seen), seen.clone(), saved_and_loaded(seen)):
            assert type(copied) is torch.Tensor and torch.equal(copied, plain)


def saved_and_loaded(tensor: torch.Tensor) -> torch.Tensor:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def test_gradients_flow_through_views_eager_and_compiled():
    def loss(x, w):
        return (torch.nn.functional.linear(x, w) @ w[:, :5] @ w.t()[:5]).square().sum()

    for function in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        x = torch.randn(4, 300, generator=torch.Generator().manual_seed(1), requires_grad=True)
        gradients = [torch.autograd.grad(function(x, w), x)[0] for w in (made(), made().exact())]
        torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


def test_raw_memory_access_gets_read_only_copy_or_error():
    tensor = made()
    for seen in (tensor, tensor[1:3]):
        assert torch.equal(torch.from_numpy(seen.numpy().copy()), seen.values())
        with pytest.raises(ValueError, match="read-only"):
            seen.numpy()[0, 0] = 1.0
        with pytest.raises(
            FP8BackendError, match=r"holds no values that another library could share.*values\(\)"
        ):
            torch.from_dlpack(seen)
        assert seen.share_memory_() is seen and seen.is_shared()
    assert same(tensor, made())


def test_writing_collective_is_refused(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1
    )
    try:
        for seen in (made(), made()[1:3]):
            with pytest.raises(FP8BackendError, match="frozen codes"):
                torch.distributed.broadcast(seen, 0)
        gathered = [torch.empty(200, 300)]
        torch.distributed.all_gather(gathered, made())
        assert torch.equal(gathered[0], made().exact())
    finally:
        torch.distributed.destroy_process_group()
