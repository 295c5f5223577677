"""Fuzz inputs: bad ones must end in an error of this package, and no field may be ignored.

Backend strings, recipes, the environment, configuration files, commands and calls of public
functions each work, or are refused by a message of at most 2,000 characters with the fault's name.
Accepted input keeps its meaning: every field is in the recipe, and the recipe survives a file, the
environment, flags, a pickle. The grammars follow the declared fields and commands, so a new one is
part of them at once.
"""

from __future__ import annotations

import contextlib
import decimal
import enum
import functools
import hashlib
import inspect
import io
import itertools
import json
import logging
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import accelerate.utils
import numpy
import pytest
import torch
import yaml
from accelerate.commands import launch as commands_launch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from stress.harness import STRESS
from stress.oracle import BACKENDS, check_round_trips, check_seen, means
from torchao.float8 import Float8LinearConfig

import fp8_backends
from fp8_backends import FP8BackendError, FP8RecipeKwargs, preparation, resolve
from fp8_backends.accelerate_plugin import launch
from fp8_backends.compute import registry
from fp8_backends.compute.chips import CARDS
from fp8_backends.compute.interface import Compute
from fp8_backends.convert import stored_weights
from fp8_backends.recipes.fields import COMMON, FIELDS, OF_LEVELS, VARIABLES
from fp8_backends.recipes.handlers import code_over_launch, from_environment
from fp8_backends.recipes.sources import (
    LAUNCHED,
    PREFIX,
    REFUSED_NAMES,
    SYNONYMS,
    environment_source,
)
from fp8_backends.tools import config, main

LONGEST = 2000
"""Characters of a message."""
SECONDS = 2.0
"""CPU seconds of a case. A longer one hangs."""


class Refused(Exception):
    """End a case that the package refused well."""


class Hang(BaseException):
    """Raised by the alarm. No handler of the package catches it."""


def accepted(function: Callable, *words: Any) -> Any:
    """Return the function's result. A refusal must be short, and name one of these words."""
    try:
        return function()
    except FP8BackendError as error:
        said = str(error)
        assert len(said) <= LONGEST, f"a message of {len(said)} characters"
        texts = [word for word in words if isinstance(word, str)]
        forms = [
            form for text in texts for form in (text, repr(text)[1:-1], text.replace("-", "_"))
        ]
        named = any(form[:20].rstrip("s") in said for form in forms)
        assert named or not forms, f"names nothing of the input: {said}"
        raise Refused from None


@contextlib.contextmanager
def ends_soon():
    def alarm(number: int, frame: Any) -> None:
        raise Hang(f"{frame.f_code.co_filename}:{frame.f_lineno}")

    before = signal.signal(signal.SIGVTALRM, alarm)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    except Hang as hang:
        raise AssertionError(f"no end after {SECONDS} s, in {hang}") from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def fuzzed(check: Callable, **strategies: st.SearchStrategy) -> Callable:
    """Return a test of many cases."""

    @pytest.mark.nightly
    @pytest.mark.usefixtures("loaded")
    @pytest.mark.filterwarnings("ignore")
    @settings(
        max_examples=35 * STRESS,
        phases=[*Phase][:-1],  # the last, explain, traces each line
        suppress_health_check=[*HealthCheck],
    )
    @given(**strategies)
    @functools.wraps(check)
    def test(**case):
        with contextlib.suppress(Refused), ends_soon():
            check(**case)

    return test


@pytest.fixture(scope="module")
def loaded():
    """Load the commands' modules before the time of a case, and silence messages on valid input."""
    logging.disable(logging.CRITICAL)
    for command, rest in ENDS.items():
        run_command([command, *rest])
    yield
    logging.disable(logging.NOTSET)


# Values


class Format(enum.Enum):
    HYBRID = "hybrid"


class Faulty:
    def __repr__(self) -> str:
        raise RuntimeError("no text")

    __eq__ = __bool__ = __len__ = __iter__ = __repr__
    __hash__ = object.__hash__


class Fuzzed(Compute):
    """A backend that runs nothing."""

    name, scalings, default_scaling = "fuzzed", ("delayed",), "delayed"
    availability = build = is_converted = engine = None


def nested(levels: int) -> list:
    return [nested(levels - 1)] if levels else []


def choose(module: Any, name: str) -> bool:
    return True


