"""Configure Sphinx for the documentation: `python -m sphinx -W fp8_backends/docs OUTPUT`.

The pages are plain reStructuredText and link to each other by file name (`Levels <levels.rst>`_),
for code hosts. On the site such a link leads to the page or example, or becomes the path of another
file. A picture `NAME_light.svg` is followed by its dark variant.
`FP8_BACKENDS_DOCS_VERSIONS="latest 0.1.0"` lists the published versions, in folders side by side.
"""

import os
import re
from pathlib import Path

from docutils import nodes
from sphinx.util import logging

import fp8_backends

project = "fp8-backends"
author = "the fp8-backends authors"
version = release = fp8_backends.__version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build", "**/__pycache__"]
root_doc = "index"
highlight_language, pygments_style = "text", "default"

html_theme = "furo"
html_title = f"fp8-backends {version}"
html_static_path, templates_path = ["_static"], ["_templates"]
html_css_files, html_extra_path = ["site.css"], ["../examples"]
html_copy_source = html_show_copyright = html_use_index = html_domain_indices = False
smartquotes_action = "D"  # dashes, and quotes as they are
html_context = {"versions": os.environ.get("FP8_BACKENDS_DOCS_VERSIONS", "").split()}
_parts = ("brand", "search", "scroll-start", "navigation", "scroll-end")
html_sidebars = {"**": [*(f"sidebar/{part}.html" for part in _parts), "versions.html"]}

autodoc_member_order, autodoc_preserve_defaults = "bysource", True
autodoc_mock_imports = ["lightning"]  # no extra of the documentation
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 140  # with the modules of types, which pages leave out

FOLDER = Path(__file__).resolve().parent
REPOSITORY, EXAMPLES = FOLDER.parents[1], FOLDER.with_name("examples")
logger = logging.getLogger(__name__)


def resolve_links(app, doctree, docname):
    """Point relative links to pages and copied examples; write other files as paths."""
    for link in list(doctree.findall(nodes.reference)):
        target, mark, section = link.get("refuri", "").partition("#")
        if not target or link.get("internal") or re.match(r"\w+:", target):
            continue
        path = (FOLDER / target).resolve()
        if not path.exists():
            logger.warning("no such file: %s", target, location=link)
        elif path.parent == FOLDER:
            link["refuri"] = app.builder.get_relative_uri(docname, path.stem) + mark + section
        elif path.parent == EXAMPLES:
            link["refuri"] = path.name
        else:
            link.replace_self(nodes.literal(text=path.relative_to(REPOSITORY).as_posix()))


def add_dark_pictures(app, doctree):
    """Follow each picture `NAME_light.svg` by its dark variant. The style sheet of the theme shows
    one."""
    for image in list(doctree.findall(nodes.image)):
        if image["uri"].endswith("_light.svg") and "only-light" not in image["classes"]:
            dark = image.deepcopy()
            dark["uri"] = image["uri"].replace("_light.svg", "_dark.svg")
            image["classes"].append("only-light")
            dark["classes"].append("only-dark")
            image.parent.insert(image.parent.index(image) + 1, dark)


def literal_names(app, what, name, obj, options, lines):
    """Show `name` in a docstring as a literal, and all other characters as they are."""
    parts = re.split(r"`+", "\n".join(lines))
    parts[::2] = [re.sub(r"\*(?=\S)|\||_(?=\W|$)", r"\\\g<0>", part) for part in parts[::2]]
    lines[:] = "``".join(parts).split("\n")
    if what in ("attribute", "property"):
        lines.insert(0, "\\ ")  # napoleon takes a first line up to its colon as the type


def short_types(app, what, name, obj, options, signature, returned):
    """Name the union of all spellings of a recipe, and shorten empty defaults."""
    union = r"str \| [\w.~]*Mapping\[str, [\w.~]*Any\] \| [\w.~]*Recipe \| [\w.~]*TransformerEngineRecipe \| None"
    return re.sub(union, "Spec", signature or "").replace("<factory>", "...") or None, returned


def setup(app):
    app.connect("doctree-resolved", resolve_links)
    app.connect("doctree-read", add_dark_pictures, priority=400)  # before images are collected
    app.connect("autodoc-process-signature", short_types)
    app.connect("autodoc-process-docstring", literal_names, priority=400)  # before napoleon
    return {"parallel_read_safe": True, "parallel_write_safe": True}
