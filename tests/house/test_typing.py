"""Check this package with a type checker: types of every public name, and handlers with their
fields."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import mypy.api
import pytest

import fp8_backends

PACKAGE = Path(fp8_backends.__file__).parent
SURFACE = Path(__file__).with_name("public_surface.py")
EXAMPLES = sorted((PACKAGE / "examples").glob("*.py"))

CONFIG = f"""
[mypy]
mypy_path = {PACKAGE.parent}
explicit_package_bases = True
strict = True
warn_unused_ignores = False
ignore_missing_imports = True
follow_imports = silent

# nothing there may be of a type that is not known
[mypy-*.public_surface]
disallow_any_expr = True

# scripts without annotations of their own
[mypy-fp8_backends.examples.*]
disallow_untyped_defs = False
disallow_incomplete_defs = False
disallow_untyped_calls = False

# large, and not what is looked at
[mypy-transformers.*,trl.*,peft.*,datasets.*,deepspeed.*,diffusers.*]
follow_imports = skip
# parts of PyTorch that a model, an optimizer and a tensor have no types of; if one had, that program would say so
[mypy-torch._decomp.*,torch._dynamo.*,torch._export.*,torch._functorch.*,torch._higher_order_ops.*,torch._inductor.*]
follow_imports = skip
[mypy-torch._prims.*,torch._refs.*,torch._subclasses.*,torch.distributed.*,torch.export.*,torch.fx.*,torch.jit.*]
follow_imports = skip
[mypy-torch.onnx.*,sympy.*]
follow_imports = skip
"""

PREAMBLE = """\
import fp8_backends, torch
import fp8_backends.evidence.auditing, fp8_backends.preparation
model = torch.nn.Linear(32, 32)
optimizer = torch.optim.AdamW(model.parameters())
recipe = fp8_backends.resolve("msamp:O2")
"""
PLANTED = (
    'fp8_backends.FP8RecipeKwargs(backend="te", margn=1)',
    "fp8_backends.FP8RecipeKwargs(backend=2)",
    'fp8_backends.TERecipeKwargs(margin="one")',
    'fp8_backends.NativeRecipeKwargs(opt_level="O2")',
    'fp8_backends.MSAMPRecipeKwargs(shard_states="no")',
    "fp8_backends.AORecipeKwargs(module_filter_func=lambda module: True)",
    'fp8_backends.prepare(optimizer, model, "te")',
    "fp8_backends.prepare(model, optimizer, 3)",
    'fp8_backends.prepare(model, optimizer, backend="te")',
    'fp8_backends.prepare(model, None, "te")[1].step()',
    'fp8_backends.initialize(model, optimizer, "O2", use_te="yes")',
    'fp8_backends.resolve(["te"])',
    "recipe.margin.name",
    "fp8_backends.plan(2)",
    "fp8_backends.plan(recipe).bytes_per_elements",
    "fp8_backends.audit(optimizer)",
    "fp8_backends.audit(model).flop_share",
    'fp8_backends.validate("te", parallel="fsdp3")',
    "fp8_backends.validate(recipe, model)[0].severe",
    "fp8_backends.checkpoints.export(model, 3)",
    'fp8_backends.register_backend("mine", fp8_backends.evidence.auditing.Audit)',
    'fp8_backends.available_backends()["te"].can_runs',
    'fp8_backends.checkpoints.dequantize(model, "bf16")',
    "fp8_backends.convert.stored_weights.keep_weight_casts(model, kept=True)",
    "fp8_backends.checkpoints.whole_states(model)",
    "fp8_backends.checkpoints.plain_weights(optimizer)",
    "fp8_backends.restore(model).weight",
)
"""Mistakes for a type checker to find."""


def errors_of_mypy(folder: Path) -> dict[str, list[tuple[int, str]]]:
    """Return mypy's (line, message) by file name: for the program of all public names, the
    examples, and the mistakes."""
    (folder / "mypy.ini").write_text(CONFIG)
    (folder / "planted.py").write_text(PREAMBLE + "\n".join(PLANTED) + "\n")
    options = [
        "--config-file",
        str(folder / "mypy.ini"),
        "--cache-dir",
        str(folder / "cache"),
        "--no-error-summary",
    ]
    said, failure, _ = mypy.api.run(
        [*options, *map(str, (SURFACE, *EXAMPLES, folder / "planted.py"))]
    )
    assert failure == ""
    found = defaultdict(list)
    for file, line, message in re.findall(r"^(.+?):(\d+): error: (.*)$", said, re.M):
        found[Path(file).name].append((int(line), message))
    return found


@pytest.mark.nightly
def test_mypy_accepts_examples_and_finds_mistakes(tmp_path):
    """Check all in one test, since mypy reads PyTorch each time. The examples must be without
    error."""
    errors = errors_of_mypy(tmp_path)
    planted = {line for line, _ in errors.pop("planted.py")}
    assert errors == {}
    first = PREAMBLE.count("\n") + 1
    assert [text for number, text in enumerate(PLANTED, first) if number not in planted] == []
    assert min(planted) >= first


def test_typed_program_uses_every_public_name():
    tree = ast.parse(SURFACE.read_text(encoding="utf-8"))
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert set(fp8_backends.__all__) - names - attributes == set()


def test_wheel_contains_type_marker():
    """`package_data` puts the marker into a wheel."""
    settings = (PACKAGE.parent / "setup.cfg").read_text(encoding="utf-8")
    assert (PACKAGE / "py.typed").exists() and "\n    py.typed\n" in settings
