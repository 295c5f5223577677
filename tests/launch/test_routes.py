"""Launch a script on every route, with backends of each kind: check its recipe and its training."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import warm_process

import fp8_backends
from fp8_backends.compute.registry import get_compute

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent
SCRIPT = str(HERE / "trained.py")

SINGLE = (
    "fp8-backends launch --cpu",
    "fp8-backends launch --config_file",
    "accelerate launch",
)
RANKS = {
    "fp8-backends launch --use_fsdp": ("FSDP2", 2),
    "fp8-backends launch --use_deepspeed": ("DeepSpeed", 2),
    "fp8-backends launch --deepspeed_config_file": ("DeepSpeed", 2),
    "accelerate launch, DEEPSPEED": ("DeepSpeed", 2),
}
"""Routes to process groups: the wrapper of the model, and the number of ranks."""
ALONE = ("alone", 1)
KINDS = {
    "alone": ["Sequential"],
    "FSDP2": ["FSDPSequential"],
    "DeepSpeed": ["DeepSpeedEngine"],
}


@pytest.mark.nightly
@pytest.mark.parametrize("routes", [SINGLE, tuple(RANKS)], ids=["one process", "process groups"])
def test_backends_train_on_every_launch_route(routes, subtests, tmp_path):
    paths = f"{REPOSITORY}{os.pathsep}{HERE}"
    environment = {
        **os.environ,
        "PYTHONPATH": paths,
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONWARNINGS": "ignore",
    }
    done = warm_process.run(str(HERE / "routes.py"), str(tmp_path), *routes, env=environment)
    assert done.returncode == 0, done.stderr
    outcomes = [
        json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"route"')
    ]
    assert {outcome["route"] for outcome in outcomes} == set(routes)
    found = {
        route: {outcome["backend"] for outcome in outcomes if outcome["route"] == route}
        for route in routes
    }
    assert len(outcomes) == sum(map(len, found.values()))
    assert all(len(found[route]) >= 5 for route in routes)
    for outcome in outcomes:
        with subtests.test(f"{outcome['route']} {outcome['backend']}"):
            check(**outcome)


def check(route: str, backend: str, ranks: list[dict], asked: int, printed: str) -> None:
    """Compare `ranks`, the files of all ranks, with `asked`, the requested number."""
    recipe = fp8_backends.resolve(backend)
    if recipe.compute == "te" and route.startswith("fp8-backends launch"):
        # before any process starts
        assert (ranks, asked) == ([], 0) and refused(route, backend) in printed
        return
    assert len(ranks) == asked == RANKS.get(route, ALONE)[1], printed
    for rank in ranks:
        if refusal := refused(route, backend):
            assert refusal in rank["error"], rank["error"]
            continue
        assert "error" not in rank, rank["error"]
        if "deepspeed" in route.lower() and recipe.level != "O0":
            recipe = recipe.replace(shard_states=True)  # as ZeRO-1 and 2 do
        assert rank["recipe"] == json.loads(json.dumps(recipe.to_dict()))
        assert len(rank["products"]) == 2
        in_fp8 = {"fprop", "dgrad", "wgrad"} - set(
            get_compute(recipe.compute).high_precision_products(recipe)
        )
        # the first one's input needs no gradient
        for layer, counts in list(rank["products"].items())[1:]:
            assert all(counts[kind] > 0 for kind in in_fp8), (layer, counts)
        assert all(counts["fprop"] > 0 for counts in rank["products"].values())
        assert rank["losses"][0] > rank["losses"][1] > rank["losses"][2]
        check_surroundings(route, rank)
    assert sorted(rank["rank"] for rank in ranks) == list(range(asked))


def refused(route: str, backend: str) -> str | None:
    """Return the expected refusal."""
    recipe = fp8_backends.resolve(backend)
    if recipe.compute == "te":
        return f"{recipe.name} cannot run here: TransformerEngine is not installed"
    return None


def check_surroundings(route: str, rank: dict) -> None:
    """The script finds itself as Python would have started it."""
    assert rank["main"] == ["__main__", SCRIPT]
    assert rank["folder"] == str(HERE)
    kind, count = RANKS.get(route, ALONE)
    assert rank["ranks"] == count and rank["kind"] in KINDS[kind]
    if route.startswith("fp8-backends launch"):
        assert rank["left"] == []
    if route == "fp8-backends launch --cpu":
        assert rank["argv"][0] == SCRIPT and rank["argv"][2:] == ["--fp8_backend", "its own"]