def lacking(**attributes: Any) -> type:
    return type("Lacking", (Fuzzed,), attributes)


ODD: dict[str, Callable[[], Any]] = {
    "10**5000": lambda: 10**5000,  # Python does not write it as text
    "decimal": lambda: decimal.Decimal("NaN"),
    "set": lambda: {"q_proj", "k_proj"},
    "endless": lambda: itertools.repeat(True),
    "generator": lambda: (name for name in "ab"),
    "nested": lambda: nested(900),
    "object": object,
    "class": lambda: dict,
    "function": lambda: choose,
    "enum": lambda: Format.HYBRID,
    "faulty": Faulty,
    "numpy array": lambda: numpy.zeros(3),
    "tensor": lambda: torch.ones(3),
    "dtype": lambda: torch.float32,
    "long text": lambda: "x" * 100_000,
    "module": lambda: torch.nn.Linear(2, 2),
    "model": lambda: torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 4)),
    "optimizer": lambda: torch.optim.AdamW([torch.nn.Parameter(torch.ones(2, 2))]),
    "backend": lambda: Fuzzed,
    "abstract backend": lambda: Compute,
    "backend without scalings": lambda: lacking(scalings=None),
    "backend with odd fields": lambda: lacking(fields=("nosuch", 3)),
    "backend with odd levels": lambda: lacking(levels=("O9",)),
    "config": lambda: Float8LinearConfig.from_recipe_name("rowwise"),
}


class Odd(NamedTuple):
    """Stand for a value that a failing example prints by its name, and each case makes anew."""

    name: str


def made(value: Any) -> Any:
    if isinstance(value, Odd):
        return ODD[value.name]()
    if isinstance(value, dict):
        return {name: made(each) for name, each in value.items()}
    return [made(each) for each in value] if isinstance(value, list) else value


WORDS = (
    *"auto native te ao msamp ms-amp no None null delayed dynamic current rowwise mxfp8".split(),
    *"O0 O2 o3 O9 HYBRID E4M3 max most_recent fp8 plain bf16 fp16 fp32 true False off raise".split(),
    *"fp8_ -1 0 1 64 +3 1_000 1e3 1e400 0x10 nan -inf ٣ ² q_proj model.layers.*.mlp.* a,b".split(),
    *"[ ( , ['a'] (1 (false,false,true) native\u200b nаtive ﬁ İ 🙂 %s {name} ' \" /nowhere".split(),
    *("", " ", " 7 ", "\n", "a\nb", "\x00", "\ud800", "\ufeffnative", "{'a': 1}", "['a', 1]"),
    *("9" * 5000, "x" * 3000, "[" * 500, "((((" * 200, "['" + "a" * 3000),
)
words = st.sampled_from(WORDS) | st.text(max_size=8)
plain = st.none() | st.booleans() | st.integers() | st.floats() | words
odd = st.sampled_from([Odd(name) for name in ODD])


def values(leaves: st.SearchStrategy) -> st.SearchStrategy:
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=3),
        max_leaves=6,
    )


anything, json_values = values(plain | odd), values(plain)


@st.composite
def edited(draw, texts: st.SearchStrategy, times: int = 3) -> str:
    """Draw a text with a few parts cut, inserted or repeated."""
    text = draw(texts)
    for _ in range(draw(st.integers(0, times))):
        start, end = sorted(draw(st.tuples(*[st.integers(0, len(text))] * 2)))
        end = draw(st.sampled_from([start, start + 1, end]))
        part = draw(words | st.sampled_from([":", "+", "+msamp", ":O2", text[:5]]))
        text = text[:start] + part + text[end:]
    return draw(st.sampled_from([text, text, text.upper(), f" {text}\n"]))


