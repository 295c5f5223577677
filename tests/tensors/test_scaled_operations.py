"""Run PyTorch's whole operator list over weights in scaled precision and plain tensors of the same
values.

Each operation in place, each with `out=`, and each view, through each way to a weight's values,
stores the plain result or is refused by our error.
"""

from __future__ import annotations

import collections
import copy
import functools
import itertools
import warnings
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_iter

from fp8_backends.errors import FP8BackendError
from fp8_backends.tensors.scaled_tensor import ScaledTensor, quantize

# PyTorch's own tests forbid flags such as `torch.backends.mkldnn.enabled` in the process; other
# tests here set them
with getattr(torch.backends, "__allow_nonbracketed_mutation")():
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.opinfo import core

E4M3, FP16 = torch.float8_e4m3fn, torch.float16
SAMPLES = 3
"""Samples per operation, out of those in PyTorch's own tests."""
LEVELS = ("O2", "O3", "O4")
CHANGE_THE_SHAPE = {
    "as_strided_",
    "resize__",
    "resize_as__",
    "squeeze_",
    "t_",
    "transpose_",
    "unsqueeze_",
}
CHANGE_THE_SHAPE |= {"addbmm_", "nn.functional.dropout3d_"}  # with some of their samples


def weight_of(values: torch.Tensor, level: str = "O3") -> tuple[nn.Parameter, torch.Tensor]:
    """A weight as a level stores it, and its exact values as a plain tensor of the same dtype and
    strides."""
    weight = quantize(values, torch.int8) if level == "O4" else quantize(values, FP16)
    if level == "O3":
        master, weight = weight, quantize(weight.dequantize(torch.float32), E4M3, values.dtype)
        weight.rest = master
    return nn.Parameter(weight), nn.Parameter(weight.exact())


WAYS = {
    "the weight": lambda p: p,
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "a view": lambda p: p.view(p.shape),
    "transposed twice": lambda p: p.transpose(0, -1).transpose(0, -1) if p.dim() else p.view(()),
    "a slice": lambda p: p[:] if p.dim() else p.detach(),
}


def samples_of(operation, count: int = SAMPLES) -> list:
    # the calling test is looked up on the stack, twice per operation, at the cost of this whole
    # test
    nobody_asks = [
        mock.patch.object(each, "extract_test_fn", lambda: None) for each in (common_utils, core)
    ]
    with nobody_asks[0], nobody_asks[1], warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(0)
        found = itertools.islice(
            operation.sample_inputs("cpu", torch.float32, requires_grad=False), count
        )
        return [
            each
            for each in found
            if type(each.input) is torch.Tensor
            and each.input.dtype == torch.float32
            and each.input.layout == torch.strided
        ]


def outcome(function) -> tuple:
    """("did", result) or ("raised", error)."""
    torch.default_generator.manual_seed(1)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return "did", function()
    except FP8BackendError as error:
        return "refused", error
    except (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError) as error:
        return "raised", error


def stores(weight: ScaledTensor, plain: torch.Tensor) -> bool:
    """Return True if a weight stores a plain tensor's values, exactly or rounded at its level after
    a copy of the whole. Its data are its exact values, rounded."""
    level = {None: "O2", torch.int8: "O4"}.get(getattr(weight.rest, "dtype", None), "O3")
    values, (_, as_rounded) = weight.detach().exact(), weight_of(plain, level)
    if values.shape != plain.shape or not torch.isfinite(plain).all():
        return same(values, plain)  # one scale for all: a non-finite value makes all the data NaN
    follows = torch.equal(weight.dequantize(), weight_of(values, level)[0].dequantize())
    return follows and (same(values, plain) or torch.equal(values, as_rounded))


def same(values: torch.Tensor, plain: torch.Tensor) -> bool:
    """Compare up to one FP32 rounding, from multiplying the scale by a number."""
    return values.shape == plain.shape and torch.allclose(
        values, plain, rtol=2**-23, atol=0, equal_nan=True
    )


