"""The pages are valid, their links lead somewhere, and the messages that they quote exist."""

from __future__ import annotations

import re

import docutils.core
import pytest
from documents import DOCUMENTS, GUIDES, README, ROOT
from docutils import nodes
from docutils.parsers.rst import Directive, directives

from fp8_backends.compute import products
from fp8_backends.compute.native.grouped_products import SCALED_GROUPED_MM


@pytest.fixture(autouse=True)
def toctree(monkeypatch):
    """Sphinx's directive, which a code host passes over: the only one of its own in these pages."""

    class Toctree(Directive):
        has_content = True
        option_spec = {"hidden": directives.flag}

        def run(self):
            return []

    monkeypatch.setitem(directives._directives, "toctree", Toctree)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_is_valid_and_its_relative_links_lead_to_files(document):
    settings = {"halt_level": 2, "report_level": 2}
    page = docutils.core.publish_doctree(document.read_text(encoding="utf-8"), settings_overrides=settings)
    targets = [link["refuri"] for link in page.findall(nodes.reference) if "refuri" in link]
    missing = [target for target in targets if "://" not in target and not (document.parent / target).exists()]
    assert missing == []


def test_the_index_lists_every_guide_twice():
    """As a link for a code host, and in Sphinx's own tree."""
    text = (GUIDES / "index.rst").read_text(encoding="utf-8")
    guides = sorted(path.stem for path in GUIDES.glob("*.rst") if path.stem != "index")
    links, tree = re.findall(r"<(\w+)\.rst>`_", text), text.partition(":hidden:\n")[2].split()
    assert sorted(links) == sorted(tree) == guides


def test_the_readme_has_at_most_250_lines():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 250


def test_messages_of_troubleshooting_are_those_of_the_code():
    text = (GUIDES / "troubleshooting.rst").read_text(encoding="utf-8")
    quoted = re.findall(r"^``(.+?)``(?:, ``(.+?)``)?$", text, re.M)
    messages = [message for pair in quoted for message in pair if message]
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "fp8_backends").glob("**/*.py"))
    code = re.sub(r"[\"']\s*\n\s*f?[\"']", "", code)  # literals that go on in the next line
    stock = {"layers without products: lm_head": "layers without products: "}
    missing = [message for message in messages if stock.get(message, message) not in code]
    assert len(messages) > 15 and missing == []


def test_every_engine_of_a_proof_line_is_explained():
    guide = (GUIDES / "how_it_works.rst").read_text(encoding="utf-8")
    section = guide[guide.index("Reading the proof line") : guide.index("\nThe proof\n")]
    engines = (products.SCALED_MM, products.BF16_EXACT, products.FP32_EXACT, products.EMULATED, SCALED_GROUPED_MM)
    assert [engine for engine in (*engines, "te", "ao") if f"``{engine}``" not in section] == []
