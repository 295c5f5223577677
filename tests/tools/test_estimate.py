import json

import pytest
import torch
from transformers import (
    AutoModelForSpeechSeq2Seq,
    LlamaConfig,
    MixtralConfig,
    ResNetConfig,
    WhisperConfig,
)

from fp8_backends.errors import FP8BackendError
from fp8_backends.tools.estimate import ModelShape
from fp8_backends.tools.estimate.command import device_named, fp8_advice
from fp8_backends.tools.main import main


@pytest.fixture
def config(tmp_path):
    """A file of a small Llama's configuration."""
    sizes = dict(
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=2,
        vocab_size=512,
        num_hidden_layers=4,
    )
    LlamaConfig(**sizes, max_position_embeddings=256).save_pretrained(tmp_path)
    return str(tmp_path / "config.json")


def printed_by(capsys, *arguments):
    code = main(["estimate", *arguments])
    return code, capsys.readouterr()


@pytest.mark.nightly
def test_each_sharding_has_a_table_within_the_width(config, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    options = "--devices 4 --device h100 --backend bf16,msamp:O2,te+msamp:O3 --sequence 128"
    code, printed = printed_by(capsys, config, *options.split(), "--sharding", "ddp,zero2")
    assert code == 0
    lines = printed.out.splitlines()
    assert max(map(len, lines)) <= 100
    assert "MiB on each of 4 devices, DDP" in lines and "MiB on each of 4 devices, ZeRO-2" in lines
    ddp = lines[lines.index("MiB on each of 4 devices, DDP") + 1 :]
    heading, rows = ddp[0].split(), {line.split()[0]: line.split()[1:] for line in ddp[1:4]}
    assert (
        heading[:3] == ["weights", "master", "grads"]
        and "sent" in heading
        and heading[-1] == "batch"
    )
    # "93 %" are two words, and so are "1.2 M"
    assert all(len(row) in (len(heading) + 1, len(heading) + 2) for row in rows.values())
    assert set(rows) == {"bf16", "msamp:O2", "te:delayed+msamp:O3"} and "yes" in rows["bf16"]
    words = " ".join(printed.out.split())
    assert "msamp:O2: level O2 goes with" not in words and "without tensor parallelism" in words
    assert "te: as its native equivalent" in printed.out and "4 x H100 (80 GiB)" in printed.out


@pytest.mark.nightly
def test_json_holds_the_same_in_bytes(config, capsys):
    code, printed = printed_by(
        capsys, config, "--json", "--backend", "bf16,msamp:O2", "--device", "24", "--batch", "2"
    )
    found = json.loads(printed.out)
    assert code == 0 and found["device"]["memory"] == 24 * 2**30
    bf16, o2 = found["estimates"]
    count = found["parameters"]
    assert (
        bf16["static"] == pytest.approx(16 * count, rel=1e-4)
        and bf16["sharding"] == "none"
        and bf16["fits"] is True
    )
    assert bf16["weights"] == 4 * count and bf16["copies"] == pytest.approx(
        2 * (count - 512 * 64), rel=0.01
    )
    assert (
        o2["static"] < 0.75 * bf16["static"]
        and o2["flops_share"] > 0.8
        and o2["peak"] > o2["static"]
    )
    assert found["settings"] == {
        "batch": 2,
        "microbatches": 1,
        "sequence": 256,
        "checkpointing": False,
        "weights": "fp32",
        "devices": 1,
    }


@pytest.mark.nightly
def test_recipe_file_keeps_its_name_beside_its_base(config, capsys, tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text("backend: native:dynamic\nfused_head: true\n")
    options = "--json --simulate --device h100 --devices 2 --sharding ddp --saved-activations fp8"
    code, printed = printed_by(
        capsys, config, *options.split(), "--backend", f"native:dynamic,{file}"
    )
    found = json.loads(printed.out)
    assert code == 0
    base, of_file = found["estimates"]
    assert (base["backend"], of_file["backend"]) == ("native:dynamic", str(file))
    assert base["fields"] == of_file["fields"] == {"saved_activations": "fp8"}
    assert of_file["peak"] < base["peak"]
    assert [each["backend"] for each in found["simulations"]] == ["native:dynamic", str(file)]


@pytest.mark.nightly
def test_simulations_take_the_estimated_batch_and_no_refused_backend(config, capsys):
    options = "--json --simulate --device 1 --devices 2 --sharding ddp,fsdp2 --offload"
    code, printed = printed_by(
        capsys, config, *options.split(), "--backend", "msamp:O4", "--batch", "largest"
    )
    found = json.loads(printed.out)
    assert code == 0 and [each["refused"] != "" for each in found["estimates"]] == [False, True]
    (simulated,) = found["simulations"]
    assert simulated["sharding"] == "ddp" and found["estimates"][0]["batch"] > 100
    assert simulated["peak"] == pytest.approx(found["estimates"][0]["peak"], rel=0.1)


@pytest.mark.nightly
def test_encoder_decoder_has_all_parameters_and_transcript_length(tmp_path, capsys):
    layers = {
        f"{side}_{name}": count for side in ("encoder", "decoder") for name, count in LAYERS.items()
    }
    config = WhisperConfig(**layers, d_model=64)
    config.save_pretrained(tmp_path)
    code, printed = printed_by(
        capsys, str(tmp_path), "--json", "--backend", "bf16", "--device", "80"
    )
    assert code == 0 and printed.err == f"tracing a training step of {tmp_path} …\n"
    found = json.loads(printed.out)
    with torch.device("meta"):
        parameters = list(AutoModelForSpeechSeq2Seq.from_config(config).parameters())
    # positions of the encoder are fixed
    static = sum(p.numel() * (16 if p.requires_grad else 4) for p in parameters)
    assert found["parameters"] == sum(p.numel() for p in parameters)
    assert found["estimates"][0]["static"] == pytest.approx(static, rel=1e-4)
    assert found["settings"]["sequence"] == 448


LAYERS = {"layers": 1, "attention_heads": 2}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "name a model"),
        (["MODEL", "--params", "8B"], "one of both"),
        (["nobody/nothing"], "Nothing is fetched"),
        (["--params", "few"], "such as 8B"),
        (["MODEL", "--device", "h10"], "did you mean 'h100'"),
        (["MODEL", "--chip", "hopper"], "differ in memory: name one (h100, h200)"),
        (["MODEL", "--sharding", "fsdp3"], "did you mean 'fsdp2'"),
        (["MODEL", "--backend", "natve"], "did you mean 'native'"),
        (["MODEL", "--backend", ","], "--backend names none"),
        (["MODEL", "--backend", "native", "--offload"], "--offload is for backends at a level"),
        (
            ["MODEL", "--lora", "8", "--backend", "msamp", "--frozen-fp8"],
            "--frozen-fp8 is for backends without a level",
        ),
        (["MODEL", "--sequence", "512"], "exceeds the model's 256 positions"),
    ],
)
def test_invalid_arguments_exit_with_2_and_one_message(config, capsys, arguments, expected):
    code, printed = printed_by(capsys, *(config if each == "MODEL" else each for each in arguments))
    assert (
        code == 2 and expected in printed.err and printed.err.startswith("fp8-backends estimate: ")
    )
    assert "Traceback" not in printed.err and not printed.out


