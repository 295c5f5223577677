"""Describe the model of an estimate: a transformers configuration, or a number of parameters."""

from __future__ import annotations

import copy
import functools
import inspect
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ...errors import FP8BackendError
from ...words import counted, first_line, shortened

_TOKENS = "input_ids"
_IMAGES = "pixel_values"
_SPECTROGRAMS = "input_features"
_WITH_LOSS = {
    _TOKENS: (
        *(
            "ForCausalLM",
            "LMHeadModel",
            "ForMaskedLM",
            "ForConditionalGeneration",
            "ForPreTraining",
        ),
        "ForSequenceClassification",
    ),
    _IMAGES: ("ForImageClassification",),
    _SPECTROGRAMS: ("ForConditionalGeneration",),
}
"""Main input, and endings of classes that take it with `labels`, for tokens or samples, and return
a loss."""
_SIZES = {_IMAGES: ("num_channels",), _SPECTROGRAMS: ("num_mel_bins", "max_source_positions")}
"""Fields of a configuration with the size of an input; a model of images and texts has them in a
nested one."""
IMAGE_SIZE = 224
"""Pixels of a side, if the configuration has none (ResNet): the size of its training."""
_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}

_DECODER_LAYERS = ("decoder_layers", "num_decoder_layers")
"""Fields with a decoder's depth, if `num_hidden_layers` is the encoder's."""
_ALL_LAYERS = ("num_hidden_layers", "encoder_layers", *_DECODER_LAYERS)

FEWEST_LAYERS = 2
"""Layers of the model to extrapolate from."""
LARGE = 1e9
"""Parameters from which on a generic model has the vocabulary of Llama 3."""
ASPECT = 128
"""Width over depth of a generic model, as in Llama 3 8B (4096 / 32)."""


