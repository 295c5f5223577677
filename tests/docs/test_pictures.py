"""Compare the pictures with the records and with the package, and read them as a browser does."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fp8_backends.compute import chips

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))
import pictures  # noqa: E402

pytestmark = pytest.mark.nightly
FILES = sorted(f"{name}_{theme}.svg" for name in pictures.ALL for theme in ("light", "dark"))


def written(name: str) -> str:
    return (pictures.PICTURES / name).read_text(encoding="utf-8")


def test_pictures_match_the_records():
    """`benchmarks/pictures.py --write` updates them."""
    drawn = pictures.files()
    assert sorted(drawn) == FILES == sorted(path.name for path in pictures.PICTURES.iterdir())
    assert [name for name, text in drawn.items() if text != written(name)] == []


@pytest.mark.parametrize("name", FILES)
def test_a_picture_is_small_self_contained_and_described(name):
    text = written(name)
    root = ElementTree.fromstring(text)
    title, description = (
        root.find(f"{{http://www.w3.org/2000/svg}}{tag}") for tag in ("title", "desc")
    )
    assert len(title.text) > 10 and len(description.text) > 40
    assert len(text.encode()) < 30_000
    assert "var(" not in text
    assert re.findall(r"https?://[^\"]+|<script|<image|href|@import|url\(", text) == [
        "http://www.w3.org/2000/svg"
    ]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_texts_have_contrast(theme):
    """4.5 is WCAG's bound for text (level AA)."""
    color = pictures.colors(theme)
    assert (pictures.luminance(color["card"]) > 0.5) == (theme == "light")
    pairs = [
        (color[ink], color[ground]) for ink in ("ink", "ink-2") for ground in ("card", "rule-2")
    ]
    pairs += [
        (pictures.readable_on(color[name]), color[name]) for name in pictures.LEVEL_PARTS.values()
    ]
    assert min(pictures.contrast(*pair) for pair in pairs) >= 4.5
    assert pictures.contrast("#000000", "#ffffff") == pytest.approx(21)


def test_levels_have_the_recorded_bytes():
    """`benchmarks/memory.py` recorded a whole model."""
    totals = {row.name: round(row.total) for row in pictures.level_bytes()}
    recorded = {
        each["backend"]: each for each in pictures.record("memory_cpu_avx512_bf16")["results"]
    }
    expected = {
        name: recorded[f"msamp:{name}"]["bytes_per_element"]["total"] for name in ("O1", "O2", "O3")
    }
    assert totals == {
        "bf16 mixed": 16,
        **{name: round(total) for name, total in expected.items()},
        "O4": 5,
    }


def test_the_tree_has_each_chip_once_with_its_advice():
    _, of_chips = pictures.CHOICE.values()
    assert sorted(key for each in of_chips for key in each.chips) == sorted(
        chip.key for chip in chips.CHIPS
    )
    for each in of_chips:
        for chip in (chip for chip in chips.CHIPS if chip.key in each.chips):
            advice = chips.advice_for(chip.gpu, cpu_bf16=True)
            with_te = chips.advice_for(chip.gpu, te_runs=True, cpu_bf16=True)
            if advice.precision == "fp8":
                assert each.take == advice.backend, chip.key
                assert (with_te.backend in each.reason) == (with_te != advice), chip.key
            else:
                assert each.take in ("bf16", "native:dynamic"), chip.key


def test_the_tree_takes_what_the_readme_or_the_guide_names():
    choice = "".join(
        path.read_text(encoding="utf-8")
        for path in (ROOT / "README.rst", *pictures.PICTURES.parent.glob("choosing.rst"))
    )
    exits = [each for answers in pictures.CHOICE.values() for each in answers]
    named = {
        word
        for each in exits
        for word in re.findall(r"[\w+]+:[\w…]+|\bte\b|\bao\b", f"{each.take} {each.reason}")
    }
    assert named == {
        "msamp:O2",
        "msamp:O4",
        "te:dynamic",
        "te:mxfp8",
        "ao:tensorwise",
        "native:dynamic",
    }
    assert [name for name in named if f"``{name}" not in choice] == []


def test_the_estimate_is_still_the_recorded_one():
    from fp8_backends import FP8RecipeKwargs
    from fp8_backends.tools.estimate import Workload, estimate
    from fp8_backends.tools.estimate.model_shapes import from_parameters

    record = pictures.record("memory_8b")
    workload = Workload(model=from_parameters(8e9), **record["settings"])
    (found,) = estimate(workload, [FP8RecipeKwargs(backend="msamp:O4", autocast_dtype="bf16")])
    (expected,) = (each for each in record["results"] if each["backend"] == "msamp:O4")
    assert {key: found.to_dict()[key] for key in expected} == expected
