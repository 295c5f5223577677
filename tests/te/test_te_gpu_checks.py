"""Run the GPU's checks of TransformerEngine over the stand-in: they find parity, and detect
faults."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import warm_process

ROOT = Path(__file__).resolve().parents[2]

IN_ONE_PROCESS = """
import os, sys
sys.argv = ["parity.py", "--standin", "--recipe", "delayed", "--json", os.environ["OUT"] + "/parity.json"]
import parity
parity.SIZES["tiny"] = parity.SIZES["tiny"]._replace(layers=1, steps=12)
assert "no GPU here" in parity.cannot_run(standin=False) or parity.torch.cuda.is_available()
assert parity.main() == 0, "no parity"
# planted: a recipe of its own on the other side
parity.SIZES["tiny"] = parity.SIZES["tiny"]._replace(steps=4)
parity._RECIPES_MADE["delayed"].margin = 1
assert parity.main() == 1, "a difference was not seen"

sys.argv = ["golden.py", "--standin", "--out", os.environ["OUT"]]
import golden
assert golden.main() == 0, "native differs from the recorded tensors"
found = golden.record("cpu")
for key in "delayed_max.1.w blockwise.0.dy_columns dynamic.4.x delayed_recent.4.amax_history dynamic.0.dw".split():
    one = found[key].flatten()[:1]
    one.copy_(one ^ 1 if one.dtype == golden.torch.uint8 else one + 1)
    wrong = golden.differences(found)
    assert any(each.startswith(key) for each in wrong), key
    one.copy_(one ^ 1 if one.dtype == golden.torch.uint8 else one - 1)
print("all was seen")
"""


@pytest.mark.nightly
def test_parity_and_golden_tensors_pass_and_detect_faults(te_site, tmp_path):
    folders = [ROOT / "tests" / "te", ROOT / "benchmarks", ROOT]
    environment = os.environ | {"TE_SITE": str(te_site), "OUT": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, folders))
    done = warm_process.run("-c", IN_ONE_PROCESS, env=environment)
    assert done.returncode == 0 and "all was seen" in done.stdout, done.stdout + done.stderr
    assert "delayed: equal to the bit in 12 steps" in done.stdout
    assert "delayed: DIFFERENT" in done.stdout and "loss of step 2" in done.stdout
    assert (
        "13 fprop" not in done.stdout and "7 fprop, 7 dgrad, 7 wgrad" in done.stdout
    )  # 6 of one layer, and the pooler
    assert (tmp_path / "te_golden.safetensors").stat().st_size < 400_000
    assert '"kernels": "the tests\' stand-in on a CPU"' in (tmp_path / "parity.json").read_text()