backends = st.builds(
    lambda *parts: "".join(parts),
    st.sampled_from("native native te ao msamp auto torchao transformer-engine ms-amp".split()),
    st.sampled_from(
        ["", *":delayed :dynamic :rowwise :tensorwise :blockwise :mxfp8 :O2 :O3".split()]
    ),
    st.sampled_from(["", "", "", *"+msamp +msamp:O1 +msamp:O2 +msamp:o3 +msamp:".split()]),
)
GOOD = {
    "fp8_format": "HYBRID e4m3",
    "margin": "0 1 -3 64",
    "interval": "1 5 1000000",
    "amax_history_len": "1 16 1024",
    "amax_compute_algo": "max MOST_RECENT",
    "override_linear_precision": "(false,true,false) true,false,false",
    "autocast_dtype": "bf16 FP16 fp32",
    "gradient_comm": "fp8 plain",
    "on_unproven": "raise warn",
    "monitor_every": "0 1 100",
    "monitor_file": "fp8_monitor.jsonl runs/a.jsonl",
    "guard": "off warn SKIP stop",
    "saved_activations": "off fp8 FP8+attention none",
    "rounding": "stochastic nearest",
    "implementation": "native",
    "include": "q_proj a,b.* +lm_head",
    "exclude": "q_proj a,b.*",
    "opt_level": "O1 o2 O3 O0",
    "scaling": "delayed dynamic tensorwise rowwise blockwise mxfp8 window",
}
OBJECTS = {
    "include": (["a", "b.*"], Odd("set"), ["+a", "+b"]),
    "margin": (2, -1),
    "fp8_format": (Odd("enum"),),
    "override_linear_precision": ([True, False, False],),
    "module_filter_func": (Odd("function"),),
    "config": (Odd("config"),),
}


def valid(name: str, texts: dict[str, str], objects: bool = True) -> st.SearchStrategy | None:
    """Return valid values of a field or an argument."""
    choices = [*texts.get(name, "").split(), *(OBJECTS.get(name, ()) if objects else ())]
    return st.sampled_from(choices) if choices else None


@st.composite
def fields(draw, bad: st.SearchStrategy = anything, objects: bool = True) -> dict[str, Any]:
    """Draw fields that a backend reads with valid values, and at most one other field or value."""
    found = {"backend": draw(backends)} if draw(st.booleans()) else {}
    compute = registry.get_compute("te" if "te" in str(found) else "native")
    for name in draw(st.lists(st.sampled_from([*compute.fields, *COMMON, *OF_LEVELS]), max_size=3)):
        found[name] = draw(valid(name, GOOD, objects) or st.sampled_from(["true", "no", True]))
    if draw(st.booleans()):
        name = draw(st.sampled_from([*found, *FIELDS, *SYNONYMS, *REFUSED_NAMES]))
        found[draw(st.just(name) | edited(st.just(name)))] = draw(bad)
    return found


# Backend strings and recipes


def check_string(text: str) -> None:
    head = text.strip().lower().partition("+")[0].partition(":")[0]
    recipe = accepted(lambda: resolve(text), text, BACKENDS.get(head, head))
    if text.strip().lower() != "auto":
        check_seen(recipe, {"backend": text})
    assert resolve(recipe.name) == recipe


test_backend_strings = fuzzed(check_string, text=edited(backends))
HANDLERS = ("FP8RecipeKwargs", "dict", "TERecipeKwargs", "AORecipeKwargs")
HANDLERS += ("MSAMPRecipeKwargs", "NativeRecipeKwargs")


def check_recipe(handler: str, fields: dict[str, Any]) -> None:
    fields = made(fields)
    make = resolve if handler == "dict" else lambda given: getattr(fp8_backends, handler)(**given)
    theirs = [SYNONYMS[field][0].name for field in fields if field in SYNONYMS]
    said = *fields, *theirs, fields.get("backend"), handler, "ao:"
    recipe = accepted(lambda: make(fields), *said)
    if recipe.backend is None and handler == "dict":  # auto has chosen
        return
    check_seen(recipe, {name: value for name, value in fields.items() if value != "auto"})
    if recipe.compute != "auto":
        check_round_trips(recipe)


test_recipes = fuzzed(
    check_recipe,
    handler=st.sampled_from(HANDLERS),
    fields=fields(),
)


def check_foreign_handler(handler: type, fields: dict[str, Any]) -> None:
    """Resolve a handler of Accelerate, or a recipe of TransformerEngine, without its `__init__`,
    which needs its library."""
    given = object.__new__(handler)
    given.__dict__.update(made(fields))
    accepted(lambda: resolve(given), *fields, handler.__name__)


ACCELERATES = [getattr(accelerate.utils, f"{name}RecipeKwargs") for name in ("TE", "AO", "MSAMP")]
TES = [
    type(name, (), {"fp8_format": "HYBRID"})
    for name in ("DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling")
]
test_foreign_handlers = fuzzed(
    check_foreign_handler,
    handler=st.sampled_from([*ACCELERATES, *TES]),
    fields=fields(),
)


