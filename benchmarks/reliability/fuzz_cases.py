"""Generate seeded cases for `fuzz.py`: each is a JSON object, so a printed one can be run again.

Values outside JSON are written as `{"$": NAME}`, with NAME from `SPECIAL`. The grammars follow the
declared fields of recipes and the commands of `fp8-backends`, so a new field is part of them at
once.
"""

from __future__ import annotations

import collections
import decimal
import enum
import fractions
import hashlib
import itertools
import json
import math
import random
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
import yaml

from fp8_backends.checkpoints import manifest
from fp8_backends.compute import registry
from fp8_backends.compute.chips import PRODUCTS
from fp8_backends.compute.interface import Compute
from fp8_backends.recipes.fields import COMMON, FIELDS, OF_LEVELS, VARIABLES
from fp8_backends.recipes.sources import LAUNCHED, NAMES, PREFIX, REFUSED
from fp8_backends.tools.main import COMMANDS

Case = dict[str, Any]
Random = random.Random


# Values


class _Format(enum.Enum):
    HYBRID = "hybrid"
    E5M2 = "e5m2"


class _Faulty:
    """Raise the requested error."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")

    __eq__ = __bool__ = __len__ = __iter__ = __repr__
    __hash__ = object.__hash__


class _Text(str):
    pass


class _Backend(Compute):
    """Register a backend that runs nothing."""

    name, scalings, default_scaling = "fuzzed", ("delayed",), "delayed"
    availability = build = is_converted = engine = None


def _nested(levels: int) -> list:
    value: list = []
    for _ in range(levels):
        value = [value]
    return value


def _itself() -> list:
    value: list = []
    value.append(value)
    return value


def _function(module, name: str) -> bool:
    return True


SPECIAL: dict[str, Callable[[], Any]] = {
    "nan": lambda: math.nan,
    "inf": lambda: math.inf,
    "-inf": lambda: -math.inf,
    "2**63": lambda: 2**63,
    "10**400": lambda: 10**400,
    "10**5000": lambda: 10**5000,  # Python does not write it as text
    "1e30": lambda: 1e30,
    "bytes": lambda: b"max",
    "bytearray": lambda: bytearray(b"true"),
    "complex": lambda: 1j,
    "decimal": lambda: decimal.Decimal("NaN"),
    "fraction": lambda: fractions.Fraction(1, 3),
    "tuple": lambda: (True, False, False),
    "set": lambda: {"q_proj", "k_proj"},
    "range": lambda: range(10**12),
    "endless": lambda: itertools.repeat(True),
    "endless names": lambda: itertools.repeat("a"),
    "generator": lambda: (name for name in ("a", "b")),
    "deque": lambda: collections.deque(["a"]),
    "nested": lambda: _nested(3000),
    "itself": _itself,
    "object": object,
    "class": lambda: dict,
    "function": lambda: _function,
    "enum": lambda: _Format.HYBRID,
    "other enum": lambda: _Format.E5M2,
    "faulty": _Faulty,
    "text subclass": lambda: _Text("max"),
    "numpy int": lambda: numpy.int64(1),
    "numpy float": lambda: numpy.float32(1),
    "numpy bool": lambda: numpy.bool_(True),
    "numpy array": lambda: numpy.zeros(3),
    "numpy text": lambda: numpy.str_("max"),
    "scalar": lambda: torch.tensor(1),
    "tensor": lambda: torch.ones(3),
    "flags": lambda: torch.tensor([True, False, False]),
    "dtype": lambda: torch.float32,
    "path": lambda: Path("q_proj"),
    "long text": lambda: "x" * 100_000,
    "many names": lambda: [f"layer{i}" for i in range(5000)],
    "module": lambda: torch.nn.Linear(2, 2),
    "model": lambda: torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 4)),
    "pair": lambda: (torch.nn.Linear(2, 2), None),
    "parameter": lambda: torch.nn.Parameter(torch.ones(2, 2)),
    "optimizer": lambda: torch.optim.AdamW([torch.nn.Parameter(torch.ones(2, 2))]),
    "optimizer class": lambda: torch.optim.AdamW,
    "parameter list": lambda: list(torch.nn.Linear(2, 2).parameters()),
    "backend": lambda: _Backend,
    "backend without scalings": lambda: type("Lacking", (_Backend,), {"scalings": None}),
    "backend with odd fields": lambda: type("Odd", (_Backend,), {"fields": ("nosuch", 3)}),
    "backend with odd default": lambda: type("Odd", (_Backend,), {"default_scaling": "nosuch"}),
    "backend with odd levels": lambda: type("Odd", (_Backend,), {"levels": ("O9",)}),
    "abstract backend": lambda: Compute,
    "faulty factory": lambda: _function,
    "config": lambda: _torchao().Float8LinearConfig(),
    "rowwise config": lambda: _torchao().Float8LinearConfig.from_recipe_name("rowwise"),
}
"""Values by their name in a case; the functions make each one new."""


def _torchao():
    import torchao.float8

    return torchao.float8


def decoded(value: Any) -> Any:
    """Return the value of a case's JSON."""
    if isinstance(value, dict):
        if "$" in value:
            return SPECIAL[value["$"]]()
        return {name: decoded(each) for name, each in value.items()}
    return [decoded(each) for each in value] if isinstance(value, list) else value


