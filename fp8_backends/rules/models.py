"""Limits of models, and sizes below which FP8 gains little.

Sources: TorchAO's automatic filters (layers), Accelerate's documentation of TransformerEngine (share), and tokens a
second over bf16 (models) by AWS on P5 with TransformerEngine, Axolotl with FSDP2 and FP8 all-gather, and TorchAO.
"""

from ..compute.frozen_weights import TRAINS
from ..convert import quantized_layers
from ..recipes.handlers import Recipe
from ..words import listed, share
from .setup import Setup, error, info, number, warning

SMALLEST_MEASURED = 10**9
MODEST_UNTIL = 3 * 10**9


def _is_small(size: tuple[int, int], recipe: Recipe) -> bool:
    inputs, outputs = size
    if recipe.scaling in ("rowwise", "rowwise_with_gw_hp"):
        return outputs <= 2048 or inputs <= 1024 or (outputs <= 4096 and inputs <= 2048)
    return inputs <= 4096 and outputs <= 1024


def _all_small(setup: Setup) -> str:
    sizes = setup.linear_sizes
    if not sizes or not setup.machine.chip.fp8 or not all(_is_small(size, setup.recipe) for size in sizes):
        return ""
    return "the largest is {} -> {}".format(*max(sizes, key=lambda size: size[0] * size[1]))


def _parameters(setup: Setup, least: int, end: int) -> str:
    in_range = setup.parameters is not None and least <= setup.parameters < end
    return f"{number(setup.parameters)} parameters" if in_range and setup.machine.chip.fp8 else ""


def _unaligned(name: str, size: int | None, recipe: Recipe) -> str:
    """Name a size that is not a multiple of 16 (mxfp8: 32), and the next multiple."""
    wanted = 32 if recipe.scaling == "mxfp8" else 16
    if size is None or size % wanted == 0:
        return ""
    return f"{name} {size}; the next multiple of {wanted} is {-(-size // wanted) * wanted}"


def _unpadded(setup: Setup) -> str:
    reasons = setup.expected.high_precision if setup.expected else {}
    return listed((name for name, reason in reasons.items() if reason and "cannot pad" in reason), 3)


def _reasons(setup: Setup) -> str:
    return "; ".join(dict.fromkeys(filter(None, setup.expected.high_precision.values())))


def _leaves_tokens(setup: Setup) -> bool:
    config = setup.recipe.config
    unpadded = setup.recipe.pad_inner_dim is False or (config is not None and not config.pad_inner_dim)
    return setup.recipe.compute == "ao" and unpadded


MODEL_RULES = (
    error(
        "nothing_in_fp8",
        lambda s: s.expected is not None and not s.expected.converted and (_reasons(s) or "it has no Linear"),
        "no layer of this model can run in FP8",
        "look at the reasons, and at include and exclude; train a model without Linear layers in bf16",
    ),
    warning(
        "minority_in_fp8",
        lambda s: (
            s.expected is not None
            and bool(s.expected.converted)
            and s.expected.flops_share < 0.5
            and f"{share(s.expected.flops_share)}; {_reasons(s)}"
        ),
        "less than half of the products with weights would run in FP8, and gains show when most do",
        "name more layers in include, such as +lm_head, the output head; or train in bf16",
    ),
    warning(
        "small_layers",
        _all_small,
        "every layer for FP8 is too small: casting to FP8 costs more than its products save (TorchAO's filters, "
        "fitted to an H100: up to 4096 -> 1024; with a scale a row up to 2048 outputs, or 1024 inputs, or 2048 -> "
        "4096)",
        "train in bf16, or give FP8 a larger model",
    ),
    warning(
        "small_model",
        lambda s: (
            not _all_small(s)
            and (text := _parameters(s, 0, SMALLEST_MEASURED))
            and f"{text}, {s.parameters / SMALLEST_MEASURED:.2g} of the smallest measured"
        ),
        "smaller than any model with a measured gain: on H100s 1 billion parameters gained 1.5 % on one node and 13 "
        "% on 32 (AWS), 7 billion 12 to 23 %",
        "train in bf16, or measure both on your machine",
    ),
    info(
        "modest_gain",
        lambda s: _parameters(s, SMALLEST_MEASURED, MODEST_UNTIL),
        "models of this size gain little: on H100s 1 billion parameters 1.5 to 13 % (AWS), 3 billion about 10 % "
        "(Axolotl), against 12 to 25 % for 7 to 8 billion (AWS, TorchAO)",
        "measure both on your machine",
    ),
    info(
        "layers_off_16",
        _unpadded,
        "te and ao cannot pad a layer: features other than multiples of 16 (te:mxfp8: 32) keep it in high precision",
        "use native: it pads; or make the sizes multiples",
    ),
    info(
        "vocabulary_off_16",
        lambda s: (
            s.recipe.compute in ("te", "ao")
            and (s.expected is None or any(p.out_features == s.vocab_size for p in s.expected.products))
            and _unaligned("vocab_size", s.vocab_size, s.recipe)
        ),
        "te and ao cannot pad the vocabulary to a multiple of 16 (te:mxfp8: 32), so the output head stays in high "
        "precision, even if include names it",
        "model.resize_token_embeddings(n, pad_to_multiple_of=64), or include the head with native: it pads",
    ),
    info(
        "tokens_off_16",
        lambda s: not _leaves_tokens(s) and _unaligned("sequence length", s.sequence_length, s.recipe),
        "the weight gradient's product runs over the tokens of a batch: unless they are a multiple of 16 (mxfp8: "
        "32), each step pads them, with one more copy of activations and gradients (te pads the forward's rows too)",
        "pad sequences to a multiple (pad_to_multiple_of of transformers' collators)",
    ),
    error(
        "tokens_unpadded",
        lambda s: (
            s.machine.has_gpu and _leaves_tokens(s) and _unaligned("sequence length", s.sequence_length, s.recipe)
        ),
        "the weight gradient's product runs over the tokens of a batch, a multiple of 16 on a GPU, and "
        "pad_inner_dim=False leaves them as they are",
        "leave pad_inner_dim out (it pads), or pad sequences to a multiple of 16",
    ),
    error("fp8_params_trains", lambda s: s.recipe.fp8_params and s.linear_trains, *TRAINS),
    error("fp8_checkpoint_trains", lambda s: listed(s.codes_that_train, 3), *quantized_layers.TRAINS),
    warning(
        "quantized_base",
        lambda s: bool(s.quantized_base),
        "bitsandbytes multiplies its 4-bit or 8-bit layers itself: only other layers, such as adapters, can run in FP8",
        "load the base model in bf16 for FP8 products, or keep the 4 or 8 bits and train in bf16",
    ),
)
