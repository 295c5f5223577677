"""Start the distribution's Chromium without a network, and make the pages to open."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from browser.checks import Tab

ROOT = Path(__file__).resolve().parents[2]
GUIDES = ROOT / "fp8_backends" / "docs"
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture(scope="session")
def tab():
    binary, driver = (shutil.which(name) for name in ("chromium", "chromedriver"))
    if not (binary and driver):
        reason = "no chromium and chromedriver (apt-get install chromium chromium-driver)"
        (pytest.fail if os.environ.get("REQUIRE_BROWSER") else pytest.skip)(reason)
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage"):
        options.add_argument(f"--{argument}")
    options.add_argument("--host-resolver-rules=MAP * ~NOTFOUND")
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    started = webdriver.Chrome(options, webdriver.ChromeService(driver))
    yield Tab(started)
    started.quit()


@pytest.fixture(scope="session")
def reports(tmp_path_factory):
    """Return a folder with the pages of `compare` and `monitor`, of committed records."""
    import json

    from fp8_backends.tools.compare.report_page import render
    from fp8_backends.tools.main import main

    folder = tmp_path_factory.mktemp("reports")
    record = json.loads((RESULTS / "comparison_cpu_avx2.json").read_text(encoding="utf-8"))
    (folder / "compare.html").write_text(render(record), encoding="utf-8")
    main(["monitor", str(RESULTS / "monitor_sample.jsonl"), "--out", str(folder / "monitor.html")])
    return folder


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """Build the guides, and return their folder."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-d", str(folder / "doctrees"), str(GUIDES), str(folder / "html")]
    subprocess.run(command, check=True)
    return folder / "html"


@pytest.fixture(scope="session")
def widest(site):
    """Return the page of the guide with the widest table."""
    rules = {
        path: max(map(len, re.findall(r"^=+(?:  =+)+$", path.read_text(encoding="utf-8"), re.M)), default=0)
        for path in GUIDES.glob("*.rst")
    }
    return site / max(rules, key=rules.get).with_suffix(".html").name