WORDS = (
    *(
        "",
        " ",
        "auto",
        "native",
        "te",
        "ao",
        "msamp",
        "ms-amp",
        "torchao",
        "transformer_engine",
        "no",
        "None",
        "null",
    ),
    *(
        "delayed",
        "dynamic",
        "tensorwise",
        "current",
        "rowwise",
        "rowwise_with_gw_hp",
        "blockwise",
        "mxfp8",
        "window",
    ),
    *(
        "O0",
        "O1",
        "O2",
        "O3",
        "o2",
        "O4",
        "HYBRID",
        "E4M3",
        "e5m2",
        "max",
        "most_recent",
        "fp8",
        "plain",
        "bf16",
    ),
    *(
        "true",
        "False",
        "1",
        "0",
        "yes",
        "off",
        "raise",
        "warn",
        "stochastic",
        "nearest",
        "tensor",
        "block",
        "bound",
    ),
    *(
        "fp16",
        "fp32",
        "fp8_",
        "-1",
        "64",
        "1024",
        "+3",
        " 7 ",
        "1_000",
        "1e3",
        "0x10",
        "nan",
        "inf",
        "٣",
        "²",
        "1" * 99,
    ),
    *(
        "9223372036854775808",
        "9" * 5000,
        "q_proj",
        "model.layers.*.mlp.*",
        "a,b",
        ",",
        "[",
        "(",
        "['a']",
        "['a'",
        "(1",
    ),
    *(
        "(false, false, true)",
        "[true,true,true]",
        "true,false",
        "\x00",
        "\ufeffnative",
        "native\u200b",
        "ﬁ",
        "İ",
        "ß",
    ),
    *(
        "\ud800",
        "\udcff",
        "nаtive",
        "🙂",
        "x" * 3000,
        "%s",
        "{name}",
        "'",
        '"',
        "\n",
        "a\nb",
        "\t",
        "-" * 40,
        "[" * 500,
    ),
    *(
        "bf16_with_fp8_mixed",
        "fp16-with-fp8-delayed-scaling-mixed",
        "bf16_with_fp8_current_scaling_mixed",
    ),
    *(
        "((((" * 200,
        "['" + "a" * 3000,
        "['a', 1]",
        "[" + "(" * 300 + "'a'",
        "{'a': 1}",
        "b'max'",
        "['a', b'c']",
    ),
)
PLAIN = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    3,
    64,
    65,
    1024,
    10**6,
    10**6 + 1,
    0.5,
    1.0,
    -0.0,
    1e30,
    2**31,
    2**63,
    -(2**63),
)


def value(rng: Random, deep: int = 2) -> Any:
    """Any value, as a case holds it."""
    kind = rng.random()
    if kind < 0.35:
        return rng.choice(WORDS)
    if kind < 0.6:
        return rng.choice(PLAIN)
    if kind < 0.8 or not deep:
        return {"$": rng.choice(tuple(SPECIAL))}
    if kind < 0.93:
        return [value(rng, deep - 1) for _ in range(rng.choice((0, 1, 2, 3, 3, 4)))]
    return {rng.choice(WORDS): value(rng, deep - 1) for _ in range(rng.randint(0, 3))}


_GOOD: dict[str, tuple] = {
    "fp8_format": ("HYBRID", "e4m3", {"$": "enum"}),
    "margin": (0, 1, -3, "2", 64),
    "interval": (1, 5, "3", 10**6),
    "amax_history_len": (1, 16, 1024, "4"),
    "amax_compute_algo": ("max", "MOST_RECENT"),
    "override_linear_precision": ([False, False, True], {"$": "tuple"}, "(false, true, false)"),
    "autocast_dtype": ("bf16", "FP16", "fp32"),
    "gradient_comm": ("fp8", "plain"),
    "on_unproven": ("raise", "warn"),
    "monitor_every": (0, 1, "100"),
    "monitor_file": ("fp8_monitor.jsonl", "runs/a.jsonl"),
    "guard": ("off", "warn", "SKIP", "stop"),
    "saved_activations": ("off", "fp8", "FP8+attention", "none"),
    "rounding": ("stochastic", "nearest"),
    "implementation": ("native",),
    "include": ("q_proj", ["a", "b.*"], "a,b", {"$": "set"}, "+lm_head", ["+a", "+b"]),
    "exclude": ("q_proj", ["a", "b.*"], "a, b"),
    "module_filter_func": ({"$": "function"},),
    "config": ({"$": "config"}, {"$": "rowwise config"}),
    "opt_level": ("O1", "o2", "O3", "O0"),
    "scaling": ("delayed", "dynamic", "tensorwise", "rowwise", "blockwise", "mxfp8", "window"),
}


