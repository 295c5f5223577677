"""A comparison with FP32, as on a CPU without bf16 products."""

from __future__ import annotations

import argparse
import re

import pytest
import torch
from cli.comparing import checks_by_name, compared, tiny_settings

import fp8_backends
from fp8_backends.cli.compare import command as compare
from fp8_backends.cli.compare import summary
from fp8_backends.cli.compare.command import announce, conclude
from fp8_backends.cli.compare.training_run import Run
from fp8_backends.cli.compare.workload import load_text


def asked(*options):
    parser = argparse.ArgumentParser()
    compare.add_arguments(parser)
    return compare.settings_from(parser.parse_args(options))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's reference is bf16")
def test_the_reference_is_fp32_where_bf16_products_are_missing_unless_it_is_given(monkeypatch):
    monkeypatch.setattr("fp8_backends.compute.hardware.cpu_bf16", lambda: True)
    assert asked().reference == "bf16" and asked("--reference", "fp32").reference == "fp32"
    monkeypatch.setattr("fp8_backends.compute.hardware.cpu_bf16", lambda: False)
    assert asked().reference == "fp32" and asked("--reference", "bf16").reference == "bf16"


def test_activations_are_kept_as_asked_in_every_run_of_a_backend(tmp_path):
    settings = tiny_settings(tmp_path, saved_activations=asked("--saved-activations", "fp8").saved_activations, batch=8)
    run = Run(settings, load_text(settings.text), "native:dynamic", seed=0)
    run.backward(0)
    assert fp8_backends.audit(run.model).saved_activations["tensors"] > 0
    assert asked().saved_activations == "off"


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    return compared(tmp_path_factory.mktemp("fp32"), "native:dynamic", reference="fp32")


def test_fp8_backends_have_around_fp8_what_the_reference_computes_in(tmp_path):
    for reference in ("bf16", "fp32"):
        settings = tiny_settings(tmp_path, reference=reference)
        run = Run(settings, load_text(settings.text), "native:dynamic", seed=0)
        assert run.accelerator.fp8_recipe.autocast_dtype == reference
        logits = {}
        run.bare.lm_head.register_forward_hook(lambda module, args, out, logits=logits: logits.update(dtype=out.dtype))
        run.backward(0)
        assert logits["dtype"] == {"bf16": torch.bfloat16, "fp32": torch.float32}[reference]


def test_gradients_are_held_against_those_of_the_reference(tmp_path):
    cosines = {}
    for reference in ("bf16", "fp32"):
        settings = tiny_settings(tmp_path, reference=reference)
        run = Run(settings, load_text(settings.text), "fp32", seed=0, with_reference=True)
        run.backward(0)
        cosines[reference] = min(run.gradient_cosines().values())
    assert cosines["fp32"] > 1 - 1e-12 > 1 - 1e-6 > cosines["bf16"]


def test_every_text_names_fp32_and_none_bf16(comparison, capsys):
    announce(comparison.settings)
    conclude(comparison)
    printed, page = capsys.readouterr().out, (comparison.output / "report.html").read_text()
    for text in (printed, page):
        ours = re.sub(r"bf16-exact|cpu bf16 products", "", text)  # the products' name, the machine's instructions
        assert "bf16" not in ours
        for expected in (
            "gap to fp32",
            "fp32's own spread from seed to seed",
            "the reference: no autocast",
            "% vs fp32",
        ):
            assert expected in ours or expected.replace("'", "&#x27;") in ours
    assert "nats above fp32" in page and "fp32 around FP8" in page and "against fp32" in printed
    assert comparison.results["around_fp8"] == comparison.results["settings"]["reference"] == "fp32"
    assert isinstance(comparison.results["machine"]["cpu_bf16_products"], bool)


def test_checks_and_gaps_are_those_to_fp32(comparison):
    passed = checks_by_name(comparison, "native:dynamic")
    assert passed["same initial weights and data order as fp32"]
    assert passed["gradients at the initial weights point where fp32's do"]
    assert "held-out loss at most 0.01 nats above fp32's" in passed
    assert set(checks_by_name(comparison, "fp32")) == {"every trainable parameter moved", "every loss is finite"}
    assert summary.gap_to_reference(comparison.results, "native:dynamic").pairs == 2
