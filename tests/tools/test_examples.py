"""Test the examples: their imports, the command to list and copy them, and their training."""

from __future__ import annotations

import ast
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import PIL.Image
import pytest
import tokenizers
import transformers
import warm_process

import fp8_backends
from fp8_backends.tools.examples import examples
from fp8_backends.tools.main import main

ROOT = Path(__file__).parents[2]
EXAMPLES = examples()


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_script_is_short_with_a_start_command_and_public_names(name):
    """Further imports of the package are in a guide."""
    source = EXAMPLES[name].script.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 90
    words = shlex.split(EXAMPLES[name].start)
    assert f"{name}.py" in words and words[-2] == "--backend"
    assert ("--model" in words) == ('"--tiny"' in source) == ("\n\nEstimated" in source)
    assert len(EXAMPLES[name].shows.splitlines()) == 1 and EXAMPLES[name].shows.endswith(".")
    tree = ast.parse(source)
    guides = [
        (ROOT / "fp8_backends" / "docs" / f"{name}.rst").read_text()
        for name in ("extending", "trainers")
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "fp8_backends":
            assert node.attr in (*fp8_backends.__all__, "checkpoints")
        elif isinstance(node, ast.Import):
            assert not any(each.name.startswith("fp8_backends.") for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module.startswith("fp8_backends"):
            assert any(ast.unparse(node) in guide for guide in guides)
    assert ast.unparse(tree.body[-1].test) == "__name__ == '__main__'"


def test_the_list_has_each_example_and_its_command(capsys):
    assert main(["examples"]) == 0
    printed = capsys.readouterr().out
    assert len(EXAMPLES) == 9 and all(
        each.start in " ".join(printed.split()) for each in EXAMPLES.values()
    )
    assert max(map(len, printed.splitlines())) <= 100


def test_an_example_is_copied_and_nothing_is_overwritten(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["examples", "trl_sft.py"]) == 0
    assert "    python trl_sft.py --backend native:dynamic\n" in capsys.readouterr().out
    assert (tmp_path / "trl_sft.py").read_bytes() == EXAMPLES["trl_sft"].script.read_bytes()
    (tmp_path / "trl_sft.py").write_text("mine")
    assert main(["examples", "trl_sft"]) == 2
    assert (
        "trl_sft.py exists already" in capsys.readouterr().err
        and (tmp_path / "trl_sft.py").read_text() == "mine"
    )
    (tmp_path / "folder").mkdir()
    assert (
        main(["examples", "trl_sft", "folder"])
        == main(["examples", "trl_sft", "my trl_sft.py"])
        == 0
    )
    printed = capsys.readouterr().out
    assert "python folder/trl_sft.py" in printed and "python 'my trl_sft.py' --backend" in printed
    assert main(["examples", "trl_sft", "nowhere/trl_sft.py"]) == 2
    assert "nowhere/trl_sft.py cannot be written: No such file" in capsys.readouterr().err
    assert main(["examples", "trl_sft", "elsewhere"]) == 2
    assert (
        "elsewhere is no folder" in capsys.readouterr().err
        and not (tmp_path / "elsewhere").exists()
    )


def test_an_unknown_name_exits_with_2_and_the_nearest_one(capsys):
    assert main(["examples", "trl_sf"]) == 2
    error = capsys.readouterr().err
    assert "did you mean 'trl_sft'?" in error and all(name in error for name in EXAMPLES)


COPY_ALL = """
import sys
import fp8_backends
from fp8_backends.tools.main import main
print(fp8_backends.__file__)
sys.exit(any(main(["examples", name]) for name in sys.argv[1:]))
"""


@pytest.mark.nightly
def test_every_example_is_copied_out_of_the_wheel_and_trains(subtests, tmp_path):
    """Run in an empty folder with the package from an unpacked wheel."""
    environment = {**os.environ, "PYTHONPATH": str(unpacked_wheel(tmp_path)), "HF_HUB_OFFLINE": "1"}
    (folder := tmp_path / "empty").mkdir()

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        ended = warm_process.run(*arguments, cwd=folder, env=environment)
        assert ended.returncode == 0, ended.stderr
        return ended

    run("-m", "fp8_backends", "examples", "llama")
    (folder / "llama.py").unlink()
    place, *commands = re.findall(r"^(/.*|    .*)$", run("-c", COPY_ALL, *EXAMPLES).stdout, re.M)
    commands = [re.sub(r" --model .* (?=--backend)", " --tiny ", line) for line in commands]
    commands = [line.replace("--nproc_per_node 8", "--nproc_per_node 2") for line in commands]
    assert place.startswith(environment["PYTHONPATH"]) and len(commands) == len(EXAMPLES)
    for command in commands:
        with subtests.test(command.strip()):
            program, *arguments = shlex.split(command)
            ended = run(*launcher(program), *arguments)
            losses = losses_and_proof(ended, arguments[-1])
            assert len(losses) > 2 and losses[-1] < 0.8 * losses[0], ended.stdout


def losses_and_proof(ended: subprocess.CompletedProcess[str], backend: str) -> list[float]:
    """Return the printed losses of a training that stated its proof once."""
    assert ended.returncode == 0, ended.stderr
    proofs = re.findall(rf"^{re.escape(backend)}: \d+/\d+ Linear.* in FP8", ended.stderr, re.M)
    assert len(proofs) == 1, ended.stderr
    return [float(loss) for loss in re.findall(r"\bloss'?:? '?([\d.]+\d)", ended.stdout)]


def launcher(program: str) -> list[str]:
    return [] if program == "python" else ["-m", "torch.distributed.run", "--standalone"]


SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def language_model(
    auto: type, config: transformers.PretrainedConfig
) -> Callable[[Path, Path], None]:
    """Return a function that writes a model with a tokenizer of words, and a text of 2,000
    words."""

    def make(model: Path, data: Path) -> None:
        words = {"<pad>": 0, "<mask>": 1, **{f"word{i}": i for i in range(2, 100)}}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        auto.from_config(config).save_pretrained(model)
        special = {"pad_token": "<pad>", "mask_token": "<mask>"}
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(
            model
        )
        data.write_text(" ".join(f"word{2 + i % 90}" for i in range(2000)))

    return make


def image_model(model: Path, data: Path) -> None:
    """Write a ViT and two folders of images."""
    config = transformers.ViTConfig(**SIZES, image_size=32, patch_size=8)
    transformers.ViTForImageClassification(config).save_pretrained(model)
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(model)
    for color in ("red", "blue"):
        (data / color).mkdir(parents=True)
        for i in range(8):
            PIL.Image.new("RGB", (40, 40), color).save(data / color / f"{i}.png")


CAUSAL, MASKED = transformers.AutoModelForCausalLM, transformers.AutoModelForMaskedLM
EXPERTS = transformers.MixtralConfig(
    vocab_size=128, num_key_value_heads=2, num_local_experts=4, **SIZES
)
QWEN3 = transformers.Qwen3Config(vocab_size=128, head_dim=32, num_key_value_heads=4, **SIZES)
LLAMA = transformers.LlamaConfig(vocab_size=128, **SIZES)
MAKE = {
    "llama": language_model(CAUSAL, LLAMA),
    "qwen3_lora": language_model(CAUSAL, QWEN3),
    "sft_24gb": language_model(CAUSAL, LLAMA),
    "mixtral": language_model(CAUSAL, EXPERTS),
    "bert": language_model(MASKED, transformers.BertConfig(vocab_size=128, **SIZES)),
    "vit": image_model,
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", MAKE)
def test_the_real_command_trains_from_a_checkpoint_and_data(name, tmp_path):
    """Replace published weights and data by small files: the same code loads both."""
    model, data = tmp_path / "model", tmp_path / "data"
    MAKE[name](model, data)
    program, *words = shlex.split(EXAMPLES[name].start)
    words = ["2" if word == "8" else word for word in words]
    words[words.index("--model") + 1] = str(model)
    words[words.index("--images" if name == "vit" else "--text") + 1] = str(data)
    words[words.index(f"{name}.py")] = str(EXAMPLES[name].script)
    small = ["--batch", "4"] if name == "vit" else ["--length", "32"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "ACCELERATE_USE_CPU": "true",
    }
    ended = warm_process.run(*launcher(program), *words, *small, cwd=tmp_path, env=environment)
    losses = losses_and_proof(ended, words[-1])
    assert losses and all(map(math.isfinite, losses)), ended.stdout
    if name == "llama":
        layers = json.loads((tmp_path / "llama-fp8" / "config.json").read_text())[
            "quantization_config"
        ]
        assert layers["quant_method"] == "compressed-tensors"
        assert (tmp_path / "llama-fp8" / "tokenizer.json").exists()


def unpacked_wheel(folder: Path) -> Path:
    """The package as a wheel holds it, built from a copy of the sources."""
    (source := folder / "source").mkdir()
    for name in ("setup.cfg", "setup.py", "LICENSE", "README.rst"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(
        ROOT / "fp8_backends", source / "fp8_backends", ignore=shutil.ignore_patterns("__pycache__")
    )
    words = "-m pip wheel --quiet --no-deps --no-build-isolation --no-cache-dir -w"
    command = [sys.executable, *words.split(), str(folder), str(source)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder / "site")
    return folder / "site"