def good(rng: Random, name: str) -> Any:
    """Return a valid value of the field with this name; True or False for unknown fields."""
    return (
        backend(rng)
        if name == "backend"
        else rng.choice(_GOOD.get(name, (True, False, "true", "no")))
    )


# Strings


def backend(rng: Random) -> str:
    """Return a string of the grammar COMPUTE[:SCALING][+msamp[:LEVEL]], valid or nearly so."""
    words = (
        "delayed",
        "dynamic",
        "rowwise",
        "tensorwise",
        "current",
        "blockwise",
        "mxfp8",
        "window",
        "custom",
    )
    text = rng.choice(
        ("native", "native", "te", "ao", "msamp", "auto", "torchao", "transformer-engine", "ms-amp")
    )
    if rng.random() < 0.5:
        text += ":" + rng.choice(
            (*words, "O2") if text in ("native", "te") else (*words, "O1", "O2", "O3")
        )
    if rng.random() < 0.3:
        text += "+msamp" + rng.choice(("", ":O0", ":O1", ":O2", ":O3", ":o3", ":"))
    return text


def mutated(rng: Random, text: str, times: int = 3) -> str:
    """The text with a few characters or words of it changed, doubled, moved or cut."""
    for _ in range(rng.randint(0, times)):
        at = rng.randint(0, len(text))
        kind = rng.randrange(8)
        if kind == 0:
            text = text[:at] + rng.choice(string.printable) + text[at:]
        elif kind == 1:
            text = text[:at] + text[at + 1 :]
        elif kind == 2:
            text = text[:at] + rng.choice(WORDS) + text[at:]
        elif kind == 3:
            text = rng.choice(
                (
                    text.upper(),
                    text.title(),
                    text.swapcase(),
                    f" {text}\n",
                    text.replace(":", " : "),
                )
            )
        elif kind == 4:
            text = text[:at] + text[: rng.randint(0, 5)] + text[at:]
        elif kind == 5:
            text = (
                text[:at]
                + rng.choice(
                    (":", "+", "::", "+msamp", ":O2", "\u00a0", "\u0130", "\x00", "-", "_")
                )
                + text[at:]
            )
        elif kind == 6:
            text = text * rng.choice((1, 2, 400)) if len(text) < 100 else text
        else:
            text = text[:at]
    return text


def strings(rng: Random) -> Case:
    return {"text": mutated(rng, backend(rng))}


# Recipes

HANDLERS = (
    "FP8RecipeKwargs",
    "dict",
    "TERecipeKwargs",
    "AORecipeKwargs",
    "MSAMPRecipeKwargs",
    "NativeRecipeKwargs",
)
_FOREIGN = (
    *("accelerate.TERecipeKwargs", "accelerate.AORecipeKwargs", "accelerate.MSAMPRecipeKwargs"),
    *(
        "te.DelayedScaling",
        "te.Float8CurrentScaling",
        "te.MXFP8BlockScaling",
        "te.Float8BlockScaling",
    ),
)
_THEIRS = (*NAMES, *REFUSED, "precision", "mixed_precision")
_COMMON = tuple(COMMON)
_OF_LEVELS = ("opt_level", *OF_LEVELS)
_OF_BACKENDS = {name: (*registry.get_compute(name).fields, *_COMMON) for name in registry.BUILT_IN}
_FIELDS_OF_HANDLER = {
    "TERecipeKwargs": (*_OF_BACKENDS["te"], "scaling"),
    "AORecipeKwargs": (*_OF_BACKENDS["ao"], "scaling"),
    "MSAMPRecipeKwargs": (*_OF_LEVELS, *_COMMON),
    "NativeRecipeKwargs": (*_OF_BACKENDS["native"], "scaling"),
}


def _fields_of(text: str) -> tuple[str, ...]:
    """Return likely fields of this backend string."""
    head = {"torchao": "ao", "transformer-engine": "te"}.get(
        text.partition(":")[0].partition("+")[0], text[:2]
    )
    return _OF_BACKENDS.get(head, _OF_BACKENDS["native"]) + (
        _OF_LEVELS[1:] if "msamp" in text else ()
    )


