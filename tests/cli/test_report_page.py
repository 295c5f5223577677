from __future__ import annotations

import re

import pytest
from cli.comparing import check_page, compared

from fp8_backends.cli import page as pages
from fp8_backends.cli.compare.report_page import moving_average, render
from fp8_backends.cli.compare.summary import Gap, Row, cell, columns
from fp8_backends.words import readable_bytes


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return compared(tmp_path_factory.mktemp("page"), "native:dynamic", "ao:rowwise").results


def test_page_is_one_well_formed_file_without_scripts_or_outside_references(results):
    check_page(render(results))


def test_page_shows_every_backend_its_proof_its_checks_and_the_curves(results):
    page = render(results)
    for backend in ("bf16", "native:dynamic", "ao:rowwise"):
        assert f"<h3>{backend}</h3>" in page
    assert re.search(r"fprop dgrad wgrad \((bf16-exact|fp32-exact|scaled_mm)\)", page)
    assert page.count('<svg height="') == 3 and page.count('class="bar"') == 3 and "lm_head" in page


def test_page_of_a_comparison_that_has_just_begun_renders(results):
    empty = {name: {"status": "waiting", "message": "", "inspection": None, "runs": []} for name in results["backends"]}
    page = render({**results, "status": "running", "backends": empty})
    assert "Still running. So far no check could be made." in page and "<svg" not in page


def test_what_a_user_named_is_escaped(results):
    page = render({**results, "text": {**results["text"], "description": "<b>bold & wild</b>"}})
    assert "<b>bold" not in page and "&lt;b&gt;bold &amp; wild" in page


def test_a_loss_that_is_not_finite_leaves_the_page_whole(results):
    broken = {**results, "backends": {**results["backends"]}}
    found = broken["backends"]["native:dynamic"]
    runs = [{**run, "losses": [None] * len(run["losses"]), "held_out_loss": None} for run in found["runs"]]
    broken["backends"]["native:dynamic"] = {**found, "runs": runs}
    page = render(broken)
    assert "nan" not in re.sub(r"[a-z]nan|nan[a-z]", "", page.lower().split("<h2>how to read")[0].split("</style>")[1])


def test_speed_leads_only_where_the_chip_has_fp8_products():
    def keys(fast: bool) -> list[str]:
        return [*columns({"fast_fp8": fast, "settings": {"reference": "bf16", "nproc": 1}})]

    assert keys(True).index("tokens_per_second") < keys(True).index("held_out_loss")
    assert keys(False).index("tokens_per_second") > keys(False).index("peak_memory_bytes")


def test_cells_say_what_was_measured_and_emulated_where_speed_means_nothing():
    row = Row(
        "native:dynamic", emulated=True, gap=Gap(0.0012, 0.003, 5), peak_memory_bytes=31_000_000, memory_ratio=0.9
    )
    assert cell(row, "tokens_per_second") == cell(row, "speed_ratio") == "emulated"
    assert cell(row, "gap") == "+0.0012 ± 0.0030" and cell(row, "peak_memory_bytes") == "31.0 MB (-10.0 %)"
    assert cell(row, "held_out_loss") == "–"
    fast = Row("native:dynamic", tokens_per_second=41_800.4, speed_ratio=1.094)
    assert cell(fast, "tokens_per_second") == "41,800" and cell(fast, "speed_ratio") == "+9.4 %"
    assert readable_bytes(5.3e10) == "53.0 GB"


def test_ticks_are_round_and_inside():
    ticks = pages.Scale(2.31, 5.87, 0, 100).ticks()
    assert ticks == [2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5] or ticks == [3.0, 4.0, 5.0]
    assert pages.Scale(0.0, 0.0, 0, 100)(0.5) == 50.0


def test_moving_average_keeps_a_line_a_line():
    assert moving_average([1.0, 2.0, 3.0, 4.0, 5.0], 3) == [1.5, 2.0, 3.0, 4.0, 4.5]


def test_nothing_in_a_chart_asks_for_a_width(results):
    """Across, places are percentages, so that a phone shows them all; only what is stretched has a view box."""
    page = render(results)
    drawn = re.sub(r'<svg class="stretched".*?</svg>', "", page, flags=re.S)
    assert "viewBox" not in drawn and "min-width: 560px" not in page
    places = re.findall(r'<(?:line|circle|rect|text) [^>]*?(?:x1|cx|x)="([^"]+)"', drawn)
    assert len(places) > 20 and all(place.endswith("%") for place in places)


def test_each_cell_names_its_column_for_a_screen_that_shows_no_headings(results):
    labels = re.findall(r'<td class="[^"]*" data-label="([^"]*)"', render(results))
    assert labels == [*columns(results).values()] * 3


def test_a_memory_bar_has_its_value_beside_it(results):
    bars = re.findall(r'<span class="row-label">([^<]*)</span><span class="value">([^<]*)</span>', render(results))
    rows = {row["backend"]: row["peak_memory_bytes"] for row in results["summary"]["rows"]}
    assert [name for name, _ in bars] == [*rows]
    assert all(value.startswith(readable_bytes(rows[name])) for name, value in bars)


def test_the_page_begins_with_the_verdict_and_marks_what_is_not_resolved(results):
    one_seed = {name: {**found, "runs": found["runs"][:1]} for name, found in results["backends"].items()}
    stopped = {"status": "terminated", "note": "interrupted by SIGINT", "backends": one_seed}
    page = render({**results, **stopped})
    assert '<div class="verdict open"><p>Terminated early: interrupted by SIGINT. So far ' in page
    assert page.index("verdict open") < page.index("<h2>Measured")
    assert page.count('<li class="open"><span class="mark" aria-label="not resolved">?') == 2  # held-out losses
    assert "verdict good" not in page and "−−" not in page and "held−out" not in page