# Environment

FIELD_OF_SUFFIX = {suffix: field.name for suffix, (field, _) in VARIABLES.items()}
LAUNCHERS = "ACCELERATE_USE_CPU WORLD_SIZE PMI_SIZE OMPI_COMM_WORLD_SIZE FP8_BACKENDS_DISABLE"


def check_environment(variables: dict[str, str]) -> None:
    with mock.patch.dict(os.environ, variables):
        recipe = accepted(
            from_environment,
            *variables,
            *map(str.upper, variables),  # they are read in any case
            *variables.values(),
            *(FIELD_OF_SUFFIX.get(name.upper().removeprefix(PREFIX)) for name in variables),
            *("OVERRIDE", "OPT_LEVEL", LAUNCHED, "ao:"),
        )
        with contextlib.suppress(FP8BackendError):
            code_over_launch(FP8RecipeKwargs(backend="native:delayed"), environment_source())
    if recipe is None:
        return
    if LAUNCHED in variables:
        sent = json.loads(variables[LAUNCHED])
        check_seen(recipe, {k: tuple(v) if isinstance(v, list) else v for k, v in sent.items()})
        return
    given = {name.upper().removeprefix(PREFIX): text for name, text in variables.items()}
    check_given(recipe, given, lambda variable: [variable.launcher_default])


def check_given(recipe: Any, given: dict[str, Any], defaults: Callable, notes: str = "") -> None:
    """Check each value of a field's variable, unless it is empty, a default, or noted."""
    for suffix, value in given.items():
        name = FIELD_OF_SUFFIX.get(suffix)
        if name is None or value is None or str(value).strip().upper() in ("", "NO"):
            continue
        unset = [value for variable in FIELDS[name].variables for value in defaults(variable)]
        if FIELDS[name].parsed(value) not in unset and name not in notes:
            check_seen(recipe, {name: value})


def as_variables(fields: dict[str, Any]) -> dict[str, str]:
    suffixes = {name: FIELDS[name].own_suffix if name in FIELDS else name for name in fields}
    return {PREFIX + suffixes[name]: str(value) for name, value in fields.items()}


def is_possible(variables: dict[str, str]) -> bool:
    """Tell if the environment can hold them."""
    text = "".join([*variables, *variables.values()])
    surrogates = any("\ud800" <= character < "\ue000" for character in text)
    return not surrogates and "\x00" not in text and "=" not in "".join(variables)


in_file = fields(json_values, objects=False)
sent = in_file.map(json.dumps)
odd_sent = edited(sent, 1) | st.sampled_from(["[" * 100_000, "%7B}", "", "[]", "{}"])
test_environment = fuzzed(
    check_environment,
    variables=(
        fields(words, objects=False).map(as_variables)
        | st.builds(lambda text: {LAUNCHED: text}, sent | odd_sent)
    ).filter(is_possible),
)


def launched(*flags: str) -> Any:
    """Return the recipe that `launch` sends to its workers."""
    sent = []

    def start(args: Any) -> None:
        sent.append(from_environment({LAUNCHED: os.environ[LAUNCHED]}))

    with mock.patch.multiple(commands_launch, launch_command=start, multi_gpu_launcher=start):
        launch.run([*flags, __file__])
    return sent[0]


def check_launcher(variables: dict[str, str]) -> None:
    with mock.patch.dict(os.environ, variables):
        accepted(lambda: launched("--cpu", "--num_processes", "2", "--fp8_backend", "native"))


test_launcher = fuzzed(
    check_launcher,
    variables=st.dictionaries(
        st.sampled_from(LAUNCHERS.split()), words | st.sampled_from("12")
    ).filter(is_possible),
)


# Files

TEMPLATES = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fp8_config: {backend: AO, enable_fsdp_float8_all_gather: true, pad_inner_dim: true}
fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: true}
mixed_precision: fp8
num_machines: 1
num_processes: 4
---
distributed_type: DEEPSPEED
deepspeed_config: {zero_stage: 3, gradient_clipping: 1.0}
mixed_precision: fp8
fp8_config: {backend: msamp, optimization_level: O2}
dynamo_config: {dynamo_backend: INDUCTOR}
---
base_model: NousResearch/Llama-3.2-1B
datasets: [{path: tatsu-lab/alpaca, type: alpaca}]
sequence_len: 2048
micro_batch_size: 1
bf16: true
fp8: true
fp8_config: {recipe: rowwise}
torch_compile: true
optimizer: adamw_torch_fused
gradient_checkpointing: true
fsdp_version: 2
fsdp_config: {offload_params: false, auto_wrap_policy: TRANSFORMER_BASED_WRAP}
"""
ODD_LINES = r"""
margin: !!python/object:os.system x
? [1, 2]
? {a: b}
1.5: 3
null: 4
true: 5
	: tab