def recipes(rng: Random) -> Case:
    """Return one to six fields of any handler; one may have any value."""
    handler = rng.choice(_FOREIGN) if rng.random() < 0.1 else rng.choice(HANDLERS)
    fields: dict[str, Any] = {}
    names = _FIELDS_OF_HANDLER.get(handler, tuple(FIELDS))
    if handler in ("FP8RecipeKwargs", "dict") and rng.random() < 0.9:
        fields["backend"] = backend(rng)
        names = _fields_of(fields["backend"])
    names = names if rng.random() < 0.8 else tuple(FIELDS)
    bad = rng.random() < 0.5
    for _ in range(rng.choice((1, 1, 2, 2, 3, 6))):
        name = rng.choice(names)
        fields[name] = good(rng, name)
    if bad:
        fields[rng.choice(tuple(fields))] = value(rng)
    if rng.random() < 0.1:
        fields[rng.choice(_THEIRS)] = value(rng)
    if rng.random() < 0.05:
        fields[mutated(rng, rng.choice(tuple(FIELDS)))] = value(rng)
    return {"handler": handler, "fields": fields}


# Environment

FIELD_OF_SUFFIX = {suffix: field.name for suffix, (field, _) in VARIABLES.items()}
_LAUNCHERS = (
    "ACCELERATE_USE_CPU",
    "WORLD_SIZE",
    "PMI_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "FP8_BACKENDS_DISABLE",
)


def _text(rng: Random, name: str) -> str:
    """Return the text of a field in an environment, a flag or a file."""
    chosen = good(rng, name) if rng.random() < 0.5 else rng.choice((*WORDS, *map(str, PLAIN)))
    return str(decoded(chosen)) if not isinstance(chosen, str) else chosen


def environment(rng: Random) -> Case:
    """Return variables ACCELERATE_FP8_*, or FP8_BACKENDS_RECIPE with JSON or almost JSON, or
    Accelerate's own."""
    kind = rng.random()
    if kind < 0.6:
        fields = {
            name: _text(rng, name) for name in rng.sample(tuple(FIELDS), rng.choice((1, 2, 3)))
        }
        found = {PREFIX + (FIELDS[name].own_suffix): text for name, text in fields.items()}
        if rng.random() < 0.7:
            found[f"{PREFIX}BACKEND"] = backend(rng)
        if rng.random() < 0.2:
            found[mutated(rng, rng.choice(tuple(found)))] = rng.choice(WORDS)
    elif kind < 0.9:
        fields = {
            name: good(rng, name) if rng.random() < 0.5 else _jsonable(rng)
            for name in rng.sample(tuple(FIELDS), 2)
        }
        text = yaml.safe_dump(_plain(fields)) if rng.random() < 0.1 else json.dumps(_plain(fields))
        found = {
            LAUNCHED: rng.choice(
                (text, text, mutated(rng, text), "[" * 100_000, "%7B" + text[1:], "", "[]", "{}")
            )
        }
    else:
        found = {name: rng.choice(WORDS) for name in rng.sample(_LAUNCHERS, 2)}
    return {
        "variables": {
            name: text for name, text in found.items() if name and _is_possible(name + text)
        }
    }


def _is_possible(text: str) -> bool:
    """Tell if the environment can hold it."""
    return "\x00" not in text and not any("\ud800" <= character < "\udc80" for character in text)


def _plain(found: Any) -> Any:
    """Remove values impossible in a file."""
    if isinstance(found, dict):
        return "x" if "$" in found else {str(name): _plain(each) for name, each in found.items()}
    return [_plain(each) for each in found] if isinstance(found, list) else found


def _jsonable(rng: Random) -> Any:
    return _plain(value(rng))


# Files

