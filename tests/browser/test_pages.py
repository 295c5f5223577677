"""Open pages and pictures in Chromium, on a telephone and on a desk, light and dark; and pages with
planted faults."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly
WIDTHS, SCHEMES = (390, 1280), ("light", "dark")
PICTURES = sorted(
    (Path(__file__).resolve().parents[2] / "fp8_backends" / "docs" / "pictures").glob("*.svg")
)
PAGE = """<!doctype html><html><head><meta charset="utf-8"><title>page</title><style>
:root {{ color-scheme: light dark }} body {{ background: {ground}; color: {ink}; margin: 8px }}
</style></head><body>{body}</body></html>"""
GOOD = '<svg role="img" aria-label="chart" width="200" height="90"><path d="M0 0L90 90" stroke="red"/>{}</svg>'


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    ("name", "charts"), [("compare", 3), ("monitor", 4), ("compare_hard", 3), ("monitor_hard", 4)]
)
def test_a_page_of_a_command_has_no_fault(tab, reports, name, charts, width, scheme):
    assert tab.faults(reports / f"{name}.html", width, scheme) == []
    assert tab.charts() >= charts


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", (*WIDTHS, 1100))
@pytest.mark.parametrize("page", ["landing page", "guide with the widest table"])
def test_the_guides_have_no_fault(tab, site, widest, page, width, scheme):
    assert (
        tab.faults(site / "index.html" if page == "landing page" else widest, width, scheme) == []
    )


@pytest.mark.parametrize("width", WIDTHS)
def test_pictures_have_no_fault(tab, tmp_path, width):
    """Texts neither overlap nor leave the frame. Fonts differ between machines; the widest common
    one is DejaVu."""
    assert len(PICTURES) >= 14
    for picture in PICTURES:
        drawn = picture.read_text(encoding="utf-8").replace(
            "<svg ", '<svg style="max-width: 100%; height: auto" ', 1
        )
        scheme = "dark" if picture.stem.endswith("dark") else "light"
        page = written(tmp_path, drawn, scheme)
        assert (picture.name, tab.faults(page, width, scheme)) == (picture.name, [])


PLANTED = {
    "scrolls sideways": '<table><tr><td style="min-width: 1400px">wide</td></tr></table>',
    "draws nothing": '<svg role="img" aria-label="chart" width="200" height="90"></svg>',
    "draws nothing: "
    "chart": '<svg role="img" aria-label="chart" width="200" height="0"><path d="M0 0L9 9"/></svg>',
    "is cut in chart: beyond": GOOD.format('<text x="180" y="40">beyond</text>'),
    "overlap in chart": GOOD.format(
        '<text x="9" y="40">one text</text><text x="30" y="42">another</text>'
    ),
    "shows no image": '<img src="missing.png" width="20" height="20">',
    "asks another host": '<img src="https://example.org/pixel.png" width="20" height="20">',
    "fails": "<script>throw new Error('planted')</script>",
    "scrolls in its "
    "frame": '<div class="scroll" style="overflow-x: auto; width: 99px"><table><tr><td>'
    '<div style="width: 300px">wide</div></td></tr></table></div>',
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_shows(tab, tmp_path, fault):
    found = tab.faults(written(tmp_path, GOOD.format("") + PLANTED[fault]), 1280, "light")
    assert any(each.startswith(fault) for each in found), found


def test_a_page_without_fault_passes(tab, tmp_path):
    for scheme in SCHEMES:
        assert (
            tab.faults(
                written(tmp_path, GOOD.format('<text x="9" y="40">text</text>'), scheme),
                390,
                scheme,
            )
            == []
        )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_page_in_the_wrong_scheme_shows(tab, tmp_path, scheme):
    (other,) = {*SCHEMES} - {scheme}
    assert tab.faults(written(tmp_path, "text", other), 390, scheme)[0].startswith(
        f"is not {scheme}"
    )


def test_texts_without_contrast_show(tab, tmp_path):
    page = tmp_path / "page.html"
    page.write_text(PAGE.format(ground="#fff", ink="#bbb", body="text"))
    assert tab.faults(page, 390, "light") == ["has texts with a contrast of 1.9"]


def written(folder: Path, body: str, scheme: str = "light") -> Path:
    ground, ink = ("#111", "#eee") if scheme == "dark" else ("#fff", "#222")
    page = folder / "page.html"
    page.write_text(PAGE.format(ground=ground, ink=ink, body=body), encoding="utf-8")
    return page
