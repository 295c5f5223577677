"""What a model's size and sizes do to FP8.

Where a gain begins, by measurements of others (this package's own, on a CPU, have no speed to tell of):

- layers: TorchAO's automatic filters, fitted to an H100. With one scale a tensor, nothing is gained up to
  4096 -> 1024; with a scale a row, up to 2048 outputs, or 1024 inputs, or 2048 -> 4096.
- share: Accelerate's documentation of TransformerEngine, by which gains show when most layers are converted.
- models: tokens a second of FP8 over bf16. AWS on P5 (H100, TransformerEngine): 1B parameters +1.5 % on one node to
  +13.4 % on 32, 7B +12.4 to +22.8 %. Axolotl (TorchAO, FSDP2, FP8 all-gather): 3B about +10 %. TorchAO (8 H100):
  Llama 3 8B +25 % tensorwise with FP8 all-gather, +10 % rowwise.
"""

from __future__ import annotations

from ...compute.frozen_weights import TRAINS
from ...recipes.handlers import Recipe
from ...words import share
from .. import quantized_layers
from .setup import Rule, Setup, number

SMALLEST_MEASURED = 10**9
MODEST_UNTIL = 3 * 10**9

ROW_SCALINGS = ("rowwise", "rowwise_with_gw_hp")
PADS_NOTHING = ("te", "ao")
"""Backends that cannot pad a layer's own sizes; native pads them."""


def _is_small(size: tuple[int, int], recipe: Recipe) -> bool:
    inputs, outputs = size
    if recipe.scaling in ROW_SCALINGS:
        return outputs <= 2048 or inputs <= 1024 or (outputs <= 4096 and inputs <= 2048)
    return inputs <= 4096 and outputs <= 1024


def _all_small(setup: Setup) -> bool:
    sizes = setup.linear_sizes
    return bool(sizes) and setup.machine.chip.fp8 and all(_is_small(size, setup.recipe) for size in sizes)


def _is_small_model(setup: Setup) -> bool:
    """Whether the model as a whole is small, where that is not said of its layers already."""
    counted = setup.parameters is not None and setup.parameters < SMALLEST_MEASURED
    return counted and setup.machine.chip.fp8 and not _all_small(setup)


def alignment(recipe: Recipe) -> int:
    return 32 if recipe.scaling == "mxfp8" else 16


def _next_multiple(size: int, recipe: Recipe) -> str:
    wanted = alignment(recipe)
    return f"{size}; the next multiple of {wanted} is {-(-size // wanted) * wanted}"


def _off(size: int | None, recipe: Recipe) -> bool:
    return size is not None and size % alignment(recipe) != 0


def _unpadded(setup: Setup) -> list[str]:
    """Layers that stay in high precision for their sizes alone."""
    reasons = setup.expected.high_precision if setup.expected else {}
    return [name for name, reason in reasons.items() if reason and "cannot pad" in reason]


def _has_vocabulary_head(setup: Setup) -> bool:
    """Whether some layer gives a number for each word; taken for granted without a model."""
    expected = setup.expected
    return expected is None or any(product.out_features == setup.vocab_size for product in expected.products)


def _reasons(setup: Setup) -> str:
    """Why layers of the model stay in high precision."""
    return "; ".join(dict.fromkeys(filter(None, setup.expected.high_precision.values())))


