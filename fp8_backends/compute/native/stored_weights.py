"""The kinds of weights in codes: of a level, of `fp8_params`, of a checkpoint, gathered by FSDP2."""

from __future__ import annotations

import torch
from torch import nn

from ...formats import scaling
from ...formats.scaling import WEIGHT
from ...tensors import gathered_codes
from ...tensors.block_codes import RAW_CODES, BlockCodes, is_decoded
from ...tensors.gathered_codes import GatheredCodes
from ...tensors.scaled_tensor import Kind, ScaledTensor, quantize
from ...torch_tools.backward_end import is_checkpointed
from .layer_rule import FROZEN, PlainWeight, Stored, quantized


def frozen(weight: torch.Tensor) -> ScaledTensor | BlockCodes:
    """Quantize a weight to a frozen one of the same dtype. Raw float8 values are codes already."""
    if weight.dtype in RAW_CODES:
        return BlockCodes.of_raw(weight)
    stored = quantize(weight.detach(), torch.float8_e4m3fn, weight.dtype)
    stored.kind = Kind.UNTRAINED
    return stored


class ScaledWeight(PlainWeight):
    """A `ScaledTensor`: FP16 of a level, cast like a plain weight, or E4M3, multiplied as it is."""

    def read(self, weight, product):
        _check_copies(weight)
        assert not weight.block_size, "a weight has one scale"
        return Stored(weight.codes, weight.scale_inv)

    def quantized(self, layer, matrix, for_dgrad, recorded, split, amax=None):
        rule, weight = layer.fp8_rule, layer.weight
        if matrix.is_in(rule.forward_format):
            return matrix.quantized(rule, None)
        # a DTensor's ranks know the amaxes of their parts
        is_whole = isinstance(weight, ScaledTensor)
        if is_whole and not (rule.scales.moves_in_forward or torch.compiler.is_compiling()):
            amax = weight.known_amax()
        return super().quantized(layer, matrix, for_dgrad, recorded, split, amax)

    def loaded(self, layer, before):
        if layer.fp8_rule.frozen_weight and not isinstance(layer.weight, FROZEN):
            values = layer.weight.detach()
            layer.weight = nn.Parameter(frozen(layer.weight), requires_grad=False)
            layer.weight.copy_(values)
        if isinstance(layer.weight, ScaledTensor):
            layer.weight.drop_exact_edits()


class BlockWeight(ScaledWeight):
    """E4M3 codes multiplied as they are: `BlockCodes` in squares, or raw under the scale 1."""

    def read(self, weight, product):
        _check_copies(weight)
        return Stored(*weight.parts)

    def loaded(self, layer, before):
        if not isinstance(layer.weight, BlockCodes):
            values = layer.weight.detach()
            layer.weight = before
            before.copy_(values)


class DecodedWeight(BlockWeight):
    """Other codes of a checkpoint, read as values, which the rule casts for each product: kept codes
    would take more memory than the weight's own."""

    is_decoded = True

    def read(self, weight, product):
        _check_copies(weight)
        return Stored(weight.code_layout.values(weight.parts, weight.dtype), None)

    def quantized(self, layer, matrix, for_dgrad, recorded, split, amax=None):
        return super().quantized(layer, matrix, False, recorded, split)

    def saved(self, weight, stored, rule, w8):
        return weight, None

    def for_dgrad(self, saved, rule, state, transposed):
        stored = self.read(saved[0], gathered_codes.FPROP)
        if rule.dgrad_reads_weight:
            return stored
        codes = quantized(stored.data, rule.forward_format, rule, state, WEIGHT, rows=False)
        return Stored(*codes.along_rows())


class GatheredWeight(PlainWeight):
    """Codes that FSDP2 gathers for each product: fprop's in forward, dgrad's in backward."""

    is_gathered = True

    def read(self, weight, product):
        return Stored(*weight.read_by(product))

    def quantized(self, layer, matrix, for_dgrad, recorded, split, amax=None):
        rule = layer.fp8_rule
        layer.fp8_recomputed = layer.fp8_shared.is_training(layer) and is_checkpointed()
        amax = layer.weight.parts.get(gathered_codes.WEIGHT_AMAX)
        # as a cast of the weight records it
        if layer.fp8_ledger.newest(rule, recorded, WEIGHT) is not None:
            scaling.record_amax(recorded, WEIGHT, amax, rule.scales.keeps_nan)
        return matrix.quantized(rule, None)._replace(amax=amax)

    def quantized_matrices(self, layer, weight, stored, quantize):
        layer.fp8_recomputed = layer.fp8_shared.is_training(layer) and is_checkpointed()
        return quantize()._replace(amax=weight.parts.get(gathered_codes.WEIGHT_AMAX))

    def saved(self, weight, stored, rule, w8):
        return weight, None

    def for_dgrad(self, saved, rule, state, transposed):
        stored = self.read(saved[0], gathered_codes.DGRAD)
        return stored.t() if transposed == rule.dgrad_reads_weight else stored


SCALED, BLOCKS, DECODED, GATHERED = ScaledWeight(), BlockWeight(), DecodedWeight(), GatheredWeight()


def kind_of_codes(weight: torch.Tensor) -> PlainWeight | None:
    """Return the kind of a weight in codes, None for others."""
    if isinstance(weight, ScaledTensor):
        return SCALED
    if isinstance(weight, GatheredCodes):
        return GATHERED
    if isinstance(weight, BlockCodes):
        return DECODED if is_decoded(weight) else BLOCKS
    return None


def _check_copies(weight: ScaledTensor | BlockCodes) -> None:
    if not torch.compiler.is_compiling():
        weight.state_dict_copies.check()
