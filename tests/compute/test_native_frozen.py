"""Freeze weights as E4M3 codes in the model's own Parameters: `fp8_params` of the native
compute."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import fp8_backends
from fp8_backends import FP8BackendError, NativeRecipeKwargs, RecipeError, prepare, resolve
from fp8_backends.convert import conversion
from fp8_backends.tensors.scaled_tensor import ScaledTensor, quantize

SCALINGS = ("dynamic", "delayed", "rowwise", "blockwise", "mxfp8", "window")
BATCHES = [torch.randn(24, 32, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]


def is_frozen(weight: torch.Tensor) -> bool:
    return isinstance(weight, ScaledTensor)


class Adapted(nn.Module):
    """Put a trainable layer in front of a frozen base."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.adapter = nn.Linear(32, 32)
        self.base = (
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
            .to(dtype)
            .requires_grad_(False)
        )

    def forward(self, x):
        return self.base(self.adapter(x).to(self.base[0].bias.dtype)).float()


def prepared(model=None, **fields):
    model = Adapted() if model is None else model
    optimizer = torch.optim.AdamW(model.adapter.parameters(), lr=1e-2)
    return prepare(model, optimizer, NativeRecipeKwargs(**({"exclude": ["adapter"]} | fields)))


def weights(model) -> list[torch.Tensor]:
    return [model.base[0].weight, model.base[2].weight]


def losses(model, optimizer, batches=BATCHES) -> list[float]:
    found = []
    for x in batches:
        with torch.autocast("cpu", torch.bfloat16):
            loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def rounded() -> Adapted:
    """Plain weights with the values of E4M3."""
    model = Adapted()
    for weight in weights(model):
        weight.copy_(quantize(weight, torch.float8_e4m3fn, weight.dtype).dequantize())
    return model


@pytest.mark.parametrize("scaling", SCALINGS)
def test_products_match_rounded_values(scaling):
    """Losses are close to plain weights with the same values: other scales cast these, so some
    codes differ by half a step of E4M3 (1/16 at most)."""
    model, optimizer = prepared(scaling=scaling, fp8_params=True)
    assert all(map(is_frozen, weights(model)))
    found = losses(model, optimizer)
    wanted = losses(*prepared(rounded(), scaling=scaling))
    if scaling == "window":  # its scale of a weight is the power of two of the amax: the very codes
        assert found == wanted
    assert found == pytest.approx(wanted, rel=0.02) and found[-1] < found[0]
    counts = fp8_backends.audit(model).products.values()
    assert all((c["fprop"], c["dgrad"], c["wgrad"]) == (4, 4, 0) for c in counts)


