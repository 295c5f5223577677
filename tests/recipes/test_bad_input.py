"""End bad input in this package's error, short and with the fault's name: one class of fault after
another, found by `tests/stress/test_fuzz.py`."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import fp8_backends
from fp8_backends import FP8BackendError, FP8RecipeKwargs, NativeRecipeKwargs, RecipeError, resolve
from fp8_backends.accelerate_plugin import launch
from fp8_backends.compute.native import NativeCompute
from fp8_backends.recipes.handlers import from_environment
from fp8_backends.recipes.sources import read_file
from fp8_backends.tools import config
from fp8_backends.tools.estimate import Workload, estimate

KEYS = "distributed_type: 'NO'\nmixed_precision: fp8\n"


class Unwritable:
    def __repr__(self):
        raise RuntimeError("no text")


def nested(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            KEYS + "fp8_config:\n  margin: 1\n  margin: 2\n",
            "key 'margin' stands in a block twice, line 5",
        ),
        ("a: !!python/object:os.system x\n", "python/object"),
        ("a: !!bool x\n", "'x'"),
        ("a: \x00\n", "special characters are not allowed"),
        ("a: b\n".encode("utf-16"), "codec can't decode"),
    ],
)
def test_unreadable_yaml_is_refused_with_file_and_reason(tmp_path, text, said):
    path = tmp_path / "c.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(RecipeError, match=rf"(?s)c\.yaml.*{said}") as caught:
        read_file(str(path))
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', "[" * 100_000])
def test_unreadable_json_is_refused(tmp_path, text):
    (tmp_path / "c.json").write_text(text)
    reason = "stands in a block twice|recursion|Stack overflow"  # the last from Python 3.14 on
    with pytest.raises(RecipeError, match=rf"c\.json is no JSON.*({reason})"):
        read_file(str(tmp_path / "c.json"))
    with pytest.raises(RecipeError, match="not a JSON object of recipe fields"):
        from_environment({"FP8_BACKENDS_RECIPE": text})


@pytest.mark.parametrize("path", ["nowhere.yaml", "."])
def test_missing_file_is_named(path, tmp_path):
    with pytest.raises(RecipeError, match="No such file|Is a directory"):
        read_file(str(tmp_path / path))


def test_merged_keys_and_a_byte_order_mark_are_read(tmp_path):
    (tmp_path / "c.yaml").write_bytes(b"\xef\xbb\xbfrun: &r {a: 1}\nb: {<<: *r, a: 2}\n")
    assert read_file(str(tmp_path / "c.yaml")) == {"run": {"a": 1}, "b": {"a": 2}}


def test_launch_names_the_file_and_the_key(tmp_path):
    (tmp_path / "c.yaml").write_text(KEYS + "fp8_config: {backend: native, backend: te}\n")
    with pytest.raises(RecipeError, match=r"c\.yaml.*'backend' stands in a block twice"):
        launch.run(["--config_file", str(tmp_path / "c.yaml"), __file__])
    (tmp_path / "c.yaml").write_text("distributed_type: [MULTI_GPU]\n")
    with pytest.raises(
        FP8BackendError, match=r"c\.yaml: distributed_type=\['MULTI_GPU'\] must be a word"
    ):
        launch.run(["--config_file", str(tmp_path / "c.yaml"), __file__])


def test_deepspeed_file_is_ignored_without_deepspeed(tmp_path):
    """Guard against a written file without precision, and a training without FP8."""
    path = tmp_path / "c.yaml"
    path.write_text(KEYS + "deepspeed_config: {deepspeed_config_file: ds.json}\n")
    assert config.read(str(path)).for_accelerate()["mixed_precision"] == "fp8"
    path.write_text(
        "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: [ds.json]}\n"
    )
    with pytest.raises(RecipeError, match=r"deepspeed_config_file=\['ds.json'\] must be a word"):
        config.read(str(path))


def test_config_writes_scaling_without_backend(tmp_path):
    """Guard against `config` writing only auto."""
    (tmp_path / "c.yaml").write_text(KEYS + "fp8_config: {scaling: rowwise}\n")
    assert config.read(str(tmp_path / "c.yaml")).for_accelerate()["fp8_config"] == {
        "backend": "auto",
        "scaling": "rowwise",
    }


def test_ranks_beyond_machine_integers_are_counted(tmp_path):
    (tmp_path / "c.yaml").write_text(
        f"base_model: x\nbf16: true\nsequence_len: 8\ndp_shard_size: {2**63}\n"
    )
    assert config.read(str(tmp_path / "c.yaml")).processes == 2**63


@pytest.mark.parametrize(
    "value",
    [
        Unwritable(),
        10**5000,
        nested(3000),
        itertools.repeat("a"),
        {"q_proj": False},
        b"q_proj",
        [f"a{i}" for i in range(9)],
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize(
    "field", ["margin", "fp8_format", "override_linear_precision", "include", "opt_level"]
)
def test_value_of_any_class_is_refused_briefly(field, value):
    if field == "include" and isinstance(value, list) and isinstance(value[0], str):
        return
    with pytest.raises(RecipeError, match=field) as caught:
        resolve({"backend": "native:delayed+msamp", field: value})
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "made",
    [
        lambda: resolve("native" * 1000),
        lambda: NativeRecipeKwargs(scaling="x" * 10_000),
        lambda: FP8RecipeKwargs(**{"x" * 10_000: 1}),
        lambda: from_environment({"ACCELERATE_FP8_" + "X" * 10_000: "1"}),
        lambda: from_environment({"ACCELERATE_FP8_MARGIN": "1" * 10_000}),
        lambda: launch.parse(["--fp8_" + "x" * 10_000, "1", "x.py"]),
    ],
)
def test_a_long_text_is_shortened_in_messages(made):
    with pytest.raises(RecipeError) as caught:
        made()
    assert len(str(caught.value)) < 1000 and " ... " in str(caught.value)


@pytest.mark.parametrize("name", ["self", "args", "cls", "naming", "spec"])
def test_a_field_named_as_an_argument_is_an_unknown_field(name, monkeypatch):
    with pytest.raises(RecipeError, match=f"{name} is not a field"):
        resolve({"backend": "native", name: 1})
    monkeypatch.setenv("FP8_BACKENDS_RECIPE", f'{{"backend": "native", "{name}": 1}}')
    with pytest.raises(RecipeError, match=f"{name} is not a field"):
        launch.recipe_fields(launch.parse(["train.py"]), launch.Configuration())


def test_two_spellings_of_one_field_are_refused():
    with pytest.raises(RecipeError, match="margin is given twice, in two spellings"):
        resolve({"backend": "te", "--margin": 1, "margin": 2})


def test_text_list_parses_alike_in_script_and_environment():
    assert FP8RecipeKwargs(include="['a', 'b']").include == ("a", "b")
    assert from_environment({"ACCELERATE_FP8_INCLUDE": "['a', 'b']"}).include == ("a", "b")


@pytest.mark.parametrize(
    ("name", "text"), [("WORLD_SIZE", "None"), ("PMI_SIZE", ""), ("ACCELERATE_USE_CPU", "maybe")]
)
def test_invalid_launcher_variable_is_named(name, text, monkeypatch, tmp_path):
    monkeypatch.setenv(name, text)
    with pytest.raises(FP8BackendError, match=f"{name}='{text}' in the environment must be"):
        launch.run(["--cpu", "--num_processes", "2", __file__])


MODEL = nn.Linear(16, 16)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: fp8_backends.validate("native", sequence_length="long"), "sequence_length='long'"),
        (lambda: fp8_backends.validate("native", tensor_parallel=0.5), "tensor_parallel=0.5"),
        (lambda: fp8_backends.validate("native", attention=["sdpa"]), "attention"),
        (lambda: fp8_backends.validate("native", chip=range(3)), "chip"),
        (lambda: fp8_backends.validate("native", parallel=torch.ones(2)), "parallel"),
        (lambda: fp8_backends.audit(MODEL, 3), "optimizer"),
        (lambda: fp8_backends.initialize(MODEL, None, opt_level=5), "opt_level=5"),
        (lambda: fp8_backends.initialize(MODEL, None, use_te="perhaps"), "use_te='perhaps'"),
        (lambda: fp8_backends.convert.stored_weights.keep_weight_casts((MODEL, None)), "model"),
        (lambda: fp8_backends.checkpoints.whole_states(3).__enter__(), "optimizer"),
        (lambda: fp8_backends.checkpoints.dequantize(MODEL, torch.ones(2)), "dtype"),
        (lambda: Workload(model=None, batch="many"), "batch='many'"),
        (lambda: estimate(Workload(model=None), "native"), "backends='native'"),
        (lambda: estimate(Workload(model=None), ["native"], itertools.repeat("none")), "shardings"),
    ],
)
def test_an_argument_of_the_wrong_type_is_named(call, name):
    with pytest.raises(FP8BackendError, match=name):
        call()


class Odd(NativeCompute):
    pass


def faulty():
    raise KeyError("nothing here")


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        (faulty, "its factory raised KeyError"),
        (dict, "returned dict"),
        (type("Odd", (Odd,), {"scalings": None}), "scalings must name its rules"),
        (type("Odd", (Odd,), {"default_scaling": "nosuch"}), "default_scaling one of them"),
        (type("Odd", (Odd,), {"levels": ("O9",)}), r"levels=\('O9',\) must name some of O0"),
        (
            type("Odd", (Odd,), {"fields": ("nosuch",)}),
            "'nosuch' is neither a .*Field nor the name",
        ),
    ],
)
def test_unusable_backend_is_refused_by_name(factory, said, monkeypatch):
    monkeypatch.setattr(fp8_backends.compute.registry, "factories", {})
    monkeypatch.setattr(fp8_backends.compute.registry, "instances", {})
    fp8_backends.register_backend("odd", factory)
    with pytest.raises(FP8BackendError, match=said):
        resolve("odd")
    assert resolve("native").name == "native:dynamic"


@pytest.mark.parametrize("value", [False, "False", "off", " OFF "])
def test_bare_yaml_off_means_off(value):
    """YAML reads it as False, exported as text by Accelerate's launcher."""
    assert FP8RecipeKwargs(backend="native", guard=value).guard == "off"
    assert (
        from_environment(
            {"ACCELERATE_FP8_BACKEND": "native", "ACCELERATE_FP8_GUARD": str(value)}
        ).guard
        == "off"
    )


@pytest.mark.parametrize("path", ["", "  ", "['a', 1]", "a\x00b", "a\nb", "\udcff", b"a", 3])
def test_paths_unsafe_for_a_worker_are_refused(path):
    with pytest.raises(RecipeError, match="monitor_file must be the path of a file"):
        FP8RecipeKwargs(backend="native", monitor_file=path)
    assert FP8RecipeKwargs(backend="native", monitor_file=" a ").monitor_file == "a"
