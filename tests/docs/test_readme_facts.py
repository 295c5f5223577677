"""Compare facts in the README with the package, its metadata and the records."""

from __future__ import annotations

import configparser
import json
import re
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
from documents import GUIDES, README, ROOT, literal_blocks
from docutils import nodes
from docutils.core import publish_doctree

from fp8_backends.compute.chips import advice_for, product_named, recommended
from fp8_backends.evidence.proof import Proof

sys.path.append(str(ROOT / "benchmarks"))
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


FASTEST = advice_for(product_named("h100").gpu).backend
"""The backend of first commands: an H100's, as the README's first wish."""


def test_three_wishes_take_the_recommended_backends():
    faster, memory, check = rows("wish")
    assert faster[1] == check[1] == FASTEST and memory[1] == "msamp:O2"


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
    (line,) = [block for block in literal_blocks(README) if "of weight FLOPs in FP8" in block.text]
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
    assert line.text.strip() == str(proof)


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
