"""Turn the benchmarks' records into verdicts, tables and documents."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks"))
import by_ranks  # noqa: E402
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
    """Compare every table between markers with the records in `benchmarks/results`.

    `benchmarks/tables.py --write` updates them."""
    texts = [tables.between_markers(path.read_text(encoding="utf-8")) for path in tables.DOCUMENTS]
    readme, measurements, index, *pages = texts
    records = targets.load(tables.RESULTS)
    made = {name: tables.in_document(name, records) for name in tables.TABLES}
    assert index == {"summary": made["summary"]}
    assert readme == {name: made[name] for name in ("headline", "summary", "choices")}
    in_pages = (("models", "cards", "llmq", "offloaded"), ("published",))
    shown = [{name: text for name, text in page.items() if name in made} for page in pages]
    assert shown == [{name: made[name] for name in names} for names in in_pages]
    assert measurements and measurements == {name: made[name] for name in measurements}


def test_readme_of_measurements_is_short_and_links_every_record():
    text = (tables.HERE / "README.rst").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 300
    linked = set(re.findall(r"<results/([\w.]+)>`_", text))
    assert linked == {path.name for path in tables.RESULTS.iterdir()}


def test_every_question_is_named_with_a_known_table():
    text = (tables.HERE / "README.rst").read_text(encoding="utf-8")
    named = set(re.findall(r"``(?:benchmarks/)?([\w/]+\.py)``", text))
    scripts = {
        path.relative_to(tables.HERE).as_posix()
        for path in tables.HERE.rglob("*.py")
        if re.search(r"= options\(.*write_json\(", path.read_text(encoding="utf-8"), re.S)
    }
    assert len(scripts) > 20 and scripts <= named
    of_scripts = re.findall(r"\.py`` \(``([\w-]+)``\)", text)
    assert of_scripts and set(of_scripts) <= tables.TABLES.keys()


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
        assert "not yet measured" in " ".join(table({}).split()), name
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
    told = " ".join(made.split())
    assert "2 cores of an AMD EPYC (avx512_bf16), torch 2.13.0, 21 November 2026" in told
    assert ["1x2x3", "bf16", "``native:dynamic``", "eager", "50", "1.7", "0.4"] in [
        line.split() for line in made.splitlines()
    ]
    assert tables.between_markers(made) == {"linear": tables.in_document("linear", records)}
    assert "not yet measured" in tables.TABLES["linear"](records)
    assert tables.written(made, records) == made
    others = document.replace("linear", "chips")
    assert tables.written(others, records) == others


AWS = {
    # nodes: tokens/s/GPU and loss without and with FP8, of the 7B model
    1: (9350, 6.595, 11000, 6.602),
    2: (9400, 6.688, 10750, 6.695),
    32: (7900, 6.523, 9700, 6.649),
}


def test_the_columns_by_ranks_follow_one_formula():
    """Recompute the published throughputs: their own percentages mix two formulas."""
    results = []
    for nodes, (bf16, bf16_loss, fp8, fp8_loss) in AWS.items():
        results.append(
            {"ranks": nodes, "backend": "bf16", "tokens_per_second": bf16, "loss": bf16_loss}
        )
        results.append(
            {"ranks": nodes, "backend": "te:delayed", "tokens_per_second": fp8, "loss": fp8_loss}
        )
    made = {(each["ranks"], each["backend"]): each for each in by_ranks.compared(results, "bf16")}
    assert [round(100 * made[n, "te:delayed"]["faster"], 1) for n in AWS] == [17.6, 14.4, 22.8]
    assert [round(100 * made[n, "te:delayed"]["decrease"], 1) for n in AWS] == [0, 2.3, 11.8]
    assert [round(100 * made[n, "bf16"]["decrease"], 1) for n in AWS] == [0, -0.5, 15.5]
    assert [round(100 * made[n, "te:delayed"]["loss_above"], 2) for n in AWS] == [0.11, 0.10, 1.93]


@pytest.mark.nightly
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
