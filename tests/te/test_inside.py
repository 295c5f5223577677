"""Run the tests of `inside` in one process, with TransformerEngine's Python over the stand-in for
its compiled part.

Directly: `TE_SITE=FOLDER python -m pytest tests/te/inside`, with the packages of requirements.txt
in FOLDER.
"""

from __future__ import annotations

import os
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import warm_process

HERE = Path(__file__).parent


@pytest.mark.nightly
def test_tests_with_transformer_engine_pass(te_site, subtests, tmp_path):
    results = tmp_path / "results.xml"
    process = warm_process.run(
        *(
            "-m",
            "pytest",
            str(HERE / "inside"),
            "-q",
            "-p",
            "no:cacheprovider",
            f"--junitxml={results}",
        ),
        env={**os.environ, "TE_SITE": str(te_site)},
        cwd=HERE.parent.parent,
    )
    assert results.exists(), f"no test ran:\n{process.stdout[-8000:]}\n{process.stderr[-8000:]}"
    cases = list(ElementTree.parse(results).iter("testcase"))
    for case in cases:
        with subtests.test(f"{case.get('classname')}::{case.get('name')}"):
            failures = [each.text for each in case if each.tag in ("failure", "error")]
            assert not failures, "\n".join(failures)
    assert cases and process.returncode == 0, process.stdout[-8000:]


def test_pytest_process_has_no_transformer_engine():
    assert "transformer_engine" not in sys.modules and "transformer_engine_torch" not in sys.modules
