"""Compare each recipe with its row of the chart."""

from __future__ import annotations

import pytest

from fp8_backends import plan

# MS-AMP's table of optimization levels (docs/user-tutorial/optimization-level.md), and O4; bytes
# added manually
ROWS = {
    "native": ("FP8", "FP32", "FP32", None, "FP32", ("FP32", "FP32"), 16),
    "te": ("FP8", "FP32", "FP32", None, "FP32", ("FP32", "FP32"), 16),
    "ao": ("FP8", "FP32", "FP32", None, "FP32", ("FP32", "FP32"), 16),
    "msamp:O0": ("FP8", "FP32", "FP32", None, "FP32", ("FP32", "FP32"), 16),
    "msamp:O1": ("FP8", "FP8", "FP16", None, "FP8", ("FP32", "FP32"), 11),
    "msamp": ("FP8", "FP8", "FP16", None, "FP8", ("FP8", "FP16"), 6),
    "te+msamp:O2": ("FP8", "FP8", "FP16", None, "FP8", ("FP8", "FP16"), 6),
    "msamp:O3": ("FP8", "FP8", "FP8", "FP16", "FP8", ("FP8", "FP16"), 7),
    "msamp:O4": ("FP8", "FP8", "FP8", "INT8", "FP8", ("FP8", "FP8"), 5),
}


@pytest.mark.parametrize("spec", ROWS)
def test_plan_matches_the_level_table(spec):
    row = plan(spec)
    assert (
        row.gemm,
        row.comm,
        row.weight,
        row.master_weight,
        row.weight_gradient,
        row.optimizer_states,
        row.bytes_per_element,
    ) == ROWS[spec]


def test_plan_names_high_precision_products():
    assert plan("ao:rowwise_with_gw_hp").gemm == "FP8 (wgrad BF16)"
    assert (
        plan({"backend": "native", "override_linear_precision": (False, True, True)}).gemm
        == "FP8 (dgrad wgrad BF16)"
    )


def test_plain_gradient_comm_is_planned_on_request():
    assert plan({"backend": "msamp:O2", "gradient_comm": "plain"}).comm == "FP32"


def test_fp8_gradient_comm_with_plain_weights_is_planned_on_request():
    row = plan({"backend": "native", "gradient_comm": "fp8"})
    assert (row.comm, row.weight_gradient, row.bytes_per_element) == ("FP8", "FP32", 16)


def test_printed_plan_is_one_complete_line():
    text = str(plan("msamp:O3"))
    assert text == (
        "GEMM FP8, comm FP8, weight FP8, master FP16, gradient FP8, Adam FP8+FP16: 7 bytes per "
        "weight element"
    )
