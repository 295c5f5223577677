"""Run the tests that need Triton in two processes: `inside` runs kernels in its interpreter, on
tensors of the CPU; `ahead` compiles them for compute capability 9.0.

Run them directly, with Triton in FOLDER:

    export TRITON_SITE=FOLDER PYTHONPATH=FOLDER
    TRITON_INTERPRET=1 python -m pytest tests/kernels/triton_kernels/inside
    python -m pytest tests/kernels/triton_kernels/ahead
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

HERE = Path(__file__).parent


INTERPRETED = {"TRITON_INTERPRET": "1"}


@pytest.mark.parametrize(
    "folder, variables, marked",
    [
        ("inside", INTERPRETED, "not nightly"),
        pytest.param("inside", INTERPRETED, "nightly", marks=pytest.mark.nightly),
        pytest.param("ahead", {}, "not nightly", marks=pytest.mark.nightly),
    ],
)
def test_triton_process_passes(folder, variables, marked, triton_site, subtests, tmp_path):
    results = tmp_path / "results.xml"
    path = os.pathsep.join([str(triton_site), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables |= {
        "TRITON_SITE": str(triton_site),
        "PYTHONPATH": path,
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
    }
    # a warm process has loaded an installed Triton, which cannot turn into the interpreter
    command = [sys.executable, "-m", "pytest", str(HERE / folder), "-q", "-m", marked]
    process = subprocess.run(
        [*command, "-p", "no:cacheprovider", f"--junitxml={results}"],
        env=os.environ | variables,
        cwd=HERE.parents[2],
        capture_output=True,
        text=True,
        timeout=290,
    )
    assert results.exists(), f"no test ran:\n{process.stdout[-8000:]}\n{process.stderr[-8000:]}"
    cases = list(ElementTree.parse(results).iter("testcase"))
    for case in cases:
        with subtests.test(f"{case.get('classname')}::{case.get('name')}"):
            failures = [each.text for each in case if each.tag in ("failure", "error")]
            assert not failures, "\n".join(failures)
    assert cases and process.returncode == 0, process.stdout[-8000:]