a: b: c
'
--- x
a: 2024-01-01 10:00:00
a: .nan
a: 190:20:30
<<: {mixed_precision: fp8}
<<: [1]
%YAML 1.1
...
a: |
mixed_precision: [fp8]
fp8_config: [a]
fp8_config: fp8
fp8_config: null
fp8_config: {1: 2}
fp8_config: {backend: native, backend: te}
num_processes: .inf
num_processes: 9223372036854775808
num_processes: -1
distributed_type: {a: b}
compute_environment: [x]
a: !!int x
a: !!timestamp x
a: !!map [1]
a: !foo x
torch_compile: [true]
deepspeed: a.json
sequence_len: 1e400
optimizer: {a: b}
attn_implementation: [x]
expert_parallel_size: 0
tensor_parallel_size: 99999999999999999999
gradient_checkpointing: {a: 1}
torch_compile_mode: {}
fsdp: [full_shard]
fsdp_version: two
fsdp_config: {fsdp_version: .nan}
parallelism_config: {parallelism_config_tp_size: x}
dynamo_config: {backend: [x]}
deepspeed_config: {deepspeed_config_file: 3}
deepspeed_config: {zero_stage: 9}
"""
WHOLE = ("", "#", "---\n---\n", "[]", "1", "{", "[" * 500, "a: " * 5000, "- " * 5000)


@st.composite
def damaged(draw, document: Any) -> Any:
    """Draw the same JSON with one value changed, left out, or under another key."""
    if not isinstance(document, dict) or not document or draw(st.integers(0, 6)) == 0:
        return draw(json_values)
    key = draw(st.sampled_from([*document]))
    rest = {name: value for name, value in document.items() if name != key}
    return draw(
        damaged(document[key]).map(lambda value: {**rest, key: value})
        | st.just(rest)
        | words.map(lambda name: {**document, name: document[key]})
    )


@st.composite
def configurations(draw) -> str:
    found = draw(st.sampled_from([*yaml.safe_load_all(TEMPLATES)]))
    if draw(st.booleans()):
        found = {**found, "fp8_config": draw(in_file)}
    found = draw(st.just(found) | damaged(found))
    lines = yaml.safe_dump(found, sort_keys=False).splitlines()
    if draw(st.booleans()):
        lines.insert(draw(st.integers(0, 9)), draw(st.sampled_from(ODD_LINES.splitlines())))
    return draw(edited(st.just("\n".join(lines) + "\n"), draw(st.sampled_from([0, 0, 4]))))


def check_file(content: bytes | None, arguments: list[str]) -> None:
    """Read a file by `config` and by `launch`. None is a folder in its place."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "c.yaml")
        if content is None:
            path.mkdir()
        else:
            path.write_bytes(content)
        status, out, complaint = run_command(["config", str(path), *arguments])
        assert status != 2 or path.name in complaint or arguments, complaint
        with contextlib.suppress(Refused):
            asks = accepted(lambda: launched("--config_file", str(path)))
            if status == 0:
                recipe = config.read(str(path), "accelerate").recipe
                assert None in (asks, recipe) or means(asks) == means(recipe)
        if status == 2 or {"--json", "--check"} & {*arguments}:
            return
        asked, again = config.read(str(path), *arguments[1:]), Path(folder, "again.yaml")
        again.write_text(out, encoding="utf-8")
        if asked.recipe is None:
            return
        assert means(asked.recipe) == means(config.read(str(again), "accelerate").recipe)
        if asked.system == "accelerate":
            block = yaml.safe_load(content).get("fp8_config") or {}
            given = {str(key).strip().upper().removeprefix("FP8_"): block[key] for key in block}
            check_given(
                asked.recipe,
                given,
                lambda variable: [variable.launcher_default, variable.question_default],
                " ".join(asked.notes),
            )


