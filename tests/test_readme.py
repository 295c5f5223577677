from __future__ import annotations

import re
from pathlib import Path

import docutils.core
import pytest
import warm_process

README = Path(__file__).parents[1] / "README.rst"


def python_blocks() -> list[str]:
    """The contents of every `.. code-block:: python`, without their indentation."""
    blocks = re.findall(r"^\.\. code-block:: python\n\n((?: {4}.*\n|\n)+)", README.read_text(), re.M)
    return [re.sub(r"^ {4}", "", block, flags=re.M).strip() + "\n" for block in blocks]


@pytest.mark.parametrize("block", python_blocks(), ids=lambda block: block.splitlines()[-1][:40])
def test_every_python_block_runs_as_it_stands(block, tmp_path):
    start = []
    if said := re.match(r"# torchrun --nproc_per_node (\d)", block):
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", said[1]]
    (tmp_path / "train.py").write_text(block)
    ended = warm_process.run(*start, "train.py", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    for call, said in re.findall(r"^print\((.*)\)  # ([\w:]+)$", block, re.M):
        assert said in ended.stdout.splitlines(), f"print({call}) did not print {said}"


def test_the_proof_line_shown_is_the_one_that_is_printed(tmp_path):
    if "bf16-exact" not in (line := re.search(r"^    (native:dynamic: 2/2 .*)$", README.read_text(), re.M)[1]):
        pytest.fail("the README shows no proof line")
    ended = warm_process.run("-c", python_blocks()[0], cwd=tmp_path)
    shown, printed = line.rpartition(" (")[0], ended.stderr
    assert shown in printed


def test_two_commands_do_everything_each_on_one_line():
    lines = [line.strip() for line in README.read_text().splitlines() if "pip install" in line]
    assert lines == [
        "python -m pip install -c tests/constraints.txt .[report] && fp8-backends compare",
        "python -m pip install -c tests/constraints.txt -e .[test,report] "
        "&& python -m pytest tests -n 2 --dist worksteal",
    ]


def test_the_text_is_valid_restructured_text():
    docutils.core.publish_string(README.read_text(), settings_overrides={"halt_level": 2, "report_level": 2})
