"""Faults of stock Accelerate 1.15, each tried as a user would run into it: through a launcher. For
`test_launched_faults.py`.

    python launched_faults.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

import accelerate.state
import forked_workers
import torch
from intercepted import Started, environment, free_port, ours, stocks, yaml_file

HERE = Path(__file__).parent
SCRIPT = str(HERE / "trained.py")
FOLDER = Path(sys.argv[1])
OUTPUT = str(FOLDER / "output")
RANKS = ("--num_processes", "2", "--main_process_port")


def trained(started: Started) -> list[dict]:
    """Return each rank's output file, and the printed lines."""
    found = forked_workers.outcome(started, OUTPUT)
    assert len(found["ranks"]) == found["asked"], found["printed"]
    return [rank | {"printed": found["printed"]} for rank in found["ranks"]]


def learned(started: Started) -> dict:
    """Return the first rank's report of a training that succeeded on all ranks."""
    ranks = trained(started)
    for rank in ranks:
        assert "error" not in rank, rank["error"]
        assert rank["losses"][0] > rank["losses"][-1]
    return ranks[0]


def refused(started: Started) -> str:
    (error,) = {rank["error"] for rank in trained(started)}
    return error


def stock(*flags: str) -> Started:
    return stocks("--mixed_precision", "fp8", *flags, SCRIPT, OUTPUT, "--import")


def by_file(launcher, block: dict, *options: str) -> Started:
    file = yaml_file(FOLDER, mixed_precision="fp8", fp8_config=block)
    return launcher("--config_file", file, SCRIPT, OUTPUT, *options)


def high_precision_wgrad(report: dict) -> bool:
    return all(counts["fprop"] and not counts["wgrad"] for counts in report["products"].values())


def fault_03_backend_flags_of_stock_accelerate_work():
    assert learned(stock("--cpu", "--fp8_backend", "ao"))["recipe"]["name"] == "ao:tensorwise"
    for level in ("O1", "O2"):
        report = learned(stock("--cpu", "--fp8_backend", "msamp", "--fp8_opt_level", level))
        assert report["recipe"]["name"] == f"msamp:{level}"
    assert "te:delayed cannot run here" in refused(
        stock("--cpu", "--fp8_backend", "te", "--fp8_margin", "1")
    )


def fault_04_keys_of_the_wizard_are_read():
    delayed = {
        "backend": "native:delayed",
        "amax_history_length": 16,
        "amax_compute_algorithm": "max",
    }
    for launcher, options in ((ours, ()), (stocks, ("--import",))):
        recipe = learned(by_file(launcher, delayed, *options))["recipe"]
        assert (recipe["amax_history_len"], recipe["amax_compute_algo"]) == (16, "max")
        level = learned(
            by_file(launcher, {"backend": "MSAMP", "optimization_level": "O1"}, *options)
        )["recipe"]
        assert level["name"] == "msamp:O1"


def fault_05_documented_override_string_works():
    block = {"backend": "native", "override_linear_precision": "(false, false, true)"}
    assert high_precision_wgrad(learned(by_file(ours, block)))
    assert "write a list, [false, false, false], or use fp8-backends launch" in refused(
        by_file(stocks, block, "--import")
    )


def fault_07_deepspeed_keeps_every_field():
    ranks = ("--use_deepspeed", *RANKS, free_port())
    fields = (
        "--fp8_backend",
        "native:delayed",
        "--fp8_margin",
        "2",
        "--fp8_override_linear_precision",
        "0,0,1",
    )
    report = learned(ours(*ranks, *fields, SCRIPT, OUTPUT))
    assert (
        report["recipe"]["margin"] == 2
        and high_precision_wgrad(report)
        and report["kind"] == "DeepSpeedEngine"
    )


def fault_19_other_handlers_stay_unchanged():
    ranks = ("--cpu", *RANKS, free_port())
    learned(ours(*ranks, "--fp8_backend", "msamp:O2", SCRIPT, OUTPUT, "--other_handlers"))