@dataclass(eq=False)
class ModelShape:
    """A model of variable depth."""

    title: str
    config: Any
    """Of transformers."""
    lora: int = 0
    """Rank of PEFT's adapters on all Linears but the head, in FP32; the rest is frozen, in bf16. 0:
    all is trained."""

    @property
    def layers(self) -> int:
        return getattr(self.config, "num_hidden_layers", 0)

    def check_sequence(self, sequence: int) -> None:
        """Raise `FP8BackendError` for more tokens than the model has positions."""
        if self.longest is not None and self.longest < sequence:
            raise FP8BackendError(
                f"a sequence of {sequence} tokens exceeds the model's {self.longest} positions"
            )

    @property
    def longest(self) -> int | None:
        """Tokens of the longest sequence, or for a model of speech the longest transcript; None
        without a limit."""
        return getattr(
            self.config,
            "max_target_positions",
            getattr(self.config, "max_position_embeddings", None),
        )

    def with_layers(self, layers: int) -> ModelShape:
        """Return the same shape with this depth, for encoder and decoder alike."""
        config = copy.deepcopy(self.config)
        if kinds := getattr(config, "layer_types", None):
            config.layer_types = [kinds[i % len(kinds)] for i in range(layers)]
        for name in _ALL_LAYERS:
            if hasattr(config, name):
                setattr(config, name, layers)
        return replace(self, config=config)

    def make_model(self, dtype: torch.dtype) -> nn.Module:
        """Build it with random weights on the default device. Raises `FP8BackendError` if
        transformers cannot."""
        config = copy.deepcopy(self.config)
        # a decoder derives its input from labels with them
        for name in ("decoder_start_token_id", "pad_token_id"):
            if getattr(config, name, None) is None:
                setattr(config, name, 0)
        try:
            if self.lora:
                return _with_adapters(
                    lambda: _model_class(config)._from_config(config, dtype=torch.bfloat16),
                    self.lora,
                )
            return _model_class(config)._from_config(config, dtype=dtype)
        except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError) as error:
            raise FP8BackendError(
                f"transformers cannot make this model: {first_line(error)}"
            ) from error

    @property
    def reads_tokens(self) -> bool:
        return _model_class(self.config).main_input_name != _IMAGES

    def make_batch(
        self, batch: int, sequence: int, dtype: torch.dtype = torch.float32
    ) -> dict[str, torch.Tensor]:
        """Return the arguments of the forward, all zeros: token ids, images or spectrograms, with
        labels."""
        model_class = _model_class(self.config)
        config = self.config
        is_classifier = model_class.__name__.endswith("Classification")
        labels = torch.zeros((batch,) if is_classifier else (batch, sequence), dtype=torch.long)
        first = model_class.main_input_name
        if first == _TOKENS:
            return {first: torch.zeros(batch, sequence, dtype=torch.long), "labels": labels}
        if first == _IMAGES:
            shape = (config.num_channels, *self._image)
        else:
            shape = (config.num_mel_bins, self._frames)
        return {first: torch.zeros(batch, *shape, dtype=dtype), "labels": labels}

    def samples(self, batch: int, sequence: int) -> str:
        first = _model_class(self.config).main_input_name
        if first == _IMAGES:
            return f"{counted(batch, 'image')} of {self._image[0]} x {self._image[1]} pixels"
        tokens = counted(sequence, "token")
        if first == _SPECTROGRAMS:
            return f"{counted(batch, 'spectrogram')} of {self._frames} frames with a transcript of {tokens}"
        both = " for the encoder and as many for the decoder" if self._is_encoder_decoder else ""
        return f"{counted(batch, 'sequence')} of {tokens}{both}"

    @property
    def _is_encoder_decoder(self) -> bool:
        return getattr(self.config, "is_encoder_decoder", False)

    @property
    def _image(self) -> tuple[int, int]:
        size = getattr(self.config, "image_size", None) or IMAGE_SIZE
        return (size, size) if isinstance(size, int) else tuple(size)

    @property
    def _frames(self) -> int:
        # a convolution halves them before they get positions
        return 2 * self.config.max_source_positions

    def stacks(self, model: nn.Module) -> list[list[nn.Module]]:
        """Return the repeated layers (of encoder and decoder) if they are alike except the first,
        else []."""
        if any(getattr(self.config, name, self.layers) != self.layers for name in _DECODER_LAYERS):
            return []
        parts = [model.get_encoder(), model.get_decoder()] if self._is_encoder_decoder else [model]
        stacks = [self._blocks(part) for part in parts]
        return stacks if all(stacks) else []

    def _blocks(self, part: nn.Module) -> list[nn.Module]:
        lists = [
            m for m in part.modules() if isinstance(m, nn.ModuleList) and len(m) == self.layers
        ]
        largest = max(lists, key=count_elements, default=())
        kinds = {
            tuple((name, p.shape) for name, p in block.named_parameters()) for block in largest[1:]
        }
        return list(largest) if len(kinds) <= 1 else []

    @functools.cached_property
    def grows_evenly(self) -> bool:
        """True if its layers are alike, so that a few of them determine the costs of all."""
        if self.layers <= FEWEST_LAYERS + 1:
            return False
        with torch.device("meta"):
            shapes = [self.with_layers(FEWEST_LAYERS), self.with_layers(FEWEST_LAYERS + 1), self]
            models = [shape.make_model(torch.float32) for shape in shapes]
        if not all(map(ModelShape.stacks, shapes, models)):
            return False
        short, long, whole = map(count_elements, models)
        return short < long and whole == short + (long - short) * (self.layers - FEWEST_LAYERS)

    @functools.cached_property
    def parameters(self) -> int:
        with torch.device("meta"):
            return count_elements(self.make_model(torch.float32))


