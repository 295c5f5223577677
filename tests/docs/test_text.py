"""Check the pages: text, links, lengths, quoted messages, generated parts, Python blocks as
programs, the site."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import docutils.core
import generated
import pytest
import warm_process
from documents import DOCUMENTS, GUIDES, README, REFERENCE, ROOT, code_blocks, literal_blocks
from docutils import nodes
from docutils.parsers.rst import Directive, directives
from widths import nightly_but

import fp8_backends
from fp8_backends.compute import products
from fp8_backends.compute.experts.grouped_products import SCALED_GROUPED_MM

sys.path.append(str(ROOT / "benchmarks"))
import tables  # noqa: E402

PAGES = sorted(path.stem for path in GUIDES.glob("*.rst"))
ONLY_GUIDES = [name for name in PAGES if name not in (*REFERENCE, "index")]
OF_SPHINX = (*"toctree autofunction autoclass autoexception automodule".split(), "py:class")


@pytest.fixture(autouse=True)
def directives_of_sphinx(monkeypatch):
    """Stub the directives that a code host ignores."""

    class Ignored(Directive):
        has_content = True
        optional_arguments = 1
        final_argument_whitespace = True
        option_spec = dict.fromkeys(("hidden", "caption", "members"), directives.unchanged)

        def run(self):
            return []

    for name in OF_SPHINX:
        monkeypatch.setitem(directives._directives, name, Ignored)


def parsed(document):
    settings = {"halt_level": 2, "report_level": 2}
    return docutils.core.publish_doctree(
        document.read_text(encoding="utf-8"), settings_overrides=settings
    )


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_page_is_valid_and_relative_links_resolve(document):
    page, missing = parsed(document), []
    targets = [link["refuri"] for link in page.findall(nodes.reference) if "refuri" in link]
    targets += [image["uri"] for image in page.findall(nodes.image)]
    for target in targets:
        file, _, section = target.partition("#")
        if "://" in file:
            continue
        if not (document.parent / file).exists():
            missing.append(target)
        elif section and not any(
            section in of["ids"] for of in parsed(document.parent / file).findall(nodes.section)
        ):
            missing.append(target)
    assert missing == []


@pytest.mark.parametrize("name", PAGES)
def test_pages_show_light_pictures_once(name):
    """A code host shows each picture; the site adds the dark variants, and shows the one of the
    reader's scheme."""
    pictures = [image["uri"] for image in parsed(GUIDES / f"{name}.rst").findall(nodes.image)]
    assert [picture for picture in pictures if not picture.endswith("_light.svg")] == []
    dark = [GUIDES / picture.replace("_light", "_dark") for picture in pictures]
    assert [picture.name for picture in dark if not picture.exists()] == []


def test_the_index_lists_every_page_twice():
    """A link for a code host, and an entry of one of Sphinx's trees."""
    text = (GUIDES / "index.rst").read_text(encoding="utf-8")
    links, tree = (
        re.findall(r"^\* `(.+) <(\w+)\.rst>`_", text, re.M),
        re.findall(r"^   (.+) <(\w+)>$", text, re.M),
    )
    assert links == tree
    assert sorted(page for _, page in links) == sorted({*PAGES} - {"index"})


def test_there_are_at_most_22_guides():
    assert {*REFERENCE} <= {*PAGES}
    assert len(ONLY_GUIDES) <= 22


@pytest.mark.parametrize("name", ONLY_GUIDES)
def test_a_guide_has_under_1500_words(name):
    assert len((GUIDES / f"{name}.rst").read_text(encoding="utf-8").split()) < 1500


def test_blocks_of_code_fit_beside_the_navigation():
    """The style sheet has room for 120 characters in a window of 1,280 pixels."""
    blocks = [
        block
        for name in PAGES
        for block in parsed(GUIDES / f"{name}.rst").findall(nodes.literal_block)
    ]
    assert [
        line for block in blocks for line in block.astext().splitlines() if len(line) > 120
    ] == []


def test_the_api_page_documents_every_public_name():
    documented = re.findall(
        r"^\.\. auto\w+:: ([\w.]+)", (GUIDES / "api.rst").read_text(encoding="utf-8"), re.M
    )
    public = [
        f"{module.__name__}.{name}"
        for module in (fp8_backends, fp8_backends.checkpoints)
        for name in module.__all__
    ]
    assert [name for name in public if name not in documented] == []
    assert len(documented) == len({*documented})


def test_the_readme_has_at_most_180_lines():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 180


def test_troubleshooting_quotes_messages_of_the_code():
    text = (GUIDES / "troubleshooting.rst").read_text(encoding="utf-8")
    quoted = re.findall(r"^``(.+?)``(?:, ``(.+?)``)?$", text, re.M)
    messages = [message for pair in quoted for message in pair if message]
    code = "\n".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "fp8_backends").glob("**/*.py")
    )
    code = re.sub(r"[\"']\s*\n\s*f?[\"']", "", code)  # literals continued in the next line
    stock = {"layers without products: lm_head": "layers without products: "}
    missing = [message for message in messages if stock.get(message, message) not in code]
    assert len(messages) > 15 and missing == []