_TEMPLATES: dict[str, dict[str, Any]] = {
    "accelerate": {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "NO",
        "mixed_precision": "fp8",
        "num_processes": 1,
        "fp8_config": {"backend": "native:delayed", "margin": 1},
    },
    "wizard": {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "FSDP",
        "fp8_config": {
            "backend": "AO",
            "enable_fsdp_float8_all_gather": True,
            "pad_inner_dim": True,
        },
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": True,
            "fsdp_activation_checkpointing": False,
        },
        "machine_rank": 0,
        "mixed_precision": "fp8",
        "num_machines": 1,
        "num_processes": 4,
    },
    "deepspeed": {
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"zero_stage": 3, "gradient_clipping": 1.0},
        "mixed_precision": "fp8",
        "fp8_config": {"backend": "msamp", "optimization_level": "O2"},
        "dynamo_config": {"dynamo_backend": "INDUCTOR"},
    },
    "axolotl": {
        "base_model": "NousResearch/Llama-3.2-1B",
        "datasets": [{"path": "tatsu-lab/alpaca", "type": "alpaca"}],
        "sequence_len": 2048,
        "micro_batch_size": 1,
        "bf16": True,
        "fp8": True,
        "fp8_config": {"recipe": "rowwise"},
        "torch_compile": True,
        "optimizer": "adamw_torch_fused",
        "gradient_checkpointing": True,
        "fsdp_version": 2,
        "fsdp_config": {"offload_params": False, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
    },
    "trl": {
        "model_name_or_path": "Qwen/Qwen2.5-0.5B",
        "dataset_name": "trl-lib/Capybara",
        "output_dir": "out",
        "per_device_train_batch_size": 2,
        "learning_rate": 2.0e-5,
        "bf16": True,
        "optim": "adamw_torch",
    },
}
_KEYS = (
    *FIELDS,
    "FP8_MARGIN",
    "fp8_backend",
    "amax_history_length",
    "optimization_level",
    "number_format",
    "all_gather",
)
_ODD_LINES = (
    *(
        "margin: !!python/object:os.system x",
        "? [1, 2]\n: x",
    ),
    *(
        "? {a: b}\n: x",
        "1: 2",
        "1.5: 3",
        "null: 4",
        "true: 5",
        "\t: tab",
        "a: b: c",
        "'",
        '"',
        "--- x",
    ),
    *("a: 2024-01-01", "a: 2024-01-01 10:00:00", "a: .nan"),
    *(
        "a: 0o17",
        "a: 1_000",
        "a: 190:20:30",
        "<<: {mixed_precision: fp8}",
        "<<: [1]",
        "<<: x",
        "%YAML 1.1",
        "...",
        "a: |",
    ),
    *(
        "mixed_precision: fp8",
        "mixed_precision: bf16",
        "mixed_precision: [fp8]",
        "fp8_config: [a]",
        "fp8_config: fp8",
    ),
    *(
        "fp8_config: null",
        "fp8_config: {1: 2}",
        "fp8_config: {backend: native, backend: te}",
        "num_processes: .inf",
    ),
    *("num_processes: 1e30", "num_processes: 9223372036854775808", "num_processes: -1"),
    *(
        "distributed_type: {a: b}",
        "compute_environment: [x]",
        "a: !!int x",
        "a: !!float x",
    ),
    *(
        "a: !!timestamp x",
        "a: !!bool x",
        "a: !!null x",
        "a: !!merge x",
        "a: !!map [1]",
        "a: !!seq {a: 1}",
        "a: !foo x",
    ),
    *(
        "torch_compile: [true]",
        "deepspeed: a.json",
        "deepspeed: 1",
        "deepspeed: .",
        "sequence_len: 1e400",
        "optimizer: 3",
    ),
    *(
        "attn_implementation: [x]",
        "expert_parallel_size: 0",
        "dp_shard_size: 9223372036854775808",
        "fsdp: [full_shard]",
    ),
    *(
        "tensor_parallel_size: 99999999999999999999",
        "dp_replicate_size: 4611686018427387904",
        "gradient_checkpointing: {a: 1}",
    ),
    *(
        "torch_compile_backend: 3",
        "torch_compile_mode: {}",
        "fsdp_version: [1]",
        "fsdp_version: two",
        "a: 1\na: 2",
        "\x00",
    ),
    *(
        "parallelism_config: {parallelism_config_tp_size: x}",
        "dynamo_config: {backend: [x]}",
        "dynamo_backend: {a: b}",
    ),
    *(
        "optimizer: {a: b}",
        "fsdp_config: {fsdp_version: .nan}",
        "deepspeed_config: {deepspeed_config_file: 3}",
    ),
    *(
        "deepspeed_config: {deepspeed_config_file: []}",
        "deepspeed_config: {zero_stage: 9}",
        "\u2028: x",
        "\x85",
        "\ud800: 1",
    ),
)


_WHOLE = (
    *(
        "",
        "\n",
        "#",
        "---\n---\n",
        "[]",
        "null",
        "1",
        "x",
        "{}",
        "{",
        "[" * 200,
        "[" * 100_000,
        "a: " * 5000,
    ),
    *("- " * 5000, "{a: " * 3000, "? " * 3000, "!!python/object:x {}"),
)
KINDS = (
    "directory",
    "missing",
    "unreadable",
    "/dev/null",
    "broken link",
    "link to itself",
)


def files(rng: Random) -> Case:
    """A configuration file, for `config` and `launch`."""
    if rng.random() < 0.02:
        return {"kind": rng.choice(KINDS), "content": "", "arguments": []}
    arguments = _config_arguments(rng) if rng.random() < 0.2 else []
    name, encoding = "c.yaml", "utf-8"
    if rng.random() < 0.08:
        content = rng.choice(_WHOLE)
    else:
        found = _filled(rng, {**_TEMPLATES[rng.choice(tuple(_TEMPLATES))]})
        content = yaml.safe_dump(found, sort_keys=False)
        if rng.random() < 0.1:
            name, content = "c.json", json.dumps(found)
        if rng.random() < 0.35:
            lines = content.splitlines()
            lines.insert(rng.randint(0, len(lines)), rng.choice(_ODD_LINES))
            content = "\n".join(lines) + "\n"
        if rng.random() < 0.15:
            content = mutated(rng, content, 6)
    if rng.random() < 0.05:
        encoding = rng.choice(("utf-16", "utf-8-sig", "utf-32", "latin-1", "cp037"))
    if rng.random() < 0.1:
        arguments += ["--from", rng.choice(("accelerate", "axolotl"))]
    return {"kind": name, "encoding": encoding, "content": content, "arguments": arguments}


