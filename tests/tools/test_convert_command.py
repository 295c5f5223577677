"""`fp8-backends convert`, compared with the values that transformers and `dequantize` read."""

from __future__ import annotations

import functools
import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from widths import nightly_but

from fp8_backends import checkpoints, prepare
from fp8_backends.checkpoints.exporting import rounded
from fp8_backends.tensors.block_codes import MODELOPT_NVFP4, PACKED_NVFP4, BlockCodes
from fp8_backends.tools.compare.comparison import worker_environment
from fp8_backends.tools.main import main

sys.path.append(str(Path(__file__).parents[1] / "checkpoints"))
from tiny_checkpoints import codes_of, config_of, llama, logits, same_bits, values  # noqa: E402

SHARD = "200KB"
INDEX = "model.safetensors.index.json"


def tensors_of(folder) -> dict[str, torch.Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def exported(folder, spec: str, format: str = "finegrained_fp8"):
    """Write a tiny bf16 Llama in several files, with a file beside them, and another module's."""
    model = llama(tied=False).bfloat16()
    prepare(model, None, spec)
    checkpoints.export(model, folder, format, max_shard_size=SHARD)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "2_Dense").mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / "2_Dense" / name).write_text("{}")
    return folder


@pytest.fixture(scope="module")
def source_of(tmp_path_factory):
    """Export each kind of `SOURCES` once."""
    folder = tmp_path_factory.mktemp("in")
    return functools.cache(lambda kind: exported(folder / kind, *SOURCES[kind]))


@pytest.fixture(scope="module")
def deepseek(source_of):
    return source_of("blocks")


def convert(*words, code: int = 0) -> None:
    assert main(["convert", *map(str, words)]) == code


def refused(capsys, *words) -> str:
    convert(*words, code=2)
    return capsys.readouterr().err


SOURCES = {
    "blocks": ("native:blockwise", "finegrained_fp8"),
    "compressed blocks": ("native:blockwise", "compressed-tensors"),
    "one scale": ("native:dynamic", "compressed-tensors"),
    "rows": ("native:rowwise", "compressed-tensors"),
    "mxfp8": ("native:mxfp8", "compressed-tensors"),
    "nvfp4": ("native:rowwise", "nvfp4-pack-quantized"),
    "mxfp4": ("native:rowwise", "mxfp4-pack-quantized"),
}


def read_by_transformers(folder, dtype=torch.float32) -> torch.nn.Module:
    """Load with FP32 values, then cast: in bf16, transformers rounds scales of compressed-tensors."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    checkpoints.dequantize(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


@pytest.mark.parametrize("kind", SOURCES)
def test_every_format_becomes_the_values_that_dequantize_reads(kind, source_of, tmp_path):
    source = source_of(kind)
    target = tmp_path / "out"
    convert(source, target, "--to", "bf16", "--check")
    model = read_by_transformers(source, torch.bfloat16)
    plain = AutoModelForCausalLM.from_pretrained(target)
    expected = model.state_dict()
    assert plain.state_dict().keys() == expected.keys()
    assert all(same_bits(t, expected[name]) for name, t in plain.state_dict().items())
    assert torch.equal(logits(plain), logits(model))
    assert "quantization_config" not in config_of(target)
    assert (target / "tokenizer.json").exists() and not list(target.glob("*.partial"))
    assert len(list((target / "2_Dense").iterdir())) == 2
    index = json.loads((target / INDEX).read_text())["weight_map"]
    assert {file.name for file in source.glob("*.safetensors")} == {*index.values()}


ONE_TARGET = [
    *((kind, "fp8") for kind in ("blocks", "one scale", "rows", "nvfp4")),
    *((kind, "compressed-tensors") for kind in ("compressed blocks", "rows", "mxfp8", "mxfp4")),
]


@pytest.mark.parametrize(
    ("kind", "to"),
    nightly_but(ONE_TARGET, itertools.product(SOURCES, ("fp8", "compressed-tensors"))),
)
def test_codes_that_fit_stay_and_others_are_rounded_once(kind, to, source_of, tmp_path):
    source, target = source_of(kind), tmp_path / "out"
    convert(source, target, "--to", to, "--check")
    before, tensors = read_by_transformers(source).state_dict(), tensors_of(target)
    fits = kind in ("blocks", "compressed blocks", "one scale") if to == "fp8" else "4" not in kind
    if not fits:
        for name, codes in codes_of(tensors).items():
            expected = rounded(before[f"{name}.weight"], "block")
            scales = tensors[f"{name}.weight_scale{'_inv' * (to == 'fp8')}"]
            assert same_bits(codes, expected.codes) and same_bits(scales, expected.scale_inv)
            before[f"{name}.weight"] = values(codes, scales)
    after = read_by_transformers(target).state_dict()
    assert after.keys() == before.keys() and len(codes_of(tensors)) == 14
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())
    assert same_bits(tensors["lm_head.weight"], tensors_of(source)["lm_head.weight"])


def rename(tensors: dict[str, torch.Tensor], *endings: tuple[str, str]) -> dict[str, torch.Tensor]:
    for old, new in endings:
        tensors = {
            name.removesuffix(old) + new if name.endswith(old) else name: t
            for name, t in tensors.items()
        }
    return tensors


def torchao_file(path):
    """Save as torchao itself does: one Linear with a scale for each row, a plain one, a bias."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.Linear(48, 16)).bfloat16()
    quantize_(model, Float8WeightOnlyConfig(), lambda module, name: name == "0")
    tensors, metadata = flatten_tensor_state_dict(model.state_dict())
    save_file(tensors, path, metadata)
    return {
        name: t.dequantize() if "Float8" in type(t).__name__ else t
        for name, t in model.state_dict().items()
    }


