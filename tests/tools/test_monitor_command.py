"""Test `fp8-backends monitor` on healthy, troubled and damaged files."""

from __future__ import annotations

import json

import pytest
from tools.comparing import check_page

from fp8_backends.tools.main import main
from fp8_backends.tools.monitor import findings, read_samples, render, usual_db
from fp8_backends.watch.monitor import summary


def entry(sqnr=31.6, saturated=0.0, flushed=0.0, amax=2.0, fmt="e4m3", scale=128.0):
    shares = {"saturated": saturated, "flushed": flushed, "sqnr_db": sqnr}
    sizes = {
        "elements": 600,
        "counted": 600,
        "exponents": [-3, 1],
        "binades": [10, 90, 200, 200, 100],
    }
    return {"format": fmt, "amax": amax, "scale": scale, **shares, **sizes}


def stored(zeros):
    return {
        **{key: value for key, value in entry().items() if key != "sqnr_db"},
        "zeros": zeros,
        "at_max": 0.0,
    }


def record(step, not_seen=(), **tensors):
    return {
        "step": step,
        "recipe": "native:delayed",
        "casts": "the layer's own rule",
        "not_seen": list(not_seen),
        "tensors": {"model.layers.0.q_proj": {"input": entry(), **tensors}},
    }


def written(tmp_path, *records):
    file = tmp_path / "fp8_monitor.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in records))
    return file


@pytest.fixture
def troubled(tmp_path):
    """Write an earlier loss of a weight, a clipped gradient, and states of a level."""
    weights = [entry(12.0), entry(31.4)]
    gradient = entry(19.0, saturated=0.02, fmt="e5m2", scale=[2.0, 8.0])
    steps = [
        record(step, weight=weight, grad_output=gradient)
        for step, weight in zip((100, 200), weights, strict=True)
    ]
    steps[-1]["tensors"]["model.layers.0.q_proj"]["exp_avg"] = stored(0.25)
    return written(tmp_path, *steps)


