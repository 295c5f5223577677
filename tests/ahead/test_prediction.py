"""The committed prediction of a training step on a GPU: within its budgets, and adding up; and the arithmetic below."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from budgets import (
    BUDGETS,
    INDUCTORS_STACK,
    OPTIMIZER,
    SPECIALISATIONS,
    assert_one_graph_of_fp8_products,
    within,
)

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
own_path = list(sys.path)  # benchmarks/distributed.py would hide the folder of tests
sys.path += [str(BENCHMARKS), str(BENCHMARKS / "ahead")]
import beside  # noqa: E402
import roofline  # noqa: E402
import specs  # noqa: E402
import whole_step  # noqa: E402
from machine import CHIPS  # noqa: E402
from machine_code import NOTHING, Code, Operation, Work, fast_path  # noqa: E402

sys.path[:] = own_path

RECORD = json.loads((BENCHMARKS / "results" / "ahead_H200.json").read_text())
RESULTS = {each["backend"]: each for each in RECORD["results"]}


@pytest.mark.parametrize("backend", BUDGETS)
def test_layer_stays_within_budget(backend):
    result = RESULTS[backend]
    assert not within(result, BUDGETS[backend])
    assert_one_graph_of_fp8_products(result)


def test_no_synchronization_and_no_spills():
    for backend, kernels in SPECIALISATIONS.items():
        result = RESULTS[backend]
        assert result["eager"]["synchronisations"] == 0
        assert sum(each["specialisations"] for each in result["quantize"]) <= kernels
        assert not any(each["stack"] for each in result["quantize"])
        assert all(each["stack"] <= INDUCTORS_STACK for each in result["layer"].get("largest", []))


def test_optimizer_bytes_and_instructions_stay_within_budget():
    optimizer = RESULTS["msamp:O2"]["optimizer"]
    cost = optimizer["of_an_element"]
    assert 0 < cost["read"] + cost["written"] <= OPTIMIZER["bytes"]
    assert 0 < cost["instructions"] <= OPTIMIZER["instructions"]
    assert 0 < optimizer["share_of_a_copy"] <= roofline.OF_A_COPY
    assert not any(each["stack"] for each in optimizer["kernels"])


def test_step_sums_its_lines_and_ratios_follow():
    chip = CHIPS[RECORD["arguments"]["chip"]]
    for result in RESULTS.values():
        optimizer = result["optimizer"]
        of_an_element = optimizer and optimizer["of_an_element"]
        lines = whole_step.lines(result, 4, of_an_element, chip)
        assert [line._asdict() for line in lines] == result["lines"]
        assert sum(line.seconds for line in lines) == pytest.approx(result["seconds"])
    seconds = {name: each["seconds"] for name, each in RESULTS.items()}
    peaks = {name: each["peak_bytes"] for name, each in RESULTS.items() if each["peak_bytes"]}
    assert whole_step.ratios(seconds, peaks) == pytest.approx(RECORD["ratios"])
    assert RECORD["ratios"]["native:dynamic / bf16, tokens a second"] > 1


def test_optimizer_cost_follows_stored_bytes():
    """At O2, embedding, norms and a high-precision head keep FP32: 28 bytes an element instead of 11. The O2 kernel
    takes the longer of its memory time and its instruction time."""
    chip = CHIPS[RECORD["arguments"]["chip"]]
    issued = chip.multiprocessors * chip.clock * roofline.ISSUED * roofline.LANES
    for name, result in RESULTS.items():
        seconds = next(line["seconds"] for line in result["lines"] if line["what"] == "optimizer")
        cost = result["optimizer"]["of_an_element"] if result["optimizer"] else {"read": 0, "written": 0}
        stored = result["stored"] if result["optimizer"] else 0
        plain = (result["parameters"] - stored) * 28.0 / (roofline.OF_A_COPY * chip.copy)
        moved = stored * (cost["read"] + cost["written"]) / (roofline.OF_A_COPY * chip.copy)
        assert seconds >= 0.999 * (plain + moved), name
        assert seconds <= 1.1 * (plain + max(moved, stored * cost.get("instructions", 0) / issued)), name


def test_ratios_name_the_rule_of_native():
    seconds = {"bf16": 4.0, "torchao": 3.0, "native:dynamic": 2.0, "native:delayed": 1.0, "msamp:O2": 0.5}
    found = whole_step.ratios(seconds, {})
    assert found["native:dynamic / TorchAO, tokens a second"] == 1.5
    assert found["native:delayed / bf16, tokens a second"] == 4.0
    assert found["msamp:O2 / native:dynamic, tokens a second"] == 4.0


def test_a_spec_has_fields_of_the_recipe():
    assert specs.split("native:dynamic") == ("native:dynamic", {})
    told = specs.split("native:delayed?amax_history_len=16&fp8_format=E4M3&kept=True")
    assert told == ("native:delayed", {"amax_history_len": 16, "fp8_format": "E4M3", "kept": True})
    assert specs.level_of("te:delayed+msamp:O3") == "O3" and specs.level_of("native:dynamic") is None


def test_kernel_time_is_its_slowest_resource():
    chip = CHIPS["H200"]
    memory = roofline.of_kernel(1e9, NOTHING, chip)
    assert memory == pytest.approx(1e9 / (roofline.OF_A_COPY * chip.copy))
    assert roofline.of_kernel(1e9, Work(1e9, 1e9, 0.0), chip) == memory
    issue = roofline.of_kernel(0, Work(4e9, 1e9, 1e8), chip)
    assert roofline.of_kernel(0, Work(4e9, 4e9, 1e8), chip) == pytest.approx(2 * issue)
    assert roofline.of_kernel(0, Work(4e9, 1e9, 1e9), chip) == pytest.approx(2 * issue)


def operations(text: str) -> list[Operation]:
    """Parse lines such as `@P0 BRA 0x30`."""
    found = []
    for i, line in enumerate(text.splitlines()):
        predicate, _, rest = line.partition(" ") if line.startswith("@") else ("", "", line)
        name, _, rest = rest.partition(" ")
        found.append(Operation(16 * i, name, rest, bool(predicate)))
    return found


def test_loop_counts_wide_path_not_masked_path():
    """Give one loop two paths: four elements by one load, or four masked loads."""
    masked = ["LDG.E.U8 R2"] * 4 + ["FADD R2"]
    wide = ["LDG.E R2", "FADD R2", "FMUL R2"]
    before = ["MOV R1", "@P0 BRA 0x80"]  # to the wide way
    code = Code(32, 0, 0, 128, operations("\n".join([*before, *masked, "BRA 0xb0", *wide, "@P1 BRA 0x0", "EXIT"])))
    assert [each.kind for each in fast_path(code)] == ["MOV", "BRA", "LDG", "FADD", "FMUL", "BRA"]
    assert fast_path(Code(32, 0, 0, 128, operations("LDG.E R2\nEXIT"))) == []


def test_table_pairs_predicted_and_measured():
    predicted = {
        "results": [{"backend": name, "tokens_per_second": rate} for name, rate in (("bf16", 100), ("torchao", 120))]
    }
    rates = {"bf16": 80, "ao:tensorwise": 120, "te:delayed": 100}
    measured = {"results": [{"backend": k, "form": "compiled", "tokens_per_second": v} for k, v in rates.items()]}
    assert beside.rows(predicted, measured) == [
        ["bf16", 100, 80, "1.00", "1.00", "0.80"],
        ["torchao", 120, "-", "1.20", "-", "-"],
        ["ao:tensorwise", 120, 120, "1.20", "1.50", "1.00"],
        ["te:delayed", "-", 100, "-", "1.25", "-"],
    ]