contents = st.builds(
    lambda text, encoding: text.encode(encoding, "replace"),
    configurations() | st.sampled_from(WHOLE),
    st.sampled_from(["utf-8"] * 9 + ["utf-16", "utf-8-sig", "latin-1"]),
)
FROM = (["--from", "accelerate"], ["--from", "axolotl"], ["--check"], ["--json"])
test_files = fuzzed(
    check_file,
    content=contents | contents | contents | st.none(),
    arguments=st.just([]) | st.sampled_from(FROM),
)


# Commands


def run_command(argv: list[str]) -> tuple[int, str, str]:
    """Return the exit status and the output of a command, encoded as on a terminal."""
    out, error = (
        io.TextIOWrapper(io.BytesIO(), "utf-8", errors) for errors in ("strict", "backslashreplace")
    )
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            status = main.main(argv)
        except SystemExit as ended:
            status = ended.code or 0
    out.flush(), error.flush()
    said, complaint = (stream.buffer.getvalue().decode() for stream in (out, error))
    assert status in (0, 1, 2)
    if status == 2:
        assert complaint and "Traceback" not in complaint
        assert len(complaint.partition("error: ")[2] or complaint) <= LONGEST, complaint
    return status, said, complaint


OPTIONS = {
    "doctor": "--chip --json --chips",
    "estimate": "--params --devices --batch --sequence --chip --sharding --backend --weights --json",
    "compare": "--steps --batch --lr --seeds --nproc --sequence --backends --model --reference",
    "examples": "",
    "config": "--json --check --chip --backend --num_processes --from",
    "launch": " ".join(f"--fp8_{field.own_suffix.lower()}" for field in FIELDS.values())
    + " --num_processes --num_machines --mixed_precision --config_file --gpu_ids --fsdp_version",
    "monitor": "--out --worst",
    "checkpoint": "--json",
    "advise": "--batches --batch --sequence --max_trials --min_flops_share --backend --model --json",
}
OPTIONS |= {name: "--help --nosuch" for name in {*main.COMMANDS} - OPTIONS.keys()}
ENDS = {
    "doctor": ["--no-test"],
    "estimate": ["--params", "1"],
    "compare": ["--text", "/nowhere"],
    "launch": ["/nowhere/script.py"],
    "advise": ["--text", "/nowhere"],
    "monitor": [],
    "checkpoint": [],
}
"""Ends of the arguments that prevent training: no test, a missing script or text."""
DOCUMENTS = json.loads("""{
  "checkpoint_1/fp8_manifest.json": {
    "format": 1, "backend": "native:delayed", "recipe": {"backend": "native:delayed"}, "step": 3,
    "world_size": 1, "time": "2026-01-01T00:00:00+00:00", "versions": {"torch": "2.13.0"},
    "files": {"a.bin": {"bytes": 1,
      "sha256": "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"}}
  },
  "checkpoint_3/fp8_backend.json": {"manifest": 1, "backend": "native"},
  "checkpoint-4/trainer_state.json": {"global_step": 4},
  "fp8_monitor.jsonl": {
    "step": 5, "recipe": "native:delayed", "casts": "native", "not_seen": ["2"], "seconds": 0.1,
    "tensors": {"0": {"input": {
      "format": "e4m3", "amax": 3.5, "scale": 64.0, "elements": 512, "counted": 512,
      "flushed": 0.01, "saturated": 0.0, "sqnr_db": 30.5, "exponents": [-3, 0],
      "binades": [1, 2, 3, 4]}}}
  },
  "config.json": {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16,
    "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 64
  }
}""")
"""Files that commands read."""


def as_text(name: str, document: Any) -> str:
    if name.endswith("manifest.json") and isinstance(document, dict):
        sealed = hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
        document = {**document, "sha256": sealed}
    return json.dumps(document)


files = st.fixed_dictionaries(
    {
        name: edited(damaged(document).map(functools.partial(as_text, name)), 1)
        for name, document in DOCUMENTS.items()
    }
)


