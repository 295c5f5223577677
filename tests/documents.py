"""Find the pages of documentation, their blocks of code and their commands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
GUIDES = ROOT / "fp8_backends" / "docs"
README = ROOT / "README.rst"
MEASUREMENTS = ROOT / "benchmarks" / "README.rst"
DOCUMENTS = (README, *sorted(GUIDES.glob("*.rst")), MEASUREMENTS, ROOT / "tests" / "README.rst")
REFERENCE = ("api", "changelog", "checks", "fields", "patches", "tables")
"""Pages to look something up in; all others are guides, except the index."""
PROGRAMS = ("fp8-backends", "accelerate", "torchrun", "python", "bash")


class Block(NamedTuple):
    document: Path
    text: str

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}: {self.text.splitlines()[-1][:40]}"


def _blocks(document: Path, opening: str) -> list[Block]:
    found = re.findall(
        rf"{opening}\n\n((?: {{4}}.*\n|\n)+)", document.read_text(encoding="utf-8"), re.M
    )
    return [
        Block(document, re.sub(r"^ {4}", "", block, flags=re.M).strip() + "\n") for block in found
    ]


def code_blocks(language: str, *documents: Path) -> list[Block]:
    """Return every `.. code-block::` of a language, in these documents or in all."""
    return [
        block
        for document in documents or DOCUMENTS
        for block in _blocks(document, rf"^\.\. code-block:: {language}")
    ]


def literal_blocks(*documents: Path) -> list[Block]:
    """Return every block after a `::`."""
    return [
        block
        for document in documents or DOCUMENTS
        for block in _blocks(document, r"^(?!\.\. ).*::")
    ]


def commands(*documents: Path) -> list[str]:
    """Return every shell line without its comment, except installations."""
    lines = (
        "".join(block.text for block in literal_blocks(*documents))
        .replace("\\\n", " ")
        .splitlines()
    )
    lines = [line.partition("  #")[0].strip() for line in lines]
    of_a_shell = rf"([A-Z_0-9]+=\S+ )*({'|'.join(PROGRAMS)}) "
    return [line for line in lines if re.match(of_a_shell, line) and "pip install" not in line]


def script_without_recipe() -> str:
    """Return the README's script as a user of stock Accelerate has it, without this package and its
    recipe."""
    script = code_blocks("python", README)[0].text
    stock = script.replace('mixed_precision="fp8", kwargs_handlers=[recipe]', "")
    assert stock != script, "the README's python block makes its Accelerator in another way"
    return re.sub(r"^(import fp8_backends|recipe = |print).*\n", "", stock, flags=re.M)