def test_files_of_torchao(tmp_path):
    expected = torchao_file(tmp_path / "model.safetensors")
    convert(tmp_path / "model.safetensors", tmp_path / "out", "--to", "bf16", "--check")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(same_bits(tensor, expected[name]) for name, tensor in found.items())


@pytest.mark.parametrize("reader", ["modelopt", "modelopt nvfp4", "comfyui", "comfyui's first"])
def test_files_of_modelopt_and_comfyui(reader, tmp_path):
    torch.manual_seed(0)
    weight = torch.randn(32, 64)
    norm = torch.randn(64, dtype=torch.float16)
    path = tmp_path / "in.safetensors"
    if reader == "modelopt nvfp4":
        codes, scales, scale = BlockCodes.encoded(weight, PACKED_NVFP4).parts
        tensors = {
            "weight": codes,
            "weight_scale": scales,
            "weight_scale_2": (1 / scale).reshape(()),
        }
        expected = MODELOPT_NVFP4.values(tuple(tensors.values()), torch.bfloat16)
    else:
        scale, codes = torch.tensor(0.013), (weight / 0.013).to(torch.float8_e4m3fn)
        tensors = {"weight": codes, "scale_weight" if "first" in reader else "weight_scale": scale}
        expected = (codes.float() * scale).bfloat16()
    marks = {
        "scaled_fp8": torch.empty(2).to(torch.float8_e4m3fn),
        "a.comfy_quant": torch.zeros(9, dtype=torch.uint8),
    }
    tensors |= {"input_scale": torch.ones(())}
    save_file(
        {f"a.{name}": t for name, t in tensors.items()}
        | {"norm.weight": norm}
        | (marks if "comfy" in reader else {}),
        path,
    )
    convert(path, tmp_path / "out", "--to", "bf16", "--check")
    found = load_file(tmp_path / "out" / path.name)
    assert found.keys() == {"a.weight", "norm.weight"}
    assert same_bits(found["a.weight"], expected) and same_bits(found["norm.weight"], norm)


def test_scales_in_another_file_and_uneven_blocks(tmp_path):
    """DeepSeek's kv_a_proj has 576 rows."""
    source = tmp_path / "in"
    source.mkdir()
    torch.manual_seed(0)
    codes, scales = torch.randn(200, 300).to(torch.float8_e4m3fn), torch.rand(2, 3)
    save_file({"a.weight": codes}, source / "1.safetensors")
    save_file({"a.weight_scale_inv": scales, "b.bias": torch.ones(3)}, source / "2.safetensors")
    convert(source, tmp_path / "out", "--to", "bf16", "--check")
    assert same_bits(tensors_of(tmp_path / "out")["a.weight"], values(codes, scales).bfloat16())
    convert(source, tmp_path / "fp8", "--to", "fp8")  # transformers would cut other blocks
    assert tensors_of(tmp_path / "fp8")["a.weight"].dtype == torch.bfloat16


