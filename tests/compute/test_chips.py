"""The table of chips: complete, consistent, and its advice for each chip."""

from __future__ import annotations

import pytest

import fp8_backends
from fp8_backends.compute import chips, registry
from fp8_backends.compute.chips import (
    CHIPS,
    DEFAULTS,
    REFUSED,
    RUNS,
    RUNS_EMULATED,
    Chip,
    advice_for,
    cell_of,
    chip_of,
    recommended,
)


def chip_named(key: str) -> Chip:
    return chips.product_named(key).chip


def test_table_has_one_row_per_backend_and_one_cell_per_chip():
    backends = [backend for row in DEFAULTS for backend in row]
    strings = [
        f"{name}:{scaling}"
        for name in registry.BUILT_IN
        for scaling in registry.get_compute(name).scalings
    ]
    assert sorted(backends) == sorted([*strings, "msamp"])
    assert all(
        fp8_backends.resolve(backend).name == backend for backend in backends if backend != "msamp"
    )
    cells = [chip.table[row] for row in DEFAULTS for chip in CHIPS]
    notes = dict.fromkeys(cell.note for cell in cells if cell.note)
    assert list(notes) == list(chips.NOTES), "numbered in the order of the table"
    known = {row[0] for row in DEFAULTS}
    assert all(chip.cells.keys() <= known for chip in CHIPS)
    assert all(cell.note for cell in cells if cell.state == REFUSED), "a refusal has a reason"


@pytest.mark.parametrize(
    ("gpu", "key"),
    [
        *[((7, 0), "before-fp8"), ((8, 7), "before-fp8"), ((8, 9), "ada"), ((9, 0), "hopper")],
        *[((10, 0), "blackwell"), ((10, 3), "blackwell"), ((11, 0), "blackwell")],
        *[((12, 0), "rtx-blackwell"), ((12, 1), "rtx-blackwell")],
        *[
            ("gfx942:sramecc+", "mi300"),
            ("gfx950", "mi350"),
            ("gfx90a", "before-fp8"),
            ("gfx1100", "before-fp8"),
        ],
    ],
)
def test_gpu_names_map_to_chips(gpu, key):
    assert chip_of(gpu).key == key


def test_a_chip_is_one_row_with_defaults(monkeypatch):
    new = Chip("mi450", "MI450", "gfx12.5", "gfx1250")
    monkeypatch.setattr(chips, "CHIPS", (*CHIPS, new))
    assert chip_of("gfx1250:sramecc+") is new and new.fp8
    assert cell_of("native:rowwise", new).state == RUNS
    assert cell_of("te:delayed", new).note == "te-nvidia"
    assert cell_of("native:mxfp8", new).state == RUNS_EMULATED
    header, *rows = chips.rows()
    assert header[-1] == "MI450" and {len(row) for row in rows} == {len(header)}


def test_chips_that_only_others_have_measured_say_so_in_words():
    for chip in CHIPS:
        advice = advice_for(chip.gpu)
        assert advice.compare_first == ("compare first" in advice.reason)
    assert [chip.key for chip in CHIPS if advice_for(chip.gpu).compare_first] == [
        "ada",
        "rtx-blackwell",
    ]


def test_chips_with_fp8_matrix_units():
    without = [chip.key for chip in CHIPS if not chip.fp8]
    assert without == ["cpu", "before-fp8"]


def test_older_cuda_build_limits_chip():
    blocks, te_blocks = (cell_of(f"{name}:blockwise", chip_of((9, 0))) for name in ("native", "te"))
    assert [blocks.state_with(cuda) for cuda in ((12, 8), (12, 9), (13, 0), None)] == [
        RUNS_EMULATED,
        RUNS,
        RUNS,
        RUNS,
    ]
    assert [te_blocks.state_with(cuda) for cuda in ((12, 8), (12, 9))] == [REFUSED, RUNS]
    assert cell_of("te:delayed", chip_of((8, 9))).state_with((12, 0)) == REFUSED
    assert cell_of("mine:delayed", chip_of((9, 0))) is None


