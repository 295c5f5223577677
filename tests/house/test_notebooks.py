"""Check reports in a notebook: well-formed tables with the words of the text, escaped, in the
theme's colours."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest
import torch
from torch import nn

import fp8_backends
from fp8_backends.convert.conversion import prepared_roots
from fp8_backends.words import as_html


def tables(html: str) -> list[list[list[str]]]:
    """Return the cells of each table. Raises `ParseError` at an unclosed tag or unescaped text."""
    page = ElementTree.fromstring(f"<div>{html}</div>")
    rows = [
        [["".join(cell.itertext()) for cell in row] for row in table.iter("tr")]
        for table in page.iter("table")
    ]
    return rows


@pytest.fixture(scope="module")
def trained():
    model = nn.ModuleDict({"a<b>": nn.Linear(32, 32), "lm_head": nn.Linear(32, 16)})
    optimizer = torch.optim.AdamW(model.parameters())
    fp8_backends.prepare(model, optimizer, "msamp:O2")
    model["lm_head"](model["a<b>"](torch.randn(16, 32))).sum().backward()
    optimizer.step()
    return model, optimizer


def shown(trained) -> dict[str, object]:
    ((_, _, prepared),) = prepared_roots(trained[0])
    findings = fp8_backends.validate("native <b>&", chip="hopper")
    return {
        "audit": fp8_backends.audit(*trained),
        "report": prepared.report,
        "plan": fp8_backends.plan("msamp:O3"),
        "finding": findings[0],
        "findings": findings,
    }


@pytest.mark.parametrize("name", ["audit", "report", "plan", "finding", "findings"])
def test_report_table_has_words_of_its_text(name, trained):
    report = shown(trained)[name]
    html = report._repr_html_()
    found = tables(html)
    assert found and all(len({len(row) for row in rows}) == 1 for rows in found)
    text = " ".join(str(report).split())
    cells = [cell for rows in found for row in rows[1:] for cell in row]
    assert all(" ".join(cell.split()) in text for cell in cells)
    assert "color" not in html and "font" not in html and len(html) < 5000


def test_an_audit_has_a_table_for_products_reasons_and_bytes(trained):
    products, reasons, sizes = tables(fp8_backends.audit(*trained)._repr_html_())
    assert products[1][:4] == ["a<b>", "1", "0", "1"] and reasons[1][0] == "lm_head"
    assert sizes[0] == ["bytes", "weight", "master", "gradient", "optimizer", "total"]


def test_empty_findings_show_a_sentence():
    found = fp8_backends.validate("native:dynamic", chip="hopper", parallel="none")
    assert found == [] and found._repr_html_() == "<p>nothing is known to go wrong</p>"


def test_numbers_are_right_aligned():
    html = as_html("", [("name", "share", "none"), ("bf16", "94 %", "-"), ("O2", "3.1", "?")])
    sides = [
        cell.get("style").split(";")[0]
        for cell in ElementTree.fromstring(f"<div>{html}</div>").iter("td")
    ]
    assert sides == ["text-align: left", "text-align: right", "text-align: right"] * 2