class Walk:
    """Results of all operations so far."""

    def __init__(self) -> None:
        self.counts = collections.Counter()
        self.findings: list[str] = []
        self.names: set[str] = set()
        self.refused: set[str] = set()

    def compare(
        self, operator: str, how: str, weight, plain: torch.Tensor, ours: tuple, theirs: tuple
    ) -> None:
        if theirs[0] == "raised":  # it raises for a plain tensor as well
            verdict = "raises anyway" if ours[0] != "did" else "goes where a plain tensor raises"
        elif ours[0] == "refused":
            verdict = "refused"
        elif ours[0] == "raised":
            verdict = f"raised {type(ours[1]).__name__}: {str(ours[1])[:200]}"
        else:
            verdict = "stored" if stores(weight, plain) else "lost or wrong"
        self.counts[verdict] += 1
        self.names.add(operator)
        if verdict == "refused":
            self.refused.add(operator)
        if verdict not in ("stored", "refused", "raises anyway"):
            self.findings.append(f"{operator} {how}: {verdict}")

    def conclude(self, refused: set[str]) -> None:
        """Print the figures, and raise for findings or unexpected refusals."""
        # with -s
        print(f"{len(self.names)} operators: {dict(self.counts)}, refused: {sorted(self.refused)}")
        assert not self.findings, "\n".join(self.findings)
        assert self.refused == refused


def walked(operation, number: int) -> list[tuple[str, str]]:
    """The ways and levels for one sample: three ways for the first one, one way for the others."""
    first = number + len(operation.name)
    both = [(way, LEVELS[(first + i) % len(LEVELS)]) for i, way in enumerate(WAYS)]
    return both[first % 2 :: 2] if number == 0 else [both[first % len(both)]]


def in_place(operation, see, target, /, *args, **kwargs):
    return operation.inplace_variant(see(target), *args, **kwargs)


def call(function, *args, **kwargs):
    """Call with copies: some calls change their samples."""
    args, kwargs = copy.deepcopy((args, kwargs))
    return outcome(lambda: function(*args, **kwargs))


@pytest.mark.nightly
def test_inplace_operation_is_stored_or_refused():
    walk, operations = (
        Walk(),
        [each for each in op_db if each.inplace_variant and torch.float32 in each.dtypes],
    )
    assert len(operations) > 150
    for operation in operations:
        for number, sample in enumerate(samples_of(operation)):
            for way, level in walked(operation, number):
                see, (weight, plain) = WAYS[way], weight_of(sample.input, level)
                theirs, ours = (
                    call(
                        functools.partial(in_place, operation, see, p),
                        *sample.args,
                        **sample.kwargs,
                    )
                    for p in (plain, weight)
                )
                walk.compare(
                    f"{operation.name}_", f"through {way} at {level}", weight, plain, ours, theirs
                )
    walk.conclude(refused=CHANGE_THE_SHAPE)


@pytest.mark.nightly
def test_out_argument_is_stored_or_refused():
    walk, operations = (
        Walk(),
        [each for each in op_db if each.supports_out and torch.float32 in each.dtypes],
    )
    assert len(operations) > 250
    for operation in operations:
        for number, sample in enumerate(samples_of(operation)):
            apply = functools.partial(operation, sample.input, *sample.args, **sample.kwargs)
            _, result = outcome(apply)
            if (
                type(result) is not torch.Tensor
                or result.dtype != torch.float32
                or not result.numel()
            ):
                continue
            for way, level in walked(operation, number):
                see, (weight, plain) = WAYS[way], weight_of(torch.ones_like(result), level)
                theirs, ours = (
                    outcome(functools.partial(write_out, apply, see, p)) for p in (plain, weight)
                )
                walk.compare(
                    f"{operation.name}(out=)",
                    f"through {way} at {level}",
                    weight,
                    plain,
                    ours,
                    theirs,
                )
    walk.conclude(refused={"matmul(out=)"})  # it resizes its output


def write_out(apply, see, target):
    return apply(out=see(target))


