"""Turn the benchmarks' records into verdicts, tables and documents."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks"))
import largest  # noqa: E402
import linear  # noqa: E402
import measuring  # noqa: E402
import prepare  # noqa: E402
import tables  # noqa: E402
import targets  # noqa: E402
import training  # noqa: E402

from fp8_backends.compute import hardware  # noqa: E402

MACHINE = {
    "chip": "AMD EPYC",
    "gpus": 0,
    "torch_threads": 2,
    "torch": "2.13.0+cpu",
    "date": "2026-11-21",
}


def test_documents_show_measured_figures():
    """Compare every table of `benchmarks/tables.py` with the records in `benchmarks/results`: the
    summary in the README and the index, choices and cards in the README, models and
    published runs in their pages, the others in `benchmarks/README.rst`.

    `benchmarks/tables.py --write` updates them."""
    texts = [tables.between_markers(path.read_text(encoding="utf-8")) for path in tables.DOCUMENTS]
    readme, measurements, index, *pages = texts
    records = targets.load(tables.RESULTS)
    made = {name: table(records) for name, table in tables.TABLES.items()}
    assert index == {"summary": made["summary"]}
    of_readme = {name: made.pop(name) for name in ("headline", "summary", "choices")}
    assert readme == of_readme
    shown = [{name: text for name, text in page.items() if name in made} for page in pages]
    in_pages = (("models", "cards", "llmq", "offloaded"), ("published",))
    assert shown == [{name: made.pop(name) for name in names} for names in in_pages]
    assert measurements == made


def test_command_writes_named_documents(tmp_path, monkeypatch):
    document = tmp_path / "page.rst"
    document.write_text(".. begin table kernels\n\n.. end table kernels\n")
    monkeypatch.setattr(
        sys, "argv", ["tables.py", "--write", str(document), "--results", str(tmp_path)]
    )
    tables.main()
    assert "not yet measured" in document.read_text()


def test_without_records_every_table_says_not_yet_measured():
    for name, table in tables.TABLES.items():
        assert "not yet measured" in table({}), name
    rows = targets.rows((*targets.ON_CPU, *targets.ON_CPU_WITHOUT_BF16, *targets.ON_GPU), {})
    assert {(shown, verdict) for _, shown, _, verdict in rows} == {("-", "not yet measured")}
    assert all(bound != "-" for _, _, bound, _ in rows)


@pytest.mark.parametrize(
    "capabilities,bf16,vectors,features",
    [
        ("avx2 avx512_bf16 amx_bf16", True, "AVX512", "amx_bf16"),
        ("avx2 avx512_bf16", True, "AVX512", "avx512_bf16"),
        ("avx2 avx_ne_convert", True, "AVX2", "avx2_bf16"),
        ("neon bf16", True, "DEFAULT", "neon_bf16"),
        ("neon sve_bf16", True, "SVE256", "neon_bf16"),
        ("avx2 avx512_bf16 amx_bf16", False, "AVX2", "avx2"),  # switched off
        ("avx2 avx512_f", False, "AVX512", "avx512"),
        ("avx2", False, "AVX2", "avx2"),
        ("", False, "DEFAULT", "default"),
        ("neon bf16", False, "DEFAULT", "neon"),  # Apple: without oneDNN
    ],
)
def test_cpu_records_are_named_by_instruction_set(
    monkeypatch, capabilities, bf16, vectors, features
):
    has = dict.fromkeys(capabilities.split(), True) | {"avx10_2": False}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: vectors)
    monkeypatch.setattr(hardware, "cpu_bf16", lambda: bf16)
    assert measuring.cpu_features() == features and targets.has_bf16(features) == bf16
    assert (
        measuring.plain("cpu") == ("bf16" if bf16 else "fp32") and measuring.plain("cuda") == "bf16"
    )


def test_manual_switches_are_reported(monkeypatch):
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", True)
    assert measuring.switched() == "" and "switched" not in measuring.machine()
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    machine = measuring.machine()
    assert (
        machine["switched"] == "ATEN_CPU_CAPABILITY=avx2, oneDNN off"
        and machine["cpu_bf16"] is False
    )
    shown = tables.where({"machine": MACHINE | {"switched": machine["switched"]}}, "avx2")
    assert shown.startswith(
        "2 cores of an AMD EPYC (avx2: without bf16 products; ATEN_CPU_CAPABILITY=avx2, oneDNN off)"
    )


def test_single_run_is_compared_with_every_round():
    rounds, once = [2.0, 4.0, 6.0], [2.0]
    paired = linear.compared(rounds, [2.0, 2.0, 2.0])
    assert paired["ratio"] == 2 and "paired" not in paired
    assert linear.compared(rounds, once) == paired | {"paired": False}
    assert linear.compared(once, rounds)["ratio"] == 0.5


def linear_record(ratio, **more):
    row = {"backend": "native:dynamic", "form": "eager", "shape": [1, 2, 3], "median_s": 0.05}
    row |= {"to_torchao": {"ratio": ratio}, "to_plain": {"ratio": 1.7}, **more}
    return {"machine": MACHINE, "results": [row]}


@pytest.mark.parametrize("ratio,verdict", [(0.5, "met"), (0.51, "missed")])
def test_target_is_met_within_its_bound_and_misses_are_reported(ratio, verdict):
    records = targets.of_cpu({"linear_cpu_avx512_bf16": linear_record(ratio)}, "avx512_bf16")
    assert targets.rows(targets.ON_CPU, records)[0][1:] == [f"{ratio:g}", "at most 0.5", verdict]
    faster = targets.Target("", lambda records: ratio, at_least=0.51)
    assert faster.verdict({}) == ("met" if ratio == 0.51 else "missed")


def test_targets_read_one_kind_of_cpu():
    records = {
        f"linear_cpu_{features}": linear_record(0.1)
        for features in ("amx_bf16", "neon_bf16", "avx512")
    }
    with_bf16, without = tables.targets_cpu(records).split("\n\n")
    assert "(amx_bf16)" in with_bf16 and "0.1 " in with_bf16
    assert (
        "(avx512: without bf16 products)" in without
        and "plain FP32" in without
        and "0.1 " not in without
    )
    records["linear_cpu_avx512_bf16"] = linear_record(0.2)
    both = linear_record(0.3, dtype="fp32")["results"] + linear_record(0.4, dtype="bf16")["results"]
    records["linear_cpu_avx2"] = {"machine": MACHINE, "results": both}
    with_bf16, without = tables.targets_cpu(records).split("\n\n")
    assert "(avx512_bf16)" in with_bf16 and "0.2 " in with_bf16 and "(avx2: without" in without
    measured = [
        row[1:] for row in targets.rows(targets.on_cpu("avx2"), targets.of_cpu(records, "avx2"))
    ]
    assert measured[:2] == [["1.7", "at most 1.6", "missed"], ["0.3", "at most 0.5", "met"]]
    assert measured[2] == ["1.7", "at most 1", "missed"] and measured[3][2] == "not yet measured"


def test_table_names_machine_versions_and_date():
    records = {"linear_cpu_avx512_bf16": linear_record(0.4)}
    document = "Before\n\n.. begin table linear\n\nold\n\n.. end table linear\n\nAfter\n"
    made = tables.written(document, records)
    assert (
        made.startswith("Before\n\n.. begin table linear\n\n")
        and made.endswith("\n\nAfter\n")
        and "old" not in made
    )
    assert made.endswith("not yet measured.\n\n.. end table linear\n\nAfter\n")
    assert "2 cores of an AMD EPYC (avx512_bf16), torch 2.13.0, 21 November 2026" in made
    assert ["1x2x3", "bf16", "``native:dynamic``", "eager", "50", "1.7", "0.4"] in [
        line.split() for line in made.splitlines()
    ]
    assert tables.between_markers(made) == {"linear": tables.TABLES["linear"](records)}
    assert tables.written(made, records) == made
    others = document.replace("linear", "chips")
    assert tables.written(others, records) == others


@pytest.mark.parametrize(
    "of_weights,of_states,memory", [(20, 30, 100), (20, 90, 100), (101, 0, 100), (60, 0, 100)]
)
def test_largest_fitting_size_is_found_across_peak_bend(of_weights, of_states, memory):
    """The peak is in the optimizer's step of a small batch, and in the backward of a large one."""

    def peak(size):
        return max(of_weights + 1.7 * size, of_states + 0.1 * size)

    tried_sizes = []

    def probe(size):
        tried_sizes.append(size)
        return {"peak_bytes": peak(size)} if peak(size) <= memory else None

    exact = max((size for size in range(1, 200) if peak(size) <= memory), default=0)
    found, tried = largest.largest(probe, memory)
    assert found == exact and exact + 1 in tried and len(tried_sizes) == len(set(tried_sizes)) <= 12


@pytest.mark.slow
def test_batches_differ_by_step_and_rank_but_not_backend():
    text = training.Text(64)
    first = text.batch(4, step=0)
    assert first.shape == (4, 64) and torch.equal(first, text.batch(4, step=0))
    others = [text.batch(4, step=1), text.batch(4, step=0, rank=1), text.batch(4, step=1, rank=1)]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations([first, *others], 2))


def test_added_memory_includes_a_second_copy_of_weights(monkeypatch):
    """Plant a `prepare` with a copy."""
    import fp8_backends

    torch.ones(40_000_000)  # given back: a peak before is none of `prepare`
    held = []
    monkeypatch.setattr(
        fp8_backends,
        "prepare",
        lambda model, *_: held.extend(p.clone() for p in model.parameters()),
    )
    copied = prepare.added_memory("native:dynamic", 4, 1024)
    # None: unknown on this system
    assert copied["added"] is None or 0.9 < copied["added"] / copied["weights"] < 1.2
    held.clear()
    monkeypatch.setattr(fp8_backends, "prepare", lambda *_: None)
    kept = prepare.added_memory("native:dynamic", 4, 1024)
    assert kept["same_storage"] and (kept["added"] is None or kept["added"] / kept["weights"] < 0.1)
