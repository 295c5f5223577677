"""Compare codes from FSDP2 shards with codes of the whole weight, bitwise, on one process without
FSDP2."""

from __future__ import annotations

import pytest
import torch
from expert_families import make_experts
from torch import nn

import fp8_backends
from fp8_backends.compute.experts.native_layer import ExpertCodes, oriented_layouts
from fp8_backends.compute.native.gathered_weights import WeightCodes
from fp8_backends.compute.native.layer_rule import Stored
from fp8_backends.compute.native.weights import read
from fp8_backends.errors import FP8BackendError
from fp8_backends.formats.scaling import Quantized
from fp8_backends.tensors.gathered_codes import DGRAD, FPROP, GatheredCodes
from fp8_backends.tensors.scaled_tensor import ScaledTensor, quantize

RULES = ("dynamic", "delayed", "window", "rowwise", "blockwise", "mxfp8")
ROWS, COLUMNS = 290, 300
CUTS = (0, 97, 194, 290, 290)
"""Uneven shards cutting through blocks; the last one is empty."""


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.nan_to_num(-1), b.nan_to_num(-1))


def codes_of(rule: str, transposed: bool) -> WeightCodes:
    """The codes of a layer with a Parameter [ROWS, COLUMNS]."""
    if transposed:
        pytest.importorskip("transformers")
        from transformers.pytorch_utils import Conv1D

        layer = Conv1D(COLUMNS, ROWS)
    else:
        layer = nn.Linear(COLUMNS, ROWS)
    fp8_backends.prepare(nn.Sequential(layer), None, f"native:{rule}")
    return WeightCodes(layer)


def agreed_codes(
    codes: WeightCodes, shards: list[torch.Tensor]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Gather the codes of all ranks, and compute the scales from the agreed maxima."""
    shape = torch.Size((ROWS, COLUMNS))
    amaxes = [codes.amaxes(shard, 97 * rank, shape) for rank, shard in enumerate(shards)]
    codes.agree([torch.stack(of_ranks).amax(0) for of_ranks in zip(*amaxes, strict=True)])
    gathered = {}
    for product in codes.products:
        parts = [codes.codes(shard, 97 * rank, shape, product) for rank, shard in enumerate(shards)]
        gathered[product] = (
            torch.cat([part.view(torch.uint8) for part in parts]),
            codes.scale_inv(codes.agreed[product]),
        )
    return gathered


def whole_codes(
    codes: WeightCodes, weight: torch.Tensor, product: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize the whole weight as the layer does, in the weight's layout."""
    layer = codes.layer
    stored, rule, fmt = read(weight), layer.fp8_rule, layer.fp8_rule.forward_format
    matrix = stored.t() if layer.transposed_weight else stored
    if rule.scales.blocks is None:
        made = matrix.quantized(rule, layer.fp8_scaling, columns=False).along_columns()
    else:
        made = matrix.in_blocks(rule.scales.weight_blocks, fmt, transposed=product == DGRAD)
    if layer.transposed_weight != (rule.scales.blocks is not None and product == DGRAD):
        made = made._replace(codes=made.codes.t(), scale_inv=made.scale_inv.t())
    return made.codes.contiguous().view(torch.uint8), made.scale_inv


@pytest.mark.parametrize("stored", ["fp32", "bf16", "scaled fp16", "with an overflow on one rank"])
@pytest.mark.parametrize("transposed", [False, True], ids=["Linear", "Conv1D"])
@pytest.mark.parametrize("rule", RULES)
def test_shard_codes_match_whole_weight(rule, transposed, stored):
    torch.manual_seed(0)
    weight = torch.randn(ROWS, COLUMNS)
    weight[100:140] *= 1e-3
    weight[3, 7], weight[150], weight[:, 200] = 50.0, 0.0, 0.0
    codes = codes_of(rule, transposed)
    if stored == "bf16":
        weight = weight.bfloat16()
    overflows = stored.startswith("with")
    weight[5, 5] = float("inf") if overflows else weight[5, 5]
    shards = [weight[a:b] for a, b in zip(CUTS[:-1], CUTS[1:], strict=True)]
    if stored == "scaled fp16":
        weight = quantize(weight, torch.float16)
        shards = [
            ScaledTensor(weight.codes[a:b], weight.scale_inv)
            for a, b in zip(CUTS[:-1], CUTS[1:], strict=True)
        ]
    for product, gathered in agreed_codes(codes, shards).items():
        for found, expected in zip(gathered, whole_codes(codes, weight, product), strict=True):
            assert same(found, expected), product
            assert not overflows or found.dtype != torch.float32 or found.isnan().any()


@pytest.mark.parametrize("transposed", [False, True], ids=["mixtral", "gpt_oss"])
@pytest.mark.parametrize("rule", RULES)
def test_gathered_expert_codes_match_local_casts(rule, transposed):
    """Include an overflow in one expert."""
    pytest.importorskip("transformers")
    root = make_experts(
        "gpt_oss" if transposed else "mixtral", num_local_experts=5, intermediate_size=70
    )
    fp8_backends.prepare(root, None, f"native:{rule}")
    layer = root.experts.fp8_weights["gate_up_proj"]
    codes, weight = ExpertCodes(layer), layer.weight.detach().clone()
    weight[1, 3, 5], weight[2], weight[4, 7, 1] = 50.0, 0.0, torch.inf
    shards = {0: weight[:3], 3: weight[3:], 5: weight[5:]}
    of_ranks = [codes.amaxes(shard, first, weight.shape) for first, shard in shards.items()]
    codes.agree([torch.stack(each).amax(0) for each in zip(*of_ranks, strict=True)])
    for product in (FPROP, DGRAD):
        made_for = product if product in codes.products else FPROP
        parts = [
            codes.codes(shard, first, weight.shape, made_for) for first, shard in shards.items()
        ]
        whole = torch.cat([part.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)
        gathered = Stored(whole, codes.scale_inv(codes.agreed[made_for]))
        operands = [_operand(layer, stored, product) for stored in (gathered, read(weight))]
        for found, expected in zip(*operands, strict=True):
            assert same(found.float(), expected.float()), product


def _operand(layer, stored: Stored, product: str) -> Quantized:
    state, is_fprop = layer.fp8_scaling, product == FPROP
    made = oriented_layouts(
        layer.fp8_rule, None, stored, layer.transposed_weight, state, is_fprop, not is_fprop
    )
    return made.along_columns() if is_fprop else made.along_rows()


def test_other_readers_of_gathered_codes_are_refused():
    data = torch.ones(4, 4).to(torch.float8_e4m3fn)
    weight = nn.Parameter(
        GatheredCodes({"fprop_codes": data, "fprop_scale_inv": torch.ones(())}, torch.float32)
    )
    assert isinstance(weight, GatheredCodes) and torch.equal(
        weight.read_by("fprop").codes.float(), torch.ones(4, 4)
    )
    for use in (
        lambda: weight + 1,
        lambda: weight.mul_(2),
        lambda: weight.read_by("dgrad"),
        lambda: weight.t(),
    ):
        with (
            pytest.raises(FP8BackendError, match="enable_fsdp_float8_all_gather=False"),
            torch.no_grad(),
        ):
            use()
