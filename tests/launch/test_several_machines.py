"""Start two nodes on this machine with the files of the guide `examples.rst`: by Slurm's script,
and by launchers."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from documents import GUIDES, ROOT, code_blocks, script_without_recipe

GUIDE = GUIDES / "examples.rst"


def block(language: str, name: str) -> str:
    """Return the file of this name in the guide."""
    (found,) = [block.text for block in code_blocks(language, GUIDE) if f"# {name}\n" in block.text]
    return found


@pytest.fixture
def folder(tmp_path):
    """A folder with the guide's files, for two nodes of one rank each."""
    # `accelerate launch` needs the import, as the guide says
    (tmp_path / "train.py").write_text(f"import fp8_backends\n{script_without_recipe()}")
    (tmp_path / "two_ranks.py").write_bytes(
        (ROOT / "fp8_backends" / "examples" / "two_ranks.py").read_bytes()
    )
    config = yaml.safe_load(block("yaml", "nodes.yaml"))
    config |= {"num_processes": 2, "main_process_ip": "127.0.0.1", "main_process_port": free_port()}
    (tmp_path / "nodes.yaml").write_text(yaml.safe_dump(config))
    slurm = block("bash", "train.slurm")
    assert "--nproc_per_node 8" in slurm
    (tmp_path / "train.slurm").write_text(slurm.replace("--nproc_per_node 8", "--nproc_per_node 1"))
    return tmp_path


def environment(folder: Path) -> dict[str, str]:
    path = os.pathsep.join(
        [str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    )
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def outputs(commands: list[str], folder: Path) -> str:
    """Run shell commands at the same time; return everything printed."""
    ends = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": folder}
    nodes = [
        subprocess.Popen(["bash", "-c", line], env=environment(folder), **ends) for line in commands
    ]
    try:
        printed = [node.communicate(timeout=280)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0] * len(nodes), "\n".join(printed)
    return "\n".join(printed)


@pytest.mark.nightly
@pytest.mark.parametrize("program", ["fp8-backends", "accelerate"])
def test_two_launches_of_the_guides_configuration_train_together(program, folder):
    """The guide has both lines of `fp8-backends`, and the first of `accelerate`."""
    text = GUIDE.read_text(encoding="utf-8")
    lines = re.findall(
        rf"^    ({program} launch --config_file nodes.yaml .*?)(?:  #.*)?$", text, re.M
    )
    first = lines[0].replace("accelerate ", "python -m accelerate.commands.accelerate_cli ")
    first = first.replace("fp8-backends ", "python -m fp8_backends ")
    printed = outputs([first, first.replace("--machine_rank 0", "--machine_rank 1")], folder)
    assert len(re.findall(r"^msamp:O4: 2/2 Linear, 100 % of weight FLOPs", printed, re.M)) == 1, (
        printed
    )


SRUN = """#!/bin/bash
for id in 0 1; do SLURM_NODEID=$id "$@" & jobs="$jobs $!"; done
for job in $jobs; do wait $job || exit 1; done
"""
"""One task on each of two nodes, as Slurm's `srun` starts them."""


@pytest.mark.nightly
def test_the_guides_slurm_script_trains_on_two_nodes(folder):
    """Slurm needs a cluster: two short programs start the tasks in its place. The script is the
    guide's."""
    programs = {
        "srun": SRUN,
        "scontrol": "#!/bin/bash\necho 127.0.0.1\n",
        "torchrun": f'#!/bin/bash\nexec {sys.executable} -m torch.distributed.run "$@"\n',
    }
    (folder / "bin").mkdir()
    for name, text in programs.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    slurm = f"SLURM_NNODES=2 SLURM_JOB_NODELIST=nodes MASTER_PORT={free_port()} bash train.slurm"
    printed = outputs([slurm], folder)
    assert "the mean over 2 rank(s)" in printed
    assert len(re.findall(r"^msamp:O3: [23]/3 Linear", printed, re.M)) == 1, printed
