"""Compare facts in the README with the package, its metadata and the records."""

from __future__ import annotations

import configparser
import json
import re
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
from documents import GUIDES, README, ROOT
from docutils import nodes
from docutils.core import publish_doctree

from fp8_backends.compute.chips import advice_for, product_named, recommended
from fp8_backends.evidence.proof import Proof

sys.path.append(str(ROOT / "benchmarks"))
import tables  # noqa: E402
import training  # noqa: E402

TEXT = README.read_text(encoding="utf-8")


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the table with this heading in its first column, without its header."""
    page = publish_doctree(TEXT, settings_overrides={"report_level": 5})
    tables = [
        [[cell.astext() for cell in row] for row in table.findall(nodes.row)]
        for table in page.findall(nodes.table)
    ]
    (found,) = [table[1:] for table in tables if table[0][0] == heading]
    return found


FASTEST = tables.FASTEST
"""The backend of first commands: an H100's."""


def test_every_case_takes_the_recommended_backend():
    taken = {case: backend for case, backend, _ in rows("case")}
    assert taken.pop("DDP, FSDP2, ZeRO") == "any"
    assert taken.pop("all of an 8B, one card of 24 GB") == "msamp:O4"
    with_te = advice_for(product_named("h100").gpu, te_runs=True).backend
    assert taken.pop("TransformerEngine at hand") == with_te
    assert taken.pop("H100, H200: fastest measured") == "msamp:O2"
    assert taken.pop("too little memory, any GPU") == "msamp:O2"
    cards = {
        advice_for(product_named(chip).gpu).backend
        for chip in ("rtx4090", "rtx5090", "l40s", "rtxpro6000")
    }
    assert {taken.pop("RTX 40, RTX 50, L40S, RTX PRO 6000")} == cards
    assert set(taken.values()) == {FASTEST}


@pytest.mark.parametrize("page", ["README", "index", "launching", "trainers"])
def test_first_command_of_a_page_takes_the_recommended_backend(page):
    path = README if page == "README" else GUIDES / f"{page}.rst"
    first = re.search(r"--fp8_backend (\S+)", path.read_text(encoding="utf-8"))
    assert first[1] == FASTEST


def test_first_notebook_takes_the_recommended_backend():
    notebook = json.loads((ROOT / "fp8_backends/examples/first_training.ipynb").read_text("utf-8"))
    text = "".join(line for cell in notebook["cells"] for line in cell["source"])
    assert re.search(r"--fp8_backend (\S+)", text)[1] == FASTEST


def test_every_page_names_the_chips_backends():
    """Tables and pictures come from `chips.recommended`; no other string stands next to a chip."""
    guide = (GUIDES / "choosing.rst").read_text(encoding="utf-8")
    table = re.search(r"begin table machines\n(.*?)end table", guide, re.S)[1]
    picture = (GUIDES / "pictures" / "decision_tree_light.svg").read_text(encoding="utf-8")
    for _, backend, with_te in recommended():
        assert f"``{backend}``" in table and f">{backend}<" in picture
        assert with_te == backend or f"``{with_te}``" in table and with_te in picture


def test_the_proof_line_has_the_facts_of_its_record():
    """Share and engine are recorded; the layers are those of the recorded shape."""
    (line,) = re.findall(r"``(native:\S+ \d+/\d+\s+Linear,.*?)``", TEXT, re.S)
    results = ROOT / "benchmarks" / "results"
    step = json.loads((results / "step_1b_gpu.json").read_text())
    (found,) = [
        each for each in step["results"] if (each["backend"], each["form"]) == (FASTEST, "eager")
    ]
    engine, *_ = json.loads((results / "check_eager_gpu.json").read_text())["checks"]
    assert step["machine"]["chip"] == "NVIDIA H200" and engine["passed"]
    width, mlp, depth, heads, key_value = training.SHAPES[step["arguments"]["shape"]].values()
    a_layer = width * (2 * width + 2 * key_value * width // heads + 3 * mlp)
    head = a_layer * depth * (1 / found["flops_share"] - 1) / width
    # the share is that of all products of all layers but the head
    assert head == pytest.approx(training.SMALL_VOCABULARY)
    layers = 7 * depth
    proof = Proof(
        FASTEST,
        Counter(Linear=layers),
        Counter(Linear=layers + 1),
        SimpleNamespace(share=found["flops_share"]),
        ["fprop", "dgrad", "wgrad"],
        engine["engine"],
        *([], [], []),
    )
    assert " ".join(line.split()) == str(proof)


def test_versions_are_the_bounds_of_the_metadata():
    configuration = configparser.ConfigParser()
    configuration.read(ROOT / "setup.cfg", encoding="utf-8")
    bounds = dict(line.split(">=") for line in configuration["options"]["install_requires"].split())
    assert (
        f"PyTorch {bounds['torch']} to " in TEXT
        and f"Accelerate {bounds['accelerate']} or later" in TEXT
    )
    assert f"Python {configuration['options']['python_requires'].removeprefix('>=')} to " in TEXT


def comparisons() -> list[str]:
    """Return the items of the list under the question `why not … alone?`."""
    page = publish_doctree(TEXT, settings_overrides={"report_level": 5})
    (section,) = [each for each in page.findall(nodes.section) if "alone" in each[0].astext()]
    return [item.astext() for item in section.findall(nodes.list_item)]


def test_every_comparison_names_its_evidence():
    assert len(comparisons()) == 4
    section = TEXT[TEXT.index("Why not") : TEXT.index("Measured\n")]
    links = re.findall(r"\(`(\w+)\s<(\S+)>`_\)", section)
    assert all((ROOT / path).is_file() and label in path for label, path in links)
    assert all(re.search(r"\(\w+\)\.$", item) for item in comparisons())


def test_compared_figures_are_the_recorded_ones():
    record = json.loads((ROOT / "benchmarks" / "results" / "step_8b_gpu.json").read_text())
    found = {(each["backend"], each["form"]): each for each in record["results"]}
    compared = " ".join(item for item in comparisons() if "step_8b_gpu" in item)
    eager, compiled = (
        [found[name, form]["times_plain"]["ratio"] for name in ("ao:tensorwise", "native:dynamic")]
        for form in ("eager", "compiled")
    )
    peaks = [
        f"{100 - 100 * found[name, 'compiled']['peak_to_plain']:.0f}"
        for name in ("ao:tensorwise", "msamp:O2")
    ]
    assert re.findall(r"\d\.\d\d", compared) == [f"{speed:.2f}" for speed in eager]
    assert "Compiled, both are equal" in compared and compiled[0] == pytest.approx(
        compiled[1], rel=0.02
    )
    assert re.findall("\N{MINUS SIGN}(\\d+) %", compared) == peaks
