"""Check the pages: valid text and links, quoted messages, generated parts, Python blocks as programs, a build."""

from __future__ import annotations

import re
import subprocess
import sys

import docutils.core
import generated
import pytest
import warm_process
from documents import DOCUMENTS, GUIDES, README, ROOT, code_blocks, literal_blocks
from docutils import nodes
from docutils.parsers.rst import Directive, directives
from widths import nightly_but

from fp8_backends.compute import products
from fp8_backends.compute.experts.grouped_products import SCALED_GROUPED_MM


@pytest.fixture(autouse=True)
def toctree(monkeypatch):
    """Stub Sphinx's only directive in these pages, ignored by a code host."""

    class Toctree(Directive):
        has_content = True
        option_spec = {"hidden": directives.flag}

        def run(self):
            return []

    monkeypatch.setitem(directives._directives, "toctree", Toctree)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_page_is_valid_and_relative_links_resolve(document):
    settings = {"halt_level": 2, "report_level": 2}
    page = docutils.core.publish_doctree(document.read_text(encoding="utf-8"), settings_overrides=settings)
    targets = [link["refuri"] for link in page.findall(nodes.reference) if "refuri" in link]
    missing = [target for target in targets if "://" not in target and not (document.parent / target).exists()]
    assert missing == []


def test_the_index_lists_every_guide_twice():
    """A link for a code host, and an entry of Sphinx's tree."""
    text = (GUIDES / "index.rst").read_text(encoding="utf-8")
    guides = sorted(path.stem for path in GUIDES.glob("*.rst") if path.stem != "index")
    links, tree = re.findall(r"<(\w+)\.rst>`_", text), text.partition(":hidden:\n")[2].split()
    assert sorted(links) == sorted(tree) == guides


def test_the_readme_has_at_most_200_lines():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 200


def test_troubleshooting_quotes_messages_of_the_code():
    text = (GUIDES / "troubleshooting.rst").read_text(encoding="utf-8")
    quoted = re.findall(r"^``(.+?)``(?:, ``(.+?)``)?$", text, re.M)
    messages = [message for pair in quoted for message in pair if message]
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "fp8_backends").glob("**/*.py"))
    code = re.sub(r"[\"']\s*\n\s*f?[\"']", "", code)  # literals continued in the next line
    stock = {"layers without products: lm_head": "layers without products: "}
    missing = [message for message in messages if stock.get(message, message) not in code]
    assert len(messages) > 15 and missing == []


def test_every_engine_of_a_proof_line_is_explained():
    guide = (GUIDES / "how_it_works.rst").read_text(encoding="utf-8")
    section = guide[guide.index("Reading the proof line") : guide.index("\nThe proof\n")]
    engines = (products.SCALED_MM, products.BF16_EXACT, products.FP32_EXACT, products.EMULATED, SCALED_GROUPED_MM)
    assert [engine for engine in (*engines, "te", "ao") if f"``{engine}``" not in section] == []


@pytest.mark.parametrize("document", generated.DOCUMENTS, ids=lambda path: path.name)
def test_a_guide_shows_its_generated_part(document):
    """`python tests/docs/generated.py --write` updates it."""
    text = generated.written(document)
    assert text == document.read_text(encoding="utf-8")
    if document.name in generated.TABLES:
        name, table = generated.TABLES[document.name]
        assert generated.between(name, table()) in text


@pytest.mark.slow
@pytest.mark.parametrize("block", nightly_but(code_blocks("python", README), code_blocks("python")), ids=str)
def test_every_python_block_runs_and_prints_its_comments(block, tmp_path):
    start = []
    if ranks := re.match(r"# torchrun --nproc_per_node (\d)", block.text):
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", ranks[1]]
    (tmp_path / "train.py").write_text(block.text)
    ended = warm_process.run(*start, "train.py", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    for call, shown in re.findall(r"^print\((.*)\)  # ([\w:]+)$", block.text, re.M):
        assert shown in ended.stdout.splitlines(), f"print({call}) did not print {shown}"


def test_examples_on_several_ranks_end_their_process_groups():
    """Python sometimes aborts a rank with an open gloo group at exit, after all its work."""
    on_ranks = [block for block in code_blocks("python") if "torchrun" in block.text]
    assert len(on_ranks) == 2
    for block in (code_blocks("python", README)[0], *on_ranks):  # commands start the README's on several ranks
        assert re.search(r"\b(end_training|destroy_process_group)\(\)$", block.text.rstrip()), block


def test_the_readme_shows_the_printed_proof_line(tmp_path):
    (proof,) = [block.text.strip() for block in literal_blocks(README) if "of weight FLOPs in FP8" in block.text]
    ended = warm_process.run("-c", code_blocks("python", README)[0].text, cwd=tmp_path)
    assert proof.rpartition(" (")[0] in ended.stderr  # the engine in brackets is the machine's


@pytest.mark.nightly
def test_guides_build_as_linked_web_pages_without_warnings(tmp_path):
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "-d", str(tmp_path / "doctrees"), str(GUIDES)]
    built = subprocess.run([*command, str(tmp_path / "html")], capture_output=True, text=True, timeout=240)
    assert built.returncode == 0, built.stderr
    pages = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "html").glob("*.html")}
    assert {f"{guide.stem}.html" for guide in GUIDES.glob("*.rst")} <= pages.keys()
    links = [link for page in pages.values() for link in re.findall(r'href="([^"#]+)', page)]
    assert "levels.html" in links and not [link for link in links if link.endswith(".rst")]