@pytest.mark.nightly
def test_write_to_view_is_stored_or_refused():
    """Include every operation that returns a view, or an output sharing memory."""
    walk = Walk()
    for operation in (
        each for each in op_db if torch.float32 in each.dtypes and "jiterator" not in each.name
    ):
        for number, sample in enumerate(samples_of(operation, 2)):
            way, level = walked(operation, number)[0]
            weight, plain = weight_of(sample.input, level)
            theirs = call(
                functools.partial(operation, WAYS[way](plain)), *sample.args, **sample.kwargs
            )
            shared = [
                i for i, each in enumerate(tree_iter(theirs[1])) if shares_memory(each, plain)
            ]
            if not shared:
                continue
            ours = call(
                functools.partial(operation, WAYS[way](weight)), *sample.args, **sample.kwargs
            )
            if ours[0] == theirs[0] == "did":
                theirs, ours = (
                    outcome(functools.partial(change, each[1], shared)) for each in (theirs, ours)
                )
            walk.compare(
                operation.name, f"seen through {way} at {level}", weight, plain, ours, theirs
            )
    assert len(walk.names) > 60
    walk.conclude(refused={"view_as_complex"})


def change(result, places: list[int]) -> None:
    parts = list(tree_iter(result))
    for i in places:
        parts[i].mul_(2.5).add_(0.1)


def shares_memory(value, tensor: torch.Tensor) -> bool:
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or not tensor.numel():
        return False
    return value.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


FOREACH = [name for name in dir(torch) if name.startswith("_foreach_") and name.endswith("_")]


@pytest.mark.parametrize("name", FOREACH)
def test_foreach_operations_change_each_tensor(name):
    """Mix weights, bf16 ones included, with plain parameters."""
    function = getattr(torch, name)
    torch.default_generator.manual_seed(0)
    x = [torch.rand(4, 4) + 0.5 for _ in range(3)]
    others = [torch.rand(4, 4) + 0.5 for _ in range(3)]
    theirs, ours, weights, plain = ("raised", None), ("raised", None), [], []
    for args in ((), (0.5,), (others,), (others, others), (others, 0.5), (others, others, 0.5)):
        weights, plain = map(
            list,
            zip(
                *(
                    weight_of(each, level)
                    for each, level in zip(x, ("O4", "O3", "O2"), strict=True)
                ),
                strict=True,
            ),
        )
        weights[2], plain[2] = nn.Parameter(x[2].clone()), nn.Parameter(x[2].clone())
        theirs, ours = (
            outcome(functools.partial(function, each, *args)) for each in (plain, weights)
        )
        if theirs[0] == "did":
            break
    assert theirs[0] == ours[0] == "did", (theirs, ours)
    assert same(weights[2], plain[2])
    assert all(stores(weight, p) for weight, p in zip(weights[:2], plain[:2], strict=True))


@pytest.mark.parametrize(
    "name", ["add_", "addcmul_", "lerp_", "addmm_", "cumsum_", "index_add_", "clamp_", "normal_"]
)
def test_bf16_weight_changes_in_fp32(name):
    arguments = {
        "add_": lambda one: (one,),
        "addcmul_": lambda one: (one, one),
        "lerp_": lambda one: (one, 1e-3),
        "addmm_": lambda one: (one, one),
        "cumsum_": lambda one: (0,),
        "index_add_": lambda one: (0, torch.tensor([1, 0, 1, 2]), one),
        "clamp_": lambda one: (-0.5, 0.5),
        "normal_": lambda one: (),
    }[name]
    torch.default_generator.manual_seed(0)
    x, one = torch.randn(4, 4).bfloat16(), torch.rand(4, 4).bfloat16()
    weight, _ = weight_of(x, "O2")
    plain = weight.exact(torch.float32)
    for p in (weight.data, plain):
        torch.default_generator.manual_seed(1)
        getattr(p, name)(*arguments(one if p.dtype == torch.bfloat16 else one.float()))
    assert weight.dtype == torch.bfloat16 and torch.equal(weight.exact(torch.float32), plain)
