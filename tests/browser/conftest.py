"""Start the distribution's Chromium without a network, and make the pages to open."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from browser.checks import Tab

from fp8_backends.tools.compare.report_page import render
from fp8_backends.tools.main import main

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
    """Return a folder with the pages of `compare` and `monitor`, of committed records; `hard` ones
    have long names, more columns, failed checks and values that are not finite."""
    folder = tmp_path_factory.mktemp("reports")
    record = json.loads((RESULTS / "comparison_cpu_avx2.json").read_text(encoding="utf-8"))
    samples = (RESULTS / "monitor_sample.jsonl").read_text(encoding="utf-8").splitlines()
    for name, results, lines in (
        ("", record, samples),
        ("_hard", hard_comparison(record), hard_samples(samples)),
    ):
        (folder / f"compare{name}.html").write_text(render(results), encoding="utf-8")
        (folder / "samples.jsonl").write_text("\n".join(lines), encoding="utf-8")
        main(
            ["monitor", str(folder / "samples.jsonl"), "--out", str(folder / f"monitor{name}.html")]
        )
    return folder


def hard_comparison(record: dict) -> dict:
    record = copy.deepcopy(record)
    names = (
        "native:blockwise+msamp:O2",
        "te:delayed+msamp:O2",
        "ao:rowwise_with_gw_hp",
        "msamp:O3",
        "te:mxfp8",
    )
    for number, name in enumerate(names):
        report = record["backends"][name] = copy.deepcopy(record["backends"]["msamp:O2"])
        for run in report["runs"]:
            run["held_out_loss"] += 0.03 * (number - 1) + 0.01 * run["seed"]
    record["backends"]["te:mxfp8"]["runs"][1]["held_out_loss"] = None
    record["settings"]["nproc"] = 2
    for report in record["backends"].values():
        report["inspection"]["sent_bytes"] = 1234567890
    return record


def hard_samples(lines: list[str]) -> list[str]:
    records = [json.loads(line) for line in lines]
    for record in records:
        tensors = record["tensors"].values()
        names = (
            f"base_model.model.model.layers.{n}.self_attn.q_proj.lora_A.default"
            for n in (0, 17, 131)
        )
        record["tensors"] = dict(zip(names, tensors, strict=True))
        record["not_seen"] = [
            "base_model.model.model.layers.131.mlp.experts.127.down_proj.lora_B.default"
        ]
    return [json.dumps(record) for record in records]


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """Build the guides, and return their folder."""
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-d",
        str(folder / "doctrees"),
        str(GUIDES),
        str(folder / "html"),
    ]
    subprocess.run(command, check=True)
    return folder / "html"


@pytest.fixture(scope="session")
def widest(site):
    """Return the page of the guide with the widest table."""
    rules = {
        path: max(
            map(len, re.findall(r"^=+(?:  =+)+$", path.read_text(encoding="utf-8"), re.M)),
            default=0,
        )
        for path in GUIDES.glob("*.rst")
    }
    return site / max(rules, key=rules.get).with_suffix(".html").name