def test_mxfp8_on_rtx_blackwell_needs_the_reported_torch():
    cell = cell_of("native:mxfp8", chip_of((12, 0)))
    releases = [
        ((13, 0), (2, 14)),
        ((13, 2), (2, 15)),
        (None, None),
        ((13, 0), (2, 13)),
        ((12, 9), (2, 14)),
    ]
    assert [cell.state_with(*each) for each in releases] == [
        RUNS,
        RUNS,
        RUNS,
        RUNS_EMULATED,
        RUNS_EMULATED,
    ]
    assert cell.state_with(None, (2, 13)) == RUNS_EMULATED
    assert cell_of("te:mxfp8", chip_of((12, 0))).state == REFUSED


@pytest.mark.parametrize(
    ("gpu", "te", "precision", "backend", "reason"),
    [
        ((12, 0), True, "fp8", "native:dynamic", "LLMQ"),
        ((12, 0), False, "fp8", "native:dynamic", "compare first"),
        ((11, 0), True, "fp8", "te:mxfp8", "twice as fast"),
        ((10, 3), False, "fp8", "ao:tensorwise", "torch.compile"),
        ((9, 0), True, "fp8", "te:dynamic", "twice as fast"),
        ((9, 0), False, "fp8", "native:dynamic", "torch.compile"),
        ((8, 9), True, "fp8", "native:dynamic", "LLMQ"),
        ((8, 9), False, "fp8", "native:dynamic", "compare first"),
        ((8, 6), False, "bf16", "", "none in FP8"),
        ((8, 0), False, "bf16", "", "none in FP8"),
        ((7, 5), False, "fp16", "", "loss scaler"),
        ((7, 0), False, "fp16", "", "none in bf16"),
        ((6, 1), False, "fp32", "", "no matrix units"),
        ("gfx950:sramecc+:xnack-", False, "fp8", "ao:tensorwise", "twice as fast"),
        ("gfx942", False, "fp8", "ao:tensorwise", "TorchAO"),
        ("gfx90a", False, "bf16", "", "bf16 products"),
        ("gfx1100", False, "bf16", "", "bf16 products"),
        ("gfx906", False, "fp32", "", "no bf16"),
    ],
)
def test_recommended_precision_for_each_gpu(gpu, te, precision, backend, reason):
    advice = advice_for(gpu, te)
    assert (advice.precision, advice.backend) == (precision, backend) and reason in advice.reason
    assert not backend or cell_of(backend, chip_of(gpu)).state == RUNS


def test_each_fp8_chip_has_one_recommendation_that_runs_there():
    assert [chip for chip, *_ in recommended()] == [chip for chip in CHIPS if chip.fp8]
    for chip, backend, with_te in recommended():
        assert cell_of(backend, chip).state == cell_of(with_te, chip).state == RUNS
        assert with_te == backend or with_te.startswith("te:") and not backend.startswith("te:")


def test_chip_is_found_by_any_alias():
    assert {product.chip for product in chips.CARDS.values()} == {*CHIPS}
    assert all(chips.product_named(chip.key).chip is chip for chip in CHIPS)
    assert chips.product_named("RTX PRO 6000").gib == 96
    assert chips.product_named("RTX 4090").chip is chip_of((8, 9)) and chips.product_named(
        "mi300x"
    ).chip is chip_of("gfx942")
    assert chips.product_named("A100_40").gib == 40 and chips.product_named("cpu").gpu is None
    with pytest.raises(
        fp8_backends.RecipeError, match="chip 'h10' is not known .did you mean 'h100'.*mi350x"
    ):
        chips.product_named("h10")


def test_recommended_precision_for_cpu():
    assert (
        advice_for(None, cpu_bf16=True).precision == "bf16"
        and "debugging" in advice_for(None, cpu_bf16=True).reason
    )
    assert advice_for(None).precision == "fp32" and "without bf16" in advice_for(None).reason
