"""The guides build as web pages."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from documents import GUIDES


@pytest.mark.slow
def test_the_guides_build_without_a_warning_and_link_to_each_other(tmp_path):
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "-d", str(tmp_path / "doctrees"), str(GUIDES)]
    built = subprocess.run([*command, str(tmp_path / "html")], capture_output=True, text=True, timeout=240)
    assert built.returncode == 0, built.stderr
    pages = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "html").glob("*.html")}
    assert {f"{guide.stem}.html" for guide in GUIDES.glob("*.rst")} <= pages.keys()
    links = [link for page in pages.values() for link in re.findall(r'href="([^"#]+)', page)]
    assert "levels.html" in links and not [link for link in links if link.endswith(".rst")]
