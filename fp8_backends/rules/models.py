"""Limits of models, and layers that gain little in FP8, as `compute.rates` predicts
(docs/speed.rst).

Source of the least share: Accelerate's documentation of TransformerEngine.
"""

from ..compute.frozen_weights import TRAINS
from ..compute.rates import TOKENS, linear_gain, linear_seconds
from ..convert import quantized_layers
from ..recipes.handlers import Recipe
from ..words import listed, share
from .setup import Setup, error, info, warning

MODEST_GAIN = 1.25


def _gain(setup: Setup, least: float, end: float) -> str:
    """Name the predicted gain of the layers in FP8 if it lies between two bounds."""
    recipe = setup.recipe
    chip = setup.machine.chip.rates
    if chip is None or not setup.linear_sizes:
        return ""
    gain = linear_gain(setup.linear_sizes, recipe.compute, recipe.scaling, chip)
    largest = "{} -> {}".format(*max(setup.linear_sizes, key=lambda size: size[0] * size[1]))
    found = f"the largest is {largest}; {gain:.2f} times bf16's speed at {TOKENS:,} tokens"
    return found if least < gain <= end else ""


def _faster_in_bf16(setup: Setup) -> str:
    """Name the layers in FP8 that are predicted to be faster in bf16, if there are others."""
    recipe = setup.recipe
    chip = setup.machine.chip.rates
    if chip is None:
        return ""
    sizes = setup.linear_sizes
    seconds = [linear_seconds(size, recipe.compute, recipe.scaling, chip) for size in sizes]
    small = [size for size, each in zip(sizes, seconds, strict=True) if not each.fp8_gains]
    if len(small) in (0, len(sizes)):
        return ""
    saved = 1 - sum(map(min, seconds)) / sum(each.fp8 for each in seconds)
    return (
        f"{len(small)} of {len(sizes)}, such as {small[0][0]} -> {small[0][1]}; in bf16 they would "
        f"save {100 * saved:.1f} % of the time of all at {TOKENS:,} tokens"
    )


def _unaligned(name: str, size: int | None, recipe: Recipe) -> str:
    """Name a size that is not a multiple of 16 (mxfp8: 32), and the next multiple."""
    wanted = 32 if recipe.scaling == "mxfp8" else 16
    if size is None or size % wanted == 0:
        return ""
    return f"{name} {size}; the next multiple of {wanted} is {-(-size // wanted) * wanted}"


def _unpadded(setup: Setup) -> str:
    reasons = setup.expected.high_precision if setup.expected else {}
    return listed(
        (name for name, reason in reasons.items() if reason and "cannot pad" in reason), 3
    )


def _reasons(setup: Setup) -> str:
    return "; ".join(dict.fromkeys(filter(None, setup.expected.high_precision.values())))


def _leaves_tokens(setup: Setup) -> bool:
    config = setup.recipe.config
    unpadded = setup.recipe.pad_inner_dim is False or (
        config is not None and not config.pad_inner_dim
    )
    return setup.recipe.compute == "ao" and unpadded


MODEL_RULES = (
    error(
        "nothing_in_fp8",
        lambda s: (
            s.expected is not None
            and not s.expected.converted
            and (_reasons(s) or "it has no Linear")
        ),
        "no layer of this model can run in FP8",
        "look at the reasons, and at include and exclude; train a model without Linear layers in "
        "bf16",
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
        lambda s: _gain(s, 0, 1),
        "the layers for FP8 are too small: casting to FP8 is predicted to cost more than its "
        "products save, even compiled",
        "train in bf16, give FP8 a larger model or more tokens at a time; fp8-backends estimate "
        "times the whole step",
    ),
    info(
        "modest_gain",
        lambda s: _gain(s, 1, MODEST_GAIN),
        "the layers for FP8 are predicted to gain little, compiled, and the rest of a step nothing",
        "fp8-backends estimate times the whole step; or measure both on your machine",
    ),
    info(
        "layers_faster_in_bf16",
        _faster_in_bf16,
        "these layers are predicted to be slower in FP8 than in bf16, even compiled",
        'small_layers="bf16" keeps them in bf16',
    ),
    info(
        "layers_off_16",
        _unpadded,
        "te and ao cannot pad a layer: features other than multiples of 16 (te:mxfp8: 32) keep it "
        "in high precision",
        "use native: it pads; or make the sizes multiples",
    ),
    info(
        "vocabulary_off_16",
        lambda s: (
            s.recipe.compute in ("te", "ao")
            and (
                s.expected is None
                or any(p.out_features == s.vocab_size for p in s.expected.products)
            )
            and _unaligned("vocab_size", s.vocab_size, s.recipe)
        ),
        "te and ao cannot pad the vocabulary to a multiple of 16 (te:mxfp8: 32), so the output "
        "head stays in high precision, even if include names it",
        "model.resize_token_embeddings(n, pad_to_multiple_of=64), or include the head with native: "
        "it pads",
    ),
    info(
        "tokens_off_16",
        lambda s: (
            not _leaves_tokens(s) and _unaligned("sequence length", s.sequence_length, s.recipe)
        ),
        "the weight gradient's product runs over the tokens of a batch: unless they are a multiple "
        "of 16 (mxfp8: 32), each step pads them, with one more copy of activations and gradients "
        "(te pads the forward's rows too)",
        "pad sequences to a multiple (pad_to_multiple_of of transformers' collators)",
    ),
    error(
        "tokens_unpadded",
        lambda s: (
            s.machine.has_gpu
            and _leaves_tokens(s)
            and _unaligned("sequence length", s.sequence_length, s.recipe)
        ),
        "the weight gradient's product runs over the tokens of a batch, a multiple of 16 on a GPU, "
        "and pad_inner_dim=False leaves them as they are",
        "leave pad_inner_dim out (it pads), or pad sequences to a multiple of 16",
    ),
    error("fp8_params_trains", lambda s: s.recipe.fp8_params and s.linear_trains, *TRAINS),
    error(
        "fp8_checkpoint_trains",
        lambda s: listed(s.codes_that_train, 3),
        *quantized_layers.CODES_NEVER_TRAIN,
    ),
    warning(
        "quantized_base",
        lambda s: bool(s.quantized_base),
        "bitsandbytes multiplies its 4-bit or 8-bit layers itself: only other layers, such as "
        "adapters, can run in FP8",
        "load the base model in bf16 for FP8 products, or keep the 4 or 8 bits and train in bf16",
    ),
)