def test_table_lists_worst_first_and_names_it(troubled, capsys):
    assert main(["monitor", str(troubled)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "native:delayed: 2 samples, steps 100 to 200"
    assert "step 200: 1 of 3 casts lose more than they must" in lines
    assert "over 1 % clipped: model.layers.0.q_proj grad_output" in lines
    assert "most was lost at step 100: model.layers.0.q_proj weight, 19.6 dB" in lines
    rows = [line.split()[1] for line in lines if line.startswith("model.layers.0.q_proj")]
    assert rows == ["grad_output", "weight", "input", "exp_avg"]
    assert next(line for line in lines if "exp_avg" in line).split()[3:5] == ["25", "%"]


def test_a_healthy_run_is_good(tmp_path):
    samples = read_samples(written(tmp_path, record(10), record(20)))
    assert findings(samples).mood == "good" and not findings(samples).details


NAN = {**entry(None, None, None, amax=None, scale=[None, 4.0]), "exponents": [9, 8], "binades": []}


@pytest.fixture
def spoiled(tmp_path):
    """Write values with NaN from step 200 on, first in a layer's input."""
    steps = [
        record(step, input=NAN if step > 100 else entry(), grad_output=entry())
        for step in (100, 200, 300)
    ]
    for each in steps:
        each["tensors"]["model.layers.0.o_proj"] = {
            "grad_output": NAN if each["step"] > 100 else entry(9.0)
        }
    return written(tmp_path, *steps)


def test_a_run_of_nan_is_bad_in_table_and_page(spoiled, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["monitor", str(spoiled), "--worst", "1"]) == 0
    out = capsys.readouterr().out
    assert "the worst 1 of 3" in out and out.count("e4m3") == 1
    assert main(["monitor", str(spoiled)]) == 0
    out = capsys.readouterr().out
    assert (
        "step 300: 2 of 3 tensors hold an inf or a NaN" in out
        and max(map(len, out.splitlines())) <= 80
    )
    assert (
        "inf or NaN in 2 of 3 samples, first at step 200 in model.layers.0.q_proj input"
        in " ".join(out.split())
    )
    assert ["model.layers.0.q_proj", "input", "e4m3", "NaN", "NaN", "0.0", "NaN", "NaN"] in map(
        str.split, out.splitlines()
    )
    html = render(read_samples(spoiled))
    verdict = html.partition('<div class="verdict')[2]
    assert verdict.startswith(' bad"><p>step 300: 2 of 3 tensors hold an inf or a NaN')
    assert "first at step 200" in verdict


def test_earlier_nans_make_a_run_bad(tmp_path):
    found = findings(
        read_samples(written(tmp_path, record(10, weight=NAN), record(20, weight=entry())))
    )
    assert (
        found.mood == "bad"
        and "first at step 10 in model.layers.0.q_proj weight" in found.details[0]
    )


def test_json_has_the_findings_the_samples_and_the_tensors(spoiled, tmp_path, capsys):
    assert main(["monitor", str(spoiled), "--json", "--out", str(tmp_path / "page.html")]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out, parse_constant=pytest.fail)
    assert (found["mood"], found["not_finite"][0]["step"]) == (
        "bad",
        200,
    ) and "page.html" in printed.err
    assert found["not_finite"][0]["tensors"] == [
        "model.layers.0.q_proj input",
        "model.layers.0.o_proj grad_output",
    ]
    assert [each["fp8/saturated"] for each in found["samples"]] == [0.0, None, None]
    assert {each["tensor"] for each in found["tensors"]} == {"input", "grad_output"}
    assert found["steps"] == [100, 200, 300]


def test_cut_lines_are_skipped_and_counted(tmp_path, capsys):
    file = written(tmp_path, record(10), record(20, not_seen=["lm_head"]))
    file.write_text(file.read_text() + '[1, 2]\n{"step": 30}\n\n' + json.dumps(record(40))[:-20])
    assert read_samples(file).steps == [10, 20]
    assert main(["monitor", str(file)]) == 0
    out = capsys.readouterr().out
    assert "3 lines of" in out and "lm_head" in out


def test_a_repeated_step_counts_once(tmp_path):
    samples = read_samples(
        written(tmp_path, record(10), record(20, weight=entry(9.0)), record(20), record(30))
    )
    assert samples.steps == [10, 20, 30] and {tensor.name for tensor in samples.tensors} == {
        "input"
    }


@pytest.mark.parametrize(
    "text, reason", [(None, "cannot be read"), ("", "holds no sample yet"), ("{", "no sample yet")]
)
def test_a_file_without_samples_is_an_error_with_a_fix(text, reason, tmp_path, capsys):
    file = tmp_path / "file"
    if text is not None:
        file.write_text(text)
    assert main(["monitor", str(file)]) == 2
    error = capsys.readouterr().err
    assert reason in error and "monitor_every" in error


def test_the_page_is_well_formed_and_has_the_charts(troubled, tmp_path, capsys):
    page = tmp_path / "monitor.html"
    assert main(["monitor", str(troubled), "--out", str(page)]) == 0
    html = page.read_text()
    check_page(html)
    for title in (
        "Where most is lost",
        "Over the run",
        "Where the values lie",
        "What the level stores",
    ):
        assert f"<h2>{title}</h2>" in html
    # three tensors by their error, three kinds by the clipped share
    assert html.count('class="curve"') == 6
    assert main(["monitor", str(troubled), "--out", str(tmp_path)]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_names_of_layers_are_escaped(tmp_path):
    layers = record(10)
    layers["tensors"] = {"<b>&": {"input": entry()}}
    html = render(read_samples(written(tmp_path, layers)))
    assert "<b>&" not in html and "&lt;b&gt;&amp;" in html


def test_typical_errors_match_normal_distribution():
    assert [round(usual_db(name), 1) for name in ("e4m3", "e5m2", "fp16")] == [31.6, 25.5, 73.7]


def test_the_summary_has_the_worst_casts():
    samples = {
        **record(10, weight=entry(20.0, flushed=0.3), exp_avg=stored(0.9)),
        "share": 0.9,
        "guard_faults": 3,
    }
    samples["tensors"] |= {
        "model.layers.1.q_proj": {"input": entry(19.0)},
        "head": {"input": entry()},
        "7": {},
    }
    worst = {
        "fp8/worst_sqnr": 19.0,
        "fp8/saturated": 0.0,
        "fp8/flushed": 0.3,
        "fp8/not_finite": 0.0,
    }
    groups = {"fp8/sqnr/model.layers.q_proj": 19.0, "fp8/sqnr/head": 31.6}
    assert summary(samples) == {"fp8/share": 0.9, "fp8/guard_faults": 3, **worst, **groups}


def changed(key, value):
    return {**entry(), key: value}


@pytest.mark.parametrize(
    "damaged",
    [
        {**record(300), "step": -1},
        {**record(300), "step": 10**400},
        {**record(300), "recipe": 7},
        {**record(300), "share": "most"},
        {**record(300), "not_seen": "layer"},
        {**record(300), "tensors": {"a\x1b[2J": {"input": entry()}}},
        record(300, input=changed("format", "e9m9")),
        record(300, input=changed("saturated", "all")),
        record(300, input=changed("exponents", [-(10**9), 10**9])),
        record(300, input=changed("binades", [0] * 5)),
        record(300, exp_avg=entry()),
        [[[]]],
    ],
    ids=str,
)
def test_a_damaged_line_is_skipped_and_counted(damaged, tmp_path, capsys):
    file = written(tmp_path, record(100), damaged)
    assert main(["monitor", str(file), "--out", str(tmp_path / "page.html")]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("native:delayed: 1 sample,") and "1 line of" in printed


@pytest.mark.parametrize("name", ["/dev/zero", "x" * 3000, "."])
def test_a_device_or_folder_is_refused_in_one_line(name, capsys):
    assert main(["monitor", name]) == 2
    error = capsys.readouterr().err
    assert "cannot be read" in error and len(error) < 500
