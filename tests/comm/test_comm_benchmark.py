"""Check the counts and the trace of benchmarks/comm.py, and no timing."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import warm_process

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "comm.py"


@pytest.mark.nightly
def test_benchmark_reports_bytes_and_overlap_of_two_ranks(tmp_path):
    trace = [("layers", 3), ("width", 128), ("rows", 32)]
    options = [text for name, value in trace for text in (f"--trace-{name}", str(value))]
    kept = [f"--{name}={tmp_path / name}.json" for name in ("trace", "json")]
    done = warm_process.run(
        str(SCRIPT), "--elements", "65536", "--runs", "2", *options, *kept, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "json.json").read_text())
    assert record["ranks"] == 2 and record["machine"]["chip"]
    by_name = {each["collective"]: each["bytes_over"] for each in record["collectives"]}
    exact = 129 / 128  # bytes for an element
    for name in ("all-reduce", "reduce-scatter"):
        assert by_name[name] == {
            "bf16": pytest.approx(exact / 2, 1e-3),
            "FP32": pytest.approx(exact / 4, 1e-3),
        }
    assert set(record["passes"]) == {"copy", "pack", "reduce", "unpack", "codes"}
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    travels = [event for event in events if event["name"].startswith("gloo:")]
    # the end of each is a sum with its begin, with this resolution in FP64
    resolution = sum(math.ulp(event["ts"] + event["dur"]) for event in travels)
    assert 0 < record["overlap"]["travel_us"] <= sum(event["dur"] for event in travels) + resolution
    assert (
        0 <= record["overlap"]["share"] < 1
        and "of the time in which gradients travel" in done.stdout
    )


def test_overlap_share_of_a_known_trace():
    """Use collectives from 0 to 4 and 3 to 6, backward from 2 to 5 and 5 to 5.5: they overlap from
    2 to 5.5."""
    import importlib.util
    import sys

    sys.path.insert(0, str(SCRIPT.parent))
    try:
        spec = importlib.util.spec_from_file_location("comm_benchmark", SCRIPT)
        benchmark = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(benchmark)
    finally:
        sys.path.remove(str(SCRIPT.parent))
    node = "autograd::engine::evaluate_function: "
    spans = [("gloo:all_to_all", 0, 4), ("gloo:all_gather", 3, 3), (f"{node}MulBackward0", 2, 3)]
    spans += [
        (f"{node}LinearBackward", 5, 0.5),
        (f"{node}torch::autograd::AccumulateGrad", 0, 6),
        ("aten::mm", 0, 6),
    ]
    events = [{"ph": "X", "name": name, "ts": ts, "dur": dur} for name, ts, dur in spans]
    assert benchmark.overlap(events) == {
        "travel_us": 6,
        "beside_backward_us": 3.5,
        "share": pytest.approx(3.5 / 6),
    }
    on_gpu = [("ncclDevKernel_SendRecv", 0, 4), ("gemm", 1, 1), ("pack_kernel", 0, 4)]
    events = [
        {"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": dur} for name, ts, dur in on_gpu
    ]
    assert benchmark.overlap(events)["share"] == 0.25