def test_every_engine_of_a_proof_line_is_explained():
    guide = (GUIDES / "how_it_works.rst").read_text(encoding="utf-8")
    section = guide[guide.index("Reading the proof line") : guide.index("\nThe proof\n")]
    engines = (
        products.SCALED_MM,
        products.BF16_EXACT,
        products.FP32_EXACT,
        products.EMULATED,
        SCALED_GROUPED_MM,
    )
    assert [engine for engine in (*engines, "te", "ao") if f"``{engine}``" not in section] == []


@pytest.mark.parametrize("document", generated.DOCUMENTS, ids=lambda path: path.name)
def test_a_guide_shows_its_generated_part(document):
    """`python tests/docs/generated.py --write` updates it."""
    text = generated.written(document)
    assert text == document.read_text(encoding="utf-8")
    for name, table in generated.TABLES.get(document.name, {}).items():
        assert generated.between(name, table()) in text


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_marked_table_has_a_generator(document):
    """Each program leaves the markers of the other alone, so only this finds a name that neither
    knows."""
    marked = re.findall(r"^\.\. begin table (\S+)", document.read_text(encoding="utf-8"), re.M)
    # upstream/ reads "patches"
    known = {"patches", *tables.TABLES, *generated.TABLES.get(document.name, {})}
    assert [name for name in marked if name not in known] == []


@pytest.mark.parametrize(
    "block", nightly_but(code_blocks("python", README), code_blocks("python")), ids=str
)
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
    # commands start the README's on several ranks
    for block in (code_blocks("python", README)[0], *on_ranks):
        assert re.search(r"\b(end_training|destroy_process_group)\(\)$", block.text.rstrip()), block


def test_three_changed_lines_of_the_index_print_its_proof(tmp_path):
    index = GUIDES / "index.rst"
    (change,) = code_blocks("diff", index)
    (proof,) = [
        block.text.strip()
        for block in literal_blocks(index)
        if "of weight FLOPs in FP8" in block.text
    ]
    after = [line[1:] for line in change.text.splitlines() if not line.startswith("-")]
    assert sum(line.startswith("+") for line in change.text.splitlines()) == 3
    start, step = code_blocks("python", README)[0].text.split(
        "model, optimizer = accelerator.prepare(model, optimizer)\n"
    )
    plain = [
        line
        for line in start.splitlines()
        if not re.match(r"import fp8|recipe =|accelerator =", line)
    ]
    script = "\n".join([*plain, *after, step])
    ended = warm_process.run("-c", script, cwd=tmp_path)
    assert proof.rpartition(" (")[0] in ended.stderr  # the engine in brackets is the machine's


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "-q",
        "-d",
        str(folder / "doctrees"),
        str(GUIDES),
    ]
    environment = {**os.environ, "FP8_BACKENDS_DOCS_VERSIONS": "latest 0.0.9"}
    started = {
        "capture_output": True,
        "text": True,
        "timeout": 280,
        "cwd": ROOT,
        "env": environment,
    }
    built = subprocess.run([*command, str(folder / "html")], **started)
    assert built.returncode == 0, built.stderr
    return folder / "html"


@pytest.mark.nightly
def test_pages_build_as_a_linked_site_without_warnings(site):
    pages = {path.name: path.read_text(encoding="utf-8") for path in site.glob("*.html")}
    assert {f"{name}.html" for name in PAGES} <= pages.keys()
    links = [link for page in pages.values() for link in re.findall(r'href="([^"#]+)', page)]
    assert "levels.html" in links and not [link for link in links if link.endswith(".rst")]
    local = {link for link in links if not re.match(r"\w+:|\.\./", link)}
    assert [link for link in local if not (site / link.partition("?")[0]).exists()] == []
    assert all(
        '<a class="reference internal" href="../0.0.9/index.html">' in page
        for page in pages.values()
    )


@pytest.mark.nightly
def test_the_site_requests_nothing_from_other_hosts(site):
    loads = r"""<(?:script|img|link|iframe|source|object|video)\b[^>]*?(?:src|href|data)=["']((?:\w+:)?//[^"']+)"""
    for page in site.glob("*.html"):
        assert re.findall(loads, page.read_text(encoding="utf-8")) == [], page.name
    for sheet in site.glob("_static/**/*.css"):
        text = sheet.read_text(encoding="utf-8")
        assert re.findall(r"""@import[^;]+|url\(["']?(?:\w+:)?//[^)]+""", text) == [], sheet.name


@pytest.mark.nightly
def test_docstrings_render_as_text_and_literals(site):
    page = (site / "api.html").read_text(encoding="utf-8")
    for name in re.findall(
        r"^\.\. auto(?!module)\w+:: ([\w.]+)",
        (GUIDES / "api.rst").read_text(encoding="utf-8"),
        re.M,
    ):
        assert f'id="{name}"' in page
    article = page[page.index("<article") : page.index("</article")]
    assert re.findall(r"<p>(?:Args|Returns|Raises):|>Type<span", article) == []
    text = re.sub(r"<[^>]+>", "", article)
    assert "`" not in text
    assert "~" not in text  # a signature that Sphinx cannot parse