def _filled(rng: Random, found: dict[str, Any]) -> dict[str, Any]:
    """A template with some fields of a recipe and some values changed."""
    block = dict(found.get("fp8_config") or {})
    if rng.random() < 0.6 and "recipe" not in block:
        block = {} if rng.random() < 0.2 else {"backend": backend(rng)}
        for _ in range(rng.randint(0, 3)):
            key = rng.choice(_KEYS)
            block[key] = _plain(good(rng, key)) if rng.random() < 0.7 else _jsonable(rng)
    if block:
        found["fp8_config"] = block
    if rng.random() < 0.3:
        key = rng.choice(tuple(found))
        if isinstance(found[key], dict) and found[key] and rng.random() < 0.7:
            found[key] = {**found[key], rng.choice(tuple(found[key])): _jsonable(rng)}
        else:
            found[key] = _jsonable(rng)
    return found


def _config_arguments(rng: Random) -> list[str]:
    options = (
        *(
            ["--json"],
            ["--check"],
            ["--chip", rng.choice((*PRODUCTS, *WORDS))],
            ["--backend", mutated(rng, backend(rng))],
        ),
        *(
            ["--num_processes", rng.choice(("1", "8", "0", "-1", "x", "9" * 30, "1.5", "²"))],
            ["--from", rng.choice(WORDS)],
        ),
    )
    return [
        word.replace("\x00", "")
        for option in rng.sample(options, rng.randint(1, 2))
        for word in option
    ]


# Commands

_OPTIONS: dict[str, Callable[[Random], list[list[str]]]] = {
    "doctor": lambda rng: [["--chip", rng.choice((*PRODUCTS, *WORDS))], ["--json"], ["--chips"]],
    "estimate": lambda rng: [
        [
            "--params",
            rng.choice(("0", "-1", "1e400", "nan", "inf", "1K", "9" * 400, "8Q", "1e-5", *WORDS)),
        ],
        ["--devices", _number(rng)],
        ["--batch", _number(rng)],
        ["--sequence", _number(rng)],
        ["--chip", rng.choice((*PRODUCTS, *WORDS, "0", "-1", "1e400", "64"))],
        ["--sharding", ",".join(rng.choices(("none", "ddp", "fsdp2", "zero3", *WORDS), k=2))],
        ["--backend", ",".join((mutated(rng, backend(rng)), "nosuch"))],
        ["--weights", rng.choice(("fp32", "bf16", *WORDS))],
        ["--json"],
        [rng.choice(("/nowhere", "config.json", ".", "a/b", *WORDS))],
    ],
    "compare": lambda rng: [
        [
            rng.choice(("--steps", "--batch", "--lr", "--seeds", "--nproc", "--sequence")),
            _number(rng),
        ],
        ["--backends", mutated(rng, backend(rng))],
        ["--model", rng.choice(("/nowhere", *WORDS))],
        ["--text", rng.choice(("/nowhere", "/dev/null", *WORDS))],
        ["--reference", rng.choice(WORDS)],
    ],
    "examples": lambda rng: [
        [rng.choice((*WORDS, "trainer", "ema.py"))],
        [rng.choice(("/nowhere/x", "x.txt", *WORDS))],
    ],
    "config": lambda rng: [_config_arguments(rng), [rng.choice(("/nowhere", ".", *WORDS))]],
    "launch": lambda rng: [
        _flag(rng),
        _flag(rng),
        ["--fp8_backend", mutated(rng, backend(rng), 1)],
    ],
    "monitor": lambda rng: [
        [rng.choice(("/nowhere", ".", "/dev/zero", "/dev/null", *_FILES, *WORDS))],
        ["--out", rng.choice(("page.html", ".", "/nowhere/page.html", *_FILES, *WORDS))],
        ["--worst", _number(rng)],
    ],
    "checkpoint": lambda rng: [
        [rng.choice((".", "checkpoint_1", "/nowhere", "/dev/zero", *_FILES, *WORDS))],
        ["--json"],
    ],
    "advise": lambda rng: [
        [rng.choice(("--batches", "--batch", "--sequence", "--max_trials")), _number(rng)],
        ["--min_flops_share", _number(rng)],
        ["--backend", mutated(rng, backend(rng))],
        ["--model", rng.choice(("/nowhere", ".", *_FILES, *WORDS))],
        ["--config_file", rng.choice(("/nowhere", ".", *_FILES, *WORDS))],
        ["--json"],
    ],
}
"""Arguments of each command. Other commands get a request for help, and an unknown flag."""

