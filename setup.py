"""Adapt the README to a package index, and keep tests out of the source distribution."""

import re
from pathlib import Path

from setuptools import setup
from setuptools.command.sdist import sdist


def description(readme: str) -> str:
    """Return the README without its picture and relative links, dead on an index."""
    readme = re.sub(
        r"^\.\. begin picture\n.*?^\.\. end picture\n\n", "", readme, flags=re.DOTALL | re.MULTILINE
    )
    readme = re.sub(r"`([^`<]+?)\s+<(?!\w+:)[^>]+>`_+", r"\1", readme)  # `text <path>`_
    readme = re.sub(r"^__ .*\n", "", readme, flags=re.MULTILINE)
    return re.sub(r"`([^`\n]+)`__", r"``\1``", readme)  # as wide as before, for tables


class Sources(sdist):
    def make_release_tree(self, base_dir, files):
        """Leave out the files of tests that setuptools finds: a few of many, which cannot run
        alone."""
        super().make_release_tree(
            base_dir, [file for file in files if not file.startswith("tests/")]
        )


readme = Path(__file__).with_name("README.rst").read_text(encoding="utf-8")
setup(
    long_description=description(readme),
    license_expression="Apache-2.0",
    cmdclass={"sdist": Sources},
)