@pytest.mark.nightly
def test_image_model_has_no_sequence(tmp_path, capsys):
    ResNetConfig(hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1], embedding_size=8).save_pretrained(
        tmp_path
    )
    code, printed = printed_by(capsys, str(tmp_path), "--sequence", "128")
    assert code == 2 and "reads images" in printed.err and not printed.out
    code, printed = printed_by(capsys, str(tmp_path), "--chip", "h100", "--backend", "bf16,ao")
    assert code == 0 and "on each 1 image of 224 x 224 pixels" in printed.out
    # missing columns are not explained
    assert "\nacts " in printed.out and "\nother " not in printed.out
    words = " ".join(printed.out.split())
    assert "ao:tensorwise: no layer of this model can run in FP8: convolution: " in words
    assert "8 -> 2 are not multiples of 16" in words


def advised(config, chip, *backends):
    return fp8_advice(ModelShape("", config), device_named(chip), list(backends))


def test_advice_names_chips_and_models_without_speed():
    small, large = (
        LlamaConfig(hidden_size=1024, intermediate_size=1024, vocab_size=512),
        LlamaConfig(),
    )
    assert (
        advised(large, "h100", "native:dynamic") == []
        and advised(small, "80", "native:dynamic") == []
    )
    assert advised(small, "h100") == []
    (line,) = advised(small, "h100", "native:dynamic", "te:delayed")
    assert "speed is to be expected of FP8: the layers for FP8 are too small" in line
    (line,) = advised(large, "a100", "native:dynamic")
    assert line.startswith("for speed train in bf16: it has bf16 products and none in FP8")
    (line,) = advised(MixtralConfig(num_hidden_layers=4), "h100", "native:dynamic", "ao:tensorwise")
    assert "of FP8 with ao:tensorwise: less than half of the products" in line


def test_devices_resolve_by_name_size_and_this_machine(monkeypatch):
    assert device_named("H200").memory == 141 * 2**30 and device_named("RTX 4090").chip == "rtx4090"
    assert device_named("A100-40").memory == device_named("40 GB").memory == 40 * 2**30
    ram = device_named("cpu")
    assert 2**28 < ram.memory < 2**46 and "RAM" in ram.title
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert device_named(None) == ram
    for wrong in ("h1000", "0", "-8", "GiB"):
        with pytest.raises(FP8BackendError, match="--chip"):
            device_named(wrong)
