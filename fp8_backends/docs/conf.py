"""Configure Sphinx for the guides: `python -m sphinx -W fp8_backends/docs OUTPUT`.

The guides are plain reStructuredText and link to each other by file name (`Levels <levels.rst>`_), for code hosts. On
the web pages such a link leads to the page, or becomes the path of a file outside this folder.
"""

from pathlib import Path

from docutils import nodes
from sphinx.util import logging

project = "fp8-backends"
author = "the fp8-backends authors"
extensions = []
html_theme = "alabaster"
exclude_patterns = ["_build"]
root_doc = "index"
FOLDER = Path(__file__).resolve().parent
REPOSITORY = FOLDER.parents[1]
logger = logging.getLogger(__name__)


def resolve_links(app, doctree, docname):
    """Point relative links to pages, and write links out of the folder as paths. Warn about missing files."""
    for link in list(doctree.findall(nodes.reference)):
        target = link.get("refuri", "")
        if not target.endswith((".rst", ".py")) or "://" in target:
            continue
        path = (FOLDER / target).resolve()
        if not path.exists():
            logger.warning("no such file: %s", target, location=link)
        elif path.parent == FOLDER:
            link["refuri"] = app.builder.get_relative_uri(docname, path.stem)
        else:
            link.replace_self(nodes.literal(text=path.relative_to(REPOSITORY).as_posix()))


def setup(app):
    app.connect("doctree-resolved", resolve_links)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