def _with_adapters(make_base: Callable[[], nn.Module], rank: int) -> nn.Module:
    """Add PEFT's adapters on the meta device, as PEFT cannot move fake tensors; fill all with zeros
    on the default device. Raises `FP8BackendError` without PEFT."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise FP8BackendError(
            f"an estimate with LoRA needs PEFT: pip install peft ({error})"
        ) from None
    device = torch.empty(0).device
    with unset_fake_temporarily(), torch.device("meta"):
        model = make_base()
        inject_adapter_in_model(LoraConfig(r=rank, target_modules="all-linear"), model)
    filled: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in filled:
                dtype = torch.float32 if parameter.requires_grad else parameter.dtype
                new = torch.zeros(parameter.shape, dtype=dtype, device=device)
                filled[id(parameter)] = nn.Parameter(new, parameter.requires_grad)
            module._parameters[name] = filled.get(id(parameter))
        for name, buffer in module._buffers.items():
            module._buffers[name] = (
                None if buffer is None else torch.zeros_like(buffer, device=device)
            )
    return model


def count_elements(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def read_config(name: str | Path) -> Any:
    """Read a `config.json`, its folder, or that of a cached model, without network access. Raises
    `FP8BackendError`."""
    from transformers import AutoConfig

    is_file = os.path.exists(name)
    try:
        config = AutoConfig.from_pretrained(
            Path(name) if is_file else str(name), local_files_only=True
        )
    except Exception as error:  # transformers raises anything for a broken file
        reason = "not a configuration that transformers reads"
        if not is_file:
            reason = (
                "no such config.json or folder, and no model of this name in the local cache of "
                "transformers. Nothing is fetched: download its config.json, and name the file"
            )
        raise FP8BackendError(f"{shortened(str(name))}: {reason} ({first_line(error)})") from error
    config.use_cache = False
    return config


def from_transformers(name: str | Path) -> ModelShape:
    """Read a model for `read_config`. Raises `FP8BackendError`, also for one without a loss."""
    config = read_config(name)
    _model_class(config)
    return ModelShape(str(name), config)


def from_parameters(count: float) -> ModelShape:
    """Return a Llama of about this many parameters with the proportions of Llama 3 and a separate
    head."""
    from transformers import LlamaConfig

    vocabulary, step = (128256, 256) if count >= LARGE else (32000, 64)

    def sized(hidden: int) -> tuple[float, dict[str, int]]:
        mlp = int(3.5 * hidden)
        heads = hidden // (128 if hidden % 128 == 0 and hidden >= 1024 else 64)
        key_value_heads = next(each for each in (8, 4, 2, 1) if heads % each == 0)
        per_layer = hidden * (2 * hidden + 2 * (key_value_heads * hidden // heads) + 3 * mlp + 2)
        layers = round((count - 2 * vocabulary * hidden) / per_layer)
        if layers < 1:
            return math.inf, {}
        parameters = layers * per_layer + 2 * vocabulary * hidden
        proportion = hidden / layers / ASPECT
        sizes = {"hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers}
        sizes |= {"num_attention_heads": heads, "num_key_value_heads": key_value_heads}
        # a percent of parameters weighs as much as a tenth of the proportions
        return 10 * abs(parameters / count - 1) + max(proportion, 1 / proportion), sizes

    _, sizes = min(map(sized, range(step, 32 * 1024, step)), key=lambda candidate: candidate[0])
    if not sizes:
        raise FP8BackendError(
            f"{count:.3g} parameters are too few for a Llama with {vocabulary} tokens"
        )
    plain = {"max_position_embeddings": 2**20, "tie_word_embeddings": False, "use_cache": False}
    config = LlamaConfig(vocab_size=vocabulary, **sizes, **plain)
    shape = ModelShape("", config)
    shape.title = (
        f"Llama of {counted(config.num_hidden_layers, 'layer')}, width {config.hidden_size}, "
        f"MLP {config.intermediate_size}, {vocabulary} tokens ({readable_count(shape.parameters)} "
        "parameters)"
    )
    return shape


def parse_count(text: str) -> float:
    """Read a number of parameters such as 8B, 350M or 1.5e9. Raises `FP8BackendError` for anything
    else."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kmbt]?)\s*", text, re.IGNORECASE)
    try:
        count = float(match[1]) * _UNITS.get(match[2].upper(), 1)
    except (TypeError, ValueError):
        count = 0
    if not 1e5 <= count <= 1e15:
        raise FP8BackendError(
            f"--params {shortened(text)}: a number of parameters such as 8B, 350M or 1.5e9, from "
            "100K to 1000T"
        )
    return count


def readable_count(count: float) -> str:
    unit = next((unit for unit in "TBMK" if count >= _UNITS[unit]), "")
    return f"{count / _UNITS.get(unit, 1):.3g} {unit}".rstrip()


_TABLES = (
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
)


def _model_class(config: Any) -> Any:
    """Return a class for training, named by the configuration or of its type. Raises
    `FP8BackendError`."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    kind = getattr(config, "model_type", "?")
    tables = reversed(_TABLES) if getattr(config, "is_encoder_decoder", False) else _TABLES
    names = [
        *(getattr(config, "architectures", None) or ()),
        *(getattr(auto, table).get(kind) for table in tables),
    ]
    classes = [getattr(transformers, name, None) for name in names if isinstance(name, str)]
    # the first whose forward makes a loss of one input of known size
    for model_class in filter(None, classes):
        first = getattr(model_class, "main_input_name", None)
        arguments = inspect.signature(model_class.forward).parameters
        has_labels = "labels" in arguments and not any(
            name.endswith("_label") for name in arguments
        )
        is_sized = all(hasattr(config, field) for field in _SIZES.get(first, ()))
        if model_class.__name__.endswith(_WITH_LOSS.get(first, ())) and has_labels and is_sized:
            return model_class
    raise FP8BackendError(
        f"model type {kind!r}: transformers has no class with a loss for it that estimates are "
        "made of: language models (causal, masked, encoder-decoder, speech to text), and "
        "classifiers of texts or images"
    )
