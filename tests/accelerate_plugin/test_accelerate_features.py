"""Accelerate's other features with FP8 on one process, as `feature_table.py` has them.
`tests/distributed` has two."""

from __future__ import annotations

import feature_runs
import pytest
import warm_process
import yaml
from accelerate.commands.config import cluster
from accelerate.test_utils import path_in_accelerate_package
from feature_table import BACKENDS, FEATURES, Feature, cells, in_turn
from widths import nightly

from fp8_backends.tools.config import read

COMMANDS = {"accelerate_test", "accelerate_config"}
"""Rows with a separate test here, on one process and on two."""
IN_PROCESS = [cell for cell in cells() if cell[0].run not in COMMANDS]
BY_DEFAULT = [cell for cell in IN_PROCESS if in_turn(*cell, processes=1)]
ALONE = [(feature, each) for feature, each in IN_PROCESS if feature.cell(each) == "one process"]
"""Cells that work on one process alone; the nightly run has all others on two ranks."""


def row(run: str) -> Feature:
    return next(feature for feature in FEATURES if feature.run == run)


@pytest.mark.parametrize(
    ("feature", "backend"),
    [*BY_DEFAULT, *(nightly(*cell) for cell in ALONE if cell not in BY_DEFAULT)],
    ids=lambda value: getattr(value, "run", value),
)
def test_feature(feature: Feature, backend: str, tmp_path):
    feature_runs.run_as_listed(feature, backend, tmp_path)


def test_table_rows_and_feature_runs_correspond():
    rows = [feature.run for feature in FEATURES]
    assert sorted(rows) == sorted({*feature_runs.RUNS, *COMMANDS})
    tests = {name.removeprefix("test_") for name in globals()}
    assert all(any(test.startswith(command) for test in tests) for command in COMMANDS)


def test_missing_or_different_refusal_fails(tmp_path):
    works, refused = row("trigger_sync"), row("schedule_free")
    with pytest.raises(AssertionError, match="was not refused"):
        feature_runs.run_as_listed(
            works._replace(refused={"native:delayed": "words"}), "native:delayed", tmp_path
        )
    with pytest.raises(AssertionError):
        feature_runs.run_as_listed(
            refused._replace(refused={"msamp:O2": "other words"}), "msamp:O2", tmp_path
        )


def answered(monkeypatch, answers: dict[str, int], **fields) -> dict:
    """Return the file of the `accelerate config` wizard for these choices and fields; defaults
    otherwise."""

    def ask_options(question, options, convert, default=0):
        return convert(answers.get(question, default))

    def ask_field(question, convert=str, default=None, error_message=None):
        return next(
            (value for words, value in fields.items() if words.replace("_", " ") in question),
            default,
        )

    monkeypatch.setattr(cluster, "_ask_options", ask_options)
    monkeypatch.setattr(cluster, "_ask_field", ask_field)
    return cluster.get_cluster_input()


@pytest.mark.nightly
@pytest.mark.parametrize("processes", [nightly(1), 2])
def test_accelerate_config(processes, monkeypatch, tmp_path):
    """Train with the wizard's file unchanged (`ao`), and with another backend written into it."""
    choices = {
        "Which type of machine are you using?": processes - 1,
        "Do you wish to use mixed precision?": 3,
    }
    config = answered(monkeypatch, choices, should_be_used_for_distributed_training=processes)
    path = tmp_path / "wizard.yaml"
    config.to_yaml_file(path)
    assert read(str(path)).recipe.name == "ao:tensorwise"
    for backend in BACKENDS:
        text = yaml.safe_load(path.read_text()) | {"fp8_config": {"backend": backend}}
        (tmp_path / "other.yaml").write_text(yaml.safe_dump(text))
        assert read(str(tmp_path / "other.yaml")).recipe.name == backend
    (tmp_path / "train.py").write_text(TRAINS)
    ended = warm_process.run(
        "-m",
        "fp8_backends",
        "launch",
        "--config_file",
        str(path),
        "train.py",
        cwd=tmp_path,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    assert "ao:tensorwise: 3/3 Linear" in ended.stderr and f"processes: {processes}" in ended.stdout


TRAINS = """
import torch
from accelerate import Accelerator

accelerator = Accelerator()
model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3)))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
accelerator.backward(model(torch.randn(16, 32)).square().mean())
optimizer.step()
accelerator.print("processes:", accelerator.num_processes)
accelerator.end_training()
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    "backend, processes",
    [nightly("native:delayed", 1), ("ao:tensorwise", 2), nightly("msamp:O2", 1)],
)
def test_accelerate_test(backend, processes, tmp_path):
    """Launch the script of `accelerate test` by `fp8-backends launch`."""
    feature = row("accelerate_test")
    config = {
        "distributed_type": "MULTI_CPU" if processes > 1 else "NO",
        "num_processes": processes,
        "use_cpu": True,
    }
    fp8 = {"backend": backend, "on_unproven": "warn"}
    (tmp_path / "config.yaml").write_text(
        yaml.safe_dump(config | {"mixed_precision": "fp8", "fp8_config": fp8})
    )
    script = path_in_accelerate_package("test_utils", "scripts", "test_script.py")
    ended = warm_process.run(
        "-m", "fp8_backends", "launch", "--config_file", "config.yaml", str(script), cwd=tmp_path
    )
    assert feature.refusal(backend, processes) is None and ended.returncode == 0, ended.stderr
    assert "**Test reinstantiated state**" in ended.stdout
