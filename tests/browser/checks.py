"""Open a page in Chromium at one width and colour scheme, and list its faults."""

from __future__ import annotations

import json
from pathlib import Path

FAULTS = """
const width = innerWidth, faults = [];
const name = element => element.closest('svg').getAttribute('aria-label') || 'drawing';
const scrolled = document.documentElement.scrollWidth;
if (scrolled > width) {
  const wide = [...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > width + 1);
  faults.push(`scrolls sideways: ${scrolled} of ${width} px: ${wide.slice(0, 3).map(e => e.outerHTML.slice(0, 60))}`);
}
for (const drawing of document.querySelectorAll('svg[role=img]')) {
  const box = drawing.getBoundingClientRect();
  const marks = [...drawing.querySelectorAll('path, rect, line, circle')].filter(mark => {
    const size = mark.getBoundingClientRect();
    return size.width + size.height > 0;
  });
  if (!box.width || !box.height || !marks.length) faults.push(`draws nothing: ${name(drawing)}`);
  const frame = (drawing.closest('.chart, .card') || drawing).getBoundingClientRect();
  const texts = [...drawing.querySelectorAll('text')].map(text => [text, text.getBoundingClientRect()]);
  texts.forEach(([text, place], number) => {
    if (place.left < frame.left - 1 || place.right > frame.right + 1 || place.bottom > frame.bottom + 1)
      faults.push(`is cut in ${name(drawing)}: ${text.textContent}`);
    for (const [other, there] of texts.slice(number + 1)) {
      const across = Math.min(place.right, there.right) - Math.max(place.left, there.left);
      const down = Math.min(place.bottom, there.bottom) - Math.max(place.top, there.top);
      if (across > 1 && down > 4)
        faults.push(`overlap in ${name(drawing)}: ${text.textContent} / ${other.textContent}`);
    }
  });
}
for (const image of document.images)
  if (image.checkVisibility() && !image.naturalWidth) faults.push(`shows no image: ${image.src}`);
for (const table of document.querySelectorAll('.scroll > table'))
  if (table.parentElement.scrollWidth > table.parentElement.clientWidth + 1)
    faults.push(`scrolls in its frame: table of ${table.rows[0].textContent.slice(0, 40)}`);
return faults;
"""
GROUND = """
for (const element of [document.body, document.documentElement]) {
  const color = getComputedStyle(element).backgroundColor.match(/[\\d.]+/g).map(Number);
  if (color[3] !== 0) return [color, getComputedStyle(document.body).color.match(/[\\d.]+/g).map(Number)];
}
return [[255, 255, 255], getComputedStyle(document.body).color.match(/[\\d.]+/g).map(Number)];
"""
HERE = ("file:", "data:", "blob:", "about:", "chrome:", "devtools:")


class Tab:
    """A tab of Chromium."""

    def __init__(self, driver) -> None:
        self.driver = driver

    def faults(self, page: Path, width: int, scheme: str) -> list[str]:
        """Return the faults of a page in a window so many pixels wide, in the `light` or `dark`
        scheme."""
        run = self.driver.execute_cdp_cmd
        run(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False},
        )
        run(
            "Emulation.setEmulatedMedia",
            {"features": [{"name": "prefers-color-scheme", "value": scheme}]},
        )
        for kind in ("browser", "performance"):
            self.driver.get_log(kind)  # of the page before
        self.driver.get(page.resolve().as_uri())
        found = self.driver.execute_script(FAULTS)
        ground, ink = (luminance(color) for color in self.driver.execute_script(GROUND))
        if (ground < 0.1) != (scheme == "dark"):
            found.append(f"is not {scheme}: its ground has the luminance {ground:.2f}")
        if (contrast := (max(ground, ink) + 0.05) / (min(ground, ink) + 0.05)) < 4.5:
            found.append(f"has texts with a contrast of {contrast:.1f}")
        found += [
            f"fails: {entry['message']}"
            for entry in self.driver.get_log("browser")
            if entry["level"] == "SEVERE"
        ]
        return found + [
            f"asks another host: {url}" for url in self._requests() if not url.startswith(HERE)
        ]

    def charts(self) -> int:
        """Return the number of drawings on the open page."""
        return self.driver.execute_script(
            "return document.querySelectorAll('svg[role=img]').length"
        )

    def _requests(self) -> list[str]:
        events = (
            json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")
        )
        return [
            event["params"]["request"]["url"]
            for event in events
            if event["method"] == "Network.requestWillBeSent"
        ]


def luminance(color: list[float]) -> float:
    """Return the relative luminance of (red, green, blue) of 0 to 255 (WCAG)."""
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in (value / 255 for value in color[:3])
    ]
    return sum(
        weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True)
    )