def fault_20_gradient_norms_are_true():
    """Against bf16: E4M3 gradients and products round each element by 2**-4 at most."""
    true = learned(
        stocks("--cpu", "--mixed_precision", "bf16", SCRIPT, OUTPUT, "--import", "--clip")
    )["norms"][0]
    for level in ("msamp:O1", "msamp:O2", "msamp:O3"):
        norm = learned(ours("--cpu", "--fp8_backend", level, SCRIPT, OUTPUT, "--clip"))["norms"][0]
        assert abs(norm / true - 1) <= 2**-4, (level, norm, true)


def fault_21_a_gpu_without_fp8_does_not_turn_it_into_fp16():
    saved = torch.cuda.is_available, torch.cuda.device_count, torch.cuda.get_device_capability
    started = ours("--cpu", "--fp8_backend", "native:dynamic", SCRIPT, OUTPUT)
    try:
        accelerate.state.check_cuda_fp8_capability = lambda: False
        torch.cuda.is_available = lambda: True
        torch.cuda.device_count, torch.cuda.get_device_capability = (
            (lambda: 1),
            lambda device=None: (8, 0),
        )
        report = learned(started)
    finally:
        torch.cuda.is_available, torch.cuda.device_count, torch.cuda.get_device_capability = saved
    assert report["precision"] == "fp8" and all(
        counts["fprop"] for counts in report["products"].values()
    )
    assert "FP16 instead" not in report["printed"]


def fault_22_bf16_in_code_trains_in_bf16_with_notice():
    plain = learned(stocks("--cpu", "--mixed_precision", "bf16", SCRIPT, OUTPUT, "--import"))
    for backend in ("ao", "native:rowwise", "msamp:O2"):
        report = learned(
            ours("--cpu", "--fp8_backend", backend, SCRIPT, OUTPUT, "--mixed_precision", "bf16")
        )
        assert (
            report["losses"] == plain["losses"]
            and report["recipe"] is None
            and report["precision"] == "bf16"
        )
        assert report["printed"].count("FP8 is off") == 1


def fault_23_regional_compilation_compiles_running_code():
    dynamo = ("--dynamo_backend", "eager", "--dynamo_use_regional_compilation")
    report = learned(ours("--cpu", *dynamo, "--fp8_backend", "native", SCRIPT, OUTPUT, "--blocks"))
    assert report["graphs"] > 0
    assert len(report["products"]) == 4 and all(
        counts["fprop"] >= 3 for counts in report["products"].values()
    )


def fault_25_filters_filter():
    report = learned(ours("--cpu", "--fp8_backend", "ao", "--fp8_exclude", "0", SCRIPT, OUTPUT))
    assert list(report["products"]) == ["2"]
    nothing = ours("--cpu", "--fp8_backend", "ao", "--fp8_exclude", "0,2", SCRIPT, OUTPUT)
    assert "no layer of this model can run in FP8" in refused(nothing)


def fault_26_msamp_and_torchao_train_under_fsdp_with_default_loading():
    fsdp = (
        "--use_fsdp",
        "--fsdp_version",
        "2",
        "--fsdp_auto_wrap_policy",
        "NO_WRAP",
        *RANKS,
        free_port(),
    )
    for backend in ("msamp:O2", "ao"):
        report = learned(ours(*fsdp, "--fp8_backend", backend, SCRIPT, OUTPUT))
        assert report["kind"] == "FSDPSequential" and all(
            c["fprop"] for c in report["products"].values()
        )


def main() -> None:
    os.chdir(HERE)
    forked_workers.prepare(FOLDER, deepspeed=True)
    chosen = sys.argv[2:] or [name for name in globals() if name.startswith("fault_")]
    for name in chosen:
        error = None
        try:
            with environment():
                globals()[name]()
        except BaseException:
            error = traceback.format_exc()
        print(f"\nFAULT {json.dumps({'name': name, 'error': error})}", flush=True)


if __name__ == "__main__":
    main()