def test_frozen_parameters_stay_and_take_one_byte():
    model = Adapted()
    before, values = list(model.parameters()), copy.deepcopy(model.state_dict())
    _, optimizer = prepared(model, fp8_params=True)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert all(
        isinstance(weight, nn.Parameter) and not weight.requires_grad for weight in weights(model)
    )
    losses(model, optimizer, BATCHES[:1])
    audit = fp8_backends.audit(model, optimizer)
    assert audit.bytes_per_element["weight"] == 1 + 4 / 2048  # codes, and a scale in FP32
    assert audit.dtypes["weight"] == "float8_e4m3fn"
    own = 2 * (2048 + 4) + 4 * (1024 + 32 + 64 + 32)
    # and no copy from forward to backward
    assert audit.bytes_per_parameter["weight"] == pytest.approx(
        own / sum(p.numel() for p in model.parameters())
    )
    frozen = values["base.0.weight"]
    # steps of E4M3, and of its smallest numbers
    half_a_step = frozen.abs() * 2**-4 + frozen.abs().max() / 224 * 2**-10
    assert ((model.base[0].weight.dequantize() - frozen).abs() <= half_a_step).all()
    assert "w:e4m3 stored" in repr(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpoints_are_plain_and_load_bitwise(dtype):
    model, _ = prepared(Adapted(dtype), fp8_params=True)
    saved = model.state_dict()
    assert {type(tensor) for tensor in saved.values()} == {torch.Tensor} and saved[
        "base.0.weight"
    ].dtype == dtype
    Adapted(dtype).load_state_dict(saved, strict=True)
    codes = [(weight.codes.clone(), weight.scale_inv.clone()) for weight in weights(model)]
    values = [weight.dequantize(torch.float32) for weight in weights(model)]
    for assign in (False, True):
        model.load_state_dict({name: 10 * tensor for name, tensor in saved.items()}, assign=assign)
        assert all(map(is_frozen, weights(model)))
        assert not any(
            map(
                torch.equal, values, (weight.dequantize(torch.float32) for weight in weights(model))
            )
        )
        model.load_state_dict(saved, assign=assign)
        assert all(map(is_frozen, weights(model))) and all(
            weight.dtype == dtype for weight in weights(model)
        )
        assert all(
            map(
                torch.equal, values, (weight.dequantize(torch.float32) for weight in weights(model))
            )
        )
    assert all(code.dtype == torch.float8_e4m3fn for code, _ in codes)


def test_evaluation_and_restore_use_code_values():
    model, _ = prepared(fp8_params=True)
    plain = rounded()
    assert torch.equal(model.eval()(BATCHES[0]), plain.eval()(BATCHES[0]))
    before = weights(model)
    conversion.restore(model)
    assert all(a is b for a, b in zip(before, weights(model), strict=True))
    assert all(type(weight) is nn.Parameter for weight in before)
    assert torch.equal(model(BATCHES[0]), plain(BATCHES[0]))


def test_trainable_weight_is_refused_without_changing_model():
    model = Adapted()
    with pytest.raises(RecipeError, match=r"32 -> 32 trains.*use level O3.*exclude"):
        prepared(model, fp8_params=True, exclude=["2"])
    assert type(model.base[0]) is nn.Linear and type(model.base[0].weight) is nn.Parameter
    frozen, optimizer = prepared(fp8_params=True)
    frozen.base[2].weight.requires_grad_(True)
    with pytest.raises(RecipeError, match="64 -> 32 trains"):
        losses(frozen, optimizer)


def test_unsupported_fp8_weights_are_refused_by_name():
    with torch.device("meta"):
        on_meta = Adapted()
    with pytest.raises(RecipeError, match="meta device"):
        prepared(on_meta, fp8_params=True)
    tied = Adapted()
    tied.embedding = nn.Embedding(64, 32)
    tied.embedding.weight = tied.base[0].weight
    with pytest.raises(FP8BackendError, match="base.0 is that of embedding.*exclude"):
        prepared(tied, fp8_params=True, include=["base.0"], exclude=["adapter"])
    held, graphs = Adapted(), []
    graphs.append((held(BATCHES[0])).sum())  # a graph with saved weights
    with pytest.raises(FP8BackendError, match="base.0.weight: its storage cannot be swapped"):
        prepared(held, fp8_params=True)
    assert type(held.base[0].weight) is nn.Parameter


def test_fp8_weights_are_off_by_default_and_at_levels():
    assert resolve("native").fp8_params is False and resolve("native") == resolve(
        {"backend": "native", "fp8_params": "no"}
    )
    assert resolve({"backend": "native:rowwise", "fp8_params": "true"}) != resolve("native:rowwise")
    with pytest.raises(RecipeError, match="only with weights that no level stores"):
        resolve({"backend": "msamp:O3", "fp8_params": True})
    model, _ = prepared()
    assert not any(map(is_frozen, weights(model)))


def test_inplace_update_of_frozen_weight_is_held_in_fp32():
    model, _ = prepared(fp8_params=True)
    weight, before = model.base[0].weight, model.base[0].weight.exact()
    weight.data += torch.full((64, 32), 1e-4)
    torch.testing.assert_close(
        model.state_dict()["base.0.weight"], before + 1e-4, rtol=1e-6, atol=0
    )
    assert torch.equal(
        weight.dequantize(), quantize(weight.exact(), torch.float8_e4m3fn).dequantize()
    )


FROZEN_BY = pytest.mark.parametrize("frozen_by", ["fp8_params", "msamp:O2", "msamp:O3", "msamp:O4"])


def frozen(frozen_by: str) -> Adapted:
    """Return a model with its base in E4M3, by the field or by a level."""
    if frozen_by == "fp8_params":
        return prepared(fp8_params=True)[0]
    model = Adapted()
    recipe = fp8_backends.FP8RecipeKwargs(backend=frozen_by, exclude=["adapter"])
    prepare(model, torch.optim.AdamW(model.adapter.parameters()), recipe)
    return model


WRITES = {
    "data": lambda weight, values: setattr(weight, "data", values),
    "copy": torch.no_grad()(lambda weight, values: weight.copy_(values)),
    "copy to data": lambda weight, values: weight.data.copy_(values),
    "set": torch.no_grad()(lambda weight, values: weight.set_(values)),
}
CARRIERS = {
    "itself": lambda model: model,
    "deep copy": copy.deepcopy,
    "pickled": lambda model: pickle.loads(pickle.dumps(model)),
    "cast": lambda model: model.double().float(),
}


@pytest.mark.parametrize("carrier", CARRIERS)
@FROZEN_BY
def test_written_values_of_a_frozen_weight_stay_exact(frozen_by, carrier):
    model = CARRIERS[carrier](frozen(frozen_by))
    for write in WRITES.values():
        values = torch.randn(64, 32)
        write(model.base[0].weight, values)
        assert torch.equal(model.state_dict()["base.0.weight"], values)
        assert is_frozen(model.base[0].weight)
    conversion.restore(model)
    assert torch.equal(model.base[0].weight, values)


@pytest.mark.parametrize("assign", [False, True])
@FROZEN_BY
def test_a_loaded_frozen_weight_takes_more_memory_only_for_new_values(frozen_by, assign):
    model = frozen(frozen_by)
    saved, size = model.state_dict(), len(pickle.dumps(model.base[0].weight))
    model.base[0].weight.data *= 1.1
    merged = {name: value.clone() for name, value in model.state_dict().items()}
    assert len(pickle.dumps(model.base[0].weight)) > size + 4 * 2048
    model.load_state_dict(saved, assign=assign)
    assert len(pickle.dumps(model.base[0].weight)) < size + 1024
    model.load_state_dict(merged, assign=assign)
    assert torch.equal(model.state_dict()["base.0.weight"], merged["base.0.weight"])


def test_moves_and_casts_keep_fp8():
    model, optimizer = prepared(fp8_params=True)
    model.to(torch.bfloat16)
    assert all(map(is_frozen, weights(model))) and all(
        weight.dtype == torch.bfloat16 for weight in weights(model)
    )
    assert all(weight.codes.dtype == torch.float8_e4m3fn for weight in weights(model))
    with torch.autocast("cpu", torch.bfloat16):
        model(BATCHES[0].bfloat16()).sum().backward()
    assert model.adapter.weight.grad is not None and model.base[0].weight.grad is None


def test_weights_sharded_before_they_are_frozen_are_refused(tmp_path):
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        sharded = fully_shard(Adapted())
        with pytest.raises(
            RecipeError, match=r"does not go with these sharded weights.*before fully_shard"
        ):
            prepared(sharded, fp8_params=True)
    finally:
        dist.destroy_process_group()