def _named(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _leaves_tokens(setup: Setup) -> bool:
    """Whether a number of tokens that is no multiple is left as it is: TorchAO alone can be told so."""
    config = setup.recipe.config
    unpadded = setup.recipe.pad_inner_dim is False or (config is not None and not config.pad_inner_dim)
    return setup.recipe.compute == "ao" and unpadded


MODEL_RULES = (
    Rule(
        "nothing_in_fp8",
        "error",
        lambda s: s.expected is not None and not s.expected.converted,
        "no layer of this model can run in FP8",
        "look at the reasons, and at include and exclude; a model whose products are not Linear layers trains in bf16",
        lambda s: _reasons(s) or "it has no Linear",
    ),
    Rule(
        "minority_in_fp8",
        "warning",
        lambda s: s.expected is not None and bool(s.expected.converted) and s.expected.flops_share < 0.5,
        "less than half of the products with weights would run in FP8, and gains show when most do",
        "name more of what can be converted in include, such as +lm_head, the output head; or train in bf16",
        lambda s: f"{share(s.expected.flops_share)}; {_reasons(s)}",
    ),
    Rule(
        "small_layers",
        "warning",
        _all_small,
        "every layer that would run in FP8 is too small: casting to FP8 costs more than its products save (TorchAO's "
        "filters, fitted to an H100: up to 4096 -> 1024; with a scale a row up to 2048 outputs, or 1024 inputs, or "
        "2048 -> 4096)",
        "train in bf16, or give FP8 a larger model",
        lambda s: "the largest is {} -> {}".format(*max(s.linear_sizes, key=lambda size: size[0] * size[1])),
    ),
    Rule(
        "small_model",
        "warning",
        _is_small_model,
        "smaller than any model for which a gain was measured: on H100s 1 billion parameters gained 1.5 % on one node "
        "and 13 % on 32 (AWS), 7 billion 12 to 23 %",
        "train in bf16, or measure both on your machine",
        lambda s: f"{number(s.parameters)} parameters, {s.parameters / SMALLEST_MEASURED:.2g} of the smallest measured",
    ),
    Rule(
        "modest_gain",
        "info",
        lambda s: s.machine.chip.fp8 and s.parameters is not None and SMALLEST_MEASURED <= s.parameters < MODEST_UNTIL,
        "models of this size gain little: on H100s 1 billion parameters 1.5 to 13 % (AWS), 3 billion about 10 % "
        "(Axolotl), against 12 to 25 % for 7 to 8 billion (AWS, TorchAO)",
        "measure both on your machine",
        lambda s: f"{number(s.parameters)} parameters",
    ),
    Rule(
        "layers_off_16",
        "info",
        lambda s: bool(_unpadded(s)),
        "te and ao cannot pad a layer: one whose features are no multiple of 16 (te:mxfp8: 32) stays in high precision",
        "use native, which pads, or make the sizes multiples",
        lambda s: _named(_unpadded(s)),
    ),
    Rule(
        "vocabulary_off_16",
        "info",
        lambda s: s.recipe.compute in PADS_NOTHING and _off(s.vocab_size, s.recipe) and _has_vocabulary_head(s),
        "te and ao cannot pad the vocabulary to a multiple of 16 (te:mxfp8: 32), so the output head stays in high "
        "precision, even if include names it",
        "model.resize_token_embeddings(n, pad_to_multiple_of=64), or include the head with native, which pads it",
        lambda s: f"vocab_size {_next_multiple(s.vocab_size, s.recipe)}",
    ),
    Rule(
        "tokens_off_16",
        "info",
        lambda s: _off(s.sequence_length, s.recipe) and not _leaves_tokens(s),
        "the weight gradient's product runs over the tokens of a batch: where they are no multiple of 16 (mxfp8: 32) "
        "each step pads them, a copy of activations and gradients more (te pads the forward's rows too)",
        "pad sequences to a multiple (pad_to_multiple_of of transformers' collators)",
        lambda s: f"sequence length {_next_multiple(s.sequence_length, s.recipe)}",
    ),
    Rule(
        "tokens_unpadded",
        "error",
        lambda s: _off(s.sequence_length, s.recipe) and _leaves_tokens(s) and s.machine.has_gpu,
        "the weight gradient's product runs over the tokens of a batch, a multiple of 16 on a GPU, and "
        "pad_inner_dim=False leaves them as they are",
        "leave pad_inner_dim out (it pads), or pad sequences to a multiple of 16",
        lambda s: f"sequence length {_next_multiple(s.sequence_length, s.recipe)}",
    ),
    Rule(
        "fp8_params_trains",
        "error",
        lambda s: s.recipe.fp8_params and s.linear_trains,
        *TRAINS,
    ),
    Rule(
        "fp8_checkpoint_trains",
        "error",
        lambda s: bool(s.codes_that_train),
        *quantized_layers.TRAINS,
        lambda s: _named(list(s.codes_that_train)),
    ),
    Rule(
        "quantized_base",
        "warning",
        lambda s: bool(s.quantized_base),
        "layers that bitsandbytes holds in 4 or 8 bits multiply by themselves: only what it left alone, such as "
        "adapters, can run in FP8",
        "load the base model in bf16 for FP8 products, or keep the 4 or 8 bits and train in bf16",
    ),
)
