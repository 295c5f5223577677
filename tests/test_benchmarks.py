"""The benchmark scripts run, and the GPU check fails where it must. No timing is asserted here."""

import json
from pathlib import Path

import pytest
import warm_process

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def run(script, *arguments, code=None):
    """Run a benchmark in a process of its own; `code` is executed before it, to plant a fault."""
    path = BENCHMARKS / script
    if code:
        lines = [code, "import runpy, sys", f"sys.path.insert(0, {str(path.parent)!r})"]
        lines += [f"sys.argv = {[str(path), *arguments]!r}", f"runpy.run_path({str(path)!r}, run_name='__main__')"]
        return warm_process.run("-c", "\n".join(lines), timeout=300)
    return warm_process.run(str(path), *arguments, timeout=300)


@pytest.mark.slow
def test_the_gpu_check_passes_on_a_cpu_and_keeps_its_results(tmp_path):
    done = run("gpu/check.py", "--device", "cpu", "--backends", "native:dynamic", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "check_eager.json").read_text())
    assert record["machine"]["torch"] and record["machine"]["date"]
    assert len(record["checks"]) > 30 and all(check["passed"] for check in record["checks"])


@pytest.mark.slow
def test_the_gpu_check_fails_on_a_hidden_overflow():
    """Planted: a non-finite tensor gets an ordinary scale, so its inf saturates without a trace."""
    fault = "import fp8_backends.scaling as s; s.scale_inv_of = lambda scale, amax: scale.reciprocal()"
    done = run("gpu/check.py", "--device", "cpu", "--backends", "native:dynamic", code=fault)
    assert done.returncode == 1 and "FAIL non-finite shows native:dynamic" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "script,arguments",
    [
        ("overhead.py", ["--runs", "2", "--hidden", "64", "--layers", "1", "--sequence", "32"]),
        ("prepare.py", ["--layers", "20", "--width", "16"]),
        ("linear.py", ["--runs", "2", "--shapes", "tiny"]),
        ("optimizer.py", ["--elements", "65536", "--runs", "2"]),
        ("gradient_mean.py", ["--ranks", "2"]),
        ("step.py", ["--steps", "2", "--warmup", "1", "--sequence", "32"]),
    ],
)
def test_a_benchmark_prints_its_ratio_and_keeps_it_as_json(script, arguments, tmp_path):
    done = run(script, *arguments, "--json", str(tmp_path / "result.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "result.json").read_text())["machine"]["chip"]
    if script == "overhead.py":
        assert "first losses equal to the bit: True" in done.stdout


@pytest.fixture
def tiny_encoder(tmp_path):
    """A folder with a random encoder and a tokenizer of single letters, laid out as a pre-trained one."""
    from transformers import BertConfig, BertModel, BertTokenizerFast

    letters = [chr(i) for i in range(ord("a"), ord("z") + 1)]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    BertModel(config).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_finetune_pairs_each_backend_with_bf16(tiny_encoder, tmp_path):
    settings = ["--steps", "6", "--batch", "4", "--sequence", "32", "--train", "8", "--held-out", "4", "--workers", "1"]
    result = tmp_path / "result.json"
    backends = ["--backends", "native:dynamic,msamp:O2", "--lrs", "1e-3", "--seeds", "2"]
    done = run("finetune.py", *settings, *backends, "--model", str(tiny_encoder), "--json", str(result))
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(result.read_text())
    assert record["passages"] == {"train": 56, "held_out": 28}
    assert len({r["start_checksum"] for r in record["runs"] if r["seed"] == 0}) == 1
    assert len({r["start_checksum"] for r in record["runs"]}) == 2
    bf16, native, level = record["summaries"]
    assert bf16["gap"]["mean"] == 0 and bf16["displacement_along"] == pytest.approx(1)
    assert native["gap"]["pairs"] == level["gap"]["pairs"] == 2
    assert level["gap"]["mean"] != 0 and level["all_moved"] and level["displacement_along"] > 0.5
    assert {r["bytes_per_element"]["gradient"] for r in record["runs"] if r["backend"] == "bf16"} == {4}
    assert str(tiny_encoder) not in result.read_text()


@pytest.mark.slow
def test_memory_falls_with_the_level(tmp_path):
    settings = ["--hidden", "128", "--layers", "8", "--vocabulary", "64", "--sequence", "16"]
    result = tmp_path / "result.json"
    done = run("memory.py", *settings, "--backends", "msamp:O2", "--json", str(result))
    assert done.returncode == 0, done.stdout + done.stderr
    bf16, o2 = json.loads(result.read_text())["results"]
    assert [round(r["bytes_per_element"]["total"]) for r in (bf16, o2)] == [16, 6]
    peaks = [r["peak_tensor_bytes"] / r["in_linears"] for r in (bf16, o2)]
    # nothing is counted as less than what is stored; one weight's work in FP32 comes on top, and activations
    for peak, at_rest in zip(peaks, (16, 6), strict=True):
        assert at_rest <= peak < at_rest + 3