_ENDS = {
    "doctor": ["--no-test"],
    "compare": ["--text", "/nowhere"],
    "launch": ["/nowhere/script.py"],
    "advise": ["--text", "/nowhere"],
}
"""Ends of the arguments that prevent training: no test, a missing script or text."""

_MANIFEST = {
    "format": 1,
    "backend": "native:delayed",
    "recipe": {"backend": "native:delayed"},
    "step": 3,
    "world_size": 1,
    "time": "2026-01-01T00:00:00+00:00",
    "versions": {
        "fp8-backends": "1",
        "torch": "2.13.0",
        "accelerate": "1.15.0",
        "python": "3.11.2",
    },
    "files": {
        "a.bin": {"bytes": 1, "sha256": hashlib.sha256(b"x").hexdigest()},
        "optimizer.bin": {"bytes": 0, "sha256": hashlib.sha256(b"").hexdigest()},
    },
}
_CAST = {
    "format": "e4m3",
    "amax": 3.5,
    "scale": 64.0,
    "elements": 512,
    "counted": 512,
    "flushed": 0.01,
    "saturated": 0.0,
    "sqnr_db": 30.5,
    "exponents": [-3, 0],
    "binades": [1, 2, 3, 4],
}
_STORED = {
    name: number
    for name, number in _CAST.items()
    if name not in ("flushed", "saturated", "sqnr_db")
}
_SAMPLE = {
    "step": 5,
    "recipe": "native:delayed",
    "casts": "native",
    "tensors": {
        "0": {"input": _CAST, "weight": _CAST},
        "1": {"exp_avg": {**_STORED, "zeros": 0.5, "at_max": 0.0}},
    },
    "not_seen": ["2"],
    "seconds": 0.1,
}
_MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 64,
}


def _monitored(rng: Random) -> str:
    """Return a monitor's file of one to three samples, some of them damaged."""
    lines = [
        json.dumps(_damaged(rng, {**_SAMPLE, "step": step})) for step in range(rng.randint(1, 3))
    ]
    return "\n".join(mutated(rng, line) if rng.random() < 0.2 else line for line in lines)


def _manifest(rng: Random) -> str:
    """Return a manifest, damaged before its checksum, after it, or not at all."""
    found = _damaged(rng, _MANIFEST)
    text = manifest._text(found).decode() if isinstance(found, dict) else json.dumps(found)
    return mutated(rng, text) if rng.random() < 0.3 else text


def _damaged(rng: Random, found: Any) -> Any:
    """The same JSON with one value in it changed or left out."""
    if rng.random() < 0.15 or not isinstance(found, dict) or not found:
        return _jsonable(rng)
    key = rng.choice(tuple(found))
    kind = rng.random()
    if kind < 0.1:
        return {name: each for name, each in found.items() if name != key}
    if kind < 0.2:
        return {**found, rng.choice((*WORDS[:80], "../a", "/dev/zero")): found[key]}
    return {**found, key: _damaged(rng, found[key])}


_FILES: dict[str, Callable[[Random], str]] = {
    "fp8_monitor.jsonl": _monitored,
    "checkpoint_1/fp8_manifest.json": _manifest,
    ".checkpoint_2.saving/.replaced/fp8_manifest.json": _manifest,
    ".checkpoint_2.saving/checkpoint_2/fp8_manifest.json": _manifest,
    "checkpoint_3/fp8_backend.json": lambda rng: json.dumps(
        _damaged(rng, {"manifest": 1, "backend": "native"})
    ),
    "checkpoint-4/trainer_state.json": lambda rng: json.dumps(_damaged(rng, {"global_step": 4})),
    "config.json": lambda rng: mutated(
        rng, json.dumps(_damaged(rng, _MODEL)), rng.choice((0, 0, 2))
    ),
    "c.yaml": lambda rng: yaml.safe_dump(_filled(rng, {**_TEMPLATES["accelerate"]})),
}
"""Files read by commands, by path; `checkpoint_1` has the files of its manifest."""
_READ = {
    "monitor": ("fp8_monitor.jsonl",),
    "checkpoint": tuple(name for name in _FILES if "checkpoint" in name),
    "advise": ("config.json", "c.yaml"),
}


def _files_of(rng: Random, command: str) -> dict[str, str]:
    """Return the files in a command's folder."""
    if rng.random() < 0.1:
        return {}
    found = {name: _FILES[name](rng) for name in _READ.get(command, ())}
    return found | (
        {"checkpoint_1/a.bin": "x", "checkpoint_1/optimizer.bin": ""}
        if command == "checkpoint"
        else {}
    )


def _number(rng: Random) -> str:
    return rng.choice(
        (
            "1",
            "2",
            "0",
            "-1",
            "1.5",
            "x",
            "",
            "1e3",
            "9" * 30,
            "9" * 5000,
            "nan",
            "-inf",
            "0x1",
            "\u00b2",
        )
    )


