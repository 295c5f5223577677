"""Launch each kind of backend on the routes that `test_launch_for_real.py` cannot take on a CPU, or
takes with one backend, for `test_routes.py`.

    python routes.py FOLDER [ROUTE …]

Prints one line of JSON for each route and backend: the files of all ranks.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import forked_workers
from intercepted import Started, free_port, ours, stocks, yaml_file

HERE = Path(__file__).parent
SCRIPT = str(HERE / "trained.py")

EACH_KIND = ("native:delayed", "ao:tensorwise", "msamp:O4", "native:delayed+msamp:O3", "te:delayed")
"""Routes treat all names alike."""


# The routes: (backend, output, folder) -> the started command


def launch_cpu(backend: str, output: str, folder: Path) -> Started:
    return ours("--cpu", "--fp8_backend", backend, SCRIPT, output, "--fp8_backend", "its own")


def launch_yaml(backend: str, output: str, folder: Path) -> Started:
    file = yaml_file(folder, mixed_precision="fp8", fp8_config={"backend": backend})
    return ours("--config_file", file, SCRIPT, output)


def launch_deepspeed(backend: str, output: str, folder: Path) -> Started:
    ranks = ("--use_deepspeed", "--num_processes", "2", "--main_process_port", free_port())
    return ours(*ranks, "--fp8_backend", backend, SCRIPT, output)


def deepspeed_file(folder: Path) -> str:
    file = folder / "deepspeed.json"
    file.write_text(
        json.dumps({"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": 16})
    )
    return str(file)


def launch_deepspeed_file(backend: str, output: str, folder: Path) -> Started:
    ranks = ("--use_deepspeed", "--num_processes", "2", "--main_process_port", free_port())
    return ours(
        *ranks,
        "--deepspeed_config_file",
        deepspeed_file(folder),
        "--fp8_backend",
        backend,
        SCRIPT,
        output,
    )


def accelerate_launch_deepspeed(backend: str, output: str, folder: Path) -> Started:
    engine = {"distributed_type": "DEEPSPEED", "use_cpu": False, "num_processes": 2}
    engine["deepspeed_config"] = {"deepspeed_config_file": deepspeed_file(folder)}
    file = yaml_file(folder, fp8_config={"backend": backend}, **engine)
    precision = ("--mixed_precision", "fp8")  # refused beside that file if the YAML says it
    return stocks(
        "--config_file",
        file,
        *precision,
        "--main_process_port",
        free_port(),
        SCRIPT,
        output,
        "--import",
    )


def launch_fsdp2(backend: str, output: str, folder: Path) -> Started:
    ranks = ("--use_fsdp", "--num_processes", "2", "--main_process_port", free_port())
    fsdp = (
        "--fsdp_version",
        "2",
        "--fsdp_auto_wrap_policy",
        "NO_WRAP",
    )
    return ours(*ranks, *fsdp, "--fp8_backend", backend, SCRIPT, output)


def accelerate_launch(backend: str, output: str, folder: Path) -> Started:
    file = yaml_file(folder, mixed_precision="fp8", fp8_config={"backend": backend})
    return stocks("--config_file", file, SCRIPT, output, "--import")


ROUTES: dict[str, Callable[[str, str, Path], Started]] = {
    "fp8-backends launch --cpu": launch_cpu,
    "fp8-backends launch --config_file": launch_yaml,
    "accelerate launch": accelerate_launch,
    "fp8-backends launch --use_fsdp": launch_fsdp2,
    "fp8-backends launch --use_deepspeed": launch_deepspeed,
    "fp8-backends launch --deepspeed_config_file": launch_deepspeed_file,
    "accelerate launch, DEEPSPEED": accelerate_launch_deepspeed,
}


def backends_of(route: str) -> tuple[str, ...]:
    return (*EACH_KIND, "msamp:O2") if "deepspeed" in route.lower() else EACH_KIND


def main(folder: str, *routes: str) -> None:
    os.chdir(HERE)
    forked_workers.prepare(
        Path(folder), deepspeed=any("deepspeed" in route.lower() for route in routes)
    )
    output = str(Path(folder) / "output")
    for route in routes or ROUTES:
        for backend in backends_of(route):
            try:
                result = forked_workers.outcome(
                    ROUTES[route](backend, output, Path(folder)), output
                )
            except BaseException:
                result = {"ranks": [], "asked": 0, "printed": traceback.format_exc()}
            print(json.dumps({"route": route, "backend": backend, **result}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