@pytest.mark.nightly
def test_a_killed_conversion_is_completed_and_keeps_finished_files(deepseek, tmp_path):
    words = ["convert", deepseek, tmp_path / "out", "--to", "bf16"]
    command = [sys.executable, "-m", "fp8_backends", *words]
    process = subprocess.Popen(command, env=worker_environment(), stderr=subprocess.DEVNULL)
    names = sorted(file.name for file in deepseek.glob("*.safetensors"))
    first, last = (tmp_path / "out" / names[i] for i in (0, -1))
    while not first.exists() and process.poll() is None:
        time.sleep(0.0005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL and not last.exists()
    assert not (tmp_path / "out" / "config.json").exists()
    written = first.stat().st_mtime_ns
    convert(deepseek, tmp_path / "out", "--to", "bf16", "--check")
    assert first.stat().st_mtime_ns == written
    convert(deepseek, tmp_path / "whole", "--to", "bf16")
    whole, ours = (
        {file.name: file.read_bytes() for file in (tmp_path / name).glob("*.*")}
        for name in ("whole", "out")
    )
    assert whole == ours


def test_check_finds_a_changed_bit(deepseek, tmp_path, capsys):
    convert(deepseek, tmp_path / "out", "--to", "bf16")
    file = max((tmp_path / "out").glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    message = refused(capsys, deepseek, tmp_path / "out", "--to", "bf16", "--check")
    assert file.name in message and "other bits" in message and "remove the file" in message
    file.unlink()
    convert(deepseek, tmp_path / "out", "--to", "bf16", "--check")


def damaged(folder, deepseek, change) -> tuple[Path, Path]:
    """Copy a checkpoint with one file changed; return the copy and the file."""
    source = Path(shutil.copytree(deepseek, folder / "in"))
    file = min(source.glob("*.safetensors"))
    if change == "cut off":
        os.truncate(file, file.stat().st_size - 1)
        return source, file
    if change == "missing":
        file.unlink()
        return source, file
    tensors = load_file(file)
    name = min(name for name in tensors if name.endswith("q_proj.weight"))
    scale = f"{name}_scale_inv"
    if change == "scale":
        del tensors[scale]
    elif change == "shape":
        tensors[scale] = tensors[scale][:1].contiguous()
    elif change == "nan":
        tensors[scale][0, 0] = torch.nan
    elif change == "integers":
        tensors[name] = tensors[name].view(torch.int8)
    save_file(tensors, file)
    return source, file


FAULTS = {
    "cut off": ("", "download"),
    "missing": ("", "download"),
    "scale": ("layers.0.self_attn.q_proj.weight", "without scales: load it dequantized"),
    "shape": (
        "layers.0.self_attn.q_proj.weight",
        r"(1, 2) hold no weight of shape (256, 256): load it",
    ),
    "nan": ("layers.0.self_attn.q_proj.weight", "not finite: download it again"),
    "integers": ("layers.0.self_attn.q_proj.weight", "codes of an unknown format"),
}


@pytest.mark.parametrize("change", FAULTS)
def test_faults_name_file_and_tensor_and_leave_nothing(change, deepseek, tmp_path, capsys):
    source, file = damaged(tmp_path, deepseek, change)
    message = " ".join(refused(capsys, source, tmp_path / "out", "--to", "bf16").split())
    assert str(file) in message and all(part in message for part in FAULTS[change])
    assert not (tmp_path / "out" / file.name).exists()
    assert not list(tmp_path.glob("out/*.partial")) and not list(tmp_path.glob("out/config.json"))


def test_folders_of_other_files_are_refused(deepseek, tmp_path, capsys):
    convert(deepseek, tmp_path / "out", "--to", "bf16")
    convert(deepseek, tmp_path / "out", "--to", "bf16")
    for words in (
        [deepseek, tmp_path / "out", "--to", "fp8"],
        [deepseek, deepseek, "--to", "bf16"],
        [deepseek, deepseek / "out", "--to", "bf16"],
        [deepseek, tmp_path, "--to", "bf16"],
    ):
        before = {path: path.stat().st_mtime_ns for path in words[1].rglob("*")}
        assert "name another folder" in refused(capsys, *words)
        assert before == {path: path.stat().st_mtime_ns for path in words[1].rglob("*")}
    os.utime(min(deepseek.glob("*.safetensors")))  # another checkpoint of the same shapes
    assert "name another folder" in refused(capsys, deepseek, tmp_path / "out", "--to", "bf16")


def test_plain_checkpoints_and_absent_ones_are_refused(deepseek, tmp_path, capsys):
    convert(deepseek, tmp_path / "plain", "--to", "bf16")
    assert "checkpoints.export" in refused(
        capsys, tmp_path / "plain", tmp_path / "out", "--to", "fp8"
    )
    assert "absent" in refused(capsys, tmp_path / "absent", tmp_path / "out", "--to", "bf16")
    assert not (tmp_path / "out").exists()


def test_a_result_is_a_source(deepseek, tmp_path):
    convert(deepseek, tmp_path / "a", "--to", "compressed-tensors")
    convert(tmp_path / "a", tmp_path / "b", "--to", "fp8", "--check")
    convert(tmp_path / "a", tmp_path / "b", "--to", "fp8", "--check")
    expected = tensors_of(deepseek)
    found = tensors_of(tmp_path / "b")
    assert found.keys() == expected.keys()
    assert all(same_bits(tensor, expected[name]) for name, tensor in found.items())
    new, old = (
        config_of(folder).pop("quantization_config") for folder in (tmp_path / "b", deepseek)
    )
    assert new | {"modules_to_not_convert": ["lm_head"]} == old


def test_a_full_disk_leaves_no_half_file(deepseek, tmp_path, capsys):
    """A limit of file sizes stands for the end of the disk."""
    smallest = min(file.stat().st_size for file in deepseek.glob("*.safetensors"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (smallest, before[1]))
    try:
        message = refused(capsys, deepseek, tmp_path / "out", "--to", "bf16")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "File too large" in message and "run the command again" in message
    assert [*(tmp_path / "out").glob("*.partial")] == []
    convert(deepseek, tmp_path / "out", "--to", "bf16", "--check")
