"""Compare declared requirements with imports, and bounds with pinned versions; require permissive
licences.

Licences cover the packages installed with the tests and all their dependencies.
"""

from __future__ import annotations

import ast
import configparser
import importlib.metadata
import re
import sys
from email.message import Message
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import fp8_backends

PACKAGE = Path(fp8_backends.__file__).parent
HERE = Path(__file__).parents[1]

IMPORTED_AS = {"pyyaml": "yaml", "transformer-engine": "transformer_engine"}
"""Modules with another name than their distribution."""
BROUGHT_BY = {"triton": "torch", "tokenizers": "transformers", "docutils": "sphinx"}
"""Dependencies of a declared package, imported if present."""

PERMISSIVE = set(
    "0BSD AFL-2.1 Apache-2.0 BSD-2-Clause BSD-3-Clause BSL-1.0 CC0-1.0 CNRI-Python ISC MIT MIT-0 "
    "MIT-CMU MPL-2.0 PSF-2.0 Unlicense Zlib LLVM-exception".split()
)
FAMILIES = {
    "Apache-2.0": r"Apache( 2\.0)?( Licen[cs]e)?|Apache Software License( 2\.0)?|Apache-2\.0",
    "MIT": r"MIT( License)?( .*)?",
    "BSD-3-Clause": r"(new |3-clause )?BSD( License)?|BSD-3-Clause",
    "BSD-2-Clause": r"BSD-2-Clause",
    "ISC": r"ISC( License)?( \(ISCL\))?",
    "MPL-2.0": r"Mozilla Public License 2\.0 \(MPL 2\.0\)|MPL-2\.0",
    "PSF-2.0": r"Python Software Foundation License",
    "AFL-2.1": r"Academic Free License \(AFL\)",
    "CC0-1.0": r"Public Domain",
}
"""Spellings of a licence in fields and classifiers without an SPDX expression."""
READ = {"torchao": "BSD-3-Clause", "docutils": "BSD-2-Clause AND CC0-1.0"}
"""Read from the text of a licence by a person. TorchAO's metadata name none; docutils' also name
the GPL, for an editor mode missing in its Python package."""
OF_NVIDIA = ("nvidia-", "cuda-")
"""Dependencies of PyTorch for CUDA, under NVIDIA's own licence. No file of this package needs
them."""


def declared() -> dict[str, list[Requirement]]:
    """Return requirements by extra; the unconditional ones under ""."""
    configuration = configparser.ConfigParser()
    configuration.read(HERE.parent / "setup.cfg", encoding="utf-8")
    texts = {
        "": configuration["options"]["install_requires"],
        **configuration["options.extras_require"],
    }
    return {
        name: [Requirement(line) for line in text.split("\n") if line]
        for name, text in texts.items()
    }


def every_requirement() -> dict[str, Requirement]:
    return {
        canonicalize_name(each.name): each for of_extra in declared().values() for each in of_extra
    }


@cache
def third_party_imports() -> dict[str, set[str]]:
    """Return third-party modules with the importing files, imports inside functions included."""
    found: dict[str, set[str]] = {}
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            for name in (
                {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"fp8_backends"}
            ):
                found.setdefault(name, set()).add(str(file.relative_to(PACKAGE)))
    return found


def module_of(distribution: str) -> str:
    return IMPORTED_AS.get(distribution, distribution.replace("-", "_"))


@cache
def installed() -> dict[str, importlib.metadata.Distribution]:
    """Return all declared and installed packages with their dependencies."""
    found, left = {}, list(every_requirement().values())
    while left:
        requirement = left.pop()
        name = canonicalize_name(requirement.name)
        if name in found:
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        for text in found[name].requires or ():
            further = Requirement(text)
            extras = requirement.extras or {""}
            if further.marker is None or any(
                further.marker.evaluate({"extra": extra}) for extra in extras
            ):
                left.append(further)
    return found


def licences(metadata: Message) -> set[str]:
    """Return a package's licences, by SPDX name if known: from its expression, else its
    classifiers, else its field."""
    name = canonicalize_name(metadata["Name"])
    if expression := READ.get(name) or metadata.get("License-Expression"):
        return set(re.split(r" AND | OR | WITH |[() ]+", expression)) - {""}
    texts = [each for each in metadata.get_all("Classifier", []) if each.startswith("License ::")]
    field = metadata.get("License") or "none"  # a name, names, or the whole text
    in_field = [field] if "\n" in field else field.split(" AND ")
    texts = [text.rpartition(" :: ")[2] for text in texts] or in_field
    return {spdx(" ".join(text.split())) for text in texts}


def spdx(text: str) -> str:
    return next(
        (name for name, spelling in FAMILIES.items() if re.fullmatch(spelling, text, re.I)), text
    )


def test_imports_are_declared():
    modules = {module_of(name) for name in every_requirement()} | set(BROUGHT_BY)
    assert {
        name: files for name, files in third_party_imports().items() if name not in modules
    } == {}


def test_required_packages_are_imported():
    assert [
        each.name for each in declared()[""] if module_of(each.name) not in third_party_imports()
    ] == []


def test_tested_versions_satisfy_every_bound():
    lines = (HERE / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    pinned = {canonicalize_name(name): Version(version) for name, version in pinned.items()}
    for name, requirement in every_requirement().items():
        bounds = [each.operator for each in requirement.specifier]
        assert bounds == [">="], f"{name}: one lower bound, and no upper one"
        if name != "transformer-engine":  # has no build for a CPU
            assert name in pinned and requirement.specifier.contains(pinned[name]), name


def test_installed_versions_satisfy_every_bound():
    bounds = every_requirement()
    here = {name: found.version for name, found in installed().items() if name in bounds}
    assert len(here) >= len(declared()[""])
    assert [
        name for name, version in here.items() if not bounds[name].specifier.contains(version)
    ] == []


def test_each_bound_is_declared_once():
    bounds: dict[str, set[str]] = {}
    for requirements in declared().values():
        for each in requirements:
            bounds.setdefault(each.name, set()).add(str(each.specifier))
    assert {name: each for name, each in bounds.items() if len(each) > 1} == {}


def test_dependencies_have_permissive_licences():
    others = {name: each for name, each in installed().items() if not name.startswith(OF_NVIDIA)}
    found = {name: licences(each.metadata) for name, each in others.items()}
    assert {name: named - PERMISSIVE for name, named in found.items() if named - PERMISSIVE} == {}
    assert len(found) > 20 and all(found.values())


@pytest.mark.parametrize(
    "fields, named",
    [
        ({"License-Expression": "Apache-2.0 OR BSD-2-Clause"}, {"Apache-2.0", "BSD-2-Clause"}),
        ({"License-Expression": "(MIT AND LGPL-3.0-only)"}, {"MIT", "LGPL-3.0-only"}),
        ({"Classifier": "License :: OSI Approved :: GNU Affero General Public License v3"}, None),
        ({"License": "MPL-2.0 AND MIT"}, {"MPL-2.0", "MIT"}),
        ({"License": "Proprietary"}, None),
        ({}, None),
        ({"License": "GPL", "Classifier": "License :: OSI Approved :: MIT License"}, {"MIT"}),
    ],
)
def test_licence_metadata_is_parsed(fields, named):
    metadata = Message()
    metadata["Name"] = "some-package"
    for key, value in fields.items():
        metadata[key] = value
    found = licences(metadata)
    assert found == named if named else found - PERMISSIVE
