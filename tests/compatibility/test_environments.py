"""Compare the environments of `matrix.json` with the claims of setup.cfg."""

import configparser
import json
import re
import runpy
import shlex
from pathlib import Path

from fp8_backends.compute.chips import INSTALL_TE

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MATRIX = json.loads((HERE / "matrix.json").read_text())


def setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def test_doctor_names_te_requirement_and_only_published_packages():
    assert shlex.split(INSTALL_TE)[-1] == setup_cfg()["options.extras_require"]["te"].strip()


def test_oldest_environment_pins_every_lower_bound():
    options = setup_cfg()["options"]
    bounds = dict(line.split(">=") for line in options["install_requires"].split())
    oldest = dict(package.split("==") for package in MATRIX["oldest"]["packages"])
    assert {
        name: (oldest[name] + ".0").startswith(bound) for name, bound in bounds.items()
    } == dict.fromkeys(bounds, True)


def test_oldest_python_runs_tests_with_available_packages():
    """Some packages of the extra `test` have no version for the oldest Python."""
    entry = MATRIX["python 3.10"]
    assert setup_cfg()["options"]["python_requires"] == f">={entry['python']}"
    (report,) = setup_cfg()["options.extras_require"]["report"].split()
    assert report.replace(">=", "==") in entry["packages"] and entry["extras"] == "report"
    needed = set(setup_cfg()["options.extras_require"]["test"].split()) - {report}
    installed = {package.split("==")[0] for package in entry["packages"]} | {"setuptools"}
    modules = {line.split(">=")[0].replace("-", "_") for line in needed} - installed
    imports = re.compile(rf"^\s*(?:import|from) ({'|'.join(sorted(modules))})\b", re.MULTILINE)
    files = [file for folder in entry["tests"] for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 50
    assert {
        str(file): found
        for file in files
        if (found := imports.findall(file.read_text(encoding="utf-8")))
    } == {}


def test_pinned_environment_follows_constraints_and_newest_is_unpinned():
    constraints = (ROOT / "tests" / "constraints.txt").read_text().splitlines()
    assert set(MATRIX["pinned"]["packages"]) <= set(constraints)
    newest = set(MATRIX["newest"]["packages"])
    assert all(re.fullmatch(r"[\w-]+", package) for package in newest)
    assert newest >= {
        line.split(">=")[0] for line in setup_cfg()["options"]["install_requires"].split()
    }


def test_entry_replaces_only_its_packages_in_constraints():
    constraints_of = runpy.run_path(str(HERE / "run.py"))["constraints_of"]
    all_lines = constraints_of([]).splitlines()
    kept = constraints_of(["torch==2.11.0", "rich"]).splitlines()
    assert {line.split("==")[0] for line in all_lines if line not in kept} == {"torch", "rich"}


def test_workflow_runs_every_entry_with_one_command():
    workflow = (ROOT / ".github" / "workflows" / "compatibility.yml").read_text()
    assert "tests/compatibility/matrix.json" in workflow
    assert 'python tests/compatibility/run.py "${{ matrix.name }}"' in workflow


def test_ci_and_the_workflow_run_the_nightly_tests():
    command = "-n 2 --dist worksteal -m nightly"
    workflow = (ROOT / ".github" / "workflows" / "compatibility.yml").read_text()
    ((entry, arguments),) = re.findall(r"run\.py (\w+) -- (.*)$", workflow, re.M)
    assert arguments == command and MATRIX[entry]["python"] == "3.11"
    assert re.findall(r'python-version: "(3\.\d+)"', workflow) == ["3.11"]
    assert f"python -m pytest tests {command}" in (ROOT / ".ci" / "run").read_text()
    assert '-m "not nightly"' in setup_cfg()["tool:pytest"]["addopts"]
