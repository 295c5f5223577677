"""Check the wheel, the source distribution and their description, as a package index would receive
them."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import docutils.core
import pytest
from documents import script_without_recipe
from docutils import nodes

import fp8_backends

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "fp8_backends"
CHANGELOG = (PACKAGE / "docs" / "changelog.rst").read_text(encoding="utf-8")
README = (ROOT / "README.rst").read_text(encoding="utf-8")
SUFFIXES = {".py", ".rst", ".cpp", ".css", ".typed"}


def test_changelog_begins_with_this_version_in_short_sections():
    titles = re.findall(r"^(.+)\n-+$", CHANGELOG, re.M)
    assert titles[0].split()[0] == fp8_backends.__version__
    sections = re.split(r"^.+\n-+\n", CHANGELOG, flags=re.M)[1:]
    lines = [[line for line in section.splitlines() if line] for section in sections]
    assert len(sections) == len(titles) >= 3 and max(map(len, lines)) <= 10


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """Build both from a copy of the sources; `build` makes the wheel from the source
    distribution."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("fp8_backends", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("setup.cfg", "setup.py", "LICENSE", "README.rst"):
        shutil.copy(ROOT / name, source)
    run(
        [
            sys.executable,
            "-m",
            "build",
            "--no-isolation",
            "--outdir",
            str(folder / "dist"),
            str(source),
        ],
        folder,
    )
    return folder / "dist"


@pytest.fixture(scope="module")
def wheel(built) -> Path:
    (found,) = built.glob("*.whl")
    return found


def run(command: list[str], folder: Path, **environment: str) -> str:
    """Return the output and messages of a command."""
    ended = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, **environment},
    )
    assert ended.returncode == 0, f"{command}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout + ended.stderr


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as packed:
        (name,) = [name for name in packed.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_string(packed.read(name).decode())


@pytest.mark.nightly
def test_wheel_holds_the_package_and_its_guides_within_a_megabyte(wheel):
    with zipfile.ZipFile(wheel) as packed:
        names = {name for name in packed.namelist() if ".dist-info/" not in name}
    assert wheel.stat().st_size <= 1_000_000
    docs = PACKAGE / "docs"
    files = {
        path
        for path in PACKAGE.rglob("*")
        if path.suffix in SUFFIXES and not path.is_relative_to(docs)
    }
    assert names == {path.relative_to(ROOT).as_posix() for path in (*files, *docs.glob("*.rst"))}
    assert {
        f"fp8_backends/{name}" for name in ("py.typed", "docs/index.rst", "examples/vit.py")
    } <= names


@pytest.mark.nightly
def test_source_distribution_holds_no_tests(built):
    (found,) = built.glob("*.tar.gz")
    with tarfile.open(found) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    assert found.stat().st_size <= 1_000_000
    tops = {name.split("/")[0] for name in names} - {"", "fp8_backends.egg-info", "PKG-INFO"}
    assert tops == {"LICENSE", "README.rst", "fp8_backends", "setup.cfg", "setup.py"}


@pytest.mark.nightly
def test_twine_accepts_both_strictly(built):
    files = [str(path) for path in built.iterdir()]
    assert (
        run([sys.executable, "-m", "twine", "check", "--strict", *files], built).count("PASSED")
        == len(files)
        == 2
    )


@pytest.mark.nightly
def test_metadata_name_version_and_licence(wheel):
    found = metadata(wheel)
    assert (found["Name"], found["Version"]) == ("fp8-backends", fp8_backends.__version__)
    assert (found["License-Expression"], found["License-File"]) == ("Apache-2.0", "LICENSE")
    assert found["License"] is None and not [
        each for each in found.get_all("Classifier") if "License" in each
    ]


@pytest.mark.nightly
def test_description_has_no_picture_or_link_into_the_repository(wheel):
    description = metadata(wheel).get_payload()
    settings = {"halt_level": 2, "report_level": 2}
    page = docutils.core.publish_doctree(description, settings_overrides=settings)
    links = [link["refuri"] for link in page.findall(nodes.reference) if "refuri" in link]
    assert links and [link for link in links if "://" not in link] == []
    assert not list(page.findall(nodes.image)) and "image::" in README
    assert [
        word
        for word in ("fp8-backends launch", "Why not TorchAO", "step_8b_gpu")
        if word not in description
    ] == []


@pytest.mark.nightly
def test_installed_wheel_trains_an_unchanged_script(wheel, tmp_path):
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(site),
    ]
    run([*pip, str(wheel)], tmp_path)
    (empty / "train.py").write_text(
        f"{script_without_recipe()}\nimport fp8_backends\nprint(fp8_backends.__file__)\n"
    )
    (command,) = re.findall(r"^ {4}fp8-backends (launch --fp8_backend \S+ train.py)$", README, re.M)
    shown = run([str(site / "bin" / "fp8-backends"), *command.split()], empty, PYTHONPATH=str(site))
    assert re.search(r"^native:dynamic: 2/2 Linear, 100 % of weight FLOPs in FP8", shown, re.M)
    assert str(site / "fp8_backends") in shown