def _flag(rng: Random) -> list[str]:
    """A flag of `launch`: of a recipe, or of Accelerate's own."""
    if rng.random() < 0.75:
        name = rng.choice(tuple(FIELDS))
        flag = f"--fp8_{FIELDS[name].own_suffix.lower()}"
        flag = (
            flag.replace("_", "-")
            if rng.random() < 0.2
            else mutated(rng, flag, 1)
            if rng.random() < 0.1
            else flag
        )
        return [flag, _text(rng, name)] if rng.random() < 0.9 else [flag]
    options = (
        "--num_processes",
        "--num_machines",
        "--mixed_precision",
        "--config_file",
        "--gpu_ids",
        "--fsdp_version",
    )
    return [rng.choice(options), rng.choice(("2", "0", "fp8", "bf16", "all", ".", *WORDS))]


def commands(rng: Random) -> Case:
    """Return the arguments of a command of `fp8-backends`, without training."""
    command = rng.choice(tuple(COMMANDS))
    if command not in _OPTIONS or rng.random() < 0.03:
        return {
            "argv": rng.choice(
                ([command, "--help"], [command, "--nosuch"], [mutated(rng, command), "--help"])
            )
        }
    found = _OPTIONS[command](rng)
    chosen = rng.sample(found, rng.randint(1, min(3, len(found))))
    argv = [command, *(word for option in chosen for word in option), *_ENDS.get(command, [])]
    return {"argv": [word.replace("\x00", "") for word in argv], "files": _files_of(rng, command)}


# Functions

CALLS: dict[str, tuple[str, ...]] = {
    "prepare": ("model", "optimizer", "spec"),
    "initialize": ("model", "optimizer", "opt_level", "use_te"),
    "audit": ("model", "optimizer"),
    "validate": (
        *(
            "spec",
            "model",
            "parallel",
            "compiled",
            "activation_checkpointing",
            "attention",
            "sequence_length",
        ),
        *(
            "vocab_size",
            "optimizer",
            "cpu_ram_efficient_loading",
            "world_size",
            "zero_stage",
            "tensor_parallel",
        ),
        *("quantized_base", "chip"),
    ),
    "export": ("model", "folder", "format", "max_shard_size"),
    "plan": ("spec",),
    "resolve": ("spec",),
    "plain_weights": ("model",),
    "restore": ("model",),
    "dequantize": ("model", "dtype"),
    "keep_weight_casts": ("model", "keep"),
    "whole_states": ("optimizer", "receives", "moments"),
    "register_backend": ("name", "factory", "replace"),
    "estimate": ("backends", "shardings", "batch", "sequence", "devices", "memory", "weights"),
}
"""Public functions with their arguments, the required ones first."""

_ARGUMENTS: dict[str, tuple] = {
    "model": ({"$": "model"},),
    "optimizer": ({"$": "optimizer"}, None),
    "spec": ("native", "native:delayed", "te", None, {"backend": "native", "exclude": "0"}),
    "opt_level": ("O1",),
    "format": ("finegrained_fp8",),
    "folder": ("/nowhere/export",),
    "max_shard_size": ("1GB",),
    "parallel": ("ddp", "none"),
    "compiled": ("full",),
    "attention": ("sdpa",),
    "name": ("fuzzed", "native", "Fuzzed-1"),
    "factory": tuple(
        {"$": name} for name in SPECIAL if "backend" in name or name in ("class", "faulty factory")
    ),
    "chip": ("h100",),
    "dtype": ({"$": "dtype"}, None),
    "backends": (["nosuch"],),
    "shardings": (["none"],),
    "weights": ("fp32",),
}


def calls(rng: Random) -> Case:
    """Return a call of a public function, with one arbitrary argument and valid ones otherwise."""
    function = rng.choice(tuple(CALLS))
    names = CALLS[function]
    chosen = {*names[:2], *rng.sample(names, min(len(names), 2))}
    arguments = {
        name: rng.choice(_ARGUMENTS.get(name, (1, True))) for name in names if name in chosen
    }
    if rng.random() < 0.8:
        arguments[rng.choice(tuple(arguments))] = value(rng, 1)
    return {"function": function, "fields": arguments}


GRAMMARS: dict[str, tuple[Callable[[Random], Case], float]] = {
    "strings": (strings, 0.15),
    "recipes": (recipes, 0.3),
    "environment": (environment, 0.13),
    "files": (files, 0.22),
    "commands": (commands, 0.1),
    "functions": (calls, 0.1),
}
"""The generator of each area, and its share of the cases."""


def cases(count: int, seed: int) -> list[Case]:
    """Return this many cases, reproducible for a seed; cases of one area do not depend on the
    others."""
    made = []
    for area, (grammar, share) in GRAMMARS.items():
        for index in range(max(1, round(count * share))):
            made.append({"area": area, **grammar(random.Random(f"{seed} {area} {index}"))})
    return made
