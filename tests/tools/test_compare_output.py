"""Test the printed text and the page of a comparison."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import pytest
from tools.comparing import InProcess, Silent, check_page, compared, tiny_settings

from fp8_backends.tools import page as pages
from fp8_backends.tools.compare.command import announce, conclude, introduce
from fp8_backends.tools.compare.comparison import Log
from fp8_backends.tools.compare.report_page import moving_average, render
from fp8_backends.tools.compare.summary import Gap, Row, cell, columns
from fp8_backends.tools.terminal import Progress
from fp8_backends.words import counted, readable_bytes


@pytest.fixture
def comparison(tmp_path):
    return InProcess(tiny_settings(tmp_path, "native:dynamic", steps=2), tmp_path / "out")


def test_a_log_estimates_and_reports_the_time(comparison, capsys):
    comparison.run(Log(None))
    lines = capsys.readouterr().out.splitlines()
    conclude(comparison)
    beginnings = [
        "bf16: first steps observed; ",
        "native:dynamic: first steps observed; ",
        "about ",
    ]
    beginnings += [
        f"{name} seed {seed}: held-out loss "
        for seed in (0, 1)
        for name in ("bf16", "native:dynamic")
    ]
    assert [
        line.startswith(expected) for line, expected in zip(lines, beginnings, strict=True)
    ] == [True] * 7
    assert lines[2].endswith("s more: 2 seeds of 2 steps with 2 backends, by the steps just timed")
    assert "\ntook " in capsys.readouterr().out


def test_no_line_exceeds_80_columns(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    comparison = InProcess(tiny_settings(tmp_path, "msamp:O2", steps=1, seeds=1), tmp_path / "out")
    announce(comparison.settings)
    introduce(comparison)
    with Progress("comparing") as display:
        comparison.run(Log(display))
    comparison.results["note"] = "1 of 3 seeds: one more would not fit into the time given " * 2
    conclude(comparison)
    printed = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().out)
    assert [
        line for line in printed.splitlines() if len(line) > 80 and str(tmp_path) not in line
    ] == []
    assert "msamp:O2: first steps observed" in printed


def test_a_long_run_logs_every_30_seconds(comparison, capsys):
    log = Log(None)
    log.comparison = SimpleNamespace(settings=SimpleNamespace(steps=80))
    log.say("")
    log.step("bf16", 0, 40, 3.25)  # just after a line
    log.last_line -= 31
    log.step("bf16", 0, 41, 3.25)
    assert capsys.readouterr().out.splitlines()[1:] == ["bf16 seed 0: step 41 of 80, loss 3.2500"]


def test_terminal_shows_current_step_and_growing_share(comparison, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    shown = []
    comparison.run(Log(lambda step, done=None: shown.append((step, done))))
    assert shown[:2] == [("bf16: first steps", None), ("native:dynamic: first steps", None)]
    steps, shares = zip(*shown[2:], strict=True)
    assert steps[0].startswith("bf16 seed 0: step 1 of 2, loss ") and steps[-1].endswith(" s left")
    assert (
        0 < shares[0] < shares[-1] < 1
        and "native:dynamic seed 1: held-out loss" in capsys.readouterr().out
    )


def test_the_conclusion_names_a_failed_backend(comparison, capsys):
    comparison.run(Silent())
    comparison.results["backends"]["native:dynamic"] |= {
        "status": "failed",
        "message": "out of memory " * 30,
    }
    conclude(comparison)
    printed = capsys.readouterr().out
    assert (
        max(len(line) for line in printed.splitlines() if str(comparison.output) not in line) <= 100
    )
    assert " ".join(printed.split()).count("out of memory") == 90
    assert "FAIL trained to the end" in printed and "held-out loss" in printed


def test_the_conclusion_begins_with_table_and_verdict_and_ends_with_the_page(tmp_path, capsys):
    comparison = compared(tmp_path, "native:dynamic", steps=1, seeds=1)
    conclude(comparison)
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[0].startswith("backend ") and lines[-1] == str(tmp_path / "out" / "report.html")
    at_once = comparison.results["machine"]["runs_at_once"]
    said = f"tokens/s Speeds of one thread, {counted(at_once, 'run')} at a time".split()
    assert said in [line.split() for line in lines]
    lines = lines[next(i for i, line in enumerate(lines) if line.startswith("All ")) :]
    assert lines[0] == "All 7 checks that could be judged passed; 1 is not resolved."
    assert (
        lines[1] == "Not resolved: held-out loss at most 0.01 nats above bf16's (native:dynamic)."
    )
    assert lines[2].startswith("More seeds or steps would resolve the held-out loss: --seeds ")
    assert [line.split(" (")[0] for line in lines if line.startswith("? ")] == [
        "?    held-out loss at most 0.01 nats above bf16's"
    ]
    assert "bf16:" in lines
    comparison.results["status"] = "terminated"
    comparison.results["backends"]["bf16"]["runs"].clear()
    conclude(comparison)
    lines = capsys.readouterr().out.strip().splitlines()
    assert "bf16:" not in lines and "native:dynamic:" in lines  # no heading without checks


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return compared(tmp_path_factory.mktemp("page"), "native:dynamic", "ao:rowwise").results


@pytest.mark.slow
def test_page_is_one_well_formed_file(results):
    check_page(render(results))


def test_page_shows_every_backend(results):
    page = render(results)
    for backend in ("bf16", "native:dynamic", "ao:rowwise"):
        assert f"<h3>{backend}</h3>" in page
    assert re.search(r"fprop dgrad wgrad \((bf16-exact|fp32-exact|scaled_mm)\)", page)
    assert page.count('<svg height="') == 3 and page.count('class="bar"') == 3 and "lm_head" in page


def test_page_without_results_renders(results):
    empty = {
        name: {"status": "waiting", "message": "", "inspection": None, "runs": []}
        for name in results["backends"]
    }
    page = render({**results, "status": "running", "backends": empty})
    assert "Still running. So far no check could be made." in page and "<svg" not in page


def test_user_text_is_escaped(results):
    page = render({**results, "text": {**results["text"], "description": "<b>bold & wild</b>"}})
    assert "<b>bold" not in page and "&lt;b&gt;bold &amp; wild" in page


def test_non_finite_loss_keeps_page_well_formed(results):
    broken = {**results, "backends": {**results["backends"]}}
    found = broken["backends"]["native:dynamic"]
    runs = [
        {**run, "losses": [None] * len(run["losses"]), "held_out_loss": None}
        for run in found["runs"]
    ]
    broken["backends"]["native:dynamic"] = {**found, "runs": runs}
    page = render(broken)
    assert "nan" not in re.sub(
        r"[a-z]nan|nan[a-z]", "", page.lower().split("<h2>how to read")[0].split("</style>")[1]
    )


def test_speed_leads_only_on_chips_with_fp8_products():
    def keys(fast: bool) -> list[str]:
        return [*columns({"fast_fp8": fast, "settings": {"reference": "bf16", "nproc": 1}})]

    assert keys(True).index("tokens_per_second") < keys(True).index("held_out_loss")
    assert keys(False).index("tokens_per_second") > keys(False).index("peak_memory_bytes")


def test_cells_hide_emulated_speed():
    row = Row(
        "native:dynamic",
        emulated=True,
        gap=Gap(0.0012, 0.003, 5),
        peak_memory_bytes=31_000_000,
        memory_ratio=0.9,
    )
    assert cell(row, "tokens_per_second") == cell(row, "speed_ratio") == "emulated"
    assert (
        cell(row, "gap") == "+0.0012 ± 0.0030"
        and cell(row, "peak_memory_bytes") == "31.0 MB (-10.0 %)"
    )
    assert cell(row, "held_out_loss") == "–"
    fast = Row("native:dynamic", tokens_per_second=41_800.4, speed_ratio=1.094)
    assert cell(fast, "tokens_per_second") == "41,800" and cell(fast, "speed_ratio") == "+9.4 %"
    assert readable_bytes(5.3e10) == "53.0 GB"


def test_ticks_are_round_and_inside():
    ticks = pages.Scale(2.31, 5.87, 0, 100).ticks()
    assert ticks == [2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5] or ticks == [3.0, 4.0, 5.0]
    assert pages.Scale(0.0, 0.0, 0, 100)(0.5) == 50.0


def test_moving_average_preserves_a_line():
    assert moving_average([1.0, 2.0, 3.0, 4.0, 5.0], 3) == [1.5, 2.0, 3.0, 4.0, 4.5]


def test_charts_have_relative_widths(results):
    """Horizontal positions are percentages, for phones; only stretched drawings have a view box."""
    page = render(results)
    drawn = re.sub(r'<svg class="stretched".*?</svg>', "", page, flags=re.S)
    assert "viewBox" not in drawn and "min-width: 560px" not in page
    places = re.findall(r'<(?:line|circle|rect|text) [^>]*?(?:x1|cx|x)="([^"]+)"', drawn)
    assert len(places) > 20 and all(place.endswith("%") for place in places)


def test_each_cell_names_its_column(results):
    labels = re.findall(r'<td class="[^"]*" data-label="([^"]*)"', render(results))
    assert labels == [*columns(results).values()] * 3


def test_memory_bars_have_values(results):
    bars = re.findall(
        r'<span class="row-label">([^<]*)</span><span class="value">([^<]*)</span>', render(results)
    )
    rows = {row["backend"]: row["peak_memory_bytes"] for row in results["summary"]["rows"]}
    assert [name for name, _ in bars] == [*rows]
    assert all(value.startswith(readable_bytes(rows[name])) for name, value in bars)


def test_the_page_begins_with_the_verdict(results):
    one_seed = {
        name: {**found, "runs": found["runs"][:1]} for name, found in results["backends"].items()
    }
    stopped = {"status": "terminated", "note": "interrupted by SIGINT", "backends": one_seed}
    page = render({**results, **stopped})
    assert '<div class="verdict open"><p>Terminated early: interrupted by SIGINT. So far ' in page
    assert page.index("verdict open") < page.index("<h2>Measured")
    # held-out losses
    assert page.count('<li class="open"><span class="mark" aria-label="not resolved">?') == 2
    assert "verdict good" not in page and "−−" not in page and "held−out" not in page
