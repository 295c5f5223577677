"""The reason of a failed import of TransformerEngine, and where to look for the fix."""

from __future__ import annotations

import sys

import pytest

from fp8_backends.compute.te.installation import GUIDE, explain, probe


def test_the_exception_is_quoted_beside_the_installation_guide():
    explained = explain(OSError("libcudnn_adv.so.9: cannot open shared object file"))
    assert not explained and GUIDE in explained.fix
    assert explained.reason == (
        "importing TransformerEngine fails with OSError: libcudnn_adv.so.9: cannot open shared object file"
    )
    assert explain(ImportError("several\nlines")).reason.endswith("fails with ImportError: several lines")
    assert explain(AssertionError()).reason.endswith("fails with AssertionError")


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Install a package of that name, whose import runs the given code."""

    def install(code: str) -> None:
        package = tmp_path / "transformer_engine"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "pytorch.py").write_text(code)
        (tmp_path / "torch.py").touch()  # the new process does not need the real one
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return install


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import pydantic_of_nowhere", "fails with ModuleNotFoundError: No module named 'pydantic_of_nowhere'"),
        ("print('noise'); raise OSError('libnccl.so.2: cannot open')", "fails with OSError: libnccl.so.2: cannot open"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ends the process with SIGSEGV"),
        ("import os; os._exit(3)", "fails with no message"),
    ],
)
def test_probe_explains_what_the_import_does(installed, code, said):
    installed(code)
    found = probe()
    assert not found and said in found.reason and GUIDE in found.fix
    assert "transformer_engine" not in sys.modules


def test_probe_of_a_good_installation_can_run(installed):
    installed("")
    assert probe()


def test_probe_of_an_import_that_hangs_comes_back(installed):
    installed("import time; time.sleep(60)")
    found = probe(time_limit=1)
    assert not found and "within 1 seconds" in found.reason