@st.composite
def command_lines(draw) -> list[str]:
    command = draw(st.sampled_from([*OPTIONS]))
    argv = [draw(edited(st.just(command), draw(st.sampled_from([0] * 9 + [1]))))]
    places = st.sampled_from([".", "/dev/null", "/dev/zero", "checkpoint_1", "a/b", *DOCUMENTS])
    arguments = words | places | backends | st.sampled_from([*CARDS, "2", "1K", "ddp", "bf16"])
    for option in draw(st.lists(st.sampled_from(OPTIONS[command].split() or [""]), max_size=3)):
        argv += [option, draw(arguments)] if option else [draw(arguments)]
    if command in ("monitor", "checkpoint", "config", "estimate"):
        argv.append(draw(places | words))
    return [word.replace("\x00", "") for word in (*argv, *ENDS.get(command, []))]


def check_command(argv: list[str], files: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for name, text in {**files, "checkpoint_1/a.bin": "x"}.items():
            Path(name).parent.mkdir(exist_ok=True)
            Path(name).write_bytes(text.encode("utf-8", "surrogatepass"))
        run_command(argv)


test_commands = fuzzed(check_command, argv=command_lines(), files=files)


# Functions

PLACES = (fp8_backends, fp8_backends.checkpoints, preparation, stored_weights)
CALLS = (
    *"prepare initialize audit validate export plan resolve plain_weights restore dequantize".split(),
    *"keep_weight_casts whole_states register_backend".split(),
)
FUNCTIONS = {
    name: next(getattr(place, name) for place in PLACES if hasattr(place, name)) for name in CALLS
}
ARGUMENTS = {
    "opt_level": "O1",
    "format": "finegrained_fp8",
    "folder": "/nowhere/export",
    "max_shard_size": "1GB",
    "parallel": "ddp none",
    "compiled": "full",
    "attention": "sdpa",
    "name": "fuzzed native Fuzzed-1",
    "chip": "h100",
    "spec": "native native:delayed te",
}
OBJECTS |= {
    "spec": (None, {"backend": "native", "exclude": "0"}),
    "model": (Odd("model"),),
    "optimizer": (Odd("optimizer"), None),
    "dtype": (Odd("dtype"), None),
    "factory": tuple(Odd(name) for name in ODD if "backend" in name),
}


@st.composite
def calls(draw) -> tuple[str, dict[str, Any]]:
    """Draw a call with one arbitrary argument, and valid ones otherwise."""
    function = draw(st.sampled_from(CALLS))
    names = [*inspect.signature(FUNCTIONS[function]).parameters]
    chosen = dict.fromkeys([*names[:2], *draw(st.lists(st.sampled_from(names), max_size=2))])
    given = {name: draw(valid(name, ARGUMENTS) or st.sampled_from((1, True))) for name in chosen}
    if draw(st.integers(0, 4)):
        given[draw(st.sampled_from([*given]))] = draw(anything)
    return function, given


def check_function(call: tuple[str, dict[str, Any]]) -> None:
    name, given = call[0], made(call[1])
    spec = given.get("spec")
    said = [*given, "spec", "backend", "model", "optimizer", "te:delayed"]
    said += spec if isinstance(spec, dict) else [spec]
    with mock.patch.dict(registry.factories), mock.patch.dict(registry.instances):
        accepted(lambda: FUNCTIONS[name](**given), *said)
        if name == "register_backend":
            accepted(lambda: resolve(given["name"].lower()), "backend")


test_functions = fuzzed(check_function, call=calls())


# Planted faults


def explode(value: Any) -> None:
    raise KeyError(value)


@pytest.mark.parametrize("parse, error", [(lambda value: 0, AssertionError), (explode, KeyError)])
def test_planted_field_fault_is_found(parse, error, monkeypatch):
    fields = {"backend": "native:delayed", "margin": 3, "interval": 2}
    check_recipe("dict", fields)
    monkeypatch.setitem(FIELDS["margin"].__dict__, "parse", parse)
    with pytest.raises(error):
        check_recipe("dict", fields)


def test_an_endless_case_and_an_unclear_refusal_are_faults(monkeypatch):
    monkeypatch.setattr(f"{__name__}.SECONDS", 0.05)
    with pytest.raises(AssertionError, match="no end"), ends_soon():
        while True:
            pass

    def refuse(text: str) -> Callable:
        return lambda: (_ for _ in ()).throw(FP8BackendError(text))

    for text in ("x" * 3000, "something is wrong"):
        with pytest.raises(AssertionError):
            accepted(refuse(text), "margin")
    with pytest.raises(Refused):
        accepted(refuse("margin must be better"), "margin")
