"""What becomes of the benchmarks' records: verdicts, tables, the README."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks"))
import by_ranks  # noqa: E402
import largest  # noqa: E402
import prepare  # noqa: E402
import tables  # noqa: E402
import targets  # noqa: E402
import training  # noqa: E402

MACHINE = {"chip": "AMD EPYC", "gpus": 0, "torch_threads": 2, "torch": "2.13.0+cpu", "date": "2026-11-21"}


def test_the_readme_shows_what_was_measured():
    """Every table of `benchmarks/tables.py`, as it follows from the records that lie in `benchmarks/results`."""
    shown = tables.between_markers((ROOT / "README.rst").read_text(encoding="utf-8"))
    records = targets.load(tables.RESULTS)
    assert shown == {name: table(records) for name, table in tables.TABLES.items()}


def test_without_records_every_table_says_not_yet_measured():
    for name, table in tables.TABLES.items():
        assert "not yet measured" in table({}), name
    rows = targets.rows((*targets.ON_CPU, *targets.ON_GPU), {})
    assert {(shown, verdict) for _, shown, _, verdict in rows} == {("-", "not yet measured")}
    assert all(bound != "-" for _, _, bound, _ in rows)


def linear_record(ratio):
    row = {"backend": "native:dynamic", "form": "eager", "shape": [1, 2, 3], "median_s": 0.05}
    row |= {"to_torchao": {"ratio": ratio}, "to_bf16": {"ratio": 1.7}}
    return {"machine": MACHINE, "results": [row]}


@pytest.mark.parametrize("ratio,verdict", [(0.5, "met"), (0.51, "missed")])
def test_a_target_is_met_up_to_its_bound_and_a_miss_is_said(ratio, verdict):
    records = {"linear_cpu": linear_record(ratio)}
    assert targets.rows(targets.ON_CPU, records)[0][1:] == [f"{ratio:g}", "at most 0.5", verdict]
    faster = targets.Target("", lambda records: ratio, at_least=0.51)
    assert faster.verdict({}) == ("met" if ratio == 0.51 else "missed")


def test_a_table_names_machine_versions_and_date_and_stands_between_its_markers():
    records = {"linear_cpu": linear_record(0.4)}
    document = "Before\n\n.. begin table linear\n\nold\n\n.. end table linear\n\nAfter\n"
    made = tables.written(document, records)
    assert made.startswith("Before\n\n.. begin table linear\n\n") and made.endswith("\n\nAfter\n") and "old" not in made
    assert made.endswith("not yet measured.\n\n.. end table linear\n\nAfter\n")
    assert "2 cores of an AMD EPYC, torch 2.13.0, 21 November 2026" in made
    assert ["1x2x3", "``native:dynamic``", "eager", "50", "1.7", "0.4"] in [line.split() for line in made.splitlines()]
    assert tables.between_markers(made) == {"linear": tables.TABLES["linear"](records)}
    assert tables.written(made, records) == made
    with pytest.raises(KeyError):
        tables.written(document.replace("linear", "unknown"), records)


AWS = {
    # nodes: tokens/s/GPU and loss without and with FP8, of the 7B model
    1: (9350, 6.595, 11000, 6.602),
    2: (9400, 6.688, 10750, 6.695),
    32: (7900, 6.523, 9700, 6.649),
}


def test_the_columns_by_ranks_follow_one_formula():
    """The published throughputs, whose own percentages mix two formulas."""
    results = []
    for nodes, (bf16, bf16_loss, fp8, fp8_loss) in AWS.items():
        results.append({"ranks": nodes, "backend": "bf16", "tokens_per_second": bf16, "loss": bf16_loss})
        results.append({"ranks": nodes, "backend": "te:delayed", "tokens_per_second": fp8, "loss": fp8_loss})
    made = {(each["ranks"], each["backend"]): each for each in by_ranks.compared(results)}
    assert [round(100 * made[n, "te:delayed"]["faster"], 1) for n in AWS] == [17.6, 14.4, 22.8]
    assert [round(100 * made[n, "te:delayed"]["decrease"], 1) for n in AWS] == [0, 2.3, 11.8]
    assert [round(100 * made[n, "bf16"]["decrease"], 1) for n in AWS] == [0, -0.5, 15.5]
    assert [round(100 * made[n, "te:delayed"]["loss_above"], 2) for n in AWS] == [0.11, 0.10, 1.93]


@pytest.mark.parametrize("of_weights,of_states,memory", [(20, 30, 100), (20, 90, 100), (101, 0, 100), (60, 0, 100)])
def test_the_largest_size_that_fits_is_found_where_the_peak_bends(of_weights, of_states, memory):
    """The peak is in the optimizer's step of a small batch, and in the backward of a large one."""

    def peak(size):
        return max(of_weights + 1.7 * size, of_states + 0.1 * size)

    tried_sizes = []

    def probe(size):
        tried_sizes.append(size)
        return {"peak_bytes": peak(size)} if peak(size) <= memory else None

    exact = max((size for size in range(1, 200) if peak(size) <= memory), default=0)
    found, tried = largest.largest(probe, memory)
    assert found == exact and exact + 1 in tried and len(tried_sizes) == len(set(tried_sizes)) <= 12


def test_every_step_and_every_rank_has_its_own_text_and_every_backend_the_same():
    text = training.Text(64)
    first = text.batch(4, step=0)
    assert first.shape == (4, 64) and torch.equal(first, text.batch(4, step=0))
    others = [text.batch(4, step=1), text.batch(4, step=0, rank=1), text.batch(4, step=1, rank=1)]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations([first, *others], 2))


def test_added_memory_sees_a_second_copy_of_the_weights(monkeypatch):
    """Planted: a `prepare` that copies them."""
    import fp8_backends

    torch.ones(40_000_000)  # given back: a peak before is none of `prepare`
    held = []
    monkeypatch.setattr(fp8_backends, "prepare", lambda model, *_: held.extend(p.clone() for p in model.parameters()))
    copied = prepare.added_memory("native:dynamic", 4, 1024)
    assert copied["added"] is None or 0.9 < copied["added"] / copied["weights"] < 1.2  # None: not told on this system
    held.clear()
    monkeypatch.setattr(fp8_backends, "prepare", lambda *_: None)
    kept = prepare.added_memory("native:dynamic", 4, 1024)
    assert kept["same_storage"] and (kept["added"] is None or kept["added"] / kept["weights"] < 0.1)
