"""Compare facts in the README with the package, its metadata and the records."""

from __future__ import annotations

import configparser
import json
import re

import pytest
from documents import README, ROOT
from docutils import nodes
from docutils.core import publish_doctree

from fp8_backends.compute.chips import advice_for, product_named

TEXT = README.read_text(encoding="utf-8")
PRODUCTS = {
    "L4": "l4",
    "RTX 40": "rtx4090",
    "RTX 50": "rtx5090",
    "RTX PRO 6000": "rtx-blackwell",
    "RTX 30": "rtx3090",
}
"""Products whose name here is another than in `chips`."""
PRODUCTS |= {"MI300": "mi300", "MI350": "mi350"}


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the table with this heading in its first column, without its header."""
    page = publish_doctree(TEXT, settings_overrides={"report_level": 5})
    tables = [
        [[cell.astext() for cell in row] for row in table.findall(nodes.row)]
        for table in page.findall(nodes.table)
    ]
    (found,) = [table[1:] for table in tables if table[0][0] == heading]
    return found


MACHINES = rows("machine or wish")[:6]


@pytest.mark.parametrize("machines,take,why", MACHINES, ids=[row[0] for row in MACHINES])
def test_choice_by_machine_is_the_advice_of_chips(machines, take, why):
    for name in machines.split(", "):
        gpu = product_named(PRODUCTS.get(name, name)).gpu
        advice, with_te = advice_for(gpu), advice_for(gpu, te_runs=True)
        if advice.precision == "fp8":
            # "te" stands for its default, "te:delayed"
            advised = dict.fromkeys((advice.backend, with_te.backend))
            assert [
                full.startswith(each) for each, full in zip(take.split(", "), advised, strict=True)
            ] == [True] * len(advised)
        else:
            assert advice.precision == with_te.precision == "bf16" == take.split(",")[0], name


def test_versions_are_the_bounds_of_the_metadata():
    configuration = configparser.ConfigParser()
    configuration.read(ROOT / "setup.cfg", encoding="utf-8")
    bounds = dict(line.split(">=") for line in configuration["options"]["install_requires"].split())
    assert (
        f"PyTorch {bounds['torch']} to " in TEXT
        and f"Accelerate {bounds['accelerate']} or later" in TEXT
    )
    assert f"Python {configuration['options']['python_requires'].removeprefix('>=')} to " in TEXT


def test_five_comparisons_name_their_evidence():
    table = rows("alone")
    assert len(table) == 5
    labels = re.findall(r"\((\w+)\)", " ".join(cell for row in table for cell in row))
    targets = re.findall(r"^__ (\S+/(\w+)\.\w+)$", TEXT, re.M)[: len(labels)]
    assert labels == [name for _, name in targets] and all(
        (ROOT / path).is_file() for path, _ in targets
    )
    assert all(re.search(r"\(\w+\)$", cell) for row in table for cell in row)


def test_compared_figures_are_the_recorded_ones():
    record = json.loads((ROOT / "benchmarks" / "results" / "step_8b_gpu.json").read_text())
    found = {(each["backend"], each["form"]): each for each in record["results"]}
    compared = " ".join(
        cell for row in rows("alone") for cell in row if "step_8b_gpu" in cell or "O2" in cell
    )
    speeds = [
        f"{found[name, 'eager']['times_plain']['ratio']:.2f}"
        for name in ("ao:tensorwise", "native:dynamic")
    ]
    peaks = [
        f"{100 - 100 * found[name, 'compiled']['peak_to_plain']:.0f}"
        for name in ("ao:tensorwise", "msamp:O2")
    ]
    assert re.findall(r"\d\.\d\d", compared) == speeds
    assert re.findall("\N{MINUS SIGN}(\\d+) %", compared) == peaks
