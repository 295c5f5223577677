"""Every example runs as it stands."""

from __future__ import annotations

import re

import pytest
import warm_process
from documents import README, code_blocks, literal_blocks


@pytest.mark.parametrize("block", code_blocks("python"), ids=str)
def test_every_python_block_runs_as_it_stands(block, tmp_path):
    """What a comment behind a `print` says is what it prints."""
    start = []
    if ranks := re.match(r"# torchrun --nproc_per_node (\d)", block.text):
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", ranks[1]]
    (tmp_path / "train.py").write_text(block.text)
    ended = warm_process.run(*start, "train.py", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    for call, shown in re.findall(r"^print\((.*)\)  # ([\w:]+)$", block.text, re.M):
        assert shown in ended.stdout.splitlines(), f"print({call}) did not print {shown}"


def test_examples_that_run_on_several_ranks_end_their_process_groups():
    """A rank that leaves its gloo group to Python's exit is aborted there now and then, after all its work."""
    of_ranks = [block for block in code_blocks("python") if "torchrun" in block.text]
    assert len(of_ranks) == 2
    for block in (code_blocks("python", README)[0], *of_ranks):  # several ranks of the README's are started by commands
        assert re.search(r"\b(end_training|destroy_process_group)\(\)$", block.text.rstrip()), block


def test_the_proof_line_of_the_readme_is_the_one_that_is_printed(tmp_path):
    (proof,) = [block.text.strip() for block in literal_blocks(README) if "of weight FLOPs in FP8" in block.text]
    ended = warm_process.run("-c", code_blocks("python", README)[0].text, cwd=tmp_path)
    assert proof.rpartition(" (")[0] in ended.stderr  # the engine in brackets is the machine's
