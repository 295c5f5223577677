"""Test the patches proposed to Accelerate: the release has each fault, and a patched copy has
none."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import accelerate
import pytest
import warm_process

import fp8_backends

HERE = Path(__file__).parent
GUIDES = Path(fp8_backends.__file__).parent / "docs"
PATCHES = sorted((HERE / "patches").iterdir())
INSTALLED = Path(accelerate.__file__).parent

SHOWN = {
    "fault_01_weights_of_torchao_train": "these do not move: [2]",
    "fault_02_a_model_of_torchao_saves": "invalid python storage",
    "fault_03_launcher_backend_is_accepted": "'ao' is not a valid FP8BackendType",
    "fault_04_wizard_answers_are_read": "an older file: ['1024', 'most_recent', 'O2']",
    "fault_04_wizard_asks_only_for_read_fields": "nothing reads ['amax_history_length', "
    "'amax_compute_algorithm']",
    "fault_05_flags_in_round_brackets": "invalid truth value (",
    "fault_06_fsdp2_enters_the_autocast": "recipes of the forwards: [None, None, None]",
    "fault_07_deepspeed_has_the_recipe": "the recipe is None",
    "fault_08_layers_after_an_odd_one_convert": "['torch', 'torch']",
    "fault_09_ties_survive": "the tie is broken",
    "fault_10_root_is_converted": "still nn.Linear",
    "fault_10_flags_modes_and_hooks_survive": "the frozen layer trains",
    "fault_11_norms_without_a_counterpart_stay": "'NoneType' object has no attribute 'dtype'",
    "fault_12_unwrapping_converts_back": "['transformer_engine', 'transformer_engine', "
    "'transformer_engine']",
    "fault_13_one_and_several_models": "You must pass a model and an optimizer together",
    "fault_14_optimizers_with_states_and_other_parameters": "KeyError: Parameter containing",
    "fault_15_mxfp8_uses_the_given_format": "fp8_format=<Format.E4M3",
    "fault_15_launcher_passes_given_values": "'FORMAT', 'INTERVAL', 'MARGIN'",
    "fault_15_given_values_are_used": "amax_compute_algo='max'",
    "fault_16_e5m2_is_refused": "E5M2 was accepted",
    "fault_16_removed_fields_are_named": "nothing was said",
    "fault_17_a_recipe_of_msamp_needs_no_te": "TransformerEngine is not available",
    "fault_18_level_o3_is_a_level": "`opt_level` must be one of O1 or O2",
    "fault_19_scaler_uses_its_own_handler": "the scaler has {'timeout'",
    "fault_20_gradients_are_unscaled": "a gradient norm of",
    "fault_21_environment_precision_falls_back": "'NoneType' object has no attribute 'config'",
    "fault_21_fallen_back_precision_converts_nothing": "converted without FP8",
    "fault_22_backend_has_no_effect_without_fp8": "'NoneType' object has no attribute 'config'",
    "fault_24_te_copy_runs_its_own_weights": "the copy runs the weights of the original",
    "fault_24_decorators_of_the_user_survive": "the decorator is gone",
    "fault_25_model_without_converted_layer_is_reported": "nothing was said",
    "fault_25_the_filter_filters": "['torchao', 'torchao', 'torchao']",
    "fault_27_conversion_needs_no_accelerator": "Please make sure to properly initialize your "
    "accelerator",
    "fault_28_unplanned_parameters_are_replicated": "cannot import name 'ReplicateParallel'",
}
"""Each check, and its error in the release."""


def outcomes(tree: Path, folder: Path) -> dict[str, str | None]:
    """Return the outcome of each check of `fault_checks.py` for the package in this folder."""
    without_gpus = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    ran = warm_process.run(str(HERE / "fault_checks.py"), str(tree), str(folder), env=without_gpus)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.nightly
def test_release_has_each_fault(tmp_path):
    said = outcomes(INSTALLED.parent, tmp_path)
    assert said.keys() == SHOWN.keys()
    assert {
        check: said[check] for check, shown in SHOWN.items() if shown not in (said[check] or "")
    } == {}


@pytest.mark.nightly
def test_patched_copy_has_no_fault(tmp_path):
    tree, folder = tmp_path / "tree", tmp_path / "written"
    folder.mkdir()
    shutil.copytree(INSTALLED, tree / "accelerate")
    # the copy is in no repository
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(tmp_path)}
    # as `a/src/accelerate/…` is there, `accelerate/…` is here
    apply = ["git", "apply", "-p2", *PATCHES]
    applied = subprocess.run(apply, cwd=tree, env=environment, capture_output=True, text=True)
    assert applied.returncode == 0, applied.stderr
    assert {check: error for check, error in outcomes(tree, folder).items() if error} == {}


def rows(page: str) -> dict[str, list[str]]:
    """Return the first table of the page: the number of each patch, and its faults."""
    found = re.findall(
        r"^(\d{4})   ((?:\d+, )*\d+) ", page.partition("begin table patches")[2], re.M
    )
    return {number: faults.split(", ") for number, faults in found}


def test_page_lists_every_patch_and_fault():
    page = (GUIDES / "patches.rst").read_text(encoding="utf-8")
    mended = rows(page)
    assert [patch.name[:4] for patch in PATCHES] == list(mended) and len(PATCHES) > 15
    without = re.findall(r"^Fault (\d+)", page.partition("Without a patch")[2], re.M)
    numbers = {int(fault) for faults in mended.values() for fault in faults}
    assert numbers | {int(fault) for fault in without} == set(range(1, 29))
    assert {int(check[6:8]) for check in SHOWN} == numbers
