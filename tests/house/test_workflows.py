"""Check the files of a code host: every path, module, entry and command they name exists, and their
shell is valid."""

from __future__ import annotations

import configparser
import importlib.util
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from fp8_backends.tools.examples import examples
from fp8_backends.tools.main import main

ROOT = Path(__file__).resolve().parents[2]
HOST = ROOT / ".github"
WORKFLOWS = sorted((HOST / "workflows").glob("*.yml"))
FORMS = sorted((HOST / "ISSUE_TEMPLATE").glob("*.yml"))
HOSTED = ROOT / ".readthedocs.yaml"
SHELL = {"export", "if", "else", "fi"}
"""Words at the start of a line besides programs."""


def loaded(path: Path) -> dict:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def steps(workflow: Path) -> list[str]:
    """Return the shell of every step, with a word for each expression of the host."""
    jobs = loaded(workflow)["jobs"].values()
    texts = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    return [re.sub(r"\$\{\{.*?\}\}", "EXPRESSION", text) for text in texts]


def extras() -> set[str]:
    configuration = configparser.ConfigParser()
    configuration.read(ROOT / "setup.cfg", encoding="utf-8")
    return set(configuration["options.extras_require"])


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_names_only_existing_things(workflow):
    text = "\n".join(steps(workflow))
    paths = re.findall(
        r"(?<![\w/.-])((?:tests|benchmarks|fp8_backends|\.github|\.ci)(?:/[\w.-]+)+)", text
    )
    assert paths and [path for path in paths if not (ROOT / path).exists()] == []
    assert [
        name
        for name in re.findall(r"\bpython -m (\w+)", text)
        if importlib.util.find_spec(name) is None
    ] == []
    named = {name for group in re.findall(r"\.\[([\w,]+)\]", text) for name in group.split(",")}
    assert named <= extras()
    starts = {line.split()[0] for line in text.splitlines() if line.strip() and line[0] not in " -"}
    programs = {word for word in starts if not re.search(r"[$\"'=]", word)} - SHELL
    assert [word for word in programs if not shutil.which(word)] == []


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_shell_of_each_step_is_valid(workflow):
    for text in steps(workflow):
        checked = subprocess.run(["bash", "-n", "-c", text], capture_output=True, text=True)
        assert checked.returncode == 0, f"{text}\n{checked.stderr}"


def test_each_push_runs_every_claimed_python():
    jobs = loaded(HOST / "workflows" / "push.yml")["jobs"]
    entries = json.loads((ROOT / "tests" / "compatibility" / "matrix.json").read_text())
    included = jobs["fast"]["strategy"]["matrix"]["include"]
    assert all(entries[each["name"]]["python"] == each["python"] for each in included)
    claimed = re.findall(r"Python :: (3\.\d+)", (ROOT / "setup.cfg").read_text(encoding="utf-8"))
    assert claimed == [each["python"] for each in included]
    assert f"Python {claimed[0]} to {claimed[-1]}" in (ROOT / "README.rst").read_text(
        encoding="utf-8"
    )


def test_commands_of_the_wheel_job_exist(tmp_path, monkeypatch, capsys):
    text = "\n".join(steps(HOST / "workflows" / "push.yml"))
    ((command, name),) = re.findall(r"bin/fp8-backends (\w+) (\w+)$", text, re.M)
    monkeypatch.chdir(tmp_path)
    assert main([command, name]) == 0 and name in examples()
    assert f"python {name}.py" in text and Path(f"{name}.py").exists()


def test_hosts_build_the_site_by_one_command():
    command = "python -m sphinx -W fp8_backends/docs"
    assert command in "\n".join(steps(HOST / "workflows" / "documentation.yml"))
    hosted = loaded(HOSTED)
    assert (ROOT / hosted["sphinx"]["configuration"]).is_file() and hosted["sphinx"][
        "fail_on_warning"
    ]
    (installed,) = hosted["python"]["install"]
    assert set(installed["extra_requirements"]) <= extras()


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_issue_form_is_complete(form):
    found = loaded(form)
    assert found.keys() >= {"name", "description", "body"}
    fields = [each["attributes"] for each in found["body"]]
    assert all(field["label"] and field["description"] for field in fields)
    names = [each["id"] for each in found["body"]]
    assert len(names) == len(set(names))


def test_pages_for_contributors_link_to_existing_files():
    pages = [HOST / name for name in ("CONTRIBUTING.rst", "SECURITY.md")]
    links = [
        HOST / link
        for page in pages
        for link in re.findall(r"[<(](\.\./[^>)]+)[>)]", page.read_text("utf-8"))
    ]
    assert len(links) == 4 and [link for link in links if not link.is_file()] == []


def test_bug_report_requires_output_of_doctor():
    (asked,) = [
        each
        for each in loaded(HOST / "ISSUE_TEMPLATE" / "bug.yml")["body"]
        if each["id"] == "doctor"
    ]
    assert (
        asked["validations"] == {"required": True}
        and "`fp8-backends doctor --json`" in asked["attributes"]["label"]
    )


@pytest.mark.nightly
def test_versions_of_the_site_stay_in_folders(tmp_path):
    """Run the steps of the workflow for two pushes and a tag between them, with a site of one
    page."""
    remote, source = tmp_path / "remote.git", tmp_path / "source"
    (source / "fp8_backends" / "docs").mkdir(parents=True)
    git = ["git", "-c", "user.name=name", "-c", "user.email=email"]
    docs = source / "fp8_backends" / "docs"
    docs.joinpath("conf.py").write_text(
        "import os\nproject = os.environ['FP8_BACKENDS_DOCS_VERSIONS']\n"
    )
    docs.joinpath("index.rst").write_text("Title\n=====\n")
    run([*git, "init", "--quiet", "--bare", str(remote)], tmp_path)
    run([*git, "init", "--quiet", "--initial-branch", "main"], source)
    run([*git, "add", "."], source)
    run([*git, "commit", "--quiet", "-m", "Begin"], source)
    run([*git, "remote", "add", "origin", str(remote)], source)
    for number, version in enumerate(("latest", "v0.3.0", "latest")):
        checkout = tmp_path / f"checkout{number}"
        shutil.copytree(source, checkout)
        for step in loaded(HOST / "workflows" / "documentation.yml")["jobs"]["site"]["steps"]:
            if "name" in step:
                shell = step["run"].replace("${{ github.ref_name }}", version)
                run(["bash", "-e", "-c", shell], checkout, FOLDER=version)
    run([*git, "clone", "--quiet", "--branch", "gh-pages", str(remote), "pages"], tmp_path)
    pages = tmp_path / "pages"
    assert {path.name for path in pages.iterdir()} == {
        ".git",
        ".nojekyll",
        "index.html",
        "latest",
        "v0.3.0",
    }
    assert "latest v0.3.0" in (pages / "latest" / "index.html").read_text()


def run(command: list[str], folder: Path, **environment: str) -> None:
    ended = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert ended.returncode == 0, f"{command}\n{ended.stdout}\n{ended.stderr}"
